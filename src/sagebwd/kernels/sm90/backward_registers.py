"""What a warpgroup of the backward does in registers: exponentials, dS, operands of both, and the addition of dQ.

Between exponentials and e4m3 the entries of P and dS are FP32, or pairs of FP16 of two neighbouring queries: half the
registers, seven more bits than e4m3 keeps, and half as many conversions more.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from sagebwd.kernels.sm90.softmax import PACK, exp2

ptx = cute.arch.inline_ptx
PAIR = PACK["float16"]
CODES = (
    "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, {$r1}, {$r0}; cvt.rn.satfinite.e4m3x2.f32 h, {$r3}, {$r2};"
    " mov.b32 {$w0}, {l, h}; }"
)
CODES_OF_PAIRS = (
    "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f16x2 l, {$r0}; cvt.rn.satfinite.e4m3x2.f16x2 h, {$r1};"
    " mov.b32 {$w0}, {l, h}; }"
)
PRODUCT = "{ .reg .b32 t; cvt.rn.f16x2.f32 t, {$r2}, {$r1}; mul.rn.f16x2 {$w0}, {$r0}, t; }"
LOAD_TWO = "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];"
STORE_DS = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
ADD_DQ = "red.global.add.noftz.v4.f16x2 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
# 1024, 1 and 1 / 1024 (`fp8_rows.delta_parts_weight`), two a word.
WEIGHTS = {"bfloat16": (0x3F804480, 0x3A80), "float16": (0x3C006400, 0x1400)}


@cute.jit
def load_rows(values: cute.Tensor, rows: Int32, first: cutlass.Constexpr, N: cutlass.Constexpr):
    """Row values of eights of queries from ``first`` on: lse and Q's scale of two queries each; rows: where the
    thread's first query has its values."""
    for j in cutlass.range_constexpr(cute.size(values) // 4):
        for plane in (0, 1):
            at = rows + 32 * (first + j) + 4 * N * plane
            two = ptx(LOAD_TWO, write_only_types=[Float32] * 2, read_only_args=[at])
            values[4 * j + 2 * plane], values[4 * j + 2 * plane + 1] = two


@cute.jit
def probabilities(
    s: cute.Tensor, entries: cute.Tensor, ahead: cute.Tensor | None, rows: Int32, scales: cute.Tensor,
    N: cutlass.Constexpr, one_scale: cutlass.Constexpr,
):  # fmt: skip
    """P of S; ahead: row values that `load_rows` has read, then ``scales`` are those of the thread's keys."""
    known = 0 if const_expr(ahead is None) else cute.size(ahead) // 4
    for j in cutlass.range_constexpr(N // 8):
        if const_expr(j < known):
            less, factor = [ahead[4 * j + e] for e in (0, 1)], [ahead[4 * j + e] for e in (2, 3)]
        else:
            values = cute.make_rmem_tensor(4, Float32)
            load_rows(values, rows, j, N)
            less, factor = [values[0], values[1]], [values[2], values[3]]
        for r in cutlass.range_constexpr(2):
            scale = scales[r * (1 - one_scale)]
            scores = [s[4 * j + 2 * r + e].to(Float32) * (factor[e] * scale) for e in (0, 1)]
            p = [exp2(scores[e] - less[e]) for e in (0, 1)]
            if const_expr(cute.size(entries) < cute.size(s)):
                entries[2 * j + r] = ptx(PAIR, write_only_types=[Int32], read_only_args=p)
            else:
                entries[4 * j + 2 * r], entries[4 * j + 2 * r + 1] = p


@cute.jit
def gradients(dp: cute.Tensor, entries: cute.Tensor):
    """dS = P (dP - delta) in P's place."""
    for i in cutlass.range_constexpr(cute.size(entries)):
        if const_expr(cute.size(entries) < cute.size(dp)):
            given = [entries[i], dp[2 * i], dp[2 * i + 1]]
            entries[i] = ptx(PRODUCT, write_only_types=[Int32], read_only_args=given)
        else:
            entries[i] = entries[i] * dp[i]


@cute.jit
def pack(entries: cute.Tensor, codes: cute.Tensor):
    """The same as an e4m3 operand, saturated."""
    words = cute.recast_tensor(codes, Int32)
    for j in cutlass.range_constexpr(cute.size(words)):
        i = j // 2 * 4 + j % 2
        if const_expr(cute.size(entries) == 2 * cute.size(words)):
            words[j] = ptx(CODES_OF_PAIRS, write_only_types=[Int32], read_only_args=[entries[i], entries[i + 2]])
        else:
            four = [entries[2 * i + n] for n in (0, 1, 4, 5)]
            words[j] = ptx(CODES, write_only_types=[Int32], read_only_args=four)


@cute.jit
def mask(codes: cute.Tensor, kept):
    """Zeros where a query does not see a key; kept: of each entry, in the order of a product's registers."""
    words = cute.recast_tensor(codes, Int32)
    for j in cutlass.range_constexpr(cute.size(words)):
        i = 2 * (j // 2 * 4 + j % 2)
        bits = Int32(0)
        for byte, n in enumerate((i, i + 1, i + 4, i + 5)):
            bits = bits | (Int32((0xFF, 0xFF00, 0xFF0000, -0x1000000)[byte]) if kept[n] else Int32(0))
        words[j] = words[j] & bits


def place_ds(index: Int32, warp: Int32, lane: Int32, M: int, N: int) -> Int32:
    """Where a thread's first row of a warpgroup's dS begins (`store_ds`): rows are 128 bytes of keys, or 64."""
    if M % 128 == 0:
        return index // 2 * (128 * N) + lane * 128 + ((4 * (index % 2) + warp) ^ (lane % 8)) * 16
    return index * (64 * N) + lane * 64 + (warp ^ (lane // 2 % 4)) * 16


@cute.jit
def store_ds(words: cute.Tensor, at: Int32, M: cutlass.Constexpr, N: cutlass.Constexpr):
    """dS transposed, (queries, keys), keys in the order of `tile.pair_rows`: two rows' codes side by side."""
    for h in cutlass.range_constexpr(N // 32):
        w = []
        for m in (4 * h, 4 * h + 2):
            for select in ("0x5140", "0x7362"):
                prmt = "prmt.b32 {$w0}, {$r0}, {$r1}, " + select + ";"
                w.append(ptx(prmt, write_only_types=[Int32], read_only_args=[words[m], words[m + 1]]))
        ptx(STORE_DS, read_only_args=[at + h * 32 * (128 if const_expr(M % 128 == 0) else 64), *w])


@cute.jit
def add_dq(acc: cute.Tensor, at: Int64, unit: Float32):
    """64 channels of a block of dQ^T to their sums, 16 bytes a thread: 512 contiguous ones a warp."""
    for c in cutlass.range_constexpr(0, cute.size(acc), 8):
        two = [[acc[c + i] * unit, acc[c + i + 1] * unit] for i in (0, 2, 4, 6)]
        w = [ptx(PAIR, write_only_types=[Int32], read_only_args=x) for x in two]
        ptx(ADD_DQ, read_only_args=[at + 256 * c, *w])


@cute.jit
def write_row(acc: cute.Tensor, r: cutlass.Constexpr, at: Int64, unit: Float32, dtype: cutlass.Constexpr):
    """The first or second of a thread's rows of dK or dV to ``at``, where its first column is."""
    for j in cutlass.range_constexpr(cute.size(acc) // 4):
        two = [acc[4 * j + 2 * r] * unit, acc[4 * j + 2 * r + 1] * unit]
        word = ptx(PACK[dtype], write_only_types=[Int32], read_only_args=two)
        ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[at + 16 * j, word])


@cute.jit
def load_operand(slices, tile: cute.Tensor, row: Int32, lane: Int32, parts: int, channels: int) -> cute.Tensor:
    """A's first parts, of ``channels`` and 32 bytes a row, of a tile that is swizzled as wide as a row is."""
    M, D = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    fragment = slices.make_fragment_A(slices.partition_shape_A((M, channels * max(parts, 1))))
    words = cute.recast_tensor(fragment, Int32)
    pitch = min(32 // channels * D, 128)
    for i in cutlass.range_constexpr(4 * parts):
        r, byte = row + i % 2 * 8, 32 * (i // 4) + 16 * (i // 2 % 2)
        swizzle = r % 8 if const_expr(pitch == 128) else r // 2 % 4
        at = byte // 128 * M * 128 + r * pitch + ((byte // 16 % 8) ^ swizzle) * 16 + lane % 4 * 4
        place = tile.iterator.toint() + at
        words[i] = ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[place])
    return fragment


@cute.jit
def fill_weights(fragment: cute.Tensor, lane: Int32, dtype: cutlass.Constexpr):
    """What the channels of delta's parts are multiplied by, as an operand of 64 equal rows."""
    words = cute.recast_tensor(fragment, Int32)
    first, second = WEIGHTS[dtype]
    word = Int32(first) if lane % 4 == 0 else Int32(second) if lane % 4 == 1 else Int32(0)
    words[0], words[1], words[2], words[3] = word, word, Int32(0), Int32(0)


@cute.jit
def fp8_scale(bits: Int32):
    """2^-g, as `operands.fp8_copies.float8_scale`: NaN where the largest was not finite."""
    scale = cutlass.max((bits + 0x1FFFFF) >> 23, 16) - 8 << 23
    scale = scale if bits < 0x7F800000 else Int32(0x7FC00000)
    return ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[scale])
