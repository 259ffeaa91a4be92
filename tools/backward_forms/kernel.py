"""The kernel: INT8 S, BF16 dP, e4m3 gradients, no masks.

A program has 64 keys a warpgroup. Step n of a warpgroup, on block n of queries: S^T; P^T; dP^T and dV queued; dS^T;
dQ^T of block n - 1, over the keys of all warpgroups, and dK queued; dS^T to shared memory; dQ^T added up.
"""

import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int8, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from tools.backward_forms.registers import Registers, ptx

E4M3 = Float8E4M3FN
SMEM, RMEM, K_MAJOR = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM, OperandMajorMode.K
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];"


class Form(Registers):
    """One form.

    D: head_dim. N: queries a step. groups: warpgroups. k, v: parts of 32 and 16 channels that stay in registers. half:
    P and dS in FP16 pairs. planes: row values in FP32. cluster: programs that share loads. apart: blocks of queries
    between the first of one program's and of the next one's. unrolled: two steps a loop body.
    """

    def __init__(
        self, D, N, groups=2, k=0, v=0, half=True, planes=False, cluster=1, apart=0, unrolled=True
    ):  # fmt: skip
        self.D, self.N, self.groups, self.k, self.v, self.half = D, N, groups, k, v, half
        self.planes, self.cluster, self.apart, self.unrolled = planes, cluster, apart, unrolled
        self.M, self.row_bytes = 64 * groups, (8 if planes else 4) * N
        # each of two warpgroups has a part of every block of dQ^T, each of three all of every third block
        self.in_turn = groups == 3
        self.parts = 1 if self.in_turn else 2
        self.NQ = N if D == 128 or self.in_turn else N // 2
        self.registers = {2: (240, 24), 3: (160, 32)}[groups]

    def placeholders(self):
        """Arguments of `__call__`, shapes unknown."""
        D, n = self.D, cute.sym_int
        heads, tokens, padded = n(), n(), n(divisibility=16)

        def compact(dtype, *shape):
            order = (2, 1, 0)[3 - len(shape) :]
            return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

        rows = [compact(t, heads, tokens, D) for t in (Int8, Int8, BFloat16, BFloat16)]
        copies = [compact(Uint8, heads, D, padded) for _ in range(3)]
        values = compact(Float32, heads, n(), self.row_bytes // 4), compact(BFloat16, heads, tokens, 16)
        scales = compact(Float32, heads, n()), compact(Float32, heads, 2)
        out = compact(Float16, heads, n()), *(compact(BFloat16, heads, tokens, D) for _ in range(2))
        return [*rows, *copies, *values, *scales, *out, make_fake_stream()]

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, do: cute.Tensor, q_t: cute.Tensor, k_t: cute.Tensor,
        do_t: cute.Tensor, rows: cute.Tensor, delta: cute.Tensor, k_scale: cute.Tensor, units: cute.Tensor,
        dq: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch.

        q, k INT8, v, do: (H, S, D). q_t, k_t, do_t: e4m3 (H, D, S), queries in the order of `pairs`, keys of
        `pair_rows`. rows: (H, S / N, .), see `Data.rows`. delta: -delta in parts, (H, S, 16). k_scale: (H, S / 128).
        units: of dv and dk, (H, 2). dq: FP16 zeros (H, D S), to which blocks of dQ^T are added by register.
        """
        M, N, D, g = self.M, self.N, self.D, self.groups
        q_t, k_t, do_t = (
            cute.make_tensor(cute.recast_ptr(x.iterator, dtype=E4M3), x.layout) for x in (q_t, k_t, do_t)
        )
        q, k, v, do, q_t, k_t, do_t, delta, dk, dv = (
            cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 2, 0]))
            for x in (q, k, v, do, q_t, k_t, do_t, delta, dk, dv)
        )
        int8 = [warpgroup.MmaI8Op(Int8, Int8, Int32, (64, N, 32), x, K_MAJOR, K_MAJOR) for x in (SMEM, RMEM)]
        wide = [warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, N, 16), x, K_MAJOR, K_MAJOR) for x in (SMEM, RMEM)]
        narrow = [
            warpgroup.MmaF8Op(E4M3, E4M3, Float32, (64, n, 32), x, K_MAJOR, K_MAJOR)
            for n, x in ((D, RMEM), (self.NQ, SMEM))
        ]
        of_dq = (1, 1, 1) if const_expr(self.in_turn) else (g, 1, 1) if const_expr(D == 128) else (1, g, 1)
        mmas = tuple(cute.make_tiled_mma(x, (g, 1, 1)) for x in (*int8, *wide, narrow[0]))
        mmas = (*mmas, cute.make_tiled_mma(narrow[1], of_dq))
        load, share, row, c = (
            cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SMulticastOp(), LayoutEnum.ROW_MAJOR,
            self.cluster,
        )  # fmt: skip
        atoms, tensors, layouts = [], [], []
        for x, shape, dtype, streamed in (
            (k, (M, D), Int8, 0), (v, (M, D), BFloat16, 0), (k_t, (D, M), E4M3, 0), (q, (N, D), Int8, 1),
            (do, (N, D), BFloat16, 1), (delta, (N, 16), BFloat16, 2), (do_t, (D, N), E4M3, 1), (q_t, (D, N), E4M3, 1),
        ):  # fmt: skip
            make = sm90.make_smem_layout_b if streamed else sm90.make_smem_layout_a
            tile = (64, shape[0], shape[1]) if streamed else (shape[0], 64, shape[1])
            layout = make(row, tile, dtype, 2 if streamed else 1)
            many = c if streamed == 1 else 1
            op = share if many > 1 else load
            atom, tensor = cpasync.make_tiled_tma_atom(op, x, cute.select(layout, mode=[0, 1]), shape, many)
            atoms.append(atom), tensors.append(tensor), layouts.append(layout)
        layouts.append(sm90.make_smem_layout_b(row, (64, N, M), E4M3, 2))
        self.kernel(
            tuple(atoms), tuple(tensors), rows, k_scale, units, dk, dv, dq.iterator, mmas, tuple(layouts)
        ).launch(
            grid=[k.shape[0] // M, k.shape[2], 1], block=[128 * (g + 1), 1, 1], stream=stream, min_blocks_per_mp=1,
            **({"cluster": [c, 1, 1]} if c > 1 else {}),
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, atoms, tensors, rows: cute.Tensor, k_scale: cute.Tensor, units: cute.Tensor, dk: cute.Tensor,
        dv: cute.Tensor, dq: cute.Pointer, mmas, layouts,
    ):  # fmt: skip
        """A block of keys of one head; the first warp loads, warps from the fifth on compute."""
        thread, _, _ = cute.arch.thread_idx()
        block, head, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        types = (Int8, BFloat16, E4M3, Int8, BFloat16, BFloat16, E4M3, E4M3, E4M3)
        tiles = tuple(smem.allocate_tensor(t, x.outer, 1024, swizzle=x.inner) for t, x in zip(types, layouts))
        values = smem.allocate_tensor(Float32, cute.make_layout(self.row_bytes // 2), 128)
        bars = smem.allocate_array(Int64, 21)
        # of two stages or slots each: q, do, do_t, q_t full, the same empty, dS full, dS empty
        full, empty = [bars + 1 + 2 * i for i in range(4)], [bars + 9 + 2 * i for i in range(4)]
        ds_full, ds_empty = bars + 17, bars + 19
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(bars, 1)
                for i in cutlass.range_constexpr(8):
                    cute.arch.mbarrier_init(bars + 1 + i, 1)
                    cute.arch.mbarrier_init(bars + 9 + i, 4 * self.groups * self.cluster)
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(ds_full + i, 4 * self.groups)
                    cute.arch.mbarrier_init(ds_empty + i, 4 * self.parts)
        cute.arch.mbarrier_init_fence()
        self.meet(True)
        steps = rows.shape[1]
        first = (block // self.cluster * self.apart) % steps
        barriers = (bars, tuple(full), tuple(empty), ds_full, ds_empty)
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.registers[1])
            if warp == 0:
                self.load(atoms, tensors, tiles, values, rows, barriers, block, head, steps, first)
        else:
            cute.arch.setmaxregister_increase(self.registers[0])
            index = cute.arch.make_warp_uniform(warp // 4 - 1)
            given = (k_scale, units, dk, dv, dq)
            self.accumulate(mmas, tiles, values, barriers, thread - 128, index, block, head, steps, first, given)
        self.meet(False)

    def meet(self, within):
        """All of a cluster, or within one program."""
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        elif within:
            cute.arch.sync_threads()

    @cute.jit
    def load(
        self, atoms, tensors, tiles, values, rows: cute.Tensor, barriers, block, head, steps: Int32, first: Int32
    ):
        """Keys once, then operands block by block, in programs of a cluster a part each for all."""
        M, N, D = self.M, self.N, self.D
        keys_full, full, empty, _, _ = barriers
        one, many, rank = cute.make_layout(1), cute.make_layout(self.cluster), 0
        if const_expr(self.cluster > 1):
            rank = cute.arch.make_warp_uniform(block % self.cluster)
        keys, steps_of = ((M, D), (block, 0, head)), (None, 0, head)
        wanted = (
            keys, keys, ((D, M), (0, block, head)), ((N, D), steps_of), ((N, D), steps_of), ((N, 16), steps_of),
            ((D, N), (0, None, head)), ((D, N), (0, None, head)),
        )  # fmt: skip
        to_from = []
        for i, (shape, at) in enumerate(wanted):
            shared = i in (3, 4, 6, 7)
            tile = cute.local_tile(tensors[i], shape, at)
            who, whole = (rank, many) if shared else (0, one)
            both = cute.group_modes(tiles[i], 0, 2), cute.group_modes(tile, 0, 2)
            to_from.append(cpasync.tma_partition(atoms[i], who, whole, *both))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(keys_full, 4 * M * D)
        for i in cutlass.range_constexpr(3):
            cute.copy(atoms[i], to_from[i][1], to_from[i][0][None, 0], tma_bar_ptr=keys_full)
        rows_to = values.iterator.toint()
        rows_from = rows.iterator.toint() + Int64(head) * Int64(steps) * self.row_bytes
        stage, phase, at = Int32(0), Int32(1), first
        for _ in cutlass.range(steps, unroll=1):
            for n in cutlass.range_constexpr(4):
                # dK (of three warpgroups dV too) is known to be done a step later: first in stage 1, unused before
                late = n == 3 or (self.in_turn and n == 2)
                cute.arch.mbarrier_wait(empty[n] + stage, phase ^ stage if const_expr(late) else phase)
                many_bytes = (N * D + self.row_bytes, 2 * N * (D + 16), N * D, N * D)[n]
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full[n] + stage, many_bytes)
                    if const_expr(n == 0):
                        size = Int32(self.row_bytes)
                        source = rows_from + Int64(at) * self.row_bytes
                        to = rows_to + stage * self.row_bytes
                        ptx(LOAD, read_only_args=[to, source, size, (full[0] + stage).toint()])
                for i in ((3,), (4, 5), (6,), (7,))[n]:
                    to, source = to_from[i]
                    more = {"mcast_mask": cutlass.Int16(3)} if self.cluster > 1 and i != 5 else {}
                    cute.copy(atoms[i], source[None, at], to[None, stage], tma_bar_ptr=full[n] + stage, **more)
            phase = phase if stage == 0 else phase ^ 1
            stage = stage ^ 1
            at += 1
            if at == steps:
                at = Int32(0)

    def release(self, barrier, everywhere=False):
        """A warp is done with a slot, or with a stage, which is ``everywhere`` in a cluster."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)
            if const_expr(everywhere and self.cluster > 1):
                cute.arch.mbarrier_arrive(barrier, cute.arch.block_idx_in_cluster() ^ 1)

    def publish(self, barrier):
        """A warp's stores are there for tensor cores."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        self.release(barrier)

    def queue(self, product, stage, begin):
        """acc (+)= A B, from A's parts in shared memory to those in registers."""
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
        self, mmas, tiles, values, barriers, thread: Int32, index, block, head, steps: Int32, first: Int32, given
    ):  # fmt: skip
        """Warpgroup ``index``: dK and dV of 64 keys, its share of dQ^T."""
        M, N, D, group = self.M, self.N, self.D, cute.arch.make_warp_uniform(index)
        k_scale, units, dk, dv, dq = given
        keys_full, _, _, ds_full, _ = barriers
        thread, lane = thread % 128, thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        t_s, t_sr, t_p, t_pr, t_out = (m.get_slice(group * 128) for m in mmas[:5])
        t_q = mmas[5].get_slice(0 if const_expr(self.in_turn) else group * 128)
        p_acc = cute.make_rmem_tensor(t_p.partition_shape_C((M, N)), Float32)
        # S, dP and dQ one after the other in the same registers
        s_acc = cute.recast_tensor(p_acc, Int32)
        q_acc = cute.make_tensor(p_acc.iterator, cute.make_rmem_tensor(t_q.partition_shape_C((D, N)), Float32).layout)
        v_acc, k_acc = (cute.make_rmem_tensor(t_out.partition_shape_C((M, D)), Float32) for _ in range(2))
        p_codes, ds_codes = (t_out.make_fragment_A(t_out.partition_shape_A((M, N))) for _ in range(2))
        p = cute.make_rmem_tensor(cute.size(p_acc), Float32)
        pairs = cute.make_rmem_tensor(N // 4, Int32)
        v_acc.fill(0)
        k_acc.fill(0)
        rows_at = values.iterator.toint() + lane % 4 * 8
        ds_at = tiles[8].iterator.toint()
        if const_expr(self.in_turn):
            ds_at += group * (64 * N) + lane * 64 + (warp ^ (lane // 2 % 4)) * 16
        else:
            ds_at += lane * 128 + ((4 * group + warp) ^ (lane % 8)) * 16
        part = 128 * self.NQ
        dq_at = dq.toint() + Int64(head) * Int64(steps) * (part * self.parts) + Int64(thread * 16)
        if const_expr(not self.in_turn):
            dq_at += Int64(group * part)
        # zeros before the first block: every step has one to compute dQ of
        zeros = cute.recast_tensor(ds_codes, Int32)
        for j in cutlass.range_constexpr(cute.size(zeros)):
            zeros[j] = Int32(0)
        self.store_ds(ds_codes, ds_at + M * N)
        self.publish(ds_full + 1)
        cute.arch.mbarrier_wait(keys_full, 0)
        row = 64 * group + 16 * warp + lane // 4
        k_r = self.operand(t_sr, self.k, 32, tiles[0], row, lane)
        v_r = self.operand(t_pr, self.v, 16, tiles[1], row, lane)
        ones = t_pr.make_fragment_A(t_pr.partition_shape_A((M, 16)))
        words = cute.recast_tensor(ones, Int32)
        one = Int32(0x3F803F80) if lane % 4 == 0 else Int32(0x3F80) if lane % 4 == 1 else Int32(0)
        words[0], words[1], words[2], words[3] = one, one, Int32(0), Int32(0)
        a = [t.make_fragment_A(t.partition_A(x)) for t, x in ((t_s, tiles[0]), (t_p, tiles[1]), (t_q, tiles[2]))]
        b = [
            t.make_fragment_B(t.partition_B(x))
            for t, x in zip((t_s, t_p, t_pr, t_out, t_out, t_q), tiles[3:])
        ]  # fmt: skip
        products = (
            (mmas[0], s_acc, a[0], b[0], mmas[1], k_r, self.k),
            (mmas[3], p_acc, None, b[2], mmas[3], ones, 1),
            (mmas[2], p_acc, a[1], b[1], mmas[3], v_r, self.v),
            (mmas[4], v_acc, None, b[3], mmas[4], p_codes, N // 32),
            (mmas[4], k_acc, None, b[4], mmas[4], ds_codes, N // 32),
            (mmas[5], q_acc, a[2], b[5], mmas[5], None, 0),
        )
        scale = k_scale[head, (block * M + 64 * group) // 128]
        fixed = (products, barriers, p, pairs, rows_at, ds_at, dq_at, scale, group)
        at = first  # of the block before, whose dQ is next; zeros may go anywhere
        if const_expr(self.unrolled):
            phase = Int32(0)
            for pair in cutlass.range(steps // 2, unroll=1):
                for stage in cutlass.range_constexpr(2):
                    self.step(fixed, pair * 2 + stage, stage, phase, at)
                    at = first + pair * 2 + stage
                    at = at - steps if at >= steps else at
                phase = phase ^ 1
        else:
            for n in cutlass.range(steps, unroll=1):
                self.step(fixed, n, n & 1, n >> 1 & 1, at)
                at = first + n
                at = at - steps if at >= steps else at
        warpgroup.wait_group(0)
        if (group == steps % 3) | const_expr(not self.in_turn):
            cute.arch.mbarrier_wait(ds_full + 1, steps >> 1 & 1)
            warpgroup.fence()
            self.queue(products[5], 1, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            self.add(q_acc, dq_at + Int64(at) * (part * self.parts))
        for acc, to, unit in ((v_acc, dv, units[head, 0]), (k_acc, dk, units[head, 1])):
            out = mmas[4].get_slice(group * 128 + thread).partition_C(cute.local_tile(to, (M, D), (block, 0, head)))
            for i in cutlass.range_constexpr(cute.size(acc)):
                out[i] = (acc[i] * unit).to(BFloat16)

    @cute.jit
    def step(self, fixed, n: Int32, stage, phase: Int32, before: Int32):
        """Block n; dQ of the block before, which is added at block ``before``."""
        products, barriers, p, pairs, rows_at, ds_at, dq_at, scale, group = fixed
        s, delta, dp, dv, dk, dq = products
        _, full, empty, ds_full, ds_empty = barriers
        other = 1 - stage
        cute.arch.mbarrier_wait(full[0] + stage, phase)
        warpgroup.fence()
        self.queue(s, stage, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        self.release(empty[3] + other, True)  # dK of the block before
        if const_expr(self.in_turn):
            self.release(empty[2] + other, True)
        self.probabilities(s[1], p, pairs, rows_at + stage * self.row_bytes, scale)
        self.pack(p, pairs, dv[5])
        self.release(empty[0] + stage, True)
        cute.arch.mbarrier_wait(full[1] + stage, phase)
        cute.arch.mbarrier_wait(full[2] + stage, phase)
        warpgroup.fence()
        self.queue(delta, stage, True)
        self.queue(dp, stage, False)
        warpgroup.commit_group()
        self.queue(dv, stage, False)
        warpgroup.commit_group()
        if const_expr(not self.in_turn):
            cute.arch.mbarrier_wait(ds_full + other, phase)
        cute.arch.mbarrier_wait(full[3] + stage, phase)
        warpgroup.wait_group(1)
        self.release(empty[1] + stage, True)
        self.gradients(dp[1], p, pairs)
        self.pack(p, pairs, dk[5])
        warpgroup.fence()
        if const_expr(not self.in_turn):
            self.queue(dq, other, True)
            warpgroup.commit_group()
        self.queue(dk, stage, False)
        warpgroup.commit_group()
        cute.arch.mbarrier_wait(ds_empty + stage, phase ^ other)
        self.store_ds(dk[5], ds_at + stage * (self.M * self.N))
        self.publish(ds_full + stage)
        place = dq_at + Int64(before) * (128 * self.NQ * self.parts)
        if const_expr(not self.in_turn):
            warpgroup.wait_group(1)
            self.release(empty[2] + stage, True)
            self.release(ds_empty + other)
            self.add(dq[1], place)
        elif n % 3 == group:
            cute.arch.mbarrier_wait(ds_full + other, phase)
            warpgroup.fence()
            self.queue(dq, other, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            self.release(ds_empty + other)
            self.add(dq[1], place)
