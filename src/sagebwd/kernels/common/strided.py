"""A tensor by token and head as kernels take it: one argument, whatever its strides."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Packing

ONE, EIGHT = tl.constexpr(1), tl.constexpr(8)
# Of elements too, counted as eights are: kernels are the same whatever they are multiples of.
ANY = tl.constexpr(0)


class Strided(NamedTuple):
    """Where a tensor begins, and how far apart its sequences, heads and tokens lie; channels lie side by side.

    The distances are `counted`, of which `elements` makes them.
    """

    at: Tensor
    batch: int
    head: int
    token: int
    unit: tl.constexpr = ONE

    @classmethod
    def of(cls, x: Tensor, packing: Packing) -> Strided:
        """x, (B, H, N, D) or packed (total, H, D)."""
        return cls(x, *counted(*packing.strides(x)))


def counted(*strides: int) -> tuple:
    """Strides as kernels take them, and their unit: ONE where all are multiples of 16, EIGHT of 8, else ANY.

    Triton tells its compiler of multiples of 16 alone, without which rows are read an element at a time. Those of the
    other units are odd and over 1, so that no length has kernels of its own.
    """
    if not any(x % 16 for x in strides) or max(strides) >= 2**31:
        return *strides, ONE
    if any(x % 8 for x in strides):
        return *counted_as_any(*strides), ANY
    return *(x // 4 + 3 for x in strides), EIGHT


def counted_as_any(*strides: int) -> list[int]:
    """Strides of the unit ANY."""
    return [2 * x + 3 for x in strides]


@triton.jit
def elements(counted, unit):
    """How many one of `counted` strides is."""
    if unit == 1:
        return counted
    elif unit == 0:
        return (counted - 3) >> 1
    else:
        return ((counted - 3) >> 1) * unit


@triton.jit
def pitch_of(x):
    """How far apart tokens lie."""
    return elements(x.token, x.unit)


@triton.jit
def head_of(x, batch, head):
    """Where the tokens of all sequences of a head begin."""
    return x.at + (batch.to(tl.int64) * elements(x.batch, x.unit) + head.to(tl.int64) * elements(x.head, x.unit))


@triton.jit
def offset_of(x, batch, head, token):
    """How far a token's channels are from the first's; token: among all of a packed tensor's."""
    of_batch, of_head = elements(x.batch, x.unit), elements(x.head, x.unit)
    return batch.to(tl.int64) * of_batch + head.to(tl.int64) * of_head + token.to(tl.int64) * pitch_of(x)


@triton.jit
def row_of(x, batch, head, token):
    """Where a token's channels begin."""
    return x.at + offset_of(x, batch, head, token)


@triton.jit
def tile_of(x, batch, head, token, rows, columns):
    """How far a tile's channels are from the first's, which begins with this token."""
    return offset_of(x, batch, head, token) + rows[:, None] * pitch_of(x) + columns[None, :]


@triton.jit
def rows_of(x, batch, head, start):
    """Where a sequence's rows begin, for loops that add to it: as one sum it would take other registers there."""
    of_batch, of_head = elements(x.batch, x.unit), elements(x.head, x.unit)
    return x.at + batch.to(tl.int64) * of_batch + head.to(tl.int64) * of_head + start.to(tl.int64) * pitch_of(x)
