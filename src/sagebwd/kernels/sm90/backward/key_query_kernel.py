"""dK and dQ on Hopper where dK and dV have no room beside one another; `value_kernel` makes dV.

As `kernel`, but for what so many channels leave no room for. Each operand of queries has a barrier of its own that
says when its place is free: Q after S, dO after dP, Q's copy after dK, so that even one place has most of a step to be
loaded again; Q and dO have two where they fit. delta is a plane of row values, not channels of dO. dQ is added in
rows: a warpgroup has half of the channels, 64 before dK's product and the others after it.
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
from sagebwd.kernels.sm90.backward.block_sparse import head_and_block, list_of, met_of
from sagebwd.kernels.sm90.backward.dq_rows import BOXES, add_dq_part, dq_rows_product, store_dq_part
from sagebwd.kernels.sm90.backward.dq_sums import (
    SLOTS,
    allocate_ds,
    allocate_k_t,
    copy_keys,
    count_added,
    counter_rank_and_count,
    ds_barriers,
    store_no_ds,
)
from sagebwd.kernels.sm90.backward.epilogue import places, store_gradient
from sagebwd.kernels.sm90.backward.fp32_accumulate import add_by_turns, add_here, new_product
from sagebwd.kernels.sm90.backward.key_blocks import (
    block_cut,
    block_met,
    cut_at_both_ends,
    heads_of,
    place_of,
    queries_met,
    queries_of,
)
from sagebwd.kernels.sm90.backward.loads import Barriers, Loaded, buffers, load_keys, origin_of_keys, ring_barriers
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
    anew,
    barrier,
    load_tile,
    padded_block,
    program_number,
    result,
    ring,
    store_transposed,
)
from sagebwd.kernels.sm90.backward.work_splits import summed

# Barriers of what a step reads: Q; dO with row values; Q's transposed copy with its scale.
OF_Q, OF_DO, OF_Q_T, OPERANDS = (gl.constexpr(number) for number in (0, 1, 2, 3))


@gluon.jit
def load(
    descriptors, memory, barriers, origins, first_k, blocks, heads, queries, IN_ORDER: gl.constexpr,
    KIND: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """The loading warp: K and V once, then each operand of a block of queries once its place is free."""
    origin_k, origin_v, origin_q, origin_do = origins
    row_q, row_q_h, column_q = origin_q
    row_do, row_do_h, column_do = origin_do
    blocks_q, z_q, block_0, walk, shares, keys, key_mask, tokens_k = blocks
    full, empty = barriers.full, barriers.empty
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    BLOCK_D: gl.constexpr = WIDTH.head_dim
    PLACES: gl.constexpr = WIDTH.backward.places
    PIECES: gl.constexpr = memory.q_t.shape[0]
    load_keys(descriptors, memory, barriers.keys_full, origin_k, origin_v, first_k, WIDTH)
    listed = list_of(walk, shares, keys.batch, keys.head, first_k)
    at = listed[0]
    met = queries_met(keys, first_k, key_mask, tokens_k, queries, walk, listed, IN_ORDER, KIND, BLOCK_Q)
    step = gl.to_tensor(0)
    # a list has the blocks of all heads
    for first_head in range(heads[0], heads[1] if walk is None else heads[0] + 1):
        for number in range(met.begin, met.end):
            head, i = first_head, block_met(number, met, KIND)
            if walk is not None:
                head, i = head_and_block(met_of(walk, at, number)[1])
                head += first_head
            z = z_q + head
            place, phase = ring(step, PLACES)
            free = phase ^ 1
            first = i * BLOCK_Q
            padded = z * blocks_q + block_0 + i
            ready = full.index(OF_Q * PLACES + place)
            mbarrier.wait(empty.index(OF_Q * PLACES + place), free)
            mbarrier.expect(ready, BLOCK_Q * BLOCK_D)
            load_pieces(descriptors.q, row_q + head * row_q_h + first, head * column_q, ready, memory.q, place, PIECES)
            do_ready = full.index(OF_DO * PLACES + place)
            mbarrier.wait(empty.index(OF_DO * PLACES + place), free)
            mbarrier.expect(do_ready, BLOCK_Q * BLOCK_D * 2 + memory.rows.shape[2] * 4)
            load_tile(descriptors.rows, [padded, 0], do_ready, memory.rows.index(place))
            row = row_do + head * row_do_h + first
            load_pieces(descriptors.do, row, head * column_do, do_ready, memory.do, place, PIECES)
            copy_ready = full.index(OF_Q_T * PLACES)
            mbarrier.wait(empty.index(OF_Q_T * PLACES), (step & 1) ^ 1)
            mbarrier.expect(copy_ready, BLOCK_Q * BLOCK_D + memory.scales.shape[2] * 4)
            load_tile(descriptors.scales, [padded, 0], copy_ready, memory.scales.index(0))
            load_copy(descriptors.q_t, z * BLOCK_D, (block_0 + i) * BLOCK_Q, copy_ready, memory.q_t, 0, PIECES)
            step += 1


@gluon.jit
def accumulate(
    memory, own_memory, barriers, tensors, descriptors, sizes, factors, CONSUMER: gl.constexpr, KIND: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: dK of 64 keys, half of the channels of dQ of every block of queries."""
    k_t_memory, ds_memory, dq_memory = own_memory
    dq_desc, dk_desc = descriptors
    full, empty, ds_full, ds_empty = barriers.full, barriers.empty, barriers.ds_full, barriers.ds_empty
    added, key_mask, blocks_q, sum_scale = tensors.added, tensors.key_mask, sizes.blocks_q, factors.sum_scale
    walk = tensors.walk
    LISTED: gl.constexpr = walk is not None
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
    PLACES: gl.constexpr = WIDTH.backward.places
    PIECES: gl.constexpr = memory.q_t.shape[0]
    PARTS: gl.constexpr = WIDTH.head_dim // ROWS
    # its half of dQ, in two parts: the first 64 channels, the second as many, or half of what is left
    FIRST: gl.constexpr = CONSUMER * 2 * ROWS if PIECES == 1 else 0
    SECOND: gl.constexpr = FIRST + ROWS if PIECES == 1 else CONSUMER * (ROWS // 2)
    FIRST_PIECE: gl.constexpr = 0 if PIECES == 1 else CONSUMER
    BOX: gl.constexpr = dq_memory[0].shape[2]
    REST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BOX, 32])
    place = place_of(gl.program_id(0), 0, tensors, sizes, True)
    queries = queries_of(place, tensors, sizes)
    z_q, z_k = heads_of(place, sizes, VARLEN)
    listed = list_of(walk, tensors.shares, place.batch, place.head, place.first)
    at = listed[0]
    met = queries_met(
        place, place.first, tensors.key_mask, sizes.tokens_k, queries, walk, listed, added is not None, KIND, BLOCK_Q
    )
    begin, end, loops = met.begin, met.end, met.loops
    first_k = place.first + CONSUMER * ROWS
    keys, keep_key, key_scale = keys_and_scales(tensors, place, z_k, first_k, sizes, ROW)
    no_scores = gl.zeros([ROWS, BLOCK_Q], gl.int32, S_LAYOUT)
    no_dp = gl.zeros([ROWS, BLOCK_Q], gl.float32, DP_LAYOUT)
    none = gl.zeros([ROWS, ROWS], gl.float32, PIECE)
    no_rest = gl.zeros([ROWS, BOX], gl.float32, REST)
    dk = repeated(none, PARTS)
    mbarrier.wait(barriers.keys_full, 0)
    k = pieces_of(memory.k, CONSUMER, PIECES)
    copy_keys(k_t_memory, CONSUMER, k, key_scale, tensors.largest + place.batch * sizes.heads_k + place.head)
    key_scale = same_of_pairs(key_scale * (factors.scale * LOG2_E), ROW)
    if WIDTH.backward.holds_keys:
        k = loaded(k, gl.DotOperandLayout(0, S_LAYOUT, 4))
    # a bias, or an order, takes registers of its own
    HELD: gl.constexpr = WIDTH.backward.held_values if tensors.bias is None and added is None else 0
    held = loaded(pieces_of(memory.v, CONSUMER, PIECES)[:HELD], gl.DotOperandLayout(0, DP_LAYOUT, 2))
    # a block of zeros goes before the first: every step has one to compute dQ of
    store_no_ds(ds_memory, ds_full, 0, CONSUMER, BLOCK_Q)
    first_head = z_q + place.head * sizes.group
    last_head = first_head
    # blocks of dQ are counted from the one before a sequence's first
    block_0 = padded_block(queries.start, place.batch, BLOCK_Q, VARLEN) - 1
    counter_before = -1
    begun = 0
    s = scores(k, memory.q, full, begun, begin < end, no_scores, False, 1)
    # one head alone is no loop
    heads = sizes.group if KIND.GROUPED and not LISTED else 1
    last_rank, last_entry, last_block = None, 0, end
    if LISTED:
        _, last_entry, last_rank = met_of(walk, at, 0)
    until = begun + (end - begin) * heads
    for head in range(heads):
        for part in gl.static_range(len(loops)):
            ahead = begun + loops[part][2]
            for number in range(loops[part][0], loops[part][1]):
                i = block_cut(number, met, KIND) if part == 0 else number
                step = number + ahead
                place_q, phase = ring(step, PLACES)
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
                    entry_at, last_entry, last_rank = met_of(walk, at, number)
                    first_q = head_and_block(last_entry)[1] * BLOCK_Q
                elif JUMPS:
                    to_block, last_block = last_block, i + 1
                elif KIND.GROUPED:
                    to_head, to_block = gl.where(i == begin, last_head, to_head), gl.where(i == begin, end, i)
                counter, rank, count = counter_rank_and_count(
                    to_head, to_block, first_k, block_0, blocks_q, place, queries, added, CONSUMER, KIND, BLOCK_Q, 1,
                    known_rank,
                )  # fmt: skip
                counter = gl.where(step == 0, -1, counter)
                to_row = (to_head * blocks_q + block_0 + to_block) * BLOCK_Q
                # alone in flight across the loop's end: of two, ptxas would wait at once
                s = warpgroup_mma_wait(0, deps=[s])
                mbarrier.arrive(empty.index(OF_Q * PLACES + place_q), count=1)
                mbarrier.wait(full.index(OF_DO * PLACES + place_q), phase)
                rows = memory.rows.index(place_q)
                # dP - delta
                delta = gl.broadcast(plane(rows, 2, BLOCK_Q, DP_LAYOUT), no_dp)[0]
                # addresses of what never moves would all be kept through the loop, and spill
                v, do = pieces_of(memory.v, anew(CONSUMER), PIECES), pieces_of(memory.do, anew(place_q), PIECES)
                v = held + v[HELD:]
                dp = warpgroup_mma(v[0], do[0].permute((1, 0)), delta, is_async=True)
                for piece in gl.static_range(1, PIECES):
                    dp = warpgroup_mma(v[piece], do[piece].permute((1, 0)), dp, is_async=True)
                p, whole = probabilities(
                    s, rows, key_scale, keys, keep_key, first_q, first_k, place, queries, sizes.group, key_mask,
                    walk, tensors.bias, entry_at, KIND, part == 0, KIND.RAGGED, BLOCK_Q, S_LAYOUT,
                )  # fmt: skip
                dp = warpgroup_mma_wait(0, deps=[dp])
                mbarrier.arrive(empty.index(OF_DO * PLACES + place_q), count=1)
                codes = ds_operand(p, dp, whole, keep_key, key_mask, walk, KIND, part == 0, S_LAYOUT, OPERAND)
                mbarrier.wait(ds_empty.index(slot), phase_slot ^ 1)
                store_transposed(ds_memory.index(slot * CONSUMERS + CONSUMER), result(codes, S_LAYOUT))
                fence_async_shared()
                barrier()
                mbarrier.arrive(ds_full.index(slot), count=1)

                never = step < 0
                mbarrier.wait(ds_full.index(before), phase_before)
                dq = dq_rows_product(k_t_memory, ds_memory, before, none, anew(FIRST_PIECE), FIRST)
                mbarrier.wait(full.index(OF_Q_T * PLACES), step & 1)
                q_t = parts_of_copy(memory.q_t, 0, ROWS, PARTS)
                first = new_product(codes, q_t[0], none)
                dk_scale = plane(memory.scales.index(0), 1, 1, PIECE)
                dq = warpgroup_mma_wait(1, deps=[dq])
                store_dq_part(dq_memory, dq * sum_scale, added, counter_before, CONSUMER, False)
                second = new_product(codes, q_t[1], dq, never)
                add_dq_part(dq_desc, dq_memory, to_row, added, counter, rank, count, CONSUMER, False)
                dk_added, free, last = add_by_turns(dk, (first, second), codes, q_t, dk_scale, never)
                if PIECES == 1:
                    dq = dq_rows_product(k_t_memory, ds_memory, before, free, anew(0), SECOND, never)
                else:
                    dq = dq_rows_product(k_t_memory, ds_memory, before, no_rest, anew(PIECES - 1), SECOND)
                last = warpgroup_mma_wait(2, deps=[last])  # dQ's are two
                mbarrier.arrive(empty.index(OF_Q_T * PLACES), count=1)
                dk_added += (add_here(dk[PARTS - 1], last, dk_scale),)
                dk = dk_added
                more = step + 1 < until if JUMPS else (number + 1 < end) | (head + 1 < heads)
                free = last.to(gl.int32, bitcast=True)
                place_q, phase = ring(step + 1, PLACES) if PLACES > 1 else (0, phase ^ 1)
                mbarrier.wait(full.index(OF_Q * PLACES + place_q), phase, pred=more)
                if not WIDTH.backward.holds_keys:
                    k = pieces_of(memory.k, anew(CONSUMER), PIECES)
                q = pieces_of(memory.q, anew(place_q), PIECES)
                s = warpgroup_mma(k[0], q[0].permute((1, 0)), free, use_acc=never, is_async=True)
                for piece in gl.static_range(1, PIECES):
                    s = warpgroup_mma(k[piece], q[piece].permute((1, 0)), s, is_async=True)
                dq = warpgroup_mma_wait(PIECES, deps=[dq])
                mbarrier.arrive(ds_empty.index(before), count=1)
                # its turn to add has come with the first piece
                store_dq_part(dq_memory, dq * sum_scale, None, -1, CONSUMER, True)
                add_dq_part(dq_desc, dq_memory, to_row, None, -1, 0, 0, CONSUMER, True)
                counter_before = counter
        if not LISTED:
            last_head = first_head + head
        begun += end - begin
    if LISTED:
        last_head, last_block = head_and_block(last_entry)
        last_head, last_block = first_head + last_head, last_block + 1
    place, is_mine = place_of(program_number(0), 0, tensors, sizes, True), True
    s = warpgroup_mma_wait(0, deps=[s])
    slot, phase = ring(begun, SLOTS)
    mbarrier.wait(ds_full.index(slot), phase)
    counter, rank, count = counter_rank_and_count(
        last_head, last_block, place.first + CONSUMER * ROWS, block_0, blocks_q, place, queries, added, CONSUMER,
        KIND, BLOCK_Q, 1, last_rank,
    )  # fmt: skip
    counter = gl.where(begin < end, counter, -1)
    to_row = (last_head * blocks_q + block_0 + gl.maximum(last_block, 1)) * BLOCK_Q
    dq = dq_rows_product(k_t_memory, ds_memory, slot, none, FIRST_PIECE, FIRST)
    dq = warpgroup_mma_wait(0, deps=[dq])
    store_dq_part(dq_memory, dq * sum_scale, added, counter_before, CONSUMER, False)
    add_dq_part(dq_desc, dq_memory, to_row, added, counter, rank, count, CONSUMER, False)
    dq = dq_rows_product(k_t_memory, ds_memory, slot, no_rest, PIECES - 1, SECOND)
    dq = warpgroup_mma_wait(0, deps=[dq])
    store_dq_part(dq_memory, dq * sum_scale, None, -1, CONSUMER, True)
    add_dq_part(dq_desc, dq_memory, to_row, None, -1, 0, 0, CONSUMER, True)
    count_added(added, counter)

    if tensors.shares is not None:
        dk, is_mine = summed(dk, tensors.shares, place, 0, CONSUMER, WIDTH, PIECE)
    if is_mine:
        # over this warpgroup's V
        store_gradient(
            scaled(dk, factors.scale), tensors.dk, tensors.strides, dk_desc,
            places(memory.v.index(CONSUMER * PIECES), dk_desc, PARTS), place, place.first + CONSUMER * ROWS, sizes,
            KIND.RAGGED, PIECE,
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

    rows_desc: three planes, the third -delta, and zeros. dq_desc: (heads * padded queries, D) FP16. dk_desc: 64
    channels at a time. heads_at_once: of so many heads every one gets its first program before any gets its second,
    whether blocks add to dQ in order or not.
    """
    VARLEN: gl.constexpr = tensors.cu_seqlens_q is not None
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    PLACES: gl.constexpr = WIDTH.backward.places
    PIECES: gl.constexpr = WIDTH.head_dim // q_desc.block_shape[1]
    sizes = Sizes(
        heads_k, group, tokens_q, tokens_k, total_k, blocks_q, programs, heads_at_once, heads_in_all, lower, upper
    )
    place = place_of(gl.program_id(0), 0, tensors, sizes, True)
    if place.first >= place.length:
        return
    queries = queries_of(place, tensors, sizes)
    z_q, _ = heads_of(place, sizes, VARLEN)
    origins = (
        origin_of_keys(place, k_b, k_h, k_column), origin_of_keys(place, v_b, v_h, v_column),
        (place.batch * q_b + queries.start, q_h, q_column), (place.batch * do_b + queries.start, do_h, do_column),
    )  # fmt: skip

    q, k = buffers(q_desc, PLACES * PIECES), buffers(k_desc, CONSUMERS * PIECES)
    v, do = buffers(v_desc, CONSUMERS * PIECES), buffers(do_desc, PLACES * PIECES)
    q_t, k_t = buffers(q_t_desc, PIECES), allocate_k_t(PIECES, q_desc.block_shape[1])
    rows, scales = buffers(rows_desc, PLACES), buffers(scales_desc, 1)
    ds, dq = allocate_ds(BLOCK_Q), ()
    for _ in gl.static_range(BOXES if PIECES > 1 else 1):
        dq += (buffers(dq_desc, CONSUMERS),)
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_full, count=1)
    full, empty = ring_barriers(OPERANDS * PLACES, 1)
    ds_full, ds_empty = ds_barriers()
    fence_async_shared()

    memory = Loaded(q, k, v, do, q_t, None, rows, None, scales)
    barriers = Barriers(keys_full, None, full, empty, ds_full, ds_empty)
    descriptors = Loaded(q_desc, k_desc, v_desc, do_desc, q_t_desc, None, rows_desc, None, scales_desc)
    own = (k_t, ds, dq)
    block_0 = padded_block(queries.start, place.batch, BLOCK_Q, VARLEN)
    blocks = (blocks_q, z_q, block_0, tensors.walk, tensors.shares, place, tensors.key_mask, tokens_k)
    heads = (place.head * group, place.head * group + group)
    # fmt: off
    gl.warp_specialize(
        [
            (accumulate, (memory, own, barriers, tensors, (dq_desc, dk_desc), sizes, factors, 0, KIND, WIDTH)),
            (accumulate, (memory, own, barriers, tensors, (dq_desc, dk_desc), sizes, factors, 1, KIND, WIDTH)),
            (load, (
                descriptors, memory, barriers, origins, place.first, blocks, heads, queries, tensors.added is not None,
                KIND, WIDTH,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
    # fmt: on
