"""Accumulate e4m3 products in FP32 registers: a tensor core keeps some 13 bits of an accumulator of e4m3 products.

Hopper aligns the terms of an e4m3 product to the largest of them, the accumulator, and cuts what lies below: a sum of
thousands of terms of one sign comes out too small by several percent. So each step's product is a new one, and is
added up in FP32 registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from sagebwd.kernels.sm90.backward.dq_rows import dq_rows_product
from sagebwd.kernels.sm90.backward.dq_sums import dq_product
from sagebwd.kernels.sm90.backward.pieces import halves, joined
from sagebwd.kernels.sm90.backward.scores import plane
from sagebwd.kernels.sm90.backward.tile import ROWS, anew


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
def add_whole(
    dv, dk, codes, copies, stage, scales, k_t, ds_memory, before, ds_full, phase, none, no_dq, QUERY: gl.constexpr,
    BLOCK_Q: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """dV and dK, each one piece, with a step's products; and the step before's dQ^T.

    codes, copies: dV's and dK's. none, no_dq: zeros as dV and dK, and as dQ^T.
    """
    dv_new = new_product(codes[0], copies[0].index(stage), none)
    # before the products are waited for
    dv_scale = plane(scales, 0, 1, LAYOUT)
    dk_scale = plane(scales, 1, 1, LAYOUT)
    mbarrier.wait(ds_full.index(before), phase)
    dv_new = warpgroup_mma_wait(0, deps=[dv_new])
    dv = add_here(dv[0], dv_new, dv_scale)
    dk_new = new_product(codes[1], copies[1].index(stage), none)
    dk_new = warpgroup_mma_wait(0, deps=[dk_new])
    dk = add_here(dk[0], dk_new, dk_scale)
    dq = dq_product(k_t, ds_memory, before, no_dq, False, QUERY, BLOCK_Q)
    return (dv,), (dk,), warpgroup_mma_wait(0, deps=[dq])


@gluon.jit
def add_in_halves(
    dv, dk, p_codes, ds_codes, do_t, q_t, scales, k_t, ds_memory, before, ds_full, phase, never,
    LAYOUT: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """dV and dK, each one piece, with a step's products; and the step before's dQ^T, in flight. Where sums are
    IN_HALVES.

    64 channels at a time in two sets of registers in turn: one's product runs while the other's is added up. The
    second set is free in the end, and the last that is returned.
    """
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    none = gl.zeros([ROWS, ROWS], gl.float32, HALF)
    dv_low, dv_high = halves(dv[0], HALF)
    dk_low, dk_high = halves(dk[0], HALF)
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
    return (joined(dv_low, dv_high, LAYOUT),), (joined(dk_low, dk_high, LAYOUT),), dq, second


@gluon.jit
def add_by_turns(sums, sets, codes, copy, scale, never):
    """Sums of 64 channels each with a step's products, but for the last's, which is in flight.

    One of two sets of registers runs while the other is added up. sets: the first two products, in flight. copy: what
    codes are multiplied by, in pieces as sums. Returns sums, the set that is free, and the last product.
    """
    added = ()
    for piece in gl.static_range(len(sums) - 1):
        free = warpgroup_mma_wait(1, deps=[sets[0]])
        added += (add_here(sums[piece], free, scale),)
        if piece + 2 < len(sums):
            free = new_product(codes, copy[piece + 2], free, never)
        sets = (sets[1], free)
    return added, free, sets[0]


@gluon.jit
def product_of_piece(piece: gl.constexpr, codes, copies, stage, free, never, PIECES: gl.constexpr):
    """The product with a piece of dV's channels, or with those of dK's that follow them; in flight.

    codes, copies: dV's and dK's. PIECES: of both. free, never: ``none`` and never of `new_product`.
    """
    if piece < PIECES[0]:
        return new_product(codes[0], copies[0].index(stage * PIECES[0] + piece), free, never)
    else:
        return new_product(codes[1], copies[1].index(stage * PIECES[1] + (piece - PIECES[0])), free, never)


@gluon.jit
def add_in_pieces(
    dv, dk, codes, copies, stage, scales, k_t_memory, ds_memory, before, ds_full, phase, never,
    CONSUMER: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """dV and dK, by pieces of channels, with a step's products; and of the step before's dQ a piece, which is in
    flight, and half of another.

    Pieces of 64 channels leave one set of registers for products, one after the other: while it is added up the other
    warpgroup's run. Shorter ones leave two, as in `add_in_halves`.
    """
    PIECES: gl.constexpr = (len(dv), len(dk))
    COUNT: gl.constexpr = len(dv) + len(dk)
    WIDTH: gl.constexpr = dk[0].shape[1]
    AHEAD: gl.constexpr = 0 if WIDTH == ROWS else 1
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH // 2, 32])
    none = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
    no_half = gl.zeros([ROWS, WIDTH // 2], gl.float32, HALF)
    sets = ()
    for piece in gl.static_range(AHEAD + 1):
        sets += (product_of_piece(piece, codes, copies, stage, none, False, PIECES),)
    scale = plane(scales, 0, 1, LAYOUT)  # before the products are waited for
    sums = dv + dk
    added = ()
    for piece in gl.static_range(COUNT):
        if piece == PIECES[0]:
            scale = plane(scales, 1, 1, LAYOUT)
            mbarrier.wait(ds_full.index(before), phase)
        if piece == COUNT - 1:
            half = dq_rows_product(
                k_t_memory, ds_memory, before, no_half, anew(PIECES[1] - 1), CONSUMER * (WIDTH // 2)
            )
        # dQ's are two
        free = warpgroup_mma_wait(AHEAD if piece < COUNT - 1 else 2, deps=[sets[0]])
        added += (add_here(sums[piece], free, scale),)
        if piece + AHEAD + 1 < COUNT:
            free = product_of_piece(piece + AHEAD + 1, codes, copies, stage, free, never, PIECES)
        sets = sets[1:]
        sets += (free,)
    dq = dq_rows_product(k_t_memory, ds_memory, before, free, anew(CONSUMER), 0, never)
    half = warpgroup_mma_wait(2, deps=[half])
    return added[: PIECES[0]], added[PIECES[0] :], dq, half
