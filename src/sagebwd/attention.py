"""The public functions: argument checks, choice of implementation, and the call of the operator."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sagebwd import dispatch, eager, mask_argument, ops, switches
from sagebwd.call import Ask
from sagebwd.kernels import table
from sagebwd.masks.mask import Mask
from sagebwd.recipe import AUTO, Recipe

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_SDPA = "torch.nn.functional.scaled_dot_product_attention"
REFERENCE_DTYPES = tuple(getattr(torch, name) for name in table.REFERENCE_DTYPES)


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
    recipe: str | Recipe = AUTO,
    impl: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with trainable INT8 products, in place of ``torch.nn.functional.scaled_dot_product_attention``.

    Computes softmax(scale Q K^T) V and its gradients by the recipe (arXiv 2603.02170).

    Args:
        query: (batch, heads, tokens, head_dim), bf16 or fp16; fp32 under autocast, on a CPU or with
            ``impl="reference"``. head_dim up to 256. Any strides; kernels copy a view whose last one is not 1 or that
            begins at no multiple of 16 bytes. Any number of dimensions before tokens; of three the first is heads
            with ``enable_gqa``, else batch. Fewer than key's are broadcast, or the reverse.
        key, value: (batch, kv_heads, kv_tokens, head_dim), of query's dtype and device. value's head_dim may differ:
            where kernels lack the pair the lesser is filled with zeros, which changes no number and costs as much as
            the greater.
        attn_mask: (batch or 1, heads or 1, tokens or 1, kv_tokens or 1), or fewer of the last dimensions: boolean,
            True where a query sees a key, or floating point, added to the scaled scores; a number of at most -1.6e38,
            of fp16 -32752, hides as -inf does. ``is_causal`` and ``window`` hold beside it. Keys that no query sees
            do not count at all, NaN in them neither; of the others K's mean and V's scales are taken over all.
        dropout_p: 0.
        is_causal: query i sees keys up to i (aligned top left, also where the lengths differ).
        scale: softmax scale; 1 / sqrt(head_dim) by default.
        enable_gqa: allow fewer key than query heads; query head h reads key head h // (heads // kv_heads).
        block_mask: a BlockMask of ``torch.nn.attention.flex_attention``, or what `sagebwd.read_block_mask` made of it,
            which torch.compile needs; attn_mask may be boolean key padding beside it.
        window: (left, right) in tokens, -1 for no limit: query i sees keys i - left to i + right.
        recipe: a name (of `sagebwd.RECIPES`: "mixed", "token", "paper", "full"), a text such as
            "token(smooth_v=False)", or a Recipe: these fix the numbers on every device. "auto" is "mixed" on compute
            capability 9.0 where Hopper's kernels take the call, else "token".
        impl: "reference", "triton" or "hopper"; None takes the fastest that supports the call: Hopper's kernels on
            compute capability 9.0 where they can, else Triton's on a CUDA device, the reference on a CPU. A named one
            that lacks the call raises. Where "hopper" lacks one direction of a recipe, Triton's kernels run that, to
            the same recipe. `sagebwd doctor` says whose.
        return_lse: also return the log-sum-exp of the scaled scores.

    Returns:
        The output, (batch, heads, tokens, value's head_dim) in query's dtype (autocast's under autocast); with
        ``return_lse`` also (batch, heads, tokens) in FP32 (of FP64 inputs FP64), natural log. The output lies in
        memory as query does: with the heads of a token side by side where query is such a view. Both are
        differentiable. A query that sees no key gives zeros, lse -inf and zero gradients.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape, device or range.
        NotImplementedError: dropout, an additive mask that needs a gradient, a recipe that the implementation lacks
            (FP8 gradients under a mask that is more than key padding), nested tensors, torch.func's transforms and
            forward mode, torch.jit.trace; in backward, a second derivative.
    """
    given = query, key, value, attn_mask, None, None
    settings = is_causal, scale, impl, return_lse, dropout_p, enable_gqa
    kind = None if block_mask is not None else eager.kind_of(given, recipe, window, *settings)
    plan = eager.plan_of(kind)
    if plan is not None:
        mask = None if attn_mask is None else attn_mask[:, 0, 0]
        return _with_true_lse(query, None, plan.call.scale, *plan(query, key, value, mask, None, None))
    _check_kind(query, key, value)
    dims = {query.dim(), key.dim(), value.dim()}
    if dims != {4} and min(dims) >= 2 and (len(dims) == 1 or not enable_gqa):
        query, key, value = _of_equal_dimensions(query, key, value)
        if isinstance(attn_mask, Tensor):
            attn_mask = mask_argument.in_four_dimensions(attn_mask, query, enable_gqa)
        four = [_four_dimensions(x, enable_gqa) for x in (query, key, value)]
        outcome = sage_attention(
            *four, attn_mask, dropout_p, is_causal, scale, enable_gqa, block_mask=block_mask, window=window,
            recipe=recipe, impl=impl, return_lse=return_lse,
        )  # fmt: skip
        o, lse = outcome if return_lse else (outcome, None)
        o = o.reshape(*query.shape[:-1], value.shape[-1])
        return (o, lse.reshape(query.shape[:-1])) if return_lse else o
    query, key, value = _autocast(query, key, value)
    _check_tensors(query, key, value, 4, "(batch, heads, tokens, head_dim)")
    if key.shape[0] != query.shape[0]:
        raise ValueError(f"key: batch {key.shape[0]} differs from query's {query.shape[0]}; they must be equal")
    _check_heads(query.shape[1], key.shape[1], enable_gqa)
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"dropout_p={dropout_p} is not supported, only 0: each kernel would draw the same random numbers again; "
            "apply dropout to the output, or call torch.nn.functional.scaled_dot_product_attention"
        )
    key_mask, mask = mask_argument.read(attn_mask, block_mask, query, key)
    scale = _default_scale(query) if scale is None else scale
    settings = _settings(query, value, is_causal, scale, window, recipe, impl, mask is not None)
    arguments = query, key, value, key_mask, None, None, query.shape[2], key.shape[2], *settings
    elements = (None,) * 3 if mask is None else (mask.elements, mask.tiles, mask.blocks)
    o, lse, *_, k_mean = ops.attention(*arguments[:4], *elements, *arguments[4:])
    plain = attn_mask is None or (mask is None and attn_mask.shape == (query.shape[0], 1, 1, key.shape[2]))
    if kind is not None and plain:
        eager.remember(kind, given, arguments, with_lse=return_lse)
    return _with_true_lse(query, None, settings[3], o, lse, k_mean) if return_lse else o


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
    recipe: str | Recipe = AUTO,
    impl: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`sage_attention` over sequences of different lengths packed one after another, without padding.

    Smoothing means and scale groups never cross a sequence, so a sequence's results do not depend on its neighbours.

    Args:
        query: (total_tokens, heads, head_dim); key, value: (total_kv_tokens, kv_heads, head_dim). Dtypes as in
            `sage_attention`; fewer key than query heads need no flag.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32 on query's device: where each sequence starts, and the
            total, which is total_tokens or total_kv_tokens. On a CUDA device the values are not read by the host, to
            save a synchronisation: where the last is less, output and gradients of tokens past it are uninitialised.
        max_seqlen_q, max_seqlen_k: the longest sequence, in tokens.
        is_causal, window: aligned bottom right: the last query of a sequence meets its last key.
        scale, recipe, impl, return_lse: as in `sage_attention`.

    Returns:
        The output, (total_tokens, heads, value's head_dim); with ``return_lse`` also (heads, total_tokens) in FP32.

    Raises: as `sage_attention`.
    """
    given = query, key, value, None, cu_seqlens_q, cu_seqlens_k
    lengths = max_seqlen_q, max_seqlen_k
    kind = eager.kind_of(given, recipe, window, is_causal, scale, impl, return_lse, *lengths)
    plan = eager.plan_of(kind)
    if plan is not None:
        return _with_true_lse(query, cu_seqlens_q, plan.call.scale, *plan(*given))
    _check_kind(query, key, value)
    query, key, value = _autocast(query, key, value)
    _check_tensors(query, key, value, 3, "(total_tokens, heads, head_dim)")
    _check_heads(query.shape[1], key.shape[1], enable_gqa=True)
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_offsets(name, offsets, query.device)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k name {cu_seqlens_q.shape[0] - 1} and {cu_seqlens_k.shape[0] - 1} "
            "sequences; they must name as many"
        )
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(longest, bool) or not isinstance(longest, (int, torch.SymInt)) or longest < 0:
            raise ValueError(f"{name}={longest!r} must be an integer, at least 0")
    scale = _default_scale(query) if scale is None else scale
    settings = _settings(query, value, is_causal, scale, window, recipe, impl)
    arguments = query, key, value, None, cu_seqlens_q, cu_seqlens_k, *lengths, *settings
    o, lse, *_, k_mean = ops.attention(*arguments[:4], None, None, None, *arguments[4:])
    if kind is not None:
        eager.remember(kind, given, arguments, with_lse=return_lse)
    return _with_true_lse(query, cu_seqlens_q, settings[3], o, lse, k_mean) if return_lse else o


def _with_true_lse(
    query: Tensor, cu_seqlens_q: Tensor | None, scale: float, o: Tensor, *lse_and_mean: Tensor
) -> Tensor | tuple[Tensor, Tensor]:
    """o, and where it is given lse with what K-smoothing took off."""
    if not lse_and_mean:
        return o
    lse, k_mean = lse_and_mean
    k_mean = k_mean.repeat_interleave(query.shape[1] // k_mean.shape[1], 1)
    if cu_seqlens_q is None:
        return o, lse + (query.to(lse.dtype) * k_mean.unsqueeze(2)).sum(-1) * scale
    tokens = torch.arange(query.shape[0], device=query.device, dtype=cu_seqlens_q.dtype)
    sequence = torch.searchsorted(cu_seqlens_q[1:], tokens, right=True)
    return o, lse + (query.to(lse.dtype) * k_mean[sequence]).sum(-1).T * scale


def ask_of(query: Tensor, value: Tensor, recipe: str | Recipe, impl: str | None, masked: bool = False) -> Ask:
    """What `sagebwd.dispatch.choose` is asked for a call on tensors, or on what has their shape, dtype and device.

    recipe, impl: as the public functions take them. masked: by a mask that is more than key padding.
    """
    return Ask.of(query, value, _switched(recipe), impl, masked)


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


def _settings(
    query: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float,
    window: tuple[int, int] | None,
    recipe: str | Recipe,
    impl: str | None,
    masked: bool = False,
) -> tuple[bool, int, int, float, str, str, bool]:
    """The checked scalar arguments of the operator, in its order."""
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal={is_causal!r} must be True or False")
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"scale={scale!r} must be a number or None")
    if not abs(scale) < math.inf:  # NaN too; math.isfinite cannot be traced
        raise ValueError(f"scale={scale} must be finite")
    left, right = _window(window)
    if torch.compiler.is_compiling():  # the operators choose: what is asked of a device cannot be traced
        dispatch.check_traced(impl, query.device, query.dtype)
        recipe, impl = str(_switched(recipe)), impl or dispatch.FASTEST
    else:
        choice = dispatch.choose(ask_of(query, value, recipe, impl, masked))
        recipe, impl = str(choice.recipe), choice.name
    return is_causal, left, right, float(scale), recipe, impl, switches.current.deterministic


def _window(window: tuple[int, int] | None) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window={window!r} must be None or (left, right) in tokens, -1 for no limit")
    for side in window:
        if isinstance(side, bool) or not isinstance(side, int) or side < -1:
            raise ValueError(f"window={window!r} must hold two integers, each at least 0, or -1 for no limit")
    return window[0], window[1]


def _check_kind(*tensors: Tensor) -> None:
    """Raises for what is no plain tensor, and for transforms that the operator has no rules for."""
    for name, tensor in zip(("query", "key", "value"), tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if tensor.is_nested:
            raise NotImplementedError(
                f"{name}: nested tensors are not supported; use sage_attention_varlen with values() and offsets(), or "
                f"{_SDPA}"
            )
    if torch.compiler.is_compiling():
        return
    if torch.jit.is_tracing():
        raise NotImplementedError(f"torch.jit.trace is not supported; use torch.compile or torch.export, or {_SDPA}")
    if forward_ad._current_level >= 0:
        for name, tensor in zip(("query", "key", "value"), tensors):
            if forward_ad.unpack_dual(tensor).tangent is not None:  # the operator would drop it without a word
                raise NotImplementedError(
                    f"{name}: forward-mode differentiation (torch.func.jvp, forward_ad) is not supported; use "
                    f"backward, or {_SDPA}"
                )
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if transforms and (differentiated or any(x.key() == torch._C._functorch.TransformType.Grad for x in transforms)):
        raise NotImplementedError(
            f"gradients of torch.func (grad, vjp, jacrev) and under vmap are not supported; use backward, or {_SDPA}"
        )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast casts to on a device; None where it is off or the device has none (meta)."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype, where autocast is on: rotary embeddings and norms leave q and k in FP32."""
    dtype = autocast_dtype(tensors[0].device)
    if dtype is None:
        return tensors
    castable = (torch.bfloat16, torch.float16, torch.float32)
    return tuple(tensor.to(dtype) if tensor.dtype in castable else tensor for tensor in tensors)


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


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, dims: int, layout: str) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != dims:
            raise ValueError(f"{name}: expected {dims} dimensions {layout}, got shape {tuple(tensor.shape)}")
        if tensor.dtype not in REFERENCE_DTYPES:
            raise TypeError(
                f"{name}: dtype {tensor.dtype} is not supported; accepted: {', '.join(table.REFERENCE_DTYPES)}"
            )
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name}: dtype {tensor.dtype} differs from query's {query.dtype}; they must be equal")
        if tensor.device != query.device:
            raise ValueError(f"{name}: device {tensor.device} differs from query's {query.device}")
        if not 1 <= tensor.shape[-1] <= table.MAX_HEAD_DIM:
            raise ValueError(
                f"{name}: head_dim {tensor.shape[-1]} is not supported; accepted: 1 to {table.MAX_HEAD_DIM}. "
                "Keep torch.nn.functional.scaled_dot_product_attention for this layer"
            )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key: head_dim {key.shape[-1]} differs from query's {query.shape[-1]}; they must be equal")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"value: shape {tuple(value.shape)} differs from key's {tuple(key.shape)}; they must be equal"
        )


def _check_heads(heads: int, kv_heads: int, enable_gqa: bool) -> None:
    if heads == kv_heads:
        return
    if not enable_gqa:
        raise ValueError(f"key: {kv_heads} heads for query's {heads}; pass enable_gqa=True to share key heads")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"key: {kv_heads} heads do not divide query's {heads}")


def _check_offsets(name: str, offsets: Tensor, device: torch.device) -> None:
    if not isinstance(offsets, Tensor):
        raise TypeError(f"{name}: expected an int32 tensor, got {type(offsets).__name__}")
    if offsets.dtype != torch.int32 or offsets.dim() != 1 or offsets.shape[0] < 2:
        raise ValueError(
            f"{name}: expected int32 of shape (sequences + 1,), got {offsets.dtype} of shape {tuple(offsets.shape)}"
        )
    if offsets.device != device:
        raise ValueError(f"{name}: device {offsets.device} differs from query's {device}")
