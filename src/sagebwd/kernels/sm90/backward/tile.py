"""Tile arithmetic of the backward's kernels: `sagebwd.kernels.common.tile` compiled by Gluon; 8-bit operands.

A head size that is no power of two has operands and accumulators by channel pieces; else one piece is all.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from sagebwd.kernels.common import strided, tile
from sagebwd.kernels.sm90.operands import bwd_postprocess, bwd_preprocess

elements = gluon.jit(strided.elements.fn)
sequence = gluon.jit(tile.sequence.fn)
padded_block = gluon.jit(tile.padded_block.fn)
block_range = gluon.jit(tile.block_range.fn)
visible = gluon.jit(tile.visible.fn)
interleave = gluon.jit(tile.interleave.fn)
sum_scale_of_length = gluon.jit(bwd_postprocess.sum_scale_of_length.fn)
float8_factor = gluon.jit(bwd_preprocess.float8_factor.fn)
delta_parts_weight = gluon.jit(bwd_preprocess.delta_parts_weight.fn)
DELTA_CHANNELS = gl.constexpr(bwd_preprocess.DELTA_CHANNELS.value)
load_tile = tma.async_copy_global_to_shared
store_tile = tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # triton 3.7 renamed it

LOG2_E = gl.constexpr(tile.LOG2_E.value)
# Rows of a warpgroup's product.
ROWS = gl.constexpr(64)
# Computing warpgroups of a program.
CONSUMERS = gl.constexpr(2)
# Registers of a thread that computes; the loading warp's 128 threads keep 24 each.
REGISTERS = gl.constexpr(240)


PACKED_FLOAT8 = gl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
    "mov.b32 $0, {low, high}; }"
)


@gluon.jit
def program_number(after):
    """Program id, read again once ``after`` is known.

    What a kernel needs only at its end is so computed there, and takes no registers in its loop.
    """
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r,r", [after], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def opaque(x):
    """An int32 that the compiler cannot trace: what follows from it is computed here, not kept in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def uniform(x):
    """An int32 that is the same in all threads, in a uniform register: loops have few others left.

    Impure, so that the compiler cannot move it to where some threads of a warp are inactive.
    """
    return gl.inline_asm_elementwise(
        "redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def ring(step, COUNT: gl.constexpr):
    """Stage of a step in a ring of COUNT stages, and its barriers' phase parity."""
    if COUNT == 1:
        return 0, step & 1
    elif COUNT == 2:  # of a sign nothing is known, so that a division by 2 is four instructions
        return step & 1, (step >> 1) & 1
    else:
        return step % COUNT, (step // COUNT) & 1


@gluon.jit
def writes_done(after):
    """Wait, once ``after`` is known, until TMA has written, not only read, all that this thread has given it."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, $1;", "=r,r", [after], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def exp2(x):
    """2**x, results under 2**-126 flushed to 0; without the flush each takes three instructions more."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def inside_band(
    first_q, first_k, lower, upper, QUERIES: gl.constexpr, KEYS: gl.constexpr, HAS_LOWER: gl.constexpr,
    HAS_UPPER: gl.constexpr,
):  # fmt: skip
    """Whether every one of KEYS keys is visible to every one of QUERIES queries: no edge of the band cuts the tile."""
    inside = first_q == first_q
    if HAS_LOWER:
        inside = inside & (first_k - (first_q + QUERIES - 1) >= lower)
    if HAS_UPPER:
        inside = inside & (first_k + KEYS - 1 - first_q <= upper)
    return inside


@gluon.jit
def operand(x, LAYOUT: gl.constexpr):
    """Accumulator as an 8-bit operand of the next product: the same registers under other names."""
    return gl.convert_layout(interleave(x), LAYOUT, assert_trivial=True)


@gluon.jit
def result(x, LAYOUT: gl.constexpr):
    """Inverse of `operand`."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    x = x.reshape([M, N // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4]).reshape([M, N])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def operand_float8(x, LAYOUT: gl.constexpr):
    """e4m3 of x, saturated, as an operand."""
    return gl.inline_asm_elementwise(
        PACKED_FLOAT8, "=r,f,f,f,f", [operand(x, LAYOUT)], dtype=gl.float8e4nv, is_pure=True, pack=4
    )


@gluon.jit
def paired_rows(low, high):
    """Two rows' 8-bit codes side by side: what STSM transposes in units of 16 bits."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;", "=r,=r,r,r", [low, high], dtype=gl.int16,
        is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def store_transposed(memory, codes):
    """8-bit codes of a (64, N) score tile to shared memory as (N, 64), rows r and r + 8 of every 16 side by side.

    memory: (N, 32) int16.
    """
    N: gl.constexpr = codes.shape[1]
    low, high = gl.split(codes.to(gl.int8, bitcast=True).reshape([4, 2, 8, N]).permute([0, 2, 3, 1]))
    memory.store(paired_rows(low.reshape([32, N]), high.reshape([32, N])).permute([1, 0]))


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """The same shared memory as another type."""
    return memory._reinterpret(dtype, shape, layout, _semantic=_semantic)


@builtin
def add_tile(descriptor, coordinates, memory, _semantic=None):
    """Add shared memory to a block of a tensor by TMA, asynchronously; `tma.store_wait` waits for its being read.

    Only the builder has it in triton 3.6 and 3.7.
    """
    at = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, at, memory.handle)


