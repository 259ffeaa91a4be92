"""The portable kernels: which passes run and what they hand on, forward and backward."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sagebwd.cache import TAKEN
from sagebwd.call import Call, Saved, empty_gradients, empty_like_rows
from sagebwd.kernels.capabilities import is_wide
from sagebwd.kernels.common.centered_values import launch_centered_values
from sagebwd.kernels.common.means import launch_statistics
from sagebwd.kernels.common.preprocess_do import launch_preprocess_do, row_values_of
from sagebwd.kernels.common.quantize import Quantized, launch_quantize
from sagebwd.kernels.common.transposed import launch_transpose
from sagebwd.kernels.portable import lists
from sagebwd.kernels.portable.config import maxima_shape, shares_maxima, value_rows
from sagebwd.kernels.portable.dkdv import launch_dkdv
from sagebwd.kernels.portable.dq import launch_dq
from sagebwd.kernels.portable.first_keys import FirstKeys
from sagebwd.kernels.portable.forward import Values, launch_forward
from sagebwd.kernels.runtime.parts import parts_of
from sagebwd.recipe import INT8

# A part's operands may take one in so many of the bytes of O and the gradients, and always so many bytes.
SHARE_OF_OPERANDS, LEAST_OPERANDS = 5, 2**26


def prepare(direction: str, call: Call) -> Call:
    """The call with lists of its mask's blocks, where there is a mask."""
    if call.mask is None:
        return call
    return call._replace(mask=None, lists=(lists.of_forward if direction == "forward" else lists.of_backward)(call))


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
    """o, lse of the smoothed scores, and what backward reads."""
    recipe, keys, key_mask = call.recipe, call.keys, call.key_mask
    s_int8, o_int8 = recipe.s == INT8, recipe.o == INT8
    apart = recipe.first_keys if o_int8 else 0
    # of wide heads backward makes codes anew, of q and k
    kept = not is_wide(call.head_dim, call.value_dim)
    q_int8, k_int8 = (s_int8 or (kept and x == INT8) for x in (recipe.dk, recipe.dq))
    k_mean, v_mean, v_scale, number = launch_statistics(recipe, k, v, keys, key_mask)
    k_shift, v_shift = k_mean if recipe.smooth_k else None, v_mean if o_int8 and recipe.smooth_v else None

    q_pass, k_pass, v_pass = Quantized(), Quantized(), Quantized()
    if q_int8:
        q_pass = _codes_of_q(call, q)
    k_smoothed = not s_int8 and recipe.smooth_k
    if k_int8 or k_smoothed:
        k_pass = _codes_of_k(call, k, k_shift, codes=k_int8, smoothed=k_smoothed)
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
    if not kept:
        return Saved(o, lse, None, None, None, None, row_max, k_mean)
    q_scale, k_scale = q_pass.token_scale if q_int8 else None, k_pass.token_scale if k_int8 else None
    return Saved(o, lse, q_pass.codes, q_scale, k_pass.codes, k_scale, row_max, k_mean)


def _codes_of_q(call: Call, q: Tensor) -> Quantized:
    recipe = call.recipe
    return launch_quantize(q, call.queries, recipe.q_scale, recipe.block_q, codes=True, turned=call.turned)


def _codes_of_k(
    call: Call, k: Tensor, shift: Tensor | None, *, codes: bool = True, smoothed: bool = False
) -> Quantized:
    """shift: K's mean where it is taken off."""
    recipe = call.recipe
    return launch_quantize(
        k, call.keys, recipe.k_scale, recipe.block_k, shift, call.key_mask, codes=codes, smoothed=smoothed,
        turned=codes * call.turned,
    )  # fmt: skip


