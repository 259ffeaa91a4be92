"""Loading warps of the backward: K and V once a tile, then query blocks into a ring of stages, all by TMA."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from sagebwd.kernels.sm90.backward.block_sparse import head_and_block, list_of, listed_block
from sagebwd.kernels.sm90.backward.key_blocks import key_block, m_block_at, m_block_range
from sagebwd.kernels.sm90.backward.tile import CONSUMERS, ROWS, load_copy, load_pieces, load_tile, ring

# Barriers of a step's operands: Q; dO; the e4m3 copies with their scales. Row values come with Q, in a kernel without
# dV with dO.
OF_Q, OF_DO, OF_COPIES, OPERANDS = (gl.constexpr(number) for number in (0, 1, 2, 3))

Operand = tma.tensor_descriptor | gl.shared_memory_descriptor


class Loaded(NamedTuple):
    """TMA descriptors, or shared-memory buffers, of the operands; None if a kernel does not read one.

    delta: additional channels of dO. scales: of the e4m3 copies q_t and do_t.
    """

    q: Operand
    k: Operand
    v: Operand | None
    do: Operand | None
    q_t: Operand | None
    do_t: Operand | None
    rows: Operand
    delta: Operand | None
    scales: Operand


class Barriers(NamedTuple):
    """Full and empty mbarriers of K and V, of the stages of a step's operands, and of dS's slots; or None."""

    keys_full: gl.shared_memory_descriptor
    keys_empty: gl.shared_memory_descriptor | None
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor | None
    ds_empty: gl.shared_memory_descriptor | None


@gluon.jit
def buffers(desc, COUNT: gl.constexpr):
    """Shared memory of COUNT blocks of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT, desc.block_shape[0], desc.block_shape[1]], desc.layout)


@gluon.constexpr_function
def bytes_of(memory):
    """Of an element."""
    return memory.dtype.primitive_bitwidth // 8


@gluon.constexpr_function
def bytes_of_tile(memory):
    """Of one of the tiles of `buffers`."""
    return memory.shape[1] * memory.shape[2] * memory.dtype.primitive_bitwidth // 8


@gluon.jit
def ring_barriers(STAGES: gl.constexpr, PARTS: gl.constexpr):
    """Barriers of a ring: PARTS full barriers a stage, one for each load, and one empty barrier, for all readers."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES * PARTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        for part in gl.static_range(PARTS):
            mbarrier.init(full.index(stage * PARTS + part), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    return full, empty


@gluon.jit
def barrier_of(OPERAND: gl.constexpr, stage, WIDTH: gl.constexpr):
    """Number of the barrier that an operand's stage is full by."""
    if WIDTH.backward.split_dkdv:
        return OPERAND * WIDTH.backward.q_stages + stage
    else:
        return stage * OPERANDS + OPERAND


@gluon.jit
def origin_of_keys(work_tile, of_batch, of_head, of_column):
    """Row and column of a sequence's first key, from `descriptor.Rows.steps`."""
    return work_tile.batch * of_batch + work_tile.head * of_head + work_tile.start, work_tile.head * of_column


@gluon.jit
def load_keys(descriptors, memory, full, origin_k, origin_v, first_k, WIDTH: gl.constexpr):
    """Load K and V of 64 keys a consumer warpgroup from ``first_k`` on. Origins: `origin_of_keys`."""
    row_k, column_k = origin_k
    row_v, column_v = origin_v
    PIECES: gl.constexpr = memory.k.shape[0] // CONSUMERS
    VALUE_PIECES: gl.constexpr = memory.v.shape[0] // CONSUMERS
    mbarrier.expect(full, CONSUMERS * ROWS * (WIDTH.head_dim + WIDTH.value_dim * bytes_of(memory.v)))
    for consumer in gl.static_range(CONSUMERS):
        first = first_k + consumer * ROWS
        load_pieces(descriptors.k, row_k + first, column_k, full, memory.k, consumer, PIECES)
        load_pieces(descriptors.v, row_v + first, column_v, full, memory.v, consumer, VALUE_PIECES)


