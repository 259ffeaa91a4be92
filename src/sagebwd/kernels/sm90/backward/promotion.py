"""FP32 sums of e4m3 products, of which the tensor core keeps some 13 bits of the sum that they are added to.

Hopper aligns the terms of an e4m3 product to the largest of them, the accumulator, and cuts what lies below: a sum of
thousands of terms of one sign comes out too small by several percent. So each step's product is a new one, and is
added up in FP32 registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from sagebwd.kernels.sm90.backward.dq_sums import dq_product
from sagebwd.kernels.sm90.backward.scores import plane
from sagebwd.kernels.sm90.backward.tile import ROWS


@gluon.jit
def new_product(codes, memory, none, never=False):
    """codes times what lies in memory, transposed; in flight.

    none: zeros as the result has them; or what is no longer needed, whose registers the result then takes, and never:
    False for who runs it, but not for Triton, which else drops ``none``.
    """
    return warpgroup_mma(codes, memory.permute((1, 0)), none, use_acc=never, is_async=True)


@gluon.jit
def add_here(x, y, scale):
    """x + y scale where it says so: LLVM would put it off to where it is next needed, and hold both until then."""
    scale, y = gl.broadcast(scale, y)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $2, $3, $1;", "=f,f,f,f", [x, y, scale], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def halves(x, LAYOUT: gl.constexpr):
    """Each half of a result's columns: the same registers under other names."""
    N: gl.constexpr = x.shape[1] // 2
    low, high = gl.split(x.reshape([x.shape[0], 2, N]).permute([0, 2, 1]))
    return gl.convert_layout(low, LAYOUT, assert_trivial=True), gl.convert_layout(high, LAYOUT, assert_trivial=True)


@gluon.jit
def joined(low, high, LAYOUT: gl.constexpr):
    """What `halves` parted."""
    x = gl.join(low, high).permute([0, 2, 1]).reshape([low.shape[0], low.shape[1] * 2])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def add_in_halves(
    dv, dk, p_codes, ds_codes, do_t, q_t, scales, k_t, ds_memory, before, ds_full, phase, never,
    LAYOUT: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """dV and dK with a step's products, and the step before's dQ^T, in flight; where sums are IN_HALVES.

    64 channels at a time in two sets of registers in turn: one's product runs while the other's is added up. The
    second set is free in the end, and the last that is returned.
    """
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    none = gl.zeros([ROWS, ROWS], gl.float32, HALF)
    dv_low, dv_high = halves(dv, HALF)
    dk_low, dk_high = halves(dk, HALF)
    first = new_product(p_codes, do_t.slice(0, ROWS, 0), none)
    second = new_product(p_codes, do_t.slice(ROWS, ROWS, 0), none)
    scale = plane(scales, 0, 1, HALF)  # before the products are waited for
    mbarrier.wait(ds_full.index(before), phase)
    first = warpgroup_mma_wait(1, deps=[first])
    dv_low = add_here(dv_low, first, scale)
    first = new_product(ds_codes, q_t.slice(0, ROWS, 0), first, never)
    second = warpgroup_mma_wait(1, deps=[second])
    dv_high = add_here(dv_high, second, scale)
    second = new_product(ds_codes, q_t.slice(ROWS, ROWS, 0), second, never)
    scale = plane(scales, 1, 1, HALF)
    first = warpgroup_mma_wait(1, deps=[first])
    dk_low = add_here(dk_low, first, scale)
    dq = dq_product(k_t, ds_memory, before, first, never, 0, BLOCK_Q)
    second = warpgroup_mma_wait(2, deps=[second])  # dQ^T's are two
    dk_high = add_here(dk_high, second, scale)
    return joined(dv_low, dv_high, LAYOUT), joined(dk_low, dk_high, LAYOUT), dq, second
