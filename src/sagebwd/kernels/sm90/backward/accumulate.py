"""A consumer warpgroup of the backward on Hopper: dK and dV of 64 keys, and half of dQ of the queries that see them.

Of `kernel` and, without dV, of `key_query_kernel`. What it does with one block of queries is `m_block`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from sagebwd.kernels.sm90.backward.block_sparse import head_and_block, list_of, listed_block, sum_of_splits
from sagebwd.kernels.sm90.backward.dq_sums import (
    SLOTS,
    add_dq,
    add_dq_part,
    add_dq_rows,
    copy_keys,
    counter_rank_and_count,
    dq_parts,
    dq_product,
    dq_rows_product,
    last_dq_rows,
    release_dq_semaphore,
    store_dq,
    store_dq_part,
    store_zero_ds,
    zeros_of_rest,
)
from sagebwd.kernels.sm90.backward.epilogue import as_tiles, store_both, store_gradient
from sagebwd.kernels.sm90.backward.key_blocks import (
    cut_at_both_ends,
    dq_sum_scale_of,
    heads_of,
    m_block_range,
    masked_m_block,
    place_in,
    seq_q_of,
    work_tile_of,
)
from sagebwd.kernels.sm90.backward.m_block import Consumer, Step, dq_row_and_column, m_block, stages_of
from sagebwd.kernels.sm90.backward.scores import keys_and_scales, same_of_pairs, scores
from sagebwd.kernels.sm90.backward.tile import (
    LOG2_E,
    ROWS,
    loaded,
    padded_block,
    pieces_of,
    program_number,
    repeated,
    ring,
    scaled,
)


@gluon.jit
def accumulate(
    memory, own_smem, barriers, tensors, descriptors, tiles_per_cta, sizes, factors, CONSUMER: gl.constexpr,
    KIND: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys of each of a program's tiles, and half of dQ^T, or of dQ, of every query block."""
    k_t_smem, ds_smem, dq_smem, ones, places = own_smem
    dq_desc, dk_desc, dv_desc = descriptors
    ds_full, ds_empty = barriers.ds_full, barriers.ds_empty
    dq_sem, sparse = tensors.dq_semaphore, tensors.block_sparse
    TILE: gl.constexpr = WIDTH.backward
    SPLIT: gl.constexpr = TILE.split_dkdv
    BLOCK_Q: gl.constexpr = TILE.queries
    IN_ORDER: gl.constexpr = dq_sem is not None
    VARLEN: gl.constexpr = tensors.cu_seqlens_q is not None
    PERSISTENT: gl.constexpr = TILE.persistent and not IN_ORDER and tensors.work_splits is None
    PIECE: gl.constexpr = memory.k.shape[2]
    PIECES: gl.constexpr = WIDTH.head_dim // PIECE
    VALUE_PIECES: gl.constexpr = WIDTH.value_dim // PIECE
    DQ_BY_ROWS: gl.constexpr = SPLIT or PIECES > 1
    # channels of dK or dV that are an accumulator
    PART: gl.constexpr = ROWS if SPLIT else PIECE
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 32])
    DP_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    # a bias, or an order, takes registers of its own
    V_IN_REGS: gl.constexpr = TILE.v_pieces_in_regs if tensors.bias is None and not IN_ORDER else 0
    # its half of dQ^T: 64 channels, or 64 queries
    CHANNEL: gl.constexpr = CONSUMER * ROWS if TILE.dq_swap_ab else 0
    QUERY: gl.constexpr = 0 if TILE.dq_swap_ab else CONSUMER * ROWS
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    s_init = gl.zeros([ROWS, BLOCK_Q], gl.int32, S_LAYOUT)
    dp_init = gl.zeros([ROWS, BLOCK_Q], gl.float32, DP_LAYOUT)
    dq_init = gl.zeros([ROWS, ROWS], gl.float32, DQ_LAYOUT)
    dq_part = dq_smem[0].index(CONSUMER)
    pitch, begun = sizes.blocks_q * BLOCK_Q, 0
    # a single tile is no loop: ptxas then has uniform registers for stages, and spills nothing
    for tile_index in range(tiles_per_cta if PERSISTENT else 1):
        program = gl.program_id(0) if SPLIT else program_number(tile_index)
        work_tile = work_tile_of(program, tile_index, tensors, sizes, place_in(places, VARLEN), SPLIT)
        seq_q = seq_q_of(work_tile, tensors, sizes)
        z_q, z_k = heads_of(work_tile, sizes, VARLEN)
        listed = list_of(sparse, tensors.work_splits, work_tile.batch, work_tile.head, work_tile.first)
        m_range = m_block_range(
            work_tile, work_tile.first, tensors.key_mask, sizes.tokens_k, seq_q, sparse, listed, IN_ORDER, KIND,
            BLOCK_Q,
        )  # fmt: skip
        first_k = work_tile.first + CONSUMER * ROWS
        keys, keep_key, key_scale = keys_and_scales(tensors, work_tile, z_k, first_k, sizes, ROW)
        sum_scale = dq_sum_scale_of(work_tile, tensors, factors)
        acc_init = gl.zeros([ROWS, PART], gl.float32, OUT_LAYOUT)
        dk = repeated(acc_init, WIDTH.head_dim // PART)
        dv = ()
        if not SPLIT:
            dv = repeated(acc_init, VALUE_PIECES)
        mbarrier.wait(barriers.keys_full, tile_index & 1)
        k = pieces_of(memory.k, CONSUMER, PIECES)
        # the copy of the tile before has no readers left: K was loaded since
        copy_keys(k_t_smem, CONSUMER, k, key_scale, tensors.largest + work_tile.batch * sizes.heads_k + work_tile.head)
        key_scale = same_of_pairs(key_scale * (factors.scale * LOG2_E), ROW)
        # operands that registers have room for are not read from shared memory again and again; a block of zeros goes
        # before a tile's first, and counts in dS's slots: every step has a dQ to compute
        k_t, v = None, ()
        slot, phase = ring(begun + tile_index, SLOTS)
        if SPLIT:
            if TILE.k_in_regs:
                k = loaded(k, gl.DotOperandLayout(0, S_LAYOUT, 4))
            if V_IN_REGS:
                v = loaded(pieces_of(memory.v, CONSUMER, PIECES)[:V_IN_REGS], gl.DotOperandLayout(0, DP_LAYOUT, 2))
            store_zero_ds(ds_smem, ds_full, 0, CONSUMER, BLOCK_Q)
        else:
            mbarrier.wait(ds_empty.index(slot), phase ^ 1)
            store_zero_ds(ds_smem, ds_full, slot, CONSUMER, BLOCK_Q)
            if not DQ_BY_ROWS:
                k_t = k_t_smem.index(0).slice(CHANNEL, ROWS, 0), k_t_smem.index(1).slice(CHANNEL, ROWS, 0)
                if not TILE.dq_swap_ab and not IN_ORDER:
                    mbarrier.wait(ds_full.index(slot), phase)
                    k_t = loaded(k_t, gl.DotOperandLayout(0, DQ_LAYOUT, 4))
            if TILE.k_in_regs:
                k = loaded(k, gl.DotOperandLayout(0, S_LAYOUT, 4))
        first_head = z_q + work_tile.head * sizes.group
        block_0 = padded_block(seq_q.start, work_tile.batch, BLOCK_Q, VARLEN) - 1  # before the sequence's first
        column = block_0 * BLOCK_Q + QUERY
        c = Consumer(
            memory, barriers, tensors, sizes, work_tile, seq_q, first_k, keys, keep_key, key_scale, k, v, k_t, ones,
            k_t_smem, ds_smem, dq_smem, dq_part, dq_desc, sum_scale, s_init, dp_init, dq_init, pitch, column, block_0,
        )  # fmt: skip

        s, dv, dk, begun, last = m_blocks(
            c, m_range, listed[0], first_head, tile_index, begun, dk, dv, CONSUMER, KIND, WIDTH
        )

        program = program_number(tile_index)
        work_tile = work_tile_of(program, tile_index, tensors, sizes, place_in(places, VARLEN), SPLIT)
        s = warpgroup_mma_wait(0, deps=[s])
        add_last_dq(c, work_tile, begun + tile_index, last, m_range, CONSUMER, KIND, WIDTH)
        if SPLIT:
            is_mine = True
            if tensors.work_splits is not None:
                dk, is_mine = sum_of_splits(dk, tensors.work_splits, work_tile, 0, CONSUMER, WIDTH, OUT_LAYOUT)
            if is_mine:
                out = as_tiles(memory.v.index(CONSUMER * PIECES), dk_desc, len(dk))  # over this warpgroup's V
                store_gradient(
                    scaled(dk, factors.scale), tensors.dk, tensors.strides, dk_desc, out, work_tile,
                    work_tile.first + CONSUMER * ROWS, sizes, KIND,
                )  # fmt: skip
        else:
            # over V, or over this warpgroup's dQ^T buffer where V of the next tile may lie
            out = as_tiles(dq_part if PERSISTENT else memory.v.index(CONSUMER * VALUE_PIECES), dk_desc, 1)
            dk = scaled(dk, factors.scale)
            store_both(
                dk, dv, tensors, dk_desc, dv_desc, out, work_tile, sizes, CONSUMER, KIND, WIDTH, PERSISTENT, OUT_LAYOUT
            )  # fmt: skip
    # what TMA still reads must outlive the program's shared memory
    tma.store_wait(0)


class Added(NamedTuple):
    """What is still to be added to dQ: the last block's place, its rank in a list, and the counter before its own."""

    row: gl.tensor
    block: gl.tensor
    rank: gl.tensor
    counter_before: gl.tensor


@gluon.jit
def m_blocks(
    c, m_range, at, first_head, tile_index, begun, dk, dv, CONSUMER: gl.constexpr, KIND: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """`m_block` of every query block, of all heads, that sees the keys.

    Returns S^T, which nobody reads, dV, dK, how many steps there have been, and what is left to add. at: where a list
    of blocks begins. tile_index, begun: tiles, and steps, before these.
    """
    tensors, sizes = c.tensors, c.sizes
    sparse, dq_sem = tensors.block_sparse, tensors.dq_semaphore
    begin, end, loops = m_range.begin, m_range.end, m_range.loops
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    LISTED: gl.constexpr = sparse is not None
    JUMPS: gl.constexpr = cut_at_both_ends(KIND) and not LISTED  # from block to block
    BY_ROWS: gl.constexpr = c.k_t is None
    # dQ^T has a row a channel, of which a warpgroup may have half; dQ has rows of its own
    HEAD: gl.constexpr = 1 if BY_ROWS else WIDTH.head_dim
    CHANNEL: gl.constexpr = CONSUMER * ROWS if WIDTH.backward.dq_swap_ab and not BY_ROWS else 0
    heads = sizes.group if KIND.GROUPED and not LISTED else 1  # one alone is no loop
    counter_before, last_row = -1, first_head * HEAD + CHANNEL
    s = scores(c.k, c.memory.q, c.barriers.full, begun, begin < end, c.s_init, False, stages_of(WIDTH))  # S^T = K Q^T
    last_rank, last_entry, last_block = 0, 0, end
    if LISTED:
        _, last_entry, last_rank = listed_block(sparse, at, 0)
    until = begun + (end - begin) * heads
    for head in range(heads):
        row = (first_head + head) * HEAD + CHANNEL
        for part in gl.static_range(len(loops)):
            ahead = begun + loops[part][2]
            for number in range(loops[part][0], loops[part][1]):
                i = masked_m_block(number, m_range, KIND) if part == 0 else number
                step = number + ahead
                block = step + tile_index
                stage, phase = ring(step, stages_of(WIDTH))
                before, before_phase = ring(block, SLOTS)
                slot, slot_phase = ring(block + 1, SLOTS)
                rows, scales = None, None
                if not WIDTH.backward.split_dkdv:  # which reads them where it needs them
                    rows, scales = c.memory.rows.index(stage), c.memory.scales.index(stage)
                # where this step adds dQ^T of the step before; at a tile's first step 0 times K, NaN if K has NaN:
                # to a block of this sequence, never to the sequence before
                to_row, to_block, known_rank, entry_at, first_q = row, gl.maximum(i, 1), None, 0, i * BLOCK_Q
                if LISTED:
                    last_head, last_block = head_and_block(last_entry)
                    to_row, to_block = (first_head + last_head) * HEAD + CHANNEL, last_block + 1
                    known_rank = last_rank
                    entry_at, last_entry, last_rank = listed_block(sparse, at, number)
                    first_q = head_and_block(last_entry)[1] * BLOCK_Q
                elif JUMPS:
                    to_block, last_block = last_block, i + 1
                elif KIND.GROUPED:
                    to_row, to_block = gl.where(i == begin, last_row, row), gl.where(i == begin, end, i)
                counter, rank, count = counter_rank_and_count(
                    to_row, to_block, c.first_k, c.block_0, sizes.blocks_q, c.work_tile, c.seq_q, dq_sem, CONSUMER,
                    KIND, BLOCK_Q, HEAD, known_rank,
                )  # fmt: skip
                counter = gl.where(step == 0, -1, counter)
                if WIDTH.backward.split_dkdv:
                    to_row, _ = dq_row_and_column(c, to_row, to_block, WIDTH)
                left = (step, until) if JUMPS else (number, end, head, heads)
                this = Step(
                    step, left, first_q, entry_at, stage, phase, rows, scales, slot, slot_phase, before, before_phase,
                    to_row, to_block, counter, rank, count, counter_before,
                )  # fmt: skip
                s, dv, dk = m_block(c, this, s, dv, dk, part == 0, CONSUMER, KIND, WIDTH)
                counter_before = counter
        last_row = row
        begun += end - begin
    if LISTED:
        last_head, last_block = head_and_block(last_entry)
        last_row, last_block = (first_head + last_head) * HEAD + CHANNEL, last_block + 1
    return s, dv, dk, begun, Added(last_row, last_block, last_rank, counter_before)


@gluon.jit
def add_last_dq(c, work_tile, steps, last, m_range, CONSUMER: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr):
    """dQ += dS K of the last block: step 7 of `m_block` without the others."""
    dq_sem, dq_smem = c.tensors.dq_semaphore, c.dq_smem
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    SPLIT: gl.constexpr = WIDTH.backward.split_dkdv
    DQ_BY_ROWS: gl.constexpr = c.k_t is None
    PIECES: gl.constexpr = c.memory.q_t.shape[0]
    QUERY: gl.constexpr = 0 if WIDTH.backward.dq_swap_ab else CONSUMER * ROWS
    slot, phase = ring(steps, SLOTS)
    mbarrier.wait(c.barriers.ds_full.index(slot), phase)
    if SPLIT:
        counter, rank, count = counter_of_last(c, work_tile, last, m_range, CONSUMER, KIND, WIDTH)
        row, _ = dq_row_and_column(c, last.row, gl.maximum(last.block, 1), WIDTH)
        FIRST: gl.constexpr = dq_parts(CONSUMER, PIECES)[0]
        SECOND: gl.constexpr = dq_parts(CONSUMER, PIECES)[1]
        dq = dq_rows_product(c.k_t_smem, c.ds_smem, slot, c.dq_init, FIRST[0], FIRST[1])  # dQ = dS K
        dq = warpgroup_mma_wait(0, deps=[dq])
        store_dq_part(dq_smem, dq * c.sum_scale, dq_sem, last.counter_before, CONSUMER, False)
        add_dq_part(c.dq_desc, dq_smem, row, dq_sem, counter, rank, count, CONSUMER, False)  # dQ += dS K
        dq = dq_rows_product(c.k_t_smem, c.ds_smem, slot, zeros_of_rest(dq_smem), SECOND[0], SECOND[1])  # dQ = dS K
        dq = warpgroup_mma_wait(0, deps=[dq])
        store_dq_part(dq_smem, dq * c.sum_scale, None, -1, CONSUMER, True)
        add_dq_part(c.dq_desc, dq_smem, row, None, -1, 0, 0, CONSUMER, True)  # dQ += dS K
    else:
        if DQ_BY_ROWS:
            LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.k_t_smem.shape[1], 32])
            dq, dq_half = last_dq_rows(c.k_t_smem, c.ds_smem, slot, CONSUMER, LAYOUT)
        else:
            dq = dq_product(c.k_t, c.ds_smem, slot, c.dq_init, False, QUERY, BLOCK_Q)  # dQ^T = K^T dS^T
            dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(c.barriers.ds_empty.index(slot), count=1)
        mbarrier.arrive(c.barriers.keys_empty, count=1)
        counter, rank, count = counter_of_last(c, work_tile, last, m_range, CONSUMER, KIND, WIDTH)
        block = gl.maximum(last.block, 1)
        if DQ_BY_ROWS:
            store_dq(dq_smem[2].index(CONSUMER), dq_half * c.sum_scale, dq_sem, last.counter_before)
            row, _ = dq_row_and_column(c, last.row, block, WIDTH)
            add_dq_rows(c.dq_desc, dq_smem, dq * c.sum_scale, row, CONSUMER, dq_sem, counter, rank, count)
        else:
            store_dq(c.dq_part, dq * c.sum_scale, dq_sem, last.counter_before)
            row, column = dq_row_and_column(c, last.row, block, WIDTH)
            add_dq(c.dq_desc, c.dq_part, row, column, dq_sem, counter, rank, count)
    release_dq_semaphore(dq_sem, counter)


@gluon.jit
def counter_of_last(c, work_tile, last, m_range, CONSUMER: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr):
    """`counter_rank_and_count` of the last block."""
    HEAD: gl.constexpr = WIDTH.head_dim if c.k_t is not None else 1
    LISTED: gl.constexpr = c.tensors.block_sparse is not None
    counter, rank, count = counter_rank_and_count(
        last.row, last.block, work_tile.first + CONSUMER * ROWS, c.block_0, c.sizes.blocks_q, work_tile, c.seq_q,
        c.tensors.dq_semaphore, CONSUMER, KIND, WIDTH.backward.queries, HEAD, last.rank if LISTED else None,
    )  # fmt: skip
    return gl.where(m_range.begin < m_range.end, counter, -1), rank, count
