"""dQ, dK and dV on Hopper in one Gluon kernel, their products in e4m3 (`sagebwd.reference.float8`).

A warp loads by TMA; warpgroups hold 64 keys each, visit every query block that sees them and share its loads. P^T
and dS^T are operands of dV and dK in the registers they came in. e4m3 needs no maximum of a whole row, so dS^T also
goes to shared memory, transposed, and each of two warpgroups computes half of dQ^T over the keys of both, a step
behind, so that neither waits for the other. TMA adds these to dQ^T in FP16, scaled so that no sum overflows: in any
order, or where it must be repeatable bit for bit, from the last block of keys that a query sees to the first.

Shared memory binds: dev/log/2026-11-22-one-kernel.md counts reads and writes, why dO comes scaled, dQ transposed.
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
from sagebwd.kernels.sm90.backward.block_sparse import head_and_block, list_of, listed_block
from sagebwd.kernels.sm90.backward.dq_rows import BOXES, add_dq_rows, last_dq_rows
from sagebwd.kernels.sm90.backward.dq_sums import (
    SLOTS,
    add_dq,
    allocate_ds,
    allocate_k_t,
    copy_keys,
    counter_rank_and_count,
    dq_product,
    ds_barriers,
    release_dq_semaphore,
    store_dq,
    store_zero_ds,
)
from sagebwd.kernels.sm90.backward.epilogue import as_tiles, store_both
from sagebwd.kernels.sm90.backward.fp32_accumulate import accumulate_half_n, accumulate_in_pieces, accumulate_whole
from sagebwd.kernels.sm90.backward.key_blocks import (
    cut_at_both_ends,
    dq_sum_scale_of,
    head_and_number,
    heads_of,
    key_block,
    m_block_range,
    masked_m_block,
    place_in,
    place_of,
    seq_q_of,
    share_place,
    work_tile_of,
)
from sagebwd.kernels.sm90.backward.loads import Barriers, Loaded, buffers, load, origin_of_keys, ring_barriers
from sagebwd.kernels.sm90.backward.pieces import loaded, pieces_of, repeated, scaled
from sagebwd.kernels.sm90.backward.scores import (
    dp_minus_delta,
    ds_operand,
    keys_and_scales,
    probabilities,
    same_of_pairs,
    scores,
)
from sagebwd.kernels.sm90.backward.tile import (
    CONSUMERS,
    DELTA_CHANNELS,
    LOG2_E,
    REGISTERS,
    ROWS,
    barrier,
    delta_parts_weight,
    opaque,
    operand_float8,
    padded_block,
    program_number,
    result,
    ring,
    store_transposed,
)


@gluon.jit
def accumulate(
    memory, own_smem, barriers, tensors, descriptors, tiles_per_cta, sizes, factors, CONSUMER: gl.constexpr,
    KIND: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: dK and dV of 64 keys, and half of dQ^T, or of dQ, of every query block."""
    k_t_smem, ds_smem, dq_smem, ones, places = own_smem
    dq_desc, dk_desc, dv_desc = descriptors
    full, empty, ds_full, ds_empty = barriers.full, barriers.empty, barriers.ds_full, barriers.ds_empty
    dq_sem, key_mask, sparse, group = tensors.dq_semaphore, tensors.key_mask, tensors.block_sparse, sizes.group
    LISTED: gl.constexpr = sparse is not None
    TILE: gl.constexpr = WIDTH.backward
    BLOCK_Q: gl.constexpr = TILE.queries
    STAGES: gl.constexpr = TILE.stages
    IN_ORDER: gl.constexpr = dq_sem is not None
    VARLEN: gl.constexpr = tensors.cu_seqlens_q is not None
    JUMPS: gl.constexpr = cut_at_both_ends(KIND) and not LISTED  # from block to block
    PERSISTENT: gl.constexpr = TILE.persistent and not IN_ORDER and tensors.work_splits is None
    PIECE: gl.constexpr = memory.k.shape[2]
    PIECES: gl.constexpr = WIDTH.head_dim // PIECE
    VALUE_PIECES: gl.constexpr = WIDTH.value_dim // PIECE
    IN_PIECES: gl.constexpr = PIECES > 1
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 32])
    DP_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 4)
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    # its half of dQ^T: 64 channels, or 64 queries
    CHANNEL: gl.constexpr = CONSUMER * ROWS if TILE.dq_swap_ab and not IN_PIECES else 0
    QUERY: gl.constexpr = 0 if TILE.dq_swap_ab else CONSUMER * ROWS
    # rows of dQ^T a head, by which blocks are counted; or heads are, and dQ has rows of its own
    HEAD: gl.constexpr = 1 if IN_PIECES else WIDTH.head_dim
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    s_init = gl.zeros([ROWS, BLOCK_Q], gl.int32, S_LAYOUT)
    dp_init = gl.zeros([ROWS, BLOCK_Q], gl.float32, DP_LAYOUT)
    dq_init = gl.zeros([ROWS, ROWS], gl.float32, DQ_LAYOUT)
    dq_part = dq_smem[0].index(CONSUMER)
    pitch, begun = sizes.blocks_q * BLOCK_Q, 0
    # a single tile is no loop: ptxas then has uniform registers for stages, and spills nothing
    for tile_index in range(tiles_per_cta if PERSISTENT else 1):
        work_tile = work_tile_of(program_number(tile_index), tile_index, tensors, sizes, place_in(places, VARLEN))
        seq_q = seq_q_of(work_tile, tensors, sizes)
        z_q, z_k = heads_of(work_tile, sizes, VARLEN)
        listed = list_of(sparse, tensors.work_splits, work_tile.batch, work_tile.head, work_tile.first)
        m_range = m_block_range(
            work_tile, work_tile.first, key_mask, sizes.tokens_k, seq_q, sparse, listed, IN_ORDER, KIND, BLOCK_Q
        )
        begin, end, loops = m_range.begin, m_range.end, m_range.loops
        first_k = work_tile.first + CONSUMER * ROWS
        keys, keep_key, key_scale = keys_and_scales(tensors, work_tile, z_k, first_k, sizes, ROW)
        sum_scale = dq_sum_scale_of(work_tile, tensors, factors)
        acc_init = gl.zeros([ROWS, PIECE], gl.float32, OUT_LAYOUT)
        dk_acc, dv_acc = repeated(acc_init, PIECES), repeated(acc_init, VALUE_PIECES)
        mbarrier.wait(barriers.keys_full, tile_index & 1)
        k = pieces_of(memory.k, CONSUMER, PIECES)
        # the copy of the tile before has no readers left: K was loaded since
        copy_keys(k_t_smem, CONSUMER, k, key_scale, tensors.largest + work_tile.batch * sizes.heads_k + work_tile.head)
        key_scale = same_of_pairs(key_scale * (factors.scale * LOG2_E), ROW)
        # a block of zeros goes before a tile's first, and counts in dS's slots: every step has a dQ to compute
        slot, phase = ring(begun + tile_index, SLOTS)
        mbarrier.wait(ds_empty.index(slot), phase ^ 1)
        store_zero_ds(ds_smem, ds_full, slot, CONSUMER, BLOCK_Q)
        # operands that registers have room for are not read from shared memory again and again
        if not IN_PIECES:
            k_t = k_t_smem.index(0).slice(CHANNEL, ROWS, 0), k_t_smem.index(1).slice(CHANNEL, ROWS, 0)
            if not TILE.dq_swap_ab and not IN_ORDER:
                mbarrier.wait(ds_full.index(slot), phase)
                k_t = loaded(k_t, gl.DotOperandLayout(0, DQ_LAYOUT, 4))
        if TILE.k_in_regs:
            k = loaded(k, gl.DotOperandLayout(0, S_LAYOUT, 4))
        first_head, counter_before = z_q + work_tile.head * group, -1
        last_row = first_head * HEAD + CHANNEL
        block_0 = padded_block(seq_q.start, work_tile.batch, BLOCK_Q, VARLEN) - 1  # before the sequence's first
        column = block_0 * BLOCK_Q + QUERY
        s = scores(k, memory.q, full, begun, begin < end, s_init, False, STAGES)  # S^T = K Q^T
        heads = group if KIND.GROUPED and not LISTED else 1  # one alone is no loop
        last_rank, last_entry, last_block = None, 0, end
        if LISTED:
            _, last_entry, last_rank = listed_block(sparse, listed[0], 0)
        until = begun + (end - begin) * heads
        for head in range(heads):
            row = (first_head + head) * HEAD + CHANNEL
            for part in gl.static_range(len(loops)):
                ahead = begun + loops[part][2]
                for number in range(loops[part][0], loops[part][1]):
                    i = masked_m_block(number, m_range, KIND) if part == 0 else number
                    step = number + ahead
                    block = step + tile_index
                    stage, phase = ring(step, STAGES)
                    before, phase_before = ring(block, SLOTS)
                    slot, phase_slot = ring(block + 1, SLOTS)
                    rows, t_scales = memory.rows.index(stage), memory.scales.index(stage)
                    # where this step adds dQ^T of the step before; at a tile's first step 0 times K, NaN if K has NaN:
                    # to a block of this sequence, never to the sequence before
                    to_row, to_block, known_rank, at, first_q = row, gl.maximum(i, 1), None, 0, i * BLOCK_Q
                    if LISTED:
                        last_head, last_block = head_and_block(last_entry)
                        to_row, to_block = (first_head + last_head) * HEAD + CHANNEL, last_block + 1
                        known_rank = last_rank
                        at, last_entry, last_rank = listed_block(sparse, listed[0], number)
                        first_q = head_and_block(last_entry)[1] * BLOCK_Q
                    elif JUMPS:
                        to_block, last_block = last_block, i + 1
                    elif KIND.GROUPED:
                        to_row, to_block = gl.where(i == begin, last_row, row), gl.where(i == begin, end, i)
                    counter, rank, count = counter_rank_and_count(
                        to_row, to_block, first_k, block_0, sizes.blocks_q, work_tile, seq_q, dq_sem, CONSUMER, KIND,
                        BLOCK_Q, HEAD, known_rank,
                    )  # fmt: skip
                    counter = gl.where(step == 0, -1, counter)
                    # alone in flight across the loop's end: of two, ptxas would wait at once
                    s = warpgroup_mma_wait(0, deps=[s])
                    mbarrier.wait(full.index(stage * 3 + 1), phase)
                    dp = dp_minus_delta(  # dP^T - delta = V dO^T - delta
                        ones, memory.delta, memory.v, CONSUMER, memory.do, stage, dp_init, TILE.half_n and IN_ORDER
                    )
                    p, whole = probabilities(  # P^T = exp2(S^T - lse)
                        s, rows, key_scale, keys, keep_key, first_q, first_k, work_tile, seq_q, group, key_mask,
                        sparse, tensors.bias, at, KIND, part == 0, KIND.RAGGED, BLOCK_Q, S_LAYOUT,
                    )  # fmt: skip
                    p_fp8 = operand_float8(p, OPERAND)
                    dp = warpgroup_mma_wait(0, deps=[dp])
                    ds_fp8 = ds_operand(p, dp, whole, keep_key, key_mask, sparse, KIND, part == 0, S_LAYOUT, OPERAND)
                    mbarrier.wait(ds_empty.index(slot), phase_slot ^ 1)
                    store_transposed(ds_smem.index(slot * CONSUMERS + CONSUMER), result(ds_fp8, S_LAYOUT))
                    fence_async_shared()
                    barrier()
                    mbarrier.arrive(ds_full.index(slot), count=1)
                    mbarrier.wait(full.index(stage * 3 + 2), phase)
                    more = step + 1 < until if JUMPS else (number + 1 < end) | (head + 1 < heads)
                    if IN_PIECES:
                        dv_acc, dk_acc, dq, dq_half = accumulate_in_pieces(  # dV += P^T dO, dK += dS^T Q, dQ = dS K
                            dv_acc, dk_acc, (p_fp8, ds_fp8), (memory.do_t, memory.q_t), stage, t_scales,
                            k_t_smem, ds_smem, before, ds_full, phase_before, step < 0, CONSUMER, OUT_LAYOUT,
                        )  # fmt: skip
                        store_dq(dq_smem[2].index(CONSUMER), dq_half * sum_scale, dq_sem, counter_before)
                        if not TILE.k_in_regs:
                            # descriptors of before the loop would be kept in registers
                            k = pieces_of(memory.k, opaque(CONSUMER), PIECES)
                        s = scores(k, memory.q, full, step + 1, more, s_init, False, STAGES)
                        dq = warpgroup_mma_wait(PIECES, deps=[dq])
                    elif TILE.half_n:
                        opaque_false = step < 0
                        dv_acc, dk_acc, dq, free = accumulate_half_n(  # dV += P^T dO, dK += dS^T Q, dQ^T = K^T dS^T
                            dv_acc, dk_acc, p_fp8, ds_fp8, memory.do_t.index(stage), memory.q_t.index(stage),
                            t_scales, k_t, ds_smem, before, ds_full, phase_before, opaque_false, OUT_LAYOUT, BLOCK_Q,
                        )  # fmt: skip
                        free = free.to(gl.int32, bitcast=True)
                        s = scores(k, memory.q, full, step + 1, more, free, opaque_false, STAGES)  # S^T = K Q^T
                        dq = warpgroup_mma_wait(1, deps=[dq])
                    else:
                        dv_acc, dk_acc, dq = accumulate_whole(  # dV += P^T dO, dK += dS^T Q, dQ^T = K^T dS^T
                            dv_acc, dk_acc, (p_fp8, ds_fp8), (memory.do_t, memory.q_t), stage, t_scales,
                            k_t, ds_smem, before, ds_full, phase_before, acc_init, dq_init, QUERY, BLOCK_Q, OUT_LAYOUT,
                        )  # fmt: skip
                    mbarrier.arrive(ds_empty.index(before), count=1)
                    mbarrier.arrive(empty.index(stage), count=1)
                    dq = dq * sum_scale  # dQ^T in FP16's range
                    if IN_PIECES:
                        to_row = to_row * pitch + column + to_block * BLOCK_Q
                        add_dq_rows(dq_desc, dq_smem, dq, to_row, CONSUMER, dq_sem, counter, rank, count)
                    else:
                        store_dq(dq_part, dq, dq_sem, counter_before)
                        if not TILE.half_n:
                            # not before: dQ's registers are needed
                            s = scores(k, memory.q, full, step + 1, more, s_init, False, STAGES)
                        add_dq(dq_desc, dq_part, to_row, column + to_block * BLOCK_Q, dq_sem, counter, rank, count)
                    counter_before = counter
            last_row = row
            begun += end - begin
        if LISTED:
            last_head, last_block = head_and_block(last_entry)
            last_row, last_block = (first_head + last_head) * HEAD + CHANNEL, last_block + 1
        work_tile = work_tile_of(program_number(tile_index), tile_index, tensors, sizes, place_in(places, VARLEN))
        s = warpgroup_mma_wait(0, deps=[s])
        slot, phase = ring(begun + tile_index, SLOTS)
        mbarrier.wait(ds_full.index(slot), phase)
        if IN_PIECES:
            dq, dq_half = last_dq_rows(k_t_smem, ds_smem, slot, CONSUMER, OUT_LAYOUT)
        else:
            dq = warpgroup_mma_wait(0, deps=[dq_product(k_t, ds_smem, slot, dq_init, False, QUERY, BLOCK_Q)])
        mbarrier.arrive(ds_empty.index(slot), count=1)
        mbarrier.arrive(barriers.keys_empty, count=1)
        counter, rank, count = counter_rank_and_count(
            last_row, last_block, work_tile.first + CONSUMER * ROWS, block_0, sizes.blocks_q, work_tile, seq_q, dq_sem,
            CONSUMER, KIND, BLOCK_Q, HEAD, last_rank,
        )  # fmt: skip
        counter, last_block = gl.where(begin < end, counter, -1), gl.maximum(last_block, 1)
        if IN_PIECES:
            store_dq(dq_smem[2].index(CONSUMER), dq_half * sum_scale, dq_sem, counter_before)
            last_row = last_row * pitch + column + last_block * BLOCK_Q
            add_dq_rows(dq_desc, dq_smem, dq * sum_scale, last_row, CONSUMER, dq_sem, counter, rank, count)
        else:
            store_dq(dq_part, dq * sum_scale, dq_sem, counter_before)
            add_dq(dq_desc, dq_part, last_row, column + last_block * BLOCK_Q, dq_sem, counter, rank, count)
        release_dq_semaphore(dq_sem, counter)
        # over V, or over this warpgroup's dQ^T buffer where V of the next tile may lie
        out = as_tiles(dq_part if PERSISTENT else memory.v.index(CONSUMER * VALUE_PIECES), dk_desc, 1)
        dk_acc = scaled(dk_acc, factors.scale)
        store_both(dk_acc, dv_acc, tensors, dk_desc, dv_desc, out, work_tile, sizes, CONSUMER, KIND, WIDTH, OUT_LAYOUT)
    # what TMA still reads must outlive the program's shared memory
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*steps_of("q", "k", "v", "do"), *Sizes._fields, "tiles_per_cta"])
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, q_t_desc, do_t_desc, rows_desc, scales_desc, delta_desc, dq_desc, dk_desc,
    dv_desc, tensors, q_b, q_h, q_column, k_b, k_h, k_column, v_b, v_h, v_column, do_b, do_h, do_column, heads_k,
    group, tokens_q, tokens_k, total_k, blocks_q, programs, tiles_per_cta, heads_at_once, heads_in_all, lower, upper,
    factors, KIND: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of ``tiles_per_cta`` tiles of 128 keys of one key head, over its query heads; ``programs`` a head.

    Of `row_values_kernel`: do_desc, dO scaled; rows_desc, two planes; scales_desc, of the copies; delta_desc,
    parts of -delta, of which memory has half the channels and TMA makes the rest zeros; largest. dq_desc: (heads * D,
    padded queries) FP16, zeros to which dQ^T sum_scale is added, in units of spread and largest (`finish_dq_kernel`);
    if boxes of q_desc have a piece of its channels, rows of dQ instead, (heads * padded queries, D), in boxes of half
    a piece. dk_desc, dv_desc: dk and dv as rows. tensors, heads_k to upper, KIND: `arguments`; where blocks of keys
    add to dQ in order a program has one tile. q_b to do_column: `descriptor.Rows.steps`. WIDTH: of `widths.WIDTHS`.
    """
    IN_ORDER: gl.constexpr = tensors.dq_semaphore is not None
    VARLEN: gl.constexpr = tensors.cu_seqlens_q is not None
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    STAGES: gl.constexpr = WIDTH.backward.stages
    PIECE: gl.constexpr = q_desc.block_shape[1]
    PIECES: gl.constexpr = WIDTH.head_dim // PIECE
    VALUE_PIECES: gl.constexpr = WIDTH.value_dim // PIECE
    sizes = Sizes(
        heads_k, group, tokens_q, tokens_k, total_k, blocks_q, programs, heads_at_once, heads_in_all, lower, upper
    )
    place = place_of(tensors, sizes, tiles_per_cta, IN_ORDER)
    work_tile = work_tile_of(gl.program_id(0), 0, tensors, sizes, place)
    seq_q = seq_q_of(work_tile, tensors, sizes)
    SPAN: gl.constexpr = CONSUMERS * ROWS
    # no program has a tile past its sequence's end
    if tensors.work_splits is None:
        count = (work_tile.length + SPAN - 1) // SPAN
        if VARLEN:
            number, programs = place.number, place.programs
            if number >= programs:
                return
        else:
            _, number = head_and_number(gl.program_id(0), sizes, IN_ORDER)
        n = count // programs
        REVERSED: gl.constexpr = IN_ORDER and not VARLEN
        tiles_per_cta = gl.minimum(tiles_per_cta, n + (key_block(n, number, programs, REVERSED) < count).to(gl.int32))
    else:
        number = work_tile.first // SPAN
        tiles_per_cta = (work_tile.first < work_tile.length).to(gl.int32)
    if tiles_per_cta == 0:
        return
    z_q, _ = heads_of(work_tile, sizes, VARLEN)
    origins = (
        origin_of_keys(work_tile, k_b, k_h, k_column), origin_of_keys(work_tile, v_b, v_h, v_column),
        (work_tile.batch * q_b + seq_q.start, q_h, q_column), (work_tile.batch * do_b + seq_q.start, do_h, do_column),
    )  # fmt: skip

    q, k = buffers(q_desc, STAGES * PIECES), buffers(k_desc, CONSUMERS * PIECES)
    v, do = buffers(v_desc, CONSUMERS * VALUE_PIECES), buffers(do_desc, STAGES * VALUE_PIECES)
    q_t, k_t = buffers(q_t_desc, STAGES * PIECES), allocate_k_t(PIECES, PIECE)
    do_t, rows = buffers(do_t_desc, STAGES * VALUE_PIECES), buffers(rows_desc, STAGES)
    scales, delta = buffers(scales_desc, STAGES), buffers(delta_desc, STAGES)
    ones = gl.allocate_shared_memory(do_desc.dtype, [ROWS, DELTA_CHANNELS], delta_desc.layout)
    places = ()
    ds = allocate_ds(BLOCK_Q)
    dq = ()
    for _ in gl.static_range(BOXES if PIECES > 1 else 1):
        dq += (buffers(dq_desc, CONSUMERS),)
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    keys_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_full, count=1)
    mbarrier.init(keys_empty, count=CONSUMERS)
    full, empty = ring_barriers(STAGES, 3)
    ds_full, ds_empty = ds_barriers()
    CHANNELS: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [gl.num_warps(), 1], [1, 0])
    weight = delta_parts_weight(gl.arange(0, DELTA_CHANNELS, gl.SliceLayout(0, CHANNELS)))
    weight, _ = gl.broadcast(gl.expand_dims(weight, 0), gl.zeros([ROWS, DELTA_CHANNELS], gl.float32, CHANNELS))
    ones.store(weight.to(ones.dtype))
    if VARLEN:
        places = (share_place(place),)
    fence_async_shared()

    memory = Loaded(q, k, v, do, q_t, do_t, rows, delta, scales)
    barriers = Barriers(keys_full, keys_empty, full, empty, ds_full, ds_empty)
    descriptors = Loaded(q_desc, k_desc, v_desc, do_desc, q_t_desc, do_t_desc, rows_desc, delta_desc, scales_desc)
    own = (k_t, ds, dq, ones, places)
    written = (dq_desc, dk_desc, dv_desc)
    heads = (work_tile.head * group, work_tile.head * group + group)
    block_0 = padded_block(seq_q.start, work_tile.batch, BLOCK_Q, VARLEN)
    blocks = (blocks_q, z_q, block_0, tensors.block_sparse, tensors.work_splits, work_tile, tensors.key_mask, tokens_k)
    # fmt: off
    gl.warp_specialize(
        [
            (accumulate, (memory, own, barriers, tensors, written, tiles_per_cta, sizes, factors, 0, KIND, WIDTH)),
            (accumulate, (memory, own, barriers, tensors, written, tiles_per_cta, sizes, factors, 1, KIND, WIDTH)),
            (load, (
                descriptors, memory, barriers, origins, tiles_per_cta, number, programs, blocks, heads, seq_q,
                IN_ORDER, VARLEN, KIND, WIDTH,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
    # fmt: on
