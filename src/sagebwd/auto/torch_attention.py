"""A call in full precision, where "auto" hands it over: what torch takes, and the call by one of the contenders.

Torch's function is called itself, so that its autograd and autocast are its own. It has no windows, and its causal
mask is not the same on all backends where lengths differ. There it gets fewer keys, or a mask of elements. A backend
that the model prefers comes first in torch's order: where it does not take the call torch runs the next one.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from subprocess import SubprocessError
from threading import RLock
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.auto import operands, peers
from sagebwd.auto.contenders import CUDNN, EFFICIENT, FLASH, NAMES, PEERS, handed_over
from sagebwd.counts import TORCH, counts
from sagebwd.kernels.runtime.device import device_of
from sagebwd.masks.band import Band
from sagebwd.masks.kinds import CAUSAL, FULL, WINDOW
from sagebwd.numerics import rounded_up
from sagebwd.tracing import assume_constant

# F.scaled_dot_product_attention itself: what `sagebwd.replace_sdpa` puts in its place would come back here.
_sdpa = torch._C._nn.scaled_dot_product_attention
# Elements of a mask that is made for a call: 2048 queries and keys.
MOST_ELEMENTS = 1 << 22
# Elements at whose multiples rows of a bias begin, and how many times its own it may take.
_ALIGNED, _MOST_ROOM = 16, 4
# torch.nn.attention.SDPBackend's, without its import.
BACKENDS = {
    CUDNN: torch._C._SDPBackend.CUDNN_ATTENTION, FLASH: torch._C._SDPBackend.FLASH_ATTENTION,
    EFFICIENT: torch._C._SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip
# Of torch's order of backends, which is the process's.
_order = RLock()
# What a machine raises, whatever the call; of CUDA's errors some are a RuntimeError of these words.
_OF_THE_MACHINE = OSError, MemoryError, SubprocessError, torch.AcceleratorError
_CUDA_ERROR = re.compile(r"out of memory|cuda[ _]?error|cuda[ _]driver error", re.IGNORECASE)
# Activation checkpointing ends a recomputation by an exception of this module, where the peer saves its tensors.
_RECOMPUTES = "torch.utils.checkpoint"
# The widest of torch's packed attention, whose kernels take multiples of 8.
_PACKED_WIDTH, _PACKED_STEP = 256, 8


class Way(NamedTuple):
    """How torch takes a call beside its tensors.

    keys: how many of them count, None for all. band: what a mask has to be made for, of so many ``elements``; None
    for nothing. longest, window: of packed sequences, as of `sagebwd.sage_attention_varlen`.
    """

    kind: str
    dropout_p: float = 0
    is_causal: bool = False
    keys: int | None = None
    band: Band | None = None
    elements: int = 0
    longest: tuple[int, int] | None = None
    window: tuple[int, int] = (-1, -1)


def way_of(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, window: tuple[int, int], masked_as: str | None,
    dropout_p: float,
) -> Way | None:  # fmt: skip
    """How torch takes a dense call; mask in four dimensions, of the kind ``masked_as``, None where there is none.

    None where a query sees no key by position alone: torch does not say what that gives.
    """
    dropout_p = dropout_p and float(dropout_p)  # torch takes no other number
    tokens_q, tokens_k = query.shape[2], key.shape[2]
    left, right = window
    left = -1 if left >= tokens_q - 1 else left
    right = -1 if right >= tokens_k - 1 or is_causal else right
    if right == 0:
        is_causal, right = True, -1
    band = Band.of(is_causal, left, right)
    if band.lower is None and band.upper is None:
        return Way(masked_as or FULL, dropout_p)
    if band.lower is not None and tokens_q - left > tokens_k:
        return None
    causal = mask is None and band.lower is None and band.upper == 0
    if causal and tokens_q <= tokens_k:
        return Way(CAUSAL, dropout_p, True, None if tokens_q == tokens_k else tokens_q)
    elements = tokens_q * tokens_k * (1 if mask is None else mask.shape[0] * mask.shape[1])
    return Way(masked_as or (CAUSAL if causal else WINDOW), dropout_p, band=band, elements=elements)


def run(way: Way, scale: float, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor | None) -> Tensor:
    """The output; rest: mask (batch or 1, heads or 1, tokens or 1, kv_tokens or 1), boolean or additive, and offsets
    of packed sequences."""
    factor, scale = operands.over_zero(scale)
    by_torch = _by_torch(way, query.shape[1] != key.shape[1], scale)
    return operands.traced(by_torch, query, key, value, *rest, factor=factor)


def _by_torch(way: Way, grouped: bool, scale: float, bias: BandBias | None = None) -> Callable[..., Tensor]:
    """`run` of (query, key, value, ...); grouped: of fewer key than query heads; bias: of way's band."""
    if way.longest is not None:
        return _packed(way, scale)
    keys, band, dropout_p = way.keys, way.band if bias is None else None, way.dropout_p
    options = {"is_causal": way.is_causal, "scale": scale}
    if grouped:
        options["enable_gqa"] = True  # in a trace a symbol is no flag

    def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *_: None) -> Tensor:
        if keys is not None:
            key, value = key[:, :, :keys], value[:, :, :keys]
        if bias is not None:
            return _sdpa(query, key, value, bias.made(query), dropout_p, **options)
        if band is not None:
            mask = _banded(band, query, key, mask)
        if mask is not None and mask.dtype != torch.bool:
            mask = operands.mask_in_place(_rounded(mask, query.dtype), key.shape[2])
        elif mask is not None and mask.shape[-1] == 1:  # of others torch makes a bias in place
            mask = operands.mask_in_place(mask, key.shape[2])
        if mask is not None and mask.requires_grad and not any(x.requires_grad for x in (query, key, value)):
            query = query + mask[..., :0].sum()  # or torch keeps nothing for a gradient of the mask alone (148476)
        return _sdpa(query, key, value, mask, dropout_p, **options)

    return run


