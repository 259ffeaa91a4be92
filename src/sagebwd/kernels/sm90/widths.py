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
    dq_swap_ab: a warpgroup computes dQ^T of half of the channels; else of half of the queries, with K^T in registers.
    half_n: registers are short: dV and dK are accumulated half of the channels at a time, unless by pieces.
    persistent: a program takes several key tiles, one after another (`tiles_per_cta`).
    k_in_regs: a warpgroup holds K, the operand of S, in registers.
    piece: channels of a buffer and of an accumulator, or 0: all of them, or their halves.
    split_dkdv: registers cannot hold dK beside dV: one kernel computes dV, another dK and dQ.
    q_stages: stages of Q and dO in the kernel of dK and dQ.
    v_pieces_in_regs: pieces of V that this kernel holds in registers.
    row_warps, row_registers: warps of a program of the pass over queries before it, and registers of a thread at most.
    """

    queries: int
    stages: int
    dq_swap_ab: bool
    half_n: bool
    persistent: bool
    k_in_regs: bool = False
    piece: int = 0
    split_dkdv: bool = False
    q_stages: int = 1
    v_pieces_in_regs: int = 0
    row_warps: int = 4
    row_registers: int = 128

    @property
    def dq_in_rows(self) -> bool:
        """Whether dQ is added up in rows, (queries, D); else dQ^T is."""
        return self.split_dkdv or self.piece > 0


class Width(NamedTuple):
    """Kernels of one head_dim and value head_dim, which lesser ones are filled up to with zeros.

    listed: the forward's tile under a mask of elements, where it is another:
    blocks of masks have 128 queries or twice as many, and a tile across two meets what either meets.
    """

    head_dim: int
    value_dim: int
    forward: ForwardTile
    backward: BackwardTile
    listed: ForwardTile | None = None

    def forward_of(self, has_lists: bool) -> ForwardTile:
        """The forward's tile of calls with lists of blocks, or of others."""
        return self.listed if has_lists and self.listed else self.forward


# In the order in which a call tries them.
WIDTHS = (
    Width(
        64, 64, ForwardTile(warpgroups=3, keys=128, stages=2),
        BackwardTile(128, 3, dq_swap_ab=False, half_n=False, persistent=True),
        listed=ForwardTile(2, 128, 2),
    ),
    Width(
        96, 96, ForwardTile(3, 96, 3),
        BackwardTile(64, 2, dq_swap_ab=True, half_n=False, persistent=False, k_in_regs=True, piece=32),
    ),
    Width(
        128, 128, ForwardTile(2, 128, 2),
        BackwardTile(64, 2, dq_swap_ab=True, half_n=True, persistent=False, k_in_regs=True),
    ),
    Width(
        192, 128, ForwardTile(2, 128, 3),
        BackwardTile(64, 2, dq_swap_ab=True, half_n=True, persistent=False, piece=64, row_warps=8),
    ),
    Width(
        192, 192, ForwardTile(2, 128, 2),
        BackwardTile(
            64, 4, dq_swap_ab=True, half_n=True, persistent=False, k_in_regs=True, piece=64, split_dkdv=True,
            q_stages=2, v_pieces_in_regs=1, row_warps=8,
        ),
    ),
    Width(
        256, 256, ForwardTile(2, 96, 2),
        BackwardTile(64, 4, dq_swap_ab=True, half_n=True, persistent=False, split_dkdv=True, row_warps=8),
    ),
)  # fmt: skip

_OF = {row[:2]: row for row in WIDTHS}

# (head_dim, value's) that kernels of both directions run.
FORMS = tuple(row[:2] for row in WIDTHS)
# Those with one number for both.
HEAD_DIMS = tuple(head_dim for head_dim, value_dim in FORMS if head_dim == value_dim)


def width(head_dim: int, value_dim: int) -> Width | None:
    """The row of a form, if there is one."""
    return _OF.get((head_dim, value_dim))


def of_call(head_dim: int, value_dim: int) -> tuple[int, int] | None:
    """The form that runs a call: the first that has room for it."""
    return next((form for form in FORMS if form[0] >= head_dim and form[1] >= value_dim), None)
