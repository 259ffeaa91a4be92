"""A tensor by token and head as kernels take it: one argument, whatever its strides."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Packing


class Strided(NamedTuple):
    """Where a tensor begins, and how far apart its sequences, heads and tokens lie; channels lie side by side."""

    at: Tensor
    batch: int
    head: int
    token: int

    @classmethod
    def of(cls, x: Tensor, packing: Packing) -> Strided:
        """x, (B, H, N, D) or packed (total, H, D)."""
        return cls(x, *packing.strides(x))


@triton.jit
def head_of(x, batch, head):
    """Where the tokens of all sequences of a head begin."""
    return x.at + (batch.to(tl.int64) * x.batch + head.to(tl.int64) * x.head)


@triton.jit
def offset_of(x, batch, head, token):
    """How far a token's channels are from the first's; token: among all of a packed tensor's."""
    return batch.to(tl.int64) * x.batch + head.to(tl.int64) * x.head + token.to(tl.int64) * x.token


@triton.jit
def row_of(x, batch, head, token):
    """Where a token's channels begin."""
    return x.at + offset_of(x, batch, head, token)


@triton.jit
def tile_of(x, batch, head, token, rows, columns):
    """How far a tile's channels are from the first's, which begins with this token."""
    return offset_of(x, batch, head, token) + rows[:, None] * x.token + columns[None, :]


@triton.jit
def rows_of(x, batch, head, start):
    """Where a sequence's rows begin, for loops that add to it: as one sum it would take other registers there."""
    return x.at + batch.to(tl.int64) * x.batch + head.to(tl.int64) * x.head + start.to(tl.int64) * x.token
