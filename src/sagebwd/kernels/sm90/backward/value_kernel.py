"""dV of the split backward on Hopper, where registers cannot hold dK beside dV; `key_query_kernel` computes dK and dQ.

dK and dV of 128 keys of 256 channels together would fill the whole register file. dV needs only S of what both need,
so that this split computes least twice. A warp loads by TMA; two warpgroups hold 64 keys each and share every query
block that it loads. Otherwise as `kernel`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from sagebwd.kernels.sm90.backward.arguments import Sizes, steps_of
from sagebwd.kernels.sm90.backward.block_sparse import head_and_block, list_of, listed_block, sum_of_splits
from sagebwd.kernels.sm90.backward.epilogue import as_tiles, store_gradient
from sagebwd.kernels.sm90.backward.fp32_accumulate import accumulate_alternating, fma_in_place, new_product
from sagebwd.kernels.sm90.backward.key_blocks import (
    cut_at_both_ends,
    heads_of,
    m_block_at,
    m_block_range,
    masked_m_block,
    place_in,
    place_of,
    seq_q_of,
    share_place,
    work_tile_of,
)
from sagebwd.kernels.sm90.backward.loads import Barriers, Loaded, buffers, origin_of_keys, ring_barriers
from sagebwd.kernels.sm90.backward.scores import keys_and_scales, plane, probabilities, same_of_pairs, scores
from sagebwd.kernels.sm90.backward.tile import (
    CONSUMERS,
    LOG2_E,
    REGISTERS,
    ROWS,
    load_copy,
    load_pieces,
    load_tile,
    loaded,
    operand_float8,
    padded_block,
    parts_of_copy,
    pieces_of,
    program_number,
    repeated,
    ring,
)


@gluon.jit
def load(
    descriptors, memory, barriers, origins, first_k, blocks, heads, seq_q, KIND: gl.constexpr, WIDTH: gl.constexpr
):
    """Producer warp: load K once, then Q, dO^T and row values of every query block of every head."""
    row_k, column_k = origins[0]
    row_q, row_q_h, column_q = origins[1]
    blocks_q, z_q, block_0, sparse, splits, work_tile, key_mask, tokens_k = blocks
    full = barriers.full
    STAGES: gl.constexpr = WIDTH.backward.stages
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    BLOCK_D: gl.constexpr = WIDTH.head_dim
    PIECES: gl.constexpr = BLOCK_D // memory.k.shape[2]
    mbarrier.expect(barriers.keys_full, CONSUMERS * ROWS * BLOCK_D)
    for consumer in gl.static_range(CONSUMERS):
        row = row_k + first_k + consumer * ROWS
        load_pieces(descriptors.k, row, column_k, barriers.keys_full, memory.k, consumer, PIECES)
    listed = list_of(sparse, splits, work_tile.batch, work_tile.head, first_k)
    at = listed[0]
    m_range = m_block_range(work_tile, first_k, key_mask, tokens_k, seq_q, sparse, listed, False, KIND, BLOCK_Q)
    step = gl.to_tensor(0)
    # a list has the blocks of all heads
    for first_head in range(heads[0], heads[1] if sparse is None else heads[0] + 1):
        for number in range(m_range.begin, m_range.end):
            head, i = first_head, m_block_at(number, m_range, KIND)
            if sparse is not None:
                head, i = head_and_block(listed_block(sparse, at, number)[1])
                head += first_head
            z = z_q + head
            stage, phase = ring(step, STAGES)
            mbarrier.wait(barriers.empty.index(stage), phase ^ 1)
            ready = full.index(stage * 2)
            copy_ready = full.index(stage * 2 + 1)
            padded = z * blocks_q + block_0 + i
            mbarrier.expect(ready, BLOCK_Q * BLOCK_D + memory.rows.shape[2] * 4)
            row = row_q + head * row_q_h + i * BLOCK_Q
            load_pieces(descriptors.q, row, head * column_q, ready, memory.q, stage, PIECES)
            load_tile(descriptors.rows, [padded, 0], ready, memory.rows.index(stage))
            mbarrier.expect(copy_ready, BLOCK_Q * BLOCK_D + memory.scales.shape[2] * 4)
            load_tile(descriptors.scales, [padded, 0], copy_ready, memory.scales.index(stage))
            column = (block_0 + i) * BLOCK_Q
            load_copy(descriptors.do_t, z * BLOCK_D, column, copy_ready, memory.do_t, stage, PIECES)
            step += 1


@gluon.jit
def accumulate(
    memory, places, barriers, tensors, dv_desc, sizes, factors, CONSUMER: gl.constexpr, KIND: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: dV of 64 keys."""
    full, empty = barriers.full, barriers.empty
    STAGES: gl.constexpr = WIDTH.backward.stages
    sparse = tensors.block_sparse
    LISTED: gl.constexpr = sparse is not None
    JUMPS: gl.constexpr = cut_at_both_ends(KIND) and not LISTED  # from block to block
    VARLEN: gl.constexpr = tensors.cu_seqlens_q is not None
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 32])
    # 64 channels of dV are a piece
    PIECE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PIECE, 4)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    PARTS: gl.constexpr = WIDTH.value_dim // ROWS
    PIECES: gl.constexpr = WIDTH.head_dim // memory.k.shape[2]
    work_tile = work_tile_of(gl.program_id(0), 0, tensors, sizes, place_in(places, VARLEN), True)
    seq_q = seq_q_of(work_tile, tensors, sizes)
    _, z_k = heads_of(work_tile, sizes, VARLEN)
    listed = list_of(sparse, tensors.work_splits, work_tile.batch, work_tile.head, work_tile.first)
    at = listed[0]
    m_range = m_block_range(
        work_tile, work_tile.first, tensors.key_mask, sizes.tokens_k, seq_q, sparse, listed, False, KIND, BLOCK_Q
    )
    begin, end, loops = m_range.begin, m_range.end, m_range.loops
    first_k = work_tile.first + CONSUMER * ROWS
    keys, keep_key, key_scale = keys_and_scales(tensors, work_tile, z_k, first_k, sizes, ROW)
    key_scale = same_of_pairs(key_scale * (factors.scale * LOG2_E), ROW)
    s_init = gl.zeros([ROWS, BLOCK_Q], gl.int32, S_LAYOUT)
    acc_init = gl.zeros([ROWS, ROWS], gl.float32, PIECE)
    dv = repeated(acc_init, PARTS)
    mbarrier.wait(barriers.keys_full, 0)
    # as registers are left: tensor cores need not read K from shared memory again and again
    if WIDTH.backward.k_in_regs:
        k = loaded(pieces_of(memory.k, CONSUMER, PIECES), gl.DotOperandLayout(0, S_LAYOUT, 4))
    else:
        k = memory.k.index(CONSUMER)
        HALF: gl.constexpr = WIDTH.head_dim // 2
        k = k.slice(0, HALF, 1).load(gl.DotOperandLayout(0, S_LAYOUT, 4)), k.slice(HALF, HALF, 1)
    begun = 0
    s = scores(k, memory.q, full, begun, begin < end, s_init, False, STAGES)  # S^T = K Q^T
    # one head alone is no loop
    heads = sizes.group if KIND.GROUPED and not LISTED else 1
    until = begun + (end - begin) * heads
    for head in range(heads):
        for part in gl.static_range(len(loops)):
            ahead = begun + loops[part][2]
            for number in range(loops[part][0], loops[part][1]):
                i = masked_m_block(number, m_range, KIND) if part == 0 else number
                step = number + ahead
                stage, phase = ring(step, STAGES)
                # (1) [GEMM] S^T = K Q^T, queued in the step before; steps are numbered as in `m_block`
                s = warpgroup_mma_wait(0, deps=[s])
                entry_at, block = 0, i
                if LISTED:
                    entry_at, entry, _ = listed_block(sparse, at, number)
                    block = head_and_block(entry)[1]
                # (3) P^T = exp2(S^T - lse)
                p = probabilities(
                    s, memory.rows.index(stage), key_scale, keys, keep_key, block * BLOCK_Q, first_k, work_tile, seq_q,
                    sizes.group, tensors.key_mask, sparse, tensors.bias, entry_at, KIND, part == 0, False, BLOCK_Q,
                    S_LAYOUT,
                )[0]  # fmt: skip
                p_fp8 = operand_float8(p, OPERAND)
                # (5) [GEMM] dV += P^T dO; beside it (1) of the next block
                mbarrier.wait(full.index(stage * 2 + 1), phase)
                opaque_false = step < 0
                do_t = parts_of_copy(memory.do_t, stage, ROWS, PARTS)
                first = new_product(p_fp8, do_t[0], acc_init)  # P^T dO, channels 0 to 63
                second = new_product(p_fp8, do_t[1], acc_init)  # P^T dO, channels 64 to 127
                dv_scale = plane(memory.scales.index(stage), 0, 1, PIECE)
                dv_new, free, last = accumulate_alternating(  # dV += P^T dO, but for the last channels
                    dv, (first, second), p_fp8, do_t, dv_scale, opaque_false
                )
                more = step + 1 < until if JUMPS else (number + 1 < end) | (head + 1 < heads)
                free = free.to(gl.int32, bitcast=True)
                s = scores(k, memory.q, full, step + 1, more, free, opaque_false, STAGES)  # S^T = K Q^T, next step
                last = warpgroup_mma_wait(len(k), deps=[last])  # as many are S's
                mbarrier.arrive(empty.index(stage), count=1)
                dv_new += (fma_in_place(dv[PARTS - 1], last, dv_scale),)  # dV += P^T dO
                dv = dv_new
        begun += end - begin
    s = warpgroup_mma_wait(0, deps=[s])

    work_tile, is_mine = work_tile_of(program_number(0), 0, tensors, sizes, place_in(places, VARLEN), True), True
    if tensors.work_splits is not None:
        dv, is_mine = sum_of_splits(dv, tensors.work_splits, work_tile, WIDTH.head_dim, CONSUMER, WIDTH, PIECE)
    if is_mine:
        # over this warpgroup's K
        store_gradient(
            dv, tensors.dv, tensors.strides, dv_desc, as_tiles(memory.k.index(CONSUMER * PIECES), dv_desc, PARTS // 2),
            work_tile, work_tile.first + CONSUMER * ROWS, sizes, KIND,
        )  # fmt: skip
    # what TMA still reads must outlive the program's shared memory
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*steps_of("q", "k"), *Sizes._fields])
def value_kernel(
    q_desc, k_desc, do_t_desc, rows_desc, scales_desc, dv_desc, tensors, q_b, q_h, q_column, k_b, k_h, k_column,
    heads_k, group, tokens_q, tokens_k, total_k, blocks_q, programs, heads_at_once, heads_in_all, lower, upper,
    factors, KIND: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """dV of 128 keys of one key head, summed over the query heads that share it; arguments as `backward_kernel`'s.

    rows_desc: the first two planes. dv_desc: 64 channels at a time. heads_at_once: of so many heads every one gets its
    first program before any gets its second.
    """
    STAGES: gl.constexpr = WIDTH.backward.stages
    VARLEN: gl.constexpr = tensors.cu_seqlens_q is not None
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    sizes = Sizes(
        heads_k, group, tokens_q, tokens_k, total_k, blocks_q, programs, heads_at_once, heads_in_all, lower, upper
    )
    place = place_of(tensors, sizes, 1, False)
    work_tile = work_tile_of(gl.program_id(0), 0, tensors, sizes, place, True)
    if work_tile.first >= work_tile.length:
        return
    seq_q = seq_q_of(work_tile, tensors, sizes)
    z_q, _ = heads_of(work_tile, sizes, VARLEN)
    origins = (origin_of_keys(work_tile, k_b, k_h, k_column), (work_tile.batch * q_b + seq_q.start, q_h, q_column))

    PIECES: gl.constexpr = WIDTH.head_dim // q_desc.block_shape[1]
    q, k = buffers(q_desc, STAGES * PIECES), buffers(k_desc, CONSUMERS * PIECES)
    do_t = buffers(do_t_desc, STAGES * PIECES)
    rows, scales = buffers(rows_desc, STAGES), buffers(scales_desc, STAGES)
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_full, count=1)
    full, empty = ring_barriers(STAGES, 2)
    places = ()
    if VARLEN:
        places = (share_place(place),)
    fence_async_shared()

    memory = Loaded(q, k, None, None, None, do_t, rows, None, scales)
    barriers = Barriers(keys_full, None, full, empty, None, None)
    descriptors = Loaded(q_desc, k_desc, None, None, None, do_t_desc, rows_desc, None, scales_desc)
    block_0 = padded_block(seq_q.start, work_tile.batch, BLOCK_Q, VARLEN)
    blocks = (blocks_q, z_q, block_0, tensors.block_sparse, tensors.work_splits, work_tile, tensors.key_mask, tokens_k)
    heads = (work_tile.head * group, work_tile.head * group + group)
    # fmt: off
    gl.warp_specialize(
        [
            (accumulate, (memory, places, barriers, tensors, dv_desc, sizes, factors, 0, KIND, WIDTH)),
            (accumulate, (memory, places, barriers, tensors, dv_desc, sizes, factors, 1, KIND, WIDTH)),
            (load, (descriptors, memory, barriers, origins, work_tile.first, blocks, heads, seq_q, KIND, WIDTH)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
    # fmt: on
