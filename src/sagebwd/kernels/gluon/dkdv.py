"""dK and dV on Hopper in Gluon: a warp loads by TMA, two warpgroups (three at head_dim 64) of 64 keys share it.

Each warpgroup meets every query block that sees its keys, recomputes S^T and dP^T, and hands P^T and dS^T to the next
products in the registers they came in. They drift apart, so that one's tensor cores work while another scales.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sagebwd.kernels.gluon.tile import (
    LOG2_E,
    ROWS,
    TINY,
    block_range,
    exp2,
    inside_band,
    load_tile,
    operand_codes,
    padded_block,
    sequence,
    visible,
)


@gluon.jit
def load_keys(
    descriptors, memory, full, origin, first_k, CONSUMERS: gl.constexpr, BLOCK_D: gl.constexpr
):  # fmt: skip
    """K and V of 64 keys a consumer from ``first_k`` on; origin: row and column of K's first, and of V's."""
    k_desc, v_desc = descriptors
    k_memory, v_memory = memory
    row_k, column_k, row_v, column_v = origin
    mbarrier.expect(full, CONSUMERS * ROWS * BLOCK_D * 3)
    for consumer in gl.static_range(CONSUMERS):
        first = first_k + consumer * ROWS
        load_tile(k_desc, [row_k + first, column_k], full, k_memory.index(consumer))
        load_tile(v_desc, [row_v + first, column_v], full, v_memory.index(consumer))


@gluon.jit
def load_queries(
    descriptors, memory, full, empty, origin, steps, heads, step, STAGES: gl.constexpr, BLOCK_Q: gl.constexpr,
    BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Q, dO, transposed copies and row values of each block of each head's queries, into a ring of stages.

    delta_desc: channels more of dO, or None; scales_desc: the copies' scales, or None. step: how many blocks the
    ring has had; returned with these counted in.
    """
    q_desc, do_desc, q_t_desc, do_t_desc, rows_desc, delta_desc, scales_desc = descriptors
    q_memory, do_memory, q_t_memory, do_t_memory, rows_memory, delta_memory, scales_memory = memory
    row_q, row_q_h, column_q, row_do, row_do_h, column_do = origin
    begin, count, blocks_q, z_q, block_0 = steps
    step = gl.to_tensor(step)
    for head in range(heads[0], heads[1]):
        z = z_q + head
        for i in range(begin, begin + count):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            ready = full.index(stage * 3)
            do_ready = full.index(stage * 3 + 1)
            copies_ready = full.index(stage * 3 + 2)
            first = i * BLOCK_Q
            padded = block_0 + i
            mbarrier.expect(ready, BLOCK_Q * BLOCK_D + rows_memory.shape[2] * 4)
            load_tile(q_desc, [row_q + head * row_q_h + first, head * column_q], ready, q_memory.index(stage))
            load_tile(rows_desc, [z * blocks_q + padded, 0], ready, rows_memory.index(stage))
            if delta_desc is None:
                mbarrier.expect(do_ready, BLOCK_Q * BLOCK_D * 2)
            else:
                mbarrier.expect(do_ready, BLOCK_Q * (BLOCK_D + delta_memory.shape[2]) * 2)
                token = (z * blocks_q + padded) * BLOCK_Q
                load_tile(delta_desc, [token, 0], do_ready, delta_memory.index(stage))
            load_tile(do_desc, [row_do + head * row_do_h + first, head * column_do], do_ready, do_memory.index(stage))
            if scales_desc is None:
                mbarrier.expect(copies_ready, BLOCK_Q * BLOCK_D * 2)
            else:
                mbarrier.expect(copies_ready, BLOCK_Q * BLOCK_D * 2 + scales_memory.shape[2] * 4)
                load_tile(scales_desc, [z * blocks_q + padded, 0], copies_ready, scales_memory.index(stage))
            load_tile(do_t_desc, [z * BLOCK_D, padded * BLOCK_Q], copies_ready, do_t_memory.index(stage))
            load_tile(q_t_desc, [z * BLOCK_D, padded * BLOCK_Q], copies_ready, q_t_memory.index(stage))
            step += 1
    return step


