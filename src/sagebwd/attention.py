"""The public functions: argument checks, choice of implementation, and the call of the operator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sagebwd import checks, dispatch, ops, switches
from sagebwd import sinks as epilogue
from sagebwd.arguments import (
    Arguments,
    arguments_of,
    autocast,
    in_four_dimensions,
    packed_arguments_of,
    within_reach,
)
from sagebwd.auto import choice as auto_choice
from sagebwd.auto import torch_attention
from sagebwd.auto.contenders import CUDNN, PEERS, handed_over
from sagebwd.cache import PLANS
from sagebwd.call import Prologue
from sagebwd.counts import answer, counts
from sagebwd.dtensor import shares_of
from sagebwd.kernels.masks.traced_block_mask import TracedBlockMask
from sagebwd.kernels.runtime.device import device_of
from sagebwd.masks.mask import Mask
from sagebwd.planning import mask_argument
from sagebwd.planning.autograd import SageAttention
from sagebwd.planning.plan import Plan, SdpaCall
from sagebwd.planning.specification import kind_of, laid_out
from sagebwd.recipe import AUTO, Recipe

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def sage_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0,  # 0.0 would be a symbol in a trace with dynamic=True, which is then made twice
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    block_mask: BlockMask | Mask | None = None,
    window: tuple[int, int] | None = None,
    sinks: Tensor | None = None,
    recipe: str | Recipe = AUTO,
    impl: str | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Attention with trainable INT8 products, in place of ``torch.nn.functional.scaled_dot_product_attention``.

    Computes softmax(scale Q K^T) V and its gradients by the recipe (arXiv 2603.02170). Relative L2 errors of O, dQ, dK
    and dV are 0.011, 0.040, 0.039 and 0.040 under "mixed" on Gaussian inputs of standard deviation 1, and 0.014,
    0.021, 0.017 and 0.017 under "token"; they grow with the scores (docs/results/accuracy.md).

    Args:
        query: (batch, heads, tokens, head_dim), bf16 or fp16; fp32 under autocast, on a CPU or with
            ``impl="reference"``. head_dim up to 512, under "auto" any. Any strides; kernels copy a view whose last one
            is not 1 or that begins at no multiple of 16 bytes. Any number of dimensions before tokens; of three the
            first is heads with ``enable_gqa``, else batch. Fewer than key's are broadcast, or the reverse. Of DTensors
            with equal placements, of batch or heads, each process attends to its own, and outputs are such.
        key, value: (batch, kv_heads, kv_tokens, head_dim), of query's dtype and device. value's head_dim may differ:
            where kernels lack the pair both are filled with zeros up to one that they have, which changes no number
            and costs as much as that.
        attn_mask: (batch or 1, heads or 1, tokens or 1, kv_tokens or 1), or fewer of the last dimensions: boolean,
            True where a query sees a key, or floating point, added to the scaled scores; a number of at most -1.6e38,
            of fp16 -32752, hides as -inf does. ``is_causal`` and ``window`` hold beside it. Keys that no query sees
            do not count at all, NaN in them neither; of the others K's mean and V's scales are taken over all.
        dropout_p: 0, under "auto" any probability.
        is_causal: query i sees keys up to i (aligned top left, also where the lengths differ).
        scale: softmax scale; 1 / sqrt(head_dim) by default.
        enable_gqa: allow fewer key than query heads; query head h reads key head h // (heads // kv_heads).
        block_mask: a BlockMask of ``torch.nn.attention.flex_attention``, or what `sagebwd.read_block_mask` made of it;
            attn_mask may be boolean key padding beside it.
        window: (left, right) in tokens, -1 for no limit: query i sees keys i - left to i + right.
        sinks: (heads,), floating point of any dtype: a logit of each query head that stands beside the scaled scores
            of every query, whose value is zero, as gpt-oss has. The weights of the keys then sum to less than 1, and
            lse counts the sink. Differentiable. Torch's own attention has none, so "auto" runs kernels.
        recipe: a name (of `sagebwd.RECIPES`: "mixed", "token", "paper", "full"), a text such as
            "token(smooth_v=False)", or a Recipe: these fix the numbers on every device. "auto" without an ``impl``
            hands the call over in full precision, to torch's own attention or FlashAttention-4 or -3 where they are
            installed, where timings of this card do not show low precision to be faster, where torch alone takes it,
            and on a CPU (docs/auto.md); `sagebwd.explain` says so.
            Else it is "mixed" on compute capability 9.0 where Hopper's kernels take the call, "token(dp=int8)" on 8.0,
            8.6, 8.9 and 12.0 where mma.sync's take both directions (the greater head_dim from 65 to 128), "token" on
            a GPU elsewhere, and "full" on a CPU.
        impl: "reference", "triton", "mma_sync" or "hopper"; None takes the fastest that supports the call: Hopper's
            kernels on compute capability 9.0 where they can, mma.sync's on 8.0, 8.6, 8.9 and 12.0, else Triton's on a
            CUDA device, the reference on a CPU. A named one that lacks the call raises. Where "hopper" or
            "mma_sync" lacks one direction of a recipe, Triton's kernels run that, to the same recipe. `sagebwd doctor`
            says whose.
        return_lse: also return the log-sum-exp of the scaled scores.
        return_max_logits: also return the largest logit of each head, as QK-clip asks for: of scores that a query
            sees, after scale and mask, before sinks, as the recipe computes them, with K's mean restored.

    Returns:
        The output, (batch, heads, tokens, value's head_dim) in query's dtype (autocast's under autocast); with
        ``return_lse`` also (batch, heads, tokens) in FP32 (of FP64 inputs FP64), natural log; with
        ``return_max_logits``, at the end, (batch, heads) of that dtype, without a gradient. The output lies in memory
        as query does: with the heads of a token side by side where query is such a view. Output and lse are
        differentiable. A query that sees no key gives zeros, lse -inf (or the sink) and zero gradients, a head of
        such queries alone -inf as its largest logit. What torch runs lies in memory as torch leaves it, and follows
        torch's rules for NaN and for queries that see no key.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or range.
        NotImplementedError: dropout and an additive mask that needs a gradient, but under "auto"; a recipe that the
            implementation lacks (FP8 gradients on the portable kernels), nested and sparse tensors, gradients of
            torch.func and under vmap, forward mode, torch.jit.trace; in backward, a second derivative.
    """
    if torch._C._is_any_autocast_enabled() and checks.are_tensors(query, key, value):
        query, key, value = autocast(query, key, value)
    more = return_lse, return_max_logits
    settings = is_causal, scale, impl, *more, dropout_p, enable_gqa
    mask = None if block_mask is None else mask_argument.given(block_mask, query)
    given = query, key, value, attn_mask, None, None, sinks
    kind = None if block_mask is not None and mask is None else kind_of(given, mask, recipe, window, settings)
    plan = PLANS.get(kind) if kind is not None and recipe == AUTO else None
    if plan is not None:  # in full precision, however q, k and v lie
        counts[plan.answer] += 1
        return plan.run(query, key, value, attn_mask)
    spec = laid_out(kind, given)
    plan = None if spec is None else PLANS.get(spec)
    if plan is not None:
        return run(plan, given, mask, *more)
    checks.kind(query, key, value, sinks)
    options = {
        "block_mask": block_mask, "window": window, "sinks": sinks, "recipe": recipe, "impl": impl,
        "return_lse": return_lse, "return_max_logits": return_max_logits,
    }  # fmt: skip
    shares = None
    if spec is None and block_mask is None and dropout_p == 0:
        shares = shares_of(query, key, value, attn_mask, sinks, packed=False)
    if shares is not None:
        *four, own = shares.tensors
        return shares.whole(sage_attention(*four, dropout_p, is_causal, scale, enable_gqa, **options | {"sinks": own}))
    four = in_four_dimensions(query, key, value, attn_mask, enable_gqa)
    if four is not None:
        query, key, value, *four = four
        outcome = sage_attention(*four, dropout_p, is_causal, scale, enable_gqa, **options)
        if True not in more:
            return outcome.reshape(*query.shape[:-1], value.shape[-1])
        shapes = (*query.shape[:-1], value.shape[-1]), query.shape[:-1], query.shape[:-2]
        wanted = itertools.compress(shapes, (True, *more))
        return tuple(x.reshape(shape) for x, shape in zip(outcome, wanted))
    checked = arguments_of(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **options)
    mask_argument.check(block_mask, checked.query, checked.key)
    fewer = within_reach(checked, key, value, attn_mask, block_mask)
    # whom "auto" hands a call to cuts keys off itself, by a plan that is kept for calls of all keys
    if fewer is not None and (kind is spec is None or checked.choice().contender is None):
        return sage_attention(query, *fewer, dropout_p, is_causal, scale, enable_gqa, **options)
    if block_mask is not None and mask is None:  # a BlockMask that is read now
        mask = mask_argument.read_now(block_mask)
        kind = kind_of(given, mask, recipe, window, settings)
        spec = laid_out(kind, given)
        plan = None if spec is None else PLANS.get(spec)
    plan = plan or _planned(kind, spec, checked, sinks)
    if plan is None:
        return _by_operators(checked, attn_mask, mask, sinks, return_lse)
    return run(plan, given, mask, *more)


