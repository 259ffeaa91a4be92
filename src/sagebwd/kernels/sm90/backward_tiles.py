"""Which keys a program of the backward has, which blocks of queries they meet, and which entries of them count."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from sagebwd.kernels.sm90.config import BackwardVariant


class Grid(NamedTuple):
    """What places programs: sizes, the sequences' ends, and bounds on key - query."""

    tokens_q: Any
    tokens_k: Any
    total_blocks: Any  # of a head's queries, in a padded layout
    blocks_k: Any  # spans of keys of the longest sequence, in whole clusters
    heads_k: Any
    group: Any  # query heads that share one of K's
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    lower: Any
    upper: Any


class Place(NamedTuple):
    """A program's keys. Tokens are counted from the sequence's first, which start_q and start_k are."""

    batch: Any
    head_k: Any
    owner: Any  # its head of K, counted over the batch
    first_k: Any
    first_of_all: Any  # and of the cluster
    start_q: Any
    start_k: Any
    length_q: Any
    length_k: Any
    lower: Any
    upper: Any
    block_q: Any  # the sequence's first block of queries in a padded layout
    block_k: Any  # and span of keys
    heads_before: Any  # query heads, and heads of K, before this one's in layouts by head
    heads_k_before: Any


class BackwardTiles:
    """Tiles of one variant."""

    def __init__(self, variant: BackwardVariant) -> None:
        self.variant, self.M, self.N = variant, variant.span, variant.queries

    @cute.jit
    def place(self, grid):
        """This program's `Place`."""
        program, _, _ = cute.arch.block_idx()
        owner, block = program // grid.blocks_k, program % grid.blocks_k
        batch, head_k = owner // grid.heads_k, owner % grid.heads_k
        start_q, start_k, length_q, length_k = Int32(0), Int32(0), Int32(grid.tokens_q), Int32(grid.tokens_k)
        lower, upper, block_q, block_k = grid.lower, grid.upper, Int32(0), Int32(0)
        heads_k_before = owner
        if const_expr(self.variant.varlen):
            start_q, start_k = grid.cu_seqlens_q[batch], grid.cu_seqlens_k[batch]
            length_q, length_k = grid.cu_seqlens_q[batch + 1] - start_q, grid.cu_seqlens_k[batch + 1] - start_k
            lower, upper = lower + length_k - length_q, upper + length_k - length_q
            block_q, block_k = start_q // self.N + batch, start_k // self.M + batch
            heads_k_before = head_k
        return Place(
            batch, head_k, owner, block * self.M, (block - block % self.variant.cluster) * self.M, start_q, start_k,
            length_q, length_k, lower, upper, block_q, block_k, heads_k_before * grid.group, heads_k_before,
        )  # fmt: skip

    @cute.jit
    def blocks(self, place):
        """First block of queries that the cluster's keys meet, and how many."""
        begin, end = Int32(0), place.length_q
        if const_expr(self.variant.upper):
            begin = cutlass.max(place.first_of_all - place.upper, 0)
        if const_expr(self.variant.lower):
            end = cutlass.min(end, place.first_of_all + self.variant.cluster * self.M - place.lower)
        begin = begin // self.N
        end = (cutlass.max(end, 0) + self.N - 1) // self.N
        return begin, cutlass.max(end - begin, 0)

    @cute.jit
    def keys(
        self, first_k: Int32, row: Int32, k_scale: cute.Tensor, key_mask: cute.Tensor | None, factor: Float32, place
    ):
        """Which keys a thread's two rows are, then whether they count; their scales times ``factor``; and whether all
        64 of the warpgroup count, in which its warps must agree, as they run the same products."""
        keys = cute.make_rmem_tensor(4, Int32)
        scales = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            keys[r] = first_k + row + 8 * r
            keys[r + 2] = Int32(0)
            scales[r] = Float32(0)
            if keys[r] < place.length_k:
                keys[r + 2] = Int32(1)
                if const_expr(self.variant.key_mask):
                    keys[r + 2] = Int32(key_mask[place.batch, keys[r]])
                if const_expr(self.variant.varlen):
                    scales[r] = k_scale[place.head_k, place.start_k + keys[r]] * factor
                else:
                    scales[r] = k_scale[place.batch, place.head_k, keys[r]] * factor
        kept = first_k + 64 <= place.length_k
        if const_expr(self.variant.key_mask):  # noqa: SIM102 (one is of compile time)
            if kept:
                two = [key_mask[place.batch, first_k + cute.arch.lane_idx() + x] for x in (0, 32)]
                kept = cute.arch.vote_all_sync((two[0] != 0) & (two[1] != 0))
        return keys, scales, kept

    @cute.jit
    def whole(self, block: Int32, first_k: Int32, kept, place):
        """Whether all of a block's queries see all of a warpgroup's keys; kept: whether every one of those counts."""
        first_q = block * self.N
        whole = kept & (first_q + self.N <= place.length_q)
        if const_expr(self.variant.upper):
            whole = whole & (first_k + 63 - first_q <= place.upper)
        if const_expr(self.variant.lower):
            whole = whole & (first_k - first_q - self.N + 1 >= place.lower)
        return whole

    @cute.jit
    def kept(self, block: Int32, keys, place) -> list:
        """Which of a thread's entries count, in the order of its registers."""
        base = block * self.N + cute.arch.lane_idx() % 4 * 2
        # dense calls read zeros past the end of the queries, and P is 0 there
        bounded = self.variant.lower or self.variant.varlen
        kept = [None] * (self.N // 2)
        for r in cutlass.range_constexpr(2):
            low, high = Int32(0), place.length_q - base
            if const_expr(self.variant.upper):
                low = keys[r] - place.upper - base
            if const_expr(self.variant.lower):
                high = cutlass.min(high, keys[r] - place.lower - base + 1)
            low = low if keys[r + 2] != 0 else Int32(self.N)  # past the last column
            for j in cutlass.range_constexpr(self.N // 8):
                for e in cutlass.range_constexpr(2):
                    keep = 8 * j + e >= low
                    if const_expr(bounded):
                        keep = keep & (8 * j + e < high)
                    kept[4 * j + 2 * r + e] = keep
        return kept
