"""Which widths Hopper's own kernels have: a row for each (head_dim, value_dim), measured on an H200 (docs/log).

Imports neither torch nor triton: tests, tools, the command line and error messages read widths here. A kernel branches
on what its row says, never on a width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

# Keys of a block that has four scales, one for each lane of a quad.
SCALE_BLOCK = 128


class ForwardTile(NamedTuple):
    """Tile and pipeline of the forward: queries by ``warpgroups`` of 64, ``keys`` a step, ``stages`` of K and V."""

    warpgroups: int
    keys: int
    stages: int

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return 64 * self.warpgroups

    @property
    def scale_keys(self) -> int:
        """Keys of a step that have the same scales: all, unless a block of scales may end within a step."""
        return math.gcd(self.keys, SCALE_BLOCK)


class BackwardTile(NamedTuple):
    """Tile and pipeline of the backward: 128 keys, ``queries`` a step, ``stages`` of what is loaded of these.

    queries: also of a scale of dO's and Q's e4m3 copies (`sagebwd.meaning.float8.queries_a_scale`).
    by_channel: a warpgroup computes dQ^T of half of the channels; else of half of the queries, and holds K's copy for
    it in registers.
    holds_keys: a warpgroup holds K for S in registers.
    in_halves: registers are short: products are added up half of the channels at a time, unless by pieces.
    in_turn: a program takes several blocks of keys one after the other (`turns`).
    piece: channels of a buffer and of sums that are held together, or 0: all of them, or their halves.
    in_two: dK and dV have no room beside one another, and are computed by two kernels.
    """

    queries: int
    stages: int
    by_channel: bool
    in_halves: bool
    in_turn: bool
    holds_keys: bool = False
    piece: int = 0
    in_two: bool = False

    @property
    def in_rows(self) -> bool:
        """Whether dQ is added up in rows, (queries, D); else dQ^T is."""
        return self.in_two or self.piece > 0


class Width(NamedTuple):
    """Kernels of one head_dim and value head_dim.

    form: the widths that run, where these are filled up to with zeros. `dispatch` offers no width without a
    backward.
    """

    head_dim: int
    value_dim: int
    form: tuple[int, int]
    forward: ForwardTile
    backward: BackwardTile | None


_64 = (
    ForwardTile(warpgroups=3, keys=128, stages=2),
    BackwardTile(128, 3, by_channel=False, in_halves=False, in_turn=True),
)
_128 = ForwardTile(2, 128, 2), BackwardTile(64, 2, by_channel=True, in_halves=True, in_turn=False, holds_keys=True)
_96 = BackwardTile(64, 2, by_channel=True, in_halves=False, in_turn=False, holds_keys=True, piece=32)
_192 = BackwardTile(64, 2, by_channel=True, in_halves=True, in_turn=False, piece=64)

WIDTHS = (
    Width(64, 64, (64, 64), *_64),
    Width(96, 96, (96, 96), ForwardTile(2, 128, 2), _96),
    Width(112, 112, (128, 128), *_128),
    Width(128, 128, (128, 128), *_128),
    Width(192, 128, (192, 128), ForwardTile(2, 128, 3), _192),
    Width(256, 256, (256, 256), ForwardTile(2, 96, 2), None),
)

_OF = {row[:2]: row for row in WIDTHS}

# One number for both, of rows with both directions; and those that are filled up to no other.
HEAD_DIMS = tuple(row.head_dim for row in WIDTHS if row.backward and row.head_dim == row.value_dim)
AS_THEY_ARE = tuple(width for width in HEAD_DIMS if _OF[width, width].form == (width, width))


def width(head_dim: int, value_dim: int) -> Width | None:
    """The row of a pair, if there is one."""
    return _OF.get((head_dim, value_dim))


def of_call(head_dim: int, value_dim: int) -> tuple[int, int] | None:
    """The row that runs a call: a pair's own with both directions, or that of its greater width filled up to."""
    for pair in ((head_dim, value_dim), (max(head_dim, value_dim),) * 2):
        row = _OF.get(pair)
        if row is not None and row.backward is not None:
            return row.form
    return None