@gluon.jit
def load_queries(
    descriptors, memory, barriers, origin_q, origin_do, m_range, blocks, heads, sparse, at, step, KIND: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """Load Q, dO, their e4m3 transposes and row values of every query block of every head, into a ring of stages.

    Origins: row of a sequence's first query, and steps of a head. at: start of a list in ``sparse.lists``. step: how
    many blocks the ring has had; returned with these counted in.
    """
    row_q, row_q_h, column_q = origin_q
    row_do, row_do_h, column_do = origin_do
    blocks_q, z_q, block_0 = blocks
    HEAD_DIM: gl.constexpr = WIDTH.head_dim
    VALUE_DIM: gl.constexpr = WIDTH.value_dim
    STAGES: gl.constexpr = WIDTH.backward.stages
    BLOCK_Q: gl.constexpr = WIDTH.backward.queries
    PIECES: gl.constexpr = memory.q.shape[0] // STAGES
    VALUE_PIECES: gl.constexpr = memory.do.shape[0] // STAGES
    full = barriers.full
    step = gl.to_tensor(step)
    # a list has the blocks of all heads
    for first_head in range(heads[0], heads[1] if sparse is None else heads[0] + 1):
        for number in range(m_range.begin, m_range.end):
            head, i = first_head, m_block_at(number, m_range, KIND)
            if sparse is not None:
                head, i = head_and_block(listed_block(sparse, at, number)[1])
                head += first_head
            z = z_q + head
            stage = step % STAGES
            mbarrier.wait(barriers.empty.index(stage), ((step // STAGES) & 1) ^ 1)
            ready = full.index(stage * 3)
            do_ready = full.index(stage * 3 + 1)
            copies_ready = full.index(stage * 3 + 2)
            first = i * BLOCK_Q
            padded = block_0 + i
            mbarrier.expect(ready, BLOCK_Q * HEAD_DIM + memory.rows.shape[2] * 4)
            row = row_q + head * row_q_h + first
            load_pieces(descriptors.q, row, head * column_q, ready, memory.q, stage, PIECES)
            load_tile(descriptors.rows, [z * blocks_q + padded, 0], ready, memory.rows.index(stage))
            mbarrier.expect(do_ready, BLOCK_Q * VALUE_DIM * bytes_of(memory.do) + bytes_of_tile(memory.delta))
            token = (z * blocks_q + padded) * BLOCK_Q
            load_tile(descriptors.delta, [token, 0], do_ready, memory.delta.index(stage))
            row = row_do + head * row_do_h + first
            load_pieces(descriptors.do, row, head * column_do, do_ready, memory.do, stage, VALUE_PIECES)
            mbarrier.expect(copies_ready, BLOCK_Q * (HEAD_DIM + VALUE_DIM) + memory.scales.shape[2] * 4)
            load_tile(descriptors.scales, [z * blocks_q + padded, 0], copies_ready, memory.scales.index(stage))
            column = padded * BLOCK_Q
            load_copy(descriptors.do_t, z * VALUE_DIM, column, copies_ready, memory.do_t, stage, VALUE_PIECES)
            load_copy(descriptors.q_t, z * HEAD_DIM, column, copies_ready, memory.q_t, stage, PIECES)
            step += 1
    return step


@gluon.jit
def load(
    descriptors, memory, barriers, origins, tiles_per_cta, number, programs, blocks, heads, seq_q,
    IN_ORDER: gl.constexpr, VARLEN: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Load, for each key tile, K and V, then its query blocks (`load_queries`); origins: of K, V, Q and dO."""
    origin_k, origin_v, origin_q, origin_do = origins
    blocks_q, z_q, block_0, sparse, splits, work_tile, key_mask, tokens_k = blocks
    step = 0
    for tile_index in range(tiles_per_cta if WIDTH.backward.persistent and not IN_ORDER and splits is None else 1):
        first_k = key_block(tile_index, number, programs, IN_ORDER and not VARLEN) * (CONSUMERS * ROWS)
        mbarrier.wait(barriers.keys_empty, (tile_index & 1) ^ 1)
        load_keys(descriptors, memory, barriers.keys_full, origin_k, origin_v, first_k, WIDTH)
        listed = list_of(sparse, splits, work_tile.batch, work_tile.head, first_k)
        m_range = m_block_range(
            work_tile, first_k, key_mask, tokens_k, seq_q, sparse, listed, IN_ORDER, KIND, WIDTH.backward.queries
        )
        step = load_queries(
            descriptors, memory, barriers, origin_q, origin_do, m_range, (blocks_q, z_q, block_0), heads, sparse,
            listed[0], step, KIND, WIDTH,
        )  # fmt: skip


@gluon.jit
def load_by_operand(
    descriptors, memory, barriers, origins, first_k, blocks, heads, seq_q, IN_ORDER: gl.constexpr,
    KIND: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Load K and V once, then each operand of a query block once its own stage is free."""
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
            ready = full.index(barrier_of(OF_Q, stage, WIDTH))
            mbarrier.wait(empty.index(barrier_of(OF_Q, stage, WIDTH)), free)
            mbarrier.expect(ready, BLOCK_Q * BLOCK_D)
            load_pieces(descriptors.q, row_q + head * row_q_h + first, head * column_q, ready, memory.q, stage, PIECES)
            do_ready = full.index(barrier_of(OF_DO, stage, WIDTH))
            mbarrier.wait(empty.index(barrier_of(OF_DO, stage, WIDTH)), free)
            mbarrier.expect(do_ready, BLOCK_Q * BLOCK_D * bytes_of(memory.do) + memory.rows.shape[2] * 4)
            load_tile(descriptors.rows, [padded, 0], do_ready, memory.rows.index(stage))
            row = row_do + head * row_do_h + first
            load_pieces(descriptors.do, row, head * column_do, do_ready, memory.do, stage, PIECES)
            copy_ready = full.index(barrier_of(OF_COPIES, 0, WIDTH))
            mbarrier.wait(empty.index(barrier_of(OF_COPIES, 0, WIDTH)), (step & 1) ^ 1)
            mbarrier.expect(copy_ready, BLOCK_Q * BLOCK_D + memory.scales.shape[2] * 4)
            load_tile(descriptors.scales, [padded, 0], copy_ready, memory.scales.index(0))
            load_copy(descriptors.q_t, z * BLOCK_D, (block_0 + i) * BLOCK_Q, copy_ready, memory.q_t, 0, PIECES)
            step += 1
