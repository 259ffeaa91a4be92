"""R of `sagebwd.meaning.rotation` in kernels: products with its signs, which programs of many rows make themselves.

Signs follow from the numbers of two channels in a few instructions. Programs of few rows read what a launch before
theirs stored (`store_signs`). Products of 16-bit numbers with signs are exact, and are added up in FP32. TURNED:
channels that R is of, a call's own head_dim; tiles may be filled up beyond it with zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sagebwd.kernels.operands.tile import dot_16bit, load_rows, to_16bit

# Of keys that are all alike and their mean, whose products are rounded apart, less than this part of the mean is left,
# and counts as zero. Others of 16 bits differ by far more.
ROUNDING = tl.constexpr(2.0**-18)
# Channels of one side of R at a time: more of its signs would fill the registers.
STEP = tl.constexpr(32)
# Channels of a piece of a tile, and of the signs that a program holds at a time (`signs_and_factors`).
PIECE = tl.constexpr(128)


@triton.jit
def _spans(channels, TURNED: tl.constexpr):
    """Of each channel all bits up to that of its block's size; 0 beyond the last block."""
    # blocks begin at multiples of their sizes: the first bit in which head_dim and a channel's number differ is its
    span = tl.where(channels < TURNED, channels ^ TURNED, 0)
    span |= span >> 1
    span |= span >> 2
    span |= span >> 4
    return span | (span >> 8)


@triton.jit
def _sign(x):
    """-1 where a number below 256 has an odd number of ones, else 1: bit n of 0x6996 is 1 where n has."""
    x ^= x >> 4
    return 1.0 - 2.0 * ((0x6996 >> (x & 15)) & 1).to(tl.float32)


