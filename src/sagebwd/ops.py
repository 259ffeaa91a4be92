"""The torch.library operators: schema, shapes under tracing, autograd.

``sagebwd::attention`` and ``sagebwd::attention_backward`` are opaque to torch.compile and run what `sagebwd.dispatch`
chose: ``impl`` is a choice's name, or in traced calls, where nobody could ask, what is chosen by here. Autocast
is off inside: the reference's own products must not be rounded. What forward leaves beside O and lse lies in one
tensor of bytes, the workspace of the call's plan (`sagebwd.planning.workspace`). mask, mask_tiles and mask_blocks are
elements, tiles and blocks of `sagebwd.masks.mask.Mask`; key_mask beside them says which keys any query sees. q and k
themselves are kept for backward only where a product needs them in 16 bit. With sinks O and lse are beside them
(`sagebwd.sinks`).

They are defined by ``torch.library.Library`` and not by ``custom_op``, whose autograd reads the schema's arguments 30
times a call, and copies them each time: 0.1 ms of host time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from sagebwd import checks, dispatch
from sagebwd.cache import PLANS, layout_of
from sagebwd.call import Ask, Call, empty_gradients, empty_like_rows, keeps_inputs
from sagebwd.derivatives import once_differentiable, savable
from sagebwd.dispatch import Choice
from sagebwd.kernels.families import REFERENCE
from sagebwd.kernels.masks.blocks import blocks_of
from sagebwd.kernels.runtime.device import device_of
from sagebwd.masks.kinds import FULL, MASK
from sagebwd.masks.mask import BLOCK, Mask
from sagebwd.masks.parts import PartsOfCall
from sagebwd.planning.plan import Plan
from sagebwd.planning.workspace import pieces_of
from sagebwd.recipe import AUTO, Recipe

LIBRARY = torch.library.Library("sagebwd", "DEF")


def operator(fn: Callable) -> torch._ops.OpOverload:
    """The operator of a function's name and signature, which runs it on any device and hides it from torch.compile."""
    schema = torch.library.infer_schema(fn, mutates_args=())
    LIBRARY.define(fn.__name__ + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(fn.__name__, torch._disable_dynamo(fn), "CompositeExplicitAutograd")
    return getattr(torch.ops.sagebwd, fn.__name__).default


@cache
def parsed(recipe: str) -> Recipe:
    """The recipe of a text, as operators take it."""
    return Recipe.parse(recipe)


def _chosen(recipe: str, impl: str, dims: tuple[int, int], x: Tensor, mask: Tensor | None) -> Choice:
    """What was chosen for a call, or is now; dims: head_dim and value's; x: of query's dtype and device."""
    if dispatch.SEPARATOR in impl:
        return dispatch.named(parsed(recipe), impl)
    wanted = recipe if recipe == AUTO else parsed(recipe)
    return dispatch.choose(Ask(wanted, *map(int, dims), x.dtype, x.device, FULL if mask is None else MASK, impl))


def _chosen_in_a_trace(recipe: str, impl: str, dims: tuple[int, int], x: Tensor, mask: Tensor | None) -> Choice:
    """The same for the sake of shapes: what is refused is refused when it runs, by its own error."""
    try:
        return _chosen(recipe, impl, dims, x, mask)
    except NotImplementedError:
        reference = dispatch.SEPARATOR.join([REFERENCE.name] * 2)
        return dispatch.named(parsed("token" if recipe == AUTO else recipe), reference)


@operator
def mask_blocks(mask: Tensor) -> tuple[Tensor, Tensor]:
    """`sagebwd.masks.mask.blocks_of` a mask in four dimensions."""
    return blocks_of(mask)


@torch.library.register_fake("sagebwd::mask_blocks", lib=LIBRARY)
def _(mask):
    batch, heads, tokens_q, tokens_k = mask.shape
    blocks = mask.new_empty((batch, heads, -(-tokens_q // BLOCK), -(-tokens_k // BLOCK)), dtype=torch.uint8)
    return blocks, mask.new_empty((batch, tokens_k), dtype=torch.bool)


@operator
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    key_mask: Tensor | None,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    mask_blocks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
    recipe: str,
    impl: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """O, lse of the smoothed scores, and the workspace."""
    checks.refuse_divided()  # what was compiled may run where the sequence is divided among processes
    tensors = q, k, v, sinks, key_mask, mask, mask_tiles, mask_blocks, cu_seqlens_q, cu_seqlens_k
    settings = max_seqlen_q, max_seqlen_k, is_causal, window_left, window_right, scale, recipe, impl, deterministic
    key = "forward", *map(layout_of, tensors), *settings
    plan = PLANS.get(key)
    if plan is None:
        plan = _plan_of(q, k, (q.shape[-1], v.shape[-1]), q, mask, cu_seqlens_q, cu_seqlens_k, settings, sinks)
        PLANS.put(key, plan)
    of_mask = _mask(mask, mask_tiles, mask_blocks, key_mask)
    with torch.autocast(q.device.type, enabled=False), device_of(q):
        return plan.forward(q, k, v, sinks, key_mask, of_mask, cu_seqlens_q, cu_seqlens_k)


def _plan_of(
    q: Tensor, k: Tensor, dims: tuple[int, int], x: Tensor, mask: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, settings: tuple, sinks: Tensor | None,
) -> Plan:  # fmt: skip
    """The plan of q and k, or of tensors that lie like them but for head_dim; x: of query's dtype and device."""
    *rest, scale, recipe, impl, deterministic = settings
    choice = _chosen(recipe, impl, dims, x, mask)
    offsets = cu_seqlens_q, cu_seqlens_k
    call = Call.of(q, k, dims, None, *offsets, *rest, scale, choice.recipe, deterministic)
    return Plan(choice, call, q, k, sinks=sinks is not None)


def _mask(mask: Tensor | None, tiles: Tensor | None, blocks: Tensor | None, keys: Tensor | None) -> Mask | None:
    return None if mask is None else Mask(mask, tiles, blocks, keys, PartsOfCall())


def k_mean_of(
    workspace: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens_k: Tensor | None,
    recipe: str, impl: str,
) -> Tensor:  # fmt: skip
    """K's mean, of the workspace that the operator returned."""
    dims = q.shape[-1], v.shape[-1]
    choice = _chosen_in_a_trace(recipe, impl, dims, q, None)
    sequences = None if cu_seqlens_k is None else cu_seqlens_k.shape[0] - 1
    return pieces_of(choice, dims, q, k, sequences, sinks is not None)[0]["k_mean"].of(workspace)


def outputs_like(
    choice: Choice, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_k: Tensor | None, *, sinks: bool = False,
    norm: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """O, lse and the workspace of a forward, of their shapes alone; sinks, norm: as of `pieces_of`."""
    packed = cu_seqlens_k is not None
    sequences = cu_seqlens_k.shape[0] - 1 if packed else None
    _, size = pieces_of(choice, (q.shape[-1], v.shape[-1]), q, k, sequences, sinks, norm)
    tokens = (q.shape[1], q.shape[0]) if packed else q.shape[:-1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_like_rows(q, v.shape[-1]), q.new_empty(tokens, dtype=dtype), q.new_empty((size,), dtype=torch.uint8)


@torch.library.register_fake("sagebwd::attention", lib=LIBRARY)
def _(
    q, k, v, sinks, key_mask, mask, mask_tiles, mask_blocks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    is_causal, window_left, window_right, scale, recipe, impl, deterministic,
):  # fmt: skip
    choice = _chosen_in_a_trace(recipe, impl, (q.shape[-1], v.shape[-1]), q, mask)
    return outputs_like(choice, q, k, v, cu_seqlens_k, sinks=sinks is not None)


@operator
def attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    workspace: Tensor,
    sinks: Tensor | None,
    key_mask: Tensor | None,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    mask_blocks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    head_dim: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
    recipe: str,
    impl: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv in the shapes and dtypes of q, k, v, and of sinks, where there are any, in lse's dtype.

    q and k are given where `keeps_inputs` says so; of sinks none is read.
    """
    tensors = v, o, mask, cu_seqlens_q, cu_seqlens_k
    settings = max_seqlen_q, max_seqlen_k, is_causal, window_left, window_right, scale, recipe, impl, deterministic
    key = "backward", *map(layout_of, tensors), head_dim, sinks is None, *settings
    plan = PLANS.get(key)
    if plan is None:
        plan = _plan_of(o, v, (head_dim, v.shape[-1]), v, mask, cu_seqlens_q, cu_seqlens_k, settings, sinks)
        PLANS.put(key, plan)
    masks = key_mask, _mask(mask, mask_tiles, mask_blocks, key_mask), cu_seqlens_q, cu_seqlens_k
    with torch.autocast(v.device.type, enabled=False), device_of(v):
        *gradients, dsinks = plan.backward(do, dlse, q, k, v, o, lse, workspace, *masks)
        return *gradients, lse.new_empty(0) if dsinks is None else dsinks


@torch.library.register_fake("sagebwd::attention_backward", lib=LIBRARY)
def _(
    do, dlse, q, k, v, o, lse, workspace, sinks, key_mask, mask, mask_tiles, mask_blocks, cu_seqlens_q, cu_seqlens_k,
    head_dim, *settings
):  # fmt: skip
    recipe, impl, _ = settings[-3:]
    choice = _chosen_in_a_trace(recipe, impl, (head_dim, v.shape[-1]), v, mask)
    dsinks = lse.new_empty(0) if sinks is None else lse.new_empty(sinks.shape)
    return *empty_gradients(choice.recipe, head_dim, o, v), dsinks


def differentiable(
    derivative: type[torch.autograd.Function], operator: torch._ops.OpOverload, count: int = 4
) -> None:  # fmt: skip
    """Register a derivative of an operator, for calls in which one of its first ``count`` arguments needs a gradient.

    Its forward is given the operator below autograd, a function, and the arguments. Tangents are refused here, where
    a trace has them too.
    """
    names = [argument.name for argument in operator._schema.arguments[:count]]

    def dispatched(keyset: torch._C.DispatchKeySet, *arguments: object) -> object:
        checks.refuse_forward_mode(zip(names, arguments))

        def below(*arguments: object) -> object:
            with torch._C._AutoDispatchBelowAutograd():
                return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

        needed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:count])
        return derivative.apply(below, *arguments) if needed else below(*arguments)

    LIBRARY.impl(operator.name().removeprefix("sagebwd::"), dispatched, "Autograd", with_keyset=True)


class _Attention(torch.autograd.Function):
    """The derivative of ``sagebwd::attention``; below: the operator's kernels below autograd."""

    @staticmethod
    def forward(ctx, below, *arguments):
        q, k, v, sinks = arguments[:4]
        masks, settings = arguments[4:10], arguments[10:]
        o, lse, workspace = below(*arguments)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(workspace)
        ctx.settings = q.shape[-1], *settings
        recipe, impl, _ = settings[-3:]
        choice = _chosen_in_a_trace(recipe, impl, (q.shape[-1], v.shape[-1]), q, masks[1])
        keep_q, keep_k = keeps_inputs(choice.recipe, choice.backward)
        inputs = q if keep_q else None, k if keep_k else None, v
        ctx.save_for_backward(*map(savable, inputs), o, lse, workspace, *map(savable, (sinks, *masks)))
        return o, lse, workspace

    @staticmethod
    def backward(ctx, do, dlse, _):
        q, k, v, o, lse, workspace, sinks, *masks = ctx.saved_tensors
        if do is None and dlse is None:
            return (None,) * 20
        do = torch.zeros_like(o) if do is None else do
        with torch.no_grad():
            gradients = attention_backward(do, dlse, q, k, v, o, lse, workspace, sinks, *masks, *ctx.settings)
            *gradients, dsinks = gradients
        gradients.append(dsinks.to(sinks.dtype) if ctx.needs_input_grad[4] else None)
        if torch.is_grad_enabled():  # create_graph=True
            gradients = once_differentiable((o, do, dlse), gradients)
        return None, *gradients, *(None,) * 15


differentiable(_Attention, attention)
