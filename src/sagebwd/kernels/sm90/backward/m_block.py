"""One block of queries in a consumer warpgroup of the backward on Hopper: seven steps, which `m_block` numbers.

Operands are transposed: a warpgroup's 64 keys are the rows of S^T, P^T, dP^T and dS^T, so that P^T and dS^T are
operands of dV and dK in the registers they came in. S^T is computed a block ahead, dQ a block behind. Which products
run beside each other follows from what registers hold (`sagebwd.kernels.sm90.widths.BackwardTile`): steps 5 to 7 are
in `products_whole`, `products_in_halves`, `products_in_pieces` and, where another kernel computes dV, in
`products_without_dv`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sagebwd.kernels.sm90.backward.arguments import Sizes, Tensors
from sagebwd.kernels.sm90.backward.block_sparse import head_and_block, listed_block
from sagebwd.kernels.sm90.backward.dq_rows import add_dq_part, add_dq_rows, dq_rows_product, store_dq_part
from sagebwd.kernels.sm90.backward.dq_sums import SLOTS, add_dq, counter_rank_and_count, store_dq
from sagebwd.kernels.sm90.backward.fp32_accumulate import (
    accumulate_alternating,
    accumulate_half_n,
    accumulate_in_pieces,
    accumulate_whole,
    fma_in_place,
    new_product,
)
from sagebwd.kernels.sm90.backward.key_blocks import SeqQ, TileCoord, cut_at_both_ends, masked_m_block
from sagebwd.kernels.sm90.backward.loads import Barriers, Loaded
from sagebwd.kernels.sm90.backward.pieces import parts_of_copy, pieces_of
from sagebwd.kernels.sm90.backward.scores import (
    dp_codes,
    dp_minus_delta,
    dp_of_codes,
    ds_operand,
    plane,
    probabilities,
    scores,
)
from sagebwd.kernels.sm90.backward.tile import (
    CONSUMERS,
    ROWS,
    barrier,
    opaque,
    operand_float8,
    result,
    ring,
    store_transposed,
)

# Barriers of a step's operands: Q; dO; the e4m3 copies with their scales. Row values come with Q, in a kernel without
# dV with dO.
OF_Q, OF_DO, OF_COPIES, OPERANDS = (gl.constexpr(number) for number in (0, 1, 2, 3))


class Consumer(NamedTuple):
    """What a warpgroup knows and holds of its 64 keys, and where it reads and writes: the same in every step."""

    memory: Loaded
    barriers: Barriers
    tensors: Tensors
    sizes: Sizes
    work_tile: TileCoord
    seq_q: SeqQ
    first_k: gl.tensor
    keys: gl.tensor
    keep_key: gl.tensor  # which of them count
    key_scale: gl.tensor  # K's scales times the softmax scale, in base 2
    v_scale: gl.tensor | None
    k: tuple  # K by channel pieces, operands of S: in registers or in shared memory
    v_in_regs: tuple  # the first pieces of V, operands of dP
    k_t: tuple | None  # K^T in e4m3 of both warpgroups' keys, operands of dQ^T; None: dQ is computed by rows
    ones: gl.shared_memory_descriptor | None  # what delta's channels are multiplied by
    k_t_smem: gl.shared_memory_descriptor
    ds_smem: gl.shared_memory_descriptor
    dq_smem: tuple
    dq_part: gl.shared_memory_descriptor  # its own of the first
    dq_desc: tma.tensor_descriptor
    sum_scale: gl.tensor
    s_init: gl.tensor  # zeros that products are added to
    dp_init: gl.tensor
    dq_init: gl.tensor
    pitch: gl.tensor  # queries of a head, padded
    column: gl.tensor  # of dQ^T, or row of dQ: block_0's first of these queries, or of its half of them
    block_0: gl.tensor  # the block of queries before the sequence's first, from which dQ's are counted


class Step(NamedTuple):
    """A block of queries, where its operands and its dS are, and where dQ of the block before it is added."""

    number: gl.tensor
    left: tuple  # the next one's number
    first_q: gl.tensor
    entry_at: gl.tensor  # its entry in a list of blocks
    stage: gl.tensor  # of its operands
    phase: gl.tensor
    rows: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    slot: gl.tensor  # of its dS
    slot_phase: gl.tensor
    before: gl.tensor  # slot of dS of the block before
    before_phase: gl.tensor
    to_row: gl.tensor
    to_block: gl.tensor
    counter: gl.tensor
    rank: gl.tensor
    count: gl.tensor
    counter_before: gl.tensor  # of the dQ before that


@gluon.constexpr_function
def stages_of(width):
    """Stages of Q and dO."""
    return width.backward.q_stages if width.backward.split_dkdv else width.backward.stages


@gluon.constexpr_function
def accumulator_layout(pieces):
    """Of one of dK's or dV's pieces."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pieces[0].shape[1], 32])


