"""dK and dQ of the split backward on Hopper, where registers cannot hold dK beside dV; `value_kernel` computes dV.

As `kernel`, but for what wide heads leave no room for. Each operand of queries has an empty barrier of its own: Q is
released after S, dO after dP, Q^T after dK, so that even a single stage has most of a step to be
loaded again; Q and dO have two stages where they fit. delta is a plane of row values, not channels of dO. dQ is added
in rows: a warpgroup has half of the channels, 64 before dK's product and the others after it.
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

from sagebwd.kernels.sm90.backward.arguments import Sizes, steps_of
from sagebwd.kernels.sm90.backward.block_sparse import head_and_block, list_of, listed_block
from sagebwd.kernels.sm90.backward.dq_rows import BOXES, add_dq_part, dq_rows_product, store_dq_part
from sagebwd.kernels.sm90.backward.dq_sums import (
    SLOTS,
    allocate_ds,
    allocate_k_t,
    copy_keys,
    counter_rank_and_count,
    ds_barriers,
    release_dq_semaphore,
    store_zero_ds,
)
from sagebwd.kernels.sm90.backward.epilogue import as_tiles, store_gradient
from sagebwd.kernels.sm90.backward.fp32_accumulate import accumulate_alternating, fma_in_place, new_product
from sagebwd.kernels.sm90.backward.key_blocks import (
    cut_at_both_ends,
    dq_sum_scale_of,
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
from sagebwd.kernels.sm90.backward.loads import (
    Barriers,
    Loaded,
    buffers,
    bytes_of,
    load_keys,
    origin_of_keys,
    ring_barriers,
)
from sagebwd.kernels.sm90.backward.pieces import (
    load_copy,
    load_pieces,
    loaded,
    parts_of_copy,
    pieces_of,
    repeated,
    scaled,
)
from sagebwd.kernels.sm90.backward.scores import (
    ds_operand,
    keys_and_scales,
    plane,
    probabilities,
    same_of_pairs,
    scores,
)
from sagebwd.kernels.sm90.backward.tile import (
    CONSUMERS,
    LOG2_E,
    REGISTERS,
    ROWS,
    barrier,
    load_tile,
    opaque,
    padded_block,
    program_number,
    result,
    ring,
    store_transposed,
)
from sagebwd.kernels.sm90.backward.work_splits import sum_of_splits

# Barriers of a step's operands: Q; dO with row values; Q's transposed copy with its scale.
OF_Q, OF_DO, OF_Q_T, OPERANDS = (gl.constexpr(number) for number in (0, 1, 2, 3))


@gluon.jit
def load(
    descriptors, memory, barriers, origins, first_k, blocks, heads, seq_q, IN_ORDER: gl.constexpr,
    KIND: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Producer warp: load K and V once, then each operand of a query block once its stage is free."""
    origin_k, origin_v, origin_q, origin_do = origins
    row_q, row_q_h, column_q = origin_q
    row_do, row_do_h, column_do = origin_do
    blocks_q, z_q, block_0, sparse, splits, keys, key_mask, tokens_k = blocks
    full, empty = barriers.full, barriers.empty
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    BLOCK_D: gl.constexpr = WIDTH.head_dim
    Q_STAGES: gl.constexpr = WIDTH.backward.q_stages
    PIECES: gl.constexpr = memory.q_t.shape[0]
    load_keys(descriptors, memory, barriers.keys_full, origin_k, origin_v, first_k, WIDTH)
    listed = list_of(sparse, splits, keys.batch, keys.head, first_k)
    at = listed[0]
    m_range = m_block_range(keys, first_k, key_mask, tokens_k, seq_q, sparse, listed, IN_ORDER, KIND, BLOCK_Q)
    step = gl.to_tensor(0)
    # a list has the blocks of all heads
    for first_head in range(heads[0], heads[1] if sparse is None else heads[0] + 1):
        for number in range(m_range.begin, m_range.end):
            head, i = first_head, m_block_at(number, m_range, KIND)
            if sparse is not None:
                head, i = head_and_block(listed_block(sparse, at, number)[1])
                head += first_head
            z = z_q + head
            stage, phase = ring(step, Q_STAGES)
            free = phase ^ 1
            first = i * BLOCK_Q
            padded = z * blocks_q + block_0 + i
            ready = full.index(OF_Q * Q_STAGES + stage)
            mbarrier.wait(empty.index(OF_Q * Q_STAGES + stage), free)
            mbarrier.expect(ready, BLOCK_Q * BLOCK_D)
            load_pieces(descriptors.q, row_q + head * row_q_h + first, head * column_q, ready, memory.q, stage, PIECES)
            do_ready = full.index(OF_DO * Q_STAGES + stage)
            mbarrier.wait(empty.index(OF_DO * Q_STAGES + stage), free)
            mbarrier.expect(do_ready, BLOCK_Q * BLOCK_D * bytes_of(memory.do) + memory.rows.shape[2] * 4)
            load_tile(descriptors.rows, [padded, 0], do_ready, memory.rows.index(stage))
            row = row_do + head * row_do_h + first
            load_pieces(descriptors.do, row, head * column_do, do_ready, memory.do, stage, PIECES)
            copy_ready = full.index(OF_Q_T * Q_STAGES)
            mbarrier.wait(empty.index(OF_Q_T * Q_STAGES), (step & 1) ^ 1)
            mbarrier.expect(copy_ready, BLOCK_Q * BLOCK_D + memory.scales.shape[2] * 4)
            load_tile(descriptors.scales, [padded, 0], copy_ready, memory.scales.index(0))
            load_copy(descriptors.q_t, z * BLOCK_D, (block_0 + i) * BLOCK_Q, copy_ready, memory.q_t, 0, PIECES)
            step += 1


