"""Forward on Hopper in Gluon: a warp loads by TMA, a warpgroup holds 64 queries; two or three programs share an SM.

Score tiles never leave their registers: V's copy holds its tokens in the order in which tensor cores hand scores out.
A key block is taken in two halves, so that the tensor cores compute the second half's scores while the first half's
are scaled, and P is made of half the rows at a time. Beyond that the programs of an SM hide each other's waits:
docs/log/2026-11-21-hopper-forward.md has deeper pipelines. Where the recipe keeps the first key apart, a row begins
with it, in FP32, while TMA fetches K, and the loop masks it.
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
    LN_2,
    LOG2_E,
    ROUND,
    ROWS,
    TINY,
    block_range,
    exp2,
    load_tile,
    operand_codes,
    padded_block,
    reinterpret,
    ring,
    sequence,
    visible,
)


@gluon.jit
def code_rows(
    batch_head, heads, group, token_q, token_k, tokens_q, tokens_k, VARLEN: gl.constexpr, BLOCK_D: gl.constexpr
):  # fmt: skip
    """Which heads of per-token values, and which row and column of Q's and K's codes, two tokens of a head have."""
    batch = batch_head // heads
    head = batch_head % heads
    head_k = head // group
    if VARLEN:
        return head.to(gl.int64), head_k, token_q, head * BLOCK_D, token_k, head_k * BLOCK_D
    else:
        z_k = batch * (heads // group) + head_k
        return batch_head.to(gl.int64), z_k, batch_head * tokens_q + token_q, 0, z_k * tokens_k + token_k, 0


@gluon.jit
def blocks_met(
    first_q, length_k, lower, upper, SPAN: gl.constexpr, BLOCK_K: gl.constexpr, HAS_LOWER: gl.constexpr,
    HAS_UPPER: gl.constexpr, ALL_MASKED: gl.constexpr,
):  # fmt: skip
    """begin, full_begin, full_end as of `block_range` of the key blocks that SPAN queries meet, and their number."""
    begin, full_begin, full_end, end = block_range(
        first_q, length_k, lower, upper, SPAN, BLOCK_K, HAS_LOWER, HAS_UPPER, ALL_MASKED
    )
    # rows without a key take one masked block of the sequence's own, and write zeros
    steps = gl.maximum(end - begin, 1)
    begin = gl.minimum(begin, gl.maximum((length_k + BLOCK_K - 1) // BLOCK_K - 1, 0))
    return begin, full_begin, full_end, steps


@gluon.jit
def block_at(step, blocks):
    """The key block of a step, whole blocks first, masked ones after; blocks: begin, full_begin, full_end, steps."""
    begin, full_begin, full_end, _ = blocks
    whole = full_end - full_begin
    masked = begin + step - whole
    masked += gl.where(masked >= full_begin, whole, 0)
    return gl.where(step < whole, full_begin + step, masked)


@gluon.jit
def load(
    descriptors, memory, full, empty, origin, blocks, K_TOKEN: gl.constexpr, LEVELS: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """The loading warp: Q once, then K and V of each block, with what scales them, into a ring of stages."""
    q_desc, k_desc, v_desc, k_scale_desc, v_sum_desc = descriptors
    q_memory, k_memory, v_memory, k_scale_memory, v_sum_memory = memory
    q_full, k_full, v_full = full
    row_q, column_q, row_k, column_k, row_v, block_k, padded_k = origin
    HALF: gl.constexpr = BLOCK_K // 2
    K_BYTES: gl.constexpr = BLOCK_K * (BLOCK_D + 4) if K_TOKEN else BLOCK_K * BLOCK_D
    V_BYTES: gl.constexpr = (BLOCK_K + 4) * BLOCK_D if LEVELS == 254 else BLOCK_K * BLOCK_D
    mbarrier.expect(q_full, ROWS * BLOCK_D)
    load_tile(q_desc, [row_q, column_q], q_full, q_memory)
    for step in range(blocks[3]):
        block = block_at(step, blocks)
        stage, phase = ring(step, STAGES)
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), K_BYTES)
        load_tile(k_desc, [row_k + block * BLOCK_K, column_k], k_full.index(stage), k_memory.index(stage))
        if K_TOKEN:
            load_tile(k_scale_desc, [block_k + block, 0], k_full.index(stage), k_scale_memory.index(stage))
        mbarrier.expect(v_full.index(stage), V_BYTES)
        for half in gl.static_range(2):
            first = (padded_k + block) * BLOCK_K + half * HALF
            load_tile(v_desc, [row_v, first], v_full.index(stage), v_memory.index(stage * 2 + half))
        if LEVELS == 254:
            load_tile(v_sum_desc, [block_k + block, 0], v_full.index(stage), v_sum_memory.index(stage))


@gluon.jit
def scaled(
    s, k_scale, first_q, first_k, length_k, lower, upper, key_mask, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
    K_TOKEN: gl.constexpr, NEGATIVE: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr, apart=None,
):  # fmt: skip
    """Scores of half a block that still lack Q's scale (and K's, unless it is per token); -inf where masked.

    apart: the key that is not among them, if not None.
    """
    x = s.to(gl.float32)
    if K_TOKEN:
        x = x * k_scale
    if NEGATIVE:
        x = -x
    if MASKED:
        keys = first_k + gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT))
        rows = first_q + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        keep = visible(gl.expand_dims(keys, 0) - gl.expand_dims(rows, 1), lower, upper, HAS_LOWER, HAS_UPPER)
        inside = keys < length_k
        if apart is not None and key_mask is None:
            # the first key and those past the end, in one comparison
            inside = (keys - 1).to(gl.uint32) < (gl.maximum(length_k, 1) - 1).to(gl.uint32)
        if key_mask is not None:
            if apart is not None:
                inside = inside & (keys != apart)
            inside = inside & (gl.load(key_mask + keys, mask=inside, other=0) != 0)
        x = gl.where(keep & gl.expand_dims(inside, 0), x, float("-inf"))
    elif apart is not None:
        # without a key_mask it is the first of its block: of all but a few registers the compiler knows the outcome
        first = (gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT)) == 0) & (first_k == 0)
        x = gl.where(gl.expand_dims(first, 0), float("-inf"), x)
    return x


@gluon.jit
def rows_apart(x):
    """Rows r and r + 8 of every 16, which each thread has some of, as two tensors of (4, 8) rows."""
    if len(x.shape) == 1:
        return gl.split(x.reshape([4, 2, 8]).permute([0, 2, 1]))
    else:
        return gl.split(x.reshape([4, 2, 8, x.shape[1]]).permute([0, 2, 3, 1]))


@gluon.jit
def rows_together(a, b, LAYOUT: gl.constexpr):
    """What `rows_apart` took apart."""
    if len(a.shape) == 2:
        return gl.convert_layout(gl.join(a, b).permute([0, 2, 1]).reshape([ROWS]), LAYOUT)
    else:
        x = gl.join(a, b).permute([0, 3, 1, 2]).reshape([ROWS, a.shape[2]])
        return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def exponentials(low, high, top, scale, LOG2_LEVELS: gl.constexpr):
    """Each row's largest score, ``top`` scaled, and P of a block's two halves relative to it, times the levels."""
    scale = gl.convert_layout(scale, top.type.layout)
    top = top * scale
    shift = gl.expand_dims(LOG2_LEVELS - gl.where(top == float("-inf"), 0.0, top), 2)
    scale = gl.expand_dims(scale, 2)
    return top, exp2(low * scale + shift), exp2(high * scale + shift)


@gluon.jit
def first_codes(codes, scale, there, BLOCK_D: gl.constexpr, NEGATIVE: gl.constexpr):
    """The first key's codes, four a word, as `first_score` takes them, and its scale; there: whether there is one."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D // 4, 32])
    words = codes.to(gl.pointer_type(gl.int32)) + gl.arange(0, BLOCK_D // 4, gl.SliceLayout(0, LAYOUT))
    key = gl.load(words, mask=there, other=0)
    scale = gl.load(scale, mask=there, other=0)
    if NEGATIVE:
        scale = -scale
    return key, scale


@gluon.jit
def first_score(q_memory, row_scale, codes, code_scale, BLOCK_D: gl.constexpr, ROW: gl.constexpr):
    """Every row's score of the first key: the integers that tensor cores would find, four products an instruction."""
    WORDS: gl.constexpr = BLOCK_D // 4
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WORDS, 32])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=BLOCK_D, element_bitwidth=32, rank=2)
    products = gl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r",
        [reinterpret(q_memory, gl.int32, [ROWS, WORDS], SHARED).load(LAYOUT), gl.expand_dims(codes, 0)],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return gl.convert_layout(gl.sum(products, 1), ROW).to(gl.float32) * code_scale * row_scale