@gluon.jit
def barrier_of(OPERAND: gl.constexpr, stage, WIDTH: gl.constexpr):
    """Number of the barrier that an operand's stage is full by."""
    if WIDTH.backward.split_dkdv:
        return OPERAND * WIDTH.backward.q_stages + stage
    else:
        return stage * OPERANDS + OPERAND


@gluon.jit
def is_followed(step):
    """Whether another step follows."""
    left = step.left
    if len(left) == 2:
        return left[0] + 1 < left[1]
    else:
        return (left[0] + 1 < left[1]) | (left[2] + 1 < left[3])


@gluon.jit
def m_block(
    c, step, s, dv, dk, MASKED: gl.constexpr, CONSUMER: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr
):  # fmt: skip
    """Add a block of queries to dV and dK of 64 keys, and the block before it to dQ. Returns S^T of the next, dV, dK.

    s: the block's S^T, in flight. dv: none where another kernel computes it. MASKED: a mask or an end may cut the
    block.
    """
    memory, tensors = c.memory, c.tensors
    full, empty, ds_full, ds_empty = c.barriers.full, c.barriers.empty, c.barriers.ds_full, c.barriers.ds_empty
    SPLIT: gl.constexpr = WIDTH.backward.split_dkdv
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    INT8_DP: gl.constexpr = tensors.v_scale is not None
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(dk), 4)
    stage, phase = step.stage, step.phase
    rows = step.rows

    # (1) [GEMM] S^T = K Q^T. It has been queued in the step before, alone: of two products in flight across the loop's
    # end ptxas would wait for one at once.
    s = warpgroup_mma_wait(0, deps=[s])
    if SPLIT:
        mbarrier.arrive(empty.index(barrier_of(OF_Q, stage, WIDTH)), count=1)

    # (2) [GEMM] dP^T - delta = V dO^T - delta
    mbarrier.wait(full.index(barrier_of(OF_DO, stage, WIDTH)), phase)
    dp = queue_dp(c, stage, rows, CONSUMER, WIDTH)

    # (3) P^T = exp2(S^T - lse)
    p, whole = probabilities(
        s, rows, c.key_scale, c.keys, c.keep_key, step.first_q, c.first_k, c.work_tile, c.seq_q, c.sizes.group,
        tensors.key_mask, tensors.block_sparse, tensors.bias, step.entry_at, KIND, MASKED, KIND.RAGGED, BLOCK_Q,
        S_LAYOUT,
    )  # fmt: skip
    p_fp8 = None
    if not SPLIT:
        p_fp8 = operand_float8(p, OPERAND)

    # (4) dS^T = P^T * (dP^T - delta)
    dp = warpgroup_mma_wait(0, deps=[dp])
    if INT8_DP:  # read before the stage is free
        values = rows if SPLIT else memory.delta.index(stage)
        dp = dp_of_codes(dp, values, 2 if SPLIT else 0, c.v_scale, BLOCK_Q, S_LAYOUT)
    if SPLIT:
        mbarrier.arrive(empty.index(barrier_of(OF_DO, stage, WIDTH)), count=1)
    ds_fp8 = ds_operand(
        p, dp, whole, c.keep_key, tensors.key_mask, tensors.block_sparse, KIND, MASKED, S_LAYOUT, OPERAND
    )
    mbarrier.wait(ds_empty.index(step.slot), step.slot_phase ^ 1)
    store_transposed(c.ds_smem.index(step.slot * CONSUMERS + CONSUMER), result(ds_fp8, S_LAYOUT))
    fence_async_shared()
    barrier()
    mbarrier.arrive(ds_full.index(step.slot), count=1)

    # (5) [GEMM] dV += P^T dO
    # (6) [GEMM] dK += dS^T Q
    # (7) [GEMM] dQ += dS K, of the block before; and (1) of the next
    if SPLIT:
        return products_without_dv(c, step, ds_fp8, dv, dk, stage, phase, CONSUMER, WIDTH)
    else:
        mbarrier.wait(full.index(barrier_of(OF_COPIES, stage, WIDTH)), phase)
        more = is_followed(step)
        if c.k_t is None:
            return products_in_pieces(c, step, (p_fp8, ds_fp8), dv, dk, stage, more, CONSUMER, WIDTH)
        elif WIDTH.backward.half_n:
            return products_in_halves(c, step, (p_fp8, ds_fp8), dv, dk, stage, more, CONSUMER, WIDTH)
        else:
            return products_whole(c, step, (p_fp8, ds_fp8), dv, dk, stage, more, CONSUMER, WIDTH)


