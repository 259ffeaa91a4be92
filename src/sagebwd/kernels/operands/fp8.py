"""Kernels before and after the e4m3 gradient products of `sagebwd.float8`; `fp8_passes` launches them.

Largest magnitudes are found with atomics on their bits: the order does not matter, so every run gives the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sagebwd import float8
from sagebwd.kernels.operands.codes import NO_SPECIALIZE, store_transposed
from sagebwd.kernels.tile import LOG2_E, abs_max, load_rows, padded_block, to_16bit, whose

# Zeros that a program writes at a time.
CLEARED = tl.constexpr(1024)
LOG2_E4M3_MAX = tl.constexpr(8.807354922057604)
LEAST_REST = tl.constexpr(float8.LEAST_REST)
# Channels of dP beside V's, the fewest that a product can have: parts of -delta, and what they are multiplied by.
DELTA_CHANNELS = tl.constexpr(16)
# The same of queries and keys.
SIZES = [*NO_SPECIALIZE, "share", "programs", "tokens_k", "total_k", "blocks_k"]


@triton.jit(do_not_specialize=SIZES)
def row_values_kernel(
    do, o, lse, dlse, row_max, v_scale, q, q_scale, k, k_scale, cu_seqlens, cu_seqlens_k, rows, delta_parts, do_factor,
    q_factor, spread, do_scaled, largest, zeros, share, do_b, do_h, do_t, o_b, o_h, o_t, q_b, q_h, q_t, k_b, k_h, k_t,
    heads, heads_k, programs, tokens, tokens_k, total, total_k, blocks, head_dim: tl.constexpr, TOKEN: tl.constexpr,
    K_TOKEN: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`row_values` of blocks of queries: the first ``programs`` along the second axis; then `largest_key` of keys.

    zeros: int32, written for the next kernel to add to, ``share`` of them by each program, in whole steps of CLEARED.
    """
    at = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * share
    for first in range(0, share, CLEARED):
        tl.store(zeros + at + first + tl.arange(0, CLEARED), tl.zeros((CLEARED,), tl.int32))
    if tl.program_id(1) < programs:
        row_values(
            do, o, lse, dlse, row_max, v_scale, q, q_scale, cu_seqlens, rows, delta_parts, do_factor, q_factor, spread,
            do_scaled, largest, do_b, do_h, do_t, o_b, o_h, o_t, q_b, q_h, q_t, heads, heads_k, tokens, total, blocks,
            head_dim, TOKEN, VARLEN, BLOCK, BLOCK_D,
        )  # fmt: skip
    else:
        largest_key(
            k, k_scale, cu_seqlens_k, largest, tl.program_id(1) - programs, k_b, k_h, k_t, heads_k, tokens_k, total_k,
            head_dim, K_TOKEN, VARLEN, BLOCK, BLOCK_D,
        )  # fmt: skip


