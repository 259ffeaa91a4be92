"""Forward on Hopper with P V in 16 bit: a warp loads by TMA, warpgroups of 64 queries each share what it loads.

V is read where it lies, P goes from its registers to the tensor cores, and O adds up in theirs. A warpgroup queues the
next block's scores behind P V, so that it waits for the tensor cores once a block; meanwhile the others scale. O is
rescaled only where a row's maximum has moved by more than 2**8, which neither 16-bit format minds.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sagebwd.kernels.gluon.forward import block_at, blocks_met, code_rows, scaled
from sagebwd.kernels.gluon.tile import (
    LN_2,
    LOG2_E,
    ROWS,
    TINY,
    barrier,
    exp2,
    load_tile,
    padded_block,
    sequence,
)

# A row's maximum may grow by this many octaves before O and its sum are rescaled.
OCTAVES = gl.constexpr(8.0)
# Registers that one branch of `rescale` covers.
BRANCH = gl.constexpr(16)


def _rescale_asm(count: int) -> str:
    """acc *= decay in ``count`` registers, jumped over where both rows that a thread holds have a decay of 1."""
    lines = [
        "{", ".reg .pred p;", f"setp.neu.f32 p, ${2 * count}, 0f3F800000;",
        f"setp.neu.or.f32 p, ${2 * count + 2}, 0f3F800000, p;", "@!p bra SKIP;",
        *(f"mul.f32 ${n}, ${n}, ${2 * count + n};" for n in range(count)), "SKIP:", "}",
    ]  # fmt: skip
    return " ".join(lines)


RESCALE = gl.constexpr(_rescale_asm(BRANCH.value))
RESCALE_OPERANDS = gl.constexpr(
    ",".join(["=f"] * BRANCH.value + [str(n) for n in range(BRANCH.value)] + ["f"] * BRANCH.value)
)


@gluon.jit
def load(
    operands, CONSUMERS: gl.constexpr, K_TOKEN: gl.constexpr, STAGES: gl.constexpr, BLOCK_K: gl.constexpr,
    BLOCK_D: gl.constexpr,
):  # fmt: skip
    """The loading warp: Q once, then K, its scales and V of each block into a ring; K of one block more."""
    descriptors, memory, full, empty, origin, blocks = operands
    q_desc, k_desc, v_desc, k_scale_desc = descriptors
    q_memory, k_memory, v_memory, k_scale_memory = memory
    q_full, k_full, v_full = full
    row_q, column_q, row_k, column_k, row_v, column_v, block_k = origin
    K_BYTES: gl.constexpr = BLOCK_K * (BLOCK_D + 4) if K_TOKEN else BLOCK_K * BLOCK_D
    mbarrier.expect(q_full, CONSUMERS * ROWS * BLOCK_D)
    for consumer in gl.static_range(CONSUMERS):
        load_tile(q_desc, [row_q + consumer * ROWS, column_q], q_full, q_memory.index(consumer))
    steps = blocks[3]
    for step in range(steps + 1):
        block = block_at(gl.minimum(step, steps - 1), blocks)
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(k_full.index(stage), K_BYTES)
        load_tile(k_desc, [row_k + block * BLOCK_K, column_k], k_full.index(stage), k_memory.index(stage))
        if K_TOKEN:
            load_tile(k_scale_desc, [block_k + block, 0], k_full.index(stage), k_scale_memory.index(stage))
        if step < steps:
            mbarrier.expect(v_full.index(stage), BLOCK_K * BLOCK_D * 2)
            load_tile(v_desc, [row_v + block * BLOCK_K, column_v], v_full.index(stage), v_memory.index(stage))


@gluon.jit
def clear_end(v, keys_left, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr):
    """Zero V's tokens past the end of a sequence: P is 0 there, but 0 times a neighbour's NaN is NaN.

    Every warpgroup does so, with the same values, before its own product.
    """
    PART: gl.constexpr = 32
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    for part in gl.static_range(BLOCK_K // PART):
        tile = v.slice(part * PART, PART, 0)
        keep = part * PART + gl.arange(0, PART, gl.SliceLayout(1, LAYOUT)) < keys_left
        x = tile.load(LAYOUT)
        tile.store(gl.where(gl.expand_dims(keep, 1), x, gl.zeros([PART, BLOCK_D], x.dtype, LAYOUT)))
    fence_async_shared()
    barrier()


@gluon.jit
def attend(
    shared, CONSUMER: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
    K_TOKEN: gl.constexpr, NEGATIVE: gl.constexpr, STAGES: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: O and lse of 64 queries."""
    memory, full, empty, pointers, block_k, blocks, sizes, scale_2 = shared
    q_memory, k_memory, v_memory, k_scale_memory = memory
    q_full, k_full, v_full = full
    q_scale, k_scale, key_mask, o, lse, row_max = pointers
    first_q, length_q, length_k, lower, upper, row, o_n = sizes
    first_q += CONSUMER * ROWS
    DTYPE: gl.constexpr = v_memory.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    steps = blocks[3]
    whole = gl.minimum(blocks[2] - blocks[1], steps)

    rows = gl.arange(0, ROWS, ROW)
    inside = first_q + rows < length_q
    row_scale = gl.load(q_scale + row + first_q + rows, mask=inside, other=0)
    # a row scale of 0 would turn a masked score, -inf, into NaN
    row_scale = gl.maximum(row_scale * scale_2, TINY)
    m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    used = m
    l = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    no_scores = gl.zeros([ROWS, BLOCK_K], gl.int32, S_LAYOUT)
    q = q_memory.index(CONSUMER)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q, k_memory.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    for masked in gl.static_range(2):
        for step in range(whole if masked else 0, steps if masked else whole):
            stage = step % STAGES
            following = (step + 1) % STAGES
            block = block_at(step, blocks)
            s = warpgroup_mma_wait(0, deps=[s])
            s_scale = row_scale
            key_scale = row_scale
            if K_TOKEN:
                key_scale = k_scale_memory.index(stage).load(S_LAYOUT)
            else:
                s_scale = row_scale * gl.load(k_scale + (block_k + block) * BLOCK_K)
            x = scaled(
                s, key_scale, first_q, block * BLOCK_K, length_k, lower, upper, key_mask, HAS_LOWER, HAS_UPPER,
                K_TOKEN, NEGATIVE, masked == 1, S_LAYOUT,
            )  # fmt: skip
            m = gl.maximum(m, gl.max(x, 1) * s_scale)
            moved = m > used + OCTAVES
            reference = gl.where(moved, m, used)
            decay = exp2(used - reference)
            decay = gl.where(moved, decay, 1.0)
            used = reference
            offset = gl.where(reference == float("-inf"), 0.0, reference)
            p = exp2(x * gl.expand_dims(s_scale, 1) - gl.expand_dims(offset, 1))
            l = l * decay + gl.sum(p, 1)
            decay_o = gl.expand_dims(gl.convert_layout(decay, ROW_O, assert_trivial=True), 1)
            decay_o, acc = gl.broadcast(decay_o, acc)
            acc = gl.inline_asm_elementwise(
                RESCALE, RESCALE_OPERANDS, [acc, decay_o], dtype=gl.float32, is_pure=True, pack=BRANCH
            )
            p = gl.convert_layout(p.to(DTYPE), P_LAYOUT, assert_trivial=True)
            mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
            if masked:  # noqa: SIM102 (one is of compile time)
                if block * BLOCK_K + BLOCK_K > length_k:
                    clear_end(v_memory.index(stage), length_k - block * BLOCK_K, BLOCK_K, BLOCK_D)
            acc = warpgroup_mma(p, v_memory.index(stage), acc, is_async=True)
            mbarrier.wait(k_full.index(following), ((step + 1) // STAGES) & 1)
            k = k_memory.index(following).permute((1, 0))
            s = warpgroup_mma(q, k, no_scores, use_acc=False, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            # K's scales, which threads read themselves, have been used by now in every warp: released any sooner, TMA
            # overtook a read now and then
            mbarrier.arrive(empty.index(stage), count=1)
    s = warpgroup_mma_wait(0, deps=[s])

    columns = gl.arange(0, BLOCK_D, gl.SliceLayout(0, O_LAYOUT))
    unseen = l == 0
    inverse = gl.where(unseen, 0.0, 1.0 / l)
    acc = acc * gl.expand_dims(gl.convert_layout(inverse, ROW_O, assert_trivial=True), 1)
    unseen_o = gl.convert_layout(unseen, ROW_O, assert_trivial=True)
    acc = gl.where(gl.expand_dims(unseen_o, 1), 0.0, acc)
    rows_o = first_q + gl.arange(0, ROWS, ROW_O)
    at = o + gl.expand_dims(rows_o.to(gl.int64) * o_n, 1) + gl.expand_dims(columns, 0)
    gl.store(at, acc.to(o.dtype.element_ty), mask=gl.expand_dims(rows_o < length_q, 1))
    log = gl.where(unseen, float("-inf"), (used + gl.log2(l)) * LN_2)
    gl.store(lse + row + first_q + rows, log, mask=inside)
    if row_max is not None:
        gl.store(row_max + row + first_q + rows, m, mask=inside)


@gluon.jit(
    do_not_specialize=[
        "v_b", "v_h", "v_column", "heads", "group", "tokens_q", "tokens_k", "total_q", "blocks_k", "grid_q", "lower",
        "upper",
    ]
)  # fmt: skip
def forward_16bit_kernel(
    q_desc, k_desc, v_desc, k_scale_desc, q_scale, k_scale, key_mask, o, lse, row_max, cu_seqlens_q, cu_seqlens_k,
    v_b, v_h, v_column, o_b, o_h, o_n, heads, group, tokens_q, tokens_k, total_q, blocks_k, grid_q, lower, upper,
    scale, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr, VARLEN: gl.constexpr,
    K_TOKEN: gl.constexpr, NEGATIVE: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    GROUP_K: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """CONSUMERS blocks of 64 queries of one head; arguments as in `forward_kernel`, but for v_desc: 16-bit rows.

    BLOCK_K: keys of a step, of which blocks_k counts the padded; K's scales are padded to blocks of GROUP_K, the
    recipe's. Row of V's token t: batch * v_b + head * v_h + t, its first column head * v_column.
    """
    batch_head = gl.program_id(0) // grid_q
    # the last queries see the most keys: start them first
    block_q = grid_q - 1 - gl.program_id(0) % grid_q
    batch = batch_head // heads
    head = batch_head % heads
    head_k = head // group
    start_q, length_q = sequence(cu_seqlens_q, batch, tokens_q, VARLEN)
    start_k, length_k = sequence(cu_seqlens_k, batch, tokens_k, VARLEN)
    SPAN: gl.constexpr = CONSUMERS * ROWS
    # shared memory comes in powers of two
    SLOTS: gl.constexpr = 2 if CONSUMERS == 2 else 4
    first_q = block_q * SPAN
    if first_q >= length_q:
        return
    if VARLEN:
        lower += length_k - length_q
        upper += length_k - length_q
    z_q, z_k, row_q, column_q, row_k, column_k = code_rows(
        batch_head, heads, group, start_q + first_q, start_k, tokens_q, tokens_k, VARLEN, BLOCK_D
    )
    padded_k = padded_block(start_k, batch, GROUP_K, VARLEN) * (GROUP_K // BLOCK_K)
    blocks = blocks_met(first_q, length_k, lower, upper, SPAN, BLOCK_K, HAS_LOWER, HAS_UPPER, key_mask is not None)
    block_k = z_k * blocks_k + padded_k
    origin = (
        row_q, column_q, row_k, column_k, batch * v_b + head_k * v_h + start_k, head_k * v_column, block_k,
    )  # fmt: skip
    sizes = (first_q, length_q, length_k, lower, upper, z_q * total_q + start_q, o_n)
    o += batch.to(gl.int64) * o_b + head.to(gl.int64) * o_h + start_q.to(gl.int64) * o_n
    if key_mask is not None:
        key_mask += batch.to(gl.int64) * tokens_k

    q_memory = gl.allocate_shared_memory(gl.int8, [SLOTS, ROWS, BLOCK_D], q_desc.layout)
    k_memory = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_K, BLOCK_D], k_desc.layout)
    v_memory = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BLOCK_K, BLOCK_D], v_desc.layout)
    k_scale_memory = q_memory
    if K_TOKEN:
        k_scale_memory = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_K], k_scale_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()

    descriptors = (q_desc, k_desc, v_desc, k_scale_desc)
    memory = (q_memory, k_memory, v_memory, k_scale_memory)
    full = (q_full, k_full, v_full)
    pointers = (q_scale, k_scale, key_mask, o, lse, row_max)
    shared = (memory, full, empty, pointers, block_k, blocks, sizes, scale * LOG2_E)
    operands = (descriptors, memory, full, empty, origin, blocks)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (attend, (shared, 0, HAS_LOWER, HAS_UPPER, K_TOKEN, NEGATIVE, STAGES, BLOCK_K, BLOCK_D)),
                (attend, (shared, 1, HAS_LOWER, HAS_UPPER, K_TOKEN, NEGATIVE, STAGES, BLOCK_K, BLOCK_D)),
                (load, (operands, CONSUMERS, K_TOKEN, STAGES, BLOCK_K, BLOCK_D)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (attend, (shared, 0, HAS_LOWER, HAS_UPPER, K_TOKEN, NEGATIVE, STAGES, BLOCK_K, BLOCK_D)),
                (attend, (shared, 1, HAS_LOWER, HAS_UPPER, K_TOKEN, NEGATIVE, STAGES, BLOCK_K, BLOCK_D)),
                (attend, (shared, 2, HAS_LOWER, HAS_UPPER, K_TOKEN, NEGATIVE, STAGES, BLOCK_K, BLOCK_D)),
                (load, (operands, CONSUMERS, K_TOKEN, STAGES, BLOCK_K, BLOCK_D)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