@gluon.jit
def load(
    operands, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr
):  # fmt: skip
    """The loading warp: the keys' K and V once, then four operands and the row values of each query block."""
    descriptors, memory, keys_full, full, empty, origin, steps, heads = operands
    q_desc, k_desc, v_desc, do_desc, q_t_desc, do_t_desc, rows_desc = descriptors
    q_memory, k_memory, v_memory, do_memory, q_t_memory, do_t_memory, rows_memory = memory
    row_k, column_k, row_v, column_v, row_q, row_q_h, column_q, row_do, row_do_h, column_do, z_q, block_0 = origin
    load_keys(
        (k_desc, v_desc), (k_memory, v_memory), keys_full, (row_k, column_k, row_v, column_v), 0, CONSUMERS, BLOCK_D
    )
    load_queries(
        (q_desc, do_desc, q_t_desc, do_t_desc, rows_desc, None, None),
        (q_memory, do_memory, q_t_memory, do_t_memory, rows_memory, None, None), full, empty,
        (row_q, row_q_h, column_q, row_do, row_do_h, column_do), (steps[0], steps[1], steps[2], z_q, block_0), heads,
        0, STAGES, BLOCK_Q, BLOCK_D,
    )  # fmt: skip


@gluon.jit
def plane(rows, index: gl.constexpr, BLOCK_Q: gl.constexpr, LAYOUT: gl.constexpr):
    """One of the row values of BLOCK_Q queries, as a row of a score tile; with BLOCK_Q 1 one number of a block."""
    return rows.slice(index * BLOCK_Q, BLOCK_Q, 1).load(LAYOUT)


@gluon.jit
def probabilities(
    s, rows, key_scale, keys, keep_key, first_q, first_k, length_q, length_k, lower, upper, key_mask,
    HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr, KEYS_END: gl.constexpr, BLOCK_Q: gl.constexpr,
    LAYOUT: gl.constexpr, A_LANE: gl.constexpr = False,
):  # fmt: skip
    """P^T, 0 where masked, and whether the block is whole: no mask cuts it, no end.

    KEYS_END: keys past the end are masked too, as they must be where dQ reduces over keys. A_LANE: key_scale is of
    `same_of_pairs`, so that a product with a query's serves two scores.
    """
    if A_LANE:
        x = s.to(gl.float32) * (plane(rows, 1, BLOCK_Q, LAYOUT) * gl.expand_dims(key_scale, 1))
    else:
        x = s.to(gl.float32) * plane(rows, 1, BLOCK_Q, LAYOUT) * gl.expand_dims(key_scale, 1)
    # masked afterwards: a branch before them would let ptxas put off all exponentials until dP is there
    p = exp2(x - plane(rows, 0, BLOCK_Q, LAYOUT))
    whole = first_q + BLOCK_Q <= length_q
    if KEYS_END:
        whole = whole & (first_k + ROWS <= length_k)
    whole = whole & inside_band(first_q, first_k, lower, upper, BLOCK_Q, ROWS, HAS_LOWER, HAS_UPPER)
    if HAS_LOWER or HAS_UPPER:  # noqa: SIM102 (one is of compile time)
        if not whole:
            queries = first_q + gl.arange(0, BLOCK_Q, gl.SliceLayout(0, LAYOUT))
            distance = gl.expand_dims(keys, 1) - gl.expand_dims(queries, 0)
            p = gl.where(visible(distance, lower, upper, HAS_LOWER, HAS_UPPER), p, 0.0)
    if key_mask is not None:
        p = gl.where(gl.expand_dims(keep_key, 1), p, 0.0)
    elif KEYS_END:  # noqa: SIM102 (one is of compile time)
        if not whole:
            p = gl.where(gl.expand_dims(keep_key, 1), p, 0.0)
    return p, whole


@gluon.jit
def partial_product(codes, copy, first: gl.constexpr, no_part):
    """INT32 product with columns [first, first + width) of a transposed copy; in flight."""
    operand = copy.slice(first, no_part.shape[1], 0).permute((1, 0))
    return warpgroup_mma(codes, operand, no_part, use_acc=False, is_async=True)


