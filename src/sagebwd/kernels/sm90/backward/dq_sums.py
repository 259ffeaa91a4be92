"""dQ^T += K^T dS^T: K's transposed e4m3 copy, dQ^T of half a query block a warpgroup, and its FP16 sums by TMA.

For head sizes of three channel pieces dQ by rows: a warpgroup computes one piece and half of the third, and stores
three boxes of half a piece; boxes of other sizes would take more address registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sagebwd.kernels.sm90.backward.tile import (
    CONSUMERS,
    PACKED_FLOAT8,
    ROWS,
    add_tile,
    barrier,
    block_range,
    float8_factor,
    halves,
    reinterpret,
    store_transposed,
    writes_done,
)

# Stages of dS in shared memory: blocks that may wait for their dQ.
SLOTS = gl.constexpr(2)
# Boxes of dQ by rows.
BOXES = gl.constexpr(3)


@gluon.jit
def allocate_k_t(PIECES: gl.constexpr, WIDTH: gl.constexpr):
    """Shared memory of K^T in e4m3, [CONSUMERS * PIECES, WIDTH, 64], which `copy_keys` fills."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    return gl.allocate_shared_memory(gl.float8e4nv, [CONSUMERS * PIECES, WIDTH, ROWS], LAYOUT)


@gluon.jit
def allocate_ds(BLOCK_Q: gl.constexpr):
    """Shared memory of dS in e4m3, a slot for each warpgroup and stage."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    return gl.allocate_shared_memory(gl.int16, [SLOTS * CONSUMERS, BLOCK_Q, ROWS // 2], LAYOUT)


@gluon.jit
def ds_barriers():
    """Barriers of dS's slots: full once both warpgroups have stored, empty once both have read."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=CONSUMERS)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    return full, empty