def backward(
    call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv. Without atomics, so every run is bit for bit the same whether ``deterministic`` or not."""
    dq, dk, dv = empty_gradients(call.head_dim, saved.o, v)
    row_values = row_values_of(call, do.device)
    if call.recipe.s != INT8 or not is_wide(call.head_dim, call.value_dim):
        _write(call, _with_codes(call, saved, q, k), do, dlse, q, k, v, row_values, dq, dk, dv)
        return dq, dk, dv
    for writes_dq, writes_dkdv, most in _passes(call):
        for part in parts_of(call, most):
            of_part, *given = part.given(saved, do, dlse, q, k, v)
            outputs = (
                part.rows(x, heads) if wanted else None
                for x, heads, wanted in (
                    (dq, part.queries, writes_dq), (dk, part.keys, writes_dkdv), (dv, part.keys, writes_dkdv)
                )
            )  # fmt: skip
            made = _with_codes(part.call, of_part, *given[2:4])
            _write(part.call, made, *given, part.values(row_values, part.queries), *outputs)
    return dq, dk, dv


def _passes(call: Call) -> list[tuple[bool, bool, int]]:
    """Of INT8 scores of wide heads the passes over all heads: whether each writes dQ and whether dK and dV, and how
    many key heads, counted over the batch, a part of it has at most.

    A part makes codes and transposed copies, which are gone when the next begins. They may take a fifth of what O and
    the gradients do, or `LEAST_OPERANDS` where that is more (parts of less would have too few programs), and take one
    key head's at least. dK and dV, which have the most, are first, so that these lie in dQ's memory too, but where dQ
    finds maxima for them. What has room as a whole is one part of one pass; so is what has a mask whose parts begin
    where they would have kernels of their own, as copies of its elements take more than parts save.
    """
    recipe, queries, keys, heads = call.recipe, call.queries, call.keys, call.keys.heads_in_all
    # bytes of INT8 of a key head and its query heads, as they lie and transposed
    of_q, of_k = call.group * queries.total * call.head_dim, keys.total * call.head_dim
    of_q_t = call.group * queries.blocks(recipe.block_q) * recipe.block_q * call.head_dim
    of_k_t = keys.blocks(recipe.block_k) * recipe.block_k * call.head_dim
    room = max(4 * (of_q + of_k) * heads // SHARE_OF_OPERANDS, LEAST_OPERANDS)
    codes, in_dq = of_q + of_k, 2 * of_q * heads
    of_dkdv = codes + of_q_t * ((recipe.dv == INT8) + (recipe.dk == INT8))
    of_dq = codes + (of_k_t if recipe.dq == INT8 else 2 * of_k)
    of_all = of_dkdv + of_dq - codes
    if shares_maxima(call):
        of_all += 4 * math.prod(maxima_shape(call)) // heads
    if of_all * heads <= room or not _cuts_mask_aligned(call):
        return [(True, True, max(1, heads))]
    if shares_maxima(call):
        return [(True, True, max(1, room // of_all))]
    return [(False, True, max(1, (room + in_dq) // of_dkdv)), (True, False, max(1, room // of_dq))]


def _cuts_mask_aligned(call: Call) -> bool:
    """Whether a mask's elements of every sequence and head begin at multiples of `TAKEN` bytes."""
    if call.lists is None or call.lists.by_query.is_tiled:
        return True
    elements = call.lists.by_query.elements
    return not any(
        size > 1 and stride * elements.itemsize % TAKEN
        for size, stride in zip(elements.shape[:2], elements.stride()[:2])
    )


def _with_codes(call: Call, saved: Saved, q: Tensor | None, k: Tensor | None) -> Saved:
    """With the codes of wide heads, as forward made them."""
    recipe = call.recipe
    if not is_wide(call.head_dim, call.value_dim):
        return saved
    if INT8 in (recipe.s, recipe.dk):
        made = _codes_of_q(call, q)
        saved = saved._replace(q_int8=made.codes, q_scale=made.token_scale)
    if INT8 in (recipe.s, recipe.dq):
        made = _codes_of_k(call, k, saved.k_mean if recipe.smooth_k else None)
        saved = saved._replace(k_int8=made.codes, k_scale=made.token_scale)
    return saved


def _write(
    call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor,
    row_values: Tensor, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
) -> None:  # fmt: skip
    """Write row_values, dk and dv; or dq, by row_values that are written; or all four."""
    recipe, keys, key_mask = call.recipe, call.keys, call.key_mask
    k_int8, s_int8, dq_int8 = saved.k_int8, recipe.s == INT8, recipe.dq == INT8

    k_rows = k
    # a masked key's K may be anything, NaN too
    if k is not None and (recipe.smooth_k or key_mask is not None) and not (s_int8 and (dq_int8 or dq is None)):
        shift = saved.k_mean if recipe.smooth_k else None
        k_rows = launch_quantize(k, keys, "token", recipe.block_k, shift, key_mask, smoothed=True).smoothed
    q_operand, k_operand = (saved.q_int8, k_int8) if s_int8 else (q, k_rows)
    k_t = launch_transpose(k_int8, keys, recipe.block_k) if dq_int8 and dq is not None else None
    values = launch_centered_values(call, saved, v, rows=value_rows(call)) if recipe.dp == INT8 else None
    made = None if dk is None else launch_preprocess_do(call, saved, do, dlse, row_values, values)
    of_dp = (v, do) if values is None else (values.v_int8, made.codes)
    shared = q_operand, k_operand, *of_dp, saved.k_scale, None if values is None else values.v_scale
    tile_maxima = _tile_maxima(call, do)
    if dq is not None:
        launch_dq(call, *shared, k_t, k_rows, row_values, tile_maxima, dq)
    if dk is not None:
        of_do = made.scale, made.q_t, made.transposed
        launch_dkdv(call, *shared, *of_do, q, do, row_values, tile_maxima, dk, dv)


def _tile_maxima(call: Call, like: Tensor) -> Tensor | None:
    """Room for two maxima of every tile, which dQ's kernel finds and dK and dV's reads; None for its own."""
    if not shares_maxima(call):
        return None
    return torch.empty(maxima_shape(call), dtype=torch.float32, device=like.device)
