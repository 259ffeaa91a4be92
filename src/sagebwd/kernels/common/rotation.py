"""R of `sagebwd.reference.rotation` in kernels: products with its signs, which programs of many rows make themselves.

Signs follow from the numbers of two channels in a few instructions. Programs of few rows read what a launch before
theirs stored (`store_signs`). Products of 16-bit numbers with signs are exact, and are added up in FP32. TURNED:
channels that R is of, a call's own head_dim; tiles may be filled up beyond it with zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sagebwd.kernels.common.tile import dot_16bit, load_rows, to_16bit
from sagebwd.numerics import MOST_ROTATED

# Of keys that are all alike and their mean, whose products are rounded apart, less than this part of the mean is left,
# and counts as zero: so do differences of keys under this part of their mean's largest channel, which softmax hardly
# sees.
ROUNDING = tl.constexpr(2.0**-18)
# Channels of one side of R at a time: more of its signs would fill the registers.
STEP = tl.constexpr(32)
# Channels of a piece of a tile, and of the signs that a program holds at a time (`signs_and_factors`).
PIECE = tl.constexpr(128)
# Of a block of R, at most.
MOST = tl.constexpr(MOST_ROTATED)


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


@triton.constexpr_function
def piece_width(columns, first):
    """Channels from ``first`` on in a piece of a tile of so many, a power of two: PIECE, or what is left."""
    rest = max(int(columns) - int(first), 1)
    return min(PIECE.value, max(32, 1 << (rest - 1).bit_length()))


@triton.jit
def signs_and_factors(dtype: tl.constexpr, TURNED: tl.constexpr, COLUMNS: tl.constexpr):
    """R by pieces of channels, as `turned` takes it: signs, and what products with them are times, by column.

    R of 256 channels is (S S; S -S) / 16, S the signs of 128; of others beyond 128 each piece has blocks of its own.
    """
    if COLUMNS <= PIECE:
        return (_of_piece(dtype, TURNED, piece_width(COLUMNS, 0)),)
    elif TURNED == 2 * PIECE:
        signs, factors = _of_piece(dtype, PIECE, PIECE)
        return ((signs, tl.full(factors.shape, TURNED**-0.5, tl.float32)),)
    else:
        low = _of_piece(dtype, min(TURNED, PIECE), PIECE)
        return (low, _of_piece(dtype, max(TURNED - PIECE, 0), piece_width(COLUMNS, PIECE)))


@triton.jit
def _of_piece(dtype: tl.constexpr, TURNED: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    WHOLE: tl.constexpr = TURNED == WIDTH
    return _signs(columns, 0, dtype, WIDTH, TURNED, WHOLE), _factors(columns, TURNED, WHOLE)


@triton.jit
def load_pieces(x, rows, stride, tokens, head_dim: tl.constexpr, COLUMNS: tl.constexpr):
    """`load_rows` by pieces of channels: the first ``head_dim`` that are in memory, then zeros up to COLUMNS."""
    pieces = ()
    for first in tl.static_range(0, COLUMNS, PIECE):
        columns = tl.arange(0, piece_width(COLUMNS, first))
        left = head_dim - first
        pieces += (load_rows(x + first, rows, columns, stride, tokens, left, False, left >= columns.shape[0]),)
    return pieces


@triton.jit
def floats(pieces):
    """Pieces in FP32."""
    return [piece.to(tl.float32) for piece in pieces]


@triton.jit
def store_signs(signs, TURNED: tl.constexpr, PITCH: tl.constexpr):
    """Write R's signs, (PITCH, PITCH) INT8: programs of few rows read them sooner than they make them."""
    columns = tl.arange(0, PITCH)
    written = _signs(columns, 0, tl.int8, PITCH, TURNED, TURNED == PITCH)
    tl.store(signs + columns[:, None] * PITCH + columns[None, :], written)


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
    return dot_16bit(tile, signs) * factors[None, :]  # x R


@triton.jit
def turned_row(row, TURNED: tl.constexpr, piece: tl.constexpr):
    """A piece of a row times its part of R, FP32; what is so of both pieces, `whole_row` makes the row R."""
    WIDTH: tl.constexpr = row.shape[0]
    columns = tl.arange(0, WIDTH)
    if TURNED == 2 * PIECE:
        return tl.sum(row[:, None] * _signs(columns, 0, tl.float32, WIDTH, WIDTH, True), 0) * TURNED**-0.5
    else:
        OWN: tl.constexpr = max(TURNED - PIECE, 0) if piece else min(TURNED, PIECE)
        sums = tl.sum(row[:, None] * _signs(columns, 0, tl.float32, WIDTH, OWN, OWN == WIDTH), 0)
        return sums * _factors(columns, OWN, OWN == WIDTH)


@triton.jit
def whole_row(pieces, TURNED: tl.constexpr):
    """A row R of `turned_row` of its pieces."""
    if TURNED == 2 * PIECE:
        return (pieces[0] + pieces[1], pieces[0] - pieces[1])
    else:
        return pieces


