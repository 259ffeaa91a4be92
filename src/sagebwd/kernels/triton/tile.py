"""What every kernel of this family shares: where a sequence lies, which blocks it meets, and how INT8 is packed.

Two layouts of the same tokens appear below. Rows: (..., tokens, head_dim) with any strides, as the caller gave them.
Transposed: (heads, head_dim, blocks * BLOCK) INT8, tokens contiguous and each sequence padded to whole blocks, since
INT8 tensor cores take their second operand only with the reduced axis contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_127 = tl.constexpr(6.988684686772166)
INT8_MAX = tl.constexpr(127.0)
# Adding 1.5 * 2**23 leaves an fp32's nearest integer, ties to even, in its low mantissa bits.
ROUND = tl.constexpr(12582912.0)
# Below this a group's largest magnitude counts as zero: its reciprocal would overflow.
TINY = tl.constexpr(1e-30)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def sequence(cu_seqlens, batch, tokens, VARLEN: tl.constexpr):
    """First token and length of a sequence."""
    if VARLEN:
        start = tl.load(cu_seqlens + batch)
        return start, tl.load(cu_seqlens + batch + 1) - start
    else:
        return tokens * 0, tokens


@triton.jit
def padded_block(start, batch, BLOCK: tl.constexpr, VARLEN: tl.constexpr):
    """The block at which a sequence begins in a padded layout: never overlapping, and known without a prefix sum."""
    if VARLEN:
        return start // BLOCK + batch
    else:
        return 0


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
    """Which blocks b of the other axis a block [first, first + BLOCK_A) of this axis a meets.

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
def dot_16bit(a, b, acc=None):
    """a b + acc in FP32; the interpreter keeps bf16 as raw bits, which its own dot would multiply as integers."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def abs_max(x, AXIS: tl.constexpr):
    """Largest magnitude along an axis (None: of all); NaN wins, as its bits are the largest."""
    return tl.max(tl.abs(x).to(tl.int32, bitcast=True), AXIS).to(tl.float32, bitcast=True)


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
def load_transposed(pointer, rows, columns, pitch, head_dim, EVEN_COLUMNS: tl.constexpr):
    """A (rows, columns) tile of a transposed copy."""
    at = pointer + rows[:, None] + columns[None, :] * pitch
    if EVEN_COLUMNS:
        return tl.load(at)
    else:
        return tl.load(at, mask=columns[None, :] < head_dim, other=0)
