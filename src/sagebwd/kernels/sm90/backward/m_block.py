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
from sagebwd.kernels.sm90.backward.dq_sums import (
    add_dq,
    add_dq_part,
    add_dq_rows,
    dq_parts,
    dq_rows_product,
    store_dq,
    store_dq_part,
    zeros_of_rest,
)
from sagebwd.kernels.sm90.backward.fp32_accumulate import (
    accumulate_alternating,
    accumulate_half_n,
    accumulate_in_pieces,
    accumulate_whole,
    fma_in_place,
    new_product,
)
from sagebwd.kernels.sm90.backward.key_blocks import SeqQ, TileCoord
from sagebwd.kernels.sm90.backward.loads import OF_COPIES, OF_DO, OF_Q, Barriers, Loaded, barrier_of
from sagebwd.kernels.sm90.backward.scores import (
    dp_minus_delta,
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
    parts_of_copy,
    pieces_of,
    result,
    ring,
    store_transposed,
)


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
    left: tuple  # numbers and ends of the loops around it (`is_followed`)
    first_q: gl.tensor
    entry_at: gl.tensor  # its entry in a list of blocks
    stage: gl.tensor  # where its operands are
    phase: gl.tensor
    rows: gl.shared_memory_descriptor  # its row values
    scales: gl.shared_memory_descriptor  # of its e4m3 copies
    slot: gl.tensor  # where its dS goes
    slot_phase: gl.tensor
    before: gl.tensor  # where dS of the block before is
    before_phase: gl.tensor
    to_row: gl.tensor  # where dQ of the block before goes (`dq_row_and_column`)
    to_block: gl.tensor
    counter: gl.tensor  # its semaphore (`counter_rank_and_count`)
    rank: gl.tensor
    count: gl.tensor
    counter_before: gl.tensor  # that of the dQ before it


@gluon.constexpr_function
def stages_of(width):
    """Stages of Q and dO."""
    return width.backward.q_stages if width.backward.split_dkdv else width.backward.stages


