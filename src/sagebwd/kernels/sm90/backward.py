"""dQ, dK and dV on sm_90a in one CuTe DSL kernel: S^T in INT8, dP^T in 16 bit, the gradients in e4m3.

A program has 64 keys a warpgroup and meets every block of queries that sees them. P^T and dS^T are operands of dV and
dK in the registers they came in; dS^T also goes to shared memory, transposed. dQ^T, over the keys of all warpgroups,
is computed a step behind, so that none waits for another: at head_dim 128 each of two has half of its channels, at 64
three have a block each in turn. S^T, dP^T and dQ^T take turns in one set of registers, which leaves room for K and
part of V (128) or for FP32 entries of P (64). docs/log/2026-11-23-sm90-backward.md has the count of what binds.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float8E4M3FN, Float16, Float32, Int8, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.tensor_utils import LayoutEnum

from sagebwd.kernels.sm90 import backward_registers as registers
from sagebwd.kernels.sm90.backward_producer import (
    DELTA_CHANNELS,
    STAGES,
    BackwardMemory,
    BackwardOperands,
    BackwardProducer,
)
from sagebwd.kernels.sm90.backward_tiles import BackwardTiles, Grid
from sagebwd.kernels.sm90.config import REGISTERS, BackwardArguments, BackwardVariant
from sagebwd.kernels.sm90.forward import DTYPES, LOG2_E


class Backward:
    """One variant of the kernel, to compile; `sagebwd.kernels.sm90.compile` does."""

    def __init__(self, variant: BackwardVariant) -> None:
        self.variant = variant
        self.D, self.M, self.N = variant.head_dim, variant.span, variant.queries
        self.dtype = DTYPES[variant.dtype]
        assert variant.dq_in_parts or self.D == 64, variant
        self.masked = variant.lower or variant.upper or variant.varlen or variant.ragged or variant.key_mask
        self.tiles = BackwardTiles(variant)
        self.producer = BackwardProducer(variant, self.tiles)

    def placeholders(self) -> list:
        """Arguments of the call's types, shapes unknown, to compile for."""
        variant, D, N, size = self.variant, self.D, self.N, cute.sym_int
        batch, heads, heads_k, tokens_q, tokens_k, heads_in_all, heads_k_in_all, blocks = (size() for _ in range(8))
        padded_q, padded_k = size(divisibility=16), size(divisibility=16)

        def compact(dtype, *shape, aligned=16):
            order = tuple(reversed(range(len(shape))))
            return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=aligned)

        def strided(dtype, *shape):
            strides = [cute.sym_int64(divisibility=128 // dtype.width) for _ in shape[1:]]
            return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=16)

        packed = variant.varlen
        queries = (tokens_q, heads, D) if packed else (batch, heads, tokens_q, D)
        keys = (tokens_k, heads_k, D) if packed else (batch, heads_k, tokens_k, D)
        arguments = BackwardArguments(
            q=strided(Int8, *queries),
            k=strided(Int8, *keys),
            v=strided(self.dtype, *keys),
            do=strided(self.dtype, *queries),
            q_t=compact(Uint8, heads_in_all, D, padded_q),
            k_t=compact(Uint8, heads_k_in_all, D, padded_k),
            do_t=compact(Uint8, heads_in_all, D, padded_q),
            rows=compact(Float32, heads_in_all, blocks, 2 * N),
            delta=compact(self.dtype, heads_in_all, size(), DELTA_CHANNELS),
            k_scale=compact(Float32, *((heads_k, tokens_k) if packed else (batch, heads_k, tokens_k)), aligned=4),
            largest=compact(Int32, size(), 3, aligned=4),
            key_mask=compact(Uint8, batch, tokens_k, aligned=1) if variant.key_mask else None,
            dq_sums=compact(Float16, heads_in_all, blocks, D * N),
            dk=strided(self.dtype, *keys),
            dv=strided(self.dtype, *keys),
            cu_seqlens_q=compact(Int32, size(), aligned=4) if packed else None,
            cu_seqlens_k=compact(Int32, size(), aligned=4) if packed else None,
            longest=Int32(0),
            lower=Int32(0),
            upper=Int32(0),
            scale=Float32(0),
            sum_scale=Float32(0),
        )
        return [*arguments, make_fake_stream()]

    def matrices(self, x: cute.Tensor):
        """x, (B, H, T, D) or packed (T, H, D), as (T, D, H[, B])."""
        return cute.make_tensor(
            x.iterator, cute.select(x.layout, mode=[0, 2, 1] if self.variant.varlen else [2, 3, 1, 0])
        )

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, do: cute.Tensor, q_t: cute.Tensor, k_t: cute.Tensor,
        do_t: cute.Tensor, rows: cute.Tensor, delta: cute.Tensor, k_scale: cute.Tensor, largest: cute.Tensor,
        key_mask: cute.Tensor | None, dq_sums: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor,
        cu_seqlens_q: cute.Tensor | None, cu_seqlens_k: cute.Tensor | None, longest: Int32, lower: Int32,
        upper: Int32, scale: Float32, sum_scale: Float32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch; arguments as `BackwardArguments` has them."""
        variant, M, N, D = self.variant, self.M, self.N, self.D
        heads, heads_k, batch = q.shape[1], k.shape[1], q.shape[0]
        if const_expr(variant.varlen):
            batch = cu_seqlens_q.shape[0] - 1
        q, k, v, do, dk, dv = (self.matrices(x) for x in (q, k, v, do, dk, dv))
        q_t, k_t, do_t = (
            cute.make_tensor(cute.recast_ptr(x.iterator, dtype=Float8E4M3FN), cute.select(x.layout, mode=[1, 2, 0]))
            for x in (q_t, k_t, do_t)
        )
        delta = cute.make_tensor(delta.iterator, cute.select(delta.layout, mode=[1, 2, 0]))
        K, source, e4m3 = OperandMajorMode.K, warpgroup.OperandSource, Float8E4M3FN
        int8 = [warpgroup.MmaI8Op(Int8, Int8, Int32, (64, N, 32), x, K, K) for x in (source.SMEM, source.RMEM)]
        wide = [warpgroup.MmaF16BF16Op(self.dtype, Float32, (64, N, 16), x, K, K) for x in (source.SMEM, source.RMEM)]
        out = warpgroup.MmaF8Op(e4m3, e4m3, Float32, (64, D, 32), source.RMEM, K, K)
        dq = warpgroup.MmaF8Op(e4m3, e4m3, Float32, (64, N, 32), source.SMEM, K, K)
        mmas = [cute.make_tiled_mma(x, (variant.warpgroups, 1, 1)) for x in (*int8, *wide, out)]
        mmas.append(cute.make_tiled_mma(dq, (D // 64, 1, 1)))
        row = LayoutEnum.ROW_MAJOR
        a = lambda m, n, dtype: sm90.make_smem_layout_a(row, (m, 64, n), dtype, 1)  # noqa: E731
        b = lambda m, n, dtype: sm90.make_smem_layout_b(row, (64, m, n), dtype, STAGES)  # noqa: E731
        layouts = BackwardOperands(
            k=a(M, D, Int8), v=a(M, D, self.dtype), k_t=a(D, M, e4m3), q=b(N, D, Int8),
            do=b(N, D, self.dtype), delta=b(N, DELTA_CHANNELS, self.dtype), do_t=b(D, N, e4m3), q_t=b(D, N, e4m3),
        )  # fmt: skip
        shapes = BackwardOperands((M, D), (M, D), (D, M), (N, D), (N, D), (N, DELTA_CHANNELS), (D, N), (D, N))
        shared = BackwardOperands(False, False, False, True, True, False, True, True)
        loads = []
        for x, layout, shape, of_all in zip((k, v, k_t, q, do, delta, do_t, q_t), layouts, shapes, shared):
            many = variant.cluster if of_all else 1
            load = cpasync.CopyBulkTensorTileG2SMulticastOp() if many > 1 else cpasync.CopyBulkTensorTileG2SOp()
            loads.append(cpasync.make_tiled_tma_atom(load, x, cute.select(layout, mode=[0, 1]), shape, many))
        blocks_k = cute.ceil_div(longest, M * variant.cluster) * variant.cluster
        self.kernel(
            BackwardOperands(*(x for x, _ in loads)), BackwardOperands(*(x for _, x in loads)), rows, k_scale, largest,
            key_mask, dq_sums, dk, dv, cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], lower, upper, scale,
            sum_scale, blocks_k, heads_k, heads // heads_k, tuple(mmas), layouts, b(N, M, e4m3),
        ).launch(
            grid=[blocks_k * heads_k * batch, 1, 1], block=[128 * (variant.warpgroups + 1), 1, 1],
            cluster=[variant.cluster, 1, 1] if variant.cluster > 1 else None, stream=stream, min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, atoms, source, rows: cute.Tensor, k_scale: cute.Tensor, largest: cute.Tensor,
        key_mask: cute.Tensor | None, dq_sums: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor,
        cu_seqlens_q: cute.Tensor | None, cu_seqlens_k: cute.Tensor | None, tokens_q: Int32, tokens_k: Int32,
        lower: Int32, upper: Int32, scale: Float32, sum_scale: Float32, blocks_k: Int32, heads_k: Int32, group: Int32,
        mmas, layouts, ds_layout: cute.ComposedLayout,
    ):  # fmt: skip
        """Keys of one head; the first warp loads, warps from the fifth on compute."""
        variant = self.variant
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        memory = BackwardMemory.allocate(self.dtype, layouts, ds_layout, self.N)
        if warp == 0:
            with cute.arch.elect_one():
                warps = 4 * variant.warpgroups
                memory.begin(warps, warps if variant.dq_in_parts else 4, variant.cluster)
        cute.arch.mbarrier_init_fence()
        self.meet()
        grid = Grid(
            tokens_q, tokens_k, rows.shape[1], blocks_k, heads_k, group, cu_seqlens_q, cu_seqlens_k, lower, upper
        )
        computing, loading = REGISTERS[variant.warpgroups]
        if warp < 4:
            cute.arch.setmaxregister_decrease(loading)
            if warp == 0:
                self.producer.load(atoms, source, memory, rows, grid)
        else:
            cute.arch.setmaxregister_increase(computing)
            index = cute.arch.make_warp_uniform(warp // 4 - 1)
            outputs = (dq_sums, dk, dv)
            self.accumulate(
                mmas, memory, grid, thread % 128, index, k_scale, largest, key_mask, outputs, scale, sum_scale
            )
        if const_expr(variant.cluster > 1):
            self.meet()  # what the others send, and say, must find this program there

    def meet(self) -> None:
        """All threads of the cluster."""
        if self.variant.cluster > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def release(self, barrier, shared: bool = False) -> None:
        """A warp has done with a slot, or with a stage, which a whole cluster is told where its loads are shared."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)
            if shared and self.variant.cluster > 1:
                cute.arch.mbarrier_arrive(barrier, cute.arch.block_idx_in_cluster() ^ 1)

    def publish(self, barrier) -> None:
        """A warp's stores are there for tensor cores."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self.release(barrier)

    def queue(self, product, stage, begin: bool) -> None:
        """acc (+)= A B of a stage; A's first parts are those in registers, which come last: they bind least long."""
        mma, acc, a, b, mma_r, a_r, in_registers = product
        parts = cute.size(b, mode=[2])
        for n, part in enumerate([*range(in_registers, parts), *range(in_registers)]):
            there = part < in_registers
            atom = cute.make_mma_atom((mma_r if there else mma).op)
            atom.set(warpgroup.Field.ACCUMULATE, n > 0 or not begin)
            operand = a_r[None, None, part] if there else a[None, None, part, 0]
            cute.gemm(atom, acc, operand, b[None, None, part, stage], acc)

    @cute.jit
    def accumulate(
        self, mmas, memory, grid, thread: Int32, index: Int32, k_scale: cute.Tensor, largest: cute.Tensor,
        key_mask: cute.Tensor | None, outputs, scale: Float32, sum_scale: Float32,
    ):  # fmt: skip
        """Warpgroup ``index``: dK and dV of 64 keys, its share of dQ^T."""
        M, N, D, variant = self.M, self.N, self.D, self.variant
        in_parts = variant.dq_in_parts
        dq_sums, dk, dv = outputs
        place = self.tiles.place(grid)
        if place.first_of_all < place.length_k:
            lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
            s_mma, s_mma_r, p_mma, p_mma_r, out_mma, dq_mma = mmas
            s, s_r, p, p_r, out = (x.get_slice(index * 128) for x in mmas[:5])
            q = dq_mma.get_slice(index * 128 if const_expr(in_parts) else 0)
            tiles = memory.tiles
            acc_p = cute.make_rmem_tensor(p.partition_shape_C((M, N)), Float32)
            # S, dP and dQ one after the other in the same registers
            acc_s = cute.recast_tensor(acc_p, Int32)
            acc_q = cute.make_tensor(acc_p.iterator, acc_p.layout)
            acc_v, acc_k = (cute.make_rmem_tensor(out.partition_shape_C((M, D)), Float32) for _ in range(2))
            acc_v.fill(0)
            acc_k.fill(0)
            p_codes, ds_codes = (out.make_fragment_A(out.partition_shape_A((M, N))) for _ in range(2))
            entries = cute.make_rmem_tensor(N // 4, Int32)
            if const_expr(not variant.paired):
                entries = cute.make_rmem_tensor(N // 2, Float32)
            ahead = None
            if const_expr(variant.rows_ahead > 0):
                ahead = cute.make_rmem_tensor(4 * variant.rows_ahead, Float32)
            row = 16 * warp + lane // 4
            first_k = place.first_k + 64 * index
            keys, scales, kept = self.tiles.keys(first_k, row, k_scale, key_mask, scale * LOG2_E, place)
            rows_at = memory.rows.iterator.toint() + lane % 4 * 8
            ds_at = memory.ds.iterator.toint() + registers.place_ds(index, warp, lane, M, N)
            dq_at = dq_sums.iterator.toint() + Int64(thread * 16)
            if const_expr(in_parts):
                dq_at += Int64(index * (128 * N))
            begin, count = self.tiles.blocks(place)
            steps = count * grid.group

            # a block of zeros goes before the first: every step has one to compute dQ of
            zeros = cute.recast_tensor(ds_codes, Int32)
            for j in cutlass.range_constexpr(N // 8):
                zeros[j] = Int32(0)
            registers.store_ds(zeros, ds_at + M * N, M, N)
            self.publish(memory.ds_full + 1)
            cute.arch.mbarrier_wait(memory.keys_full, 0)
            a_k = registers.load_operand(s_r, tiles.k, 64 * index + row, lane, variant.k_parts, 32)
            a_v = registers.load_operand(p_r, tiles.v, 64 * index + row, lane, variant.v_parts, 16)
            ones = p_r.make_fragment_A(p_r.partition_shape_A((M, DELTA_CHANNELS)))
            registers.fill_weights(ones, lane, variant.dtype)
            operand_a = lambda x, tile: x.make_fragment_A(x.partition_A(tile))  # noqa: E731
            operand_b = lambda x, tile: x.make_fragment_B(x.partition_B(tile))  # noqa: E731
            products = (
                (s_mma, acc_s, operand_a(s, tiles.k), operand_b(s, tiles.q), s_mma_r, a_k, variant.k_parts),
                (None, acc_p, None, operand_b(p_r, tiles.delta), p_mma_r, ones, 1),
                (p_mma, acc_p, operand_a(p, tiles.v), operand_b(p, tiles.do), p_mma_r, a_v, variant.v_parts),
                (None, acc_v, None, operand_b(out, tiles.do_t), out_mma, p_codes, N // 32),
                (None, acc_k, None, operand_b(out, tiles.q_t), out_mma, ds_codes, N // 32),
                (dq_mma, acc_q, operand_a(q, tiles.k_t), operand_b(q, memory.ds), None, None, 0),
            )
            fixed = (products, memory, (acc_s, acc_p, acc_q, p_codes, ds_codes, entries, ahead),
                     (rows_at, ds_at, dq_at), keys, scales, first_k, kept, sum_scale, place, index)  # fmt: skip
            # where the block before is, whose dQ is next; zeros may go anywhere
            before = place.heads_before * grid.total_blocks + place.block_q
            n, head, turn, phase = Int32(0), Int32(0), Int32(0), Int32(0)
            # two steps at a time: stages are then constants, and descriptors need few instructions
            for _ in cutlass.range(steps // 2, unroll=1):
                for stage in cutlass.range_constexpr(STAGES):
                    self.step(fixed, begin + n, before, turn, stage, phase)
                    before = (place.heads_before + head) * grid.total_blocks + place.block_q + begin + n
                    n, head, turn = self.following(n, head, turn, count)
                phase = phase ^ 1
            if steps % 2 == 1:
                self.step(fixed, begin + n, before, turn, 0, phase)
                before = (place.heads_before + head) * grid.total_blocks + place.block_q + begin + n
                n, head, turn = self.following(n, head, turn, count)
            warpgroup.wait_group(0)
            if (steps > 0) & (const_expr(in_parts) | (turn == index)):
                slot = (steps - 1) & 1
                cute.arch.mbarrier_wait(memory.ds_full + slot, steps >> 1 & 1)
                warpgroup.fence()
                self.queue(products[5], slot, True)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                registers.add_dq(acc_q, dq_at + Int64(before) * (D * N * 2), sum_scale)
            units = (
                registers.fp8_scale(largest[place.owner, 0]),
                registers.fp8_scale(largest[place.owner, 1]) * scale,
            )
            for result, to, unit in ((acc_v, dv, units[0]), (acc_k, dk, units[1])):
                self.write(result, self.producer.of_keys(to, place), first_k + row, lane, place, unit)

    @cute.jit
    def following(self, n: Int32, head: Int32, turn: Int32, count: Int32):
        """The next block, which may be the next head's first, and whose turn it is."""
        n += 1
        if n == count:
            n = Int32(0)
            head += 1
        turn += 1
        if turn == self.variant.warpgroups:
            turn = Int32(0)
        return n, head, turn

    @cute.jit
    def step(self, fixed, block: Int32, before: Int32, turn: Int32, stage, phase: Int32):
        """A block of queries, in ``stage``, and dQ of the block before, which lies at ``before``."""
        products, memory, tensors, addresses, keys, scales, first_k, kept, sum_scale, place, index = fixed
        s, delta, dp, dv, dk, dq = products
        acc_s, acc_p, acc_q, p_codes, ds_codes, entries, ahead = tensors
        rows_at, ds_at, dq_at = addresses
        full, empty, other, M, N = memory.full, memory.empty, 1 - stage, self.M, self.N
        in_parts = self.variant.dq_in_parts
        rows_at += stage * (8 * N)
        dq_at += Int64(before) * (self.D * N * 2)
        cute.arch.mbarrier_wait(full[0] + stage, phase)
        warpgroup.fence()
        self.queue(s, stage, True)
        warpgroup.commit_group()
        if const_expr(ahead is not None):
            registers.load_rows(ahead, rows_at, 0, N)
        warpgroup.wait_group(0)
        self.release(empty[3] + other, True)  # dK of the block before
        if const_expr(not in_parts):
            self.release(empty[2] + other, True)  # and dV
        registers.probabilities(acc_s, entries, ahead, rows_at, scales, N, self.variant.lane_scale)
        registers.pack(entries, p_codes)
        whole = Boolean(True)
        if const_expr(self.masked):
            whole = self.tiles.whole(block, first_k, kept, place)
            if not whole:
                registers.mask(p_codes, self.tiles.kept(block, keys, place))
        self.release(empty[0] + stage, True)
        cute.arch.mbarrier_wait(full[1] + stage, phase)
        cute.arch.mbarrier_wait(full[2] + stage, phase)
        warpgroup.fence()
        self.queue(delta, stage, True)
        self.queue(dp, stage, False)
        warpgroup.commit_group()
        self.queue(dv, stage, False)
        warpgroup.commit_group()
        if const_expr(in_parts):
            cute.arch.mbarrier_wait(memory.ds_full + other, phase)
        cute.arch.mbarrier_wait(full[3] + stage, phase)
        warpgroup.wait_group(1)
        self.release(empty[1] + stage, True)
        registers.gradients(acc_p, entries)
        registers.pack(entries, ds_codes)
        if const_expr(self.masked):  # noqa: SIM102 (one is of compile time)
            if not whole:  # what lies past an end need not be finite
                registers.mask(ds_codes, self.tiles.kept(block, keys, place))
        warpgroup.fence()
        if const_expr(in_parts):
            self.queue(dq, other, True)
            warpgroup.commit_group()
        self.queue(dk, stage, False)
        warpgroup.commit_group()
        cute.arch.mbarrier_wait(memory.ds_empty + stage, phase ^ other)
        registers.store_ds(cute.recast_tensor(ds_codes, Int32), ds_at + stage * (M * N), M, N)
        self.publish(memory.ds_full + stage)
        if const_expr(in_parts):
            warpgroup.wait_group(1)
            self.release(empty[2] + stage, True)  # dV
            self.release(memory.ds_empty + other)
            registers.add_dq(acc_q, dq_at, sum_scale)
        elif turn == index:
            cute.arch.mbarrier_wait(memory.ds_full + other, phase)
            warpgroup.fence()
            self.queue(dq, other, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            self.release(memory.ds_empty + other)
            registers.add_dq(acc_q, dq_at, sum_scale)

    @cute.jit
    def write(self, acc: cute.Tensor, to: cute.Tensor, row: Int32, lane: Int32, place, unit: Float32):
        """64 rows of dK or dV, those that are keys."""
        for r in cutlass.range_constexpr(2):
            if row + 8 * r < place.length_k:
                at = to[row + 8 * r, None].iterator.toint() + Int64(lane % 4 * 4)
                registers.write_row(acc, r, at, unit, self.variant.dtype)
