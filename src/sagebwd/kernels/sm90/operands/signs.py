"""The rotation of S's codes (`sagebwd.meaning.rotation`) as passes read it."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import padded_head_dim
from sagebwd.kernels.host.replay import lasting
from sagebwd.kernels.operands.tile import dot_16bit, to_16bit
from sagebwd.meaning.rotation import hadamard


class Signs(NamedTuple):
    """R, symmetric, as wide as tiles are: INT8 signs, 0 outside of its blocks, and what FP32 each column is times."""

    matrix: Tensor
    factor: Tensor


def signs_of(rotation: tuple[int, ...], head_dim: int, device: torch.device) -> Signs | None:
    """R of blocks of these sizes, and zeros up to a tile of ``head_dim``; None without a block."""
    return _made(rotation, padded_head_dim(head_dim), device) if rotation else None


@cache
def _made(rotation: tuple[int, ...], width: int, device: torch.device) -> Signs:
    matrix, factor = torch.zeros(width, width, dtype=torch.int8), torch.zeros(width)
    end = 0
    for size in rotation:
        begin, end = end, end + size
        matrix[begin:end, begin:end], factor[begin:end] = hadamard(size), size**-0.5
    return Signs(*(lasting(x.to(device)) for x in (matrix, factor)))


@triton.jit
def turned(tile, rotation, columns, WIDTH: tl.constexpr):
    """tile R in FP32, of a tile of INT8 codes or 16-bit numbers, whose products with signs are exact.

    One of FP32 is taken as two parts of 16 bit, to a 2^18th of each element; zeros stay zeros.
    """
    # by columns, as INT8 products read their second operand: R is symmetric
    signs = tl.load(rotation.matrix + columns[:, None] + columns[None, :] * WIDTH)
    if tile.dtype == tl.int8:
        sums = tl.dot(tile, signs, out_dtype=tl.int32).to(tl.float32)
    elif tile.dtype == tl.float32:
        signs = signs.to(tl.float32).to(tl.bfloat16)
        high = to_16bit(tile, tl.bfloat16)
        low = to_16bit(tile - high.to(tl.float32), tl.bfloat16)
        sums = dot_16bit(low, signs, dot_16bit(high, signs))
    else:
        sums = dot_16bit(tile, signs.to(tl.float32).to(tile.dtype))
    return sums * tl.load(rotation.factor + columns)[None, :]