@gluon.jit
def load_pieces(desc, row, column, full, memory, slot, PIECES: gl.constexpr):
    """A block of rows, PIECES boxes of channels side by side, to as many buffers from ``slot`` times as many on."""
    for piece in gl.static_range(PIECES):
        load_tile(desc, [row, column + piece * memory.shape[2]], full, memory.index(slot * PIECES + piece))


@gluon.jit
def load_copy(desc, row, column, full, memory, slot, PIECES: gl.constexpr):
    """Load a block of a transposed copy, whose rows are channels, as `load_pieces` does."""
    for piece in gl.static_range(PIECES):
        load_tile(desc, [row + piece * memory.shape[1], column], full, memory.index(slot * PIECES + piece))


@gluon.jit
def pieces_of(memory, slot, PIECES: gl.constexpr):
    """Buffers of a slot, as a tuple."""
    out = ()
    for piece in gl.static_range(PIECES):
        out += (memory.index(slot * PIECES + piece),)
    return out


@gluon.jit
def parts_of_copy(memory, slot, SIZE: gl.constexpr, COUNT: gl.constexpr):
    """Channels of a slot's transposed copy, SIZE at a time: a buffer each, or slices of one buffer."""
    out = ()
    for part in gl.static_range(COUNT):
        if memory.shape[1] == SIZE:
            out += (memory.index(slot * COUNT + part),)
        else:
            out += (memory.index(slot).slice(part * SIZE, SIZE, 0),)
    return out


@gluon.jit
def loaded(pieces, LAYOUT: gl.constexpr):
    """Load pieces into registers."""
    return [piece.load(LAYOUT) for piece in pieces]


@gluon.jit
def repeated(x, COUNT: gl.constexpr):
    """Tuple of COUNT times x."""
    out = ()
    for _ in gl.static_range(COUNT):
        out += (x,)
    return out


@gluon.jit
def scaled(pieces, factor):
    """Pieces times a scalar."""
    return [piece * factor for piece in pieces]


@gluon.jit
def halves(x, LAYOUT: gl.constexpr):
    """Halves of an accumulator's columns: the same registers under other names."""
    N: gl.constexpr = x.shape[1] // 2
    low, high = gl.split(x.reshape([x.shape[0], 2, N]).permute([0, 2, 1]))
    return gl.convert_layout(low, LAYOUT, assert_trivial=True), gl.convert_layout(high, LAYOUT, assert_trivial=True)


@gluon.jit
def joined(low, high, LAYOUT: gl.constexpr):
    """Inverse of `halves`."""
    x = gl.join(low, high).permute([0, 2, 1]).reshape([low.shape[0], low.shape[1] * 2])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)
