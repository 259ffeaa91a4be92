"""Operands of an INT8 dP (`sagebwd.recipe.Recipe.dp`): the mean of O, codes of V less it and of dO, delta of these.

Three launches in place of two: sums of O over chunks of queries; V's codes, its largest magnitudes by channel, and
the mean; row values and codes of queries. O, V and dO are read once each but for O, which is read twice. The mean is
kept as rotated rows are, c R.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Call, Saved, padded_head_dim
from sagebwd.kernels.common.rotation import (
    PIECE,
    floats,
    load_pieces,
    piece_width,
    signs_and_factors,
    store_signs,
    turned,
    turned_codes,
    turned_row,
    whole_row,
)
from sagebwd.kernels.common.strided import Strided, head_of, pitch_of, row_of
from sagebwd.kernels.common.tile import (
    LOG2_E,
    abs_max,
    block_and_head,
    divide,
    load_rows,
    padded_block,
    psi_scale,
    to_int8,
    whose,
)
from sagebwd.kernels.runtime.program import launch
from sagebwd.kernels.sm90.operands.bwd_preprocess import (
    LEAST_REST,
    LOG2_E4M3_MAX,
    SCALES,
    SIZES,
    Cleared,
    RowValues,
    clear_share,
    k_amax,
    norm_of,
    power_of_2,
    shape_of,
    store_float8,
    times,
    value_norm,
)
from sagebwd.kernels.sm90.operands.quantize_k import TURNED_PROGRAMS, chunks_of
from sagebwd.kernels.sm90.widths import BackwardTile
from sagebwd.reference import float8

MOST_LOWERED = tl.constexpr(float8.MOST_LOWERED)
LEAST_B = tl.constexpr(float8.LEAST_B)
# Planes of a block's row values: lse, Q's scale, -delta, and 2^-b in the first place of the last.
PLANES = tl.constexpr(4)
# Of the sums of O: rows of a step, and so many steps' loads are under way at a time.
SUMMED = {"BLOCK": 32, "STAGES": 4, "num_warps": 4}
# Of the pass over queries: with fewer warps the rotated dO and O, and dO itself, would spill.
ROW_WARPS, ROW_REGISTERS = 8, 128
# Tokens of a block of V, and rows of sums of O that a program adds up at a time.
VALUES, SUMS = 64, 32


@triton.jit(do_not_specialize=["heads", "tokens", "total", "chunk", "chunks", "all_heads"])
def sum_outputs_kernel(
    o, lse, sums, counts, cu_seqlens, heads, tokens, total, chunk, chunks, all_heads, values: tl.constexpr,
    TURNED: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of O over a chunk of one head's queries that see a key, and their number.

    o: `Strided`. sums (chunks, heads, COLUMNS), of `turned_row` where TURNED; counts (chunks, heads).
    """
    program, part = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    for piece in tl.static_range((COLUMNS + PIECE - 1) // PIECE):
        sum_piece_of_outputs(
            o, lse, sums, counts, cu_seqlens, program, part, heads, tokens, total, chunk, all_heads, piece, values,
            TURNED, VARLEN, BLOCK, STAGES, COLUMNS,
        )  # fmt: skip


@triton.jit
def sum_piece_of_outputs(
    o, lse, sums, counts, cu_seqlens, program, part, heads, tokens, total, chunk, all_heads, piece: tl.constexpr,
    values: tl.constexpr, TURNED: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A piece of channels of `sum_outputs_kernel`."""
    WIDTH: tl.constexpr = piece_width(COLUMNS, piece * PIECE)
    EVEN: tl.constexpr = piece * PIECE + WIDTH <= values
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    columns = piece * PIECE + tl.arange(0, WIDTH)
    local = tl.arange(0, BLOCK)
    end = tl.minimum(part * chunk + chunk, length)
    o_sum = tl.zeros((BLOCK, WIDTH), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    o_at = head_of(o, batch, head)
    for first in tl.range(part * chunk, end, BLOCK, num_stages=STAGES):
        o_rows = o_at + (start + first).to(tl.int64) * pitch_of(o)
        tile = load_rows(o_rows, local, columns, pitch_of(o), end - first, values, False, EVEN)
        row_lse = tl.load(lse + z * total + start + first + local, mask=first + local < end, other=float("-inf"))
        seen = row_lse != float("-inf")
        o_sum += tl.where(seen[:, None], tile.to(tl.float32), 0.0)
        count += seen.to(tl.float32)
    found = tl.sum(o_sum, 0)
    if TURNED:
        found = turned_row(found, TURNED, piece)
    at = part * all_heads + program
    tl.store(sums + at.to(tl.int64) * COLUMNS + columns, found, mask=columns < COLUMNS)
    if piece == 0:
        tl.store(counts + at, tl.sum(count, 0))


@triton.jit
def mean_of_outputs(
    sums, counts, first_head, group, chunks, all_heads, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The mean of a key head's O, of ``group`` query heads from ``first_head`` on; WIDTH channels from FIRST on."""
    columns = FIRST + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    count = tl.zeros((ROWS,), tl.float32)
    for first in range(0, chunks * group, ROWS):
        number = first + tl.arange(0, ROWS)
        at = number // group * all_heads + first_head + number % group
        there = number < chunks * group
        count += tl.load(counts + at, mask=there, other=0)
        at = at.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
        total += tl.sum(tl.load(sums + at, mask=there[:, None] & (columns < COLUMNS)[None, :], other=0), 0)
    return total / tl.maximum(tl.sum(count, 0), 1.0)


@triton.jit(do_not_specialize=["heads", "tokens", "total", "parts", "group", "chunks", "all_heads"])
def value_codes_kernel(
    v, sums, counts, codes, scales, center, maxima, signs, value_signs, key_mask, cu_seqlens, heads, tokens, total,
    parts, group, chunks, all_heads, values: tl.constexpr, TURNED_Q: tl.constexpr, TURNED: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PITCH_Q: tl.constexpr,
    PITCH: tl.constexpr,
):  # fmt: skip
    """Codes of (V - c) R with a scale a token, and V's largest magnitudes by channel; c R, and R's signs.

    v, codes: `Strided`. Of a head ``parts`` programs share the blocks. center (heads, PITCH): c R. maxima
    (heads, values) int32, raised to the bits of what no |V| exceeds. signs, value_signs: where not None, what
    `store_signs` writes of the rotations of Q and V, of TURNED_Q and TURNED channels.
    """
    number, batch_head = block_and_head(parts)
    if tl.program_id(0) == 0:
        if signs is not None:
            store_signs(signs, TURNED_Q, PITCH_Q)
        if value_signs is not None:
            store_signs(value_signs, TURNED, PITCH)
    batch, head, z, start, length = whose(batch_head, heads, cu_seqlens, tokens, VARLEN)
    mu = ()
    for first in tl.static_range(0, COLUMNS, PIECE):
        mu += (mean_of_outputs(  # c = mean of O
            sums, counts, batch_head * group, group, chunks, all_heads, first, piece_width(COLUMNS, first), COLUMNS,
            ROWS,
        ),)  # fmt: skip
    rotation = None
    if TURNED:
        mu = whole_row(mu, TURNED)
        rotation = signs_and_factors(v.at.dtype.element_ty, TURNED, COLUMNS)
    if number == 0:
        for piece in tl.static_range(len(mu)):
            columns = piece * mu[0].shape[0] + tl.arange(0, mu[piece].shape[0])
            tl.store(center + batch_head * PITCH + columns, mu[piece], mask=columns < PITCH)
    largest = ()
    for piece in tl.static_range(len(mu)):
        largest += (tl.zeros(mu[piece].shape, tl.int32),)
    for i in range(number, tl.cdiv(length, BLOCK), parts):
        largest = store_value_codes(
            v, mu, rotation, codes, scales, key_mask, largest, i * BLOCK, batch, head, z, start, length, tokens, total,
            values, BLOCK, COLUMNS,
        )  # fmt: skip
    for piece in tl.static_range(len(mu)):
        columns = piece * mu[0].shape[0] + tl.arange(0, mu[piece].shape[0])
        tl.atomic_max(maxima + batch_head * values + columns, largest[piece], mask=columns < values, sem="relaxed")


@triton.jit
def store_value_codes(
    v, mu, rotation, codes, scales, key_mask, largest, first, batch, head, z, start, length, tokens, total,
    values: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One block of `value_codes_kernel`; returns ``largest`` with its magnitudes' bits. Hidden keys count as zeros."""
    local = tl.arange(0, BLOCK)
    inside = first + local < length
    tile = load_pieces(row_of(v, batch, head, start + first), local, pitch_of(v), length - first, values, COLUMNS)
    if key_mask is not None:
        keep = tl.load(key_mask + batch.to(tl.int64) * tokens + first + local, mask=inside, other=0) != 0
        tile = only(tile, keep)
    raised = ()
    for piece in tl.static_range(len(tile)):
        bits = tl.abs(tile[piece].to(tl.float32)).to(tl.int32, bitcast=True)
        raised += (tl.maximum(largest[piece], tl.max(bits, 0)),)
    x = less(turned(tile, rotation) if rotation is not None else floats(tile), mu)  # (V - c) R
    scale = psi_scale(abs_max_of(x))
    store_codes(codes_of(x, scale), codes, batch, head, start + first, local, inside, COLUMNS)
    tl.store(scales + z * total + start + first + local, scale, mask=inside)
    return raised


@triton.jit
def only(pieces, keep):
    """Rows that are kept; zeros for others."""
    return [tl.where(keep[:, None], piece, tl.zeros_like(piece)) for piece in pieces]


@triton.jit
def less(pieces, mu):
    """Pieces of rows less a row."""
    found = ()
    for piece in tl.static_range(len(pieces)):
        found += (pieces[piece] - mu[piece][None, :],)
    return found


@triton.jit
def abs_max_of(pieces):
    """The largest magnitude of each row; NaN wins."""
    largest = abs_max(pieces[0], 1)
    if len(pieces) > 1:
        largest = tl.maximum(largest, abs_max(pieces[1], 1), propagate_nan=tl.PropagateNan.ALL)
    return largest


@triton.jit
def codes_of(pieces, scale):
    """psi's codes of rows with a scale each."""
    found = ()
    for piece in tl.static_range(len(pieces)):
        found += (to_int8(divide(pieces[piece], scale[:, None], (1.0 / scale)[:, None])),)
    return found


@triton.jit
def store_codes(pieces, codes, batch, head, token, local, inside, COLUMNS: tl.constexpr):
    """Write rows of codes, `Strided`, from a token on."""
    at = row_of(codes, batch, head, token) + local[:, None] * pitch_of(codes)
    for piece in tl.static_range(len(pieces)):
        columns = piece * pieces[0].shape[1] + tl.arange(0, pieces[piece].shape[1])
        tl.store(at + columns[None, :], pieces[piece], mask=inside[:, None] & (columns < COLUMNS)[None, :])


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
        int8_row_values(
            do, o, lse, dlse, row_max, v_maxima, center, signs, value_signs, q, q_scale, cu_seqlens, rows, scales,
            spread, do_codes, do_t, q_t, number, program, heads, heads_k, tokens, total, blocks, head_dim, value_dim,
            values, TURNED, TURNED_V, VARLEN, BLOCK, BLOCK_D, BLOCK_V,
        )  # fmt: skip
    else:
        k_amax(
            k, k_scale, cu_seqlens_k, largest, number, program - programs, heads_k, tokens_k, total_k, head_dim,
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
    b is one number of the block (`sagebwd.reference.float8`), and spread is 2^(b - e) s. do_codes: of dO R, s a token,
    in place of a scaled dO. center, value_signs: `value_codes_kernel`'s; TURNED_V: channels of R, or 0.
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
        x_int8 = codes_of(x, do_scale)
        store_codes(x_int8, do_codes, batch, head, start + first, local, inside, value_dim)
        y = turned_codes(out, value_signs, TURNED_V, value_dim, BLOCK_V) if TURNED_V else floats(out)  # O R
        delta = tl.zeros((BLOCK,), tl.float32)
        for piece in tl.static_range(len(y)):
            columns = piece * y[0].shape[1] + tl.arange(0, y[piece].shape[1])
            mu = tl.load(center + owner * BLOCK_V + columns, mask=columns < BLOCK_V, other=0)
            # delta = rowsum(dO^ * (O - c) R), over s
            delta += tl.sum(x_int8[piece].to(tl.float32) * (y[piece] - mu[None, :]), 1)

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
        counts = inside & seen & (bound > 0) & (bound < float("inf"))
        b_row = tl.maximum((((bound / do_scale).to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) - 127, LEAST_B)
        largest_b = tl.max(tl.where(counts, b_row, LEAST_B), 0)
        b = tl.maximum(tl.min(tl.where(counts, b_row, largest_b), 0), largest_b - MOST_LOWERED)
        b = tl.maximum(b, LEAST_B)
        # never negative, so that cutting off is rounding down
        e = (above + LOG2_E4M3_MAX).to(tl.int32) - tl.where(counts, tl.maximum(b_row - b, 0), 0)
        weight = tl.where(seen, power_of_2(-e) + row_lse * 0, 0.0)
        inverse = power_of_2(-b)
        spread_row = weight * (power_of_2(b) * do_scale) + bound * 0
        scale = tl.load(q_scale + row, mask=inside, other=0)
        rows += block * BLOCK * PLANES
        tl.store(rows + local, tl.where(seen, row_lse - e.to(tl.float32), float("inf")))
        tl.store(rows + BLOCK + local, scale)
        tl.store(rows + 2 * BLOCK + local, -delta * inverse)
        tl.store(rows + 3 * BLOCK, inverse)
        tl.store(spread + row, spread_row, mask=inside)
        scales += block * SCALES
        store_float8(times(floats(tile), weight), do_t, scales, z, block, blocks, value_dim, BLOCK)
        q_x = turned_codes(q_int8, signs, TURNED, head_dim, BLOCK_D) if TURNED else floats(q_int8)
        store_float8(times(q_x, scale * spread_row), q_t, scales + 1, z, block, blocks, head_dim, BLOCK)


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
    programs, heads = queries.batch * queries.heads, keys.batch * keys.heads
    pitch, turned_v = padded_head_dim(columns), sum(call.value_rotation)
    chunk, chunks = chunks_of(queries)
    sums = torch.empty(chunks, programs, columns, dtype=torch.float32, device=device)
    counts = torch.empty(chunks, programs, dtype=torch.float32, device=device)
    shape = {"values": call.columns[1], "VARLEN": call.packed, "TURNED": turned_v, "COLUMNS": columns}
    launch(
        sum_outputs_kernel,
        (chunks * programs,),
        Strided.of(saved.o, queries), saved.lse, sums, counts, queries.cu_seqlens, queries.heads, queries.tokens,
        queries.total, chunk, chunks, programs, **SUMMED, **shape,
    )  # fmt: skip
    v_int8 = torch.empty((*v.shape[:-1], columns), dtype=torch.int8, device=device)
    v_scale, center = keys.per_token(device), torch.empty(heads, pitch, dtype=torch.float32, device=device)
    signs = torch.empty(call.block_d, call.block_d, dtype=torch.int8, device=device) if call.rotation else None
    value_signs = torch.empty(pitch, pitch, dtype=torch.int8, device=device) if turned_v else None
    parts = max(keys.grid(VALUES), 1)
    if turned_v:
        parts = -(-parts // max(1, parts * heads * pitch // TURNED_PROGRAMS))
    launch(
        value_codes_kernel,
        (parts * heads,),
        Strided.of(v, keys), sums, counts, Strided.of(v_int8, keys), v_scale, center, v_maxima, signs, value_signs,
        call.key_mask, keys.cu_seqlens, keys.heads, keys.tokens, keys.total, parts, call.group, chunks, programs,
        TURNED_Q=call.turned, BLOCK=VALUES, ROWS=SUMS, PITCH_Q=call.block_d, PITCH=pitch,
        num_warps=4 * max(1, pitch // 128), **shape,
    )  # fmt: skip
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
        keys.heads, programs, queries.tokens, keys.tokens, queries.total, keys.total, queries.blocks(block),
        clear.grid, value_dim=columns, values=call.columns[1], TURNED_V=turned_v, BLOCK_V=pitch,
        num_warps=ROW_WARPS * max(1, max(pitch, call.block_d) // 128), maxnreg=ROW_REGISTERS, **shape_of(call, block),
    )  # fmt: skip
    return Int8DpOperands(v_int8, v_scale, do_int8, values)
