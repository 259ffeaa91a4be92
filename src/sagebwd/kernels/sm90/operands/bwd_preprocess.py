"""Preprocess of e4m3 backwards (`sagebwd.reference.float8`): lse, delta, e4m3 copies of dO and Q, each head's max |K|.

Largest magnitudes are found with atomics on their bits: the order does not matter, so every run gives the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd import numerics
from sagebwd.call import Call, Saved, padded_head_dim
from sagebwd.kernels.common.rotation import floats, load_pieces, turned_codes
from sagebwd.kernels.common.strided import Strided, pitch_of, row_of
from sagebwd.kernels.common.tile import (
    LOG2_E,
    abs_max,
    block_and_head,
    in_sequence,
    load_rows,
    padded_block,
    psi_scale,
    to_16bit,
    whose,
)
from sagebwd.kernels.common.transposed import NO_SPECIALIZE, store_transposed
from sagebwd.kernels.runtime.program import launch
from sagebwd.kernels.sm90.widths import BackwardTile

# Zeros that a program writes at a time.
CLEARED = tl.constexpr(1024)
LOG2_E4M3_MAX = tl.constexpr(8.807354922057604)
LEAST_REST = tl.constexpr(numerics.LEAST_REST)
LEAST_B, MOST_LOWERED = tl.constexpr(numerics.LEAST_B), tl.constexpr(numerics.MOST_LOWERED)
LARGEST_HALF, LEAST_HALF = tl.constexpr(numerics.LARGEST_HALF), tl.constexpr(numerics.LEAST_HALF)
RESTORED = tl.constexpr(numerics.RESTORED)
# Channels of dP beside V's, the fewest that a product can have: parts of -delta, and what they are multiplied by.
DELTA_CHANNELS = tl.constexpr(16)
# Those in memory: 16 bytes a query, the shortest row that TMA reads; the others it fills with zeros.
DELTA_PARTS = tl.constexpr(8)
# FP32 numbers a block of queries of which the first two are scales: TMA reads rows of whole 16 bytes.
SCALES = tl.constexpr(4)
# Sizes of queries and keys, which differ from call to call.
SIZES = [*NO_SPECIALIZE, "share", "programs", "tokens_k", "total_k"]


@triton.jit(do_not_specialize=SIZES)
def row_values_kernel(
    do, o, lse, dlse, row_max, v_maxima, signs, q, q_scale, k, k_scale, cu_seqlens, cu_seqlens_k, rows, scales,
    delta_parts, spread, do_scaled, do_t, q_t, largest, zeros, share, heads, heads_k, programs, tokens, tokens_k,
    total, total_k, blocks, grid, head_dim: tl.constexpr, value_dim: tl.constexpr, values: tl.constexpr,
    TURNED: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """`row_values` of ``grid`` blocks of queries for each of ``programs`` heads; then `k_amax` of keys.

    do, o, do_scaled, q, k: `Strided`. zeros: int32, written for the next kernel to add to, ``share`` of them by each
    program: at least CLEARED, and a multiple of 16.
    """
    number, program = block_and_head(grid)
    clear_share(zeros, share)
    if program < programs:
        number, program = in_sequence(number, program, heads, cu_seqlens, tokens, BLOCK, VARLEN)
        row_values(
            do, o, lse, dlse, row_max, v_maxima, signs, q, q_scale, cu_seqlens, rows, scales, delta_parts, spread,
            do_scaled, do_t, q_t, number, program, heads, heads_k, tokens, total, blocks, head_dim, value_dim, values,
            TURNED, VARLEN, BLOCK, BLOCK_D, BLOCK_V,
        )  # fmt: skip
    else:
        number, program = in_sequence(number, program - programs, heads_k, cu_seqlens_k, tokens_k, BLOCK, VARLEN)
        k_amax(
            k, k_scale, cu_seqlens_k, largest, number, program, heads_k, tokens_k, total_k, head_dim,
            VARLEN, BLOCK, BLOCK_D,
        )  # fmt: skip


@triton.jit
def clear_share(zeros, share):
    """Zeros of a program's ``share``; see `Cleared`."""
    at = tl.program_id(0).to(tl.int64) * share
    at = tl.multiple_of(at, 16)  # for stores of 16 bytes
    for first in range(0, share, CLEARED):
        step = tl.multiple_of(tl.minimum(first, share - CLEARED), 16)  # the last may overlap the one before
        tl.store(zeros + at + step + tl.arange(0, CLEARED), tl.zeros((CLEARED,), tl.int32))


