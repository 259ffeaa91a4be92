"""What `dq_sums` does for dQ^T, for dQ by rows, where channels are three pieces: a warpgroup has a piece and half of
the third. It leaves as three boxes of half a piece: of other sizes they would take more registers for addresses."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from sagebwd.kernels.sm90.backward.dq_sums import store_dq, turn_to_add
from sagebwd.kernels.sm90.backward.pieces import halves
from sagebwd.kernels.sm90.backward.tile import CONSUMERS, ROWS, add_tile, reinterpret

BOXES = gl.constexpr(3)


@gluon.jit
def dq_rows_product(k_t_memory, ds_memory, slot, none, piece, FIRST: gl.constexpr, never=False):
    """As many channels of dQ as ``none`` has, from FIRST of a piece on, for 64 queries, over the keys of both
    warpgroups; in flight.

    none, never: as of `fp32_accumulate.new_product`.
    """
    N: gl.constexpr = none.shape[1]
    PIECES: gl.constexpr = k_t_memory.shape[0] // CONSUMERS
    CODES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    low = reinterpret(ds_memory.index(slot * CONSUMERS), gl.float8e4nv, [ROWS, ROWS], CODES)
    high = reinterpret(ds_memory.index(slot * CONSUMERS + 1), gl.float8e4nv, [ROWS, ROWS], CODES)
    k_low = k_t_memory.index(piece).slice(FIRST, N, 0)
    k_high = k_t_memory.index(PIECES + piece).slice(FIRST, N, 0)
    dq = warpgroup_mma(low, k_low.permute((1, 0)), none, use_acc=never, is_async=True)
    return warpgroup_mma(high, k_high.permute((1, 0)), dq, is_async=True)


@gluon.jit
def last_dq_rows(k_t_memory, ds_memory, slot, CONSUMER: gl.constexpr, LAYOUT: gl.constexpr):
    """A warpgroup's piece of dQ and its half of the third."""
    PIECE: gl.constexpr = k_t_memory.shape[1]
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE // 2, 32])
    LAST: gl.constexpr = k_t_memory.shape[0] // CONSUMERS - 1
    none = gl.zeros([ROWS, PIECE // 2], gl.float32, HALF)
    half = dq_rows_product(k_t_memory, ds_memory, slot, none, LAST, CONSUMER * (PIECE // 2))
    half = warpgroup_mma_wait(0, deps=[half])
    none = gl.zeros([ROWS, PIECE], gl.float32, LAYOUT)
    dq = dq_rows_product(k_t_memory, ds_memory, slot, none, CONSUMER, 0)
    return warpgroup_mma_wait(0, deps=[dq]), half


@gluon.jit
def add_dq_rows(dq_desc, memory, dq, row, CONSUMER: gl.constexpr, added, counter, rank, count):
    """`dq_sums.add_dq` of 64 rows of dQ, once `dq_sums.store_dq` has left the half of the third piece in memory[2]."""
    N: gl.constexpr = memory[0].shape[2]
    low, high = halves(dq, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32]))
    memory[0].index(CONSUMER).store(low.to(memory[0].dtype))
    memory[1].index(CONSUMER).store(high.to(memory[1].dtype))
    turn_to_add(added, counter, rank, count)
    add_tile(dq_desc, [row, CONSUMER * 2 * N], memory[0].index(CONSUMER))
    add_tile(dq_desc, [row, (CONSUMER * 2 + 1) * N], memory[1].index(CONSUMER))
    add_tile(dq_desc, [row, (CONSUMERS * 2 + CONSUMER) * N], memory[2].index(CONSUMER))


@gluon.jit
def store_dq_part(memory, dq, added, counter_before, CONSUMER: gl.constexpr, SECOND: gl.constexpr):
    """`dq_sums.store_dq` of a warpgroup's first or second part of rows of dQ: of one buffer for both, or of three that
    have half a piece each, the third one the second part."""
    if len(memory) == 1:
        store_dq(memory[0].index(CONSUMER), dq, added, counter_before)
    elif SECOND:
        # free since the first part waited for what TMA had to read
        memory[2].index(CONSUMER).store(dq.to(memory[2].dtype))
    else:
        low, high = halves(dq, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, memory[0].shape[2], 32]))
        store_dq(memory[0].index(CONSUMER), low, added, counter_before)
        memory[1].index(CONSUMER).store(high.to(memory[1].dtype))


@gluon.jit
def add_dq_part(
    dq_desc, memory, row, added, counter, rank, count, CONSUMER: gl.constexpr, SECOND: gl.constexpr
):  # fmt: skip
    """`dq_sums.add_dq` of what `store_dq_part` left."""
    N: gl.constexpr = memory[0].shape[2]
    turn_to_add(added, counter, rank, count)
    if len(memory) == 1:
        add_tile(dq_desc, [row, (CONSUMER * 2 + SECOND) * N], memory[0].index(CONSUMER))
    elif SECOND:
        add_tile(dq_desc, [row, (CONSUMERS * 2 + CONSUMER) * N], memory[2].index(CONSUMER))
    else:
        add_tile(dq_desc, [row, CONSUMER * 2 * N], memory[0].index(CONSUMER))
        add_tile(dq_desc, [row, (CONSUMER * 2 + 1) * N], memory[1].index(CONSUMER))