@gluon.jit
def queue_dp(c, stage, rows, CONSUMER: gl.constexpr, WIDTH: gl.constexpr):
    """dP^T - delta = V dO^T - delta, or of codes V^ dO^T; in flight."""
    memory = c.memory
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    INT8_DP: gl.constexpr = c.tensors.v_scale is not None
    acc_init = c.dp_init
    if WIDTH.backward.split_dkdv:
        if not INT8_DP:  # delta is a plane of row values
            LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
            acc_init = gl.broadcast(plane(rows, 2, BLOCK_Q, LAYOUT), acc_init)[0]
        PIECES: gl.constexpr = memory.q_t.shape[0]
        IN_REGS: gl.constexpr = len(c.v_in_regs)
        # loop-invariant addresses would all be kept in registers through the loop, and spill
        v, do = pieces_of(memory.v, opaque(CONSUMER), PIECES), pieces_of(memory.do, opaque(stage), PIECES)
        v = c.v_in_regs + v[IN_REGS:]
        dp = warpgroup_mma(v[0], do[0].permute((1, 0)), acc_init, use_acc=not INT8_DP, is_async=True)
        for piece in gl.static_range(1, PIECES):
            dp = warpgroup_mma(v[piece], do[piece].permute((1, 0)), dp, is_async=True)  # dP^T += V dO^T
        return dp
    else:
        OPAQUE: gl.constexpr = WIDTH.backward.half_n and c.tensors.dq_semaphore is not None
        if INT8_DP:
            return dp_codes(memory.v, CONSUMER, memory.do, stage, acc_init, OPAQUE)
        else:
            return dp_minus_delta(c.ones, memory.delta, memory.v, CONSUMER, memory.do, stage, acc_init, OPAQUE)


@gluon.jit
def release(c, step, stage):
    """Let the stage and the slot of dS that a step has read be written anew."""
    mbarrier.arrive(c.barriers.ds_empty.index(step.before), count=1)
    mbarrier.arrive(c.barriers.empty.index(stage), count=1)


@gluon.jit
def products_whole(c, step, operands, dv, dk, stage, more, CONSUMER: gl.constexpr, WIDTH: gl.constexpr):
    """Steps 5 to 7 where registers are many: one after the other, then S^T of the next block."""
    memory, dq_sem, ds_full, full = c.memory, c.tensors.dq_semaphore, c.barriers.ds_full, c.barriers.full
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    STAGES: gl.constexpr = WIDTH.backward.stages
    QUERY: gl.constexpr = 0 if WIDTH.backward.dq_swap_ab else CONSUMER * ROWS
    LAYOUT: gl.constexpr = accumulator_layout(dk)
    acc_init = gl.zeros(dk[0].shape, gl.float32, LAYOUT)
    dv, dk, dq = accumulate_whole(  # dV += P^T dO, dK += dS^T Q, dQ^T = K^T dS^T
        dv, dk, operands, (memory.do_t, memory.q_t), stage, step.scales, c.k_t, c.ds_smem, step.before,
        ds_full, step.before_phase, acc_init, c.dq_init, QUERY, BLOCK_Q, LAYOUT,
    )  # fmt: skip
    release(c, step, stage)
    store_dq(c.dq_part, dq * c.sum_scale, dq_sem, step.counter_before)
    # not before: dQ's registers are needed
    s = scores(c.k, memory.q, full, step.number + 1, more, c.s_init, False, STAGES)  # S^T = K Q^T
    row, column = dq_row_and_column(c, step.to_row, step.to_block, WIDTH)
    add_dq(c.dq_desc, c.dq_part, row, column, dq_sem, step.counter, step.rank, step.count)  # dQ^T += K^T dS^T
    return s, dv, dk


