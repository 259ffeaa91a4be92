"""Arithmetic of both kernel families: sequences, block ranges, rounding to INT8 and 16 bit, tile layouts.

Two layouts of the same tokens appear below. Rows: (..., tokens, head_dim) with any strides, as the caller gave them.
Transposed: (heads, head_dim, blocks * BLOCK) INT8, tokens contiguous and each sequence padded to whole blocks, since
INT8 tensor cores take their second operand only with the reduced axis contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sagebwd import numerics

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INT8_MAX = tl.constexpr(127.0)
INVERSE_INT8_MAX = tl.constexpr(1.0 / 127.0)
# Adding 1.5 * 2**23 leaves an fp32's nearest integer, ties to even, in its low mantissa bits.
ROUND = tl.constexpr(12582912.0)
# Below this a group's largest magnitude counts as zero (`sagebwd.reference.quantize`): 1 / its scale may overflow.
TINY = tl.constexpr(numerics.TINY)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def sequence(cu_seqlens, batch, tokens, VARLEN: tl.constexpr):
    """First token and length of a sequence; tokens: `sagebwd.call.Packing.extent`."""
    if VARLEN:
        start = tl.load(cu_seqlens + batch)
        return start, tl.load(cu_seqlens + batch + 1) - start
    else:
        return tokens * 0, tokens


@triton.jit
def block_and_head(grid):
    """A program's block of tokens and its head of all sequences, of ``grid`` blocks a head.

    All programs are counted along the grid's first axis: its others end at 65535, which heads times batch may exceed.
    """
    return tl.program_id(0) % grid, tl.program_id(0) // grid


@triton.jit
def padded_block(start, batch, BLOCK: tl.constexpr, VARLEN: tl.constexpr):
    """The block at which a sequence begins in a padded layout: never overlapping, and known without a prefix sum."""
    if VARLEN:
        return start // BLOCK + batch
    else:
        return 0


@triton.jit
def owner_of(cu_seqlens, sequences, block, BLOCK):
    """The sequence that has a block of a padded layout: the last that begins at it or before (`padded_block`).

    Each sequence has one at least. A step looks at 32 sequences, which is one load: of up to 32 one step finds it, of
    up to 1024 two do.
    """
    found = block * 0
    left = sequences
    while left > 1:
        step = tl.cdiv(left, 32)
        at = found + tl.arange(0, 32) * step
        there = at < sequences
        begins = tl.load(cu_seqlens + at, mask=there, other=0) // BLOCK + at
        found += (tl.sum((there & (begins <= block)).to(tl.int32), 0) - 1) * step
        left = step
    return found


@triton.jit
def in_sequence(block, head, heads, cu_seqlens, tokens, BLOCK, VARLEN: tl.constexpr):
    """A block of a head of a padded layout: its number in its sequence, and the head counted over all sequences.

    Dense ones are given as that.
    """
    if VARLEN:
        batch = owner_of(cu_seqlens, tokens, block, BLOCK)
        return block - tl.load(cu_seqlens + batch) // BLOCK - batch, batch * heads + head
    else:
        return block, head


@triton.jit
def block_in_sequence(grid, heads, cu_seqlens, tokens, BLOCK, VARLEN: tl.constexpr):
    """`in_sequence` of a program's block, of ``grid`` blocks a head: `sagebwd.call.Packing.blocks`.

    Of packed sequences a number may lie past its sequence's end.
    """
    block, head = block_and_head(grid)
    return in_sequence(block, head, heads, cu_seqlens, tokens, BLOCK, VARLEN)


@triton.jit
def whose(program, heads, cu_seqlens, tokens, VARLEN: tl.constexpr):
    """A program's sequence and head, the head's place among per-token values, the first token and the length."""
    batch = program // heads
    head = program % heads
    start, length = sequence(cu_seqlens, batch, tokens, VARLEN)
    z = head.to(tl.int64) if VARLEN else program.to(tl.int64)
    return batch, head, z, start, length


@triton.jit
def block_range(
    first,
    tokens,
    lower,
    upper,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    HAS_LOWER: tl.constexpr,
    HAS_UPPER: tl.constexpr,
    ALL_MASKED: tl.constexpr,
):
    """Range of blocks b of the other axis that a block [first, first + BLOCK_A) of this axis a sees.

    a meets b where lower <= b - a <= upper and 0 <= b < tokens. Returns block numbers (begin, full_begin, full_end,
    end): [full_begin, full_end) need no mask, the rest of [begin, end) does.
    """
    begin = 0
    end = tokens
    full_begin = 0
    full_end = tokens
    if HAS_LOWER:
        begin = tl.maximum(first + lower, 0)
        full_begin = tl.maximum(first + BLOCK_A - 1 + lower, 0)
    if HAS_UPPER:
        end = tl.minimum(tl.maximum(first + BLOCK_A + upper, 0), tokens)
        full_end = tl.minimum(tl.maximum(first + 1 + upper, 0), tokens)
    begin = begin // BLOCK_B
    end = tl.maximum(tl.cdiv(end, BLOCK_B), begin)
    if ALL_MASKED:
        full_begin = end
        full_end = end
    else:
        full_begin = tl.minimum(tl.maximum(tl.cdiv(full_begin, BLOCK_B), begin), end)
        full_end = tl.minimum(tl.maximum(full_end // BLOCK_B, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def visible(distance, lower, upper, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr):
    """Where the band holds; distance = key - query."""
    keep = distance == distance
    if HAS_LOWER:
        keep = keep & (distance >= lower)
    if HAS_UPPER:
        keep = keep & (distance <= upper)
    return keep


@triton.jit
def to_int8(x):
    """Round half to even; |x| < 127.5."""
    return (x + ROUND).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def interleave(x):
    """Columns of a score tile in the order in which tensor cores read them back as an operand.

    In every 16 columns a thread holds 8j + 2t + b as a result and 4t + 2j + b as an INT8 operand; renaming one as the
    other keeps a tile in its registers. The second operand lies in memory in this order (`interleave_rows`).
    """
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return x.reshape(M, N // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(M, N)


@triton.jit
def interleave_rows(x):
    """`interleave` along the rows: what the transposed copies hold."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return x.reshape(M // 16, 2, 4, 2, N).permute(0, 2, 1, 3, 4).reshape(M, N)


