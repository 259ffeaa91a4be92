"""dV on Hopper where dK and dV have no room beside one another; `key_query_kernel` makes dK and dQ.

dK and dV of 128 keys of 256 channels together would be the whole register file. dV needs S alone of what both need, so
that this cut computes least twice. A warp loads by TMA; two warpgroups hold 64 keys each and share every block of
queries that it loads. Otherwise as `kernel`.
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

from sagebwd.kernels.sm90.backward.epilogue import store_pieces
from sagebwd.kernels.sm90.backward.key_blocks import heads_and_band, keys_of
from sagebwd.kernels.sm90.backward.promotion import add_here, new_product
from sagebwd.kernels.sm90.backward.scores import keys_and_scales, plane, probabilities, same_of_pairs
from sagebwd.kernels.sm90.backward.tile import (
    CONSUMERS,
    LOG2_E,
    ROWS,
    block_range,
    load_tile,
    operand_float8,
    padded_block,
    program_number,
    ring,
    sequence,
)


@gluon.jit
def load(
    operands, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr, STAGES: gl.constexpr, BLOCK_Q: gl.constexpr,
    BLOCK_D: gl.constexpr,
):  # fmt: skip
    """The loading warp: K once, then Q, dO's transposed copy and row values of each block of each head's queries."""
    descriptors, memory, barriers, origin, first_k, blocks, heads, sizes = operands
    q_desc, k_desc, do_t_desc, rows_desc, scales_desc = descriptors
    q_memory, k_memory, do_t_memory, rows_memory, scales_memory = memory
    keys_full, full, empty = barriers
    row_k, column_k, row_q, row_q_h, column_q = origin
    blocks_q, z_q, block_0 = blocks
    length_q, lower, upper = sizes
    SPAN: gl.constexpr = CONSUMERS * ROWS
    mbarrier.expect(keys_full, SPAN * BLOCK_D)
    for consumer in gl.static_range(CONSUMERS):
        load_tile(k_desc, [row_k + first_k + consumer * ROWS, column_k], keys_full, k_memory.index(consumer))
    begin, _, _, end = block_range(first_k, length_q, -upper, -lower, SPAN, BLOCK_Q, HAS_UPPER, HAS_LOWER, False)
    step = gl.to_tensor(0)
    for head in range(heads[0], heads[1]):
        z = z_q + head
        for i in range(begin, end):
            stage, phase = ring(step, STAGES)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            ready = full.index(stage * 2)
            copy_ready = full.index(stage * 2 + 1)
            padded = z * blocks_q + block_0 + i
            mbarrier.expect(ready, BLOCK_Q * BLOCK_D + rows_memory.shape[2] * 4)
            load_tile(q_desc, [row_q + head * row_q_h + i * BLOCK_Q, head * column_q], ready, q_memory.index(stage))
            load_tile(rows_desc, [padded, 0], ready, rows_memory.index(stage))
            mbarrier.expect(copy_ready, BLOCK_Q * BLOCK_D + scales_memory.shape[2] * 4)
            load_tile(scales_desc, [padded, 0], copy_ready, scales_memory.index(stage))
            load_tile(do_t_desc, [z * BLOCK_D, (block_0 + i) * BLOCK_Q], copy_ready, do_t_memory.index(stage))
            step += 1


@gluon.jit
def scores(k_low, k_high, q_memory, full, step, more, none, never, STAGES: gl.constexpr):
    """As `scores.scores`, of the halves of K's channels: two products, one after the other."""
    HALF: gl.constexpr = k_high.shape[1]
    stage, phase = ring(step, STAGES)
    mbarrier.wait(full.index(stage * 2), phase, pred=more)
    q = q_memory.index(stage)
    s = warpgroup_mma(k_low, q.slice(0, HALF, 1).permute((1, 0)), none, use_acc=never, is_async=True)
    return warpgroup_mma(k_high, q.slice(HALF, HALF, 1).permute((1, 0)), s, is_async=True)


