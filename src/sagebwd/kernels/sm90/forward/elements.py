"""Element masks in the forward: visibility bits and bias of a thread's scores of a key block.

Registers are laid out as in `softmax`. A word holds a bit a register of a row
(`sagebwd.kernels.masks.sm90_block_lists`).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from sagebwd.kernels.sm90.forward.variant import MASK_TILE, Variant

ptx = cute.arch.inline_ptx
LOG2_E = 1.4426950408889634
# Of 32 columns a bit each, the two of every eight that a thread holds, which come first: side by side.
GATHERED = "{ .reg .b32 x; and.b32 x, {$r0}, 0x03030303; mul.lo.u32 x, x, 0x01041040; shr.u32 {$w0}, x, 24; }"
# A word of so many ones, 32 too.
LOWEST = "{ .reg .b32 x; shl.b32 x, 1, {$r0}; sub.s32 {$w0}, x, 1; }"
# Two words one behind the other, without the first one's lowest bits.
SHIFTED = "shf.r.wrap.b32 {$w0}, {$r0}, {$r1}, {$r2};"


def bit(index: int) -> Int32:
    """A word of one bit."""
    return Int32((1 << index) - (1 << 32 if index == 31 else 0))


def row_of(size: int, r: int) -> list[int]:
    """Registers of a tile of ``size`` that are of row ``r``."""
    return [i for i in range(size) if i // 2 % 2 == r]


class Elements:
    """Masks of one variant."""

    def __init__(self, variant: Variant) -> None:
        self.variant, self.N = variant, variant.tile.keys

    def words(self, words: cute.Tensor, tiles: list, keys_kept: list, block, rows: cute.Tensor, low, high):
        """Visible columns of a block for each of a thread's rows, a bit for each register of the row.

        tiles: of ``words`` that the block meets. keys_kept, low, high: as `Tiles` gives them.
        """
        keys = Int32(0)
        for part, word in enumerate(keys_kept):
            pairs = ptx(GATHERED, write_only_types=[Int32], read_only_args=[word])
            keys = keys | (pairs << 8 * part)
        kept, lane = [], cute.arch.lane_idx() % 4
        for r in range(2):
            row = rows[r] % MASK_TILE
            word = words[tiles[0], row, lane]
            if len(tiles) > 1:
                past = block * self.N % MASK_TILE // 32 * 8
                word = ptx(SHIFTED, write_only_types=[Int32], read_only_args=[word, words[tiles[1], row, lane], past])
            word = word & keys & self.columns_below(high[r])
            if self.variant.lower:
                word = word & ~self.columns_below(low[r])
            kept.append(word)
        return kept

    def bias(self, bias: cute.Tensor, block, rows: cute.Tensor, work_tile) -> list:
        """Bias of each of a thread's rows, from the thread's first column of a block on."""
        first = block * self.N + cute.arch.lane_idx() % 4 * 2
        there = [cutlass.min(rows[r], work_tile.length_q - 1) for r in range(2)]
        return [cute.domain_offset((first,), bias[work_tile.batch, work_tile.head, row, None]) for row in there]

    def columns_below(self, bound):
        """Bits of a row's word whose columns are below a bound, less the thread's first column."""
        bound = cutlass.min(cutlass.max(bound, 0), MASK_TILE)
        count = bound // 8 * 2 + cutlass.min(bound % 8, 2)
        return ptx(LOWEST, write_only_types=[Int32], read_only_args=[count])
