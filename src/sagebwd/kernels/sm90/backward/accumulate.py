"""A consumer warpgroup of the backward on Hopper: dK and dV of 64 keys, and half of dQ of the queries that see them.

Of `kernel` and, without dV, of `key_query_kernel`. What it does with one block of queries is `m_block`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from sagebwd.kernels.sm90.backward.block_sparse import list_of
from sagebwd.kernels.sm90.backward.dq_rows import (
    add_dq_part,
    add_dq_rows,
    dq_rows_product,
    last_dq_rows,
    store_dq_part,
)
from sagebwd.kernels.sm90.backward.dq_sums import (
    SLOTS,
    add_dq,
    copy_keys,
    counter_rank_and_count,
    dq_product,
    release_dq_semaphore,
    store_dq,
    store_zero_ds,
)
from sagebwd.kernels.sm90.backward.epilogue import as_tiles, store_both, store_gradient
from sagebwd.kernels.sm90.backward.key_blocks import (
    dq_sum_scale_of,
    heads_of,
    m_block_range,
    place_in,
    seq_q_of,
    work_tile_of,
)
from sagebwd.kernels.sm90.backward.m_block import Consumer, dq_row_and_column, m_blocks
from sagebwd.kernels.sm90.backward.pieces import loaded, pieces_of, repeated, scaled
from sagebwd.kernels.sm90.backward.scores import keys_and_scales, same_of_pairs, value_scales
from sagebwd.kernels.sm90.backward.tile import LOG2_E, ROWS, padded_block, program_number, ring
from sagebwd.kernels.sm90.backward.work_splits import sum_of_splits


@gluon.jit
def accumulate(
    memory, own_smem, barriers, tensors, descriptors, tiles_per_cta, sizes, factors, CONSUMER: gl.constexpr,
    KIND: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys of each of a program's tiles, and half of dQ^T, or of dQ, of every query block."""
    k_t_smem, ds_smem, dq_smem, ones, out_smem, places = own_smem
    dq_desc, dk_desc, dv_desc = descriptors
    ds_full, ds_empty = barriers.ds_full, barriers.ds_empty
    dq_sem, sparse = tensors.dq_semaphore, tensors.block_sparse
    TILE: gl.constexpr = WIDTH.backward
    SPLIT: gl.constexpr = TILE.split_dkdv
    BLOCK_Q: gl.constexpr = TILE.queries
    IN_ORDER: gl.constexpr = dq_sem is not None
    INT8_DP: gl.constexpr = tensors.v_scale is not None
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
    K_OPERAND: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 4)
    V_OPERAND: gl.constexpr = K_OPERAND if INT8_DP else gl.DotOperandLayout(0, DP_LAYOUT, 2)
    # a bias, or an order, takes registers of its own
    V_IN_REGS: gl.constexpr = TILE.v_pieces_in_regs if tensors.bias is None and not IN_ORDER else 0
    # its half of dQ^T: 64 channels, or 64 queries
    CHANNEL: gl.constexpr = CONSUMER * ROWS if TILE.dq_swap_ab else 0
    QUERY: gl.constexpr = 0 if TILE.dq_swap_ab else CONSUMER * ROWS
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    s_init = gl.zeros([ROWS, BLOCK_Q], gl.int32, S_LAYOUT)
    dp_init = s_init
    if not INT8_DP:
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
        v_scale = None
        if INT8_DP:
            v_scale = value_scales(tensors, work_tile, z_k, first_k, sizes, ROW)
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
        # a block of zeros goes before a tile's first, and counts in dS's slots: every step has a dQ to compute
        slot, phase = ring(begun + tile_index, SLOTS)
        if not SPLIT:
            mbarrier.wait(ds_empty.index(slot), phase ^ 1)
        store_zero_ds(ds_smem, ds_full, slot, CONSUMER, BLOCK_Q)
        # operands that registers have room for are not read from shared memory again and again
        k_t, v = None, ()
        if not DQ_BY_ROWS:
            k_t = k_t_smem.index(0).slice(CHANNEL, ROWS, 0), k_t_smem.index(1).slice(CHANNEL, ROWS, 0)
            if not TILE.dq_swap_ab and not IN_ORDER:
                mbarrier.wait(ds_full.index(slot), phase)
                k_t = loaded(k_t, gl.DotOperandLayout(0, DQ_LAYOUT, 4))
        if TILE.k_in_regs:
            k = loaded(k, K_OPERAND)
        if V_IN_REGS:
            v = loaded(pieces_of(memory.v, CONSUMER, PIECES)[:V_IN_REGS], V_OPERAND)
        first_head = z_q + work_tile.head * sizes.group
        block_0 = padded_block(seq_q.start, work_tile.batch, BLOCK_Q, VARLEN) - 1  # before the sequence's first
        column = block_0 * BLOCK_Q + QUERY
        c = Consumer(
            memory, barriers, tensors, sizes, work_tile, seq_q, first_k, keys, keep_key, key_scale, v_scale, k, v, k_t,
            ones, k_t_smem, ds_smem, dq_smem, dq_part, dq_desc, sum_scale, s_init, dp_init, dq_init, pitch, column, block_0,
        )  # fmt: skip

        s, dv, dk, begun, last = m_blocks(
            c, m_range, listed[0], first_head, tile_index, begun, dk, dv, CONSUMER, KIND, WIDTH
        )

        program = program_number(0 if SPLIT else tile_index)
        work_tile = work_tile_of(program, tile_index, tensors, sizes, place_in(places, VARLEN), SPLIT)
        s = warpgroup_mma_wait(0, deps=[s])
        add_last_dq(c, work_tile, begun + tile_index, last, m_range, CONSUMER, KIND, WIDTH)
        if SPLIT:
            is_mine = True
            if tensors.work_splits is not None:
                dk, is_mine = sum_of_splits(dk, tensors.work_splits, work_tile, 0, CONSUMER, WIDTH, OUT_LAYOUT)
            if is_mine:
                # over this warpgroup's V, of whose codes there are half as many bytes
                TILES: gl.constexpr = len(dk) // 2 if INT8_DP else len(dk)
                store_gradient(
                    scaled(dk, factors.scale), tensors.dk, tensors.strides, dk_desc, as_tiles(memory.v.index(CONSUMER * PIECES), dk_desc, TILES), work_tile, work_tile.first + CONSUMER * ROWS, sizes, KIND.RAGGED, OUT_LAYOUT,
                )  # fmt: skip
        else:
            # over V, or over this warpgroup's dQ^T buffer where V of the next tile may lie; V's codes have not the room
            own = memory.v.index(CONSUMER * VALUE_PIECES) if out_smem is None else out_smem.index(CONSUMER)
            out = as_tiles(dq_part if PERSISTENT else own, dk_desc, 1)
            dk = scaled(dk, factors.scale)
            store_both(dk, dv, tensors, dk_desc, dv_desc, out, work_tile, sizes, CONSUMER, KIND, WIDTH, OUT_LAYOUT)
    # what TMA still reads must outlive the program's shared memory
    tma.store_wait(0)


