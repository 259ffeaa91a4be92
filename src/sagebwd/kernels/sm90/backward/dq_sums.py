"""What the one-kernel backward does for dQ^T: K's copy, half of a block a warpgroup, and TMA's adding blocks up."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from sagebwd.kernels.sm90.backward.tile import (
    CONSUMERS,
    PACKED_FLOAT8,
    ROWS,
    add_tile,
    barrier,
    block_range,
    float8_factor,
    reinterpret,
    store_transposed,
    writes_done,
)

# Blocks of dS that may wait for their dQ.
SLOTS = gl.constexpr(2)


@gluon.jit
def allocate_k_t(PIECES: gl.constexpr, WIDTH: gl.constexpr):
    """Shared memory for `copy_keys`, by pieces of so many channels."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    return gl.allocate_shared_memory(gl.float8e4nv, [CONSUMERS * PIECES, WIDTH, ROWS], LAYOUT)


@gluon.jit
def allocate_ds(BLOCK_Q: gl.constexpr):
    """Shared memory for dS^T of both warpgroups, in slots."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    return gl.allocate_shared_memory(gl.int16, [SLOTS * CONSUMERS, BLOCK_Q, ROWS // 2], LAYOUT)


@gluon.jit
def ds_barriers():
    """Of each slot one that is full when both warpgroups have stored, and one that is empty when both have read."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=CONSUMERS)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    return full, empty


@gluon.jit
def store_no_ds(ds_memory, ds_full, slot, CONSUMER: gl.constexpr, BLOCK_Q: gl.constexpr):
    """A block of zeros in place of a warpgroup's dS^T."""
    none = gl.zeros([BLOCK_Q, ROWS // 2], gl.int16, gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
    ds_memory.index(slot * CONSUMERS + CONSUMER).store(none)
    fence_async_shared()
    barrier()
    mbarrier.arrive(ds_full.index(slot), count=1)


@gluon.jit
def copy_keys(k_t_memory, consumer, k, key_scale, largest):
    """e4m3 of 64 keys' codes, by pieces of channels, times their scales and 2^g, transposed as dS^T is: to memory, as
    dQ's operand."""
    PIECES: gl.constexpr = len(k)
    for piece in gl.static_range(PIECES):
        copy_piece(k_t_memory.index(consumer * PIECES + piece), k[piece], key_scale, largest)


@gluon.jit
def copy_piece(memory, k, key_scale, largest):
    """Channels of `copy_keys`."""
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
def dq_product(k_t, ds_memory, slot, none, never, FIRST: gl.constexpr, BLOCK_Q: gl.constexpr):
    """64 rows of dQ^T, those of k_t, for 64 queries from FIRST on, over the keys of both warpgroups; in flight.

    none, never: as of `fp32_accumulate.new_product`.
    """
    CODES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    low = reinterpret(ds_memory.index(slot * CONSUMERS), gl.float8e4nv, [BLOCK_Q, ROWS], CODES)
    high = reinterpret(ds_memory.index(slot * CONSUMERS + 1), gl.float8e4nv, [BLOCK_Q, ROWS], CODES)
    dq = warpgroup_mma(k_t[0], low.slice(FIRST, ROWS, 0).permute((1, 0)), none, use_acc=never, is_async=True)
    return warpgroup_mma(k_t[1], high.slice(FIRST, ROWS, 0).permute((1, 0)), dq, is_async=True)


@gluon.jit
def counter_rank_and_count(
    row, block, first_k, block_0, blocks_q, place, queries, added, CONSUMER: gl.constexpr, KIND: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr, rank=None,
):  # fmt: skip
    """Where this warpgroup's half of a block of dQ^T is counted, how many blocks of keys come before first_k's (the
    rank, unless a list has said so), and how many have added: asked for here, there when it is needed."""
    if added is None:
        return -1, 0, 0
    else:
        SPAN: gl.constexpr = CONSUMERS * ROWS
        if rank is None:
            _, _, _, end = block_range(
                (block - 1) * BLOCK_Q, place.length, queries.lower, queries.upper, BLOCK_Q, SPAN, KIND.HAS_LOWER,
                KIND.HAS_UPPER, False,
            )  # fmt: skip
            rank = end - 1 - first_k // SPAN
        counter = (row // BLOCK_D * blocks_q + block_0 + block) * CONSUMERS + CONSUMER
        return counter, rank, gl.load(added + gl.maximum(counter, 0), volatile=True)


@gluon.jit
def store_dq(memory, dq, added, counter_before):
    """Leave a block of dQ^T for `add_dq`, once TMA has read, or where blocks are counted written, the one before."""
    if added is None:
        tma.store_wait(0)
        barrier()
    else:
        count_added(added, counter_before)
    memory.store(dq.to(memory.dtype))


@gluon.jit
def turn_to_add(added, counter, rank, count):
    """Let TMA see what was stored, and wait until this block of keys may add to a block of dQ.

    added: how many blocks of keys have added to each block of dQ, by counter; this one comes after ``rank`` of
    them, of which ``count`` had when last asked. None: in any order. A counter under 0 is that of zeros, which may
    come at any time.
    """
    fence_async_shared()
    barrier()
    if added is not None:  # noqa: SIM102 (one is of compile time)
        if (counter >= 0) & (count != rank):
            # it stands behind all others: a line more here would move the machine code of other variants
            wait_for(added + counter, rank, count)


@gluon.jit
def add_dq(dq_desc, memory, row, column, added, counter, rank, count):
    """Hand a block of dQ^T to TMA, in its turn."""
    turn_to_add(added, counter, rank, count)
    add_tile(dq_desc, [row, column], memory)


@gluon.jit
def count_added(added, counter):
    """Let the next block of keys add to a block of dQ^T, now that TMA has; where blocks add in order.

    Relaxed: nothing but TMA's additions need be seen, and those are done. A release would wait for all stores besides.
    """
    if added is not None:
        writes_done(counter)
        barrier()
        if counter >= 0:
            gl.atomic_add(added + counter, 1, sem="relaxed")


# How often `wait_for` asks at most. Each answer comes from L2, after 0.15 us at the earliest: 20 s and more; a step of
# those that are waited for takes microseconds. Polls, not a clock: they cost less to count, and time also passes
# where a debugger or another process has the GPU.
POLLS = gl.constexpr(2**27)


@gluon.jit
def wait_for(counter, rank, count):
    """Wait until a counter, ``count`` when last asked, says ``rank``; not for ever, should it be broken."""
    left = gl.to_tensor(POLLS)
    while (count != rank) & (left > 0):
        left, count = left - 1, gl.load(counter, volatile=True)
    trap_unless(left > 0)


@gluon.jit
def trap_unless(fine):
    """Have CUDA report an error in place of a hang.

    `brkpt` and `trap` are one instruction, BPT.TRAP. But for ptxas `trap` ends a path, where no product may be in
    flight: all products of the loop would follow one another, with 1159 spills in place of 35 at head_dim 64.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred broken; setp.eq.s32 broken, $1, 0; @broken brkpt; mov.b32 $0, $1; }", "=r,r",
        [fine.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