@gluon.constexpr_function
def accumulator_layout(pieces):
    """Of one of dK's or dV's pieces."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, pieces[0].shape[1], 32])


@gluon.jit
def is_followed(step):
    """Whether another step follows."""
    left = step.left
    if len(left) == 2:
        return left[0] + 1 < left[1]
    else:
        return (left[0] + 1 < left[1]) | (left[2] + 1 < left[3])


@gluon.jit
def m_block(c, step, s, dv, dk, MASKED: gl.constexpr, CONSUMER: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr):
    """Add a block of queries to dV and dK of 64 keys, and the block before it to dQ. Returns S^T of the next, dV, dK.

    s: the block's S^T, in flight. dv: none where another kernel computes it. MASKED: a mask or an end may cut the
    block.
    """
    tensors = c.tensors
    full, empty, ds_full, ds_empty = c.barriers.full, c.barriers.empty, c.barriers.ds_full, c.barriers.ds_empty
    SPLIT: gl.constexpr = WIDTH.backward.split_dkdv
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(dk), 4)
    stage = step.stage

    # (1) [GEMM] S^T = K Q^T. It has been queued in the step before, alone: of two products in flight across the loop's
    # end ptxas would wait for one at once.
    s = warpgroup_mma_wait(0, deps=[s])
    if SPLIT:
        mbarrier.arrive(empty.index(barrier_of(OF_Q, stage, WIDTH)), count=1)

    # (2) [GEMM] dP^T - delta = V dO^T - delta
    mbarrier.wait(full.index(barrier_of(OF_DO, stage, WIDTH)), step.phase)
    rows = c.memory.rows.index(stage) if SPLIT else step.rows
    dp = queue_dp(c, step, rows, CONSUMER, WIDTH)

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
    # (7) [GEMM] dQ += dS K, of the block before; beside it (1) of the block after
    if SPLIT:
        return products_without_dv(c, step, ds_fp8, dv, dk, CONSUMER, WIDTH)
    else:
        mbarrier.wait(full.index(barrier_of(OF_COPIES, stage, WIDTH)), step.phase)
        more = is_followed(step)
        if c.k_t is None:
            return products_in_pieces(c, step, more, (p_fp8, ds_fp8), dv, dk, CONSUMER, WIDTH)
        elif WIDTH.backward.half_n:
            return products_in_halves(c, step, more, (p_fp8, ds_fp8), dv, dk, WIDTH)
        else:
            return products_whole(c, step, more, (p_fp8, ds_fp8), dv, dk, CONSUMER, WIDTH)


@gluon.jit
def queue_dp(c, step, rows, CONSUMER: gl.constexpr, WIDTH: gl.constexpr):
    """dP^T - delta = V dO^T - delta of a step; in flight."""
    memory = c.memory
    if WIDTH.backward.split_dkdv:
        BLOCK_Q: gl.constexpr = WIDTH.backward.queries
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
        PIECES: gl.constexpr = memory.q_t.shape[0]
        IN_REGS: gl.constexpr = len(c.v_in_regs)
        dp = gl.broadcast(plane(rows, 2, BLOCK_Q, LAYOUT), c.dp_init)[0]  # -delta, a plane of row values
        # loop-invariant addresses would all be kept in registers through the loop, and spill
        v, do = pieces_of(memory.v, opaque(CONSUMER), PIECES), pieces_of(memory.do, opaque(step.stage), PIECES)
        v = c.v_in_regs + v[IN_REGS:]
        for piece in gl.static_range(PIECES):
            dp = warpgroup_mma(v[piece], do[piece].permute((1, 0)), dp, is_async=True)  # dP^T - delta += V dO^T
        return dp
    else:
        OPAQUE: gl.constexpr = WIDTH.backward.half_n and c.tensors.dq_semaphore is not None
        return dp_minus_delta(c.ones, memory.delta, memory.v, CONSUMER, memory.do, step.stage, c.dp_init, OPAQUE)


@gluon.jit
def release(c, step):
    """Let the operands and the dS that a step has read be overwritten."""
    mbarrier.arrive(c.barriers.ds_empty.index(step.before), count=1)
    mbarrier.arrive(c.barriers.empty.index(step.stage), count=1)


@gluon.jit
def products_whole(c, step, more, operands, dv, dk, CONSUMER: gl.constexpr, WIDTH: gl.constexpr):
    """Steps 5 to 7 where registers are many (`accumulate_whole`). operands: P^T and dS^T in e4m3."""
    memory, dq_sem, full = c.memory, c.tensors.dq_semaphore, c.barriers.full
    QUERY: gl.constexpr = 0 if WIDTH.backward.dq_swap_ab else CONSUMER * ROWS
    LAYOUT: gl.constexpr = accumulator_layout(dk)
    acc_init = gl.zeros(dk[0].shape, gl.float32, LAYOUT)
    dv, dk, dq = accumulate_whole(  # dV += P^T dO, dK += dS^T Q, dQ^T = K^T dS^T
        dv, dk, operands, (memory.do_t, memory.q_t), step.stage, step.scales, c.k_t, c.ds_smem, step.before,
        c.barriers.ds_full, step.before_phase, acc_init, c.dq_init, QUERY, WIDTH.backward.queries, LAYOUT,
    )  # fmt: skip
    release(c, step)
    store_dq(c.dq_part, dq * c.sum_scale, dq_sem, step.counter_before)
    # not before: dQ's registers are needed
    s = scores(c.k, memory.q, full, step.number + 1, more, c.s_init, False, stages_of(WIDTH))  # S^T = K Q^T
    row, column = dq_row_and_column(c, step.to_row, step.to_block, WIDTH)
    add_dq(c.dq_desc, c.dq_part, row, column, dq_sem, step.counter, step.rank, step.count)  # dQ^T += K^T dS^T
    return s, dv, dk


@gluon.jit
def products_in_halves(c, step, more, operands, dv, dk, WIDTH: gl.constexpr):
    """Steps 5 to 7 where registers are few (`accumulate_half_n`): S^T of the next block runs beside dQ^T."""
    memory, dq_sem, full = c.memory, c.tensors.dq_semaphore, c.barriers.full
    opaque_false = step.number < 0
    dv, dk, dq, free = accumulate_half_n(  # dV += P^T dO, dK += dS^T Q, dQ^T = K^T dS^T
        dv, dk, operands[0], operands[1], memory.do_t.index(step.stage), memory.q_t.index(step.stage), step.scales,
        c.k_t, c.ds_smem, step.before, c.barriers.ds_full, step.before_phase, opaque_false, accumulator_layout(dk),
        WIDTH.backward.queries,
    )  # fmt: skip
    free = free.to(gl.int32, bitcast=True)
    s = scores(c.k, memory.q, full, step.number + 1, more, free, opaque_false, stages_of(WIDTH))  # S^T = K Q^T
    dq = warpgroup_mma_wait(1, deps=[dq])
    release(c, step)
    store_dq(c.dq_part, dq * c.sum_scale, dq_sem, step.counter_before)
    row, column = dq_row_and_column(c, step.to_row, step.to_block, WIDTH)
    add_dq(c.dq_desc, c.dq_part, row, column, dq_sem, step.counter, step.rank, step.count)  # dQ^T += K^T dS^T
    return s, dv, dk


@gluon.jit
def products_in_pieces(c, step, more, operands, dv, dk, CONSUMER: gl.constexpr, WIDTH: gl.constexpr):
    """Steps 5 to 7 by pieces of channels (`accumulate_in_pieces`), and dQ by rows."""
    memory, dq_sem, full = c.memory, c.tensors.dq_semaphore, c.barriers.full
    PIECES: gl.constexpr = len(dk)
    dv, dk, dq, dq_half = accumulate_in_pieces(  # dV += P^T dO, dK += dS^T Q, dQ = dS K
        dv, dk, operands, (memory.do_t, memory.q_t), step.stage, step.scales, c.k_t_smem, c.ds_smem, step.before,
        c.barriers.ds_full, step.before_phase, step.number < 0, CONSUMER, accumulator_layout(dk),
    )  # fmt: skip
    store_dq(c.dq_smem[2].index(CONSUMER), dq_half * c.sum_scale, dq_sem, step.counter_before)
    k = c.k
    if not WIDTH.backward.k_in_regs:
        # descriptors of before the loop would be kept in registers
        k = pieces_of(memory.k, opaque(CONSUMER), PIECES)
    s = scores(k, memory.q, full, step.number + 1, more, c.s_init, False, stages_of(WIDTH))  # S^T = K Q^T
    dq = warpgroup_mma_wait(PIECES, deps=[dq])
    release(c, step)
    dq = dq * c.sum_scale
    row, _ = dq_row_and_column(c, step.to_row, step.to_block, WIDTH)
    add_dq_rows(c.dq_desc, c.dq_smem, dq, row, CONSUMER, dq_sem, step.counter, step.rank, step.count)  # dQ += dS K
    return s, dv, dk


@gluon.jit
def products_without_dv(c, step, ds_fp8, dv, dk, CONSUMER: gl.constexpr, WIDTH: gl.constexpr):
    """Steps 6 and 7, 64 channels at a time in alternating sets of registers; dQ by rows, in two parts (`dq_parts`).

    Each operand of queries is released as soon as it has been read: Q after S, dO after dP, Q^T here.
    """
    memory, dq_sem, barriers = c.memory, c.tensors.dq_semaphore, c.barriers
    Q_STAGES: gl.constexpr = WIDTH.backward.q_stages
    PIECES: gl.constexpr = memory.q_t.shape[0]
    PARTS: gl.constexpr = len(dk)
    LAYOUT: gl.constexpr = accumulator_layout(dk)
    FIRST: gl.constexpr = dq_parts(CONSUMER, PIECES)[0]
    SECOND: gl.constexpr = dq_parts(CONSUMER, PIECES)[1]
    acc_init = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    opaque_false = step.number < 0
    mbarrier.wait(barriers.ds_full.index(step.before), step.before_phase)
    dq = dq_rows_product(c.k_t_smem, c.ds_smem, step.before, acc_init, opaque(FIRST[0]), FIRST[1])  # dQ = dS K
    mbarrier.wait(barriers.full.index(barrier_of(OF_COPIES, 0, WIDTH)), step.number & 1)
    q_t = parts_of_copy(memory.q_t, 0, ROWS, PARTS)
    first = new_product(ds_fp8, q_t[0], acc_init)  # dS^T Q, channels 0 to 63
    dk_scale = plane(memory.scales.index(0), 1, 1, LAYOUT)
    dq = warpgroup_mma_wait(1, deps=[dq])
    store_dq_part(c.dq_smem, dq * c.sum_scale, dq_sem, step.counter_before, CONSUMER, False)
    second = new_product(ds_fp8, q_t[1], dq, opaque_false)  # dS^T Q, channels 64 to 127
    add_dq_part(  # dQ += dS K
        c.dq_desc, c.dq_smem, step.to_row, dq_sem, step.counter, step.rank, step.count, CONSUMER, False
    )
    dk_new, free, last = accumulate_alternating(  # dK += dS^T Q, but for the last channels
        dk, (first, second), ds_fp8, q_t, dk_scale, opaque_false
    )
    if PIECES == 1:
        dq = dq_rows_product(c.k_t_smem, c.ds_smem, step.before, free, opaque(0), SECOND[1], opaque_false)  # dQ = dS K
    else:
        dq = dq_rows_product(  # dQ = dS K
            c.k_t_smem, c.ds_smem, step.before, zeros_of_rest(c.dq_smem), opaque(SECOND[0]), SECOND[1]
        )
    last = warpgroup_mma_wait(2, deps=[last])  # dQ's are two
    mbarrier.arrive(barriers.empty.index(barrier_of(OF_COPIES, 0, WIDTH)), count=1)
    dk_new += (fma_in_place(dk[PARTS - 1], last, dk_scale),)  # dK += dS^T Q
    more = is_followed(step)
    free = last.to(gl.int32, bitcast=True)
    stage, phase = ring(step.number + 1, Q_STAGES) if Q_STAGES > 1 else (0, step.phase ^ 1)
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
