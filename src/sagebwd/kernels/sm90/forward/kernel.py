"""Forward on sm_90a in CuTe DSL: O = softmax(Q K^T) V, Q and K as INT8 codes, P and V in 16 bit.

A program takes tiles of queries one after another. One warp loads by TMA into a ring of stages; two or three
warpgroups of 64 queries each make the codes of these, and compute. In its turn a warpgroup queues S of the next block
and P V of this one, then it exponentiates under the others' products. Blocks of keys are taken from the last to the
first, so that those on the diagonal, which need masks, come first.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Boolean, Float16, Float32, Int8, Int32, Uint8, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.tensor_utils import LayoutEnum

from sagebwd.kernels.sm90.forward.elements import LOG2_E, Elements
from sagebwd.kernels.sm90.forward.epilogue import Epilogue
from sagebwd.kernels.sm90.forward.producer import Memory, Operands, Producer, Ring
from sagebwd.kernels.sm90.forward.quantize import Quantizer
from sagebwd.kernels.sm90.forward.softmax import Softmax, State
from sagebwd.kernels.sm90.forward.tiles import Grid, Tiles
from sagebwd.kernels.sm90.forward.variant import MASK_TILE, REGISTERS, SCALE_BLOCK, Arguments, Variant

DTYPES = {"bfloat16": BFloat16, "float16": Float16}
ptx = cute.arch.inline_ptx
# A smaller scale of a row would turn a masked score, -inf, into NaN.
TINY = 1e-30
# Whether something holds for all threads of a warpgroup.
ALL = (
    "{ .reg .pred p, q; setp.ne.s32 p, {$r0}, 0; barrier.cta.red.and.pred q, {$r1}, 128, p; selp.s32 {$w0}, 1, 0, q; }"
)


class NamedBarrier(IntEnum):
    """First ids of named barriers, each of one id a warpgroup; id 0 is sync_threads'."""

    SCHEDULER = 1  # orders the warpgroups' products
    WARPGROUP = 5  # the threads of one warpgroup


class Mmas(NamedTuple):
    """Tensor-core instructions of S = Q K^T and O += P V."""

    s: Any
    o: Any


class Fragments(NamedTuple):
    """Register tiles of a warpgroup: S in INT32, P in FP32, P in 16 bit as an operand, and O in FP32."""

    s: Any
    x: Any
    p: Any
    o: Any


class SmemTiles(NamedTuple):
    """Shared-memory operands of a warpgroup: Q, and the stages of K and V."""

    q: Any
    k: Any
    v: Any


class Inputs(NamedTuple):
    """Global tensors that a consumer reads or writes, and the softmax scale in base 2."""

    q: Any
    q_int8: Any
    written: tuple  # O, lse and row maxima
    q_scale: Any
    k_scale: Any
    largest_k_norm: Any
    scale_2: Any


class Consumer(NamedTuple):
    """What a warpgroup holds through all its tiles."""

    mmas: Mmas
    memory: Memory
    smem: SmemTiles
    tile: Fragments
    state: State
    scale: Any  # Q's scales of a thread's two rows
    rows: Any  # numbers of these rows
    index: Any  # of the warpgroup
    thread: Any  # in the warpgroup
    grid: Grid
    inputs: Inputs


class QueryTile(NamedTuple):
    """A tile of queries: its coordinates, and K's scales of its head."""

    work_tile: Any
    k_scales: Any