@gluon.jit
def products_in_halves(c, step, operands, dv, dk, stage, more, CONSUMER: gl.constexpr, WIDTH: gl.constexpr):
    """Steps 5 to 7 where registers are short (`accumulate_half_n`): S^T of the next block runs beside dQ^T."""
    memory, dq_sem, ds_full, full = c.memory, c.tensors.dq_semaphore, c.barriers.ds_full, c.barriers.full
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    STAGES: gl.constexpr = WIDTH.backward.stages
    opaque_false = step.number < 0
    dv, dk, dq, free = accumulate_half_n(  # dV += P^T dO, dK += dS^T Q, dQ^T = K^T dS^T
        dv, dk, operands[0], operands[1], memory.do_t.index(stage), memory.q_t.index(stage),
        step.scales, c.k_t, c.ds_smem, step.before, ds_full, step.before_phase, opaque_false,
        accumulator_layout(dk), BLOCK_Q,
    )  # fmt: skip
    free = free.to(gl.int32, bitcast=True)
    s = scores(c.k, memory.q, full, step.number + 1, more, free, opaque_false, STAGES)  # S^T = K Q^T
    dq = warpgroup_mma_wait(1, deps=[dq])
    release(c, step, stage)
    store_dq(c.dq_part, dq * c.sum_scale, dq_sem, step.counter_before)
    row, column = dq_row_and_column(c, step.to_row, step.to_block, WIDTH)
    add_dq(c.dq_desc, c.dq_part, row, column, dq_sem, step.counter, step.rank, step.count)  # dQ^T += K^T dS^T
    return s, dv, dk


@gluon.jit
def products_in_pieces(c, step, operands, dv, dk, stage, more, CONSUMER: gl.constexpr, WIDTH: gl.constexpr):
    """Steps 5 to 7 by pieces of channels (`accumulate_in_pieces`), and dQ by rows."""
    memory, dq_sem, ds_full, full = c.memory, c.tensors.dq_semaphore, c.barriers.ds_full, c.barriers.full
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    STAGES: gl.constexpr = WIDTH.backward.stages
    PIECES: gl.constexpr = len(dk)
    dv, dk, dq, dq_half = accumulate_in_pieces(  # dV += P^T dO, dK += dS^T Q, dQ = dS K
        dv, dk, operands, (memory.do_t, memory.q_t), stage, step.scales, c.k_t_smem, c.ds_smem,
        step.before, ds_full, step.before_phase, step.number < 0, CONSUMER, accumulator_layout(dk),
    )  # fmt: skip
    store_dq(c.dq_smem[2].index(CONSUMER), dq_half * c.sum_scale, dq_sem, step.counter_before)
    k = c.k
    if not WIDTH.backward.k_in_regs:
        # descriptors of before the loop would be kept in registers
        k = pieces_of(memory.k, opaque(CONSUMER), PIECES)
    s = scores(k, memory.q, full, step.number + 1, more, c.s_init, False, STAGES)  # S^T = K Q^T
    dq = warpgroup_mma_wait(PIECES, deps=[dq])
    release(c, step, stage)
    dq = dq * c.sum_scale
    row, _ = dq_row_and_column(c, step.to_row, step.to_block, WIDTH)
    add_dq_rows(c.dq_desc, c.dq_smem, dq, row, CONSUMER, dq_sem, step.counter, step.rank, step.count)  # dQ += dS K
    return s, dv, dk


