"""Scheduling of the forward: the tile of a program, its range of key blocks, and the columns that a row sees."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from sagebwd.kernels.sm90.forward.variant import SCALE_BLOCK, Variant
from sagebwd.kernels.sm90.longest_first import MOST_TOGETHER, in_turns


class Grid(NamedTuple):
    """Problem sizes, the sequences' ends, bounds on key - query, and block lists of an element mask."""

    tiles: Any
    taken: Any  # how many were taken beside the programs' first
    tokens_q: Any
    tokens_k: Any
    blocks_q: Any  # tiles of a head, where calls are packed of all sequences as `common.tile.padded_block` has them
    heads_at_once: Any  # `longest_first.heads_at_once`, under lists its last heads
    heads: Any
    group: Any  # heads that share one of K's
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    lower: Any
    upper: Any
    lists: Any  # of a mask of elements, or None
    words: Any
    mask_tiles: Any
    bias: Any


class TileCoord(NamedTuple):
    """Coordinates of a tile. Tokens are counted from the sequence's first ones, start_q and start_k."""

    batch: Any
    head: Any
    head_k: Any
    first_q: Any
    start_q: Any
    start_k: Any
    length_q: Any
    length_k: Any
    lower: Any
    upper: Any
    scale_head: Any  # of K's scales: the head, and the sequence's first block
    scale_block: Any
    sequence_head: Any  # of K's largest norm: the sequence and the head


