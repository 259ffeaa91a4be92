"""FP32 sums of e4m3 products, of which the tensor core keeps some 13 bits of the sum that they are added to.

Hopper aligns the terms of an e4m3 product to the largest of them, the accumulator, and cuts what lies below: a sum of
thousands of terms of one sign comes out too small by several percent. So each step's product is a new one, and is
added up in FP32 registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


@gluon.jit
def new_product(codes, memory, none):
    """codes times what lies in memory, transposed; in flight. none: zeros as the result has them."""
    return warpgroup_mma(codes, memory.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def add_here(x, y):
    """x + y where it says so: LLVM would put it off to where it is next needed, and hold both until then."""
    return gl.inline_asm_elementwise("add.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=False, pack=1)