@gluon.jit
def accumulate(
    memory, own_smem, barriers, tensors, descriptors, sizes, factors, CONSUMER: gl.constexpr, KIND: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: dK of 64 keys, and half of the channels of dQ of every query block."""
    k_t_smem, ds_smem, dq_smem, places = own_smem
    dq_desc, dk_desc = descriptors
    full, empty, ds_full, ds_empty = barriers.full, barriers.empty, barriers.ds_full, barriers.ds_empty
    dq_sem, key_mask, blocks_q = tensors.dq_semaphore, tensors.key_mask, sizes.blocks_q
    sparse = tensors.block_sparse
    LISTED: gl.constexpr = sparse is not None
    JUMPS: gl.constexpr = cut_at_both_ends(KIND) and not LISTED  # from block to block
    VARLEN: gl.constexpr = tensors.cu_seqlens_q is not None
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 32])
    DP_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    # 64 channels of dK or dQ are a piece
    PIECE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PIECE, 4)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    gl.static_assert(BLOCK_Q == ROWS)
    Q_STAGES: gl.constexpr = WIDTH.backward.q_stages
    PIECES: gl.constexpr = memory.q_t.shape[0]
    PARTS: gl.constexpr = WIDTH.head_dim // ROWS
    # its half of dQ, in two parts: the first 64 channels, the second as many, or half of what is left
    FIRST: gl.constexpr = CONSUMER * 2 * ROWS if PIECES == 1 else 0
    SECOND: gl.constexpr = FIRST + ROWS if PIECES == 1 else CONSUMER * (ROWS // 2)
    FIRST_PIECE: gl.constexpr = 0 if PIECES == 1 else CONSUMER
    BOX: gl.constexpr = dq_smem[0].shape[2]
    REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BOX, 32])
    work_tile = work_tile_of(gl.program_id(0), 0, tensors, sizes, place_in(places, VARLEN), True)
    dq_scale = dq_sum_scale_of(work_tile, tensors, factors)
    seq_q = seq_q_of(work_tile, tensors, sizes)
    z_q, z_k = heads_of(work_tile, sizes, VARLEN)
    listed = list_of(sparse, tensors.work_splits, work_tile.batch, work_tile.head, work_tile.first)
    at = listed[0]
    m_range = m_block_range(
        work_tile, work_tile.first, key_mask, sizes.tokens_k, seq_q, sparse, listed, dq_sem is not None, KIND, BLOCK_Q
    )
    begin, end, loops = m_range.begin, m_range.end, m_range.loops
    first_k = work_tile.first + CONSUMER * ROWS
    keys, keep_key, key_scale = keys_and_scales(tensors, work_tile, z_k, first_k, sizes, ROW)
    s_init = gl.zeros([ROWS, BLOCK_Q], gl.int32, S_LAYOUT)
    dp_init = gl.zeros([ROWS, BLOCK_Q], gl.float32, DP_LAYOUT)
    acc_init = gl.zeros([ROWS, ROWS], gl.float32, PIECE)
    rest_init = gl.zeros([ROWS, BOX], gl.float32, REST)
    dk = repeated(acc_init, PARTS)
    mbarrier.wait(barriers.keys_full, 0)
    k = pieces_of(memory.k, CONSUMER, PIECES)
    copy_keys(k_t_smem, CONSUMER, k, key_scale, tensors.largest + work_tile.batch * sizes.heads_k + work_tile.head)
    key_scale = same_of_pairs(key_scale * (factors.scale * LOG2_E), ROW)
    if WIDTH.backward.k_in_regs:
        k = loaded(k, gl.DotOperandLayout(0, S_LAYOUT, 4))
    # a bias, or an order, takes registers of its own
    HELD: gl.constexpr = WIDTH.backward.v_pieces_in_regs if tensors.bias is None and dq_sem is None else 0
    held = loaded(pieces_of(memory.v, CONSUMER, PIECES)[:HELD], gl.DotOperandLayout(0, DP_LAYOUT, 2))
    # a block of zeros goes before the first: every step has one to compute dQ of
    store_zero_ds(ds_smem, ds_full, 0, CONSUMER, BLOCK_Q)
    first_head = z_q + work_tile.head * sizes.group
    last_head = first_head
    # blocks of dQ are counted from the one before a sequence's first
    block_0 = padded_block(seq_q.start, work_tile.batch, BLOCK_Q, VARLEN) - 1
    counter_before = -1
    begun = 0
    s = scores(k, memory.q, full, begun, begin < end, s_init, False, 1)
    # one head alone is no loop
    heads = sizes.group if KIND.GROUPED and not LISTED else 1
    last_rank, last_entry, last_block = None, 0, end
    if LISTED:
        _, last_entry, last_rank = listed_block(sparse, at, 0)
    until = begun + (end - begin) * heads
    for head in range(heads):
        for part in gl.static_range(len(loops)):
            ahead = begun + loops[part][2]
            for number in range(loops[part][0], loops[part][1]):
                i = masked_m_block(number, m_range, KIND) if part == 0 else number
                step = number + ahead
                stage, phase = ring(step, Q_STAGES)
                before, phase_before = ring(step, SLOTS)
                slot, phase_slot = ring(step + 1, SLOTS)
                # where this step adds dQ of the step before; at the first zeros times K, NaN if that is: to a block of
                # this sequence, never to the one before
                to_head = first_head + head
                to_block, known_rank, entry_at, first_q = gl.maximum(i, 1), None, 0, i * BLOCK_Q
                if LISTED:
                    to_head, last_block = head_and_block(last_entry)
                    to_head, to_block = first_head + to_head, last_block + 1
                    known_rank = last_rank
                    entry_at, last_entry, last_rank = listed_block(sparse, at, number)
                    first_q = head_and_block(last_entry)[1] * BLOCK_Q
                elif JUMPS:
                    to_block, last_block = last_block, i + 1
                elif KIND.GROUPED:
                    to_head, to_block = gl.where(i == begin, last_head, to_head), gl.where(i == begin, end, i)
                counter, rank, count = counter_rank_and_count(
                    to_head, to_block, first_k, block_0, blocks_q, work_tile, seq_q, dq_sem, CONSUMER, KIND,
                    BLOCK_Q, 1, known_rank,
                )  # fmt: skip
                counter = gl.where(step == 0, -1, counter)
                to_row = (to_head * blocks_q + block_0 + to_block) * BLOCK_Q
                # alone in flight across the loop's end: of two, ptxas would wait at once
                s = warpgroup_mma_wait(0, deps=[s])
                mbarrier.arrive(empty.index(OF_Q * Q_STAGES + stage), count=1)
                mbarrier.wait(full.index(OF_DO * Q_STAGES + stage), phase)
                rows = memory.rows.index(stage)
                dp = gl.broadcast(plane(rows, 2, BLOCK_Q, DP_LAYOUT), dp_init)[0]  # -delta
                # loop-invariant addresses would all be kept in registers through the loop, and spill
                v, do = pieces_of(memory.v, opaque(CONSUMER), PIECES), pieces_of(memory.do, opaque(stage), PIECES)
                v = held + v[HELD:]
                # dP^T - delta = V dO^T - delta
                dp = warpgroup_mma(v[0], do[0].permute((1, 0)), dp, is_async=True)
                for piece in gl.static_range(1, PIECES):
                    dp = warpgroup_mma(v[piece], do[piece].permute((1, 0)), dp, is_async=True)
                p, whole = probabilities(  # P^T = exp2(S^T - lse)
                    s, rows, key_scale, keys, keep_key, first_q, first_k, work_tile, seq_q, sizes.group, key_mask,
                    sparse, tensors.bias, entry_at, KIND, part == 0, KIND.RAGGED, BLOCK_Q, S_LAYOUT,
                )  # fmt: skip
                dp = warpgroup_mma_wait(0, deps=[dp])
                mbarrier.arrive(empty.index(OF_DO * Q_STAGES + stage), count=1)
                ds_fp8 = ds_operand(p, dp, whole, keep_key, key_mask, sparse, KIND, part == 0, S_LAYOUT, OPERAND)
                mbarrier.wait(ds_empty.index(slot), phase_slot ^ 1)
                store_transposed(ds_smem.index(slot * CONSUMERS + CONSUMER), result(ds_fp8, S_LAYOUT))
                fence_async_shared()
                barrier()
                mbarrier.arrive(ds_full.index(slot), count=1)

                opaque_false = step < 0
                mbarrier.wait(ds_full.index(before), phase_before)
                dq = dq_rows_product(k_t_smem, ds_smem, before, acc_init, opaque(FIRST_PIECE), FIRST)  # dQ = dS K
                mbarrier.wait(full.index(OF_Q_T * Q_STAGES), step & 1)
                q_t = parts_of_copy(memory.q_t, 0, ROWS, PARTS)
                first = new_product(ds_fp8, q_t[0], acc_init)  # dS^T Q
                dk_scale = plane(memory.scales.index(0), 1, 1, PIECE)
                dq = warpgroup_mma_wait(1, deps=[dq])
                store_dq_part(dq_smem, dq * dq_scale, dq_sem, counter_before, CONSUMER, False)
                second = new_product(ds_fp8, q_t[1], dq, opaque_false)  # dS^T Q
                add_dq_part(dq_desc, dq_smem, to_row, dq_sem, counter, rank, count, CONSUMER, False)  # dQ += dS K
                dk_new, free, last = accumulate_alternating(dk, (first, second), ds_fp8, q_t, dk_scale, opaque_false)
                if PIECES == 1:
                    dq = dq_rows_product(k_t_smem, ds_smem, before, free, opaque(0), SECOND, opaque_false)
                else:
                    dq = dq_rows_product(k_t_smem, ds_smem, before, rest_init, opaque(PIECES - 1), SECOND)
                last = warpgroup_mma_wait(2, deps=[last])  # dQ's are two
                mbarrier.arrive(empty.index(OF_Q_T * Q_STAGES), count=1)
                dk_new += (fma_in_place(dk[PARTS - 1], last, dk_scale),)  # dK += dS^T Q
                dk = dk_new
                more = step + 1 < until if JUMPS else (number + 1 < end) | (head + 1 < heads)
                free = last.to(gl.int32, bitcast=True)
                stage, phase = ring(step + 1, Q_STAGES) if Q_STAGES > 1 else (0, phase ^ 1)
                mbarrier.wait(full.index(OF_Q * Q_STAGES + stage), phase, pred=more)
                if not WIDTH.backward.k_in_regs:
                    k = pieces_of(memory.k, opaque(CONSUMER), PIECES)
                q = pieces_of(memory.q, opaque(stage), PIECES)
                s = warpgroup_mma(k[0], q[0].permute((1, 0)), free, use_acc=opaque_false, is_async=True)  # S^T = K Q^T
                for piece in gl.static_range(1, PIECES):
                    s = warpgroup_mma(k[piece], q[piece].permute((1, 0)), s, is_async=True)
                dq = warpgroup_mma_wait(PIECES, deps=[dq])
                mbarrier.arrive(ds_empty.index(before), count=1)
                # the semaphore was acquired with the first piece
                store_dq_part(dq_smem, dq * dq_scale, None, -1, CONSUMER, True)
                add_dq_part(dq_desc, dq_smem, to_row, None, -1, 0, 0, CONSUMER, True)
                counter_before = counter
        if not LISTED:
            last_head = first_head + head
        begun += end - begin
    if LISTED:
        last_head, last_block = head_and_block(last_entry)
        last_head, last_block = first_head + last_head, last_block + 1
    work_tile, is_mine = work_tile_of(program_number(0), 0, tensors, sizes, place_in(places, VARLEN), True), True
    s = warpgroup_mma_wait(0, deps=[s])
    slot, phase = ring(begun, SLOTS)
    mbarrier.wait(ds_full.index(slot), phase)
    counter, rank, count = counter_rank_and_count(
        last_head, last_block, work_tile.first + CONSUMER * ROWS, block_0, blocks_q, work_tile, seq_q, dq_sem,
        CONSUMER, KIND, BLOCK_Q, 1, last_rank,
    )  # fmt: skip
    counter = gl.where(begin < end, counter, -1)
    to_row = (last_head * blocks_q + block_0 + gl.maximum(last_block, 1)) * BLOCK_Q
    dq = dq_rows_product(k_t_smem, ds_smem, slot, acc_init, FIRST_PIECE, FIRST)
    dq = warpgroup_mma_wait(0, deps=[dq])
    store_dq_part(dq_smem, dq * dq_scale, dq_sem, counter_before, CONSUMER, False)
    add_dq_part(dq_desc, dq_smem, to_row, dq_sem, counter, rank, count, CONSUMER, False)
    dq = dq_rows_product(k_t_smem, ds_smem, slot, rest_init, PIECES - 1, SECOND)
    dq = warpgroup_mma_wait(0, deps=[dq])
    store_dq_part(dq_smem, dq * dq_scale, None, -1, CONSUMER, True)
    add_dq_part(dq_desc, dq_smem, to_row, None, -1, 0, 0, CONSUMER, True)
    release_dq_semaphore(dq_sem, counter)

    if tensors.work_splits is not None:
        dk, is_mine = sum_of_splits(dk, tensors.work_splits, work_tile, 0, CONSUMER, WIDTH, PIECE)
    if is_mine:
        store_gradient(
            scaled(dk, factors.scale), tensors.dk, tensors.strides, dk_desc,
            as_tiles(memory.v.index(CONSUMER * PIECES), dk_desc, PARTS), work_tile, work_tile.first + CONSUMER * ROWS,
            sizes, KIND.RAGGED, PIECE,
        )  # fmt: skip
    # what TMA still reads must outlive the program's shared memory
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*steps_of("q", "k", "v", "do"), *Sizes._fields])
def key_query_kernel(
    q_desc, k_desc, v_desc, do_desc, q_t_desc, rows_desc, scales_desc, dq_desc, dk_desc, tensors, q_b, q_h, q_column,
    k_b, k_h, k_column, v_b, v_h, v_column, do_b, do_h, do_column, heads_k, group, tokens_q, tokens_k, total_k,
    blocks_q, programs, heads_at_once, heads_in_all, lower, upper, factors, KIND: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """dK of 128 keys of one key head, and what they add to dQ; arguments as `backward_kernel`'s.

    rows_desc: three planes, the third -delta, and zeros. dq_desc: (heads * padded queries, D)
    FP16. dk_desc: 64 channels at a time. heads_at_once: of so many heads every one gets its first program before any
    gets its second, whether blocks add to dQ in order or not.
    """
    VARLEN: gl.constexpr = tensors.cu_seqlens_q is not None
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    Q_STAGES: gl.constexpr = WIDTH.backward.q_stages
    PIECES: gl.constexpr = WIDTH.head_dim // q_desc.block_shape[1]
    sizes = Sizes(
        heads_k, group, tokens_q, tokens_k, total_k, blocks_q, programs, heads_at_once, heads_in_all, lower, upper
    )
    place = place_of(tensors, sizes, 1, tensors.dq_semaphore is not None, True)
    work_tile = work_tile_of(gl.program_id(0), 0, tensors, sizes, place, True)
    if work_tile.first >= work_tile.length:
        return
    seq_q = seq_q_of(work_tile, tensors, sizes)
    z_q, _ = heads_of(work_tile, sizes, VARLEN)
    origins = (
        origin_of_keys(work_tile, k_b, k_h, k_column), origin_of_keys(work_tile, v_b, v_h, v_column),
        (work_tile.batch * q_b + seq_q.start, q_h, q_column), (work_tile.batch * do_b + seq_q.start, do_h, do_column),
    )  # fmt: skip

    q, k = buffers(q_desc, Q_STAGES * PIECES), buffers(k_desc, CONSUMERS * PIECES)
    v, do = buffers(v_desc, CONSUMERS * PIECES), buffers(do_desc, Q_STAGES * PIECES)
    q_t, k_t = buffers(q_t_desc, PIECES), allocate_k_t(PIECES, q_desc.block_shape[1])
    rows, scales = buffers(rows_desc, Q_STAGES), buffers(scales_desc, 1)
    ds, dq = allocate_ds(BLOCK_Q), ()
    for _ in gl.static_range(BOXES if PIECES > 1 else 1):
        dq += (buffers(dq_desc, CONSUMERS),)
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_full, count=1)
    full, empty = ring_barriers(OPERANDS * Q_STAGES, 1)
    ds_full, ds_empty = ds_barriers()
    places = ()
    if VARLEN:
        places = (share_place(place),)
    fence_async_shared()

    memory = Loaded(q, k, v, do, q_t, None, rows, None, scales)
    barriers = Barriers(keys_full, None, full, empty, ds_full, ds_empty)
    descriptors = Loaded(q_desc, k_desc, v_desc, do_desc, q_t_desc, None, rows_desc, None, scales_desc)
    own = (k_t, ds, dq, places)
    block_0 = padded_block(seq_q.start, work_tile.batch, BLOCK_Q, VARLEN)
    blocks = (blocks_q, z_q, block_0, tensors.block_sparse, tensors.work_splits, work_tile, tensors.key_mask, tokens_k)
    heads = (work_tile.head * group, work_tile.head * group + group)
    # fmt: off
    gl.warp_specialize(
        [
            (accumulate, (memory, own, barriers, tensors, (dq_desc, dk_desc), sizes, factors, 0, KIND, WIDTH)),
            (accumulate, (memory, own, barriers, tensors, (dq_desc, dk_desc), sizes, factors, 1, KIND, WIDTH)),
            (load, (
                descriptors, memory, barriers, origins, work_tile.first, blocks, heads, seq_q,
                tensors.dq_semaphore is not None, KIND, WIDTH,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
    # fmt: on