def sage_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    sinks: Tensor | None = None,
    recipe: str | Recipe = AUTO,
    impl: str | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`sage_attention` over sequences of different lengths packed one after another, without padding.

    Smoothing means and scale groups never cross a sequence, so a sequence's results do not depend on its neighbours.
    Source and errors are those of `sage_attention`.

    Args:
        query: (total_tokens, heads, head_dim); key, value: (total_kv_tokens, kv_heads, head_dim). Dtypes as in
            `sage_attention`; fewer key than query heads need no flag.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32 on query's device: where each sequence starts, and the
            total, which is total_tokens or total_kv_tokens. On a CUDA device the values are not read by the host, to
            save a synchronisation: where the last is less, output and gradients of tokens past it are uninitialised.
        max_seqlen_q, max_seqlen_k: the longest sequence, in tokens.
        is_causal, window: aligned bottom right: the last query of a sequence meets its last key.
        scale, sinks, recipe, impl, return_lse, return_max_logits: as in `sage_attention`.

    Returns:
        The output, (total_tokens, heads, value's head_dim); with ``return_lse`` also (heads, total_tokens) in FP32;
        with ``return_max_logits``, at the end, (heads,) in FP32, of all sequences together.

    Raises: as `sage_attention`.
    """
    if torch._C._is_any_autocast_enabled() and checks.are_tensors(query, key, value):
        query, key, value = autocast(query, key, value)
    given = query, key, value, None, cu_seqlens_q, cu_seqlens_k, sinks
    lengths, more = (max_seqlen_q, max_seqlen_k), (return_lse, return_max_logits)
    settings = is_causal, scale, impl, *more, *lengths
    spec = laid_out(kind_of(given, None, recipe, window, settings), given)
    plan = None if spec is None else PLANS.get(spec)
    if plan is not None:
        return run(plan, given, None, *more)
    places = cu_seqlens_q, cu_seqlens_k, *lengths
    options = {
        "is_causal": is_causal, "scale": scale, "window": window, "sinks": sinks, "recipe": recipe, "impl": impl,
        "return_lse": return_lse, "return_max_logits": return_max_logits,
    }  # fmt: skip
    shares = None if spec is not None else shares_of(query, key, value, None, sinks, packed=True)
    if shares is not None:
        *rows, _, own = shares.tensors
        return shares.whole(sage_attention_varlen(*rows, *places, **options | {"sinks": own}))
    checked = packed_arguments_of(query, key, value, *places, **options)
    plan = _planned(None, spec, checked, sinks)
    if plan is None:
        return _by_operators(checked, None, None, sinks, return_lse)
    return run(plan, given, None, *more)


def _planned(
    kind: Hashable | None, spec: Hashable | None, checked: Arguments, sinks: Tensor | None
) -> Plan | SdpaCall | None:
    """The plan of a call, kept: in full precision a dense call's for its kind, another for its specification.

    None without either.
    """
    if kind is spec is None:
        return None
    q, k, v, elements, choice = checked.query, checked.key, checked.value, checked.elements, checked.choice()
    contender = choice.contender
    key = spec if contender is None or kind is None else kind
    if key is None:
        return None
    if contender is None:
        padding = None
        if elements is not None and elements.numel() and mask_argument.is_key_padding(elements):
            padding, elements = elements[:, 0, 0].expand(k.shape[0], k.shape[2]), None
        call = checked.call(choice.recipe)
        plan = Plan(choice, call, q, k, sinks=sinks is not None, padding=padding, elements=elements)
    else:
        instead, size = None, checked.size
        # torch runs what a peer refuses if it has the mask, and its pick gets gradients right
        if contender in PEERS and (not size.by_torch or auto_choice.is_wrong(CUDNN, checked.ask, size)):
            instead = _by_kernels(checked)
        run = torch_attention.settled(contender, checked.way, q, k, v, elements, checked.scale, instead)
        tensors = q, k, v, elements, *checked.offsets
        of_inference = torch.is_grad_enabled() and any(x is not None and x.is_inference() for x in tensors)
        plan = SdpaCall(contender, run, saves_copies=of_inference)
    PLANS.put(key, plan)
    return plan


def _by_kernels(checked: Arguments) -> Callable[..., Tensor]:
    """A call of "auto" on kernels, of q, k, v, None and offsets, as plans are given it."""
    options = {"is_causal": checked.is_causal, "scale": checked.scale, "window": checked.window}
    options["recipe"] = dispatch.choose(checked.ask).recipe
    packed, lengths = checked.offsets[0] is not None, checked.lengths

    def run(query: Tensor, key: Tensor, value: Tensor, _: None, *offsets: Tensor | None) -> Tensor:
        if packed:
            return sage_attention_varlen(query, key, value, *offsets, *lengths, **options)
        return sage_attention(query, key, value, enable_gqa=True, **options)

    return run


def run(
    plan: Plan | SdpaCall, given: tuple[Tensor | None, ...], mask: Mask | TracedBlockMask | None = None,
    return_lse: bool = False, return_max_logits: bool = False, prologue: Prologue | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """The outputs of a call by its plan; prologue: of a plan that has one, with O alone."""
    counts[plan.answer] += 1
    q, k, v, attn_mask, cu_seqlens_q, cu_seqlens_k, sinks = given
    if plan.__class__ is SdpaCall:
        return plan.run(q, k, v, attn_mask, cu_seqlens_q, cu_seqlens_k)
    trains = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
        or (prologue is not None and any(x is not None and x.requires_grad for x in prologue[2:4]))
    )  # fmt: skip
    key_mask, mask = plan.masks_of(attn_mask, mask, q, k, trains=trains)
    if trains:
        masks = key_mask, cu_seqlens_q, cu_seqlens_k
        more = return_lse or return_max_logits
        before, of_prologue = (prologue[:2], prologue[2:]) if prologue else (None, ())
        outputs = SageAttention.apply(plan, mask, more, before, q, k, v, sinks, *masks, *of_prologue)
        if not more:
            return outputs
        o, lse, workspace = outputs
    else:
        with device_of(q):
            masks = key_mask, mask, cu_seqlens_q, cu_seqlens_k
            o, lse, workspace = plan.forward(q, k, v, sinks, *masks, prologue)
    if not (return_lse or return_max_logits):
        return o
    of_scores = (lse, q, plan.k_mean(workspace), plan.call.scale, cu_seqlens_q, sinks) if return_lse else None
    return _with_more(o, of_scores, plan.max_logits(workspace) if return_max_logits else None)


def _with_more(o: Tensor, of_scores: tuple | None, largest: Tensor | None) -> tuple[Tensor, ...]:
    """The outputs of a call that asked for more than o; of_scores: what `epilogue.true_lse` makes lse of."""
    more = None if of_scores is None else epilogue.true_lse(*of_scores), largest
    return o, *(x for x in more if x is not None)


def _by_operators(
    checked: Arguments, attn_mask: Tensor | None, mask: Mask | TracedBlockMask | None, sinks: Tensor | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """The outputs of a call that somebody may look at or change: by operators, or by torch, which then picks."""
    q, k, v, ask = checked.query, checked.key, checked.value, checked.ask
    if torch.compiler.is_compiling():  # the operators choose: what is asked of a device cannot be traced
        contender = auto_choice.contender_of(ask, checked.size, None, False)
        if contender is None:
            dispatch.check_traced(ask.impl, ask.device, ask.dtype)
        chosen = str(ask.recipe), ask.impl or dispatch.FASTEST
    else:
        choice = auto_choice.choose(ask, checked.size, None, False)
        contender, chosen = choice.contender, (str(choice.recipe), choice.name)
        counts[answer(*chosen) if contender is None else handed_over(contender)] += 1
    if contender is not None:
        return torch_attention.run(checked.way, checked.scale, q, k, v, checked.elements, *checked.offsets)
    o, lse, workspace = by_operator(checked, chosen, attn_mask, mask, sinks)
    if not (return_lse or checked.max_logits):
        return o
    offsets, rows = checked.offsets[0], (x.detach() for x in (q, k, v))  # of K's sequences there are as many
    asked = sinks is not None, checked.max_logits, *chosen
    k_mean, largest = ops.attention_pieces(workspace, *rows, offsets, *asked)
    of_scores = (lse, q, k_mean, checked.scale, offsets, sinks) if return_lse else None
    return _with_more(o, of_scores, largest if checked.max_logits else None)


def by_operator(
    checked: Arguments, chosen: tuple[str, str], attn_mask: Tensor | None = None,
    mask: Mask | TracedBlockMask | None = None, sinks: Tensor | None = None, prologue: Prologue | tuple[()] = (),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """O, lse of the smoothed scores and the workspace, by the operator; chosen: a recipe and a choice's name."""
    q, k, v = checked.query, checked.key, checked.value
    offsets = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), checked.offsets))
    checks.refuse_distributed(query=q, key=k, value=v, attn_mask=attn_mask, sinks=sinks, **offsets)
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    key_mask, mask = mask_argument.read(attn_mask, checked.elements, mask, q, k, by_key=trains)
    masks = key_mask, *((None,) * 3 if mask is None else (mask.elements, mask.tiles, mask.blocks)), *checked.offsets
    numbers = checked.is_causal, *checked.window, checked.scale, *chosen, switches.current.deterministic
    return ops.attention(q, k, v, sinks, *masks, *checked.lengths, *numbers, checked.max_logits, *prologue)
