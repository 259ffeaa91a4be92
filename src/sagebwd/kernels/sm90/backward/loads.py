"""The loading warp: keys once a turn, then blocks of queries into a ring of stages."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from sagebwd.kernels.sm90.backward.block_sparse import head_and_block, list_of, met_of
from sagebwd.kernels.sm90.backward.key_blocks import block_met, key_block, queries_met
from sagebwd.kernels.sm90.backward.pieces import load_copy, load_pieces
from sagebwd.kernels.sm90.backward.tile import CONSUMERS, ROWS, load_tile

Operand = tma.tensor_descriptor | gl.shared_memory_descriptor


class Loaded(NamedTuple):
    """Of each operand that TMA loads its descriptor, or its buffers; None where a kernel does not read it.

    delta: channels more of dO. scales: those of the copies q_t and do_t.
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
    """Of K and V, of what a step reads, and of dS: that it is there, and that its place is free; or None."""

    keys_full: gl.shared_memory_descriptor
    keys_empty: gl.shared_memory_descriptor | None
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor | None
    ds_empty: gl.shared_memory_descriptor | None


@gluon.jit
def buffers(desc, COUNT: gl.constexpr):
    """Shared memory for so many of a descriptor's blocks."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT, desc.block_shape[0], desc.block_shape[1]], desc.layout)


@gluon.jit
def ring_barriers(STAGES: gl.constexpr, PARTS: gl.constexpr):
    """Of each stage PARTS that are full when something is loaded, and one that is empty when all have read it."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES * PARTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        for part in gl.static_range(PARTS):
            mbarrier.init(full.index(stage * PARTS + part), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    return full, empty


@gluon.jit
def origin_of_keys(place, of_batch, of_head, of_column):
    """Row and column of a sequence's first key, from `descriptor.Rows.steps`."""
    return place.batch * of_batch + place.head * of_head + place.start, place.head * of_column


@gluon.jit
def load_keys(descriptors, memory, full, origin_k, origin_v, first_k, WIDTH: gl.constexpr):
    """K and V of 64 keys a consumer from ``first_k`` on. Origins: `origin_of_keys`."""
    row_k, column_k = origin_k
    row_v, column_v = origin_v
    PIECES: gl.constexpr = memory.k.shape[0] // CONSUMERS
    VALUE_PIECES: gl.constexpr = memory.v.shape[0] // CONSUMERS
    mbarrier.expect(full, CONSUMERS * ROWS * (WIDTH.head_dim + WIDTH.value_dim * 2))
    for consumer in gl.static_range(CONSUMERS):
        first = first_k + consumer * ROWS
        load_pieces(descriptors.k, row_k + first, column_k, full, memory.k, consumer, PIECES)
        load_pieces(descriptors.v, row_v + first, column_v, full, memory.v, consumer, VALUE_PIECES)


@gluon.jit
def load_queries(
    descriptors, memory, barriers, origin_q, origin_do, met, blocks, heads, walk, at, step, KIND: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """Q, dO, transposed copies and row values of each block of each head's queries, into a ring of stages.

    Origins: row of a sequence's first query, and steps of a head. at: where a list begins in ``walk``. step: how many
    blocks the ring has had; returned with these counted in.
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
    for first_head in range(heads[0], heads[1] if walk is None else heads[0] + 1):
        for number in range(met.begin, met.end):
            head, i = first_head, block_met(number, met, KIND)
            if walk is not None:
                head, i = head_and_block(met_of(walk, at, number)[1])
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
            mbarrier.expect(do_ready, BLOCK_Q * (VALUE_DIM + memory.delta.shape[2]) * 2)
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
    descriptors, memory, barriers, origins, turns, number, programs, blocks, heads, queries, IN_ORDER: gl.constexpr,
    KIND: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """In each turn the keys' K and V, then what `load_queries` loads; origins: of K, V, Q and dO."""
    origin_k, origin_v, origin_q, origin_do = origins
    blocks_q, z_q, block_0, walk, shares, place, key_mask, tokens_k = blocks
    step = 0
    for turn in range(turns if WIDTH.backward.in_turn and not IN_ORDER and shares is None else 1):
        first_k = key_block(turn, number, programs, IN_ORDER) * (CONSUMERS * ROWS)
        mbarrier.wait(barriers.keys_empty, (turn & 1) ^ 1)
        load_keys(descriptors, memory, barriers.keys_full, origin_k, origin_v, first_k, WIDTH)
        listed = list_of(walk, shares, place.batch, place.head, first_k)
        met = queries_met(
            place, first_k, key_mask, tokens_k, queries, walk, listed, IN_ORDER, KIND, WIDTH.backward.queries
        )
        step = load_queries(
            descriptors, memory, barriers, origin_q, origin_do, met, (blocks_q, z_q, block_0), heads, walk, listed[0],
            step, KIND, WIDTH,
        )  # fmt: skip
