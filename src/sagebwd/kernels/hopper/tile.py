"""What the Gluon kernels share: `sagebwd.kernels.tile`'s index arithmetic, compiled by Gluon, and 8-bit operands."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from sagebwd.kernels import tile

sequence = gluon.jit(tile.sequence.fn)
padded_block = gluon.jit(tile.padded_block.fn)
block_range = gluon.jit(tile.block_range.fn)
visible = gluon.jit(tile.visible.fn)
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # triton 3.8 renamed it

LOG2_E = gl.constexpr(tile.LOG2_E.value)
LN_2 = gl.constexpr(tile.LN_2.value)
ROUND = gl.constexpr(tile.ROUND.value)
TINY = gl.constexpr(tile.TINY.value)
# Rows of a warpgroup's product.
ROWS = gl.constexpr(64)


@gluon.jit
def exp2(x):
    """2**x, results under 2**-126 flushed to 0; without the flush each takes three instructions more."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def operand(codes, LAYOUT: gl.constexpr):
    """8-bit results as the operand of the next product: the same registers under other names."""
    M: gl.constexpr = codes.shape[0]
    N: gl.constexpr = codes.shape[1]
    codes = codes.reshape([M, N // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([M, N])
    return gl.convert_layout(codes, LAYOUT, assert_trivial=True)


@gluon.jit
def operand_codes(x, LAYOUT: gl.constexpr):
    """Integers + ROUND as an INT8 operand."""
    return operand(x.to(gl.int32, bitcast=True).to(gl.int8), LAYOUT)


@gluon.jit
def operand_float8(x, LAYOUT: gl.constexpr):
    """e4m3 of x, saturated, as an operand."""
    return operand(x.to(gl.float8e4nv), LAYOUT)


@gluon.jit
def float8_scale(bits):
    """2^-g: what takes back `float8_factor` of the same bits; NaN where the largest was not finite, as codes are."""
    exponent = gl.maximum((bits + 0x1FFFFF) >> 23, 16)
    return gl.where(bits >= 0x7F800000, float("nan"), ((exponent - 8) << 23).to(gl.float32, bitcast=True))
