"""The portable backward: which passes run, then dQ in one kernel and dK with dV in another."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sagebwd.call import Call, Saved
from sagebwd.kernels.operands.codes import launch_quantize
from sagebwd.kernels.operands.grad_out import launch_grad_out
from sagebwd.kernels.operands.transposed import launch_transpose
from sagebwd.kernels.portable import host
from sagebwd.kernels.portable.descriptor import SmoothQ
from sagebwd.kernels.portable.dkdv import launch_dkdv
from sagebwd.kernels.portable.dq import launch_dq
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

    q_rows, k_rows, smooth_q = q, k, SmoothQ()
    if k is not None and recipe.smooth_k and not (s_int8 and dq_int8):
        k_rows = launch_quantize(k, keys, "token", recipe.block_k, k_mean, key_mask, smoothed=True).smoothed
    if recipe.smooth_q:
        q_pass = launch_quantize(q_rows, queries, "token", recipe.block_q, smoothed=True, block_mean=True)
        q_rows, smooth_q = q_pass.smoothed, SmoothQ(q_pass.block_mean, k, k_mean)
    q_operand, k_operand = (q_int8, k_int8) if s_int8 else (q_rows, k_rows)
    k_t = launch_transpose(k_int8, keys, recipe.block_k)[0] if dq_int8 else None
    row_values, do_scale, do_t, q_t = launch_grad_out(
        call, do, o, lse, dlse, q_scale if s_int8 or dk_int8 else None, q_int8 if dk_int8 else None
    )
    shared = q_operand, k_operand, v, do, k_scale
    tile_maxima = _tile_maxima(call, do, v)
    dq = launch_dq(call, *shared, k_t, k_rows, row_values, smooth_q, tile_maxima)
    dk, dv = launch_dkdv(call, *shared, do_scale, q_t, do_t, q_rows, row_values, smooth_q, tile_maxima)
    return dq, dk, dv


def _tile_maxima(call: Call, do: Tensor, v: Tensor) -> Tensor | None:
    """Room for two maxima of every tile, which the dQ kernel finds and the dK and dV kernel reads; None for its own.

    Shared where both quantise the same dS: a tile at a time, Q's and K's scales left out. The table grows with queries
    times keys and memory must not: there is none where it would be larger than dQ and dK (beyond 131072 tokens for
    `paper` at head_dim 64), at the same numbers but for the order of FP32 additions.
    """
    recipe, queries, keys = call.recipe, call.queries, call.keys
    int8 = all(getattr(recipe, name) == INT8 for name in ("dv", "dq", "dk"))
    tiles = {recipe.p_scale_dv, recipe.ds_scale_dq, recipe.ds_scale_dk} == {"tile"}
    if not (int8 and tiles and recipe.q_scale == recipe.k_scale == "block"):
        return None
    shape = queries.heads_in_all, keys.grid(recipe.block_k), queries.blocks(recipe.block_q), 2
    if 4 * math.prod(shape) > max(do.nbytes, v.nbytes):
        return None
    return torch.empty(shape, dtype=torch.float32, device=do.device)
