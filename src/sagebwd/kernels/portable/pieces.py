"""Products over a head_dim too wide for a tile: by pieces of channels, each loaded where it is multiplied.

Outputs of a wide call are of two slices of channels (`sagebwd.kernels.portable.config.slices`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from sagebwd.kernels.common.tile import dot_16bit, load_rows

# Of a piece, 128 bytes a row: what a row of a swizzled tile in shared memory holds.
CODES_OF_PIECE, CHANNELS_OF_PIECE = 128, 64


class Rows(NamedTuple):
    """Rows of a tile of which a piece of channels is loaded at a time."""

    at: tl.tensor  # the first one's channels
    numbers: tl.tensor
    pitch: tl.tensor
    left: tl.tensor  # how many of them there are


@triton.constexpr_function
def piece_of(codes):
    """Channels of a piece."""
    return CODES_OF_PIECE if codes else CHANNELS_OF_PIECE


@triton.jit
def product(a, b, acc, head_dim: tl.constexpr, WHOLE: tl.constexpr):
    """acc + a b^T of two `Rows`, in INT32 of codes, else FP32; WHOLE: none of b's lies past the end."""
    CODES: tl.constexpr = a.at.dtype.element_ty == tl.int8
    PIECE: tl.constexpr = piece_of(CODES)
    EVEN: tl.constexpr = head_dim % PIECE == 0
    for first in tl.range(0, head_dim, PIECE):
        columns = first + tl.arange(0, PIECE)
        x = load_rows(a.at, a.numbers, columns, a.pitch, a.left, head_dim, False, EVEN)
        y = load_rows(b.at, b.numbers, columns, b.pitch, b.left, head_dim, WHOLE, EVEN)
        if CODES:
            acc = tl.dot(x, y.T, acc, out_dtype=tl.int32)
        else:
            acc = dot_16bit(x, y.T, acc)
    return acc


@triton.jit
def scores_by_pieces(a, b, head_dim: tl.constexpr, WHOLE: tl.constexpr):
    """a b^T in FP32, without scales."""
    CODES: tl.constexpr = a.at.dtype.element_ty == tl.int8
    SHAPE: tl.constexpr = (a.numbers.shape[0], b.numbers.shape[0])
    return product(a, b, tl.zeros(SHAPE, tl.int32 if CODES else tl.float32), head_dim, WHOLE).to(tl.float32)