@gluon.jit
def accumulate(
    shared, CONSUMER: gl.constexpr, GROUPED: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: dK and dV of 64 keys."""
    memory, keys_full, full, empty, pointers, origin, steps, heads, sizes, scale = shared
    # INT32 sums are rescaled a part of head_dim at a time, for the registers
    HALF: gl.constexpr = 64
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 32])
    DP_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 4)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROW_OUT: gl.constexpr = gl.SliceLayout(1, OUT_LAYOUT)
    q_memory, k_memory, v_memory, do_memory, q_t_memory, do_t_memory, rows_memory = memory
    k_scale, do_scale, key_mask, dk, dv = pointers
    z_q, block_0 = origin
    begin, count, blocks_q = steps
    first_k, length_k, length_q, lower, upper, out_n = sizes
    first_k += CONSUMER * ROWS
    keys = first_k + gl.arange(0, ROWS, ROW)
    key_scale = gl.load(k_scale + keys, mask=keys < length_k, other=0) * (scale * LOG2_E)
    keep_key = keys < length_k
    if key_mask is not None:
        keep_key = gl.load(key_mask + keys, mask=keep_key, other=0) != 0
    no_scores = gl.zeros([ROWS, BLOCK_Q], gl.int32, S_LAYOUT)
    no_dp = gl.zeros([ROWS, BLOCK_Q], gl.float32, DP_LAYOUT)
    no_part = gl.zeros([ROWS, HALF], gl.int32, OUT_LAYOUT)
    k_low = gl.zeros([ROWS, HALF], gl.float32, OUT_LAYOUT)
    k_high = k_low
    v_low = k_low
    v_high = k_low
    mbarrier.wait(keys_full, 0)
    step = 0
    # one head alone is no loop; at head_dim 128 ptxas spills without one
    MANY: gl.constexpr = GROUPED or BLOCK_D == 2 * HALF
    # counted from 0 instead, head_dim 128 is 26% slower: ptxas hoists other values out of the loop
    for head in range(heads[0] if MANY else 0, heads[1] if MANY else 1):
        z = z_q + (head if MANY else heads[0])
        for i in range(begin, begin + count):
            stage = step % STAGES
            block_scale = gl.load(do_scale + z * blocks_q + block_0 + i)
            phase = (step // STAGES) & 1
            mbarrier.wait(full.index(stage * 3), phase)
            rows = rows_memory.index(stage)
            q = q_memory.index(stage).permute((1, 0))
            do = do_memory.index(stage).permute((1, 0))
            s = warpgroup_mma(k_memory.index(CONSUMER), q, no_scores, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            p, _ = probabilities(
                s, rows, key_scale, keys, keep_key, i * BLOCK_Q, first_k, length_q, length_k, lower, upper, key_mask,
                HAS_LOWER, HAS_UPPER, False, BLOCK_Q, S_LAYOUT,
            )  # fmt: skip
            # the largest's bits: NaN wins
            p_max = gl.max(p.to(gl.int32, bitcast=True), 1).to(gl.float32, bitcast=True)
            p_codes = operand_codes(p * gl.expand_dims(127.0 / gl.maximum(p_max, TINY), 1), OPERAND)
            # each wait also ends a basic block: ptxas would load the next step's row values early, and spill
            mbarrier.wait(full.index(stage * 3 + 1), phase)
            dp = warpgroup_mma(v_memory.index(CONSUMER), do, no_dp, use_acc=False, is_async=True)
            dp = warpgroup_mma_wait(0, deps=[dp])
            dp = gl.convert_layout(dp, S_LAYOUT, assert_trivial=True)
            # Q's scale, on which dK reduces, is in dS; the third plane is delta times it
            ds = p * (dp * plane(rows, 1, BLOCK_Q, S_LAYOUT) - plane(rows, 2, BLOCK_Q, S_LAYOUT))
            if key_mask is not None:
                ds = gl.where(gl.expand_dims(keep_key, 1), ds, 0.0)
            ds_max = gl.max(gl.abs(ds), 1)
            ds_codes = operand_codes(ds * gl.expand_dims(127.0 / gl.maximum(ds_max, TINY), 1), OPERAND)
            # a NaN in any query's lse or delta shows in P, and must in dK
            k_weight = gl.convert_layout(ds_max * (1 / 127.0) + p_max * 0, ROW_OUT, assert_trivial=True)
            v_weight = gl.convert_layout(p_max * (1 / 127.0) * block_scale, ROW_OUT, assert_trivial=True)
            k_weight = gl.expand_dims(k_weight, 1)
            v_weight = gl.expand_dims(v_weight, 1)

            mbarrier.wait(full.index(stage * 3 + 2), phase)
            do_t = do_t_memory.index(stage)
            q_t = q_t_memory.index(stage)
            part_v = partial_product(p_codes, do_t, 0, no_part)
            if BLOCK_D == 2 * HALF:
                part_v = warpgroup_mma_wait(0, deps=[part_v])
                other_v = partial_product(p_codes, do_t, HALF, no_part)
                v_low += part_v.to(gl.float32) * v_weight
                other_v = warpgroup_mma_wait(0, deps=[other_v])
                part_k = partial_product(ds_codes, q_t, 0, no_part)
                v_high += other_v.to(gl.float32) * v_weight
                part_k = warpgroup_mma_wait(0, deps=[part_k])
                other_k = partial_product(ds_codes, q_t, HALF, no_part)
                k_low += part_k.to(gl.float32) * k_weight
                other_k = warpgroup_mma_wait(0, deps=[other_k])
                mbarrier.arrive(empty.index(stage), count=1)
                k_high += other_k.to(gl.float32) * k_weight
            else:
                part_k = partial_product(ds_codes, q_t, 0, no_part)
                part_v = warpgroup_mma_wait(1, deps=[part_v])
                v_low += part_v.to(gl.float32) * v_weight
                part_k = warpgroup_mma_wait(0, deps=[part_k])
                mbarrier.arrive(empty.index(stage), count=1)
                k_low += part_k.to(gl.float32) * k_weight
            step += 1

    rows_out = first_k + gl.arange(0, ROWS, ROW_OUT)
    columns = gl.arange(0, HALF, gl.SliceLayout(0, OUT_LAYOUT))
    at = gl.expand_dims(rows_out.to(gl.int64) * out_n, 1) + gl.expand_dims(columns, 0)
    written = gl.expand_dims(rows_out < length_k, 1)
    gl.store(dk + at, (k_low * scale).to(dk.dtype.element_ty), mask=written)
    gl.store(dv + at, v_low.to(dv.dtype.element_ty), mask=written)
    if BLOCK_D == 2 * HALF:
        gl.store(dk + at + HALF, (k_high * scale).to(dk.dtype.element_ty), mask=written)
        gl.store(dv + at + HALF, v_high.to(dv.dtype.element_ty), mask=written)


@gluon.jit(
    do_not_specialize=[
        "q_b", "q_h", "q_column", "k_b", "k_h", "k_column", "v_b", "v_h", "v_column", "do_b", "do_h", "do_column",
        "heads_k", "group", "tokens_q", "tokens_k", "total_k", "blocks_q", "grid", "lower", "upper",
    ]
)  # fmt: skip
def dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, q_t_desc, do_t_desc, rows_desc, k_scale, do_scale, key_mask, dk, dv,
    cu_seqlens_q, cu_seqlens_k, q_b, q_h, q_column, k_b, k_h, k_column, v_b, v_h, v_column, do_b, do_h, do_column,
    dk_b, dk_h, dk_n, heads_k, group, tokens_q, tokens_k, total_k, blocks_q, grid, lower, upper, scale,
    HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr, VARLEN: gl.constexpr, GROUPED: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """CONSUMERS blocks of 64 keys of one key head, summed over the query heads that share it. BLOCK_Q is the recipe's.

    q_desc, k_desc: INT8 codes as rows; v_desc, do_desc: 16-bit rows. Row of token t: batch * x_b + head * x_h + t, its
    first column head * x_column. q_t_desc, do_t_desc: transposed codes, (heads * D, padded tokens). rows_desc: the
    planes of `grad_out_kernel`, a row for each padded block of queries; do_scale: one a block.
    """
    batch_head = gl.program_id(0) // grid
    block_k = gl.program_id(0) % grid
    batch = batch_head // heads_k
    head_k = batch_head % heads_k
    start_q, length_q = sequence(cu_seqlens_q, batch, tokens_q, VARLEN)
    start_k, length_k = sequence(cu_seqlens_k, batch, tokens_k, VARLEN)
    SPAN: gl.constexpr = CONSUMERS * ROWS
    # shared memory comes in powers of two
    SLOTS: gl.constexpr = 2 if CONSUMERS == 2 else 4
    first_k = block_k * SPAN
    if first_k >= length_k:
        return
    if VARLEN:
        lower += length_k - length_q
        upper += length_k - length_q
        z_q = 0
        z_k = head_k.to(gl.int64)
    else:
        z_q = batch * heads_k * group
        z_k = batch_head.to(gl.int64)
    begin, _, _, end = block_range(first_k, length_q, -upper, -lower, SPAN, BLOCK_Q, HAS_UPPER, HAS_LOWER, False)
    padded_q = padded_block(start_q, batch, BLOCK_Q, VARLEN)
    heads = (head_k * group, head_k * group + group)
    steps = (begin, end - begin, blocks_q)
    token_k = start_k + first_k
    origin = (
        batch * k_b + head_k * k_h + token_k, head_k * k_column, batch * v_b + head_k * v_h + token_k,
        head_k * v_column, batch * q_b + start_q, q_h, q_column, batch * do_b + start_q, do_h, do_column, z_q,
        padded_q,
    )  # fmt: skip
    sizes = (first_k, length_k, length_q, lower, upper, dk_n)
    out = batch.to(gl.int64) * dk_b + head_k.to(gl.int64) * dk_h + start_k.to(gl.int64) * dk_n
    if key_mask is not None:
        key_mask += batch.to(gl.int64) * tokens_k
    pointers = (k_scale + z_k * total_k + start_k, do_scale, key_mask, dk + out, dv + out)

    q_memory = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_Q, BLOCK_D], q_desc.layout)
    k_memory = gl.allocate_shared_memory(gl.int8, [SLOTS, ROWS, BLOCK_D], k_desc.layout)
    v_memory = gl.allocate_shared_memory(v_desc.dtype, [SLOTS, ROWS, BLOCK_D], v_desc.layout)
    do_memory = gl.allocate_shared_memory(do_desc.dtype, [STAGES, BLOCK_Q, BLOCK_D], do_desc.layout)
    q_t_memory = gl.allocate_shared_memory(q_t_desc.dtype, [STAGES, BLOCK_D, BLOCK_Q], q_t_desc.layout)
    do_t_memory = gl.allocate_shared_memory(do_t_desc.dtype, [STAGES, BLOCK_D, BLOCK_Q], do_t_desc.layout)
    rows_memory = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_Q * 4], rows_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    keys_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES * 3, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(keys_full, count=1)
    for stage in gl.static_range(STAGES):
        for part in gl.static_range(3):
            mbarrier.init(full.index(stage * 3 + part), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()

    descriptors = (q_desc, k_desc, v_desc, do_desc, q_t_desc, do_t_desc, rows_desc)
    memory = (q_memory, k_memory, v_memory, do_memory, q_t_memory, do_t_memory, rows_memory)
    at = (z_q, padded_q)
    shared = (memory, keys_full, full, empty, pointers, at, steps, heads, sizes, scale)
    operands = (descriptors, memory, keys_full, full, empty, origin, steps, heads)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (accumulate, (shared, 0, GROUPED, HAS_LOWER, HAS_UPPER, STAGES, BLOCK_Q, BLOCK_D)),
                (accumulate, (shared, 1, GROUPED, HAS_LOWER, HAS_UPPER, STAGES, BLOCK_Q, BLOCK_D)),
                (load, (operands, STAGES, CONSUMERS, BLOCK_Q, BLOCK_D)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (accumulate, (shared, 0, GROUPED, HAS_LOWER, HAS_UPPER, STAGES, BLOCK_Q, BLOCK_D)),
                (accumulate, (shared, 1, GROUPED, HAS_LOWER, HAS_UPPER, STAGES, BLOCK_Q, BLOCK_D)),
                (accumulate, (shared, 2, GROUPED, HAS_LOWER, HAS_UPPER, STAGES, BLOCK_Q, BLOCK_D)),
                (load, (operands, STAGES, CONSUMERS, BLOCK_Q, BLOCK_D)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