class Tiles:
    """Tiles of one variant."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.M, self.N = variant.tile.queries, variant.tile.keys

    def of_head(self, x: cute.Tensor, head, batch):
        """A head's matrix of x, (., ., H[, B])."""
        return x[None, None, head] if self.variant.varlen else x[None, None, head, batch]

    def values_of_head(self, x: cute.Tensor, head, batch):
        """A head's values of x, (T, H[, B])."""
        return x[None, head] if self.variant.varlen else x[None, head, batch]

    @cute.jit
    def ordered(self, grid, number: Int32):
        """The tile that is taken as the ``number``-th, and its sequence where calls are packed.

        Under a causal mask the longest of some heads go first; of packed calls sequence by sequence, the last first.
        """
        variant, tile, owner = self.variant, number, Int32(0)
        if const_expr(variant.varlen):
            tile, owner = self.of_sequences(grid, number)
        elif const_expr(variant.lists):
            first = grid.tiles - grid.heads_at_once * grid.blocks_q
            if (number >= first) & (number < grid.tiles):
                tile = in_turns(number, first, grid.heads_at_once, grid.blocks_q)
        elif const_expr(variant.upper and not variant.lower):
            tile = self.interleaved(grid, number)
        return tile, owner

    @cute.jit
    def interleaved(self, grid, number: Int32):
        """The tile where ``heads_at_once`` heads take turns; beyond the last, the number."""
        tile = number
        if number < grid.tiles:
            together = grid.heads_at_once * grid.blocks_q
            first = number // together * grid.heads_at_once
            heads = cutlass.min(grid.heads_at_once, grid.tiles // grid.blocks_q - first)
            within = number % together
            tile = (first + within % heads) * grid.blocks_q + within // heads
        return tile

    @cute.jit
    def of_sequences(self, grid, number: Int32):
        """The same of packed calls: sequences from the last to the first, of each the heads of a group take turns.

        And the sequence.
        """
        tile, owner = number, Int32(0)
        if number < grid.tiles:
            # each head has as many tiles of a sequence: this is the block of one of them
            owner = self.owner(grid, grid.blocks_q - 1 - number // grid.heads)
            end = grid.blocks_q
            if owner < grid.cu_seqlens_q.shape[0] - 2:
                end = grid.cu_seqlens_q[owner + 1] // self.M + owner + 1
            blocks, after = end - grid.cu_seqlens_q[owner] // self.M - owner, grid.blocks_q - end
            at_once = cute.ceil_div(grid.heads, 1 + grid.heads * blocks // MOST_TOGETHER)
            within = number - after * grid.heads
            first = within // (blocks * at_once) * at_once
            within -= first * blocks
            heads = cutlass.min(at_once, grid.heads - first)
            tile = (first + within % heads) * grid.blocks_q + after + within // heads
        return tile, owner

    @cute.jit
    def is_empty(self, grid, program: Int32, owner: Int32):
        """Whether a packed call's tile has no query: lengths are the GPU's, and there are tiles for any."""
        empty = Boolean(False)
        if program < grid.tiles:
            work_tile = self.coord(grid, program, owner)
            empty = work_tile.first_q >= work_tile.length_q
        return empty

    @cute.jit
    def owner(self, grid, block: Int32):
        """The sequence of a block of queries; a warp's search, as `common.tile.owner_of`."""
        found = Int32(0)
        sequences = Int32(grid.cu_seqlens_q.shape[0] - 1)
        left = sequences
        while left > 1:
            step = (left + 31) // 32
            at = found + cute.arch.lane_idx() * step
            begins = block + 1
            if at < sequences:
                begins = grid.cu_seqlens_q[at] // self.M + at
            begun = cute.arch.popc(cute.arch.vote_ballot_sync(begins <= block))
            found += (begun - 1) * step
            left = step
        return found

    @cute.jit
    def coord(self, grid, program: Int32, owner: Int32):
        """Coordinates of tile number ``program``, of `owner`'s sequence."""
        batch_head = program // grid.blocks_q
        # the last queries see the most keys: they start first
        block_q = grid.blocks_q - 1 - program % grid.blocks_q
        batch, head = batch_head // grid.heads, batch_head % grid.heads
        if const_expr(self.variant.varlen):
            batch, head = owner, batch_head
        head_k = head // grid.group
        start_q, start_k, length_q, length_k = Int32(0), Int32(0), Int32(grid.tokens_q), Int32(grid.tokens_k)
        lower, upper = grid.lower, grid.upper
        sequence_head = batch * (grid.heads // grid.group) + head_k
        scale_head, scale_block = sequence_head, Int32(0)
        if const_expr(self.variant.varlen):
            start_q, start_k = grid.cu_seqlens_q[batch], grid.cu_seqlens_k[batch]
            length_q, length_k = grid.cu_seqlens_q[batch + 1] - start_q, grid.cu_seqlens_k[batch + 1] - start_k
            lower, upper = lower + length_k - length_q, upper + length_k - length_q
            block_q = block_q - (start_q // self.M + batch)
            scale_head, scale_block = head_k, start_k // SCALE_BLOCK + batch
        return TileCoord(
            batch, head, head_k, block_q * self.M, start_q, start_k, length_q, length_k, lower, upper, scale_head,
            scale_block, sequence_head,
        )  # fmt: skip

    @cute.jit
    def n_block_range(self, work_tile, first, count: cutlass.Constexpr):
        """Key blocks that ``count`` queries see: begin, full_begin, full_end, end; masked outside of the full ones."""
        N = self.N
        begin, full_begin, full_end, end = Int32(0), Int32(0), work_tile.length_k, work_tile.length_k
        if const_expr(self.variant.lower):
            begin = cutlass.max(first + work_tile.lower, 0)
            full_begin = cutlass.max(first + count - 1 + work_tile.lower, 0)
        if const_expr(self.variant.upper):
            end = cutlass.min(cutlass.max(first + count + work_tile.upper, 0), work_tile.length_k)
            full_end = cutlass.min(cutlass.max(first + 1 + work_tile.upper, 0), work_tile.length_k)
        # rows without a key take one masked block of the sequence's own, and write zeros
        begin = cutlass.min(begin // N, cutlass.max((work_tile.length_k + N - 1) // N - 1, 0))
        end = cutlass.max((end + N - 1) // N, begin + 1)
        full_begin = cutlass.min(cutlass.max((full_begin + N - 1) // N, begin), end)
        full_end = cutlass.min(cutlass.max(full_end // N, full_begin), end)
        return begin, full_begin, full_end, end

    @cute.jit
    def bounds(self, block: Int32, rows: cute.Tensor, work_tile):
        """First visible column of a block for a thread's rows, and the first beyond, less the thread's first."""
        base = block * self.N + cute.arch.lane_idx() % 4 * 2
        low, high = [], []
        for r in cutlass.range_constexpr(2):
            end = work_tile.length_k
            if const_expr(self.variant.upper):
                end = cutlass.min(end, rows[r] + work_tile.upper + 1)
            high.append(end - base)
            low.append(rows[r] + work_tile.lower - base)
        return low, high

    def words(self, keys_kept: cute.Tensor, stage) -> list:
        """Key-mask bits of a block, shifted by the thread's first column."""
        if not self.variant.key_mask:
            return []
        shift = cute.arch.lane_idx() % 4 * 2
        return [keys_kept[word, stage] >> shift for word in range(-(-self.N // 32))]

    @cute.jit
    def list_of(self, grid, work_tile):
        """Block list of a tile: number of masked key blocks, number of whole ones, and the blocks."""
        return grid.lists[work_tile.batch, work_tile.head, work_tile.first_q // self.M, None]
