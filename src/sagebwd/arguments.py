"""Arguments of the public functions, dense and packed: checked, in one form, and what decides who runs the call."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sagebwd import checks, switches
from sagebwd.auto import choice as auto_choice
from sagebwd.auto import torch_attention
from sagebwd.auto.model import Size
from sagebwd.auto.torch_attention import Way
from sagebwd.call import Ask, Call
from sagebwd.dispatch import Choice, check_known
from sagebwd.masks.kinds import FULL, MASK, PACKED, PADDING, WINDOW
from sagebwd.masks.mask import Mask
from sagebwd.planning import mask_argument
from sagebwd.recipe import AUTO, Recipe
from sagebwd.tracing import is_known

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def choice_of(
    attention: Callable, *given: object, card: str | None = None, **options: object
) -> tuple[Choice, Arguments]:  # fmt: skip
    """Who runs a call of ``attention``, `sage_attention` or `sage_attention_varlen`, and what decides it.

    Raises as that. card: as of `sagebwd.auto.choice.choose`, in place of that of the tensors.
    """
    bound = inspect.signature(attention).bind(*given, **options)
    bound.apply_defaults()
    call = bound.arguments
    if "cu_seqlens_q" in call:
        checked = packed_arguments_of(**call, card=card)
    else:
        checks.kind(*(call[name] for name in ("query", "key", "value", "sinks")))
        names = "query", "key", "value", "attn_mask"
        four = in_four_dimensions(*(call[name] for name in (*names, "enable_gqa")))
        call = call if four is None else call | dict(zip(names, four[3:]))
        checked = arguments_of(**call, card=card)
        fewer = within_reach(checked, *(call[name] for name in ("key", "value", "attn_mask", "block_mask")))
        if fewer is not None and checked.choice(card).contender is None:
            checked = arguments_of(**call | dict(zip(("key", "value", "attn_mask"), fewer)), card=card)
    if card is not None:
        checked = checked._replace(ask=checked.ask._replace(device=torch.device("cuda")))
    return checked.choice(card), checked


class Arguments(NamedTuple):
    """A call that was checked: tensors in autocast's dtype, numbers, and what decides who runs it.

    elements: of attn_mask in four dimensions. offsets: of packed sequences. lengths: tokens of the longest sequence,
    queries and keys. way: how torch takes it; size: its size, where others may run it. max_logits: whether
    the heads' largest logits are wanted.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    elements: Tensor | None
    offsets: tuple[Tensor | None, Tensor | None]
    lengths: tuple[int, int]
    is_causal: bool
    scale: float
    window: tuple[int, int]
    ask: Ask
    size: Size | None
    way: Way | None
    max_logits: bool

    def choice(self, card: str | None = None) -> Choice:
        """Who runs the call by a plan: peers and backends too, unless gradients have to repeat, as theirs need not.

        card: as of `sagebwd.auto.choice.choose`.
        """
        planned = not torch.are_deterministic_algorithms_enabled()
        return auto_choice.choose(self.ask, self.size, card, planned)

    def call(self, recipe: Recipe) -> Call:
        """As kernels are given it."""
        dims, deterministic = (self.query.shape[-1], self.value.shape[-1]), switches.current.deterministic
        settings = *self.lengths, self.is_causal, *self.window, self.scale, recipe, deterministic
        call = Call.of(self.query, self.key, dims, None, *self.offsets, *settings)
        return call._replace(max_logits=self.max_logits)


