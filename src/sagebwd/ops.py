"""The torch.library operators: schema, shapes under tracing, autograd.

``sagebwd::attention`` and ``sagebwd::attention_backward`` are opaque to torch.compile and run what `sagebwd.dispatch`
chose: ``impl`` is a choice's name, or in traced calls, where nobody could ask, what is chosen by here. Autocast
is off inside: the reference's own products must not be rounded. `sagebwd.call` has the shapes; what
`sagebwd.call.Saved` lacks is an empty tensor here. mask, mask_tiles and mask_blocks are elements, tiles and blocks of
`sagebwd.masks.mask.Mask`; key_mask beside them says which keys any query sees. q and k themselves are kept for
backward only where a product needs them in 16 bit. With sinks O and lse are beside them (`sagebwd.sinks.epilogue`).

They are defined by ``torch.library.Library`` and not by ``custom_op``, whose autograd reads the schema's arguments 30
times a call, and copies them each time: 0.1 ms of host time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from sagebwd import dispatch
from sagebwd.auto.crossings import FULL, MASK
from sagebwd.call import Ask, Call, Saved, empty_gradients, empty_like_rows, keeps_inputs
from sagebwd.dispatch import Choice
from sagebwd.masks.mask import BLOCK, Mask, blocks_of
from sagebwd.recipe import AUTO, FP8, INT8, Recipe
from sagebwd.sinks import epilogue

_LIBRARY = torch.library.Library("sagebwd", "DEF")


def _operator(fn: Callable) -> torch._ops.OpOverload:
    """The operator of a function's name and signature, which runs it on any device and hides it from torch.compile."""
    schema = torch.library.infer_schema(fn, mutates_args=())
    _LIBRARY.define(fn.__name__ + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(fn.__name__, torch._disable_dynamo(fn), "CompositeExplicitAutograd")
    return getattr(torch.ops.sagebwd, fn.__name__).default


def _saved_like(x: Tensor, width: int, scale_shape: tuple[int, ...], keep: bool) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], width) if keep else (0,)
    return x.new_empty(shape, dtype=torch.int8), x.new_empty(scale_shape if keep else (0,), dtype=torch.float32)


def _token_shape(x: Tensor, packed: bool) -> tuple[int, ...]:
    """(B, H, N) of a dense tensor, (H, total) of a packed one."""
    return (x.shape[1], x.shape[0]) if packed else tuple(x.shape[:3])


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check_packing(cu_seqlens: Tensor, name: str, total: int, max_seqlen: int) -> None:
    """Raises ValueError unless the offsets split ``total`` tokens into sequences of at most ``max_seqlen``."""
    lengths = cu_seqlens.diff()
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0 or last != total or bool((lengths < 0).any()):
        raise ValueError(
            f"{name} must rise from 0 to the number of packed tokens ({total}); it runs from {first} to {last}"
            + (" and falls in between" if bool((lengths < 0).any()) else "")
        )
    if int(lengths.max()) > max_seqlen:
        suffix = name.removeprefix("cu_seqlens_")
        raise ValueError(f"max_seqlen_{suffix}={max_seqlen} is less than the longest sequence, {int(lengths.max())}")


@cache
def _parsed(recipe: str) -> Recipe:
    return Recipe.parse(recipe)


def _chosen(recipe: str, impl: str, dims: tuple[int, int], x: Tensor, mask: Tensor | None) -> Choice:
    """What was chosen for a call, or is now; dims: head_dim and value's; x: of query's dtype and device."""
    if dispatch.SEPARATOR in impl:
        return dispatch.named(_parsed(recipe), impl)
    wanted = recipe if recipe == AUTO else _parsed(recipe)
    return dispatch.choose(Ask(wanted, *map(int, dims), x.dtype, x.device, FULL if mask is None else MASK, impl))


def _chosen_in_a_trace(recipe: str, impl: str, dims: tuple[int, int], x: Tensor, mask: Tensor | None) -> Choice:
    """The same for the sake of shapes: what is refused is refused when it runs, by its own error."""
    try:
        return _chosen(recipe, impl, dims, x, mask)
    except NotImplementedError:
        reference = dispatch.SEPARATOR.join(["reference"] * 2)
        return dispatch.named(_parsed("token" if recipe == AUTO else recipe), reference)


@_operator
def mask_blocks(mask: Tensor) -> tuple[Tensor, Tensor]:
    """`sagebwd.masks.mask.blocks_of` a mask in four dimensions."""
    return blocks_of(mask)