@triton.jit
def value_norm(v_maxima, owner, columns, values: tl.constexpr):
    """`sagebwd.reference.float8.value_norm` of a key head, of the bits of V's largest magnitudes by channel."""
    channel = tl.load(v_maxima + owner.to(tl.int64) * values + columns, mask=columns < values, other=0)
    channel = psi_scale(channel.to(tl.float32, bitcast=True))
    # psi gives a channel without range the scale 1, which says nothing of V
    norm = norm_of(tl.where(channel == 1, 0.0, channel), 0)
    return 127.0 * tl.where(norm == 0, values**0.5, norm)


@triton.jit
def row_values(
    do, o, lse, dlse, row_max, v_maxima, signs, q, q_scale, cu_seqlens, rows, scales, delta_parts, spread, do_scaled,
    do_t, q_t, number, program, heads, heads_k, tokens, total, blocks, head_dim: tl.constexpr,
    value_dim: tl.constexpr, values: tl.constexpr, TURNED: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Row values and e4m3 copies of one query block.

    rows: planes of a block, one after the other: lse in base 2 less e, Q's scale; lse is +inf where a query sees no
    key and in the padding. delta_parts: -delta 2^-b, padded as rows are, in DELTA_PARTS of dO's type that add up to
    it when multiplied by `delta_parts_weight`; None: it is a third plane. do_scaled: 2^-b dO, exact but for what is
    too small for FP16. do_t and q_t: e4m3 of 2^-e dO 2^g and 2^(b - e) Q 2^g, each with a g of its own a block,
    transposed by `store_transposed`, with zeros past the end; scales, SCALES a block: `float8_scale` of both. spread,
    2^(b - e), one a token. v_maxima: the bits of the largest magnitudes of V's channels, int32. values: channels that
    dO, O and V have, of value_dim of do_t, whose others are zeros. TURNED: channels of the rotation of Q's codes,
    which q_t has turned back with R's ``signs`` (`store_signs`), or 0.
    """
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    first = number * BLOCK
    if first < length:
        block = z * blocks + padded_block(start, batch, BLOCK, VARLEN) + number
        local = tl.arange(0, BLOCK)
        value_columns = tl.arange(0, BLOCK_V)
        EVEN_V: tl.constexpr = values == BLOCK_V
        inside = first + local < length
        do_at = row_of(do, batch, head, start + first)
        o_at = row_of(o, batch, head, start + first)
        q_at = row_of(q, batch, head, start + first)
        scaled_at = row_of(do_scaled, batch, head, start + first)
        tile = load_rows(do_at, local, value_columns, pitch_of(do), length - first, values, False, EVEN_V).to(
            tl.float32
        )
        out = load_rows(o_at, local, value_columns, pitch_of(o), length - first, values, False, EVEN_V).to(tl.float32)
        q_int8 = load_pieces(q_at, local, pitch_of(q), length - first, head_dim, head_dim)
        owner = batch * heads_k + head // (heads // heads_k)
        norm = value_norm(v_maxima, owner, value_columns, values)

        row = z * total + start + first + local
        delta = tl.sum(tile * out, 1)  # delta = rowsum(dO * O)
        row_lse = tl.load(lse + row, mask=inside, other=float("-inf"))
        row_m = tl.load(row_max + row, mask=inside, other=float("-inf"))
        seen = row_lse != float("-inf")
        # + 0 * delta: backward looks for NaN in P, so it must be there even if O or dlse alone has it
        row_lse = row_lse * LOG2_E + delta * 0
        above = tl.where(seen, row_lse - row_m, 0.0)
        rest = tl.minimum(tl.maximum(tl.where(seen, tl.exp2(above) - 1, 1.0), LEAST_REST), 1.0)
        if do.at.dtype.element_ty == tl.float16:  # 2^-b dO is at most 2^15, however small V is
            rest = tl.maximum(rest, 1.0 / (norm * LARGEST_HALF))
        do_bits = largest_bits(tile, 1)
        bound = norm * norm_below(tile, do_bits, 1) * rest
        if dlse is not None:
            change = tl.load(dlse + row, mask=inside, other=0).to(tl.float32)
            delta -= change  # delta -= dlse
            bound += tl.abs(change)
            row_lse += delta * 0
        # never negative, so that cutting off is rounding down
        e = (above + LOG2_E4M3_MAX).to(tl.int32).to(tl.float32)
        b = tl.maximum(((bound.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) - 127, LEAST_B).to(tl.float32)
        if do.at.dtype.element_ty == tl.float16:  # and where V is large, one of them has all its digits
            lacking = b - ((do_bits >> 23) - 127).to(tl.float32) + LEAST_HALF
            lowered = tl.minimum(tl.minimum(tl.maximum(lacking, 0.0), MOST_LOWERED), b - LEAST_B)
            e -= lowered
            b -= lowered
        weight = tl.where(seen, power_of_2(-e) + row_lse * 0, 0.0)
        inverse = power_of_2(-b)
        spread_row = weight * power_of_2(b) + bound * 0
        scale = tl.load(q_scale + row, mask=inside, other=0)
        rows += block * BLOCK * (3 if delta_parts is None else 2)
        tl.store(rows + local, tl.where(seen, row_lse - e, float("inf")))
        tl.store(rows + BLOCK + local, scale)
        if delta_parts is None:
            tl.store(rows + 2 * BLOCK + local, -delta * inverse)
        else:
            store_delta_parts(delta_parts + block * BLOCK * DELTA_PARTS, -delta * inverse, local)
        tl.store(spread + row, spread_row, mask=inside)
        at = scaled_at + local[:, None] * pitch_of(do_scaled) + value_columns[None, :]
        kept = inside[:, None] & (value_columns < values)[None, :]
        tl.store(at, to_16bit(tile * inverse[:, None], do_scaled.at.dtype.element_ty), mask=kept)
        scales += block * SCALES
        do_x, do_amax = (tile * weight[:, None],), do_bits.to(tl.float32, bitcast=True) * weight
        store_float8(do_x, do_amax, do_t, scales, z, block, blocks, value_dim, BLOCK)
        if TURNED:
            x = turned_codes(q_int8, signs, TURNED, head_dim, BLOCK_D)
        else:
            x = floats(q_int8)
        factor = scale * spread_row
        store_float8(times(x, factor), finite_abs_max(x) * factor, q_t, scales + 1, z, block, blocks, head_dim, BLOCK)


@triton.jit
def times(pieces, factor):
    """Scale the rows of a tile, by pieces."""
    return [piece * factor[:, None] for piece in pieces]


@triton.jit
def norm_of(x, AXIS: tl.constexpr):
    """Euclidean norm along an axis, also of magnitudes whose squares overflow or underflow FP32."""
    return norm_below(x, largest_bits(x, AXIS), AXIS)


@triton.jit
def largest_bits(x, AXIS: tl.constexpr):
    """The bits of the largest magnitude along an axis; NaN wins, as its bits are the largest."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)


@triton.jit
def norm_below(x, bits, AXIS: tl.constexpr):
    """`norm_of` x, whose `largest_bits` are known: as FP32 numbers triton 3.6 would spill them, and others."""
    exponent = (bits >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, -126), 126).to(tl.float32)
    near_1 = x * tl.expand_dims(power_of_2(-exponent), AXIS)
    return tl.sqrt(tl.sum(near_1 * near_1, AXIS)) * power_of_2(exponent)


