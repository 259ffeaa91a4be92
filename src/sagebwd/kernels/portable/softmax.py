"""Scores of some keys, and P of the scores."""

from __future__ import annotations

import triton
import triton.language as tl

from sagebwd.kernels.common.tile import dot_16bit, exp2


@triton.jit
def times(a, b):
    """a b^T in FP32: of codes without their scales, or of 16 bits."""
    if a.dtype == tl.int8:
        return tl.dot(a, b.T, out_dtype=tl.int32).to(tl.float32)
    else:
        return dot_16bit(a, b.T)


@triton.jit
def scores(s, k_scale, first_k, keys, left, scale_2, INT8: tl.constexpr, K_TOKEN: tl.constexpr, MASKED: tl.constexpr):
    """S of `times` in base 2, without Q's scale if INT8; k_scale: of the sequence."""
    if INT8:
        if not K_TOKEN:
            s = s * (tl.load(k_scale + first_k) * scale_2)
        elif MASKED:
            s = s * (tl.load(k_scale + first_k + keys, mask=keys < left, other=0) * scale_2)[None, :]
        else:
            s = s * (tl.load(k_scale + first_k + keys) * scale_2)[None, :]
        return s
    else:
        return s * scale_2


@triton.jit
def probabilities(s, row_scale):
    """P = exp2(S - block_max), and block_max, each row's in this block; row_scale: Q's, where S lacks it, or None."""
    # Q's scale is positive and the same along the row
    block_max = tl.max(s, 1)
    if row_scale is not None:
        block_max = tl.where(block_max == float("-inf"), block_max, block_max * row_scale)
        offset = tl.where(block_max == float("-inf"), 0.0, block_max)
        return exp2(s * row_scale[:, None] - offset[:, None]), block_max  # P = exp2(S - block_max)
    else:
        offset = tl.where(block_max == float("-inf"), 0.0, block_max)
        return exp2(s - offset[:, None]), block_max  # P = exp2(S - block_max)
