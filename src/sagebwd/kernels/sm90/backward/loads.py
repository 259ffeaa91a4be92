"""The loading warp: keys once a turn, then blocks of queries into a ring of stages."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sagebwd.kernels.sm90.backward.key_blocks import key_block
from sagebwd.kernels.sm90.backward.pieces import load_copy, load_pieces
from sagebwd.kernels.sm90.backward.tile import CONSUMERS, ROWS, block_range, load_tile


@gluon.jit
def load_keys(descriptors, memory, full, origin, first_k, WIDTHS: gl.constexpr):
    """K and V of 64 keys a consumer from ``first_k`` on; origin: row and column of K's first, and of V's.

    WIDTHS: channels of K and of V, of which a buffer has a piece.
    """
    k_desc, v_desc = descriptors
    k_memory, v_memory = memory
    row_k, column_k, row_v, column_v = origin
    PIECES: gl.constexpr = k_memory.shape[0] // CONSUMERS
    VALUE_PIECES: gl.constexpr = v_memory.shape[0] // CONSUMERS
    mbarrier.expect(full, CONSUMERS * ROWS * (WIDTHS[0] + WIDTHS[1] * 2))
    for consumer in gl.static_range(CONSUMERS):
        first = first_k + consumer * ROWS
        load_pieces(k_desc, row_k + first, column_k, full, k_memory, consumer, PIECES)
        load_pieces(v_desc, row_v + first, column_v, full, v_memory, consumer, VALUE_PIECES)


@gluon.jit
def load_queries(
    descriptors, memory, full, empty, origin, steps, heads, step, STAGES: gl.constexpr, BLOCK_Q: gl.constexpr,
    WIDTHS: gl.constexpr,
):  # fmt: skip
    """Q, dO, transposed copies and row values of each block of each head's queries, into a ring of stages.

    delta_desc: channels more of dO; scales_desc: the copies' scales. step: how many blocks the ring has had; returned
    with these counted in.
    """
    q_desc, do_desc, q_t_desc, do_t_desc, rows_desc, delta_desc, scales_desc = descriptors
    q_memory, do_memory, q_t_memory, do_t_memory, rows_memory, delta_memory, scales_memory = memory
    row_q, row_q_h, column_q, row_do, row_do_h, column_do = origin
    begin, count, blocks_q, z_q, block_0 = steps
    HEAD_DIM: gl.constexpr = WIDTHS[0]
    VALUE_DIM: gl.constexpr = WIDTHS[1]
    PIECES: gl.constexpr = q_memory.shape[0] // STAGES
    VALUE_PIECES: gl.constexpr = do_memory.shape[0] // STAGES
    step = gl.to_tensor(step)
    for head in range(heads[0], heads[1]):
        z = z_q + head
        for i in range(begin, begin + count):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            ready = full.index(stage * 3)
            do_ready = full.index(stage * 3 + 1)
            copies_ready = full.index(stage * 3 + 2)
            first = i * BLOCK_Q
            padded = block_0 + i
            mbarrier.expect(ready, BLOCK_Q * HEAD_DIM + rows_memory.shape[2] * 4)
            load_pieces(q_desc, row_q + head * row_q_h + first, head * column_q, ready, q_memory, stage, PIECES)
            load_tile(rows_desc, [z * blocks_q + padded, 0], ready, rows_memory.index(stage))
            mbarrier.expect(do_ready, BLOCK_Q * (VALUE_DIM + delta_memory.shape[2]) * 2)
            token = (z * blocks_q + padded) * BLOCK_Q
            load_tile(delta_desc, [token, 0], do_ready, delta_memory.index(stage))
            row = row_do + head * row_do_h + first
            load_pieces(do_desc, row, head * column_do, do_ready, do_memory, stage, VALUE_PIECES)
            mbarrier.expect(copies_ready, BLOCK_Q * (HEAD_DIM + VALUE_DIM) + scales_memory.shape[2] * 4)
            load_tile(scales_desc, [z * blocks_q + padded, 0], copies_ready, scales_memory.index(stage))
            load_copy(do_t_desc, z * VALUE_DIM, padded * BLOCK_Q, copies_ready, do_t_memory, stage, VALUE_PIECES)
            load_copy(q_t_desc, z * HEAD_DIM, padded * BLOCK_Q, copies_ready, q_t_memory, stage, PIECES)
            step += 1
    return step


@gluon.jit
def load(
    operands, IN_TURN: gl.constexpr, IN_ORDER: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_Q: gl.constexpr, WIDTHS: gl.constexpr,
):  # fmt: skip
    """In each turn the keys' K and V, then what `load_queries` loads."""
    descriptors, memory, barriers, origin, turns, number, grid, blocks, heads, sizes = operands
    q_desc, k_desc, v_desc, do_desc, q_t_desc, do_t_desc, rows_desc, delta_desc, scales_desc = descriptors
    q_memory, k_memory, v_memory, do_memory, q_t_memory, do_t_memory, rows_memory, delta_memory, scales_memory = memory
    keys_full, keys_empty, full, empty = barriers
    row_k, column_k, row_v, column_v, row_q, row_q_h, column_q, row_do, row_do_h, column_do = origin
    blocks_q, z_q, block_0 = blocks
    length_q, lower, upper = sizes
    SPAN: gl.constexpr = CONSUMERS * ROWS
    step = 0
    for turn in range(turns if IN_TURN else 1):
        first_k = key_block(turn, number, grid, IN_ORDER) * SPAN
        mbarrier.wait(keys_empty, (turn & 1) ^ 1)
        load_keys(
            (k_desc, v_desc), (k_memory, v_memory), keys_full, (row_k, column_k, row_v, column_v), first_k, WIDTHS,
        )  # fmt: skip
        begin, _, _, end = block_range(first_k, length_q, -upper, -lower, SPAN, BLOCK_Q, HAS_UPPER, HAS_LOWER, False)
        step = load_queries(
            (q_desc, do_desc, q_t_desc, do_t_desc, rows_desc, delta_desc, scales_desc),
            (q_memory, do_memory, q_t_memory, do_t_memory, rows_memory, delta_memory, scales_memory), full, empty,
            (row_q, row_q_h, column_q, row_do, row_do_h, column_do), (begin, end - begin, blocks_q, z_q, block_0),
            heads, step, STAGES, BLOCK_Q, WIDTHS,
        )  # fmt: skip
