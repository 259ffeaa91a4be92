"""The portable kernels: which passes run and what they hand on, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd.call import Call, Saved, empty_gradients, empty_like_rows
from sagebwd.kernels.common.centered_values import launch_centered_values
from sagebwd.kernels.common.means import launch_statistics
from sagebwd.kernels.common.preprocess_do import launch_preprocess_do
from sagebwd.kernels.common.quantize import Quantized, launch_quantize
from sagebwd.kernels.common.transposed import launch_transpose
from sagebwd.kernels.portable import lists
from sagebwd.kernels.portable.config import maxima_shape, shares_maxima, value_rows
from sagebwd.kernels.portable.dkdv import launch_dkdv
from sagebwd.kernels.portable.dq import launch_dq
from sagebwd.kernels.portable.first_keys import FirstKeys
from sagebwd.kernels.portable.forward import Values, launch_forward
from sagebwd.recipe import INT8


def prepare(direction: str, call: Call) -> Call:
    """The call with lists of its mask's blocks, where there is a mask."""
    if call.mask is None:
        return call
    return call._replace(mask=None, lists=(lists.of_forward if direction == "forward" else lists.of_backward)(call))


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
    """o, lse of the smoothed scores, and what backward reads."""
    recipe, queries, keys, key_mask = call.recipe, call.queries, call.keys, call.key_mask
    s_int8, o_int8 = recipe.s == INT8, recipe.o == INT8
    apart = recipe.first_keys if o_int8 else 0
    q_int8, k_int8 = INT8 in (recipe.s, recipe.dk), INT8 in (recipe.s, recipe.dq)
    k_mean, v_mean, v_scale, number = launch_statistics(recipe, k, v, keys, key_mask)
    k_shift, v_shift = k_mean if recipe.smooth_k else None, v_mean if o_int8 and recipe.smooth_v else None

    q_pass, k_pass, v_pass = Quantized(), Quantized(), Quantized()
    turned = call.turned
    if q_int8:
        q_pass = launch_quantize(q, queries, recipe.q_scale, recipe.block_q, codes=True, turned=turned)
    k_smoothed = not s_int8 and recipe.smooth_k
    if k_int8 or k_smoothed:
        k_pass = launch_quantize(
            k, keys, recipe.k_scale, recipe.block_k, k_shift, key_mask, codes=k_int8, smoothed=k_smoothed,
            turned=k_int8 * turned,
        )  # fmt: skip
    v_smoothed = not o_int8 and key_mask is not None  # a masked key's V may be anything, NaN too
    if o_int8 or v_smoothed:
        v_pass = launch_quantize(
            v, keys, recipe.v_scale if o_int8 else "token", recipe.block_k, v_shift, key_mask, sequence_scale=v_scale,
            transposed=o_int8, column_sum=o_int8 and recipe.p_levels == 254,
            smoothed=v_smoothed,
        )  # fmt: skip

    o = empty_like_rows(q)
    v_operand = v_pass.transposed if o_int8 else v_pass.smoothed if v_smoothed else v
    v_strides = (0, 0, 0) if o_int8 else keys.strides(v_operand)
    v_group_scale = v_pass.block_scale if v_scale is None else v_scale
    k_operand = k_pass.codes if s_int8 else k_pass.smoothed if k_smoothed else k
    listed = None if call.lists is None else call.lists.by_query
    lse, row_max = launch_forward(
        call,
        q_pass.codes if s_int8 else q,
        k_operand,
        Values(v_operand, *v_strides, v_group_scale, v_pass.column_sum, v_shift),
        q_pass.token_scale,
        k_pass.token_scale,
        FirstKeys.of(v, keys, number, listed, apart),
        o,
    )
    q_scale, k_scale = q_pass.token_scale if q_int8 else None, k_pass.token_scale if k_int8 else None
    return Saved(o, lse, q_pass.codes, q_scale, k_pass.codes, k_scale, row_max, k_mean)


def backward(
    call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv. Without atomics, so every run is bit for bit the same whether ``deterministic`` or not."""
    recipe, keys, key_mask = call.recipe, call.keys, call.key_mask
    k_int8, s_int8, dq_int8 = saved.k_int8, recipe.s == INT8, recipe.dq == INT8

    k_rows = k
    # a masked key's K may be anything, NaN too
    if k is not None and (recipe.smooth_k or key_mask is not None) and not (s_int8 and dq_int8):
        shift = saved.k_mean if recipe.smooth_k else None
        k_rows = launch_quantize(k, keys, "token", recipe.block_k, shift, key_mask, smoothed=True).smoothed
    q_operand, k_operand = (saved.q_int8, k_int8) if s_int8 else (q, k_rows)
    dq, dk, dv = empty_gradients(call.head_dim, saved.o, v)
    # dK is written last: its memory has K^T until then
    k_t = launch_transpose(k_int8, keys, recipe.block_k, dk) if dq_int8 else None
    values = launch_centered_values(call, saved, v, rows=value_rows(call)) if recipe.dp == INT8 else None
    row_values, do_scale, do_t, q_t, do_int8 = launch_preprocess_do(call, saved, do, dlse, values)
    of_dp = (v, do) if values is None else (values.v_int8, do_int8)
    shared = q_operand, k_operand, *of_dp, saved.k_scale, None if values is None else values.v_scale
    tile_maxima = _tile_maxima(call, do)
    launch_dq(call, *shared, k_t, k_rows, row_values, tile_maxima, dq)
    launch_dkdv(call, *shared, do_scale, q_t, do_t, q, do, row_values, tile_maxima, dk, dv)
    return dq, dk, dv


def _tile_maxima(call: Call, like: Tensor) -> Tensor | None:
    """Room for two maxima of every tile, which dQ's kernel finds and dK and dV's reads; None for its own."""
    if not shares_maxima(call):
        return None
    return torch.empty(maxima_shape(call), dtype=torch.float32, device=like.device)
