"""The portable forward: which passes run, and what they hand on."""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd.call import Call, Saved, empty_like_rows
from sagebwd.kernels.operands.codes import Quantized, launch_quantize
from sagebwd.kernels.operands.means import launch_statistics
from sagebwd.kernels.portable.first_key import FirstKey
from sagebwd.kernels.portable.forward import Values, launch_forward
from sagebwd.kernels.portable.smooth_q import SmoothQ
from sagebwd.kernels.support import P_LEVELS, other_dtype, outside
from sagebwd.recipe import FP8, INT8, SIXTEEN_BIT, Recipe

BLOCK_SIZES = (32, 64, 128)


def unsupported(recipe: Recipe, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run a forward, or None."""
    if head_dim > 256:
        return f"head_dim {head_dim} is over 256"
    return (
        other_dtype(dtype)
        or outside("block_q=", recipe.block_q, BLOCK_SIZES)
        or outside("block_k=", recipe.block_k, BLOCK_SIZES)
        or outside("p_levels=", recipe.p_levels, P_LEVELS)
    )


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
    """o, lse of the smoothed scores, and what backward reads."""
    recipe, queries, keys, key_mask = call.recipe, call.queries, call.keys, call.key_mask
    s_int8, o_int8, fp8 = recipe.s == INT8, recipe.o == INT8, recipe.dv == FP8
    v_psi = o_int8 or (fp8 and recipe.smooth_v)  # of V less its mean; an FP8 backward then reads its scales
    first_apart = o_int8 and recipe.first_key == SIXTEEN_BIT
    q_int8, k_int8 = INT8 in (recipe.s, recipe.dk), INT8 in (recipe.s, recipe.dq)
    k_mean, v_mean, v_scale, first_key = launch_statistics(
        k, v, keys, key_mask, smooth_k=recipe.smooth_k, smooth_v=v_psi and recipe.smooth_v,
        v_scale=v_psi and recipe.v_scale == "sequence", first_key=first_apart, k_sampled=recipe.k_mean == "sample",
    )  # fmt: skip
    k_shift, v_shift = k_mean if recipe.smooth_k else None, v_mean if o_int8 and recipe.smooth_v else None

    q_pass, k_pass, v_pass = Quantized(), Quantized(), Quantized()
    if q_int8 or recipe.smooth_q:
        smoothed = recipe.smooth_q and not s_int8
        q_pass = launch_quantize(
            q, queries, recipe.q_scale, recipe.block_q, codes=q_int8, smoothed=smoothed, block_mean=recipe.smooth_q,
        )  # fmt: skip
    k_smoothed = not s_int8 and recipe.smooth_k
    if k_int8 or k_smoothed:
        k_pass = launch_quantize(
            k, keys, recipe.k_scale, recipe.block_k, k_shift, key_mask, codes=k_int8, smoothed=k_smoothed,
        )  # fmt: skip
    v_smoothed = not o_int8 and key_mask is not None  # a masked key's V may be anything, NaN too
    if o_int8 or v_smoothed:
        v_pass = launch_quantize(
            v, keys, recipe.v_scale if o_int8 else "token", recipe.block_k, v_shift, key_mask, sequence_scale=v_scale,
            transposed=o_int8, column_sum=torch.float32 if o_int8 and recipe.p_levels == 254 else None,
            smoothed=v_smoothed, first_row=first_apart, first_key=first_key,
        )  # fmt: skip

    o = empty_like_rows(q)
    v_operand = v_pass.transposed if o_int8 else v_pass.smoothed if v_smoothed else v
    v_strides = (0, 0, 0) if o_int8 else keys.strides(v_operand)
    v_group_scale = v_pass.block_scale if v_scale is None else v_scale
    k_operand = k_pass.codes if s_int8 else k_pass.smoothed if k_smoothed else k
    lse, row_max = launch_forward(
        call,
        q_pass.codes if s_int8 else q_pass.smoothed if recipe.smooth_q else q,
        k_operand,
        Values(v_operand, *v_strides, v_group_scale, v_pass.column_sum, v_shift),
        q_pass.token_scale,
        k_pass.token_scale,
        SmoothQ.of(q_pass.block_mean, k_mean, k, keys) if recipe.smooth_q else None,
        FirstKey.of(k_operand, v_pass.first_row, first_key, None if call.lists is None else call.lists.by_query),
        o,
    )
    q_scale, k_scale = q_pass.token_scale if q_int8 else None, k_pass.token_scale if k_int8 else None
    return Saved(o, lse, q_pass.codes, q_scale, k_pass.codes, k_scale, row_max, v_scale if fp8 else None, k_mean)
