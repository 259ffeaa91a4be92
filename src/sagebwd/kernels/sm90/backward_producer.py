"""The backward's producer warp: loads the keys' operands once, then those of block after block of queries."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int8, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from sagebwd.kernels.sm90.backward_tiles import BackwardTiles
from sagebwd.kernels.sm90.config import SPAN, BackwardVariant

ptx = cute.arch.inline_ptx
STAGES = 2
# Channels that hold parts of delta.
DELTA_CHANNELS = 16
BULK_LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];"


class BackwardOperands(NamedTuple):
    """One thing of each that TMA loads: atoms, layouts, tiles of shared memory, or tensors."""

    k: Any
    v: Any
    k_t: Any
    q: Any
    do: Any
    delta: Any
    do_t: Any
    q_t: Any


class BackwardMemory(NamedTuple):
    """Shared memory: tiles, dS's two slots, row values, and barriers.

    Of q (with the row values), do (with delta), do_t and q_t there are two stages each, full and empty; of dS two
    slots, which both warpgroups fill and both read.
    """

    tiles: Any
    ds: Any
    rows: Any
    keys_full: Any
    full: Any
    empty: Any
    ds_full: Any
    ds_empty: Any

    @classmethod
    def allocate(cls, dtype, layouts, ds_layout, queries: int) -> BackwardMemory:
        """All of a program's."""
        smem = SmemAllocator()
        types = BackwardOperands(Int8, dtype, Float8E4M3FN, Int8, dtype, dtype, Float8E4M3FN, Float8E4M3FN)
        tiles = [smem.allocate_tensor(t, x.outer, 1024, swizzle=x.inner) for t, x in zip(types, layouts)]
        ds = smem.allocate_tensor(Float8E4M3FN, ds_layout.outer, 1024, swizzle=ds_layout.inner)
        rows = smem.allocate_tensor(Float32, cute.make_layout((2 * queries, STAGES)), 128)
        barriers = smem.allocate_array(Int64, 1 + 10 * STAGES)
        places = [barriers + 1 + n * STAGES for n in range(10)]
        return cls(BackwardOperands(*tiles), ds, rows, barriers, tuple(places[:4]), tuple(places[4:8]), *places[8:])

    def begin(self, warps: int) -> None:
        """Count who arrives at the barriers: TMA's bytes, or a thread of each computing warp."""
        cute.arch.mbarrier_init(self.keys_full, 1)
        for stage in range(STAGES):
            for barrier in self.full:
                cute.arch.mbarrier_init(barrier + stage, 1)
            for barrier in (*self.empty, self.ds_full, self.ds_empty):
                cute.arch.mbarrier_init(barrier + stage, warps)


class BackwardProducer:
    """Loads of one variant."""

    def __init__(self, variant: BackwardVariant, tiles: BackwardTiles) -> None:
        self.variant, self.tiles = variant, tiles
        self.N, self.D = variant.queries, variant.head_dim

    @cute.jit
    def load(self, atoms, source, memory, rows: cute.Tensor, grid):
        """All of a program's loads."""
        N, D = self.N, self.D
        place = self.tiles.place(grid)
        if place.first_k < place.length_k:
            begin, count = self.tiles.blocks(place)
            full, empty = memory.full, memory.empty
            keys = (place.first_k // SPAN, 0)
            k, v = self.of_keys(source.k, place), self.of_keys(source.v, place)
            k_t = source.k_t[None, None, place.heads_k_before]
            k_to, k_from = self.partition(atoms.k, memory.tiles.k, cute.local_tile(k, (SPAN, D), keys))
            v_to, v_from = self.partition(atoms.v, memory.tiles.v, cute.local_tile(v, (SPAN, D), keys))
            copies = (0, place.block_k + place.first_k // SPAN)
            k_t_to, k_t_from = self.partition(atoms.k_t, memory.tiles.k_t, cute.local_tile(k_t, (D, SPAN), copies))
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(memory.keys_full, 4 * SPAN * D)
            cute.copy(atoms.k, k_from, k_to[None, 0], tma_bar_ptr=memory.keys_full)
            cute.copy(atoms.v, v_from, v_to[None, 0], tma_bar_ptr=memory.keys_full)
            cute.copy(atoms.k_t, k_t_from, k_t_to[None, 0], tma_bar_ptr=memory.keys_full)
            stage, phase, head, n = Int32(0), Int32(1), Int32(0), Int32(0)
            for _ in cutlass.range(count * grid.group, unroll=1):
                block = begin + n
                z = place.heads_before + head
                padded = place.block_q + block
                q = self.of_queries(source.q, place.head_k * grid.group + head, place)
                do = self.of_queries(source.do, place.head_k * grid.group + head, place)
                cute.arch.mbarrier_wait(empty[0] + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full[0] + stage, N * D + 8 * N)
                    to = memory.rows.iterator.toint() + stage * (8 * N)
                    at = rows.iterator.toint() + (Int64(z) * rows.shape[1] + padded) * (8 * N)
                    ptx(BULK_LOAD, read_only_args=[to, at, Int32(8 * N), (full[0] + stage).toint()])
                self.copy(atoms.q, memory.tiles.q, cute.local_tile(q, (N, D), (block, 0)), stage, full[0])
                cute.arch.mbarrier_wait(empty[1] + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full[1] + stage, 2 * N * (D + DELTA_CHANNELS))
                self.copy(atoms.do, memory.tiles.do, cute.local_tile(do, (N, D), (block, 0)), stage, full[1])
                delta = cute.local_tile(source.delta[None, None, z], (N, DELTA_CHANNELS), (padded, 0))
                self.copy(atoms.delta, memory.tiles.delta, delta, stage, full[1])
                cute.arch.mbarrier_wait(empty[2] + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full[2] + stage, N * D)
                do_t = cute.local_tile(source.do_t[None, None, z], (D, N), (0, padded))
                self.copy(atoms.do_t, memory.tiles.do_t, do_t, stage, full[2])
                # that dK is done is known in the next step: the first of these is of stage 1, unused before
                cute.arch.mbarrier_wait(empty[3] + stage, phase ^ stage)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full[3] + stage, N * D)
                q_t = cute.local_tile(source.q_t[None, None, z], (D, N), (0, padded))
                self.copy(atoms.q_t, memory.tiles.q_t, q_t, stage, full[3])
                phase = phase if stage == 0 else phase ^ 1
                stage = stage ^ 1
                n += 1
                if n == count:
                    n = Int32(0)
                    head += 1

    def of_keys(self, x: cute.Tensor, place):
        """The program's head of K or V, from its sequence's first token on."""
        if const_expr(self.variant.varlen):
            return cute.domain_offset((place.start_k, 0), x[None, None, place.head_k])
        return x[None, None, place.head_k, place.batch]

    def of_queries(self, x: cute.Tensor, head, place):
        """A head of Q or dO, from the sequence's first token on."""
        if const_expr(self.variant.varlen):
            return cute.domain_offset((place.start_q, 0), x[None, None, head])
        return x[None, None, head, place.batch]

    def partition(self, atom, tile: cute.Tensor, source: cute.Tensor):
        """Where TMA writes to and reads from."""
        one = cute.make_layout(1)
        return cpasync.tma_partition(atom, 0, one, cute.group_modes(tile, 0, 2), cute.group_modes(source, 0, 2))

    def copy(self, atom, tile: cute.Tensor, source: cute.Tensor, stage, barrier) -> None:
        """A block into a stage."""
        to, at = self.partition(atom, tile, source)
        cute.copy(atom, at, to[None, stage], tma_bar_ptr=barrier + stage)
