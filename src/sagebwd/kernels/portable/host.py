"""Forward and backward as `sagebwd.ops` calls them: which passes run and what they hand on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sagebwd.kernels.call import P_LEVELS, Call, Packing, SmoothQ, aligned_rows, capability, contiguous
from sagebwd.kernels.operands.means import launch_statistics
from sagebwd.kernels.operands.passes import (
    Quantized,
    launch_grad_out,
    launch_quantize,
    launch_transpose,
)
from sagebwd.kernels.portable.dkdv import launch_dkdv
from sagebwd.kernels.portable.dq import launch_dq
from sagebwd.kernels.portable.forward import launch_forward
from sagebwd.kernels.replay import Launch, repeat
from sagebwd.recipe import FP8, INT8, SIXTEEN_BIT, Recipe

BLOCK_SIZES = (32, 64, 128)


def unsupported(recipe: Recipe, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run a call, or None."""
    if recipe.dp != SIXTEEN_BIT:
        return "dp='int8' is for error studies: only impl='reference' computes it"
    if FP8 in (recipe.dv, recipe.dq, recipe.dk):
        return "FP8 products run on compute capability 9.0 alone, with head_dim 64 or 128"
    if head_dim > 256:
        return f"head_dim {head_dim} is over 256"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} is neither bfloat16 nor float16"
    for name, computed in (("block_q", BLOCK_SIZES), ("block_k", BLOCK_SIZES), ("p_levels", P_LEVELS)):
        if getattr(recipe, name) not in computed:
            return f"{name}={getattr(recipe, name)} is not one of {', '.join(map(str, computed))}"
    return None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    """o, lse of the smoothed scores, and what backward reads, in the order of `sagebwd.ops`."""
    q, k, v, key_mask = *map(aligned_rows, (q, k, v)), contiguous(key_mask)
    return repeat(
        _forward, q, k, v, key_mask, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window_left,
        window_right, scale, recipe,
    )  # fmt: skip


def _forward(
    launch: Launch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    queries, keys = Packing.of(q, cu_seqlens_q, max_seqlen_q), Packing.of(k, cu_seqlens_k, max_seqlen_k)
    call = Call(
        recipe, scale, q.dtype, q.shape[-1], queries, keys, key_mask, is_causal, window_left, window_right,
        capability(q.device), launch,
    )  # fmt: skip
    s_int8, o_int8 = recipe.s == INT8, recipe.o == INT8
    first_apart = o_int8 and recipe.first_key == SIXTEEN_BIT
    q_int8, k_int8 = INT8 in (recipe.s, recipe.dk), INT8 in (recipe.s, recipe.dq)
    k_mean, v_mean, v_scale, first_key = launch_statistics(
        k, v, keys, key_mask, smooth_k=recipe.smooth_k, smooth_v=o_int8 and recipe.smooth_v,
        v_scale=o_int8 and recipe.v_scale == "sequence", first_key=first_apart, launch=launch,
    )  # fmt: skip
    k_shift, v_shift = k_mean if recipe.smooth_k else None, v_mean if o_int8 and recipe.smooth_v else None

    q_pass, k_pass, v_pass = Quantized(), Quantized(), Quantized()
    if q_int8 or recipe.smooth_q:
        smoothed = recipe.smooth_q and not s_int8
        q_pass = launch_quantize(
            q, queries, recipe.q_scale, recipe.block_q, codes=q_int8, smoothed=smoothed, block_mean=recipe.smooth_q,
            launch=launch,
        )  # fmt: skip
    k_smoothed = not s_int8 and recipe.smooth_k
    if k_int8 or k_smoothed:
        k_pass = launch_quantize(
            k, keys, recipe.k_scale, recipe.block_k, k_shift, key_mask, codes=k_int8, smoothed=k_smoothed,
            launch=launch,
        )  # fmt: skip
    v_smoothed = not o_int8 and key_mask is not None  # a masked key's V may be anything, NaN too
    if o_int8 or v_smoothed:
        v_pass = launch_quantize(
            v, keys, recipe.v_scale if o_int8 else "token", recipe.block_k, v_shift, key_mask, sequence_scale=v_scale,
            transposed=o_int8, column_sum=torch.float32 if o_int8 and recipe.p_levels == 254 else None,
            smoothed=v_smoothed, first_row=torch.float32 if first_apart else None, first_key=first_key, launch=launch,
        )  # fmt: skip

    o, lse = launch_forward(
        call,
        q_pass.codes if s_int8 else q_pass.smoothed if recipe.smooth_q else q,
        k_pass.codes if s_int8 else k_pass.smoothed if k_smoothed else k,
        v_pass.transposed if o_int8 else v_pass.smoothed if v_smoothed else v,
        q_pass.token_scale,
        k_pass.token_scale,
        v_pass.block_scale if v_scale is None else v_scale,
        v_pass.column_sum,
        v_shift,
        SmoothQ(q_pass.block_mean, k, k_mean) if recipe.smooth_q else SmoothQ(),
        v_pass.first_row,
        first_key,
    )

    def nothing(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(0, dtype=dtype, device=q.device)

    saved_q = (q_pass.codes, q_pass.token_scale) if q_int8 else (nothing(torch.int8), nothing())
    saved_k = (k_pass.codes, k_pass.token_scale) if k_int8 else (nothing(torch.int8), nothing())
    return o, lse, *saved_q, *saved_k, nothing(), nothing(), k_mean


def backward(
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
    v_scale: Tensor,
    k_mean: Tensor,
    key_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
    recipe: Recipe,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv. Without atomics, so every run is bit for bit the same whether ``deterministic`` or not."""
    do, q, k, v, o, q_int8, k_int8 = map(aligned_rows, (do, q, k, v, o, q_int8, k_int8))
    dlse, key_mask = contiguous(dlse), contiguous(key_mask)
    return repeat(
        _backward, do, dlse, q, k, v, o, lse, q_int8, q_scale, k_int8, k_scale, k_mean, key_mask, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window_left, window_right, scale, recipe,
    )  # fmt: skip


def _backward(
    launch: Launch,
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
    k_mean: Tensor,
    key_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
    recipe: Recipe,
) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys = Packing.of(o, cu_seqlens_q, max_seqlen_q), Packing.of(v, cu_seqlens_k, max_seqlen_k)
    call = Call(
        recipe, scale, o.dtype, o.shape[-1], queries, keys, key_mask, is_causal, window_left, window_right,
        capability(o.device), launch,
    )  # fmt: skip
    s_int8, dq_int8, dk_int8 = (getattr(recipe, name) == INT8 for name in ("s", "dq", "dk"))

    q_rows, k_rows, smooth_q = q, k, SmoothQ()
    if k is not None and recipe.smooth_k and not (s_int8 and dq_int8):
        k_rows = launch_quantize(
            k, keys, "token", recipe.block_k, k_mean, key_mask, smoothed=True, launch=launch
        ).smoothed
    if recipe.smooth_q:
        q_pass = launch_quantize(
            q_rows, queries, "token", recipe.block_q, smoothed=True, block_mean=True, launch=launch
        )
        q_rows, smooth_q = q_pass.smoothed, SmoothQ(q_pass.block_mean, k, k_mean)
    q_operand, k_operand = (q_int8, k_int8) if s_int8 else (q_rows, k_rows)
    k_t = launch_transpose(k_int8, keys, recipe.block_k, launch=launch)[0] if dq_int8 else None
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
