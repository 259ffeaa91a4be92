"""Accumulate e4m3 products in FP32 registers: a tensor core keeps some 13 bits of an accumulator of e4m3 products.

Hopper aligns the terms of an e4m3 product to the largest of them, the accumulator, and cuts what lies below: a sum of
thousands of terms of one sign comes out too small by several percent. So each step's product is a new one, and is
added up in FP32 registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from sagebwd.kernels.sm90.backward.dq_sums import dq_product, dq_rows_product
from sagebwd.kernels.sm90.backward.scores import plane
from sagebwd.kernels.sm90.backward.tile import ROWS, halves, joined, opaque


@gluon.jit
def new_product(a, memory, acc_init, opaque_false=False):
    """A new product a memory^T, not added to anything; in flight.

    acc_init: zeros, or a dead accumulator whose registers the product reuses. opaque_false: then False at run time,
    but unknown to Triton, which would else drop ``acc_init``.
    """
    return warpgroup_mma(a, memory.permute((1, 0)), acc_init, use_acc=opaque_false, is_async=True)  # P^T dO or dS^T Q


@gluon.jit
def fma_in_place(x, y, scale):
    """x + y * scale, computed at this point: LLVM would sink it to its next use, and hold both operands until then."""
    scale, y = gl.broadcast(scale, y)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $2, $3, $1;", "=f,f,f,f", [x, y, scale], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def accumulate_whole(
    dv, dk, operands, copies, stage, scales, k_t, ds_smem, before, ds_full, phase, acc_init, dq_init,
    QUERY: gl.constexpr, BLOCK_Q: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """dV += P^T dO and dK += dS^T Q, each of one piece; dQ^T = K^T dS^T of the step before.

    operands, copies: (P^T, dS^T) in e4m3, and (dO, Q) transposed. acc_init, dq_init: zeros shaped as dV, and as dQ^T.
    """
    dv_new = new_product(operands[0], copies[0].index(stage), acc_init)  # P^T dO
    # before the products are waited for
    dv_scale = plane(scales, 0, 1, LAYOUT)
    dk_scale = plane(scales, 1, 1, LAYOUT)
    mbarrier.wait(ds_full.index(before), phase)
    dv_new = warpgroup_mma_wait(0, deps=[dv_new])
    dv = fma_in_place(dv[0], dv_new, dv_scale)  # dV += P^T dO
    dk_new = new_product(operands[1], copies[1].index(stage), acc_init)  # dS^T Q
    dk_new = warpgroup_mma_wait(0, deps=[dk_new])
    dk = fma_in_place(dk[0], dk_new, dk_scale)  # dK += dS^T Q
    dq = dq_product(k_t, ds_smem, before, dq_init, False, QUERY, BLOCK_Q)  # dQ^T = K^T dS^T
    return (dv,), (dk,), warpgroup_mma_wait(0, deps=[dq])


@gluon.jit
def accumulate_half_n(
    dv, dk, p_fp8, ds_fp8, do_t, q_t, scales, k_t, ds_smem, before, ds_full, phase, opaque_false,
    LAYOUT: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """dV += P^T dO and dK += dS^T Q, each of one piece; dQ^T = K^T dS^T of the step before, in flight. With
    `widths.BackwardTile.half_n`.

    64 channels at a time in two alternating sets of registers: one set's product runs while the other's is added up.
    The second set is dead in the end, and is the last that is returned.
    """
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    acc_init = gl.zeros([ROWS, ROWS], gl.float32, HALF)
    dv_low, dv_high = halves(dv[0], HALF)
    dk_low, dk_high = halves(dk[0], HALF)
    first = new_product(p_fp8, do_t.slice(0, ROWS, 0), acc_init)  # P^T dO, channels 0 to 63
    second = new_product(p_fp8, do_t.slice(ROWS, ROWS, 0), acc_init)  # P^T dO, channels 64 to 127
    scale = plane(scales, 0, 1, HALF)  # before the products are waited for
    mbarrier.wait(ds_full.index(before), phase)
    first = warpgroup_mma_wait(1, deps=[first])
    dv_low = fma_in_place(dv_low, first, scale)  # dV += P^T dO
    first = new_product(ds_fp8, q_t.slice(0, ROWS, 0), first, opaque_false)  # dS^T Q
    second = warpgroup_mma_wait(1, deps=[second])
    dv_high = fma_in_place(dv_high, second, scale)  # dV += P^T dO
    second = new_product(ds_fp8, q_t.slice(ROWS, ROWS, 0), second, opaque_false)  # dS^T Q
    scale = plane(scales, 1, 1, HALF)
    first = warpgroup_mma_wait(1, deps=[first])
    dk_low = fma_in_place(dk_low, first, scale)  # dK += dS^T Q
    dq = dq_product(k_t, ds_smem, before, first, opaque_false, 0, BLOCK_Q)  # dQ^T = K^T dS^T
    second = warpgroup_mma_wait(2, deps=[second])  # dQ^T's are two
    dk_high = fma_in_place(dk_high, second, scale)  # dK += dS^T Q
    return (joined(dv_low, dv_high, LAYOUT),), (joined(dk_low, dk_high, LAYOUT),), dq, second


@gluon.jit
def accumulate_alternating(sums, sets, a, b_t, scale, opaque_false):
    """sums += a b, 64 channels at a time, but for the last product, which is in flight.

    Two alternating sets of registers: one set's product runs while the other's is added up. sets: the first two
    products, in flight. b_t: b transposed, in pieces as sums. Returns sums, the dead set, and the last product.
    """
    sums_new = ()
    for piece in gl.static_range(len(sums) - 1):
        free = warpgroup_mma_wait(1, deps=[sets[0]])
        sums_new += (fma_in_place(sums[piece], free, scale),)  # dV += P^T dO or dK += dS^T Q
        if piece + 2 < len(sums):
            free = new_product(a, b_t[piece + 2], free, opaque_false)  # P^T dO or dS^T Q
        sets = (sets[1], free)
    return sums_new, free, sets[0]


@gluon.jit
def product_of_piece(piece: gl.constexpr, operands, copies, stage, free, opaque_false, PIECES: gl.constexpr):
    """P^T dO of a channel piece of dV, or dS^T Q of one of dK, whose pieces are counted after dV's; in flight.

    operands, copies: as in `accumulate_whole`. PIECES: of dV and dK. free: ``acc_init`` of `new_product`.
    """
    if piece < PIECES[0]:
        return new_product(operands[0], copies[0].index(stage * PIECES[0] + piece), free, opaque_false)  # P^T dO
    else:
        q_t = copies[1].index(stage * PIECES[1] + (piece - PIECES[0]))
        return new_product(operands[1], q_t, free, opaque_false)  # dS^T Q


@gluon.jit
def accumulate_in_pieces(
    dv, dk, operands, copies, stage, scales, k_t_smem, ds_smem, before, ds_full, phase, opaque_false,
    CONSUMER: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """dV += P^T dO and dK += dS^T Q by channel pieces; dQ = dS K of the step before: one piece, in flight, and half of
    another.

    Pieces of 64 channels leave one set of registers for products: while it is added up, the other warpgroup's product
    runs. Shorter pieces leave two sets, as in `accumulate_half_n`.
    """
    PIECES: gl.constexpr = (len(dv), len(dk))
    COUNT: gl.constexpr = len(dv) + len(dk)
    WIDTH: gl.constexpr = dk[0].shape[1]
    AHEAD: gl.constexpr = 0 if WIDTH == ROWS else 1
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH // 2, 32])
    acc_init = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
    half_init = gl.zeros([ROWS, WIDTH // 2], gl.float32, HALF)
    sets = ()
    for piece in gl.static_range(AHEAD + 1):
        sets += (product_of_piece(piece, operands, copies, stage, acc_init, False, PIECES),)  # P^T dO
    scale = plane(scales, 0, 1, LAYOUT)  # before the products are waited for
    sums = dv + dk
    sums_new = ()
    for piece in gl.static_range(COUNT):
        if piece == PIECES[0]:
            scale = plane(scales, 1, 1, LAYOUT)
            mbarrier.wait(ds_full.index(before), phase)
        if piece == COUNT - 1:
            half = dq_rows_product(  # dQ = dS K, half of the last piece
                k_t_smem, ds_smem, before, half_init, opaque(PIECES[1] - 1), CONSUMER * (WIDTH // 2)
            )
        # dQ's are two
        free = warpgroup_mma_wait(AHEAD if piece < COUNT - 1 else 2, deps=[sets[0]])
        sums_new += (fma_in_place(sums[piece], free, scale),)  # dV += P^T dO, then dK += dS^T Q
        if piece + AHEAD + 1 < COUNT:
            free = product_of_piece(piece + AHEAD + 1, operands, copies, stage, free, opaque_false, PIECES)
        sets = sets[1:]
        sets += (free,)
    dq = dq_rows_product(k_t_smem, ds_smem, before, free, opaque(CONSUMER), 0, opaque_false)  # dQ = dS K
    half = warpgroup_mma_wait(2, deps=[half])
    return sums_new[: PIECES[0]], sums_new[PIECES[0] :], dq, half
