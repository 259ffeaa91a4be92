"""dQ by rows, for head sizes of three channel pieces (`dq_sums` has dQ^T): a warpgroup computes one piece and half of
the third, and stores three boxes of half a piece; boxes of other sizes would take more address registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from sagebwd.kernels.sm90.backward.dq_sums import acquire_dq_semaphore, store_dq
from sagebwd.kernels.sm90.backward.pieces import halves
from sagebwd.kernels.sm90.backward.tile import CONSUMERS, ROWS, add_tile, reinterpret

BOXES = gl.constexpr(3)


@gluon.constexpr_function
def dq_parts(consumer, pieces):
    """Piece and channel of K^T with which the two parts of a warpgroup's half of dQ's channels begin.

    The first part has 64 channels, the second as many, or half of what is left.
    """
    if pieces == 1:
        return (0, consumer * 128), (0, consumer * 128 + 64)
    return (consumer, 0), (pieces - 1, consumer * 32)


@gluon.jit
def zeros_of_rest(memory):
    """Zeros that the second part is added to."""
    BOX: gl.constexpr = memory[0].shape[2]
    return gl.zeros([ROWS, BOX], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BOX, 32]))


@gluon.jit
def dq_rows_product(k_t_smem, ds_smem, slot, acc_init, piece, FIRST: gl.constexpr, opaque_false=False):
    """dQ = dS K: channels FIRST onwards of a piece, as many as ``acc_init`` has, for 64 queries, over both warpgroups'
    keys; in flight.

    acc_init, opaque_false: as in `fp32_accumulate.new_product`.
    """
    N: gl.constexpr = acc_init.shape[1]
    PIECES: gl.constexpr = k_t_smem.shape[0] // CONSUMERS
    CODES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    low = reinterpret(ds_smem.index(slot * CONSUMERS), gl.float8e4nv, [ROWS, ROWS], CODES)
    high = reinterpret(ds_smem.index(slot * CONSUMERS + 1), gl.float8e4nv, [ROWS, ROWS], CODES)
    k_low = k_t_smem.index(piece).slice(FIRST, N, 0)
    k_high = k_t_smem.index(PIECES + piece).slice(FIRST, N, 0)
    dq = warpgroup_mma(low, k_low.permute((1, 0)), acc_init, use_acc=opaque_false, is_async=True)  # dQ = dS K
    return warpgroup_mma(high, k_high.permute((1, 0)), dq, is_async=True)  # dQ += dS K, the other warpgroup's keys


@gluon.jit
def last_dq_rows(k_t_smem, ds_smem, slot, CONSUMER: gl.constexpr, LAYOUT: gl.constexpr):
    """dQ of the last block: a warpgroup's own piece, and its half of the third."""
    PIECE: gl.constexpr = k_t_smem.shape[1]
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE // 2, 32])
    LAST: gl.constexpr = k_t_smem.shape[0] // CONSUMERS - 1
    acc_init = gl.zeros([ROWS, PIECE // 2], gl.float32, HALF)
    half = dq_rows_product(k_t_smem, ds_smem, slot, acc_init, LAST, CONSUMER * (PIECE // 2))  # dQ = dS K
    half = warpgroup_mma_wait(0, deps=[half])
    acc_init = gl.zeros([ROWS, PIECE], gl.float32, LAYOUT)
    dq = dq_rows_product(k_t_smem, ds_smem, slot, acc_init, CONSUMER, 0)  # dQ = dS K
    return warpgroup_mma_wait(0, deps=[dq]), half


@gluon.jit
def add_dq_rows(dq_desc, memory, dq, row, CONSUMER: gl.constexpr, dq_sem, counter, rank, count):
    """Add 64 rows of dQ by TMA, after `dq_sums.store_dq` has left the half of the third piece in memory[2]."""
    N: gl.constexpr = memory[0].shape[2]
    low, high = halves(dq, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32]))
    memory[0].index(CONSUMER).store(low.to(memory[0].dtype))
    memory[1].index(CONSUMER).store(high.to(memory[1].dtype))
    acquire_dq_semaphore(dq_sem, counter, rank, count)
    add_tile(dq_desc, [row, CONSUMER * 2 * N], memory[0].index(CONSUMER))
    add_tile(dq_desc, [row, (CONSUMER * 2 + 1) * N], memory[1].index(CONSUMER))
    add_tile(dq_desc, [row, (CONSUMERS * 2 + CONSUMER) * N], memory[2].index(CONSUMER))


@gluon.jit
def store_dq_part(memory, dq, dq_sem, counter_before, CONSUMER: gl.constexpr, SECOND: gl.constexpr):
    """Store the first or second part of a warpgroup's rows of dQ: in the one buffer of both parts, or in three buffers
    of half a piece each, of which the third holds the second part."""
    if len(memory) == 1:
        store_dq(memory[0].index(CONSUMER), dq, dq_sem, counter_before)
    elif SECOND:
        # free since the first part waited for what TMA had to read
        memory[2].index(CONSUMER).store(dq.to(memory[2].dtype))
    else:
        low, high = halves(dq, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, memory[0].shape[2], 32]))
        store_dq(memory[0].index(CONSUMER), low, dq_sem, counter_before)
        memory[1].index(CONSUMER).store(high.to(memory[1].dtype))


@gluon.jit
def add_dq_part(
    dq_desc, memory, row, dq_sem, counter, rank, count, CONSUMER: gl.constexpr, SECOND: gl.constexpr
):  # fmt: skip
    """Add by TMA the part of dQ that `store_dq_part` stored."""
    N: gl.constexpr = memory[0].shape[2]
    acquire_dq_semaphore(dq_sem, counter, rank, count)
    if len(memory) == 1:
        add_tile(dq_desc, [row, (CONSUMER * 2 + SECOND) * N], memory[0].index(CONSUMER))
    elif SECOND:
        add_tile(dq_desc, [row, (CONSUMERS * 2 + CONSUMER) * N], memory[2].index(CONSUMER))
    else:
        add_tile(dq_desc, [row, CONSUMER * 2 * N], memory[0].index(CONSUMER))
        add_tile(dq_desc, [row, (CONSUMER * 2 + 1) * N], memory[1].index(CONSUMER))