@gluon.jit
def products_without_dv(c, step, ds_fp8, dv, dk, stage, phase, CONSUMER: gl.constexpr, WIDTH: gl.constexpr):
    """Steps 6 and 7, 64 channels at a time in alternating sets of registers; the first part of dQ runs beside dK.

    Each operand of queries is released as soon as it has been read: Q after S, dO after dP, Q^T after dK.
    """
    memory, dq_sem, barriers = c.memory, c.tensors.dq_semaphore, c.barriers
    Q_STAGES: gl.constexpr = WIDTH.backward.q_stages
    PIECES: gl.constexpr = memory.q_t.shape[0]
    PARTS: gl.constexpr = WIDTH.head_dim // ROWS
    LAYOUT: gl.constexpr = accumulator_layout(dk)
    # its half of dQ, in two parts: the first 64 channels, the second as many, or half of what is left
    FIRST: gl.constexpr = CONSUMER * 2 * ROWS if PIECES == 1 else 0
    SECOND: gl.constexpr = FIRST + ROWS if PIECES == 1 else CONSUMER * (ROWS // 2)
    FIRST_PIECE: gl.constexpr = 0 if PIECES == 1 else CONSUMER
    BOX: gl.constexpr = c.dq_smem[0].shape[2]
    acc_init = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    rest_init = gl.zeros([ROWS, BOX], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BOX, 32]))
    opaque_false = step.number < 0
    mbarrier.wait(barriers.ds_full.index(step.before), step.before_phase)
    dq = dq_rows_product(c.k_t_smem, c.ds_smem, step.before, acc_init, opaque(FIRST_PIECE), FIRST)  # dQ = dS K
    mbarrier.wait(barriers.full.index(barrier_of(OF_COPIES, 0, WIDTH)), step.number & 1)
    q_t = parts_of_copy(memory.q_t, 0, ROWS, PARTS)
    first = new_product(ds_fp8, q_t[0], acc_init)  # dS^T Q
    dk_scale = plane(memory.scales.index(0), 1, 1, LAYOUT)
    dq = warpgroup_mma_wait(1, deps=[dq])
    store_dq_part(c.dq_smem, dq * c.sum_scale, dq_sem, step.counter_before, CONSUMER, False)
    second = new_product(ds_fp8, q_t[1], dq, opaque_false)  # dS^T Q
    add_dq_part(c.dq_desc, c.dq_smem, step.to_row, dq_sem, step.counter, step.rank, step.count, CONSUMER, False)  # dQ += dS K
    dk_new, free, last = accumulate_alternating(dk, (first, second), ds_fp8, q_t, dk_scale, opaque_false)
    if PIECES == 1:
        dq = dq_rows_product(c.k_t_smem, c.ds_smem, step.before, free, opaque(0), SECOND, opaque_false)  # dQ = dS K
    else:
        dq = dq_rows_product(c.k_t_smem, c.ds_smem, step.before, rest_init, opaque(PIECES - 1), SECOND)  # dQ = dS K
    last = warpgroup_mma_wait(2, deps=[last])  # dQ's are two
    mbarrier.arrive(barriers.empty.index(barrier_of(OF_COPIES, 0, WIDTH)), count=1)
    dk_new += (fma_in_place(dk[PARTS - 1], last, dk_scale),)  # dK += dS^T Q
    more = is_followed(step)
    free = last.to(gl.int32, bitcast=True)
    stage, phase = ring(step.number + 1, Q_STAGES) if Q_STAGES > 1 else (0, phase ^ 1)
    mbarrier.wait(barriers.full.index(barrier_of(OF_Q, stage, WIDTH)), phase, pred=more)
    k = c.k
    if not WIDTH.backward.k_in_regs:
        k = pieces_of(memory.k, opaque(CONSUMER), PIECES)
    q = pieces_of(memory.q, opaque(stage), PIECES)
    s = warpgroup_mma(k[0], q[0].permute((1, 0)), free, use_acc=opaque_false, is_async=True)  # S^T = K Q^T
    for piece in gl.static_range(1, PIECES):
        s = warpgroup_mma(k[piece], q[piece].permute((1, 0)), s, is_async=True)  # S^T += K Q^T
    dq = warpgroup_mma_wait(PIECES, deps=[dq])
    mbarrier.arrive(barriers.ds_empty.index(step.before), count=1)
    # the semaphore was acquired with the first part
    store_dq_part(c.dq_smem, dq * c.sum_scale, None, -1, CONSUMER, True)
    add_dq_part(c.dq_desc, c.dq_smem, step.to_row, None, -1, 0, 0, CONSUMER, True)  # dQ += dS K
    return s, dv, dk_new


@gluon.jit
def dq_row_and_column(c, to_row, to_block, WIDTH: gl.constexpr):
    """Where TMA adds a warpgroup's dQ of a block of queries: a row and a column of dQ^T, or the first of 64 rows."""
    if WIDTH.backward.split_dkdv:
        return (to_row * c.sizes.blocks_q + c.block_0 + to_block) * WIDTH.backward.queries, 0
    elif c.k_t is None:
        return to_row * c.pitch + c.column + to_block * WIDTH.backward.queries, 0
    else:
        return to_row, c.column + to_block * WIDTH.backward.queries


class Added(NamedTuple):
    """What `m_blocks` leaves to be added to dQ: the last block's place, and the semaphore of the one before."""

    row: gl.tensor
    block: gl.tensor
    rank: gl.tensor
    counter_before: gl.tensor