@triton.jit
def finite_abs_max(pieces):
    """The largest magnitude of each row, none of which is NaN, by pieces."""
    amax = tl.max(tl.abs(pieces[0]), 1)
    if len(pieces) > 1:
        amax = tl.maximum(amax, tl.max(tl.abs(pieces[1]), 1))
    return amax


@triton.jit
def store_float8(pieces, amax, copy, scale, z, block, blocks, head_dim: tl.constexpr, BLOCK: tl.constexpr):
    """e4m3 of x 2^g, transposed, and `float8_scale`; pieces: x's channels.

    amax: the largest magnitude of each row. Where x is y times a factor a row, it is that of y times the factor, since
    rounding is monotonic.
    """
    bits = largest_bits(amax, 0)
    copy = copy.to(tl.pointer_type(tl.int8), bitcast=True)
    for piece in tl.static_range(len(pieces)):
        x_fp8 = (pieces[piece] * float8_factor(bits)).to(tl.float8e4nv).to(tl.int8, bitcast=True)
        columns = piece * pieces[0].shape[1] + tl.arange(0, pieces[piece].shape[1])
        store_transposed(copy, x_fp8, z, block, blocks, columns, head_dim, BLOCK)
    tl.store(scale, float8_scale(bits))


@triton.jit
def float8_factor(bits):
    """2^g for a largest magnitude of these bits: the power of two that leaves it at most 448 = 1.75 * 2^8."""
    exponent = tl.maximum((bits + 0x1FFFFF) >> 23, 16)
    return ((262 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def float8_scale(bits):
    """2^-g RESTORED, after `float8_factor` of the same bits; NaN where the largest was not finite, as codes are."""
    exponent = tl.maximum((bits + 0x1FFFFF) >> 23, 16)
    scale = ((exponent - 8) << 23).to(tl.float32, bitcast=True) * RESTORED
    return tl.where(bits >= 0x7F800000, float("nan"), scale)


@triton.jit
def delta_parts_weight(channel):
    """Weight of a channel of delta's parts: a single FP16 has neither the range nor the digits for delta."""
    return tl.where(channel == 0, 1024.0, tl.where(channel == 1, 1.0, tl.where(channel == 2, 1 / 1024.0, 0.0)))


@triton.jit
def store_delta_parts(parts, x, local):
    """Store x as DELTA_PARTS numbers of 16 bits: three that add up to it in FP32's precision, and zeros."""
    first = to_16bit(x * (1 / 1024.0), parts.dtype.element_ty)
    rest = x - first.to(tl.float32) * 1024.0
    second = to_16bit(rest, parts.dtype.element_ty)
    third = to_16bit((rest - second.to(tl.float32)) * 1024.0, parts.dtype.element_ty)
    channel = tl.arange(0, DELTA_PARTS)[None, :]
    tile = tl.where(channel == 0, first[:, None], tl.where(channel == 1, second[:, None], third[:, None]))
    tl.store(
        parts + local[:, None] * DELTA_PARTS + channel, tl.where(channel < 3, tile, 0.0).to(parts.dtype.element_ty)
    )


@triton.jit
def row_amax(k_int8, scale, local, columns, stride_t, rows, head_dim: tl.constexpr, EVEN: tl.constexpr):
    """The largest magnitude of each row's INT8 codes, read only where it is in doubt.

    A scale says that psi makes it at most 127, but for zeros, whose scale is 1.
    """
    largest = tl.full(local.shape, 127.0, tl.float32)
    if tl.max((scale == 1).to(tl.int32), 0) != 0:
        largest = abs_max(load_rows(k_int8, local, columns, stride_t, rows, head_dim, False, EVEN).to(tl.float32), 1)
    return largest


@triton.jit
def power_of_2(exponent):
    """2^exponent for a whole number from -126 to 127, exactly; 0 for NaN."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def keep_largest(largest, x):
    """Raise ``largest`` to that of x, none of which is negative."""
    # the next kernel reads it: no store of this program need be waited for
    tl.atomic_max(largest, tl.max(x.to(tl.int32, bitcast=True), 0), sem="relaxed")


@triton.jit
def k_amax(
    k_int8, token_scale, cu_seqlens, largest, number, program, heads, tokens, total, head_dim: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of a block of K's codes times their scales, one of which each token has."""
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    first = number * BLOCK
    if first < length:
        local = tl.arange(0, BLOCK)
        columns = tl.arange(0, BLOCK_D)
        k_at = row_of(k_int8, batch, head, start + first)
        scale = tl.load(token_scale + z * total + start + first + local, mask=first + local < length, other=0)
        amax = row_amax(  # largest |code| of each key
            k_at, scale, local, columns, pitch_of(k_int8), length - first, head_dim, head_dim == BLOCK_D
        )
        keep_largest(largest + program, amax * scale)


class RowValues(NamedTuple):
    """What `row_values_kernel` writes of the queries; see there.

    dq_sums: FP16 zeros, (heads * D, padded queries), or where dQ is added up in rows (heads * padded queries, D).
    """

    planes: Tensor
    scales: Tensor
    delta_parts: Tensor | None
    spread: Tensor
    do_t: Tensor
    q_t: Tensor
    dq_sums: Tensor


class Cleared(NamedTuple):
    """Zeros that dQ is added to, int32, of which each program of a pass writes its share; see `row_values_kernel`."""

    zeros: Tensor
    share: int
    programs: int
    grid: int  # blocks a head

    @classmethod
    def of(cls, call: Call, block: int, device: torch.device) -> Cleared:
        """For programs of each block of every head's queries, and keys."""
        queries, keys = call.queries, call.keys
        grid = max(queries.blocks(block), keys.blocks(block))
        programs = max(grid * (queries.heads_in_all + keys.heads_in_all), 1)
        # of two a word
        words = queries.heads_in_all * call.head_dim * queries.blocks(block) * block // 2
        share = max(-(-words // (16 * programs)) * 16, CLEARED.value)
        return cls(torch.empty(share * programs, dtype=torch.int32, device=device), share, programs, grid)

    def sums(self, call: Call, tile: BackwardTile) -> Tensor:
        """dQ's FP16 sums (`RowValues`)."""
        rows, columns = call.queries.heads_in_all * call.head_dim, call.queries.blocks(tile.queries) * tile.queries
        sums = self.zeros.view(torch.float16)[: rows * columns]
        return sums.view(-1, call.head_dim) if tile.dq_in_rows else sums.view(rows, columns)


def launch_row_values(
    call: Call, saved: Saved, v_maxima: Tensor, signs: Tensor | None, do: Tensor, dlse: Tensor | None,
    largest: Tensor, do_scaled: Tensor, tile: BackwardTile,
) -> RowValues:  # fmt: skip
    """Row values by blocks of queries, and in ``largest``, zeros before, the bits of each key head's largest K.

    signs: R's, written before, where the call rotates. do_scaled: where the scaled dO goes, of dO's shape and dtype.
    """
    queries, keys, block = call.queries, call.keys, tile.queries
    o, q, k = saved.o, saved.q_int8, saved.k_int8
    clear = Cleared.of(call, block, do.device)
    parts = (
        None if tile.split_dkdv else queries.padded(block, block * DELTA_PARTS.value, dtype=do.dtype, device=do.device)
    )
    out = RowValues(
        queries.padded(block, block * (3 if tile.split_dkdv else 2), dtype=torch.float32, device=do.device),
        queries.padded(block, SCALES.value, dtype=torch.float32, device=do.device),
        parts,
        queries.per_token(do.device),
        queries.padded(block, block * call.value_dim, dtype=torch.float8_e4m3fn, device=do.device),
        queries.padded(block, block * call.head_dim, dtype=torch.float8_e4m3fn, device=do.device),
        clear.sums(call, tile),
    )
    launch(
        row_values_kernel,
        (clear.programs,),
        Strided.of(do, queries),
        Strided.of(o, queries),
        saved.lse,
        dlse,
        saved.row_max,
        v_maxima,
        signs,
        Strided.of(q, queries),
        saved.q_scale,
        Strided.of(k, keys),
        saved.k_scale,
        queries.cu_seqlens,
        keys.cu_seqlens,
        out.planes,
        out.scales,
        out.delta_parts,
        out.spread,
        Strided.of(do_scaled, queries),
        out.do_t,
        out.q_t,
        largest,
        clear.zeros,
        clear.share,
        queries.heads,
        keys.heads,
        queries.heads_in_all,
        queries.extent,
        keys.extent,
        queries.total,
        keys.total,
        queries.blocks(block),
        clear.grid,
        value_dim=call.value_dim,
        values=call.columns[1],
        BLOCK_V=padded_head_dim(call.value_dim),
        num_warps=tile.row_warps,
        maxnreg=tile.row_registers,
        **shape_of(call, block),
    )
    return out


def shape_of(call: Call, block: int) -> dict[str, object]:
    """The constants of every pass."""
    return {
        "head_dim": call.head_dim, "TURNED": call.turned, "VARLEN": call.packed, "BLOCK": block,
        "BLOCK_D": call.block_d,
    }  # fmt: skip
