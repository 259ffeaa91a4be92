"""Operands of an INT8 dP (`sagebwd.recipe.Recipe.dp`): codes of V less the mean of O and of dO, delta of these.

Three launches in place of two: those of `sagebwd.kernels.common.centered_values`, with V's largest magnitudes by
channel, then row values and codes of queries. O, V and dO are read once each but for O, which is read twice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Call, Saved, padded_head_dim
from sagebwd.kernels.common.centered_values import (
    abs_max_of,
    codes_of,
    delta_of_codes,
    launch_centered_values,
    store_codes,
)
from sagebwd.kernels.common.rotation import (
    floats,
    load_pieces,
    turned_codes,
)
from sagebwd.kernels.common.strided import Strided, pitch_of, row_of
from sagebwd.kernels.common.tile import (
    LOG2_E,
    TINY,
    block_and_head,
    in_sequence,
    padded_block,
    psi_scale,
    whose,
)
from sagebwd.kernels.runtime.program import launch
from sagebwd.kernels.sm90.operands.bwd_preprocess import (
    LEAST_B,
    LEAST_REST,
    LOG2_E4M3_MAX,
    MOST_LOWERED,
    SCALES,
    SIZES,
    Cleared,
    RowValues,
    clear_share,
    finite_abs_max,
    k_amax,
    norm_of,
    power_of_2,
    shape_of,
    store_float8,
    times,
    value_norm,
)
from sagebwd.kernels.sm90.widths import BackwardTile

# Planes of a block's row values: lse, Q's scale, -delta, and 2^-b in the first place of the last.
PLANES = tl.constexpr(4)
# Of the pass over queries: with fewer warps the rotated dO and O, and dO itself, would spill.
ROW_WARPS, ROW_REGISTERS = 8, 128


@triton.jit
def norm_of_rows(pieces):
    """Euclidean norm of each row, by pieces."""
    norm = norm_of(pieces[0].to(tl.float32), 1)
    if len(pieces) > 1:
        norm = norm_of(tl.join(norm, norm_of(pieces[1].to(tl.float32), 1)), 1)
    return norm


@triton.jit(do_not_specialize=SIZES)
def int8_row_values_kernel(
    do, o, lse, dlse, row_max, v_maxima, center, signs, value_signs, q, q_scale, k, k_scale, cu_seqlens, cu_seqlens_k,
    rows, scales, spread, do_codes, do_t, q_t, largest, zeros, share, heads, heads_k, programs, tokens, tokens_k,
    total, total_k, blocks, grid, head_dim: tl.constexpr, value_dim: tl.constexpr, values: tl.constexpr,
    TURNED: tl.constexpr, TURNED_V: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """As `bwd_preprocess.row_values_kernel`, with `int8_row_values` of the queries."""
    number, program = block_and_head(grid)
    clear_share(zeros, share)
    if program < programs:
        number, program = in_sequence(number, program, heads, cu_seqlens, tokens, BLOCK, VARLEN)
        int8_row_values(
            do, o, lse, dlse, row_max, v_maxima, center, signs, value_signs, q, q_scale, cu_seqlens, rows, scales,
            spread, do_codes, do_t, q_t, number, program, heads, heads_k, tokens, total, blocks, head_dim, value_dim,
            values, TURNED, TURNED_V, VARLEN, BLOCK, BLOCK_D, BLOCK_V,
        )  # fmt: skip
    else:
        number, program = in_sequence(number, program - programs, heads_k, cu_seqlens_k, tokens_k, BLOCK, VARLEN)
        k_amax(
            k, k_scale, cu_seqlens_k, largest, number, program, heads_k, tokens_k, total_k, head_dim,
            VARLEN, BLOCK, BLOCK_D,
        )  # fmt: skip


@triton.jit
def int8_row_values(
    do, o, lse, dlse, row_max, v_maxima, center, signs, value_signs, q, q_scale, cu_seqlens, rows, scales, spread,
    do_codes, do_t, q_t, number, program, heads, heads_k, tokens, total, blocks, head_dim: tl.constexpr,
    value_dim: tl.constexpr, values: tl.constexpr, TURNED: tl.constexpr, TURNED_V: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Row values, e4m3 copies and dO's INT8 codes of one query block.

    As `bwd_preprocess.row_values`, but: rows has PLANES, the third -delta 2^-b / s, s dO's scale, the last 2^-b once;
    b is one number of the block (`sagebwd.reference.float8`), and spread is 2^(b - e) s, 0 of zeros. do_codes: of
    dO R, s a token, in place of a scaled dO. center, value_signs: `CenteredValues`; TURNED_V: channels of R, or 0.
    """
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    first = number * BLOCK
    if first < length:
        block = z * blocks + padded_block(start, batch, BLOCK, VARLEN) + number
        local = tl.arange(0, BLOCK)
        inside = first + local < length
        owner = batch * heads_k + head // (heads // heads_k)
        row = z * total + start + first + local
        tile = load_pieces(
            row_of(do, batch, head, start + first), local, pitch_of(do), length - first, values, value_dim
        )
        out = load_pieces(row_of(o, batch, head, start + first), local, pitch_of(o), length - first, values, value_dim)
        q_int8 = load_pieces(
            row_of(q, batch, head, start + first), local, pitch_of(q), length - first, head_dim, head_dim
        )
        norm = value_norm(v_maxima, owner, tl.arange(0, BLOCK_V), values)

        x = turned_codes(tile, value_signs, TURNED_V, value_dim, BLOCK_V) if TURNED_V else floats(tile)  # dO R
        amax = abs_max_of(x)
        if dlse is not None:
            change = tl.load(dlse + row, mask=inside, other=0).to(tl.float32)
            amax = tl.maximum(amax, tl.abs(change) / norm, propagate_nan=tl.PropagateNan.ALL)
        do_scale = psi_scale(amax)
        unit = tl.where(amax < TINY, 0.0, do_scale)  # of zeros psi's is 1, far above others
        x_int8 = codes_of(x, do_scale)
        store_codes(x_int8, do_codes, batch, head, start + first, local, inside, value_dim)
        y = turned_codes(out, value_signs, TURNED_V, value_dim, BLOCK_V) if TURNED_V else floats(out)  # O R
        delta = delta_of_codes(
            x_int8, y, center + owner.to(tl.int64) * BLOCK_V, BLOCK_V
        )  # rowsum(dO^ * (O - c) R), over s

        row_lse = tl.load(lse + row, mask=inside, other=float("-inf"))
        row_m = tl.load(row_max + row, mask=inside, other=float("-inf"))
        seen = row_lse != float("-inf")
        # + 0 * amax: backward looks for NaN in P, so it must be there even if O, dO or dlse alone has it
        row_lse = row_lse * LOG2_E + (delta + amax) * 0
        above = tl.where(seen, row_lse - row_m, 0.0)
        rest = tl.minimum(tl.maximum(tl.where(seen, tl.exp2(above) - 1, 1.0), LEAST_REST), 1.0)
        bound = norm * norm_of_rows(tile) * rest
        if dlse is not None:
            delta -= change / do_scale  # delta -= dlse
            bound += tl.abs(change)
        counts = inside & seen & (bound > 0) & (bound < float("inf")) & (unit != 0)
        b_row = tl.maximum((((bound / do_scale).to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) - 127, LEAST_B)
        largest_b = tl.max(tl.where(counts, b_row, LEAST_B - 1), 0)
        b = tl.maximum(tl.min(tl.where(counts, b_row, largest_b), 0), largest_b - MOST_LOWERED)
        b = tl.where(largest_b < LEAST_B, 0, tl.maximum(b, LEAST_B))  # of none 0: codes of 0 times 2^-b t are not NaN
        # never negative, so that cutting off is rounding down
        e = (above + LOG2_E4M3_MAX).to(tl.int32) - tl.where(counts, tl.maximum(b_row - b, 0), 0)
        weight = tl.where(seen, power_of_2(-e) + row_lse * 0, 0.0)
        inverse = power_of_2(-b)
        spread_row = weight * (power_of_2(b) * unit) + bound * 0
        scale = tl.load(q_scale + row, mask=inside, other=0)
        rows += block * BLOCK * PLANES
        tl.store(rows + local, tl.where(seen, row_lse - e.to(tl.float32), float("inf")))
        tl.store(rows + BLOCK + local, scale)
        tl.store(rows + 2 * BLOCK + local, -delta * inverse)
        tl.store(rows + 3 * BLOCK, inverse)
        tl.store(spread + row, spread_row, mask=inside)
        scales += block * SCALES
        do_x = floats(tile)
        store_float8(times(do_x, weight), abs_max_of(do_x) * weight, do_t, scales, z, block, blocks, value_dim, BLOCK)
        q_x = turned_codes(q_int8, signs, TURNED, head_dim, BLOCK_D) if TURNED else floats(q_int8)
        factor = scale * spread_row
        store_float8(
            times(q_x, factor), finite_abs_max(q_x) * factor, q_t, scales + 1, z, block, blocks, head_dim, BLOCK
        )


class Int8DpOperands(NamedTuple):
    """Of both sides: codes of V and dO as wide as the kernels are, V's scale a token, and `RowValues`."""

    v_int8: Tensor
    v_scale: Tensor
    do_int8: Tensor
    values: RowValues


def launch_int8_operands(
    call: Call, saved: Saved, v: Tensor, do: Tensor, dlse: Tensor | None, v_maxima: Tensor, largest: Tensor,
    tile: BackwardTile,
) -> Int8DpOperands:  # fmt: skip
    """All that the backward's kernels read of V, dO and row values.

    v_maxima, (batch, heads, values) int32, and largest: zeros before, as `launch_row_values` and
    `launch_channel_maxima` have them.
    """
    queries, keys, device, columns = call.queries, call.keys, v.device, call.value_dim
    pitch, turned_v = padded_head_dim(columns), sum(call.value_rotation)
    signs = torch.empty(call.block_d, call.block_d, dtype=torch.int8, device=device) if call.rotation else None
    v_int8, v_scale, center, value_signs = launch_centered_values(call, saved, v, v_maxima, signs)
    do_int8 = torch.empty((*do.shape[:-1], columns), dtype=torch.int8, device=device)
    block = tile.queries
    clear = Cleared.of(call, block, device)
    values = RowValues(
        queries.padded(block, block * PLANES.value, dtype=torch.float32, device=device),
        queries.padded(block, SCALES.value, dtype=torch.float32, device=device),
        None,
        queries.per_token(device),
        queries.padded(block, block * columns, dtype=torch.float8_e4m3fn, device=device),
        queries.padded(block, block * call.head_dim, dtype=torch.float8_e4m3fn, device=device),
        clear.sums(call, tile),
    )
    launch(
        int8_row_values_kernel,
        (clear.programs,),
        Strided.of(do, queries), Strided.of(saved.o, queries), saved.lse, dlse, saved.row_max, v_maxima, center, signs,
        value_signs, Strided.of(saved.q_int8, queries), saved.q_scale, Strided.of(saved.k_int8, keys), saved.k_scale,
        queries.cu_seqlens, keys.cu_seqlens, values.planes, values.scales, values.spread,
        Strided.of(do_int8, queries), values.do_t, values.q_t, largest, clear.zeros, clear.share, queries.heads,
        keys.heads, queries.heads_in_all, queries.extent, keys.extent, queries.total, keys.total,
        queries.blocks(block), clear.grid, value_dim=columns, values=call.columns[1], TURNED_V=turned_v, BLOCK_V=pitch,
        num_warps=ROW_WARPS * max(1, max(pitch, call.block_d) // 128), maxnreg=ROW_REGISTERS, **shape_of(call, block),
    )  # fmt: skip
    return Int8DpOperands(v_int8, v_scale, do_int8, values)