def arguments_of(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool, block_mask: BlockMask | Mask | None, window: tuple[int, int] | None,
    sinks: Tensor | None, recipe: str | Recipe, impl: str | None, return_lse: bool, return_max_logits: bool,
    card: str | None = None,
) -> Arguments:  # fmt: skip
    """A call of `sage_attention` in four dimensions; raises as that. card: as of `autocast`."""
    checks.options(impl, enable_gqa=enable_gqa, return_lse=return_lse, return_max_logits=return_max_logits)
    query, key, value = autocast(query, key, value, card=card)
    checks.shapes(query, key, value, 4, "(batch, heads, tokens, head_dim)")
    if key.shape[0] != query.shape[0]:
        raise ValueError(f"key: batch {key.shape[0]} differs from query's {query.shape[0]}; they must be equal")
    checks.heads(query.shape[1], key.shape[1], enable_gqa)
    checks.sinks(sinks, query)
    scale, window = checks.numbers(is_causal, _default_scale(query) if scale is None else scale, window)
    elements = mask_argument.elements_of(attn_mask, query, key)
    masked_as = None if elements is None else PADDING if mask_argument.is_key_padding(elements) else MASK
    ask = ask_of(query, value, recipe, impl)
    only_torch = checks.only_torch(query, value, elements, dropout_p)
    ask = ask._replace(training=_trains(query, key, value, elements, sinks), only_torch=only_torch)
    way = size = None
    more = return_lse or return_max_logits or sinks is not None
    if block_mask is None and _may_hand_over(ask, query, key, more):
        way = torch_attention.way_of(query, key, elements, is_causal, window, masked_as, dropout_p)
    if way is not None:
        by_torch = only_torch is not None or way.elements <= torch_attention.MOST_ELEMENTS
        (batch, heads, tokens, _), (_, kv_heads, kv_tokens, _) = query.shape, key.shape
        ask = ask._replace(kind=way.kind)
        size = Size(tokens, kv_tokens, batch * heads, batch * kv_heads, _width(way, kv_tokens), by_torch)
    elif only_torch is not None:
        if _is_automatic(ask):
            of_ours = {"sinks": sinks, "return_lse": return_lse, "return_max_logits": return_max_logits}
            checks.refuse_beside(only_torch, block_mask=block_mask, **of_ours)
        checks.refuse_only_torch(query, value, elements, dropout_p)
    lengths = query.shape[2], key.shape[2]
    settings = lengths, is_causal, scale, window, ask, size, way, return_max_logits
    return Arguments(query, key, value, elements, (None, None), *settings)


