"""The loading warp of the one-kernel backward: keys once a turn, then blocks of queries into a ring of stages."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sagebwd.kernels.gluon.dkdv import load_keys, load_queries
from sagebwd.kernels.gluon.key_blocks import key_block
from sagebwd.kernels.gluon.tile import CONSUMERS, ROWS, block_range


@gluon.jit
def load(
    operands, IN_TURN: gl.constexpr, IN_ORDER: gl.constexpr, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr,
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
            (k_desc, v_desc), (k_memory, v_memory), keys_full, (row_k, column_k, row_v, column_v), first_k, CONSUMERS,
            BLOCK_D,
        )  # fmt: skip
        begin, _, _, end = block_range(first_k, length_q, -upper, -lower, SPAN, BLOCK_Q, HAS_UPPER, HAS_LOWER, False)
        step = load_queries(
            (q_desc, do_desc, q_t_desc, do_t_desc, rows_desc, delta_desc, scales_desc),
            (q_memory, do_memory, q_t_memory, do_t_memory, rows_memory, delta_memory, scales_memory), full, empty,
            (row_q, row_q_h, column_q, row_do, row_do_h, column_do), (begin, end - begin, blocks_q, z_q, block_0),
            heads, step, STAGES, BLOCK_Q, BLOCK_D,
        )  # fmt: skip
