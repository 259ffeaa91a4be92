"""Recompute P and dS in the kernels of dQ and of dK and dV, and multiply their INT8 tiles.

A tile's rows are queries in the one and keys in the other, which multiplies the same operands the other way round.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sagebwd.kernels.common.tile import dot_16bit, exp2, interleave
from sagebwd.kernels.portable.pieces import product


@triton.jit
def scores_of(s, row_scale, column_scale, block_scale, scale_2, INT8: tl.constexpr):
    """S in base 2, ``scale_2`` of 16-bit rows; of codes by the scales, one of which has scale_2 in it.

    column_scale None: all columns have ``block_scale``.
    """
    if INT8:
        if column_scale is not None:
            return s * column_scale[None, :] * row_scale[:, None]
        else:
            return s * (row_scale * block_scale)[:, None]
    else:
        return s * scale_2


@triton.jit
def recompute_p(s, lse, mask):
    """P = exp2(S - lse), S and lse in base 2, lse broadcast along keys."""
    p = exp2(s - lse)  # P = exp2(S - lse)
    if mask is not None and mask.BIAS:
        p = tl.where(p > 1, 1.0, p)  # beside a large bias lse loses the digits that keep it so
    return p


@triton.jit
def score_gradients(
    p, a, b, v_scale, delta, FROM_DELTA: tl.constexpr, head_dim: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr
):
    """dS = P * (dP - delta), dP = a b^T = dO V^T; delta broadcast along keys; FROM_DELTA: dP starts from -delta.

    Of codes, with V's scale broadcast along queries: dS and delta are over dO's scale, which callers fold into others.
    WIDE: a and b are `Rows`, none of b's past the end if WHOLE.
    """
    if WIDE:
        dp = product(a, b, tl.zeros(p.shape, tl.float32) - delta, head_dim, WHOLE)  # dP - delta = dO V^T - delta
    elif a.dtype == tl.int8:
        dp = tl.dot(a, b.T, out_dtype=tl.int32).to(tl.float32) * v_scale - delta  # (dP - delta) / s = s_V dO^ V^T - ..
    elif FROM_DELTA:
        dp = dot_16bit(a, b.T, tl.zeros(p.shape, tl.float32) - delta)  # dP - delta = dO V^T - delta
    else:
        dp = dot_16bit(a, b.T) - delta  # dP - delta = dO V^T - delta
    return p * dp  # dS = P * (dP - delta)


@triton.jit
def int8_product(a, operand):
    """Product of an INT8 score tile with an INT8 transposed copy, FP32 without scales."""
    return tl.dot(interleave(a), operand, out_dtype=tl.int32).to(tl.float32)  # P^T dO, dS^T Q or dS K


@triton.jit
def accumulate(acc, part, scale, PER_ROW: tl.constexpr):
    """acc + part * scale, part an INT8 product; scale: one a row, or one scalar."""
    if PER_ROW:
        return acc + part * scale[:, None]
    else:
        return acc + part * scale


@triton.jit
def load_scales(scales, first, keys, left, MASKED: tl.constexpr):
    """Load the scales of a block of keys from ``first`` on, of which ``left`` are there: all of them unless MASKED."""
    if MASKED:
        return tl.load(scales + first + keys, mask=keys < left, other=0)
    else:
        return tl.load(scales + first + keys)


@triton.jit
def load_row_values(rows, block, BLOCK: tl.constexpr):
    """Load lse in base 2, delta, Q's and dO's scale of a query block, which `grad_out_kernel` packs, by one load."""
    packed = tl.load(rows + block * (BLOCK * 4) + tl.arange(0, BLOCK * 4)).reshape(BLOCK, 2, 2)
    first, second = tl.split(packed)
    lse, scale = tl.split(first)
    delta, do_scale = tl.split(second)
    return lse, delta, scale, do_scale


@triton.jit
def load_row_values_of(rows, at, inside):
    """Load the same of queries ``at``, counted with padding, by a load a value, for a program that keeps them."""
    lse = tl.load(rows + at * 4, mask=inside, other=float("inf"))
    delta = tl.load(rows + at * 4 + 1, mask=inside, other=0)
    scale = tl.load(rows + at * 4 + 2, mask=inside, other=0)
    do_scale = tl.load(rows + at * 4 + 3, mask=inside, other=0)
    return lse, delta, scale, do_scale