def within_reach(
    checked: Arguments, key: Tensor, value: Tensor, attn_mask: Tensor | None, block_mask: BlockMask | Mask | None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """key, value and attn_mask of the keys that some query sees by its position; None where that is all of them.

    The others must not count in K's mean and V's scales. A block_mask is made for all keys, and keeps them.
    """
    (queries, keys), right = checked.lengths, 0 if checked.is_causal else checked.window[1]
    if block_mask is not None or right < 0 or not is_known(queries + right < keys):
        return None
    seen = queries + right
    if attn_mask is not None and attn_mask.shape[-1] > 1:
        attn_mask = attn_mask[..., :seen]
    return key[:, :, :seen], value[:, :, :seen], attn_mask


def packed_arguments_of(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, is_causal: bool, scale: float | None, window: tuple[int, int] | None, sinks: Tensor | None,
    recipe: str | Recipe, impl: str | None, return_lse: bool, return_max_logits: bool, card: str | None = None,
) -> Arguments:  # fmt: skip
    """A call of `sage_attention_varlen`; raises as that. card: where one is named, tensors count as on a GPU."""
    checks.options(impl, return_lse=return_lse, return_max_logits=return_max_logits)
    checks.kind(query, key, value, sinks)
    query, key, value = autocast(query, key, value, card=card)
    checks.shapes(query, key, value, 3, "(total_tokens, heads, head_dim)")
    checks.heads(query.shape[1], key.shape[1], enable_gqa=True)
    checks.sinks(sinks, query)
    offsets = cu_seqlens_q, cu_seqlens_k
    lengths = checks.packing(*offsets, (max_seqlen_q, max_seqlen_k), query.device)
    scale, window = checks.numbers(is_causal, _default_scale(query) if scale is None else scale, window)
    ask = ask_of(query, value, recipe, impl, PACKED)._replace(training=_trains(query, key, value, sinks))
    checks.refuse_only_torch(query, value, None, 0, checks.BY_SEQUENCE)
    size, count = None, offsets[0].shape[0] - 1
    way = Way(PACKED, is_causal=is_causal, longest=lengths, window=window)
    more = return_lse or return_max_logits or sinks is not None
    if (query.is_cuda or card is not None) and _may_hand_over(ask, query, key, more):
        grouped = False
        if query.shape[1] != key.shape[1]:  # in a trace a symbol is no flag
            grouped = True
        by_torch = torch_attention.takes_packed(ask.head_dim, ask.value_dim, grouped)
        heads = count * query.shape[1], count * key.shape[1]
        means = [-(-x.shape[0] // count) for x in (query, key)]  # at least 1, where most sequences have no token
        longest = lengths[1] if is_known(lengths[1] >= means[1]) else 0
        size = Size(*means, *heads, by_torch=by_torch, longest=longest)
    settings = lengths, is_causal, scale, window, ask, size, way, return_max_logits
    return Arguments(query, key, value, None, offsets, *settings)


def _width(way: Way, kv_tokens: int) -> int:
    """Keys that a window has for a query, at most."""
    if way.kind != WINDOW or way.band.lower is None or way.band.upper is None:
        return kv_tokens
    return way.band.upper - way.band.lower + 1


def _is_automatic(ask: Ask) -> bool:
    """Whether neither a recipe nor an implementation is named."""
    return ask.recipe == AUTO and ask.impl is None


def _may_hand_over(ask: Ask, query: Tensor, key: Tensor, more: bool) -> bool:
    """Whether torch or a peer may run a call of "auto": one of some tokens, or of none if only torch takes it.

    Not one of ``more`` than an output without sinks, nor under the switch ``deterministic``, a promise that torch's
    kernels do not give.
    """
    if more or not _is_automatic(ask) or switches.current.deterministic:
        return False
    return ask.only_torch is not None or not (is_known(query.numel() == 0) or is_known(key.numel() == 0))


def _trains(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def ask_of(query: Tensor, value: Tensor, recipe: str | Recipe, impl: str | None, kind: str = FULL) -> Ask:
    """What `sagebwd.auto.choice.choose` is asked for a call on tensors, or on what has their shape, dtype and device.

    recipe, impl: as the public functions take them. kind: of mask (`sagebwd.masks.kinds`).
    """
    check_known(impl)
    dims = operator.index(query.shape[-1]), operator.index(value.shape[-1])
    return Ask(_switched(recipe), *dims, query.dtype, query.device, kind, impl)


def _switched(recipe: str | Recipe) -> str | Recipe:
    """The recipe that runs where one or "auto" is asked for, as `sagebwd.switches` are."""
    recipe = Recipe.parse_or_auto(recipe)
    if recipe == AUTO:
        if not (switches.current.disabled or switches.current.backward_16bit):
            return AUTO
        recipe = Recipe.named("token")
    return switches.apply_to(recipe)


def _default_scale(query: Tensor) -> float:
    """1 / sqrt(head_dim), of a head_dim that a trace with ``dynamic=True`` takes as a constant, as kernels do."""
    return operator.index(query.shape[-1]) ** -0.5


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast casts to on a device; None where it is off or the device has none (meta)."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def autocast(*tensors: Tensor, card: str | None = None) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype, where autocast is on: rotary embeddings and norms leave q and k in FP32.

    card: where one is named, CUDA's autocast counts, or the CPU's: without a GPU torch leaves CUDA's off.
    """
    if card is None:
        dtype = autocast_dtype(tensors[0].device)
    else:
        dtype = autocast_dtype(torch.device("cuda")) or autocast_dtype(torch.device("cpu"))
    if dtype is None:
        return tensors
    castable = (torch.bfloat16, torch.float16, torch.float32)
    return tuple(tensor.to(dtype) if tensor.dtype in castable else tensor for tensor in tensors)


def in_four_dimensions(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor | None, ...] | None:
    """query, key and value with equal dimensions, then these and attn_mask with four; None where they have four."""
    dims = {query.dim(), key.dim(), value.dim()}
    if dims == {4} or min(dims) < 2 or (len(dims) > 1 and enable_gqa):
        return None
    equal = _of_equal_dimensions(query, key, value)
    if isinstance(attn_mask, Tensor):
        attn_mask = mask_argument.in_four_dimensions(attn_mask, equal[0], enable_gqa)
    return *equal, *(_four_dimensions(x, enable_gqa) for x in equal), attn_mask


def _of_equal_dimensions(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with what is before tokens broadcast, where one has fewer dimensions."""
    if len({x.dim() for x in tensors}) == 1:
        return tensors
    try:
        before = torch.broadcast_shapes(*(x.shape[:-2] for x in tensors))
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ValueError(f"query, key, value: shapes {shapes} do not broadcast before tokens") from error
    return tuple(x.expand(*before, *x.shape[-2:]) for x in tensors)


def _four_dimensions(x: Tensor, enable_gqa: bool) -> Tensor:
    if x.dim() > 4:
        return x.flatten(0, -4)
    if x.dim() == 3 and not enable_gqa:
        return x.unsqueeze(1)
    return x[(None,) * (4 - x.dim())]