@triton.jit
def row_values(
    do, o, lse, dlse, row_max, v_scale, q, q_scale, cu_seqlens, rows, delta_parts, do_factor, q_factor, spread,
    do_scaled, largest, do_b, do_h, do_t, o_b, o_h, o_t, q_b, q_h, q_t, heads, heads_k, tokens, total, blocks,
    head_dim: tl.constexpr, TOKEN: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What the kernels of e4m3 products read of each query.

    rows: planes of a block, one after the other: lse in base 2 less e, Q's scale; lse is +inf where a query sees no
    key and in the padding. delta_parts: -delta 2^-b, padded as rows are, in DELTA_CHANNELS of dO's type that add up
    to it when multiplied by `delta_parts_weight`. do_factor, q_factor: what dO and Q's codes are multiplied by;
    spread: 2^(b - e); one a token. do_scaled: 2^-b dO as contiguous rows, (heads, tokens, D), exact but for what is
    too small for FP16. largest (sequences * heads, 3) int32: bits of the largest dO and Q so multiplied, from 0.
    TOKEN: Q's scales are one a token.
    """
    batch, head, z, start, length = whose(tl.program_id(1), heads, cu_seqlens, tokens, VARLEN)
    first = tl.program_id(0) * BLOCK
    if first < length:
        block = z * blocks + padded_block(start, batch, BLOCK, VARLEN) + tl.program_id(0)
        local = tl.arange(0, BLOCK)
        columns = tl.arange(0, BLOCK_D)
        EVEN: tl.constexpr = head_dim == BLOCK_D
        inside = first + local < length
        batch_64 = batch.to(tl.int64)
        token = (start + first).to(tl.int64)
        do += batch_64 * do_b + head.to(tl.int64) * do_h + token * do_t
        o += batch_64 * o_b + head.to(tl.int64) * o_h + token * o_t
        q += batch_64 * q_b + head.to(tl.int64) * q_h + token * q_t
        tile = load_rows(do, local, columns, do_t, length - first, head_dim, False, EVEN).to(tl.float32)
        out = load_rows(o, local, columns, o_t, length - first, head_dim, False, EVEN).to(tl.float32)
        owner = batch * heads_k + head // (heads // heads_k)
        channel = tl.load(v_scale + owner * head_dim + columns, mask=columns < head_dim, other=0)
        # psi gives a channel without range the scale 1, which says nothing of V
        squares = tl.sum(tl.where(channel == 1, 0.0, channel * channel), 0)
        norm = 127.0 * tl.sqrt(tl.where(squares == 0, head_dim, squares))

        row = z * total + start + first + local
        delta = tl.sum(tile * out, 1)
        row_lse = tl.load(lse + row, mask=inside, other=float("-inf"))
        top = tl.load(row_max + row, mask=inside, other=float("-inf"))
        seen = row_lse != float("-inf")
        # + 0 * delta: backward looks for NaN in P, so it must be there even if O or dlse alone has it
        row_lse = row_lse * LOG2_E + delta * 0
        above = tl.where(seen, row_lse - top, 0.0)
        rest = tl.maximum(tl.where(seen, tl.exp2(above) - 1, 1.0), LEAST_REST)
        if do.dtype.element_ty == tl.float16:  # lest 2^-b dO overflow where V is small too
            rest = tl.maximum(rest, (2.0**-14) / norm)
        rest = tl.minimum(rest, 1.0)
        bound = norm * tl.sqrt(tl.sum(tile * tile, 1)) * rest
        if dlse is not None:
            change = tl.load(dlse + row, mask=inside, other=0).to(tl.float32)
            delta -= change
            bound += tl.abs(change)
            row_lse += delta * 0
        # never negative, so that cutting off is rounding down
        e = (above + LOG2_E4M3_MAX).to(tl.int32).to(tl.float32)
        weight = tl.where(seen, power_of_2(-e) + row_lse * 0, 0.0)
        b = tl.maximum(((bound.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) - 127, -125).to(tl.float32)
        inverse = power_of_2(-b)
        spread_row = weight * power_of_2(b) + bound * 0
        scale = tl.load(q_scale + row, mask=inside, other=0)
        rows += block * BLOCK * 2
        tl.store(rows + local, tl.where(seen, row_lse - e, float("inf")))
        tl.store(rows + BLOCK + local, scale)
        store_delta_parts(delta_parts + block * BLOCK * DELTA_CHANNELS, -delta * inverse, local)
        tl.store(do_factor + row, weight, mask=inside)
        tl.store(q_factor + row, scale * spread_row, mask=inside)
        tl.store(spread + row, spread_row, mask=inside)
        at = do_scaled + row[:, None] * head_dim + columns[None, :]
        kept = inside[:, None] & (columns < head_dim)[None, :]
        tl.store(at, to_16bit(tile * inverse[:, None], do_scaled.dtype.element_ty), mask=kept)
        largest += owner * 3
        keep_largest(largest, abs_max(tile, 1) * weight)
        top_code = largest_code(q, scale, local, columns, q_t, length - first, head_dim, TOKEN, EVEN)
        keep_largest(largest + 1, top_code * (scale * spread_row))


@triton.jit
def delta_parts_weight(channel):
    """What a channel of delta's parts is multiplied by: FP16 has neither the range for one part nor the digits."""
    return tl.where(channel == 0, 1024.0, tl.where(channel == 1, 1.0, tl.where(channel == 2, 1 / 1024.0, 0.0)))


@triton.jit
def store_delta_parts(parts, x, local):
    """x as DELTA_CHANNELS of 16 bits: three that add up to it, to FP32's precision, and zeros."""
    first = to_16bit(x * (1 / 1024.0), parts.dtype.element_ty)
    rest = x - first.to(tl.float32) * 1024.0
    second = to_16bit(rest, parts.dtype.element_ty)
    third = to_16bit((rest - second.to(tl.float32)) * 1024.0, parts.dtype.element_ty)
    channel = tl.arange(0, DELTA_CHANNELS)[None, :]
    tile = tl.where(channel == 0, first[:, None], tl.where(channel == 1, second[:, None], third[:, None]))
    tl.store(
        parts + local[:, None] * DELTA_CHANNELS + channel, tl.where(channel < 3, tile, 0.0).to(parts.dtype.element_ty)
    )


@triton.jit
def largest_code(
    codes, scale, local, columns, stride_t, rows, head_dim: tl.constexpr, TOKEN: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """The largest magnitude of each row's INT8 codes, read only where it is in doubt.

    With a scale a token psi makes it 127, but for a row of zeros, whose scale is 1.
    """
    largest = tl.full(local.shape, 127.0, tl.float32)
    doubt = True
    if TOKEN:
        doubt = tl.max((scale == 1).to(tl.int32), 0) != 0
    if doubt:
        largest = abs_max(load_rows(codes, local, columns, stride_t, rows, head_dim, False, EVEN).to(tl.float32), 1)
    return largest


@triton.jit
def power_of_2(exponent):
    """2^exponent for a whole number from -126 to 127, exactly; 0 for NaN."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def float8_factor(bits):
    """2^g for a largest magnitude of these bits: what leaves it at most 448, which is 1.75 * 2^8."""
    exponent = tl.maximum((bits + 0x1FFFFF) >> 23, 16)
    return ((262 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def keep_largest(largest, x):
    """Raise ``largest`` to that of x, none of which is negative."""
    # the next kernel reads it: no store of this program need be waited for
    tl.atomic_max(largest, tl.max(x.to(tl.int32, bitcast=True), 0), sem="relaxed")


@triton.jit
def largest_key(
    codes, token_scale, cu_seqlens, largest, program, stride_b, stride_h, stride_t, heads, tokens, total,
    head_dim: tl.constexpr, TOKEN: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of a block of K's codes times their scales, as `row_values` leaves Q's; TOKEN as there."""
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    first = tl.program_id(0) * BLOCK
    if first < length:
        local = tl.arange(0, BLOCK)
        columns = tl.arange(0, BLOCK_D)
        codes += batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + (start + first).to(tl.int64) * stride_t
        scale = tl.load(token_scale + z * total + start + first + local, mask=first + local < length, other=0)
        top_code = largest_code(
            codes, scale, local, columns, stride_t, length - first, head_dim, TOKEN, head_dim == BLOCK_D
        )
        keep_largest(largest + program * 3 + 2, top_code * scale)


@triton.jit(do_not_specialize=SIZES)
def float8_kernel(
    do, q, k, do_factor, q_factor, k_scale, cu_seqlens, cu_seqlens_k, largest, do_t, q_t, k_t, do_stride_b,
    do_stride_h, do_stride_t, q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t, heads, heads_k,
    programs, tokens, tokens_k, total, total_k, blocks, blocks_k, head_dim: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The operands of dV, dK and dQ: `write_float8` of dO, of Q's codes and of K's, one after the other along the
    second axis, of which dO and Q have ``programs`` each. K's rows are PAIRS, its sequences padded to SPAN."""
    program = tl.program_id(1)
    if program < programs:
        write_float8(
            do, do_factor, cu_seqlens, largest, do_t, program, do_stride_b, do_stride_h, do_stride_t, heads, heads_k,
            tokens, total, blocks, head_dim, 0, False, VARLEN, BLOCK, BLOCK, BLOCK_D,
        )  # fmt: skip
    elif program < 2 * programs:
        write_float8(
            q, q_factor, cu_seqlens, largest, q_t, program - programs, q_stride_b, q_stride_h, q_stride_t, heads,
            heads_k, tokens, total, blocks, head_dim, 1, False, VARLEN, BLOCK, BLOCK, BLOCK_D,
        )  # fmt: skip
    else:
        write_float8(
            k, k_scale, cu_seqlens_k, largest, k_t, program - 2 * programs, k_stride_b, k_stride_h, k_stride_t,
            heads_k, heads_k, tokens_k, total_k, blocks_k, head_dim, 2, True, VARLEN, BLOCK, SPAN, BLOCK_D,
        )  # fmt: skip


@triton.jit
def write_float8(
    x, factor, cu_seqlens, largest, transposed, program, stride_b, stride_h, stride_t, heads, heads_k, tokens, total,
    blocks, head_dim: tl.constexpr, WHOSE: tl.constexpr, PAIRS: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """e4m3 of BLOCK rows times their factor and 2^g, transposed by `store_transposed`; zeros up to a sequence's end in
    whole SPANs, of which a head has ``blocks``. WHOSE: which of the three largest magnitudes."""
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    first = tl.program_id(0) * BLOCK
    if first < tl.cdiv(length, SPAN) * SPAN:
        parts: tl.constexpr = SPAN // BLOCK
        block = (z * blocks + padded_block(start, batch, SPAN, VARLEN)) * parts + tl.program_id(0)
        local = tl.arange(0, BLOCK)
        columns = tl.arange(0, BLOCK_D)
        inside = first + local < length
        x += batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + (start + first).to(tl.int64) * stride_t
        tile = load_rows(x, local, columns, stride_t, length - first, head_dim, False, head_dim == BLOCK_D)
        owner = batch * heads_k + head // (heads // heads_k)
        multiplier = tl.load(factor + z * total + start + first + local, mask=inside, other=0)
        code = tile.to(tl.float32) * multiplier[:, None] * float8_factor(tl.load(largest + owner * 3 + WHOSE))
        code = code.to(tl.float8e4nv).to(tl.int8, bitcast=True)
        at = transposed.to(tl.pointer_type(tl.int8), bitcast=True)
        store_transposed(at, code, z, block, blocks * parts, columns, head_dim, BLOCK, PAIRS)


@triton.jit
def float8_scale(bits):
    """2^-g: what takes back `float8_factor` of the same bits; NaN where the largest was not finite, as codes are."""
    exponent = tl.maximum((bits + 0x1FFFFF) >> 23, 16)
    scale = ((exponent - 8) << 23).to(tl.float32, bitcast=True)
    return tl.where(bits >= 0x7F800000, float("nan"), scale)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def finish_dq_kernel(
    summed, spread, largest, cu_seqlens, dq, dq_b, dq_h, dq_t, heads, heads_k, tokens, total, blocks, scale,
    head_dim: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dQ from its FP16 sums, (heads, D, blocks * BLOCK): times each row's spread, K's scale and ``scale``."""
    batch, head, z, start, length = whose(tl.program_id(1), heads, cu_seqlens, tokens, VARLEN)
    first = tl.program_id(0) * BLOCK
    if first >= length:
        return
    pitch = blocks * BLOCK
    padded = (padded_block(start, batch, BLOCK, VARLEN) + tl.program_id(0)) * BLOCK
    local = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    inside = first + local < length
    kept = inside[:, None] & (columns < head_dim)[None, :]
    at = summed + (z * head_dim + columns)[:, None] * pitch + padded + local[None, :]
    tile = tl.trans(tl.load(at, mask=(columns < head_dim)[:, None], other=0)).to(tl.float32)
    factor = tl.load(spread + z * total + start + first + local, mask=inside, other=0)
    owner = batch * heads_k + head // (heads // heads_k)
    factor = factor * (float8_scale(tl.load(largest + owner * 3 + 2)) * scale)
    dq += batch.to(tl.int64) * dq_b + head.to(tl.int64) * dq_h + (start + first).to(tl.int64) * dq_t
    at = dq + local.to(tl.int64)[:, None] * dq_t + columns[None, :]
    tl.store(at, to_16bit(tile * factor[:, None], dq.dtype.element_ty), mask=kept)