@triton.jit
def turned_codes(pieces, signs, TURNED: tl.constexpr, COLUMNS: tl.constexpr, PITCH: tl.constexpr):
    """codes R in FP32, of INT8 or of 16 bits, by pieces; signs: what `store_signs` wrote."""
    columns = tl.arange(0, piece_width(COLUMNS, 0))
    low = _sums_of_codes(pieces[0], signs, columns, PITCH)
    if COLUMNS <= PIECE:
        return (low.to(tl.float32) * _factors(columns, TURNED, columns.shape[0] == TURNED)[None, :],)
    elif TURNED == 2 * PIECE:
        high = _sums_of_codes(pieces[1], signs, columns, PITCH)
        return ((low + high).to(tl.float32) * TURNED**-0.5, (low - high).to(tl.float32) * TURNED**-0.5)
    else:
        rest = tl.arange(0, piece_width(COLUMNS, PIECE))
        high = _sums_of_codes(pieces[1], signs + PIECE * (PITCH + 1), rest, PITCH)
        low_factors = _factors(columns, min(TURNED, PIECE), TURNED >= PIECE)
        high_factors = _factors(rest, max(TURNED - PIECE, 0), rest.shape[0] == TURNED - PIECE)
        return (low.to(tl.float32) * low_factors[None, :], high.to(tl.float32) * high_factors[None, :])


@triton.jit
def _sums_of_codes(codes, signs, columns, PITCH: tl.constexpr):
    # by columns, as INT8 products read their second operand: R is symmetric
    if codes.dtype == tl.int8:
        r = tl.load(signs + columns[:, None] + columns[None, :] * PITCH)
        return tl.dot(codes, r, out_dtype=tl.int32)  # x R
    else:
        r = tl.load(signs + columns[:, None] * PITCH + columns[None, :]).to(tl.float32).to(codes.dtype)
        return dot_16bit(codes, r)  # x R


@triton.constexpr_function
def part_of(channels, number):
    """Of so many channels those in a part of `MOST_ROTATED`."""
    return min(max(int(channels) - number * MOST_ROTATED, 0), MOST_ROTATED)


@triton.jit
def load_turned(x, rows, stride, tokens, mean, head_dim: tl.constexpr, TURNED: tl.constexpr, BLOCK_D: tl.constexpr):
    """`load_rows` of all channels, `MOST_ROTATED` at most, less ``mean`` (D,) if that is not None, times R: FP32.

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
        acc = dot_16bit(tile, signs, acc)  # acc += x R
        if mean is not None:
            mu = tl.load(mean + channels, mask=channels < head_dim, other=0)
            taken_off += tl.sum(mu[:, None] * signs.to(tl.float32), 0)
    if mean is not None:
        acc -= taken_off[None, :]
        acc = tl.where(tl.abs(acc) < tl.max(tl.abs(taken_off), 0) * ROUNDING, 0.0, acc)
    return acc * _factors(columns, TURNED, WHOLE)[None, :]


@triton.jit
def store_turned(
    out, rows, stride, inside, x, scale, head_dim: tl.constexpr, TURNED: tl.constexpr, BLOCK_D: tl.constexpr,
    ROLLED: tl.constexpr = False,
):  # fmt: skip
    """Write x R scale, x of FP32 of which 16 bits count, to the rows that are ``inside``; ROLLED: in a loop."""
    WIDTH: tl.constexpr = min(STEP, BLOCK_D)
    high = to_16bit(x, tl.bfloat16)
    low = to_16bit(x - high.to(tl.float32), tl.bfloat16)
    if ROLLED:
        for first in tl.range(0, BLOCK_D, WIDTH, num_stages=1):
            _store_turned(out, rows, stride, inside, high, low, scale, first, head_dim, TURNED, WIDTH)
    else:
        for first in tl.static_range(0, BLOCK_D, WIDTH):
            _store_turned(out, rows, stride, inside, high, low, scale, first, head_dim, TURNED, WIDTH)


@triton.jit
def _store_turned(
    out, rows, stride, inside, high, low, scale, first, head_dim: tl.constexpr, TURNED: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The same of some channels from ``first`` on."""
    BLOCK_D: tl.constexpr = high.shape[1]
    WHOLE: tl.constexpr = TURNED == BLOCK_D
    channels = tl.arange(0, BLOCK_D)
    columns = first + tl.arange(0, WIDTH)
    signs = _signs(channels, first, tl.bfloat16, WIDTH, TURNED, WHOLE)
    sums = dot_16bit(low, signs, dot_16bit(high, signs))  # x R, x in two parts
    sums *= (_factors(columns, TURNED, WHOLE) * scale)[None, :]
    written = inside[:, None] & (columns[None, :] < head_dim)
    at = out + rows[:, None] * stride + columns[None, :]
    tl.store(at, to_16bit(sums, out.dtype.element_ty), mask=written)
