"""Forward on sm_90a in CuTe DSL: O = softmax(Q K^T) V, Q and K as INT8 codes, P and V in 16 bit.

One warp loads by TMA into a ring of stages; two or three warpgroups of 64 queries compute. A warpgroup queues S of the
next block and P V of this one when it is its turn, then its softmax runs under the other warpgroups' products. Blocks of
keys are taken from the last to the first, so that those on the diagonal, which need masks, come first.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Boolean, Float16, Float32, Int8, Int32, Uint8, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from sagebwd.kernels.sm90.config import REGISTERS, SCALE_BLOCK, Arguments, Variant

ptx = cute.arch.inline_ptx
PACK = {
    "bfloat16": "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
    "float16": "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};",
}
DTYPES = {"bfloat16": BFloat16, "float16": Float16}
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# A row's maximum may grow by this many octaves before O and its sum are rescaled.
OCTAVES = 8.0
# A smaller scale of a row would turn a masked score, -inf, into NaN.
TINY = 1e-30
ROUND = 12582912.0
# A cubic's relative error of 2**x over [-.5, .5] is 7e-5, which 16-bit P does not see.


def exp2(x):
    """2**x by the special function unit, results under 2**-126 flushed to 0."""
    return ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def log2(x):
    return ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


POLYNOMIAL = (
    "{ .reg .f32 t, f, p; .reg .s32 a, b; fma.rn.f32 t, {$r0}, {$r1}, {$r2}; sub.rn.f32 f, {$r2}, t; "
    "fma.rn.f32 f, {$r0}, {$r1}, f; fma.rn.f32 p, f, 0f3D61FB95, 0f3E786F0C; fma.rn.f32 p, p, f, 0f3F31798E; "
    "fma.rn.f32 p, p, f, 0f3F7FFB49; max.f32 t, t, 0f4B3FFF82; mov.b32 a, t; shl.b32 a, a, 23; mov.b32 b, p; "
    "add.s32 a, a, b; mov.b32 {$w0}, a; }"
)


def exp2_polynomial(s, factor, shift):
    """2**(s * factor + shift - ROUND) on the FMA pipe, shift an integer: a cubic over [-.5, .5], the integer added to
    its exponent. Under 2**-126 it stays there."""
    return ptx(POLYNOMIAL, write_only_types=[Float32], read_only_args=[s, factor, shift])


class Forward:
    """One variant of the kernel; call it through `sagebwd.kernels.sm90.cache`."""

    def __init__(self, variant: Variant):
        self.variant, self.tile = variant, variant.tile
        tile = variant.tile
        self.D, self.N, self.M = variant.head_dim, tile.keys, tile.queries
        self.groups, self.stages = tile.warpgroups, tile.stages
        self.dtype = DTYPES[variant.dtype]
        self.pack_text = PACK[variant.dtype]
        self.masks = variant.lower or variant.upper
        self.varlen = variant.varlen
        self.registers = REGISTERS[tile.warpgroups]
        self.turns = tile.warpgroups > 1 and tile.turns

    def rows(self, x: cute.Tensor, transposed: bool = False):
        """x, (B, H, T, D) or packed (T, H, D), as (T, D, H[, B]); transposed, (D, T, H[, B])."""
        t, d, rest = (0, 2, [1]) if self.varlen else (2, 3, [1, 0])
        order = [d, t, *rest] if transposed else [t, d, *rest]
        return cute.make_tensor(x.iterator, cute.select(x.layout, mode=order))

    def values(self, x: cute.Tensor):
        """x, (B, H, T) or packed (H, T), as (T, H[, B])."""
        return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 0] if self.varlen else [2, 1, 0]))

    def of_head(self, x: cute.Tensor, head, batch):
        return x[None, None, head] if const_expr(self.varlen) else x[None, None, head, batch]

    def of_head_values(self, x: cute.Tensor, head, batch):
        return x[None, head] if const_expr(self.varlen) else x[None, head, batch]

    @cute.jit
    def __call__(
        self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse: cute.Tensor,
        row_max: cute.Tensor | None, q_scale: cute.Tensor, k_scale: cute.Tensor, key_mask: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None, cu_seqlens_k: cute.Tensor | None, longest: Int32, lower: Int32, upper: Int32,
        scale: Float32, stream: cuda.CUstream,
    ):  # fmt: skip
        M, N, D = self.M, self.N, self.D
        heads, heads_k = q.shape[1], k.shape[1]
        batch = q.shape[0]
        if const_expr(self.varlen):
            batch = cu_seqlens_q.shape[0] - 1
        q, k, o = self.rows(q), self.rows(k), self.rows(o)
        v = self.rows(v, transposed=True)
        lse, q_scale = self.values(lse), self.values(q_scale)
        if const_expr(row_max is not None):
            row_max = self.values(row_max)
        major = OperandMajorMode.K
        source = warpgroup.OperandSource
        qk = cute.make_tiled_mma(
            warpgroup.MmaI8Op(Int8, Int8, Int32, (64, N, 32), source.SMEM, major, major), (self.groups, 1, 1)
        )
        pv = cute.make_tiled_mma(
            warpgroup.MmaF16BF16Op(self.dtype, Float32, (64, D, 16), source.RMEM, major, OperandMajorMode.MN),
            (self.groups, 1, 1),
        )
        row = LayoutEnum.ROW_MAJOR
        lq = sm90.make_smem_layout_a(row, (M, N, D), Int8, 1)
        lk = sm90.make_smem_layout_b(row, (M, N, D), Int8, self.stages)
        lv = sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, (M, D, N), self.dtype, self.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        aq, tq = cpasync.make_tiled_tma_atom(load, q, cute.select(lq, mode=[0, 1]), (M, D))
        ak, tk = cpasync.make_tiled_tma_atom(load, k, cute.select(lk, mode=[0, 1]), (N, D))
        av, tv = cpasync.make_tiled_tma_atom(load, v, cute.select(lv, mode=[0, 1]), (D, N))
        blocks_q = cute.ceil_div(longest, M)
        self.kernel(
            aq, tq, ak, tk, av, tv, o, lse, row_max, q_scale, k_scale, key_mask, cu_seqlens_q, cu_seqlens_k, lower, upper,
            scale * LOG2_E, blocks_q, heads, heads // heads_k, qk, pv, lq, lk, lv,
        ).launch(
            grid=[blocks_q * heads * batch, 1, 1], block=[128 * (self.groups + 1), 1, 1], stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, aq: cute.CopyAtom, tq: cute.Tensor, ak: cute.CopyAtom, tk: cute.Tensor, av: cute.CopyAtom,
        tv: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, row_max: cute.Tensor | None, q_scale: cute.Tensor,
        k_scale: cute.Tensor, key_mask: cute.Tensor | None, cu_q: cute.Tensor | None, cu_k: cute.Tensor | None,
        lower: Int32, upper: Int32, scale_2: Float32, blocks_q: Int32, heads: Int32, group: Int32,
        qk: cute.TiledMma, pv: cute.TiledMma, lq: cute.ComposedLayout, lk: cute.ComposedLayout,
        lv: cute.ComposedLayout,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        sq = smem.allocate_tensor(Int8, lq.outer, 1024, swizzle=lq.inner)
        sk = smem.allocate_tensor(Int8, lk.outer, 1024, swizzle=lk.inner)
        sv = smem.allocate_tensor(self.dtype, lv.outer, 1024, swizzle=lv.inner)
        words = SCALE_BLOCK // 32
        seen_keys = smem.allocate_tensor(Int32, cute.make_layout((words, self.stages)), 16)
        bars = smem.allocate_array(cutlass.Int64, 1 + 4 * self.stages)
        q_full, k_full, v_full = bars, bars + 1, bars + 1 + self.stages
        k_empty, v_empty = bars + 1 + 2 * self.stages, bars + 1 + 3 * self.stages
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(q_full, 1)
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(k_full + i, 1)
                    cute.arch.mbarrier_init(v_full + i, 1)
                    cute.arch.mbarrier_init(k_empty + i, 4 * self.groups)
                    cute.arch.mbarrier_init(v_empty + i, 4 * self.groups)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        bars = (q_full, k_full, v_full, k_empty, v_empty)
        call = (tq, tk, cu_q, cu_k, lower, upper, blocks_q, heads, group)
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.registers[1])
            if warp == 0:
                self.load(aq, ak, av, tv, sq, sk, sv, seen_keys, key_mask, bars, call)
        else:
            cute.arch.setmaxregister_increase(self.registers[0])
            self.attend(
                qk, pv, sq, sk, sv, seen_keys, bars, call, tid - 128, warp // 4 - 1, o, lse, row_max,
                q_scale, k_scale, scale_2,
            )  # fmt: skip

    @cute.jit
    def place(self, call):
        """Of this program: batch, head, head of K, first query, the sequences' first tokens and lengths, the band's bounds."""
        tq, tk, cu_q, cu_k, lower, upper, blocks_q, heads, group = call
        tile, _, _ = cute.arch.block_idx()
        batch_head = tile // blocks_q
        # the last queries see the most keys: they start first
        block_q = blocks_q - 1 - tile % blocks_q
        batch = batch_head // heads
        head = batch_head % heads
        start_q, start_k = Int32(0), Int32(0)
        length_q, length_k = Int32(tq.shape[0]), Int32(tk.shape[0])
        if const_expr(self.varlen):
            start_q, start_k = cu_q[batch], cu_k[batch]
            length_q, length_k = cu_q[batch + 1] - start_q, cu_k[batch + 1] - start_k
            lower, upper = lower + length_k - length_q, upper + length_k - length_q
        return batch, head, head // group, block_q * self.M, start_q, start_k, length_q, length_k, lower, upper

    @cute.jit
    def blocks(self, first_q: Int32, length_k: Int32, lower: Int32, upper: Int32):
        """Blocks of keys of a tile: (begin, full_begin, full_end, end), all masked but [full_begin, full_end)."""
        N = self.N
        begin, full_begin, full_end, end = Int32(0), Int32(0), length_k, length_k
        if const_expr(self.variant.lower):
            begin = cutlass.max(first_q + lower, 0)
            full_begin = cutlass.max(first_q + self.M - 1 + lower, 0)
        if const_expr(self.variant.upper):
            end = cutlass.min(cutlass.max(first_q + self.M + upper, 0), length_k)
            full_end = cutlass.min(cutlass.max(first_q + 1 + upper, 0), length_k)
        begin = begin // N
        end = cutlass.max((end + N - 1) // N, begin)
        # rows without a key take one masked block of the sequence's own, and write zeros
        begin = cutlass.min(begin, cutlass.max((length_k + N - 1) // N - 1, 0))
        end = cutlass.max(end, begin + 1)
        if const_expr(self.variant.key_mask):
            full_begin, full_end = end, end
        else:
            full_begin = cutlass.min(cutlass.max((full_begin + N - 1) // N, begin), end)
            full_end = cutlass.min(cutlass.max(full_end // N, full_begin), end)
        return begin, full_begin, full_end, end

    @cute.jit
    def load(self, aq, ak, av, tv, sq, sk, sv, seen_keys, key_mask, bars, call):
        """The producer warp."""
        M, N, D, stages = self.M, self.N, self.D, self.stages
        tq, tk = call[0], call[1]
        q_full, k_full, v_full, k_empty, v_empty = bars
        one = cute.make_layout(1)
        stage, phase = Int32(0), Int32(1)
        lane = cute.arch.lane_idx()
        batch, head, head_k, first_q, start_q, start_k, length_q, length_k, lower, upper = self.place(call)
        if first_q < length_q:
            begin, full_begin, full_end, end = self.blocks(first_q, length_k, lower, upper)
            x, y, z = self.of_head(tk, head_k, batch), self.of_head(tv, head_k, batch), self.of_head(tq, head, batch)
            if const_expr(self.varlen):
                x, y = cute.domain_offset((start_k, 0), x), cute.domain_offset((0, start_k), y)
                z = cute.domain_offset((start_q, 0), z)
            gq = cute.local_tile(z, (M, D), (first_q // M, 0))
            gk = cute.local_tile(x, (N, D), (None, 0))
            gv = cute.local_tile(y, (D, N), (0, None))
            q_s, q_g = cpasync.tma_partition(aq, 0, one, cute.group_modes(sq, 0, 2), cute.group_modes(gq, 0, 2))
            k_s, k_g = cpasync.tma_partition(ak, 0, one, cute.group_modes(sk, 0, 2), cute.group_modes(gk, 0, 2))
            v_s, v_g = cpasync.tma_partition(av, 0, one, cute.group_modes(sv, 0, 2), cute.group_modes(gv, 0, 2))
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(q_full, M * D)
            cute.copy(aq, q_g, q_s[None, 0], tma_bar_ptr=q_full)
            for step in cutlass.range(end - begin, unroll=1):
                block = end - 1 - step
                cute.arch.mbarrier_wait(k_empty + stage, phase)
                if const_expr(self.variant.key_mask):
                    for word in cutlass.range_constexpr(N // 32):
                        key = block * N + word * 32 + lane
                        keep = Int32(0)
                        if key < length_k:
                            keep = Int32(key_mask[batch, key])
                        seen_keys[word, stage] = cute.arch.vote_ballot_sync(keep != 0)
                    cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(k_full + stage, N * D)
                cute.copy(ak, k_g[None, block], k_s[None, stage], tma_bar_ptr=k_full + stage)
                cute.arch.mbarrier_wait(v_empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(v_full + stage, N * D * 2)
                cute.copy(av, v_g[None, block], v_s[None, stage], tma_bar_ptr=v_full + stage)
                stage += 1
                if stage == stages:
                    stage = Int32(0)
                    phase ^= 1

    def wait_turn(self, warpgroup_index):
        if const_expr(self.turns):
            cute.arch.barrier(barrier_id=1 + warpgroup_index, number_of_threads=256)

    def pass_turn(self, warpgroup_index):
        if const_expr(self.turns):
            following = (warpgroup_index + 1) % self.groups
            if const_expr(self.groups == 2):
                following = 1 - warpgroup_index
            cute.arch.barrier_arrive(barrier_id=1 + following, number_of_threads=256)

    def release(self, bar):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(bar)

    @cute.jit
    def queue_s(self, qk: cute.TiledMma, acc: cute.Tensor, rq: cute.Tensor, rk: cute.Tensor, stage: Int32):
        """S of the block in ``stage``."""
        warpgroup.fence()
        atom = cute.make_mma_atom(qk.op)
        for k in cutlass.range_constexpr(self.D // 32):
            atom.set(warpgroup.Field.ACCUMULATE, k > 0)
            cute.gemm(atom, acc, rq[None, None, k, 0], rk[None, None, k, stage], acc)
        warpgroup.commit_group()

    @cute.jit
    def queue_o(self, pv: cute.TiledMma, acc: cute.Tensor, rp: cute.Tensor, rv: cute.Tensor, stage: Int32):
        """O += P V of the block in ``stage``."""
        atom = cute.make_mma_atom(pv.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        for k in cutlass.range_constexpr(self.N // 16):
            cute.gemm(atom, acc, rp[None, None, k], rv[None, None, k, stage], acc)
        warpgroup.commit_group()

    @cute.jit
    def maxima(self, acc: cute.Tensor, x: cute.Tensor, seen: cute.Tensor, top: cute.Tensor, total: cute.Tensor,
                decay: cute.Tensor, scale: cute.Tensor, k_scale: Float32, bounds, words, first: cutlass.Constexpr,
                masked: cutlass.Constexpr):  # fmt: skip
        """What exponents are relative to; whether O must be rescaled by decay. Register i: row i // 2 % 2, keys in pairs."""
        negative = const_expr(self.variant.negative)
        unseen = Float32.inf if negative else -Float32.inf
        size = cute.size(acc)
        best_of = cutlass.min if negative else cutlass.max
        tops, factors = [], []
        if const_expr(masked):
            low, high = bounds
            for i in cutlass.range_constexpr(size):
                r, column = i // 2 % 2, i // 4 * 8 + i % 2
                keep = column < high[r]
                if const_expr(self.variant.lower):
                    keep = keep & (column >= low[r])
                if const_expr(self.variant.key_mask):
                    keep = keep & ((words[column // 32] & (1 << (column % 32))) != 0)
                x[i] = acc[i].to(Float32) if keep else unseen
        for r in cutlass.range_constexpr(2):
            at = [i for i in range(size) if i // 2 % 2 == r]
            factor = scale[r] * k_scale
            if const_expr(masked):
                best = x[at[0]]
                for i in at[1:]:
                    best = (cute.arch.fmin if negative else cute.arch.fmax)(best, x[i])
            else:
                best = acc[at[0]]
                for i in at[1:]:
                    best = best_of(best, acc[i])
                best = best.to(Float32)
            m = best * factor
            if const_expr(not self.tile.vote or first):
                m = cute.arch.fmax(m, cute.arch.shuffle_sync_bfly(m, offset=1))
                m = cute.arch.fmax(m, cute.arch.shuffle_sync_bfly(m, offset=2))
            tops.append(m)
            factors.append(factor)
            seen[r] = m if const_expr(first) else cute.arch.fmax(seen[r], m)
        moved = Boolean(False)
        if const_expr(first):
            for r in cutlass.range_constexpr(2):
                top[r] = self.reference(tops[r])
        elif const_expr(self.tile.vote):
            moved = cute.arch.vote_any_sync((tops[0] > top[0] + OCTAVES) | (tops[1] > top[1] + OCTAVES))
            if moved:
                for r in cutlass.range_constexpr(2):
                    m = cute.arch.fmax(tops[r], cute.arch.shuffle_sync_bfly(tops[r], offset=1))
                    m = cute.arch.fmax(m, cute.arch.shuffle_sync_bfly(m, offset=2))
                    m = self.reference(m) if m > top[r] + OCTAVES else top[r]
                    decay[r] = exp2(top[r] - m) if m > top[r] else Float32(1)
                    total[r] = total[r] * decay[r]
                    top[r] = m
        else:
            for r in cutlass.range_constexpr(2):
                m = self.reference(tops[r]) if tops[r] > top[r] + OCTAVES else top[r]
                decay[r] = exp2(top[r] - m) if m > top[r] else Float32(1)
                total[r] = total[r] * decay[r]
                top[r] = m
            moved = cute.arch.vote_any_sync(decay[0] + decay[1] < 2.0)
        return moved, factors

    @cute.jit
    def exponentials(self, acc: cute.Tensor, x: cute.Tensor, top: cute.Tensor, total: cute.Tensor, factors,
                     masked: cutlass.Constexpr):  # fmt: skip
        """P into x, of scores acc, or x where masked."""
        size = cute.size(acc)
        for r in cutlass.range_constexpr(2):
            at = [i for i in range(size) if i // 2 % 2 == r]
            shift = -top[r]
            if const_expr(masked):
                shift = Float32(0) if top[r] == -Float32.inf else shift
            part = Float32(0)
            for n, i in enumerate(at):
                s = x[i] if const_expr(masked) else acc[i].to(Float32)
                if const_expr(not masked and (n * self.tile.polynomial) % 16 + self.tile.polynomial >= 16):
                    x[i] = exp2_polynomial(s, factors[r], shift + ROUND)
                else:
                    x[i] = exp2(s * factors[r] + shift)
                part = part + x[i]
            total[r] = total[r] + part

    def reference(self, m):
        """What exponents are relative to where the largest is m."""
        if const_expr(self.tile.polynomial > 0):
            return ptx("cvt.rpi.f32.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[m])
        return m

    @cute.jit
    def pack(self, x: cute.Tensor, rp: cute.Tensor):
        rp = cute.recast_tensor(rp, Int32)
        for j in cutlass.range_constexpr(cute.size(rp)):
            rp[j] = ptx(self.pack_text, write_only_types=[Int32], read_only_args=[x[2 * j], x[2 * j + 1]])

    def pin(self, words: cute.Tensor):
        """Keep what makes P before what follows: ptxas would else wait for P V first and only then exponentiate."""
        word = words[0]
        for i in range(1, cute.size(words)):
            word = word | words[i]
        # never true, of which ptxas knows nothing
        ptx("{ .reg .pred p; setp.lt.s32 p, {$r0}, 0; @p nanosleep.u32 0; }", read_only_args=[word])

    @cute.jit
    def rescale(self, acc: cute.Tensor, decay: cute.Tensor, moved: Boolean):
        if moved:
            for i in cutlass.range_constexpr(cute.size(acc)):
                acc[i] = acc[i] * decay[i // 2 % 2]

    @cute.jit
    def bounds(self, block: Int32, rows: cute.Tensor, length_k: Int32, lower: Int32, upper: Int32):
        """First column that each of a thread's rows sees in a block, and the first beyond, less the thread's own."""
        base = block * self.N + cute.arch.lane_idx() % 4 * 2
        low, high = [], []
        for r in cutlass.range_constexpr(2):
            end = length_k
            if const_expr(self.variant.upper):
                end = cutlass.min(end, rows[r] + upper + 1)
            high.append(end - base)
            low.append(rows[r] + lower - base)
        return low, high

    def words(self, seen_keys: cute.Tensor, stage):
        """Which of a block's keys the key mask keeps, a bit each, shifted by the thread's first column."""
        if const_expr(not self.variant.key_mask):
            return ()
        shift = cute.arch.lane_idx() % 4 * 2
        return [seen_keys[w, stage] >> shift for w in range(self.N // 32)]

    @cute.jit
    def clear_end(self, sv: cute.Tensor, stage: Int32, keys_left: Int32, tid: Int32, index: Int32):
        """Zero V's tokens past the end of a packed sequence: P is 0 there, but 0 times a neighbour's NaN is NaN."""
        N, D = self.N, self.D
        if keys_left < N:
            for i in cutlass.range(N * D // 128, unroll=1):
                at = i * 128 + tid
                if at // D >= keys_left:
                    sv[at % D, at // D, stage] = self.dtype(0.0)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=5 + index, number_of_threads=128)

    @cute.jit
    def step(
        self, mma, fragments, memory, bars, state, scale, k_scale: Float32, block: Int32, rows: cute.Tensor, limits,
        index: Int32, stage: Int32, phase: Int32, masked: cutlass.Constexpr,
        source: cutlass.Constexpr = 0, target: cutlass.Constexpr = 0,
    ):  # fmt: skip
        """S of ``block`` and P V of the block before it; the stage and phase of this one."""
        qk, pv = mma
        rq, rk, rv, acc_s, acc_o, rps, x = fragments
        rp, rp_next = rps[source], rps[target]
        q_full, k_full, v_full, k_empty, v_empty = bars
        seen, top, total, decay = state
        length_k, lower, upper = limits
        stage_v, phase_v = stage, phase
        stage += 1
        if stage == self.stages:
            stage = Int32(0)
            phase ^= 1
        turns, pin, early = const_expr(self.tile.turns), const_expr(self.tile.pin), const_expr(source != target)
        cute.arch.mbarrier_wait(k_full + stage, phase)
        self.wait_turn(index)
        self.queue_s(qk, acc_s, rq, rk, stage)
        if const_expr(not pin):
            cute.arch.mbarrier_wait(v_full + stage_v, phase_v)
        self.queue_o(pv, acc_o, rp, rv, stage_v)
        if const_expr(turns == 1):
            self.pass_turn(index)
        bounds, words = ((), ()), ()
        if const_expr(masked):
            bounds = self.bounds(block, rows, length_k, lower, upper)
            words = self.words(memory, stage)
        warpgroup.wait_group(1)
        if const_expr(turns == 2):
            self.pass_turn(index)
        # which keys the mask keeps is read from the stage itself: it is released once that has been used
        held = const_expr(masked and self.variant.key_mask)
        if const_expr(not held):
            self.release(k_empty + stage)
        if const_expr(turns == 3):
            warpgroup.wait_group(0)
            self.pass_turn(index)
            self.release(v_empty + stage_v)
        moved, factors = self.maxima(acc_s, x, seen, top, total, decay, scale, k_scale, bounds, words, False, masked)
        if const_expr(held):
            self.release(k_empty + stage)
        if const_expr(turns == 4):
            warpgroup.wait_group(0)
            self.pass_turn(index)
            self.release(v_empty + stage_v)
        self.exponentials(acc_s, x, top, total, factors, masked)
        if const_expr(early):
            self.pack(x, rp_next)
        if const_expr(pin):
            # V of this block, for the next step
            cute.arch.mbarrier_wait(v_full + stage, phase)
            self.pin(cute.recast_tensor(rp_next if early else total, Int32))
        if const_expr(turns < 3):
            warpgroup.wait_group(0)
            self.release(v_empty + stage_v)
        if const_expr(not early):
            self.pack(x, rp_next)
        self.rescale(acc_o, decay, moved)
        return stage, phase

    @cute.jit
    def steps(self, fixed, last: Int32, count: Int32, stage: Int32, phase: Int32, masked: cutlass.Constexpr):
        """``count`` steps from block ``last`` down."""
        mma, fragments, memory, bars, state, scale, k_scale, z, padded, lane, rows, limits, index = fixed
        count = cutlass.max(count, 0)
        pairs = const_expr(self.tile.early and not masked)
        single = count
        if const_expr(pairs):
            single = count % 2
        for b in cutlass.range(single, unroll=1):
            block = last - b
            s_k = k_scale[z, padded + block * self.N // SCALE_BLOCK, lane % 4]
            stage, phase = self.step(
                mma, fragments, memory, bars, state, scale, s_k, block, rows, limits, index, stage, phase, masked
            )
        if const_expr(pairs):
            for b in cutlass.range(count // 2, unroll=1):
                for parity in cutlass.range_constexpr(2):
                    block = last - single - 2 * b - parity
                    s_k = k_scale[z, padded + block * self.N // SCALE_BLOCK, lane % 4]
                    stage, phase = self.step(
                        mma, fragments, memory, bars, state, scale, s_k, block, rows, limits, index, stage, phase,
                        masked, parity, 1 - parity,
                    )  # fmt: skip
        return stage, phase

    @cute.jit
    def attend(
        self, qk: cute.TiledMma, pv: cute.TiledMma, sq, sk, sv, seen_keys, bars, call,
        tid: Int32, index: Int32, o: cute.Tensor, lse: cute.Tensor, row_max: cute.Tensor | None,
        q_scale: cute.Tensor, k_scale: cute.Tensor, scale_2: Float32,
    ):  # fmt: skip
        """A computing warpgroup: O and lse of 64 queries of each tile."""
        M, N, D, stages = self.M, self.N, self.D, self.stages
        q_full, k_full, v_full, k_empty, v_empty = bars
        index = cute.arch.make_warp_uniform(index)
        tq = qk.get_slice(index * 128)
        tp = pv.get_slice(index * 128)
        rq = tq.make_fragment_A(tq.partition_A(sq))
        rk = tq.make_fragment_B(tq.partition_B(sk))
        rv = tp.make_fragment_B(tp.partition_B(sv))
        acc_s = cute.make_rmem_tensor(tq.partition_shape_C((M, N)), Int32)
        acc_o = cute.make_rmem_tensor(tp.partition_shape_C((M, D)), Float32)
        rps = [tp.make_fragment_A(tp.partition_shape_A((M, N))) for _ in range(2 if self.tile.early else 1)]
        x = cute.make_rmem_tensor(cute.size(acc_s), Float32)
        seen, top, total, decay, scale = [cute.make_rmem_tensor(2, Float32) for _ in range(5)]
        rows = cute.make_rmem_tensor(2, Int32)
        state = (seen, top, total, decay)
        mma = (qk, pv)
        fragments = (rq, rk, rv, acc_s, acc_o, rps, x)
        lane = tid % 32
        if const_expr(self.turns):
            if index == 0:
                cute.arch.barrier_arrive(barrier_id=1, number_of_threads=256)
        stage, phase = Int32(0), Int32(0)
        batch, head, head_k, first_q, start_q, start_k, length_q, length_k, lower, upper = self.place(call)
        if first_q < length_q:
            begin, full_begin, full_end, end = self.blocks(first_q, length_k, lower, upper)
            limits = (length_k, lower, upper)
            scales = self.of_head_values(q_scale, head, batch)
            z, padded = batch * (call[7] // call[8]) + head_k, Int32(0)
            if const_expr(self.varlen):
                z, padded = head_k, start_k // SCALE_BLOCK + batch
            row = first_q + index * 64 + (tid % 128) // 32 * 16 + lane // 4
            for r in cutlass.range_constexpr(2):
                rows[r] = row + 8 * r
                total[r] = Float32(0)
                scale[r] = Float32(0)
                if rows[r] < length_q:
                    scale[r] = scales[start_q + rows[r]] * scale_2
                # false of NaN, which stays
                scale[r] = Float32(TINY) if scale[r] < TINY else scale[r]
                if const_expr(self.variant.negative):
                    scale[r] = -scale[r]
            acc_o.fill(0)
            block = end - 1
            s_k = k_scale[z, padded + block * N // SCALE_BLOCK, lane % 4]
            cute.arch.mbarrier_wait(q_full, 0)
            cute.arch.mbarrier_wait(k_full + stage, phase)
            self.queue_s(qk, acc_s, rq, rk, stage)
            bounds, words = self.bounds(block, rows, length_k, lower, upper), self.words(seen_keys, stage)
            warpgroup.wait_group(0)
            _, factors = self.maxima(acc_s, x, seen, top, total, decay, scale, s_k, bounds, words, True, True)
            self.exponentials(acc_s, x, top, total, factors, True)
            self.release(k_empty + stage)
            self.pack(x, rps[0])
            cute.arch.mbarrier_wait(v_full + stage, phase)
            if const_expr(self.varlen):
                self.clear_end(sv, stage, length_k - block * N, tid % 128, index)
            step = (mma, fragments, seen_keys, bars, state, scale, k_scale, z, padded, lane, rows, limits, index)
            if const_expr(self.variant.upper or self.variant.key_mask):
                stage, phase = self.steps(step, end - 2, end - 1 - full_end, stage, phase, True)
            top_block = cutlass.min(full_end, end - 1)
            stage, phase = self.steps(step, top_block - 1, top_block - full_begin, stage, phase, False)
            if const_expr(self.variant.lower or self.variant.key_mask):
                low_block = cutlass.min(full_begin, end - 1)
                stage, phase = self.steps(step, low_block - 1, low_block - begin, stage, phase, True)
            cute.arch.mbarrier_wait(v_full + stage, phase)
            warpgroup.fence()
            self.queue_o(pv, acc_o, rps[0], rv, stage)
            warpgroup.wait_group(0)
            self.write(
                acc_o,
                seen,
                top,
                total,
                rows,
                length_q,
                start_q,
                lane,
                self.of_head(o, head, batch),
                self.of_head_values(lse, head, batch),
                None if const_expr(row_max is None) else self.of_head_values(row_max, head, batch),
            )
        if const_expr(self.turns):
            if index == 0:  # the arrival that nobody waits for
                cute.arch.barrier(barrier_id=1, number_of_threads=256)

    @cute.jit
    def write(self, acc_o, seen, top, total, rows, length_q: Int32, start_q: Int32, lane: Int32,
              o: cute.Tensor, lse: cute.Tensor, row_max: cute.Tensor | None):  # fmt: skip
        for r in cutlass.range_constexpr(2):
            total[r] = total[r] + cute.arch.shuffle_sync_bfly(total[r], offset=1)
            total[r] = total[r] + cute.arch.shuffle_sync_bfly(total[r], offset=2)
            seen[r] = cute.arch.fmax(seen[r], cute.arch.shuffle_sync_bfly(seen[r], offset=1))
            seen[r] = cute.arch.fmax(seen[r], cute.arch.shuffle_sync_bfly(seen[r], offset=2))
            unseen = total[r] == 0.0
            inverse = 1.0 / total[r]
            if rows[r] < length_q:
                at = start_q + rows[r]
                if lane % 4 == 0:
                    value = (top[r] + log2(total[r])) * LN_2
                    lse[at] = -Float32.inf if unseen else value
                    if const_expr(row_max is not None):
                        row_max[at] = seen[r]
                pairs = cute.recast_tensor(o[at, None], Int32)
                for i in cutlass.range_constexpr(self.D // 8):
                    j = 4 * i + 2 * r
                    pair = ptx(
                        self.pack_text, write_only_types=[Int32],
                        read_only_args=[acc_o[j] * inverse, acc_o[j + 1] * inverse],
                    )  # fmt: skip
                    pairs[4 * i + lane % 4] = Int32(0) if unseen else pair

    def placeholders(self) -> list:
        """Arguments of the call's types, shapes unknown, to compile for."""
        variant, D = self.variant, self.D
        size = cute.sym_int
        batch, heads, heads_k, tokens_q, tokens_k = (size() for _ in range(5))

        def compact(dtype, *shape):
            order = tuple(reversed(range(len(shape))))
            aligned = 16 if dtype is Int8 else dtype.width // 8
            return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=aligned)

        def strided(*shape):
            strides = [cute.sym_int64(divisibility=8) for _ in shape[1:]]
            return make_fake_tensor(self.dtype, shape, (*strides, 1), assumed_align=16)

        if variant.varlen:
            q, k, v, o = (tokens_q, heads, D), (tokens_k, heads_k, D), (tokens_k, heads_k, D), (tokens_q, heads, D)
            per_query = heads, tokens_q
        else:
            q, k, o = (batch, heads, tokens_q, D), (batch, heads_k, tokens_k, D), (batch, heads, tokens_q, D)
            v, per_query = k, (batch, heads, tokens_q)
        values = [compact(Float32, *per_query) for _ in range(3)]
        sequences = [compact(Int32, size()) if variant.varlen else None for _ in range(2)]
        return list(
            Arguments(
                q=compact(Int8, *q),
                k=compact(Int8, *k),
                v=strided(*v),
                o=strided(*o),
                lse=values[0],
                row_max=values[1] if variant.row_max else None,
                q_scale=values[2],
                k_scale=compact(Float32, size(), size(), 4),
                key_mask=compact(Uint8, batch, tokens_k) if variant.key_mask else None,
                cu_seqlens_q=sequences[0],
                cu_seqlens_k=sequences[1],
                longest=Int32(0),
                lower=Int32(0),
                upper=Int32(0),
                scale=Float32(0),
            )
        ) + [make_fake_stream()]