@gluon.jit
def store_zero_ds(ds_smem, ds_full, slot, CONSUMER: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Store zeros as a warpgroup's dS: the block before the first."""
    zeros = gl.zeros([BLOCK_Q, ROWS // 2], gl.int16, gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
    ds_smem.index(slot * CONSUMERS + CONSUMER).store(zeros)
    fence_async_shared()
    barrier()
    mbarrier.arrive(ds_full.index(slot), count=1)


@gluon.jit
def copy_keys(k_t_smem, consumer, k, key_scale, largest):
    """Store K^T in e4m3, dQ's operand: INT8 K of 64 keys by channel pieces, times its scales and 2^g,
    transposed as dS^T is."""
    PIECES: gl.constexpr = len(k)
    for piece in gl.static_range(PIECES):
        copy_piece(k_t_smem.index(consumer * PIECES + piece), k[piece], key_scale, largest)


@gluon.jit
def copy_piece(memory, k, key_scale, largest):
    """Store one channel piece of K^T (`copy_keys`)."""
    WIDTH: gl.constexpr = 32  # all channels at once have more addresses, which would be kept through all steps
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    key_scale = gl.convert_layout(key_scale, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    memory = reinterpret(memory, gl.int16, [k.shape[1], ROWS // 2], PAIRS)
    scale = gl.expand_dims(key_scale, 1)
    factor = float8_factor(gl.load(largest))
    for part in gl.static_range(k.shape[1] // WIDTH):
        x = k.slice(part * WIDTH, WIDTH, 1).load(LAYOUT).to(gl.float32) * scale * factor
        codes = gl.inline_asm_elementwise(PACKED_FLOAT8, "=r,f,f,f,f", [x], dtype=gl.float8e4nv, is_pure=True, pack=4)
        store_transposed(memory.slice(part * WIDTH, WIDTH, 0), codes)


@gluon.jit
def dq_product(k_t, ds_smem, slot, acc_init, opaque_false, FIRST: gl.constexpr, BLOCK_Q: gl.constexpr):
    """dQ^T = K^T dS^T: 64 channels (rows of k_t) by 64 queries from FIRST on, over both warpgroups' keys; in flight.

    acc_init, opaque_false: as in `fp32_accumulate.new_product`.
    """
    CODES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    lo = reinterpret(ds_smem.index(slot * CONSUMERS), gl.float8e4nv, [BLOCK_Q, ROWS], CODES)
    hi = reinterpret(ds_smem.index(slot * CONSUMERS + 1), gl.float8e4nv, [BLOCK_Q, ROWS], CODES)
    lo, hi = lo.slice(FIRST, ROWS, 0).permute((1, 0)), hi.slice(FIRST, ROWS, 0).permute((1, 0))
    dq = warpgroup_mma(k_t[0], lo, acc_init, use_acc=opaque_false, is_async=True)  # dQ^T = K^T dS^T
    return warpgroup_mma(k_t[1], hi, dq, is_async=True)  # dQ^T += K^T dS^T, the other warpgroup's keys


@gluon.jit
def counter_rank_and_count(
    row, block, first_k, block_0, blocks_q, work_tile, seq_q, dq_sem, CONSUMER: gl.constexpr, KIND: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr, rank=None,
):  # fmt: skip
    """Semaphore of this warpgroup's half of a dQ block: its index, the rank of this key block (how many add before it;
    given if a list knows it), and its value, loaded early so that it is there when needed."""
    if dq_sem is None:
        return -1, 0, 0
    else:
        SPAN: gl.constexpr = CONSUMERS * ROWS
        if rank is None:
            _, _, _, end = block_range(
                (block - 1) * BLOCK_Q, work_tile.length, seq_q.lower, seq_q.upper, BLOCK_Q, SPAN, KIND.HAS_LOWER,
                KIND.HAS_UPPER, False,
            )  # fmt: skip
            rank = end - 1 - first_k // SPAN
        counter = (row // BLOCK_D * blocks_q + block_0 + block) * CONSUMERS + CONSUMER
        return counter, rank, gl.load(dq_sem + gl.maximum(counter, 0), volatile=True)


@gluon.jit
def store_dq(memory, dq, dq_sem, counter_before):
    """Store a dQ block for `add_dq`, once TMA has read the one before, or has written it if dQ is added in order."""
    if dq_sem is None:
        tma.store_wait(0)
        barrier()
    else:
        release_dq_semaphore(dq_sem, counter_before)
    memory.store(dq.to(memory.dtype))


@gluon.jit
def acquire_dq_semaphore(dq_sem, counter, rank, count):
    """Make the stored block visible to TMA, and wait for this key block's turn to add to dQ.

    dq_sem: for each dQ block, how many key blocks have added to it; this one adds after ``rank`` of them, ``count`` of
    which had when last loaded. None: key blocks add in any order. A negative counter is that of the zero block, which
    may be added at any time.
    """
    fence_async_shared()
    barrier()
    if dq_sem is not None:  # noqa: SIM102 (one is of compile time)
        if (counter >= 0) & (count != rank):
            # it stands behind all others: a line more here would move the machine code of other variants
            wait_for(dq_sem + counter, rank, count)


@gluon.jit
def add_dq(dq_desc, memory, row, column, dq_sem, counter, rank, count):
    """Add a dQ block to global memory by TMA, in this key block's turn."""
    acquire_dq_semaphore(dq_sem, counter, rank, count)
    add_tile(dq_desc, [row, column], memory)  # dQ += dS K


@gluon.jit
def release_dq_semaphore(dq_sem, counter):
    """Let the next key block add to a dQ block, once TMA has written this one's; if dQ is added in order.

    Relaxed: only TMA's additions must be visible, and those are done. A release would wait for all other stores too.
    """
    if dq_sem is not None:
        writes_done(counter)
        barrier()
        if counter >= 0:
            gl.atomic_add(dq_sem + counter, 1, sem="relaxed")


# Polls of `wait_for` at most. Each reads L2, in 0.15 us at the earliest: 20 s and more, where a step of the awaited
# key blocks takes microseconds. Polls, not a clock: they cost less to count, and time also passes
# where a debugger or another process has the GPU.
POLLS = gl.constexpr(2**27)


@gluon.jit
def wait_for(counter, rank, count):
    """Wait until a semaphore, ``count`` when last loaded, is ``rank``; at most `POLLS`, lest a fault hang the GPU."""
    left = gl.to_tensor(POLLS)
    while (count != rank) & (left > 0):
        left, count = left - 1, gl.load(counter, volatile=True)
    trap_unless(left > 0)


@gluon.jit
def trap_unless(fine):
    """Raise a CUDA error instead of a hang.

    `brkpt` and `trap` are one instruction, BPT.TRAP. But for ptxas `trap` ends a path, where no product may be in
    flight: all products of the loop would follow one another, with 1159 spills in place of 35 at head_dim 64.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred broken; setp.eq.s32 broken, $1, 0; @broken brkpt; mov.b32 $0, $1; }", "=r,r",
        [fine.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


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
    """Add 64 rows of dQ by TMA, after `store_dq` has left the half of the third piece in memory[2]."""
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
def add_dq_part(dq_desc, memory, row, dq_sem, counter, rank, count, CONSUMER: gl.constexpr, SECOND: gl.constexpr):
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