@gluon.jit
def attend(
    memory, full, empty, pointers, origin, blocks, sizes, scale_2, head_dim: gl.constexpr, HAS_LOWER: gl.constexpr,
    HAS_UPPER: gl.constexpr, K_TOKEN: gl.constexpr, V_SEQUENCE: gl.constexpr, NEGATIVE: gl.constexpr,
    LEVELS: gl.constexpr, STAGES: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """The computing warpgroup: O and lse of 64 queries."""
    HALF: gl.constexpr = BLOCK_K // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 32])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    LOG2_LEVELS: gl.constexpr = 7.988684686772166 if LEVELS == 254 else 6.988684686772166
    q_memory, k_memory, v_memory, k_scale_memory, v_sum_memory = memory
    q_full, k_full, v_full = full
    q_scale, k_scale, v_scale, v_mean, key_mask, o, lse, row_max, k_codes, first_value = pointers
    _, _, row_k, column_k, _, block_k, _ = origin
    first_q, length_q, length_k, lower, upper, row, mean_row, o_n, first, pitch_k = sizes
    apart = None if first_value is None else first
    steps = blocks[3]
    whole = gl.minimum(blocks[2] - blocks[1], steps)

    rows = gl.arange(0, ROWS, ROW)
    inside = first_q + rows < length_q
    row_scale = gl.load(q_scale + row + first_q + rows, mask=inside, other=0)
    # a row scale of 0 would turn a masked score, -inf, into NaN
    row_scale = gl.maximum(row_scale * scale_2, TINY)
    m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    l = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    no_scores = gl.zeros([ROWS, HALF], gl.int32, S_LAYOUT)
    no_output = gl.zeros([ROWS, BLOCK_D], gl.int32, O_LAYOUT)
    if first_value is not None:
        # read while TMA fetches Q; the score follows, while it fetches K
        at = k_codes + (row_k + first).to(gl.int64) * pitch_k + column_k
        key, key_scale = first_codes(at, k_scale + block_k * BLOCK_K + first, first < length_k, BLOCK_D, NEGATIVE)
        of_head = mean_row * head_dim + gl.arange(0, BLOCK_D, gl.SliceLayout(0, O_LAYOUT))
        value = gl.load(first_value + of_head)
    mbarrier.wait(q_full, 0)
    if first_value is not None:
        seen = visible(first - (first_q + rows), lower, upper, HAS_LOWER, HAS_UPPER) & (first < length_k)
        m = gl.where(seen, first_score(q_memory, row_scale, key, key_scale, BLOCK_D, ROW), m)
        l = gl.where(seen, 1.0, l)
        seen_o = gl.expand_dims(gl.convert_layout(seen, ROW_O), 1)
        acc = gl.where(seen_o, gl.expand_dims(value, 0), acc)
    for masked in gl.static_range(2):
        q = q_memory
        if BLOCK_D == 128 and (masked == 0 or not HAS_UPPER):
            # where registers are left, tensor cores need not read it from shared memory again and again
            q = q_memory.load(gl.DotOperandLayout(0, S_LAYOUT, 4))
        for step in range(whole if masked else 0, steps if masked else whole):
            stage, phase = ring(step, STAGES)
            block = block_at(step, blocks)
            first_k = block * BLOCK_K
            mbarrier.wait(k_full.index(stage), phase)
            k_low = k_memory.index(stage).slice(0, HALF, 0).permute((1, 0))
            k_high = k_memory.index(stage).slice(HALF, HALF, 0).permute((1, 0))
            s_low = warpgroup_mma(q, k_low, no_scores, use_acc=False, is_async=True)
            s_high = warpgroup_mma(q, k_high, no_scores, use_acc=False, is_async=True)
            s_scale = row_scale
            scale_low = row_scale
            scale_high = row_scale
            s_low = warpgroup_mma_wait(1, deps=[s_low])
            if K_TOKEN:
                scale_low = k_scale_memory.index(stage).slice(0, HALF, 1).load(S_LAYOUT)
            else:
                s_scale = row_scale * gl.load(k_scale + (block_k + block) * BLOCK_K)
            x_low = scaled(
                s_low, scale_low, first_q, first_k, length_k, lower, upper, key_mask, HAS_LOWER, HAS_UPPER, K_TOKEN,
                NEGATIVE, masked == 1, S_LAYOUT, apart,
            )  # fmt: skip
            s_high = warpgroup_mma_wait(0, deps=[s_high])
            if K_TOKEN:
                scale_high = k_scale_memory.index(stage).slice(HALF, HALF, 1).load(S_LAYOUT)
            x_high = scaled(
                s_high, scale_high, first_q, first_k + HALF, length_k, lower, upper, key_mask, HAS_LOWER, HAS_UPPER,
                K_TOKEN, NEGATIVE, masked == 1, S_LAYOUT, apart if masked else None,
            )  # fmt: skip

            low_a, low_b = rows_apart(x_low)
            high_a, high_b = rows_apart(x_high)
            scale_a, scale_b = rows_apart(s_scale)
            top_a = gl.max(gl.maximum(low_a, high_a), 2)
            # ends a basic block: exponentials of half the rows then run beside the other half's maxima
            mbarrier.wait(v_full.index(stage), phase)
            top_a, low_a, high_a = exponentials(low_a, high_a, top_a, scale_a, LOG2_LEVELS)
            top_b = gl.max(gl.maximum(low_b, high_b), 2)
            top_b, low_b, high_b = exponentials(low_b, high_b, top_b, scale_b, LOG2_LEVELS)
            top = rows_together(top_a, top_b, ROW)
            m_new = gl.maximum(m, top)
            safe = gl.where(m_new == float("-inf"), 0.0, m_new)
            decay = exp2(m - safe)
            weight = exp2(top - safe) * (1 / LEVELS)
            m = m_new
            total = rows_together(gl.sum(low_a + high_a, 2), gl.sum(low_b + high_b, 2), ROW)
            l = l * decay + total * weight
            # P is there times the levels
            codes = operand_codes(rows_together(low_a, low_b, S_LAYOUT), P_LAYOUT, LEVELS)
            v_low = v_memory.index(stage * 2).permute((1, 0))
            v_high = v_memory.index(stage * 2 + 1).permute((1, 0))
            if LEVELS == 254:
                # 128 times the column sums of V's codes, + ROUND's bits: the sum comes out as an fp32 + ROUND
                start = no_output + v_sum_memory.index(stage).load(O_LAYOUT)
                part = warpgroup_mma(codes, v_low, start, is_async=True)
            else:
                part = warpgroup_mma(codes, v_low, no_output, use_acc=False, is_async=True)
            codes = operand_codes(rows_together(high_a, high_b, S_LAYOUT), P_LAYOUT, LEVELS)
            part = warpgroup_mma(codes, v_high, part, is_async=True)
            if not V_SEQUENCE:
                weight *= gl.load(v_scale + block_k + block)
            part = warpgroup_mma_wait(0, deps=[part])
            # K's scales, which threads read themselves, have been used by now in every warp: released any sooner, TMA
            # overtook a read now and then
            mbarrier.arrive(empty.index(stage), count=1)
            decay_o = gl.expand_dims(gl.convert_layout(decay, ROW_O), 1)
            if LEVELS == 254:
                # 22 bits: ROUND times it is exact, and a V of zeros adds nothing
                weight = (weight.to(gl.int32, bitcast=True) & -4).to(gl.float32, bitcast=True)
            weight_o = gl.expand_dims(gl.convert_layout(weight, ROW_O), 1)
            if LEVELS == 254:
                acc = gl.fma(part.to(gl.float32, bitcast=True), weight_o, gl.fma(acc, decay_o, -ROUND * weight_o))
            else:
                acc = acc * decay_o + part.to(gl.float32) * weight_o

    columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, O_LAYOUT))
    acc = acc * gl.expand_dims(gl.convert_layout(1 / l, ROW_O), 1)
    if V_SEQUENCE:
        acc = acc * gl.expand_dims(gl.load(v_scale + mean_row * head_dim + columns), 0)
    if v_mean is not None:
        acc = acc + gl.expand_dims(gl.load(v_mean + mean_row * head_dim + columns), 0)
    unseen = (m == float("-inf")) & (l == 0)
    acc = gl.where(gl.expand_dims(gl.convert_layout(unseen, ROW_O), 1), 0.0, acc)
    rows_o = first_q + gl.arange(0, ROWS, ROW_O)
    at = o + gl.expand_dims(rows_o.to(gl.int64) * o_n, 1) + gl.expand_dims(columns, 0)
    gl.store(at, acc.to(o.dtype.element_ty), mask=gl.expand_dims(rows_o < length_q, 1))
    log = gl.where(unseen, float("-inf"), (m + gl.log2(l)) * LN_2)
    gl.store(lse + row + first_q + rows, log, mask=inside)
    if row_max is not None:
        gl.store(row_max + row + first_q + rows, m, mask=inside)


