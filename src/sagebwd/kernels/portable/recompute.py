"""What dQ's kernel and that of dK and dV do alike to a tile of scores: P and dS anew, and products of their codes.

A tile's rows are queries in the one and keys in the other, which multiplies the same operands the other way round.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sagebwd.kernels.operands.tile import dot_16bit, exp2, interleave


@triton.jit
def scores_of(a, b, row_scale, column_scale, block_scale, scale_2):
    """a b^T in base 2, ``scale_2`` of 16-bit rows; of codes by the scales, one of which has scale_2 in it.

    column_scale None: all columns have ``block_scale``.
    """
    if a.dtype == tl.int8:
        s = tl.dot(a, b.T, out_dtype=tl.int32).to(tl.float32)
        if column_scale is not None:
            return s * column_scale[None, :] * row_scale[:, None]
        else:
            return s * (row_scale * block_scale)[:, None]
    else:
        return dot_16bit(a, b.T) * scale_2


@triton.jit
def weights_of(s, lse, mask):
    """P = 2^(S - lse), lse broadcast along keys."""
    p = exp2(s - lse)
    if mask is not None and mask.BIAS:
        p = tl.where(p > 1, 1.0, p)  # beside a large bias lse loses the digits that keep it so
    return p


@triton.jit
def score_gradients(p, a, b, delta, FROM_DELTA: tl.constexpr):
    """dS = P (a b^T - delta), delta broadcast along keys; FROM_DELTA: the product adds up from -delta."""
    if FROM_DELTA:
        dp = dot_16bit(a, b.T, tl.zeros(p.shape, tl.float32) - delta)
    else:
        dp = dot_16bit(a, b.T) - delta
    return p * dp


@triton.jit
def product_of(codes, operand):
    """Of a score tile's codes, and a transposed copy's."""
    return tl.dot(interleave(codes), operand, out_dtype=tl.int32).to(tl.float32)


@triton.jit
def added(acc, part, scale, PER_ROW: tl.constexpr):
    """A product of codes added up; scale: one a row, or one."""
    if PER_ROW:
        return acc + part * scale[:, None]
    else:
        return acc + part * scale


@triton.jit
def load_row_values(rows, block, BLOCK: tl.constexpr):
    """lse in base 2, delta and q_scale of a block of queries, as `grad_out_kernel` packs them, in one load."""
    packed = tl.load(rows + block * (BLOCK * 4) + tl.arange(0, BLOCK * 4)).reshape(BLOCK, 2, 2)
    first, second = tl.split(packed)
    lse, scale = tl.split(first)
    delta, _ = tl.split(second)
    return lse, delta, scale


@triton.jit
def load_row_values_of(rows, at, inside):
    """The same of queries ``at``, counted with padding, for a program that keeps them: in loads of one value each."""
    lse = tl.load(rows + at * 4, mask=inside, other=float("inf"))
    delta = tl.load(rows + at * 4 + 1, mask=inside, other=0)
    scale = tl.load(rows + at * 4 + 2, mask=inside, other=0)
    return lse, delta, scale