@torch.library.register_fake("sagebwd::mask_blocks", lib=_LIBRARY)
def _(mask):
    batch, heads, tokens_q, tokens_k = mask.shape
    blocks = mask.new_empty((batch, heads, -(-tokens_q // BLOCK), -(-tokens_k // BLOCK)), dtype=torch.uint8)
    return blocks, mask.new_empty((batch, tokens_k), dtype=torch.bool)


@_operator
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """O, lse, q_int8, q_scale, k_int8, k_scale, row_max, k_mean, sinks' weights; see the module's text."""
    if cu_seqlens_q is not None and cu_seqlens_q.device.type == "cpu":
        _check_packing(cu_seqlens_q, "cu_seqlens_q", q.shape[0], max_seqlen_q)
        _check_packing(cu_seqlens_k, "cu_seqlens_k", k.shape[0], max_seqlen_k)
    dims = q.shape[-1], v.shape[-1]
    choice = _chosen(recipe, impl, dims, q, mask)
    if q.numel() == 0 or k.numel() == 0:
        o, lse, *saved, weight = _attention_shapes(q, k, v, sinks, cu_seqlens_k, choice)
        return o.zero_(), lse.fill_(float("-inf")), *(x.zero_() for x in saved), weight.fill_(1)
    call = Call.of(
        q, k, dims, key_mask, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window_left,
        window_right, scale, choice.recipe, deterministic, _mask(mask, mask_tiles, mask_blocks, key_mask),
    )  # fmt: skip
    with torch.autocast(q.device.type, enabled=False), _device_of(q):
        saved = dispatch.forward(choice, call, q, k, v)
        weight = saved.lse.new_empty(0)
        if sinks is not None:
            mean = saved.k_mean if choice.recipe.smooth_k else None
            weight = epilogue.weigh(saved.o, saved.lse, q, mean, sinks, scale, cu_seqlens_q, max_seqlen_q)
        return *_without_none(saved), weight


def _device_of(x: Tensor) -> AbstractContextManager:
    """Where kernels launch: on x's GPU, whichever is the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _mask(mask: Tensor | None, tiles: Tensor | None, blocks: Tensor | None, keys: Tensor | None) -> Mask | None:
    return None if mask is None else Mask(mask, tiles, blocks, keys)


def _without_none(saved: Saved) -> tuple[Tensor, ...]:
    """An operator returns tensors: those that are not there are empty."""
    dtypes = {"q_int8": torch.int8, "k_int8": torch.int8}
    return tuple(
        saved.o.new_empty(0, dtype=dtypes.get(name, torch.float32)) if x is None else x
        for name, x in zip(Saved._fields, saved)
    )


def _attention_shapes(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens_k: Tensor | None, choice: Choice
) -> tuple[Tensor, ...]:
    """Empty tensors in the shapes and dtypes that ``attention`` returns."""
    recipe, packed = choice.recipe, cu_seqlens_k is not None
    saves = choice.forward.impl != "reference"
    (width, _), _ = choice.forms(q.shape[-1], v.shape[-1])
    q_saved = _saved_like(q, width, _token_shape(q, packed), saves and INT8 in (recipe.s, recipe.dk))
    k_saved = _saved_like(k, width, _token_shape(k, packed), saves and INT8 in (recipe.s, recipe.dq))
    batch = cu_seqlens_k.shape[0] - 1 if packed else k.shape[0]
    fp8 = saves and recipe.dv == FP8
    return (
        empty_like_rows(q, v.shape[-1]),
        q.new_empty(_token_shape(q, packed), dtype=_accumulator(q)),
        *q_saved,
        *k_saved,
        q.new_empty(_token_shape(q, packed) if fp8 else (0,), dtype=torch.float32),
        k.new_empty((batch, k.shape[1], k.shape[-1]), dtype=_accumulator(k)),
        q.new_empty((0,) if sinks is None else _token_shape(q, packed), dtype=_accumulator(q)),
    )


@torch.library.register_fake("sagebwd::attention", lib=_LIBRARY)
def _(
    q, k, v, sinks, key_mask, mask, mask_tiles, mask_blocks, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    is_causal, window_left, window_right, scale, recipe, impl, deterministic,
):  # fmt: skip
    choice = _chosen_in_a_trace(recipe, impl, (q.shape[-1], v.shape[-1]), q, mask)
    return _attention_shapes(q, k, v, sinks, cu_seqlens_k, choice)


@_operator
def attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    q_int8: Tensor,
    q_scale: Tensor,
    k_int8: Tensor,
    k_scale: Tensor,
    row_max: Tensor,
    k_mean: Tensor,
    sinks_weight: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv in the shapes and dtypes of q, k, v, and of sinks, where there are any, in lse's dtype.

    q and k are given where `keeps_inputs` says so.
    """
    dims = k_mean.shape[-1], v.shape[-1]
    choice = _chosen(recipe, impl, dims, v, mask)
    if o.numel() == 0 or v.numel() == 0:
        return *(x.zero_() for x in empty_gradients(choice.recipe, dims[0], o, v)), _dsinks(sinks_weight).zero_()
    call = Call.of(
        o, v, dims, key_mask, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window_left,
        window_right, scale, choice.recipe, deterministic or torch.are_deterministic_algorithms_enabled(),
        _mask(mask, mask_tiles, mask_blocks, key_mask),
    )  # fmt: skip
    there = (x if x.numel() else None for x in (q_int8, q_scale, k_int8, k_scale, row_max))
    saved = Saved(o, lse, *there, k_mean)
    with torch.autocast(v.device.type, enabled=False), _device_of(v):
        dq, dk, dv = dispatch.backward(choice, call, saved, do, dlse, q, k, v)
        dsinks = lse.new_empty(0)
        if sinks_weight.numel():
            mean = k_mean if choice.recipe.smooth_k else None
            dsinks = epilogue.gradient(do, dlse, o, sinks_weight, dq, mean, scale, cu_seqlens_q, max_seqlen_q)
        return dq, dk, dv, dsinks


def _dsinks(weight: Tensor) -> Tensor:
    """Uninitialised gradients of sinks, of whose weights (B, H, N) or (H, total) are; none where there are none."""
    return weight.new_empty(weight.shape[-2] if weight.dim() > 1 else 0)


@torch.library.register_fake("sagebwd::attention_backward", lib=_LIBRARY)
def _(
    do, dlse, q, k, v, o, lse, q_int8, q_scale, k_int8, k_scale, row_max, k_mean, sinks_weight, key_mask,
    mask, *settings
):  # fmt: skip
    recipe, impl, _ = settings[-3:]
    choice = _chosen_in_a_trace(recipe, impl, (k_mean.shape[-1], v.shape[-1]), v, mask)
    return *empty_gradients(choice.recipe, k_mean.shape[-1], o, v), _dsinks(sinks_weight)


class _Attention(torch.autograd.Function):
    """The derivative of ``sagebwd::attention``; keyset: the dispatcher's, of which kernels below autograd run."""

    @staticmethod
    def forward(ctx, keyset, *arguments):
        q, k, v, sinks = arguments[:4]
        masks, settings = arguments[4:10], arguments[10:]
        output = o, lse, *saved = _below_autograd(keyset, *arguments)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*saved)
        ctx.settings, ctx.sinks_dtype = settings, None if sinks is None else sinks.dtype
        recipe, impl, _ = settings[-3:]
        _, mask, *_ = masks
        choice = _chosen_in_a_trace(recipe, impl, (q.shape[-1], v.shape[-1]), q, mask)
        keep_q, keep_k = keeps_inputs(choice.recipe, choice.backward.impl)
        ctx.save_for_backward(q if keep_q else None, k if keep_k else None, v, o, lse, *saved, *masks)
        return output

    @staticmethod
    def backward(ctx, do, dlse, *_):
        q, k, v, o, lse, *rest = ctx.saved_tensors
        if do is None and dlse is None:
            return (None,) * 20
        do = torch.zeros_like(o) if do is None else do
        with torch.no_grad():
            *gradients, dsinks = attention_backward(do, dlse, q, k, v, o, lse, *rest, *ctx.settings)
        if ctx.needs_input_grad[4]:
            gradients.append(dsinks.to(ctx.sinks_dtype))
        if torch.is_grad_enabled():  # create_graph=True; o needs gradients whichever of the inputs does
            gradients = once_differentiable(o, *gradients)
        return None, *gradients, *(None,) * (19 - len(gradients))


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients as they are; who differentiates them again is told."""

    @staticmethod
    def forward(ctx, o, *gradients):
        return tuple(gradient.clone() for gradient in gradients)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(
            "second derivatives of sagebwd's attention (create_graph=True, a gradient penalty) are not supported; use "
            "torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


def once_differentiable(o: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
    """Gradients that raise NotImplementedError where they are differentiated again; o, which needs gradients."""
    return _OnceDifferentiable.apply(o, *gradients)


def _below_autograd(keyset, *arguments):
    with torch._C._AutoDispatchBelowAutograd():
        return attention.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def _autograd(keyset, *arguments):
    """What the dispatcher calls for ``sagebwd::attention`` before a device's kernel."""
    differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:4])
    return (_Attention.apply if differentiable else _below_autograd)(keyset, *arguments)


_LIBRARY.impl("attention", _autograd, "Autograd", with_keyset=True)
