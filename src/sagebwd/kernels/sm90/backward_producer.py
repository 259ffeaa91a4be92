"""The backward's producer warp: loads the keys' operands once, then those of block after block of queries."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int8, Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from sagebwd.kernels.sm90.backward_tiles import BackwardTiles
from sagebwd.kernels.sm90.config import BackwardVariant

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
    slots, which all warpgroups fill and read.
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

    def begin(self, warps: int, readers: int, cluster: int) -> None:
        """Count who arrives at the barriers: TMA's bytes, or a thread of each warp that computes, in all of a cluster
        where loads are shared, or that reads a slot of dS (``readers``)."""
        cute.arch.mbarrier_init(self.keys_full, 1)
        for stage in range(STAGES):
            for barrier in self.full:
                cute.arch.mbarrier_init(barrier + stage, 1)
            for barrier in self.empty:
                cute.arch.mbarrier_init(barrier + stage, warps * cluster)
            cute.arch.mbarrier_init(self.ds_full + stage, warps)
            cute.arch.mbarrier_init(self.ds_empty + stage, readers)


class BackwardProducer:
    """Loads of one variant."""

    def __init__(self, variant: BackwardVariant, tiles: BackwardTiles) -> None:
        self.variant, self.tiles = variant, tiles
        self.M, self.N, self.D = variant.span, variant.queries, variant.head_dim
        # of which the step after says that they are done
        self.late = (3,) if variant.dq_in_parts else (2, 3)

    @cute.jit
    def load(self, atoms, source, memory, rows: cute.Tensor, grid):
        """All of a program's loads, and its share of what a cluster loads for all."""
        M, N, D = self.M, self.N, self.D
        place = self.tiles.place(grid)
        if place.first_of_all < place.length_k:
            begin, count = self.tiles.blocks(place)
            full, tiles = memory.full, memory.tiles
            block_k = place.first_k // M
            k, v = self.of_keys(source.k, place), self.of_keys(source.v, place)
            # past the end any copy that is finite will do
            copies = place.block_k + cutlass.min(block_k, (place.length_k - 1) // M)
            k_t = cute.local_tile(source.k_t[None, None, place.heads_k_before], (D, M), (0, copies))
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(memory.keys_full, 4 * M * D)
            self.copy(atoms.k, tiles.k, cute.local_tile(k, (M, D), (block_k, 0)), 0, memory.keys_full)
            self.copy(atoms.v, tiles.v, cute.local_tile(v, (M, D), (block_k, 0)), 0, memory.keys_full)
            self.copy(atoms.k_t, tiles.k_t, k_t, 0, memory.keys_full)
            stage, phase, head, n = Int32(0), Int32(1), Int32(0), Int32(0)
            for _ in cutlass.range(count * grid.group, unroll=1):
                block = begin + n
                z = place.heads_before + head
                padded = place.block_q + block
                q = self.of_queries(source.q, place.head_k * grid.group + head, place)
                do = self.of_queries(source.do, place.head_k * grid.group + head, place)
                self.expect(memory, 0, stage, phase, N * D + 8 * N)
                with cute.arch.elect_one():
                    to = memory.rows.iterator.toint() + stage * (8 * N)
                    at = rows.iterator.toint() + (Int64(z) * rows.shape[1] + padded) * (8 * N)
                    ptx(BULK_LOAD, read_only_args=[to, at, Int32(8 * N), (full[0] + stage).toint()])
                self.share(atoms.q, tiles.q, cute.local_tile(q, (N, D), (block, 0)), stage, full[0])
                self.expect(memory, 1, stage, phase, 2 * N * (D + DELTA_CHANNELS))
                self.share(atoms.do, tiles.do, cute.local_tile(do, (N, D), (block, 0)), stage, full[1])
                delta = cute.local_tile(source.delta[None, None, z], (N, DELTA_CHANNELS), (padded, 0))
                self.copy(atoms.delta, tiles.delta, delta, stage, full[1])
                self.expect(memory, 2, stage, phase, N * D)
                do_t = cute.local_tile(source.do_t[None, None, z], (D, N), (0, padded))
                self.share(atoms.do_t, tiles.do_t, do_t, stage, full[2])
                self.expect(memory, 3, stage, phase, N * D)
                q_t = cute.local_tile(source.q_t[None, None, z], (D, N), (0, padded))
                self.share(atoms.q_t, tiles.q_t, q_t, stage, full[3])
                phase = phase if stage == 0 else phase ^ 1
                stage = stage ^ 1
                n += 1
                if n == count:
                    n = Int32(0)
                    head += 1

    def expect(self, memory, n: int, stage: Int32, phase: Int32, size: int) -> None:
        """Wait until all have done with a stage of the n-th, and say how many bytes come."""
        # the first that are known in a step's successor are of stage 1, unused before
        cute.arch.mbarrier_wait(memory.empty[n] + stage, phase ^ stage if n in self.late else phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(memory.full[n] + stage, size)

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

    def copy(self, atom, tile: cute.Tensor, source: cute.Tensor, stage, barrier, parts: int = 1, part=0, **options):
        """A block into a stage, or a part of it into those of a cluster."""
        both = cute.group_modes(tile, 0, 2), cute.group_modes(source, 0, 2)
        to, at = cpasync.tma_partition(atom, part, cute.make_layout(parts), *both)
        cute.copy(atom, at, to[None, stage], tma_bar_ptr=barrier + stage, **options)

    def share(self, atom, tile: cute.Tensor, source: cute.Tensor, stage, barrier) -> None:
        """A block into a stage of every program of the cluster, each of which loads a part for all."""
        parts = self.variant.cluster
        if parts == 1:
            self.copy(atom, tile, source, stage, barrier)
        else:
            part = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
            self.copy(atom, tile, source, stage, barrier, parts, part, mcast_mask=Int16((1 << parts) - 1))
