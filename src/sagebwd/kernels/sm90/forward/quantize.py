"""Quantize Q to INT8 in the warpgroup that uses it: psi with one scale a row (`operands.quantize_k` does K).

A recipe that rotates quantizes Q R (`rotation`). Or read the codes that a pass before made.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from sagebwd.kernels.sm90.forward.rotation import Share, Threads, root, turned
from sagebwd.kernels.sm90.forward.variant import Variant

ptx = cute.arch.inline_ptx
# Threads that share a row, and those that share one that is rotated, whose sums are then mostly a thread's own.
LANES, LANES_ROTATED = 8, 2
# Channels side by side that a thread has at most.
CHUNK = 16
# Adding it leaves an integer in the low bits, rounded half to even.
ROUND = 12582912.0
INVERSE_127 = 1.0 / 127.0
UNPACK = {
    "bfloat16": "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;",
    "float16": "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }",
}
LOAD = {
    2: "ld.global.nc.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
    4: "ld.global.nc.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
}
STORE = {1: "st.global.b32 [{$r0}], {$r1};", 4: "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"}
BITS = "and.b32 {$w0}, {$r0}, 0x7fffffff;"
PACK_CODES = (
    "{ .reg .b32 a, b; prmt.b32 a, {$r0}, {$r1}, 0x0040; prmt.b32 b, {$r2}, {$r3}, 0x0040;"
    " prmt.b32 {$w0}, a, b, 0x5410; }"
)
MOVE = "mov.b32 {$w0}, {$r0};"
SQRT = "sqrt.approx.f32 {$w0}, {$r0};"
FMA = "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};"
DP4A = "dp4a.s32.s32 {$w0}, {$r0}, {$r0}, {$r1};"
# Codes of a load, 16 bytes, and what a norm of them is rounded by at most.
CODES, NORM_ROUNDING = 16, 1 + 2.0**-20


def as_bits(x):
    """FP32's bits."""
    return ptx(MOVE, write_only_types=[Int32], read_only_args=[x])


def as_float(x):
    """The FP32 number of some bits."""
    return ptx(MOVE, write_only_types=[Float32], read_only_args=[x])


def fma(a, b, c):
    """a b + c, rounded once."""
    return ptx(FMA, write_only_types=[Float32], read_only_args=[a, b, c])