@gluon.jit
def add_last_dq(
    c, work_tile, steps, last, m_range, CONSUMER: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr
):  # fmt: skip
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
        # its half of dQ, in two parts: the first 64 channels, the second as many, or half of what is left
        FIRST: gl.constexpr = CONSUMER * 2 * ROWS if PIECES == 1 else 0
        SECOND: gl.constexpr = FIRST + ROWS if PIECES == 1 else CONSUMER * (ROWS // 2)
        FIRST_PIECE: gl.constexpr = 0 if PIECES == 1 else CONSUMER
        BOX: gl.constexpr = dq_smem[0].shape[2]
        rest_init = gl.zeros([ROWS, BOX], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BOX, 32]))
        dq = dq_rows_product(c.k_t_smem, c.ds_smem, slot, c.dq_init, FIRST_PIECE, FIRST)
        dq = warpgroup_mma_wait(0, deps=[dq])
        store_dq_part(dq_smem, dq * c.sum_scale, dq_sem, last.counter_before, CONSUMER, False)
        add_dq_part(c.dq_desc, dq_smem, row, dq_sem, counter, rank, count, CONSUMER, False)
        dq = dq_rows_product(c.k_t_smem, c.ds_smem, slot, rest_init, PIECES - 1, SECOND)
        dq = warpgroup_mma_wait(0, deps=[dq])
        store_dq_part(dq_smem, dq * c.sum_scale, None, -1, CONSUMER, True)
        add_dq_part(c.dq_desc, dq_smem, row, None, -1, 0, 0, CONSUMER, True)
    else:
        if DQ_BY_ROWS:
            LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.k_t_smem.shape[1], 32])
            dq, dq_half = last_dq_rows(c.k_t_smem, c.ds_smem, slot, CONSUMER, LAYOUT)
        else:
            dq = warpgroup_mma_wait(0, deps=[dq_product(c.k_t, c.ds_smem, slot, c.dq_init, False, QUERY, BLOCK_Q)])
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
def counter_of_last(
    c, work_tile, last, m_range, CONSUMER: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr
):  # fmt: skip
    """`counter_rank_and_count` of the last block."""
    HEAD: gl.constexpr = WIDTH.head_dim if c.k_t is not None else 1
    LISTED: gl.constexpr = c.tensors.block_sparse is not None
    counter, rank, count = counter_rank_and_count(
        last.row, last.block, work_tile.first + CONSUMER * ROWS, c.block_0, c.sizes.blocks_q, work_tile, c.seq_q,
        c.tensors.dq_semaphore, CONSUMER, KIND, WIDTH.backward.queries, HEAD, last.rank if LISTED else None,
    )  # fmt: skip
    return gl.where(m_range.begin < m_range.end, counter, -1), rank, count
