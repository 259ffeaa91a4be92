"""Producer warp of the forward: takes tiles, and loads K and V block by block by TMA into a ring of stages."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from sagebwd.kernels.sm90.forward.tiles import Tiles
from sagebwd.kernels.sm90.forward.variant import MASK_TILE, Variant

ptx = cute.arch.inline_ptx


class Ring(NamedTuple):
    """State of the ring of K's and V's stages: the stage, and the phase of its barriers."""

    stage: Any
    phase: Any


class Operands(NamedTuple):
    """TMA atoms, or tensors, of K (T, D, H[, B]), V (D, T, H[, B]), and V where keys are masked."""

    k: Any
    v: Any
    masked_v: Any


class Memory(NamedTuple):
    """Shared memory: Q's tile, K's and V's stages, which keys a mask keeps, and barriers, two of the tile."""

    q: Any
    k: Any
    v: Any
    keys_kept: Any  # a bit each, 32 a word
    block: Any  # of keys, of a stage, where lists say which is next
    mask_tiles: Any  # that it meets, of each 64 queries
    q_words: Any  # q as INT32
    q_scale: Any  # of each row
    q_norm: Any  # of each row as codes, at most, if the variant is bounded
    tile: Any  # the number of the next, and its sequence where calls are packed
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any
    tile_full: Any
    tile_empty: Any

    @classmethod
    def allocate(cls, variant: Variant, dtype, layouts) -> Memory:
        """All of a program's."""
        smem, stages = SmemAllocator(), variant.tile.stages
        tiles = [
            smem.allocate_tensor(kind, layout.outer, 1024, swizzle=layout.inner)
            for kind, layout in zip((cutlass.Int8, cutlass.Int8, dtype), layouts)
        ]
        keys_kept = smem.allocate_tensor(Int32, cute.make_layout((-(-variant.tile.keys // 32), stages)), 16)
        block, mask_tiles = None, None
        if variant.lists:
            block = smem.allocate_tensor(Int32, cute.make_layout(stages), 16)
            shape = variant.tile.warpgroups, variant.tiles_met, stages
            mask_tiles = smem.allocate_tensor(Int32, cute.make_layout(shape), 16)
        # recast_tensor would lose the swizzle
        words = cute.recast_ptr(tiles[0].iterator, layouts[0].inner, dtype=Int32)
        q_words = cute.make_tensor(words, cute.recast_layout(32, 8, tiles[0].layout))
        q_scale = smem.allocate_tensor(Float32, cute.make_layout(variant.tile.queries), 16)
        q_norm = None
        if variant.bounded:
            q_norm = smem.allocate_tensor(Float32, cute.make_layout(variant.tile.queries), 16)
        tile = smem.allocate_tensor(Int32, cute.make_layout(2 if variant.varlen else 1), 16)
        barriers = smem.allocate_array(Int64, 2 + 4 * stages)
        rings = (barriers + 2 + n * stages for n in range(4))
        return cls(
            *tiles, keys_kept, block, mask_tiles, q_words, q_scale, q_norm, tile, *rings, barriers, barriers + 1
        )

    def begin(self, warpgroups: int, stages: int) -> None:
        """Count who arrives at the barriers: TMA's bytes, or a thread of each computing warp."""
        cute.arch.mbarrier_init(self.tile_full, 1)
        cute.arch.mbarrier_init(self.tile_empty, 4 * warpgroups)
        for stage in range(stages):
            for full in (self.k_full, self.v_full):
                cute.arch.mbarrier_init(full + stage, 1)
            for empty in (self.k_empty, self.v_empty):
                cute.arch.mbarrier_init(empty + stage, 4 * warpgroups)


class Source(NamedTuple):
    """What the producer reads and where it writes to, for all tiles."""

    atoms: Operands
    tensors: Operands
    memory: Memory
    key_mask: Any
    grid: Any


class Producer:
    """Producer warp of one variant."""

    def __init__(self, variant: Variant, tiles: Tiles) -> None:
        self.variant, self.tiles = variant, tiles
        self.M, self.N = variant.tile.queries, variant.tile.keys

    @cute.jit
    def load(self, atoms, tensors, q: cute.Tensor, memory, key_mask: cute.Tensor | None, grid):
        """Load K and V of all tiles that the program takes."""
        program, _, _ = cute.arch.block_idx()
        program, owner = self.tiles.ordered(grid, program)
        source = Source(atoms, tensors, memory, key_mask, grid)
        ring, tile_phase = Ring(Int32(0), Int32(1)), Int32(1)
        while program < grid.tiles:
            ring = self.load_tile(source, program, owner, ring)
            program, owner = self.next(q, memory, grid, tile_phase)
            tile_phase ^= 1

    @cute.jit
    def next(self, q: cute.Tensor, memory, grid, tile_phase: Int32):
        """Take the next tile, hand its number and sequence to the consumers, and prefetch its queries to L2."""
        program, owner = self.take(grid)
        if const_expr(self.variant.varlen):
            while self.tiles.is_empty(grid, program, owner):
                program, owner = self.take(grid)
        cute.arch.mbarrier_wait(memory.tile_empty, tile_phase)
        if cute.arch.lane_idx() == 0:
            memory.tile[0] = program
            if const_expr(self.variant.varlen):
                memory.tile[1] = owner
            cute.arch.mbarrier_arrive(memory.tile_full)
        if program < grid.tiles:
            work_tile = self.tiles.coord(grid, program, owner)
            rows = self.tiles.of_head(q, work_tile.head, work_tile.batch)
            for part in cutlass.range_constexpr(self.M // 32):
                token = work_tile.first_q + part * 32 + cute.arch.lane_idx()
                if token < work_tile.length_q:
                    row = rows[work_tile.start_q + token, None].iterator.toint()
                    for line in cutlass.range_constexpr(0, 2 * self.variant.columns[0], 128):
                        ptx("prefetch.global.L2 [{$r0}];", read_only_args=[row + Int64(line)])
        return program, owner

    @cute.jit
    def take(self, grid):
        """The number of a tile that no program has taken yet, beyond the last if there is none, and its sequence."""
        program = Int32(0)
        if cute.arch.lane_idx() == 0:
            program = cute.arch.atomic_add(grid.taken.iterator, Int32(1), sem="relaxed", scope="gpu")
            if program == grid.tiles - 1:  # the last that is ever asked for: every tile asks once
                grid.taken[0] = Int32(0)
        return self.tiles.ordered(grid, cute.arch.shuffle_sync(program, 0) + cute.arch.grid_dim()[0])

    @cute.jit
    def load_tile(self, source, program: Int32, owner: Int32, ring):
        """Load every block of K and V that a tile sees, from the last to the first; the ring's next state."""
        atoms, tensors, memory, key_mask, grid = source
        M, N, D, E = self.M, self.N, self.variant.code_columns, self.variant.value_dim
        work_tile = self.tiles.coord(grid, program, owner)
        if work_tile.first_q < work_tile.length_q:
            if const_expr(self.variant.lists):
                listed = self.tiles.list_of(grid, work_tile)
                in_part = listed[0]
                count = in_part + listed[1]
            else:
                begin, _, _, end = self.tiles.n_block_range(work_tile, work_tile.first_q, M)
                count = end - begin
            k = self.tiles.of_head(tensors.k, work_tile.head_k, work_tile.batch)
            v = self.tiles.of_head(tensors.v, work_tile.head_k, work_tile.batch)
            if const_expr(self.variant.varlen):
                k = cute.domain_offset((work_tile.start_k, 0), k)
                v = cute.domain_offset((0, work_tile.start_k), v)
            k_to, k_from = self.partition(atoms.k, memory.k, cute.local_tile(k, (N, D), (None, 0)))
            v_to, v_from = self.partition(atoms.v, memory.v, cute.local_tile(v, (E, N), (0, None)))
            if const_expr(self.variant.key_mask):
                masked_v = cute.local_tile(
                    self.tiles.of_head(tensors.masked_v, work_tile.head_k, work_tile.batch), (E, N), (0, None)
                )
                masked_to, masked_from = self.partition(atoms.masked_v, memory.v, masked_v)
            for step in cutlass.range(count, unroll=1):
                if const_expr(self.variant.lists):
                    block = listed[2 + step]
                else:
                    block = end - 1 - step
                stage = ring.stage
                cute.arch.mbarrier_wait(memory.k_empty + stage, ring.phase)
                if const_expr(self.variant.lists):
                    is_cut = self.write_listed(key_mask, memory, grid, work_tile, block, stage, step < in_part)
                elif const_expr(self.variant.key_mask):
                    is_cut = self.write_keys_kept(key_mask, memory.keys_kept, block, stage, work_tile)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(memory.k_full + stage, N * D)
                cute.copy(atoms.k, k_from[None, block], k_to[None, stage], tma_bar_ptr=memory.k_full + stage)
                cute.arch.mbarrier_wait(memory.v_empty + stage, ring.phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(memory.v_full + stage, N * E * 2)
                barrier = memory.v_full + stage
                if const_expr(not self.variant.key_mask):
                    cute.copy(atoms.v, v_from[None, block], v_to[None, stage], tma_bar_ptr=barrier)
                elif is_cut:
                    cute.copy(atoms.masked_v, masked_from[None, block], masked_to[None, stage], tma_bar_ptr=barrier)
                else:
                    cute.copy(atoms.v, v_from[None, block], v_to[None, stage], tma_bar_ptr=barrier)
                ring = self.advance(ring)
        return ring

    @cute.jit
    def advance(self, ring):
        """The ring's next state."""
        stage, phase = ring.stage + 1, ring.phase
        if stage == self.variant.tile.stages:
            stage = Int32(0)
            phase ^= 1
        return Ring(stage, phase)

    def partition(self, atom, tile: cute.Tensor, source: cute.Tensor):
        """Destination and source of TMA."""
        one = cute.make_layout(1)
        return cpasync.tma_partition(atom, 0, one, cute.group_modes(tile, 0, 2), cute.group_modes(source, 0, 2))

    @cute.jit
    def write_keys_kept(self, key_mask: cute.Tensor, keys_kept: cute.Tensor, block: Int32, stage: Int32, work_tile):
        """Write a block's key mask as bits to its stage, before the arrival of K; whether any key is masked, or past
        the last."""
        masked = Int32(0)
        for word in cutlass.range_constexpr(-(-self.N // 32)):
            key = block * self.N + word * 32 + cute.arch.lane_idx()
            keep = Int32(0)
            if key < work_tile.length_k:
                keep = Int32(key_mask[work_tile.batch, key])
            bits = cute.arch.vote_ballot_sync(keep != 0)
            with cute.arch.elect_one():  # the thread that arrives
                keys_kept[word, stage] = bits
            masked = masked | ~bits
        return masked != 0

    @cute.jit
    def write_listed(self, key_mask: cute.Tensor, memory, grid, work_tile, block: Int32, stage: Int32, masked):
        """Write a listed block's number and, if masked, its key-mask bits and mask tiles, before the arrival of K;
        as `write_keys_kept`."""
        is_cut = Boolean(False)
        if masked:
            is_cut = self.write_keys_kept(key_mask, memory.keys_kept, block, stage, work_tile)
        with cute.arch.elect_one():  # the thread that arrives
            memory.block[stage] = block
            if masked:
                tiles = grid.mask_tiles[work_tile.batch, work_tile.head, None, None]
                for part in cutlass.range_constexpr(self.variant.tiles_met):
                    # a step may reach past the last tile of keys, or of queries
                    column = cutlass.min(block * self.N // MASK_TILE + part, (work_tile.length_k - 1) // MASK_TILE)
                    for index in cutlass.range_constexpr(self.variant.tile.warpgroups):
                        row = (work_tile.first_q + index * 64) // MASK_TILE
                        row = cutlass.min(row, (work_tile.length_q - 1) // MASK_TILE)
                        memory.mask_tiles[index, part, stage] = tiles[row, column]
        return is_cut