@triton.jit
def _signs(rows, first, dtype: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr, WHOLE: tl.constexpr):
    """R's signs between some channels and COLUMNS from ``first``, a multiple of 8; 0 outside of its blocks.

    -1 where the numbers of two channels have an odd number of ones in common. WHOLE: one block is as wide as tiles.
    """
    if not WHOLE:
        row_spans = _spans(rows, TURNED)
        within = rows & (row_spans >> 1)
    else:
        within = rows
    # of eight channels side by side, and of eights: their product takes an instruction, each of them ten
    eights = _sign(within[:, None] & (first + 8 * tl.arange(0, COLUMNS // 8))[None, :])
    eight = _sign(within[:, None] & tl.arange(0, 8)[None, :])
    signs = (eights[:, :, None] * eight[:, None, :]).reshape(rows.shape[0], COLUMNS)
    if not WHOLE:
        columns = first + tl.arange(0, COLUMNS)
        signs = tl.where(row_spans[:, None] == _spans(columns, TURNED)[None, :], signs, 0.0)
    return signs.to(dtype)


@triton.jit
def _factors(columns, TURNED: tl.constexpr, WHOLE: tl.constexpr):
    """What signs are times, by column: one over the root of its block's size."""
    if WHOLE:
        return tl.full(columns.shape, TURNED**-0.5, tl.float32)
    else:
        span = _spans(columns, TURNED)
        size = tl.maximum(span - (span >> 1), 1).to(tl.float32)
        return tl.div_rn(1.0, tl.sqrt_rn(size))


@triton.jit
def signs_and_factors(dtype: tl.constexpr, TURNED: tl.constexpr, BLOCK_D: tl.constexpr):
    """R by pieces of channels, as `turned` takes it: signs, and what products with them are times, by column.

    R of 256 channels is (S S; S -S) / 16, S the signs of 128; of others beyond 128 each piece has blocks of its own.
    """
    if BLOCK_D <= PIECE:
        return (_of_piece(dtype, TURNED, BLOCK_D),)
    elif TURNED == BLOCK_D:
        signs, factors = _of_piece(dtype, PIECE, PIECE)
        return ((signs, tl.full(factors.shape, TURNED**-0.5, tl.float32)),)
    else:
        return (_of_piece(dtype, PIECE, PIECE), _of_piece(dtype, TURNED - PIECE, PIECE))


@triton.jit
def _of_piece(dtype: tl.constexpr, TURNED: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    WHOLE: tl.constexpr = TURNED == BLOCK_D
    return _signs(columns, 0, dtype, BLOCK_D, TURNED, WHOLE), _factors(columns, TURNED, WHOLE)


@triton.jit
def load_pieces(x, rows, stride, tokens, head_dim: tl.constexpr, BLOCK_D: tl.constexpr):
    """`load_rows` of all channels, by pieces of them."""
    WIDTH: tl.constexpr = min(PIECE, BLOCK_D)
    columns = tl.arange(0, WIDTH)
    pieces = ()
    for first in tl.static_range(0, BLOCK_D, WIDTH):
        left = head_dim - first
        pieces += (load_rows(x + first, rows, columns, stride, tokens, left, False, left >= WIDTH),)
    return pieces


@triton.jit
def floats(pieces):
    """Pieces in FP32."""
    return [piece.to(tl.float32) for piece in pieces]


@triton.jit
def store_signs(signs, TURNED: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write R's signs, (BLOCK_D, BLOCK_D) INT8: programs of few rows read them sooner than they make them."""
    columns = tl.arange(0, BLOCK_D)
    written = _signs(columns, 0, tl.int8, BLOCK_D, TURNED, TURNED == BLOCK_D)
    tl.store(signs + columns[:, None] * BLOCK_D + columns[None, :], written)


@triton.jit
def turned(pieces, rotation):
    """A tile R in FP32, of 16 bits, whose products with signs are exact; rotation: `signs_and_factors`."""
    if len(rotation) < len(pieces):
        low, high = _product(pieces[0], rotation[0]), _product(pieces[1], rotation[0])
        return (low + high, low - high)
    else:
        products = ()
        for piece in tl.static_range(len(pieces)):
            products += (_product(pieces[piece], rotation[piece]),)
        return products


@triton.jit
def _product(tile, rotation):
    signs, factors = rotation
    return dot_16bit(tile, signs) * factors[None, :]


@triton.jit
def turned_codes(pieces, signs, TURNED: tl.constexpr, BLOCK_D: tl.constexpr):
    """codes R in FP32, of INT8, by pieces; signs: what `store_signs` wrote."""
    if BLOCK_D <= PIECE:
        columns = tl.arange(0, BLOCK_D)
        sums = _sums_of_codes(pieces[0], signs, columns, BLOCK_D)
        return (sums.to(tl.float32) * _factors(columns, TURNED, TURNED == BLOCK_D)[None, :],)
    else:
        columns = tl.arange(0, PIECE)
        low = _sums_of_codes(pieces[0], signs, columns, BLOCK_D)
        if TURNED == BLOCK_D:
            high = _sums_of_codes(pieces[1], signs, columns, BLOCK_D)
            return ((low + high).to(tl.float32) * TURNED**-0.5, (low - high).to(tl.float32) * TURNED**-0.5)
        else:
            high = _sums_of_codes(pieces[1], signs + PIECE * (BLOCK_D + 1), columns, BLOCK_D)
            factors = _factors(columns, TURNED - PIECE, False)
            return (low.to(tl.float32) * PIECE**-0.5, high.to(tl.float32) * factors[None, :])


@triton.jit
def _sums_of_codes(codes, signs, columns, BLOCK_D: tl.constexpr):
    # by columns, as INT8 products read their second operand: R is symmetric
    return tl.dot(codes, tl.load(signs + columns[:, None] + columns[None, :] * BLOCK_D), out_dtype=tl.int32)


@triton.jit
def turned_row(row, TURNED: tl.constexpr, BLOCK_D: tl.constexpr):
    """row R, of FP32, (D,)."""
    WHOLE: tl.constexpr = TURNED == BLOCK_D
    columns = tl.arange(0, BLOCK_D)
    sums = tl.sum(row[:, None] * _signs(columns, 0, tl.float32, BLOCK_D, TURNED, WHOLE), 0)
    return sums * _factors(columns, TURNED, WHOLE)


@triton.jit
def load_turned(
    x, rows, stride, tokens, mean, head_dim: tl.constexpr, TURNED: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """`load_rows` of all channels, less ``mean`` (D,) if that is not None, times R: FP32.

    Of the mean the product is taken by itself: rows as they are have 16 bits.
    """
    WHOLE: tl.constexpr = TURNED == BLOCK_D
    WIDTH: tl.constexpr = min(STEP, BLOCK_D)
    columns = tl.arange(0, BLOCK_D)
    acc = tl.zeros((rows.shape[0], BLOCK_D), tl.float32)
    taken_off = tl.zeros((BLOCK_D,), tl.float32)
    for first in tl.range(0, BLOCK_D, WIDTH, num_stages=1):
        channels = first + tl.arange(0, WIDTH)
        tile = load_rows(x, rows, channels, stride, tokens, head_dim, False, head_dim == BLOCK_D)
        # of R, which is symmetric, the channels that are added up over
        signs = tl.trans(_signs(columns, first, tile.dtype, WIDTH, TURNED, WHOLE))
        acc = dot_16bit(tile, signs, acc)
        if mean is not None:
            mu = tl.load(mean + channels, mask=channels < head_dim, other=0)
            taken_off += tl.sum(mu[:, None] * signs.to(tl.float32), 0)
    if mean is not None:
        acc -= taken_off[None, :]
        acc = tl.where(tl.abs(acc) < tl.max(tl.abs(taken_off), 0) * ROUNDING, 0.0, acc)
    return acc * _factors(columns, TURNED, WHOLE)[None, :]


@triton.jit
def store_turned(
    out, rows, stride, inside, x, scale, head_dim: tl.constexpr, TURNED: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Write x R scale, x of FP32 of which 16 bits count, to the rows that are ``inside``."""
    WHOLE: tl.constexpr = TURNED == BLOCK_D
    WIDTH: tl.constexpr = min(STEP, BLOCK_D)
    channels = tl.arange(0, BLOCK_D)
    high = to_16bit(x, tl.bfloat16)
    low = to_16bit(x - high.to(tl.float32), tl.bfloat16)
    for first in tl.static_range(0, BLOCK_D, WIDTH):
        columns = first + tl.arange(0, WIDTH)
        signs = _signs(channels, first, tl.bfloat16, WIDTH, TURNED, WHOLE)
        sums = dot_16bit(low, signs, dot_16bit(high, signs))
        sums *= (_factors(columns, TURNED, WHOLE) * scale)[None, :]
        written = inside[:, None] & (columns[None, :] < head_dim)
        at = out + rows[:, None] * stride + columns[None, :]
        tl.store(at, to_16bit(sums, out.dtype.element_ty), mask=written)