class Forward:
    """One variant of the kernel, to compile; `sagebwd.kernels.sm90.forward.compile` does."""

    def __init__(self, variant: Variant) -> None:
        self.variant, tile = variant, variant.tile
        self.E, self.N, self.M = variant.value_dim, tile.keys, tile.queries
        self.warpgroups, self.stages = tile.warpgroups, tile.stages
        self.dtype = DTYPES[variant.dtype]
        self.tiles, self.softmax = Tiles(variant), Softmax(variant)
        self.producer, self.quantizer = Producer(variant, self.tiles), Quantizer(variant)
        self.elements = Elements(variant)
        self.epilogue = Epilogue(variant, self.tiles, self.softmax)

    def placeholders(self) -> list:
        """Arguments of the call's types, shapes unknown, to compile for."""
        variant, D = self.variant, self.variant.head_dim
        D_q, E = variant.columns
        size = cute.sym_int
        batch, heads, heads_k, tokens_q, tokens_k = (size() for _ in range(5))

        def compact(dtype, *shape):
            order = tuple(reversed(range(len(shape))))
            aligned = 16 if dtype is Int8 else dtype.width // 8
            return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=aligned)

        def strided(*shape):
            strides = [cute.sym_int64(divisibility=8) for _ in shape[1:]]
            return make_fake_tensor(self.dtype, shape, (*strides, 1), assumed_align=16)

        def by_head(*shape):
            strides = [cute.sym_int64() for _ in range(3)]
            return make_fake_tensor(Int32, (batch, heads, *shape), (*strides, 1), assumed_align=4)

        packed = variant.varlen
        queries = (tokens_q, heads) if packed else (batch, heads, tokens_q)
        keys = (tokens_k, heads_k) if packed else (batch, heads_k, tokens_k)
        per_query = (heads, tokens_q) if packed else (batch, heads, tokens_q)
        arguments = Arguments(
            q=None if variant.q_codes else strided(*queries, D_q),
            q_int8=compact(Int8, *queries, D),
            k=compact(Int8, *keys, D),
            v=strided(*keys, E),
            masked_v=strided(*keys, E) if variant.key_mask else None,
            o=strided(*queries, E),
            lse=compact(Float32, *per_query),
            row_max=compact(Float32, *per_query) if variant.row_max else None,
            q_scale=compact(Float32, *per_query),
            k_scale=compact(Float32, size(), size(), 4),
            largest_k_norm=compact(Float32, size()),
            key_mask=compact(Uint8, batch, tokens_k) if variant.key_mask else None,
            lists=by_head(size(), size()) if variant.lists else None,
            words=compact(Int32, size(), MASK_TILE, 4) if variant.lists else None,
            tiles=by_head(size(), size()) if variant.lists else None,
            bias=self.bias_placeholder(batch, heads, tokens_q, tokens_k) if variant.bias else None,
            cu_seqlens_q=compact(Int32, size()) if packed else None,
            cu_seqlens_k=compact(Int32, size()) if packed else None,
            tiles_taken=compact(Int32, 1),
            programs=Int32(0),
            blocks_q=Int32(0),
            heads_at_once=Int32(0),
            lower=Int32(0),
            upper=Int32(0),
            scale=Float32(0),
        )
        return [*arguments, make_fake_stream()]

    def bias_placeholder(self, *shape):
        """Of what is added to scores."""
        dtype = {**DTYPES, "float32": Float32}[self.variant.bias]
        strides = (cute.sym_int64() for _ in shape[1:])
        return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=dtype.width // 8)

    def matrices(self, x: cute.Tensor, transposed: bool = False):
        """x, (B, H, T, D) or packed (T, H, D), as (T, D, H[, B]); transposed, (D, T, H[, B])."""
        t, d, rest = (0, 2, [1]) if self.variant.varlen else (2, 3, [1, 0])
        order = [d, t, *rest] if transposed else [t, d, *rest]
        return cute.make_tensor(x.iterator, cute.select(x.layout, mode=order))

    def vectors(self, x: cute.Tensor | None):
        """x, (B, H, T) or packed (H, T), as (T, H[, B])."""
        if x is None:
            return None
        return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 0] if self.variant.varlen else [2, 1, 0]))

    @cute.jit
    def __call__(
        self, q: cute.Tensor | None, q_int8: cute.Tensor, k: cute.Tensor, v: cute.Tensor,
        masked_v: cute.Tensor | None, o: cute.Tensor, lse: cute.Tensor, row_max: cute.Tensor | None,
        q_scale: cute.Tensor, k_scale: cute.Tensor, largest_k_norm: cute.Tensor, key_mask: cute.Tensor | None,
        lists: cute.Tensor | None, words: cute.Tensor | None, tiles: cute.Tensor | None, bias: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None, cu_seqlens_k: cute.Tensor | None, tiles_taken: cute.Tensor,
        programs: Int32, blocks_q: Int32, heads_at_once: Int32, lower: Int32,
        upper: Int32, scale: Float32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch; arguments as `Arguments` has them."""
        M, N, D, E = self.M, self.N, self.variant.code_columns, self.E
        if const_expr(self.variant.q_codes):  # of its shape
            q = q_int8
        heads, heads_k, batch = q.shape[1], k.shape[1], q.shape[0]
        if const_expr(self.variant.varlen):
            batch = 1  # sequences share a head's tiles
        q, q_int8, k, o = (self.matrices(x) for x in (q, q_int8, k, o))
        v = self.matrices(v, transposed=True)
        lse, q_scale, row_max = self.vectors(lse), self.vectors(q_scale), self.vectors(row_max)
        major, source = OperandMajorMode, warpgroup.OperandSource
        s_op = warpgroup.MmaI8Op(Int8, Int8, Int32, (64, N, 32), source.SMEM, major.K, major.K)
        o_op = warpgroup.MmaF16BF16Op(self.dtype, Float32, (64, E, 16), source.RMEM, major.K, major.MN)
        s_mma, o_mma = (cute.make_tiled_mma(op, (self.warpgroups, 1, 1)) for op in (s_op, o_op))
        q_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (M, N, D), Int8, 1)
        k_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (M, N, D), Int8, self.stages)
        v_layout = sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, (M, E, N), self.dtype, self.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        k_atom, k_tma = cpasync.make_tiled_tma_atom(load, k, cute.select(k_layout, mode=[0, 1]), (N, D))
        v_atom, v_tma = cpasync.make_tiled_tma_atom(load, v, cute.select(v_layout, mode=[0, 1]), (E, N))
        masked = None, None
        if const_expr(self.variant.key_mask):
            masked_v = self.matrices(masked_v, transposed=True)
            masked = cpasync.make_tiled_tma_atom(load, masked_v, cute.select(v_layout, mode=[0, 1]), (E, N))
        count = blocks_q * heads * batch
        self.kernel(
            k_atom, v_atom, masked, q, k_tma, v_tma, q_int8, o, lse, row_max, q_scale, k_scale, largest_k_norm,
            key_mask, (lists, words, tiles, bias), cu_seqlens_q, cu_seqlens_k, tiles_taken, lower, upper,
            scale * LOG2_E, count, blocks_q, heads_at_once, heads, heads // heads_k, s_mma, o_mma, q_layout, k_layout,
            v_layout,
        ).launch(
            grid=[cutlass.min(programs, count), 1, 1], block=[128 * (self.warpgroups + 1), 1, 1], stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, k_atom: cute.CopyAtom, v_atom: cute.CopyAtom, masked, q: cute.Tensor,
        k: cute.Tensor, v: cute.Tensor, q_int8: cute.Tensor, o: cute.Tensor, lse: cute.Tensor,
        row_max: cute.Tensor | None, q_scale: cute.Tensor, k_scale: cute.Tensor, largest_k_norm: cute.Tensor,
        key_mask: cute.Tensor | None, mask, cu_seqlens_q: cute.Tensor | None, cu_seqlens_k: cute.Tensor | None,
        tiles_taken: cute.Tensor, lower: Int32, upper: Int32, scale_2: Float32, tiles: Int32, blocks_q: Int32,
        heads_at_once: Int32, heads: Int32, group: Int32, s_mma: cute.TiledMma, o_mma: cute.TiledMma,
        q_layout: cute.ComposedLayout, k_layout: cute.ComposedLayout, v_layout: cute.ComposedLayout,
    ):  # fmt: skip
        """Tiles of queries, one after another; the first warp loads, warps from the fifth on compute."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = Memory.allocate(self.variant, self.dtype, (q_layout, k_layout, v_layout))
        if warp == 0:
            with cute.arch.elect_one():
                memory.begin(self.warpgroups, self.stages)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        sizes = (tiles, tiles_taken, q.shape[0], k.shape[0], blocks_q, heads_at_once, heads, group)
        grid = Grid(*sizes, cu_seqlens_q, cu_seqlens_k, lower, upper, *mask)
        computing, loading = REGISTERS[self.warpgroups]
        if warp < 4:
            cute.arch.setmaxregister_decrease(loading)
            if warp == 0:
                atoms, source = Operands(k_atom, v_atom, masked[0]), Operands(k, v, masked[1])
                self.producer.load(atoms, source, q, memory, key_mask, grid)
        else:
            cute.arch.setmaxregister_increase(computing)
            index = cute.arch.make_warp_uniform(warp // 4 - 1)
            inputs = Inputs(q, q_int8, (o, lse, row_max), q_scale, k_scale, largest_k_norm, scale_2)
            self.attend(Mmas(s_mma, o_mma), memory, grid, thread % 128, index, inputs)

    def wait_scheduler(self, index) -> None:
        """Wait until the warpgroup may queue its products."""
        cute.arch.barrier(barrier_id=NamedBarrier.SCHEDULER + index, number_of_threads=256)

    def arrive_scheduler(self, index) -> None:
        """Let the next warpgroup queue its products."""
        following = 1 - index if self.warpgroups == 2 else (index + 1) % self.warpgroups
        cute.arch.barrier_arrive(barrier_id=NamedBarrier.SCHEDULER + following, number_of_threads=256)

    def sync_warpgroup(self, index) -> None:
        """Wait for all threads of the warpgroup."""
        cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + index, number_of_threads=128)

    def release(self, barrier) -> None:
        """Release a stage, once for each warp."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    def release_keys(self, memory, stage: Int32) -> None:
        """Release K's stage, once every lane of the warp has read the masks there."""
        if const_expr(self.variant.key_mask):
            cute.arch.sync_warp()
        self.release(memory.k_empty + stage)

    @cute.jit
    def queue_s(self, mma: cute.TiledMma, s: cute.Tensor, q: cute.Tensor, k: cute.Tensor, stage: Int32):
        """S = Q K^T of the block in ``stage``; in flight."""
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        for part in cutlass.range_constexpr(self.variant.code_parts):
            atom.set(warpgroup.Field.ACCUMULATE, part > 0)
            cute.gemm(atom, s, q[None, None, part, 0], k[None, None, part, stage], s)  # S += Q K^T, 32 channels
        warpgroup.commit_group()

    @cute.jit
    def queue_o(self, mma: cute.TiledMma, o: cute.Tensor, p: cute.Tensor, v: cute.Tensor, stage: Int32):
        """O += P V of the block in ``stage``; in flight."""
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        for part in cutlass.range_constexpr(self.N // 16):
            cute.gemm(atom, o, p[None, None, part], v[None, None, part, stage], o)  # O += P V, 16 keys
        warpgroup.commit_group()

    @cute.jit
    def attend(self, mmas, memory, grid, thread: Int32, index: Int32, inputs):
        """Consumer warpgroup ``index``: its 64 queries of every tile."""
        M, N, E = self.M, self.N, self.E
        s_part, o_part = mmas.s.get_slice(index * 128), mmas.o.get_slice(index * 128)
        smem = SmemTiles(
            s_part.make_fragment_A(s_part.partition_A(memory.q)), s_part.make_fragment_B(s_part.partition_B(memory.k)),
            o_part.make_fragment_B(o_part.partition_B(memory.v)),
        )  # fmt: skip
        s = cute.make_rmem_tensor(s_part.partition_shape_C((M, N)), Int32)
        x = cute.make_rmem_tensor(cute.size(s), Float32)
        p = o_part.make_fragment_A(o_part.partition_shape_A((M, N)))
        acc = cute.make_rmem_tensor(o_part.partition_shape_C((M, E)), Float32)
        state, scale = State.allocate(), cute.make_rmem_tensor(2, Float32)
        rows = cute.make_rmem_tensor(2, Int32)
        consumer = Consumer(
            mmas, memory, smem, Fragments(s, x, p, acc), state, scale, rows, index, thread, grid, inputs
        )
        if index == 0:
            self.arrive_scheduler(index - 1 + self.warpgroups)
        program, _, _ = cute.arch.block_idx()
        program, owner = self.tiles.ordered(grid, program)
        ring, tile_phase = Ring(Int32(0), Int32(0)), Int32(0)
        while program < grid.tiles:
            ring = self.attend_tile(consumer, program, owner, ring)
            cute.arch.mbarrier_wait(memory.tile_full, tile_phase)
            program = memory.tile[0]
            if const_expr(self.variant.varlen):
                owner = memory.tile[1]
            cute.arch.sync_warp()
            self.release(memory.tile_empty)
            tile_phase ^= 1
        if index == 0:  # the arrival that nobody waits for
            self.wait_scheduler(index)

    @cute.jit
    def attend_tile(self, consumer, program: Int32, owner: Int32, ring):
        """O and lse of a tile's 64 queries; the ring's next state."""
        _, memory, smem, tile, state, scale, rows, index, thread, grid, inputs = consumer
        q_norms = cute.make_rmem_tensor(2, Float32)
        work_tile = self.tiles.coord(grid, program, owner)
        if work_tile.first_q < work_tile.length_q:
            if const_expr(self.variant.lists):
                listed = self.tiles.list_of(grid, work_tile)
                in_part, whole = listed[0], listed[1]
            else:
                loaded_begin, _, _, loaded_end = self.tiles.n_block_range(work_tile, work_tile.first_q, self.M)
                begin, full_begin, full_end, end = self.tiles.n_block_range(
                    work_tile, work_tile.first_q + index * 64, 64
                )
            q_scales = self.tiles.values_of_head(inputs.q_scale, work_tile.head, work_tile.batch)
            q, q_int8 = (self.tiles.of_head(x, work_tile.head, work_tile.batch) for x in (inputs.q, inputs.q_int8))
            self.sync_warpgroup(index)  # all of its threads have done with the last tile's Q
            if const_expr(self.variant.q_codes):
                self.quantizer.load_codes(q_int8, q_scales, memory, work_tile, index * 64, thread)
            else:
                self.quantizer.rows(q, q_int8, q_scales, memory, work_tile, index * 64, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.sync_warpgroup(index)
            for r in cutlass.range_constexpr(2):
                rows[r] = work_tile.first_q + index * 64 + thread // 32 * 16 + thread % 32 // 4 + 8 * r
                state.row_sum[r], state.p_max[r] = Float32(0), Int32(0)
                scale[r], q_norms[r] = Float32(0), Float32(0)
                if rows[r] < work_tile.length_q:
                    scale[r] = memory.q_scale[rows[r] - work_tile.first_q] * inputs.scale_2
                # false of NaN, which stays
                scale[r] = Float32(TINY) if scale[r] < TINY else scale[r]
                if const_expr(self.variant.bounded):  # noqa: SIM102 (one is of compile time)
                    if rows[r] < work_tile.length_q:
                        q_norms[r] = memory.q_norm[rows[r] - work_tile.first_q] * inputs.scale_2
                if const_expr(self.variant.negative):
                    scale[r] = -scale[r]
            tile.o.fill(0)
            queries = QueryTile(work_tile, inputs.k_scale[work_tile.scale_head, None, thread % 4])

            # the first block: S = Q K^T and P, without a product P V beside it
            if const_expr(self.variant.lists):
                cute.arch.mbarrier_wait(memory.k_full + ring.stage, ring.phase)
                block = memory.block[ring.stage]
                factors = self.factors(scale, queries, block)
            else:
                block = end - 1
                factors = self.factors(scale, queries, block)
                ring = self.skip(memory, index, loaded_end - end, ring)
                cute.arch.mbarrier_wait(memory.k_full + ring.stage, ring.phase)
            self.queue_s(consumer.mmas.s, tile.s, smem.q, smem.k, ring.stage)  # S = Q K^T
            mask = self.mask_of(consumer, queries, block, ring.stage)
            warpgroup.wait_group(0)
            self.softmax.update_maxima(tile.s, tile.x, state, factors, mask, True, True)
            self.softmax.exponentials(tile.s, tile.x, state, factors, True)  # P = exp2(S - max_ref)
            self.release_keys(memory, ring.stage)
            self.softmax.pack(tile.x, tile.p)
            if const_expr(self.variant.varlen):
                cute.arch.mbarrier_wait(memory.v_full + ring.stage, ring.phase)
                self.clear_end(memory.v, ring.stage, work_tile.length_k - (end - 1) * self.N, thread, index)
            # the other blocks, masked ones first: S and P of a block, O += P V of the one before
            if const_expr(self.variant.lists):
                ring = self.steps(consumer, queries, 0, in_part - 1, ring, True)
                ring = self.unmasked(consumer, queries, 0, whole, q_norms, ring)
            elif const_expr(self.variant.key_mask):
                ring = self.steps(consumer, queries, end - 2, end - 1 - begin, ring, True)
            else:
                if const_expr(self.variant.upper):
                    ring = self.steps(consumer, queries, end - 2, end - 1 - full_end, ring, True)
                last = cutlass.min(full_end, end - 1)
                ring = self.unmasked(consumer, queries, last, last - full_begin, q_norms, ring)
                if const_expr(self.variant.lower):
                    last = cutlass.min(full_begin, end - 1)
                    ring = self.steps(consumer, queries, last - 1, last - begin, ring, True)
            # O += P V of the last block
            cute.arch.mbarrier_wait(memory.v_full + ring.stage, ring.phase)
            warpgroup.fence()
            self.queue_o(consumer.mmas.o, tile.o, tile.p, smem.v, ring.stage)  # O += P V
            warpgroup.wait_group(0)
            self.release(memory.v_empty + ring.stage)
            ring = self.producer.advance(ring)
            if const_expr(not self.variant.lists):
                ring = self.skip(memory, index, begin - loaded_begin, ring)
            self.epilogue.write(tile.o, state, rows, work_tile, thread, *inputs.written)
        return ring

    @cute.jit
    def unmasked(self, consumer, queries, last: Int32, count: Int32, q_norms, ring):
        """Process ``count`` fully visible key blocks, descending from ``last`` - 1."""
        state, index = consumer.state, consumer.index
        if const_expr(self.variant.bounded):
            bound = consumer.inputs.largest_k_norm[queries.work_tile.sequence_head]
            safe = self.softmax.is_bounded(q_norms, bound, state)
            safe = ptx(ALL, write_only_types=[Int32], read_only_args=[Int32(safe), NamedBarrier.WARPGROUP + index])
            free = cute.arch.make_warp_uniform(count if safe != 0 else Int32(0))
            ring = self.steps(consumer, queries, last - 1, free, ring, False, free=True)
            last, count = last - free, count - free
            if const_expr(self.variant.row_max):  # noqa: SIM102 (one is of compile time)
                if free > 0:
                    self.softmax.note_p_max(consumer.tile.p, state)
                    self.softmax.fold_p_max(state)
        return self.steps(consumer, queries, last - 1, count, ring, False)

    @cute.jit
    def mask_of(self, consumer, queries, block: Int32, stage: Int32):
        """Mask of the block in ``stage`` for a thread's rows, as `Softmax.update_maxima` takes it."""
        memory, rows, index, grid = consumer.memory, consumer.rows, consumer.index, consumer.grid
        low, high = self.tiles.bounds(block, rows, queries.work_tile)
        words = self.tiles.words(memory.keys_kept, stage)
        if const_expr(self.variant.lists):
            tiles = [memory.mask_tiles[index, part, stage] for part in range(self.variant.tiles_met)]
            words = self.elements.words(grid.words, tiles, words, block, rows, low, high)
            bias = []
            if const_expr(self.variant.bias):
                bias = self.elements.bias(grid.bias, block, rows, queries.work_tile)
            return [], words, bias
        return (low, high), words, []

    @cute.jit
    def skip(self, memory, index: Int32, count: Int32, ring):
        """Release ``count`` blocks that the tile loads and the warpgroup's queries do not see."""
        for _ in cutlass.range(count, unroll=1):
            cute.arch.mbarrier_wait(memory.k_full + ring.stage, ring.phase)
            self.release(memory.k_empty + ring.stage)
            cute.arch.mbarrier_wait(memory.v_full + ring.stage, ring.phase)
            self.release(memory.v_empty + ring.stage)
            self.wait_scheduler(index)
            self.arrive_scheduler(index)
            ring = self.producer.advance(ring)
        return ring

    @cute.jit
    def factors(self, scale, queries, block: Int32):
        """Scales of a block's scores for a thread's two rows: Q's times K's, in base 2.

        A pair for each `ForwardTile.scale_keys` of the block's keys.
        """
        work_tile, k_scales = queries
        N, keys, found = self.N, self.variant.tile.scale_keys, []
        at, past = block * N // SCALE_BLOCK, block * N % SCALE_BLOCK
        loaded = [k_scales[work_tile.scale_block + at]]
        for _ in cutlass.range_constexpr(-(-(N - keys) // SCALE_BLOCK)):
            # a step may reach past the last block of scales
            at = cutlass.min(at + 1, cutlass.max(work_tile.length_k - 1, 0) // SCALE_BLOCK)
            loaded.append(k_scales[work_tile.scale_block + at])
        for first in cutlass.range_constexpr(0, N, keys):
            k_scale = loaded[0]
            for j in cutlass.range_constexpr(1, len(loaded)):
                k_scale = cutlass.select_(past + first >= j * SCALE_BLOCK, loaded[j], k_scale)
            found.append((scale[0] * k_scale, scale[1] * k_scale))
        return found

    @cute.jit
    def steps(
        self, consumer, queries, last: Int32, count: Int32, ring, masked: cutlass.Constexpr,
        free: cutlass.Constexpr = False,
    ):  # fmt: skip
        """Process ``count`` key blocks, descending from ``last``."""
        for b in cutlass.range(cutlass.max(count, 0), unroll=1):
            ring = self.step(consumer, queries, last - b, ring, masked, free)
        return ring

    @cute.jit
    def step(self, consumer, queries, block: Int32, ring, masked: cutlass.Constexpr, free: cutlass.Constexpr):
        """S and P of ``block``, O += P V of the block before, whose stage is ``ring``; this block's stage.

        free: P can hold every score relative to ``max_ref`` as it is. Row maxima are then those of P, which is looked
        at under the products that read it.
        """
        mmas, memory, smem, tile, state, scale, _, index, *_ = consumer
        before = ring
        ring = self.producer.advance(ring)
        if const_expr(self.variant.lists):
            cute.arch.mbarrier_wait(memory.k_full + ring.stage, ring.phase)
            block = memory.block[ring.stage]
            factors = self.factors(scale, queries, block)
        else:
            factors = self.factors(scale, queries, block)
            cute.arch.mbarrier_wait(memory.k_full + ring.stage, ring.phase)
        mask = ([], [], [])
        if const_expr(masked and self.variant.lists):  # loaded early: it comes from memory
            mask = self.mask_of(consumer, queries, block, ring.stage)
        self.wait_scheduler(index)
        self.queue_s(mmas.s, tile.s, smem.q, smem.k, ring.stage)  # (1) [GEMM] S = Q K^T
        cute.arch.mbarrier_wait(memory.v_full + before.stage, before.phase)
        self.queue_o(mmas.o, tile.o, tile.p, smem.v, before.stage)  # (4) [GEMM] O += P V, of the block before
        self.arrive_scheduler(index)
        look = const_expr(free and self.variant.row_max)
        if const_expr(look):
            self.softmax.note_p_max(tile.p, state)
        if const_expr(masked and not self.variant.lists):
            mask = self.mask_of(consumer, queries, block, ring.stage)
        warpgroup.wait_group(1)
        # key-mask bits are read from the stage: it is released once they have been used
        held = const_expr(masked and self.variant.key_mask)
        if const_expr(not held):
            self.release_keys(memory, ring.stage)
        needs_rescale = Boolean(False)
        if const_expr(not free):  # (2) max_ref and alpha
            needs_rescale = self.softmax.update_maxima(tile.s, tile.x, state, factors, mask, False, masked)
        if const_expr(held):
            self.release_keys(memory, ring.stage)
        # (2) P = exp2(S - max_ref), (3) l += rowsum(P)
        parts = self.softmax.exponentials(tile.s, tile.x, state, factors, masked)
        if const_expr(look):
            self.softmax.update_row_max(tile.x, parts, state)
        warpgroup.wait_group(0)
        self.release(memory.v_empty + before.stage)
        self.softmax.pack(tile.x, tile.p)  # P in 16 bit
        if const_expr(not free):
            self.rescale(tile.o, state, needs_rescale)  # (4) O *= alpha
        return ring

    @cute.jit
    def rescale(self, acc: cute.Tensor, state, needs_rescale: Boolean):
        """O *= alpha, once a row's max_ref has grown."""
        if needs_rescale:
            for i in cutlass.range_constexpr(cute.size(acc)):
                acc[i] = acc[i] * state.alpha[i // 2 % 2]

    @cute.jit
    def clear_end(self, v: cute.Tensor, stage: Int32, keys_left: Int32, thread: Int32, index: Int32):
        """Zero V's tokens past the end of a packed sequence: P is 0 there, but 0 times a neighbour's NaN is NaN.

        Every warpgroup does so, with the same zeros, before its own product.
        """
        chunks = self.E // 8  # of 16 bytes, of a token
        if keys_left < self.N:
            zeros = cute.make_rmem_tensor(8, self.dtype)
            zeros.fill(0)
            for at in cutlass.range(thread, (self.N - keys_left) * chunks, 128, unroll=1):
                token = v[None, keys_left + at // chunks, stage]
                cute.autovec_copy(zeros, cute.local_tile(token, (8,), (at % chunks,)))
            cute.arch.fence_proxy("async.shared", space="cta")
            self.sync_warpgroup(index)
