"""dQ on Hopper in Gluon: a warp loads by TMA, two warpgroups of 64 queries share what it loads, and recompute P."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sagebwd.kernels.gluon.tile import (
    CONSUMERS,
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

# Keys of a product: a block's scores are computed in pieces of this many.
PIECE = gl.constexpr(64)


@gluon.jit
def load(operands, STAGES: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr):
    """The loading warp: the queries' Q and dO once, then K, V, K's transposed copy and scales of each key block."""
    descriptors, memory, queries_full, full, empty, origin, steps = operands
    q_desc, do_desc, k_desc, v_desc, k_t_desc, k_scale_desc = descriptors
    q_memory, do_memory, k_memory, v_memory, k_t_memory, k_scale_memory = memory
    row_q, column_q, row_do, column_do, row_k, column_k, row_v, column_v, row_t, row_scale, block_0 = origin
    begin, count = steps
    PIECES: gl.constexpr = BLOCK_K // PIECE
    mbarrier.expect(queries_full, CONSUMERS * ROWS * BLOCK_D * 3)
    for consumer in gl.static_range(CONSUMERS):
        load_tile(q_desc, [row_q + consumer * ROWS, column_q], queries_full, q_memory.index(consumer))
        load_tile(do_desc, [row_do + consumer * ROWS, column_do], queries_full, do_memory.index(consumer))
    for step in range(count):
        stage = step % STAGES
        block = begin + step
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, BLOCK_K * (BLOCK_D * 4 + 4))
        load_tile(k_desc, [row_k + block * BLOCK_K, column_k], ready, k_memory.index(stage))
        load_tile(k_scale_desc, [row_scale + block, 0], ready, k_scale_memory.index(stage))
        load_tile(v_desc, [row_v + block * BLOCK_K, column_v], ready, v_memory.index(stage))
        for piece in gl.static_range(PIECES):
            first = (block_0 + block) * BLOCK_K + piece * PIECE
            load_tile(k_t_desc, [row_t, first], ready, k_t_memory.index(stage * PIECES + piece))


@gluon.jit
def probability(
    s, key_scale, row_scale, row_lse, whole, first_q, first_k, length_k, lower, upper, key_mask,
    RAGGED: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """P of a piece of a block of keys; 0 where masked."""
    x = s.to(gl.float32) * key_scale * gl.expand_dims(row_scale, 1) - gl.expand_dims(row_lse, 1)
    if RAGGED or HAS_LOWER or HAS_UPPER:  # noqa: SIM102 (one is of compile time)
        if not whole:
            keys = first_k + gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT))
            queries = first_q + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
            # code that runs once a program is fetched from afar: the less of it the better
            if HAS_LOWER or HAS_UPPER:
                distance = gl.expand_dims(keys, 0) - gl.expand_dims(queries, 1)
                x = gl.where(visible(distance, lower, upper, HAS_LOWER, HAS_UPPER), x, float("-inf"))
            if RAGGED:
                inside = keys < length_k
                if key_mask is not None:
                    inside = inside & (gl.load(key_mask + keys, mask=inside, other=0) != 0)
                x = gl.where(gl.expand_dims(inside, 0), x, float("-inf"))
    return exp2(x)


@gluon.jit
def gradient(p, dp, row_delta, key_scale, LAYOUT: gl.constexpr):
    """dS times K's scale, on which dQ reduces.

    V past the end may be NaN. That is nothing: no maximum heeds it, and K's codes are 0.
    """
    dp = gl.convert_layout(dp, LAYOUT, assert_trivial=True)
    return p * (dp - gl.expand_dims(row_delta, 1)) * key_scale


@gluon.jit
def accumulate(
    shared, CONSUMER: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr, RAGGED: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: dQ of 64 queries."""
    memory, queries_full, full, empty, pointers, steps, sizes, scale = shared
    PIECES: gl.constexpr = BLOCK_K // PIECE
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 32])
    DP_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 4)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROW_OUT: gl.constexpr = gl.SliceLayout(1, OUT_LAYOUT)
    q_memory, do_memory, k_memory, v_memory, k_t_memory, k_scale_memory = memory
    row_values, key_mask, dq = pointers
    begin, count = steps
    first_q, length_q, length_k, lower, upper, padded_q, out_n = sizes
    first_q += CONSUMER * ROWS
    rows = gl.arange(0, ROWS, ROW)
    inside = first_q + rows < length_q
    # planes of 64 queries, as `grad_out_kernel` wrote them
    row_values += (padded_q + CONSUMER).to(gl.int64) * (ROWS * 4)
    row_lse = gl.load(row_values + rows, mask=inside, other=float("inf"))
    row_scale = gl.load(row_values + ROWS + rows, mask=inside, other=0) * (scale * LOG2_E)
    row_delta = gl.load(row_values + 3 * ROWS + rows, mask=inside, other=0)
    # a NaN anywhere in a query's row is in its delta, and must be in its dQ
    poison = row_delta * 0
    no_scores = gl.zeros([ROWS, PIECE], gl.int32, S_LAYOUT)
    no_dp = gl.zeros([ROWS, PIECE], gl.float32, DP_LAYOUT)
    no_part = gl.zeros([ROWS, BLOCK_D], gl.int32, OUT_LAYOUT)
    acc = gl.zeros([ROWS, BLOCK_D], gl.float32, OUT_LAYOUT)
    mbarrier.wait(queries_full, 0)
    if BLOCK_D == 64:
        # where registers are left, tensor cores need not read these from shared memory again and again
        q = q_memory.index(CONSUMER).load(gl.DotOperandLayout(0, S_LAYOUT, 4))
        do = do_memory.index(CONSUMER).load(gl.DotOperandLayout(0, DP_LAYOUT, 2))
    else:
        q = q_memory.index(CONSUMER)
        do = do_memory.index(CONSUMER)
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    s = warpgroup_mma(q, k_memory.index(0).slice(0, PIECE, 0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    for step in range(count):
        stage = step % STAGES
        following = (step + 1) % STAGES
        first_k = (begin + step) * BLOCK_K
        whole = inside_band(first_q, first_k, lower, upper, ROWS, BLOCK_K, HAS_LOWER, HAS_UPPER)
        if RAGGED:
            whole = whole & (first_k + BLOCK_K <= length_k)
        if key_mask is not None:
            whole = first_k < 0
        # alone in flight across the loop's end: of two, ptxas would wait at once
        s = warpgroup_mma_wait(0, deps=[s])
        k = k_memory.index(stage)
        v = v_memory.index(stage)
        key_scale = k_scale_memory.index(stage)
        dp = warpgroup_mma(do, v.slice(0, PIECE, 0).permute((1, 0)), no_dp, use_acc=False, is_async=True)
        if PIECES == 2:
            k_high = k.slice(PIECE, PIECE, 0).permute((1, 0))
            v_high = v.slice(PIECE, PIECE, 0).permute((1, 0))
            next_s = warpgroup_mma(q, k_high, no_scores, use_acc=False, is_async=True)
        low_scale = key_scale.slice(0, PIECE, 1).load(S_LAYOUT)
        p = probability(
            s, low_scale, row_scale, row_lse, whole, first_q, first_k, length_k, lower, upper, key_mask, RAGGED,
            HAS_LOWER, HAS_UPPER, S_LAYOUT,
        )  # fmt: skip
        if PIECES == 2:
            dp = warpgroup_mma_wait(1, deps=[dp])
        else:
            dp = warpgroup_mma_wait(0, deps=[dp])
        ds = gradient(p, dp, row_delta, low_scale, S_LAYOUT)
        top = gl.max(gl.abs(ds), 1)
        if PIECES == 2:
            next_dp = warpgroup_mma(do, v_high, no_dp, use_acc=False, is_async=True)
            high_scale = key_scale.slice(PIECE, PIECE, 1).load(S_LAYOUT)
            next_s = warpgroup_mma_wait(1, deps=[next_s])
            p = probability(
                next_s, high_scale, row_scale, row_lse, whole, first_q, first_k + PIECE, length_k, lower, upper,
                key_mask, RAGGED, HAS_LOWER, HAS_UPPER, S_LAYOUT,
            )  # fmt: skip
            next_dp = warpgroup_mma_wait(0, deps=[next_dp])
            next_ds = gradient(p, next_dp, row_delta, high_scale, S_LAYOUT)
            top = gl.maximum(top, gl.max(gl.abs(next_ds), 1))
        inverse = gl.expand_dims(127.0 / gl.maximum(top, TINY), 1)
        k_t = k_t_memory.index(stage * PIECES)
        codes = operand_codes(ds * inverse, OPERAND)
        part = warpgroup_mma(codes, k_t.permute((1, 0)), no_part, use_acc=False, is_async=True)
        if PIECES == 2:
            k_t = k_t_memory.index(stage * PIECES + 1)
            codes = operand_codes(next_ds * inverse, OPERAND)
            part = warpgroup_mma(codes, k_t.permute((1, 0)), part, is_async=True)
        weight = gl.convert_layout(top * (1 / 127.0) + poison, ROW_OUT)
        mbarrier.wait(full.index(following), ((step + 1) // STAGES) & 1, pred=step + 1 < count)
        k = k_memory.index(following).slice(0, PIECE, 0).permute((1, 0))
        s = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(1, deps=[part])
        mbarrier.arrive(empty.index(stage), count=1)
        acc += part.to(gl.float32) * gl.expand_dims(weight, 1)

    s = warpgroup_mma_wait(0, deps=[s])
    rows_out = first_q + gl.arange(0, ROWS, ROW_OUT)
    columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, OUT_LAYOUT))
    at = dq + gl.expand_dims(rows_out.to(gl.int64) * out_n, 1) + gl.expand_dims(columns, 0)
    gl.store(at, (acc * scale).to(dq.dtype.element_ty), mask=gl.expand_dims(rows_out < length_q, 1))


@gluon.jit(
    do_not_specialize=[
        "q_b", "q_h", "q_column", "k_b", "k_h", "k_column", "v_b", "v_h", "v_column", "do_b", "do_h", "do_column",
        "heads", "group", "tokens_q", "tokens_k", "blocks_q", "blocks_k", "grid", "lower", "upper",
    ]
)  # fmt: skip
def dq_kernel(
    q_desc, do_desc, k_desc, v_desc, k_t_desc, k_scale_desc, row_values, key_mask, dq, cu_seqlens_q, cu_seqlens_k,
    q_b, q_h, q_column, k_b, k_h, k_column, v_b, v_h, v_column, do_b, do_h, do_column, dq_b, dq_h, dq_n, heads, group,
    tokens_q, tokens_k, blocks_q, blocks_k, grid, lower, upper, scale, HAS_LOWER: gl.constexpr,
    HAS_UPPER: gl.constexpr, VARLEN: gl.constexpr, RAGGED: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """CONSUMERS blocks of 64 queries of one head. BLOCK_K is the recipe's.

    Rows and columns as in `dkdv_kernel`. k_t_desc: transposed codes; k_scale_desc: (heads * blocks, BLOCK_K). Both are
    padded to blocks of BLOCK_K, row_values to 64 queries. RAGGED: a block may end past its sequence, or be masked.
    """
    batch_head = gl.program_id(0) // grid
    # the last queries see the most keys: start them first
    block_q = grid - 1 - gl.program_id(0) % grid
    batch = batch_head // heads
    head = batch_head % heads
    head_k = head // group
    start_q, length_q = sequence(cu_seqlens_q, batch, tokens_q, VARLEN)
    start_k, length_k = sequence(cu_seqlens_k, batch, tokens_k, VARLEN)
    SPAN: gl.constexpr = CONSUMERS * ROWS
    first_q = block_q * SPAN
    if first_q >= length_q:
        return
    if VARLEN:
        lower += length_k - length_q
        upper += length_k - length_q
        z_q = head
        z_k = head_k
    else:
        z_q = batch_head
        z_k = batch * (heads // group) + head_k
    begin, _, _, end = block_range(first_q, length_k, lower, upper, SPAN, BLOCK_K, HAS_LOWER, HAS_UPPER, False)
    padded_q = z_q * blocks_q + padded_block(start_q, batch, ROWS, VARLEN) + block_q * CONSUMERS
    padded_k = padded_block(start_k, batch, BLOCK_K, VARLEN)
    token_q = start_q + first_q
    origin = (
        batch * q_b + head * q_h + token_q, head * q_column, batch * do_b + head * do_h + token_q, head * do_column,
        batch * k_b + head_k * k_h + start_k, head_k * k_column, batch * v_b + head_k * v_h + start_k,
        head_k * v_column, z_k * BLOCK_D, z_k * blocks_k + padded_k, padded_k,
    )  # fmt: skip
    steps = (begin, end - begin)
    sizes = (first_q, length_q, length_k, lower, upper, padded_q, dq_n)
    dq += batch.to(gl.int64) * dq_b + head.to(gl.int64) * dq_h + start_q.to(gl.int64) * dq_n
    if key_mask is not None:
        key_mask += batch.to(gl.int64) * tokens_k
    pointers = (row_values, key_mask, dq)

    PIECES: gl.constexpr = BLOCK_K // PIECE
    q_memory = gl.allocate_shared_memory(gl.int8, [CONSUMERS, ROWS, BLOCK_D], q_desc.layout)
    do_memory = gl.allocate_shared_memory(do_desc.dtype, [CONSUMERS, ROWS, BLOCK_D], do_desc.layout)
    k_memory = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_K, BLOCK_D], k_desc.layout)
    v_memory = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BLOCK_K, BLOCK_D], v_desc.layout)
    k_t_memory = gl.allocate_shared_memory(k_t_desc.dtype, [STAGES * PIECES, BLOCK_D, PIECE], k_t_desc.layout)
    k_scale_memory = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_K], k_scale_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    queries_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(queries_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()

    descriptors = (q_desc, do_desc, k_desc, v_desc, k_t_desc, k_scale_desc)
    memory = (q_memory, do_memory, k_memory, v_memory, k_t_memory, k_scale_memory)
    shared = (memory, queries_full, full, empty, pointers, steps, sizes, scale)
    operands = (descriptors, memory, queries_full, full, empty, origin, steps)
    gl.warp_specialize(
        [
            (accumulate, (shared, 0, HAS_LOWER, HAS_UPPER, RAGGED, STAGES, BLOCK_K, BLOCK_D)),
            (accumulate, (shared, 1, HAS_LOWER, HAS_UPPER, RAGGED, STAGES, BLOCK_K, BLOCK_D)),
            (load, (operands, STAGES, BLOCK_K, BLOCK_D)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