@gluon.jit
def m_blocks(
    c, m_range, at, first_head, tile_index, begun, dk, dv, CONSUMER: gl.constexpr, KIND: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """`m_block` of every query block of every head that sees the keys. Returns S^T, dV, dK, steps, and what is `Added`.

    at: where their list of blocks begins, if there is one. tile_index, begun: tiles, and steps, before these.
    """
    tensors, sizes = c.tensors, c.sizes
    sparse, dq_sem = tensors.block_sparse, tensors.dq_semaphore
    begin, end, loops = m_range.begin, m_range.end, m_range.loops
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    SPLIT: gl.constexpr = WIDTH.backward.split_dkdv
    LISTED: gl.constexpr = sparse is not None
    JUMPS: gl.constexpr = cut_at_both_ends(KIND) and not LISTED  # from block to block
    BY_ROWS: gl.constexpr = c.k_t is None
    # dQ^T has a row a channel, of which a warpgroup may have half; dQ has rows of its own
    HEAD: gl.constexpr = 1 if BY_ROWS else WIDTH.head_dim
    CHANNEL: gl.constexpr = CONSUMER * ROWS if WIDTH.backward.dq_swap_ab and not BY_ROWS else 0
    heads = sizes.group if KIND.GROUPED and not LISTED else 1  # one alone is no loop
    counter_before, last_row = -1, first_head * HEAD + CHANNEL
    s = scores(c.k, c.memory.q, c.barriers.full, begun, begin < end, c.s_init, False, 1 if WIDTH.backward.split_dkdv else WIDTH.backward.stages)  # S^T = K Q^T
    last_rank, last_entry, last_block = 0, 0, end
    if LISTED:
        _, last_entry, last_rank = listed_block(sparse, at, 0)
    until = begun + (end - begin) * heads
    for head in range(heads):
        row = (first_head + head) * HEAD + CHANNEL
        for part in gl.static_range(len(loops)):
            ahead = begun + loops[part][2]
            for number in range(loops[part][0], loops[part][1]):
                i = masked_m_block(number, m_range, KIND) if part == 0 else number
                step = number + ahead
                block = step + tile_index
                stage, phase = ring(step, stages_of(WIDTH))
                before, before_phase = ring(block, SLOTS)
                slot, slot_phase = ring(block + 1, SLOTS)
                rows, scales = c.memory.rows.index(stage), c.memory.scales.index(stage)
                # where this step adds dQ^T of the step before; at a tile's first step 0 times K, NaN if K has NaN:
                # to a block of this sequence, never to the sequence before
                to_row, to_block, known_rank, entry_at, first_q = row, gl.maximum(i, 1), None, 0, i * BLOCK_Q
                if LISTED:
                    last_head, last_block = head_and_block(last_entry)
                    to_row, to_block = (first_head + last_head) * HEAD + CHANNEL, last_block + 1
                    known_rank = last_rank
                    entry_at, last_entry, last_rank = listed_block(sparse, at, number)
                    first_q = head_and_block(last_entry)[1] * BLOCK_Q
                elif JUMPS:
                    to_block, last_block = last_block, i + 1
                elif KIND.GROUPED:
                    to_row, to_block = gl.where(i == begin, last_row, row), gl.where(i == begin, end, i)
                counter, rank, count = counter_rank_and_count(
                    to_row, to_block, c.first_k, c.block_0, sizes.blocks_q, c.work_tile, c.seq_q, dq_sem, CONSUMER,
                    KIND, BLOCK_Q, HEAD, known_rank,
                )  # fmt: skip
                counter = gl.where(step == 0, -1, counter)
                if SPLIT:
                    to_row, _ = dq_row_and_column(c, to_row, to_block, WIDTH)
                left = (step, until) if JUMPS else (number, end, head, heads)
                this = Step(
                    step, left, first_q, entry_at, stage, phase, rows, scales, slot, slot_phase, before, before_phase, to_row, to_block, counter,
                    rank, count, counter_before,
                )  # fmt: skip
                s, dv, dk = m_block(c, this, s, dv, dk, part == 0, CONSUMER, KIND, WIDTH)
                counter_before = counter
        last_row = row
        begun += end - begin
    if LISTED:
        last_head, last_block = head_and_block(last_entry)
        last_row, last_block = (first_head + last_head) * HEAD + CHANNEL, last_block + 1
    return s, dv, dk, begun, Added(last_row, last_block, last_rank, counter_before)
