"""What a warpgroup of the kernel does in registers: exponentials, dS, operands of both, and the addition of dQ."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

ptx = cute.arch.inline_ptx
PAIR = "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};"
CODES = (
    "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, {$r1}, {$r0}; cvt.rn.satfinite.e4m3x2.f32 h, {$r3}, {$r2};"
    " mov.b32 {$w0}, {l, h}; }"
)
PAIRED_CODES = (
    "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f16x2 l, {$r0}; cvt.rn.satfinite.e4m3x2.f16x2 h, {$r1};"
    " mov.b32 {$w0}, {l, h}; }"
)
PAIRED_PRODUCT = "{ .reg .b32 t; cvt.rn.f16x2.f32 t, {$r2}, {$r1}; mul.rn.f16x2 {$w0}, {$r0}, t; }"
# two BF16 and two FP16 as FP32
UNPACK = (
    "{ .reg .b32 a, b, x, y; .reg .b16 c, d; ld.shared.v2.b32 {a, b}, [{$r0}]; shl.b32 x, a, 16;"
    " and.b32 y, a, 0xffff0000; mov.b32 {$w0}, x; mov.b32 {$w1}, y; mov.b32 {c, d}, b; cvt.f32.f16 {$w2}, c;"
    " cvt.f32.f16 {$w3}, d; }"
)
ADD = "red.global.add.noftz.v4.f16x2 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
STORE = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
TWO = "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];"


class Registers:
    """By `Form`'s N, NQ, M, D, half, planes and in_turn."""

    @cute.jit
    def probabilities(self, s: cute.Tensor, p: cute.Tensor, pairs: cute.Tensor, rows: Int32, k_scale: Float32):
        """P, in FP32 or in pairs."""
        for j in cutlass.range_constexpr(self.N // 8):
            if const_expr(self.planes):
                less0, less1 = ptx(TWO, write_only_types=[Float32] * 2, read_only_args=[rows + 32 * j])
                at = rows + 32 * j + 4 * self.N
                scale0, scale1 = ptx(TWO, write_only_types=[Float32] * 2, read_only_args=[at])
                add0, add1 = -less0, -less1
            else:
                at = rows + 32 * j
                scale0, scale1, add0, add1 = ptx(UNPACK, write_only_types=[Float32] * 4, read_only_args=[at])
            scale0, scale1 = scale0 * k_scale, scale1 * k_scale
            for i in (4 * j, 4 * j + 2):
                x = s[i].to(Float32) * scale0 + add0, s[i + 1].to(Float32) * scale1 + add1
                e = [
                    ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[y]) for y in x
                ]
                if const_expr(self.half):
                    pairs[i // 2] = ptx(PAIR, write_only_types=[Int32], read_only_args=e)
                else:
                    p[i], p[i + 1] = e

    @cute.jit
    def gradients(self, dp: cute.Tensor, p: cute.Tensor, pairs: cute.Tensor):
        """dS in place of P."""
        for i in cutlass.range_constexpr(0, self.N // 2, 2):
            if const_expr(self.half):
                given = [pairs[i // 2], dp[i], dp[i + 1]]
                pairs[i // 2] = ptx(PAIRED_PRODUCT, write_only_types=[Int32], read_only_args=given)
            else:
                p[i], p[i + 1] = p[i] * dp[i], p[i + 1] * dp[i + 1]

    @cute.jit
    def pack(self, p: cute.Tensor, pairs: cute.Tensor, codes: cute.Tensor):
        """The same as an e4m3 operand."""
        words = cute.recast_tensor(codes, Int32)
        for j in cutlass.range_constexpr(cute.size(words)):
            i = j // 2 * 8 + j % 2 * 2
            if const_expr(self.half):
                four = [pairs[i // 2], pairs[i // 2 + 2]]
                words[j] = ptx(PAIRED_CODES, write_only_types=[Int32], read_only_args=four)
            else:
                four = [p[i], p[i + 1], p[i + 4], p[i + 5]]
                words[j] = ptx(CODES, write_only_types=[Int32], read_only_args=four)

    @cute.jit
    def store_ds(self, codes: cute.Tensor, at: Int32):
        """dS transposed, in 16-bit pairs of keys r, r + 8."""
        words = cute.recast_tensor(codes, Int32)
        for h in cutlass.range_constexpr(self.N // 32):
            w = []
            for m in (4 * h, 4 * h + 2):
                for select in ("0x5140", "0x7362"):
                    prmt = "prmt.b32 {$w0}, {$r0}, {$r1}, " + select + ";"
                    w.append(ptx(prmt, write_only_types=[Int32], read_only_args=[words[m], words[m + 1]]))
            ptx(STORE, read_only_args=[at + h * 32 * (64 if const_expr(self.in_turn) else 128), *w])

    @cute.jit
    def add(self, acc: cute.Tensor, at: Int64):
        """A part of a block of dQ^T, 16 bytes a thread."""
        for c in cutlass.range_constexpr(0, self.NQ // 2, 8):
            two = [[acc[c + i], acc[c + i + 1]] for i in (0, 2, 4, 6)]
            w = [ptx(PAIR, write_only_types=[Int32], read_only_args=x) for x in two]
            ptx(ADD, read_only_args=[at + 256 * c, *w])

    @cute.jit
    def operand(self, slices, parts: cutlass.Constexpr, channels: cutlass.Constexpr, tile: cute.Tensor, row, lane):
        """A's first parts, of so many channels and 32 bytes a row, in registers."""
        fragment = slices.make_fragment_A(slices.partition_shape_A((self.M, channels * max(parts, 1))))
        words = cute.recast_tensor(fragment, Int32)
        pitch = min(32 // channels * self.D, 128)
        for i in cutlass.range_constexpr(4 * parts):
            r, b = row + i % 2 * 8, 32 * (i // 4) + 16 * (i // 2 % 2)
            swizzle = r % 8 if const_expr(pitch == 128) else r // 2 % 4
            at = b // 128 * self.M * 128 + r * pitch + ((b // 16 % 8) ^ swizzle) * 16 + lane % 4 * 4
            place = tile.iterator.toint() + at
            words[i] = ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[place])
        return fragment