@gluon.jit
def accumulate(
    shared, CONSUMER: gl.constexpr, GROUPED: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
    VARLEN: gl.constexpr, RAGGED: gl.constexpr, STAGES: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: dV of 64 keys."""
    memory, barriers, pointers, dv_desc, call, strides, scale = shared
    q_memory, k_memory, do_t_memory, rows_memory, scales_memory = memory
    keys_full, full, empty = barriers
    k_scale, key_mask, dv = pointers
    cu_seqlens_q, _, heads_k, group, tokens_q, tokens_k, total_k, _, _, _, _, _ = call
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 32])
    # 64 channels of dV are a piece
    PIECE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PIECE, 4)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    SPAN: gl.constexpr = CONSUMERS * ROWS
    gl.static_assert(BLOCK_D == 4 * ROWS)
    # a loop of its own for blocks that no mask cuts
    PARTS: gl.constexpr = 2 if HAS_UPPER and not HAS_LOWER and not GROUPED else 1
    batch, head_k, start_k, length_k, first_k = keys_of(gl.program_id(0), 0, call, VARLEN, False, True)
    _, length_q = sequence(cu_seqlens_q, batch, tokens_q, VARLEN)
    _, z_k, lower, upper = heads_and_band(batch, head_k, length_q, length_k, call, VARLEN)
    begin, whole_from, _, end = block_range(
        first_k, length_q, -upper, -lower, SPAN, BLOCK_Q, HAS_UPPER, HAS_LOWER, False
    )
    edges = (begin, whole_from, end) if PARTS == 2 else (begin, end)
    first_k += CONSUMER * ROWS
    keys, keep_key, key_scale = keys_and_scales(
        k_scale, key_mask, batch, z_k, start_k, length_k, first_k, tokens_k, total_k, ROW
    )  # fmt: skip
    key_scale = same_of_pairs(key_scale * (scale * LOG2_E), ROW)
    no_scores = gl.zeros([ROWS, BLOCK_Q], gl.int32, S_LAYOUT)
    none = gl.zeros([ROWS, ROWS], gl.float32, PIECE)
    dv_0 = none
    dv_1 = none
    dv_2 = none
    dv_3 = none
    mbarrier.wait(keys_full, 0)
    k = k_memory.index(CONSUMER)
    # as registers are left: tensor cores need not read it from shared memory again and again
    k_low = k.slice(0, BLOCK_D // 2, 1).load(gl.DotOperandLayout(0, S_LAYOUT, 4))
    k_high = k.slice(BLOCK_D // 2, BLOCK_D // 2, 1)
    begun = 0
    s = scores(k_low, k_high, q_memory, full, begun, begin < end, no_scores, False, STAGES)
    # one head alone is no loop
    heads = group if GROUPED else 1
    for head in range(heads):
        ahead = begun - begin
        for part in gl.static_range(PARTS):
            for i in range(edges[part], edges[part + 1]):
                step = i + ahead
                stage, phase = ring(step, STAGES)
                # alone in flight across the loop's end: of two, ptxas would wait at once
                s = warpgroup_mma_wait(0, deps=[s])
                p = probabilities(
                    s, rows_memory.index(stage), key_scale, keys, keep_key, i * BLOCK_Q, first_k, length_q, length_k,
                    lower, upper, key_mask, HAS_LOWER, HAS_UPPER and part == 0, False, BLOCK_Q, S_LAYOUT,
                )[0]  # fmt: skip
                codes = operand_float8(p, OPERAND)
                mbarrier.wait(full.index(stage * 2 + 1), phase)
                never = step < 0
                copy = do_t_memory.index(stage)
                # two sets of registers in turn: one's product runs while the other's is added up
                first = new_product(codes, copy.slice(0, ROWS, 0), none)
                second = new_product(codes, copy.slice(ROWS, ROWS, 0), none)
                dv_scale = plane(scales_memory.index(stage), 0, 1, PIECE)
                first = warpgroup_mma_wait(1, deps=[first])
                dv_0 = add_here(dv_0, first, dv_scale)
                first = new_product(codes, copy.slice(2 * ROWS, ROWS, 0), first, never)
                second = warpgroup_mma_wait(1, deps=[second])
                dv_1 = add_here(dv_1, second, dv_scale)
                second = new_product(codes, copy.slice(3 * ROWS, ROWS, 0), second, never)
                first = warpgroup_mma_wait(1, deps=[first])
                dv_2 = add_here(dv_2, first, dv_scale)
                more = (i + 1 < end) | (head + 1 < heads)
                free = first.to(gl.int32, bitcast=True)
                s = scores(k_low, k_high, q_memory, full, step + 1, more, free, never, STAGES)
                second = warpgroup_mma_wait(2, deps=[second])  # S's are two
                mbarrier.arrive(empty.index(stage), count=1)
                dv_3 = add_here(dv_3, second, dv_scale)
        begun += end - begin
    s = warpgroup_mma_wait(0, deps=[s])

    batch, head_k, start_k, length_k, first_k = keys_of(program_number(0), 0, call, VARLEN, False, True)
    # over this warpgroup's K
    store_pieces(
        (dv_0, dv_1, dv_2, dv_3), dv, dv_desc, k, strides, batch, head_k, start_k, length_k,
        first_k + CONSUMER * ROWS, heads_k, tokens_k, RAGGED, 2, PIECE,
    )  # fmt: skip
    # what TMA still reads must outlive the program's shared memory
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "q_b", "q_h", "q_column", "k_b", "k_h", "k_column", "heads_k", "group", "tokens_q", "tokens_k", "total_k",
        "blocks_q", "grid", "heads_at_once", "heads_in_all", "lower", "upper",
    ]
)  # fmt: skip
def value_kernel(
    q_desc, k_desc, do_t_desc, rows_desc, scales_desc, dv_desc, k_scale, key_mask, dv, cu_seqlens_q, cu_seqlens_k,
    strides, q_b, q_h, q_column, k_b, k_h, k_column, heads_k, group, tokens_q, tokens_k, total_k, blocks_q, grid,
    heads_at_once, heads_in_all, lower, upper, scale, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
    VARLEN: gl.constexpr, RAGGED: gl.constexpr, GROUPED: gl.constexpr, STAGES: gl.constexpr, BLOCK_Q: gl.constexpr,
    BLOCK_D: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dV of 128 keys of one key head, summed over the query heads that share it; arguments as `backward_kernel`'s.

    rows_desc: the first two planes. dv_desc: 64 channels at a time. strides: of dv. heads_at_once: of so many heads
    every one gets its first program before any gets its second.
    """
    call = (
        cu_seqlens_q, cu_seqlens_k, heads_k, group, tokens_q, tokens_k, total_k, grid, heads_at_once, heads_in_all,
        lower, upper,
    )  # fmt: skip
    batch, head_k, start_k, length_k, first_k = keys_of(gl.program_id(0), 0, call, VARLEN, False, True)
    if first_k >= length_k:
        return
    start_q, length_q = sequence(cu_seqlens_q, batch, tokens_q, VARLEN)
    z_q, _, lower, upper = heads_and_band(batch, head_k, length_q, length_k, call, VARLEN)
    origin = (batch * k_b + head_k * k_h + start_k, head_k * k_column, batch * q_b + start_q, q_h, q_column)

    q_memory = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_Q, BLOCK_D], q_desc.layout)
    k_memory = gl.allocate_shared_memory(gl.int8, [CONSUMERS, ROWS, BLOCK_D], k_desc.layout)
    do_t_memory = gl.allocate_shared_memory(do_t_desc.dtype, [STAGES, BLOCK_D, BLOCK_Q], do_t_desc.layout)
    rows_memory = gl.allocate_shared_memory(gl.float32, [STAGES, 1, rows_desc.block_shape[1]], rows_desc.layout)
    scales_memory = gl.allocate_shared_memory(gl.float32, [STAGES, 1, scales_desc.block_shape[1]], scales_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    keys_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES * 2, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(keys_full, count=1)
    for stage in gl.static_range(STAGES):
        for part in gl.static_range(2):
            mbarrier.init(full.index(stage * 2 + part), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()

    memory = (q_memory, k_memory, do_t_memory, rows_memory, scales_memory)
    barriers = (keys_full, full, empty)
    descriptors = (q_desc, k_desc, do_t_desc, rows_desc, scales_desc)
    shared = (memory, barriers, (k_scale, key_mask, dv), dv_desc, call, strides, scale)
    blocks = (blocks_q, z_q, padded_block(start_q, batch, BLOCK_Q, VARLEN))
    heads = (head_k * group, head_k * group + group)
    operands = (descriptors, memory, barriers, origin, first_k, blocks, heads, (length_q, lower, upper))
    # fmt: off
    gl.warp_specialize(
        [
            (accumulate, (shared, 0, GROUPED, HAS_LOWER, HAS_UPPER, VARLEN, RAGGED, STAGES, BLOCK_Q, BLOCK_D)),
            (accumulate, (shared, 1, GROUPED, HAS_LOWER, HAS_UPPER, VARLEN, RAGGED, STAGES, BLOCK_Q, BLOCK_D)),
            (load, (operands, HAS_LOWER, HAS_UPPER, STAGES, BLOCK_Q, BLOCK_D)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
    # fmt: on