@gluon.jit(
    do_not_specialize=[
        "heads", "group", "tokens_q", "tokens_k", "total_q", "blocks_k", "grid_q", "lower", "upper",
    ]
)  # fmt: skip
def forward_kernel(
    q_desc, k_desc, v_desc, k_scale_desc, v_sum_desc, q_scale, k_scale, v_scale, v_mean, key_mask, o, lse, row_max,
    k_codes, first_value, first_key, cu_seqlens_q, cu_seqlens_k, o_b, o_h, o_n, heads, group,
    tokens_q, tokens_k, total_q, blocks_k, grid_q, lower, upper, scale, head_dim: gl.constexpr,
    HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr, VARLEN: gl.constexpr, K_TOKEN: gl.constexpr,
    V_SEQUENCE: gl.constexpr, NEGATIVE: gl.constexpr, LEVELS: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """64 queries of one head.

    q_desc, k_desc: INT8 codes as (tokens, D) rows. v_desc: transposed codes, (heads * D, padded tokens). k_scale
    (heads * blocks, BLOCK_K) and v_sum (heads * blocks, D; see `quantize_kernel`, int32) are padded, and read through
    descriptors where K_TOKEN and LEVELS == 254. v_scale: one a channel if V_SEQUENCE, else one a block. scale: the
    softmax scale's magnitude, NEGATIVE its sign. row_max: each query's largest score times log2(e), if not None.

    k_codes: k_desc's tensor, and first_value (batch, heads, D): V's smoothed row of the first key, in units of v_scale
    if V_SEQUENCE, where that key is apart, else None; first_key (batch,): which key that is, if there is a key_mask.
    """
    gl.static_assert(LEVELS == 127 or LEVELS == 254)
    batch_head = gl.program_id(0) // grid_q
    # the last queries see the most keys: start them first
    block_q = grid_q - 1 - gl.program_id(0) % grid_q
    batch = batch_head // heads
    head = batch_head % heads
    head_k = head // group
    start_q, length_q = sequence(cu_seqlens_q, batch, tokens_q, VARLEN)
    start_k, length_k = sequence(cu_seqlens_k, batch, tokens_k, VARLEN)
    first_q = block_q * ROWS
    if first_q >= length_q:
        return
    if VARLEN:
        lower += length_k - length_q
        upper += length_k - length_q
    z_q, z_k, row_q, column_q, row_k, column_k = code_rows(
        batch_head, heads, group, start_q + first_q, start_k, tokens_q, tokens_k, VARLEN, BLOCK_D
    )
    padded_k = padded_block(start_k, batch, BLOCK_K, VARLEN)
    blocks = blocks_met(
        first_q, length_k, lower, upper, ROWS, BLOCK_K, HAS_LOWER, HAS_UPPER, key_mask is not None,
    )  # fmt: skip
    origin = (row_q, column_q, row_k, column_k, z_k * BLOCK_D, z_k * blocks_k + padded_k, padded_k)
    o += batch.to(gl.int64) * o_b + head.to(gl.int64) * o_h + start_q.to(gl.int64) * o_n
    if key_mask is not None:
        key_mask += batch.to(gl.int64) * tokens_k
    first = 0 * length_k
    if first_key is not None:
        first = gl.load(first_key + batch)
    sizes = (
        first_q, length_q, length_k, lower, upper, z_q * total_q + start_q, batch * (heads // group) + head_k, o_n,
        first, BLOCK_D * (heads // group if VARLEN else 1),
    )  # fmt: skip

    q_memory = gl.allocate_shared_memory(gl.int8, [ROWS, BLOCK_D], q_desc.layout)
    k_memory = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_K, BLOCK_D], k_desc.layout)
    v_memory = gl.allocate_shared_memory(gl.int8, [STAGES * 2, BLOCK_D, BLOCK_K // 2], v_desc.layout)
    k_scale_memory = q_memory
    v_sum_memory = q_memory
    if K_TOKEN:
        k_scale_memory = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_K], k_scale_desc.layout)
    if LEVELS == 254:
        v_sum_memory = gl.allocate_shared_memory(gl.int32, [STAGES, 1, BLOCK_D], v_sum_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()

    descriptors = (q_desc, k_desc, v_desc, k_scale_desc, v_sum_desc)
    memory = (q_memory, k_memory, v_memory, k_scale_memory, v_sum_memory)
    full = (q_full, k_full, v_full)
    pointers = (q_scale, k_scale, v_scale, v_mean, key_mask, o, lse, row_max, k_codes, first_value)
    gl.warp_specialize(
        [
            (
                attend,
                (
                    memory, full, empty, pointers, origin, blocks, sizes, scale * LOG2_E, head_dim, HAS_LOWER,
                    HAS_UPPER, K_TOKEN, V_SEQUENCE, NEGATIVE, LEVELS, STAGES, BLOCK_K, BLOCK_D,
                ),
            ),
            (load, (descriptors, memory, full, empty, origin, blocks, K_TOKEN, LEVELS, STAGES, BLOCK_K, BLOCK_D)),
        ],
        [1],
        [24],
    )  # fmt: skip