def _rounded(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias in a dtype that may have fewer digits, of which each query's largest keys get most.

    Their largest is taken off first, which changes no weight.
    """
    if torch.promote_types(bias.dtype, dtype) != dtype and bias.shape[-1] > 0:
        bias = bias - bias.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(bias.dtype).min)
    return bias.to(dtype)


class BandBias(NamedTuple):
    """A band as the bias that torch adds to the scores, 0 or -inf, and how it lies in memory, in elements.

    Equal rows of ``stride + 1`` elements are read as rows of ``stride``: each begins one element earlier in what
    repeats, so the band moves on by one key from query to query. That takes two launches, a boolean mask five.
    ``first`` and ``stride`` are multiples of `_ALIGNED`, as torch's kernels read a bias without a copy.

    shape: (tokens, kv_tokens). first: where query 0 and key 0 meet. seen: where the elements of a row begin that are
    0, and how many there are.
    """

    shape: tuple[int, int]
    stride: int
    first: int
    seen: tuple[int, int]

    @classmethod
    def of(cls, band: Band, queries: int, keys: int) -> BandBias | None:
        """Of a band with lower <= 0 <= upper; None where it takes more than `_MOST_ROOM` times its elements."""
        lower = 1 - queries if band.lower is None else max(band.lower, 1 - queries)
        upper = keys - 1 if band.upper is None else min(band.upper, keys - 1)
        first = rounded_up(-lower, _ALIGNED)
        # the last key of query 0 is in the same row; key 0 of the last query is behind the zeros of the row before
        stride = rounded_up(max(first + keys, queries + upper), _ALIGNED)
        if stride > _MOST_ROOM * keys:
            return None
        return cls((queries, keys), stride, first, (first + lower, upper - lower + 1))

    def made(self, query: Tensor) -> Tensor:
        """(tokens, kv_tokens) in query's dtype."""
        (queries, _), stride, first, (start, width) = self
        bias = query.new_full((queries, stride + 1), float("-inf"))
        bias.as_strided((queries, width), (stride + 1, 1), start).zero_()
        return bias.as_strided(self.shape, (stride, 1), first)


def _banded(band: Band, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """A band as a mask, with what another hides."""
    visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    if band.upper is not None:
        visible.tril_(band.upper)
    if band.lower is not None:
        visible.triu_(band.lower)
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, float("-inf"))


def settled(
    contender: str, way: Way, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float,
    instead: Callable[..., Tensor] | None,
) -> Callable[..., Tensor]:  # fmt: skip
    """`run` of (query, key, value, mask, ...) by a contender, for calls equal to one in all but what tensors hold.

    instead: of the same, who runs what a peer refuses; None for torch. A window's mask is made in each call: one that
    was kept could be freed under a CUDA graph that reads it.
    """
    grouped = query.shape[1] != key.shape[1]
    has_bias = way.band is not None and mask is None
    factor, scale = operands.over_zero(scale)
    bias = BandBias.of(way.band, query.shape[2], key.shape[2]) if has_bias else None
    by_torch = _by_torch(way, grouped, scale, bias)
    if contender in BACKENDS:
        with suppress(RuntimeError):  # of no backend at all, which the call itself says
            # a first choice sets the order that this GPU has, which a call with another order would undo
            torch._fused_sdp_choice(query, key, value, enable_gqa=grouped)
        by_torch = partial(preferring, int(BACKENDS[contender]), by_torch)
    by_torch = operands.placed(by_torch, query, value, factor)
    if contender not in PEERS:
        return by_torch
    if way.longest is not None:
        theirs = peers.packed(contender, way.longest, way.is_causal, way.window, scale)
    else:
        band = way.band or Band()
        window = -1 if band.lower is None else -band.lower, -1 if band.upper is None else band.upper
        theirs = peers.dense(contender, way.is_causal or band.upper == 0, window, way.keys, scale)
    return _unless_refused(contender, operands.placed(theirs, query, value, factor), instead, by_torch)


def preferring(backend: int, run: Callable[..., Tensor], *given: Tensor | None) -> Tensor:
    """A call with a backend first in torch's order, which is as it was when it returns."""
    with _order:
        order = torch._C._get_sdp_priority_order()
        if order[0] == backend:
            return run(*given)
        torch._C._set_sdp_priority_order([backend, *(x for x in order if x != backend)])
        try:
            return run(*given)
        finally:
            torch._C._set_sdp_priority_order(order)


def _unless_refused(
    peer: str, theirs: Callable[..., Tensor], instead: Callable[..., Tensor] | None, by_torch: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """A peer's call; ``instead``'s or torch's, with a warning, where the peer raises an error.

    A refusal is the peer's answer to the call's specification and strides, and is kept for calls equal to it. An
    error of the machine (`_is_of_the_machine`) counts for the one call: the next asks the peer again. Out of memory is
    raised, and so is the exception by which activation checkpointing ends a recomputation.
    """
    refused: set[tuple[tuple[int, ...], ...]] = set()

    def others(*given: Tensor | None) -> Tensor:
        counts[handed_over(peer)] -= 1  # which the plan has counted
        if instead is not None:  # a call that counts itself
            return instead(*given)
        counts[TORCH] += 1
        return by_torch(*given)

    def run(*given: Tensor | None) -> Tensor:
        q, k, v = given[:3]
        known = refused and (q.stride(), k.stride(), v.stride()) in refused
        if known or _stands_for_others(q) or _stands_for_others(k) or _stands_for_others(v):
            return others(*given)
        try:
            with device_of(given[0]):
                return theirs(*given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler of another project raises what it likes
            if type(error).__module__ == _RECOMPUTES:
                raise
            what = "run this call, so others do; the next one asks it again"
            if not _is_of_the_machine(error):
                refused.add((q.stride(), k.stride(), v.stride()))
                what = "take a call that recipe='auto' chose it for, so others run such calls"
            warnings.warn(f"sagebwd: {NAMES[peer]} does not {what}: {type(error).__name__}: {error}", stacklevel=4)
            return others(*given)

    return run


def _stands_for_others(x: Tensor) -> bool:
    """Whether a tensor's memory is not its numbers: torch's functions know of a sign or zeros that it keeps apart."""
    return x.is_neg() or x._is_zerotensor()


def _is_of_the_machine(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, may not come again: of memory, files, processes or CUDA."""
    while error is not None:
        name = type(error).__name__  # DSLCudaRuntimeError is of CuTe DSL, which need not be there
        if isinstance(error, _OF_THE_MACHINE) or "Cuda" in name or _CUDA_ERROR.search(str(error)):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


@assume_constant
def takes_packed(head_dim: int, value_dim: int, grouped: bool) -> bool:
    """Whether this torch has an attention over packed sequences that takes such a call on a GPU."""
    widths = head_dim == value_dim <= _PACKED_WIDTH and head_dim % _PACKED_STEP == 0
    return widths and {"scale", "window_size"} | ({"enable_gqa"} if grouped else set()) <= _packed_arguments()


@cache
def _packed_arguments() -> frozenset[str]:
    """What `varlen_attn` of this torch takes: it is new, and gained arguments from version to version."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def _packed(way: Way, scale: float) -> Callable[..., Tensor]:
    """`run` of (query, key, value, None, cu_seqlens_q, cu_seqlens_k); torch aligns bands bottom right, as we do."""
    from torch.nn.attention.varlen import varlen_attn

    seen = way.window[0], 0 if way.is_causal else way.window[1]

    def run(query: Tensor, key: Tensor, value: Tensor, _: None, *offsets: Tensor) -> Tensor:
        grouped = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
        return varlen_attn(query, key, value, *offsets, *way.longest, scale=scale, window_size=seen, **grouped)

    return run
