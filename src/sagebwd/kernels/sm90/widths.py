"""Which widths Hopper's own kernels have: a row for each (head_dim, value_dim), measured on an H200 (dev/log).

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

    queries: also of a scale of dO's and Q's e4m3 copies (`sagebwd.reference.float8.queries_a_scale`).
    by_channel: a warpgroup computes dQ^T of half of the channels; else of half of the queries, and holds K's copy for
    it in registers.
    holds_keys: a warpgroup holds K for S in registers.
    in_halves: registers are short: products are added up half of the channels at a time, unless by pieces.
    in_turn: a program takes several blocks of keys one after the other (`turns`).
    piece: channels of a buffer and of sums that are held together, or 0: all of them, or their halves.
    in_two: dK and dV have no room beside one another, and are computed by two kernels.
    places: blocks of Q and dO that the one of dK and dQ has room for.
    held_values: pieces of V that it holds in registers.
    row_warps, row_registers: warps of a program of the pass over queries before it, and registers of a thread at most.
    """

    queries: int
    stages: int
    by_channel: bool
    in_halves: bool
    in_turn: bool
    holds_keys: bool = False
    piece: int = 0
    in_two: bool = False
    places: int = 1
    held_values: int = 0
    row_warps: int = 4
    row_registers: int = 128

    @property
    def in_rows(self) -> bool:
        """Whether dQ is added up in rows, (queries, D); else dQ^T is."""
        return self.in_two or self.piece > 0


class Width(NamedTuple):
    """Kernels of one head_dim and value head_dim, which lesser ones are filled up to with zeros.

    No call gets a row without a backward. listed: the forward's tile under a mask of elements, where it is another:
    blocks of masks have 128 queries or twice as many, and a tile across two meets what either meets.
    """

    head_dim: int
    value_dim: int
    forward: ForwardTile
    backward: BackwardTile | None
    listed: ForwardTile | None = None

    def forward_of(self, has_lists: bool) -> ForwardTile:
        """The forward's tile of calls with lists of blocks, or of others."""
        return self.listed if has_lists and self.listed else self.forward


# In the order in which a call tries them.
WIDTHS = (
    Width(
        64, 64, ForwardTile(warpgroups=3, keys=128, stages=2),
        BackwardTile(128, 3, by_channel=False, in_halves=False, in_turn=True, row_warps=8, row_registers=80),
        listed=ForwardTile(2, 128, 2),
    ),
    Width(
        96, 96, ForwardTile(3, 96, 3),
        BackwardTile(64, 2, by_channel=True, in_halves=False, in_turn=False, holds_keys=True, piece=32),
    ),
    Width(
        128, 128, ForwardTile(2, 128, 2),
        BackwardTile(64, 2, by_channel=True, in_halves=True, in_turn=False, holds_keys=True),
    ),
    Width(
        192, 128, ForwardTile(2, 128, 3),
        BackwardTile(64, 2, by_channel=True, in_halves=True, in_turn=False, piece=64, row_warps=8),
    ),
    Width(
        192, 192, ForwardTile(2, 128, 2),
        BackwardTile(
            64, 4, by_channel=True, in_halves=True, in_turn=False, holds_keys=True, piece=64, in_two=True,
            places=2, held_values=1, row_warps=8,
        ),
    ),
    Width(
        256, 256, ForwardTile(2, 96, 2),
        BackwardTile(64, 4, by_channel=True, in_halves=True, in_turn=False, in_two=True, row_warps=8),
    ),
)  # fmt: skip

_OF = {row[:2]: row for row in WIDTHS}

# (head_dim, value's) that kernels of both directions run.
FORMS = tuple(row[:2] for row in WIDTHS if row.backward)
# Those with one number for both.
HEAD_DIMS = tuple(head_dim for head_dim, value_dim in FORMS if head_dim == value_dim)


def width(head_dim: int, value_dim: int) -> Width | None:
    """The row of a form, if there is one."""
    return _OF.get((head_dim, value_dim))


def of_call(head_dim: int, value_dim: int) -> tuple[int, int] | None:
    """The form that runs a call: the first that has room for it."""
    return next((form for form in FORMS if form[0] >= head_dim and form[1] >= value_dim), None)