@triton.jit
def to_16bit(x, dtype: tl.constexpr):
    """FP32 rounded to even; the interpreter cuts bf16 off instead."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot_16bit(a, b, acc=None):
    """a b + acc in FP32; the interpreter keeps bf16 as raw bits, which its own dot would multiply as integers."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def exp2(x):
    """2**x, results under 2**-126 flushed to 0; without the flush each takes three instructions more."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def divide(x, scale, inverse):
    """x / scale, rounded as IEEE division is; inverse is 1 / scale within two units in the last place.

    Three instructions, where a division takes a dozen and a branch.
    """
    if INTERPRETED:
        return x / scale
    else:
        quotient = x * inverse
        # of the two factors the scale is negated, as it is that of many x
        return tl.fma(tl.fma(quotient, -scale, x), inverse, quotient)


@triton.jit
def psi_scale(amax):
    """psi's scale of what has this largest magnitude: amax / 127, rounded as IEEE division is; under TINY 1.

    Of infinity it is NaN: scores of -inf would pass for those of keys that are not seen.
    """
    scale = divide(amax + 0 * amax, INT8_MAX, INVERSE_INT8_MAX)
    return tl.where(amax < TINY, 1.0, scale)


@triton.jit
def abs_max(x, AXIS: tl.constexpr):
    """Largest magnitude along an axis (None: of all); NaN wins, as its bits are the largest."""
    return tl.max(tl.abs(x).to(tl.int32, bitcast=True), AXIS).to(tl.float32, bitcast=True)


@triton.jit
def largest(x, PER_ROW: tl.constexpr):
    """Largest magnitude of each row of a score tile, or of all of it; a lone NaN may be lost."""
    if PER_ROW:
        return tl.max(tl.abs(x), 1)
    else:
        return tl.max(tl.max(tl.abs(x), 1), 0)


@triton.jit
def largest_bits(p, PER_ROW: tl.constexpr):
    """The same where nothing is negative; NaN wins, as its bits are the largest (a GPU's NaN has no sign)."""
    if INTERPRETED:
        p = tl.abs(p)
    bits = p.to(tl.int32, bitcast=True)
    if PER_ROW:
        return tl.max(bits, 1).to(tl.float32, bitcast=True)
    else:
        return tl.max(tl.max(bits, 1), 0).to(tl.float32, bitcast=True)


@triton.jit
def _larger(p, ds, other_p, other_ds):
    return tl.maximum(p, other_p), tl.maximum(ds, other_ds)


@triton.jit
def largest_of_tile(p, ds):
    """`largest_bits` of all of P and `largest` of all of dS, in one exchange between warps instead of two."""
    # the interpreter's tl.maximum lets NaN win
    if INTERPRETED:
        return largest_bits(p, False), largest(ds, False)
    else:
        rows = largest_bits(p, True).to(tl.int32, bitcast=True), largest(ds, True)
        p_max, ds_max = tl.reduce(rows, 0, _larger)
        return p_max.to(tl.float32, bitcast=True), ds_max


@triton.jit
def quantize_tile(x, amax, PER_ROW: tl.constexpr):
    """Quantize a score tile to INT8 by psi."""
    inverse = tl.where(amax < TINY, 0.0, 127.0 / amax)
    if PER_ROW:
        return to_int8(x * inverse[:, None])
    else:
        return to_int8(x * inverse)


@triton.jit
def load_rows(pointer, rows, columns, stride, tokens, head_dim, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr):
    """A (rows, columns) tile; what lies outside is 0."""
    at = pointer + rows[:, None] * stride + columns[None, :]
    if EVEN_ROWS and EVEN_COLUMNS:
        return tl.load(at)
    elif EVEN_ROWS:
        return tl.load(at, mask=columns[None, :] < head_dim, other=0)
    elif EVEN_COLUMNS:
        return tl.load(at, mask=rows[:, None] < tokens, other=0)
    else:
        return tl.load(at, mask=(rows[:, None] < tokens) & (columns[None, :] < head_dim), other=0)


@triton.jit
def load_block(
    x,
    tma,
    batch,
    head,
    start,
    first,
    tokens,
    stride_t,
    head_dim,
    EVEN_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VARLEN: tl.constexpr,
    FIRST_D: tl.constexpr = 0,
):
    """Rows [first, first + BLOCK) of a sequence, whose rows begin at x; of the descriptor ``tma`` if not None.

    Channels from FIRST_D on, without TMA. TMA reads past the end of a packed sequence, what NaN is there too.
    """
    if tma is not None:
        tile = tma.load([0 if VARLEN else batch, head, start + first, 0])
        return tile.reshape(BLOCK, BLOCK_D)
    else:
        columns = FIRST_D + tl.arange(0, BLOCK_D)
        x += first.to(tl.int64) * stride_t
        EVEN: tl.constexpr = head_dim >= FIRST_D + BLOCK_D
        return load_rows(x, tl.arange(0, BLOCK), columns, stride_t, tokens - first, head_dim, EVEN_ROWS, EVEN)


@triton.jit
def load_transposed(
    x, z, blocks, block, head_dim, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr,
    FIRST_D: tl.constexpr = 0,
):  # fmt: skip
    """Block ``block`` of head ``z`` of a transposed copy, as (tokens, channels from FIRST_D on).

    TMA: x is a descriptor, of all channels.
    """
    if TMA:
        return x.load([z.to(tl.int32), 0, block * BLOCK]).reshape(BLOCK_D, BLOCK).T
    else:
        columns = FIRST_D + tl.arange(0, BLOCK_D)
        pitch = blocks * BLOCK
        x += z.to(tl.int64) * head_dim * pitch + block * BLOCK
        at = x + tl.arange(0, BLOCK)[:, None] + columns[None, :] * pitch
        if head_dim >= FIRST_D + BLOCK_D:
            return tl.load(at)
        else:
            return tl.load(at, mask=columns[None, :] < head_dim, other=0)
