"""The portable backward: which passes run, then dQ in one kernel and dK with dV in another."""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd.call import Call, Saved, empty_gradients
from sagebwd.kernels.operands.codes import launch_quantize
from sagebwd.kernels.operands.grad_out import launch_grad_out
from sagebwd.kernels.operands.transposed import launch_transpose
from sagebwd.kernels.portable import host
from sagebwd.kernels.portable.config import maxima_shape, shares_maxima
from sagebwd.kernels.portable.dkdv import launch_dkdv
from sagebwd.kernels.portable.dq import launch_dq
from sagebwd.kernels.portable.smooth_q import SmoothQ
from sagebwd.recipe import FP8, INT8, SIXTEEN_BIT, Recipe


def unsupported(recipe: Recipe, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run a backward, or None."""
    if recipe.dp != SIXTEEN_BIT:
        return "dp='int8' is for error studies: only impl='reference' computes it"
    if FP8 in (recipe.dv, recipe.dq, recipe.dk):
        return "FP8 products run on compute capability 9.0 alone, with head_dim 64 or 128"
    return host.unsupported(recipe, head_dim, dtype)


def backward(
    call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv. Without atomics, so every run is bit for bit the same whether ``deterministic`` or not."""
    recipe, queries, keys, key_mask = call.recipe, call.queries, call.keys, call.key_mask
    o, lse, q_int8, q_scale, k_int8, k_scale, _, _, k_mean = saved
    s_int8, dq_int8, dk_int8 = (getattr(recipe, name) == INT8 for name in ("s", "dq", "dk"))

    q_rows, k_rows, smooth_q = q, k, None
    # a masked key's K may be anything, NaN too
    if k is not None and (recipe.smooth_k or key_mask is not None) and not (s_int8 and dq_int8):
        shift = k_mean if recipe.smooth_k else None
        k_rows = launch_quantize(k, keys, "token", recipe.block_k, shift, key_mask, smoothed=True).smoothed
    if recipe.smooth_q:
        q_pass = launch_quantize(q_rows, queries, "token", recipe.block_q, smoothed=True, block_mean=True)
        q_rows, smooth_q = q_pass.smoothed, SmoothQ.of(q_pass.block_mean, k_mean, k, keys)
    q_operand, k_operand = (q_int8, k_int8) if s_int8 else (q_rows, k_rows)
    k_t = launch_transpose(k_int8, keys, recipe.block_k)[0] if dq_int8 else None
    row_values, do_scale, do_t, q_t = launch_grad_out(
        call, do, o, lse, dlse, q_scale if s_int8 or dk_int8 else None, q_int8 if dk_int8 else None
    )
    shared = q_operand, k_operand, v, do, k_scale
    tile_maxima = _tile_maxima(call)
    dq, dk, dv = empty_gradients(recipe, o, v)
    launch_dq(call, *shared, k_t, k_rows, row_values, smooth_q, tile_maxima, dq)
    launch_dkdv(call, *shared, do_scale, q_t, do_t, q_rows, row_values, smooth_q, tile_maxima, dk, dv)
    return dq, dk, dv


def _tile_maxima(call: Call) -> Tensor | None:
    """Room for two maxima of every tile, which dQ's kernel finds and dK and dV's reads; None for its own."""
    if not shares_maxima(call):
        return None
    return torch.empty(maxima_shape(call), dtype=torch.float32, device=call.device)