class Quantizer:
    """Q's codes of one variant."""

    def __init__(self, variant: Variant) -> None:
        self.variant, self.D = variant, variant.head_dim
        self.lanes = LANES_ROTATED if variant.rotation else LANES
        self.elements = self.D // self.lanes  # of a row, of a thread
        self.share = Share(self.lanes, math.gcd(CHUNK, self.elements), self.elements)
        self.channels = self.share.channels()
        self.load_words = 4 if self.share.chunk % 8 == 0 else 2
        self.store_words = CHUNK // 4 if variant.rotation else 1

    @cute.jit
    def rows(
        self, q: cute.Tensor, q_int8: cute.Tensor, scales: cute.Tensor, memory, work_tile, first: Int32, thread: Int32
    ):
        """Quantize 64 rows from ``first`` of the tile on: INT8, scales (also to global memory) and norms.

        q, q_int8: (T, D) of the head; scales (T,). In shared memory are zeros where rows are past the sequence's end.
        """
        words, row_scales, row_norms = memory.q_words, memory.q_scale, memory.q_norm
        lanes, chunk, size = self.lanes, self.share.chunk, self.store_words
        lane = thread % lanes
        tokens, parts = [], []
        for part in cutlass.range_constexpr(64 * lanes // 128):
            tokens.append(work_tile.first_q + first + part * (128 // lanes) + thread // lanes)
            parts.append(self.load(q, work_tile.start_q + tokens[-1], lane, tokens[-1] < work_tile.length_q))
        for part in cutlass.range_constexpr(64 * lanes // 128):
            row, token, pairs = tokens[part] - work_tile.first_q, tokens[part], parts[part]
            inside = token < work_tile.length_q
            x = []
            for pair in pairs:
                x += list(ptx(UNPACK[self.variant.dtype], write_only_types=[Float32] * 2, read_only_args=[pair]))
            if const_expr(self.variant.rotation):
                x = self.turned(x, lane)
            largest = ptx(BITS, write_only_types=[Int32], read_only_args=[as_bits(x[0])])
            for one in x[1:]:
                bits = ptx(BITS, write_only_types=[Int32], read_only_args=[as_bits(one)])
                largest = cutlass.max(largest, bits)  # of bits: NaN wins
            for offset in self.offsets():
                largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, offset=offset))
            scale = self.scale(as_float(largest))
            inverse = 1.0 / scale
            norm = Float32(0)
            if const_expr(row_norms is not None):
                norm = self.norm(x, scale)
            found = []
            for i in cutlass.range_constexpr(0, self.elements, 4):
                four = [as_bits(self.code(x[i + j], scale, inverse)) for j in range(4)]
                found.append(ptx(PACK_CODES, write_only_types=[Int32], read_only_args=four))
            for i in cutlass.range_constexpr(0, self.elements // 4, size):
                side_by_side = cute.make_rmem_tensor(size, Int32)
                for j in cutlass.range_constexpr(size):
                    side_by_side[j] = found[i + j]
                group = (lane * (chunk // 4) + self.channels[4 * i] // 4) // size
                cute.autovec_copy(side_by_side, cute.local_tile(words[row, None, 0], (size,), (group,)))
            if const_expr(self.variant.rotation):
                scale, norm = scale * root(self.variant.rotation), norm * root(self.variant.rotation)
            if lane == 0:
                row_scales[row] = scale
                if const_expr(row_norms is not None):
                    row_norms[row] = norm
            if inside:
                at = q_int8[work_tile.start_q + token, None].iterator.toint() + Int64(lane * chunk)
                for i in cutlass.range_constexpr(0, self.elements // 4, size):
                    ptx(STORE[size], read_only_args=[at + self.channels[4 * i], *found[i : i + size]])
                if lane == 0:
                    scales[work_tile.start_q + token] = scale

    @cute.jit
    def load_codes(self, q_int8: cute.Tensor, scales: cute.Tensor, memory, work_tile, first: Int32, thread: Int32):
        """Read codes and scales of 64 rows from ``first`` of the tile on; norms of them. As of `rows`.

        head_dim is a power of two from 64 on. Of codes the norm is exact: scale times the root of their squares' sum.
        """
        words, row_scales, row_norms = memory.q_words, memory.q_scale, memory.q_norm
        lanes = const_expr(self.D // CODES)
        lane, loads = thread % lanes, []
        for part in cutlass.range_constexpr(64 * lanes // 128):
            row = first + part * (128 // lanes) + thread // lanes
            token = work_tile.first_q + row
            four, scale = cute.make_rmem_tensor(4, Int32), cute.make_rmem_tensor(1, Float32)
            four.fill(0)
            scale.fill(1.0)
            if token < work_tile.length_q:
                at = q_int8[work_tile.start_q + token, None].iterator.toint() + Int64(lane * CODES)
                got = ptx(LOAD[4], write_only_types=[Int32] * 4, read_only_args=[at])
                for j in cutlass.range_constexpr(4):
                    four[j] = got[j]
                scale[0] = scales[work_tile.start_q + token]
            loads.append((row, four, scale))
        for row, four, scale in loads:
            cute.autovec_copy(four, cute.local_tile(words[row, None, 0], (4,), (lane,)))
            if const_expr(row_norms is not None):
                squares = Int32(0)
                for j in cutlass.range_constexpr(4):
                    squares = ptx(DP4A, write_only_types=[Int32], read_only_args=[four[j], squares])
                for bit in cutlass.range_constexpr(lanes.bit_length() - 1):
                    squares = squares + cute.arch.shuffle_sync_bfly(squares, offset=1 << bit)
                norm = ptx(SQRT, write_only_types=[Float32], read_only_args=[Float32(squares)])
                if lane == 0:
                    row_norms[row] = norm * scale[0] * NORM_ROUNDING
            if lane == 0:
                row_scales[row] = scale[0]

    def offsets(self) -> list[int]:
        """Of a row's lanes, by which each meets all others."""
        return [1 << bit for bit in range(self.lanes.bit_length() - 1)]

    def turned(self, x: list, lane) -> list:
        """A thread's share of a row times R, but for `root`."""

        def select(condition, value, other):
            if isinstance(value, float) and isinstance(other, float):
                value, other = Float32(value), Float32(other)
            return cutlass.select_(condition, value, other)

        def exchange(one, offset):
            return cute.arch.shuffle_sync_bfly(one, offset=offset)

        return turned(x, self.variant.rotation, self.share, Threads(lane, exchange, select, fma))

    @cute.jit
    def norm(self, x, scale):
        """At least the norm of a row as codes, each of which is rounded by half a scale at most."""
        total = Float32(0)
        for one in x:
            total = fma(one, one, total)
        for offset in self.offsets():
            total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
        return ptx(SQRT, write_only_types=[Float32], read_only_args=[total]) + 0.5 * self.D**0.5 * scale

    @cute.jit
    def load(self, q: cute.Tensor, token: Int32, lane: Int32, inside):
        """A thread's share of a row, two 16-bit numbers a word; zeros past the end."""
        size = self.load_words
        words = cute.make_rmem_tensor(self.elements // 2, Int32)
        words.fill(0)
        if inside:
            at = q[token, None].iterator.toint() + Int64(lane * (2 * self.share.chunk))
            for i in cutlass.range_constexpr(0, self.elements // 2, size):
                channel = self.channels[2 * i]
                lanes = self.lanes_there(channel)
                mine = lane if const_expr(lanes < self.lanes) else 0
                if mine < lanes:
                    got = ptx(LOAD[size], write_only_types=[Int32] * size, read_only_args=[at + 2 * channel])
                    for j in cutlass.range_constexpr(size):
                        words[i + j] = got[j]
        return [words[i] for i in range(self.elements // 2)]

    def lanes_there(self, channel: int) -> int:
        """How many of a row's lanes, the first of which has a channel, have theirs in memory."""
        return max(0, min(self.lanes, -(-(self.variant.columns[0] - channel) // self.share.chunk)))

    def code(self, x, scale, inverse):
        """x / scale in the low bits, rounded half to even; of sums, which are rounded, without IEEE's division."""
        return fma(x, inverse, Float32(ROUND)) if self.variant.rotation else self.divided(x, scale, inverse) + ROUND

    def divided(self, x, scale, inverse):
        """x / scale, rounded as IEEE division is (`kernels.tile.divide`)."""
        quotient = x * inverse
        return fma(fma(quotient, -scale, x), inverse, quotient)

    @cute.jit
    def scale(self, largest):
        """psi's scale: a 127th of the largest magnitude; of zeros 1, of infinity itself."""
        scale = self.divided(largest, Float32(127.0), Float32(INVERSE_127))
        scale = largest if largest == Float32.inf else scale
        return Float32(1.0) if largest == 0.0 else scale
