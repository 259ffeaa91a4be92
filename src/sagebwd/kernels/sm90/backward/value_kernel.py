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
    warpgroup_mma_wait,
)

from sagebwd.kernels.sm90.backward.arguments import Sizes, steps_of
from sagebwd.kernels.sm90.backward.block_sparse import head_and_block, list_of, met_of
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
from sagebwd.kernels.sm90.backward.loads import Barriers, Loaded, buffers, origin_of_keys, ring_barriers
from sagebwd.kernels.sm90.backward.pieces import load_copy, load_pieces, loaded, parts_of_copy, pieces_of, repeated
from sagebwd.kernels.sm90.backward.scores import keys_and_scales, plane, probabilities, same_of_pairs, scores
from sagebwd.kernels.sm90.backward.tile import (
    CONSUMERS,
    LOG2_E,
    REGISTERS,
    ROWS,
    load_tile,
    operand_float8,
    padded_block,
    program_number,
    ring,
)
from sagebwd.kernels.sm90.backward.work_splits import summed


@gluon.jit
def load(
    descriptors, memory, barriers, origins, first_k, blocks, heads, queries, KIND: gl.constexpr, WIDTH: gl.constexpr
):
    """The loading warp: K once, then Q, dO's transposed copy and row values of each block of each head's queries."""
    row_k, column_k = origins[0]
    row_q, row_q_h, column_q = origins[1]
    blocks_q, z_q, block_0, walk, shares, place, key_mask, tokens_k = blocks
    full = barriers.full
    STAGES: gl.constexpr = WIDTH.backward.stages
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    BLOCK_D: gl.constexpr = WIDTH.head_dim
    PIECES: gl.constexpr = BLOCK_D // memory.k.shape[2]
    mbarrier.expect(barriers.keys_full, CONSUMERS * ROWS * BLOCK_D)
    for consumer in gl.static_range(CONSUMERS):
        row = row_k + first_k + consumer * ROWS
        load_pieces(descriptors.k, row, column_k, barriers.keys_full, memory.k, consumer, PIECES)
    listed = list_of(walk, shares, place.batch, place.head, first_k)
    at = listed[0]
    met = queries_met(place, first_k, key_mask, tokens_k, queries, walk, listed, False, KIND, BLOCK_Q)
    step = gl.to_tensor(0)
    # a list has the blocks of all heads
    for first_head in range(heads[0], heads[1] if walk is None else heads[0] + 1):
        for number in range(met.begin, met.end):
            head, i = first_head, block_met(number, met, KIND)
            if walk is not None:
                head, i = head_and_block(met_of(walk, at, number)[1])
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
    memory, barriers, tensors, dv_desc, sizes, factors, CONSUMER: gl.constexpr, KIND: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: dV of 64 keys."""
    full, empty = barriers.full, barriers.empty
    STAGES: gl.constexpr = WIDTH.backward.stages
    walk = tensors.walk
    LISTED: gl.constexpr = walk is not None
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
    place = place_of(gl.program_id(0), 0, tensors, sizes, True)
    queries = queries_of(place, tensors, sizes)
    _, z_k = heads_of(place, sizes, VARLEN)
    listed = list_of(walk, tensors.shares, place.batch, place.head, place.first)
    at = listed[0]
    met = queries_met(
        place, place.first, tensors.key_mask, sizes.tokens_k, queries, walk, listed, False, KIND, BLOCK_Q
    )
    begin, end, loops = met.begin, met.end, met.loops
    first_k = place.first + CONSUMER * ROWS
    keys, keep_key, key_scale = keys_and_scales(tensors, place, z_k, first_k, sizes, ROW)
    key_scale = same_of_pairs(key_scale * (factors.scale * LOG2_E), ROW)
    no_scores = gl.zeros([ROWS, BLOCK_Q], gl.int32, S_LAYOUT)
    none = gl.zeros([ROWS, ROWS], gl.float32, PIECE)
    dv = repeated(none, PARTS)
    mbarrier.wait(barriers.keys_full, 0)
    # as registers are left: tensor cores need not read K from shared memory again and again
    if WIDTH.backward.holds_keys:
        k = loaded(pieces_of(memory.k, CONSUMER, PIECES), gl.DotOperandLayout(0, S_LAYOUT, 4))
    else:
        k = memory.k.index(CONSUMER)
        HALF: gl.constexpr = WIDTH.head_dim // 2
        k = k.slice(0, HALF, 1).load(gl.DotOperandLayout(0, S_LAYOUT, 4)), k.slice(HALF, HALF, 1)
    begun = 0
    s = scores(k, memory.q, full, begun, begin < end, no_scores, False, STAGES)
    # one head alone is no loop
    heads = sizes.group if KIND.GROUPED and not LISTED else 1
    until = begun + (end - begin) * heads
    for head in range(heads):
        for part in gl.static_range(len(loops)):
            ahead = begun + loops[part][2]
            for number in range(loops[part][0], loops[part][1]):
                i = block_cut(number, met, KIND) if part == 0 else number
                step = number + ahead
                stage, phase = ring(step, STAGES)
                # alone in flight across the loop's end: of two, ptxas would wait at once
                s = warpgroup_mma_wait(0, deps=[s])
                entry_at, block = 0, i
                if LISTED:
                    entry_at, entry, _ = met_of(walk, at, number)
                    block = head_and_block(entry)[1]
                p = probabilities(
                    s, memory.rows.index(stage), key_scale, keys, keep_key, block * BLOCK_Q, first_k, place, queries,
                    sizes.group, tensors.key_mask, walk, tensors.bias, entry_at, KIND, part == 0, False, BLOCK_Q,
                    S_LAYOUT,
                )[0]  # fmt: skip
                codes = operand_float8(p, OPERAND)
                mbarrier.wait(full.index(stage * 2 + 1), phase)
                never = step < 0
                copy = parts_of_copy(memory.do_t, stage, ROWS, PARTS)
                first = new_product(codes, copy[0], none)
                second = new_product(codes, copy[1], none)
                dv_scale = plane(memory.scales.index(stage), 0, 1, PIECE)
                added, free, last = add_by_turns(dv, (first, second), codes, copy, dv_scale, never)
                more = step + 1 < until if JUMPS else (number + 1 < end) | (head + 1 < heads)
                free = free.to(gl.int32, bitcast=True)
                s = scores(k, memory.q, full, step + 1, more, free, never, STAGES)
                last = warpgroup_mma_wait(len(k), deps=[last])  # as many are S's
                mbarrier.arrive(empty.index(stage), count=1)
                added += (add_here(dv[PARTS - 1], last, dv_scale),)
                dv = added
        begun += end - begin
    s = warpgroup_mma_wait(0, deps=[s])

    place, is_mine = place_of(program_number(0), 0, tensors, sizes, True), True
    if tensors.shares is not None:
        dv, is_mine = summed(dv, tensors.shares, place, WIDTH.head_dim, CONSUMER, WIDTH, PIECE)
    if is_mine:
        # over this warpgroup's K
        store_gradient(
            dv, tensors.dv, tensors.strides, dv_desc, places(memory.k.index(CONSUMER * PIECES), dv_desc, PARTS // 2),
            place, place.first + CONSUMER * ROWS, sizes, KIND.RAGGED, PIECE,
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
    place = place_of(gl.program_id(0), 0, tensors, sizes, True)
    if place.first >= place.length:
        return
    queries = queries_of(place, tensors, sizes)
    z_q, _ = heads_of(place, sizes, VARLEN)
    origins = (origin_of_keys(place, k_b, k_h, k_column), (place.batch * q_b + queries.start, q_h, q_column))

    PIECES: gl.constexpr = WIDTH.head_dim // q_desc.block_shape[1]
    q, k = buffers(q_desc, STAGES * PIECES), buffers(k_desc, CONSUMERS * PIECES)
    do_t = buffers(do_t_desc, STAGES * PIECES)
    rows, scales = buffers(rows_desc, STAGES), buffers(scales_desc, STAGES)
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_full, count=1)
    full, empty = ring_barriers(STAGES, 2)
    fence_async_shared()

    memory = Loaded(q, k, None, None, None, do_t, rows, None, scales)
    barriers = Barriers(keys_full, None, full, empty, None, None)
    descriptors = Loaded(q_desc, k_desc, None, None, None, do_t_desc, rows_desc, None, scales_desc)
    block_0 = padded_block(queries.start, place.batch, BLOCK_Q, VARLEN)
    blocks = (blocks_q, z_q, block_0, tensors.walk, tensors.shares, place, tensors.key_mask, tokens_k)
    heads = (place.head * group, place.head * group + group)
    # fmt: off
    gl.warp_specialize(
        [
            (accumulate, (memory, barriers, tensors, dv_desc, sizes, factors, 0, KIND, WIDTH)),
            (accumulate, (memory, barriers, tensors, dv_desc, sizes, factors, 1, KIND, WIDTH)),
            (load, (descriptors, memory, barriers, origins, place.first, blocks, heads, queries, KIND, WIDTH)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
    # fmt: on
