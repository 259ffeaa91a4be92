"""dK and dQ of the split backward on Hopper, where registers cannot hold dK beside dV; `value_kernel` computes dV.

As `kernel`, whose warpgroups it has (`accumulate`), but for what wide heads leave no room for. Each operand of queries
has an empty barrier of its own: Q is released after S, dO after dP, Q^T after dK, so that even a single stage has most
of a step to be loaded again; Q and dO have two stages where they fit. delta is a plane of row values, not channels of
dO. dQ is added in rows: a warpgroup has half of the channels, 64 before dK's product and the others after it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from sagebwd.kernels.sm90.backward.accumulate import accumulate
from sagebwd.kernels.sm90.backward.arguments import Sizes, steps_of
from sagebwd.kernels.sm90.backward.block_sparse import head_and_block, list_of, listed_block
from sagebwd.kernels.sm90.backward.dq_rows import BOXES
from sagebwd.kernels.sm90.backward.dq_sums import (
    allocate_ds,
    allocate_k_t,
    ds_barriers,
)
from sagebwd.kernels.sm90.backward.key_blocks import (
    heads_of,
    m_block_at,
    m_block_range,
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
)
from sagebwd.kernels.sm90.backward.tile import (
    CONSUMERS,
    REGISTERS,
    load_tile,
    padded_block,
    ring,
)

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
    place = place_of(tensors, sizes, 1, tensors.dq_semaphore is not None)
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
    own, written = (k_t, ds, dq, None, places), (dq_desc, dk_desc, None)
    block_0 = padded_block(seq_q.start, work_tile.batch, BLOCK_Q, VARLEN)
    blocks = (blocks_q, z_q, block_0, tensors.block_sparse, tensors.work_splits, work_tile, tensors.key_mask, tokens_k)
    heads = (work_tile.head * group, work_tile.head * group + group)
    # fmt: off
    gl.warp_specialize(
        [
            (accumulate, (memory, own, barriers, tensors, written, 1, sizes, factors, 0, KIND, WIDTH)),
            (accumulate, (memory, own, barriers, tensors, written, 1, sizes, factors, 1, KIND, WIDTH)),
            (load, (
                descriptors, memory, barriers, origins, work_tile.first, blocks, heads, seq_q,
                tensors.dq_semaphore is not None, KIND, WIDTH,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
    # fmt: on
