"""The operator of `sagebwd.kernels.norm_rope`, as torch.compile sees it: schema, shapes, autograd.

``sagebwd::qk_norm_rope`` and its backward run Triton's kernels; `sagebwd.norm_rope.functions` has the arguments, and
composes `sagebwd.norm_rope.composed` where it asks for no kernels.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from sagebwd import dispatch
from sagebwd.call import empty_like_rows
from sagebwd.derivatives import once_differentiable, refuse_batched, savable
from sagebwd.kernels.runtime.device import device_of
from sagebwd.ops import LIBRARY, differentiable, operator


@cache
def _kernels() -> ModuleType:
    return importlib.import_module("sagebwd.kernels.norm_rope")


@operator
def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, q_cos: Tensor | None, q_sin: Tensor | None,
    k_cos: Tensor | None, k_sin: Tensor | None, eps: float | None, interleaved: bool, dtype: torch.dtype | None,
    q_offsets: Tensor | None = None, k_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Q and K normalised and rotated, and 1 / rms of their rows, empty where there is no norm.

    Shapes: q (B, Hq, N, D), k (B, Hkv, M, D), weights (D,), cos and sin (B or 1, N or M, R), 1 / rms (B, H, N) FP32.
    eps is None for no norm; dtype, of the results, None for each input's own. q_offsets, k_offsets: cu_seqlens of rows
    that are packed sequences, (1, H, total, D): backward takes none behind the last.
    """
    given = q, k, q_weight, k_weight, q_cos, q_sin, k_cos, k_sin, eps, interleaved, dtype
    with device_of(q):
        *outputs, q_inverse_rms, k_inverse_rms = dispatch.runtime().program.run(_kernels().forward, *given)
    if eps is None:
        q_inverse_rms, k_inverse_rms = (q.new_empty(0, dtype=torch.float32) for _ in range(2))
    return *outputs, q_inverse_rms, k_inverse_rms


@torch.library.register_fake("sagebwd::qk_norm_rope", lib=LIBRARY)
def _(q, k, q_weight, k_weight, q_cos, q_sin, k_cos, k_sin, eps, interleaved, dtype, *offsets):
    shapes = [(0,) if eps is None else x.shape[:-1] for x in (q, k)]
    rows = (empty_like_rows(x, dtype=dtype) for x in (q, k))
    return *rows, *(q.new_empty(shape, dtype=torch.float32) for shape in shapes)


@operator
def qk_norm_rope_backward(
    dq_out: Tensor, dk_out: Tensor, q: Tensor | None, k: Tensor | None, q_inverse_rms: Tensor, k_inverse_rms: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, q_cos: Tensor | None, q_sin: Tensor | None, k_cos: Tensor | None,
    k_sin: Tensor | None, q_offsets: Tensor | None, k_offsets: Tensor | None, interleaved: bool, q_dtype: torch.dtype,
    k_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q and k in their dtypes, and of the weights (D,) FP32, empty where there are none.

    q and k are given where there is a norm. A weight's is summed over programs in one order.
    """
    with_norm = q is not None
    inverse_rms = (q_inverse_rms, k_inverse_rms) if with_norm else (None, None)
    tensors = q_weight, k_weight, q_cos, q_sin, k_cos, k_sin, q_offsets, k_offsets
    given = dq_out, dk_out, q, k, *inverse_rms, *tensors, interleaved, (q_dtype, k_dtype)
    with device_of(dq_out):
        *gradients, q_shares, k_shares = dispatch.runtime().program.run(_kernels().backward, *given)
    nothing = dq_out.new_empty((0, 0), dtype=torch.float32)
    return *gradients, *(nothing.sum(0) if x is None else x.sum(0) for x in (q_shares, k_shares))


@torch.library.register_fake("sagebwd::qk_norm_rope_backward", lib=LIBRARY)
def _(dq_out, dk_out, q, k, q_inverse_rms, k_inverse_rms, q_weight, k_weight, *settings):
    *_, q_dtype, k_dtype = settings
    dq = empty_like_rows(dq_out if q is None else q, dtype=q_dtype)
    dk = empty_like_rows(dk_out if k is None else k, dtype=k_dtype)
    shapes = [(0,) if weight is None else weight.shape for weight in (q_weight, k_weight)]
    return dq, dk, *(dq_out.new_empty(shape, dtype=torch.float32) for shape in shapes)


class _NormRope(torch.autograd.Function):
    """The derivative of ``sagebwd::qk_norm_rope``; below: the operator's kernels below autograd."""

    @staticmethod
    def forward(ctx, below, *arguments):
        q, k, *tensors, eps, interleaved, _ = arguments[:11]
        *outputs, q_inverse_rms, k_inverse_rms = below(*arguments)
        ctx.mark_non_differentiable(q_inverse_rms, k_inverse_rms)
        ctx.settings = interleaved, q.dtype, k.dtype
        inputs = (None, None) if eps is None else (q, k)  # a rotation reads none
        offsets = arguments[11:] or (None, None)
        kept = *tensors, *offsets
        ctx.save_for_backward(*savable(*inputs, q_inverse_rms, k_inverse_rms, *kept))
        return *outputs, q_inverse_rms, k_inverse_rms

    @staticmethod
    def backward(ctx, dq_out, dk_out, *_):
        refuse_batched(dq_out, dk_out)
        saved = ctx.saved_tensors
        with torch.no_grad():
            *gradients, dq_weight, dk_weight = qk_norm_rope_backward(dq_out, dk_out, *saved, *ctx.settings)
        for weight, gradient in zip(saved[4:6], (dq_weight, dk_weight)):
            gradients.append(None if weight is None else gradient.to(weight.dtype))
        needed = [x if need else None for x, need in zip(gradients, ctx.needs_input_grad[1:5])]
        if torch.is_grad_enabled():  # create_graph=True
            needed = once_differentiable((dq_out, dk_out, *saved), needed)
        return None, *needed, *(None,) * (len(ctx.needs_input_grad) - 5)


differentiable(_NormRope, qk_norm_rope, ("q", "k", "q_weight", "k_weight"))
