"""dQ, dK and dV on Hopper in one Gluon kernel, or dQ and dK alone; products in e4m3 (`sagebwd.reference.float8`).

A warp loads by TMA; warpgroups hold 64 keys each, visit every query block that sees them and share its loads. P^T
and dS^T are operands of dV and dK in the registers they came in. e4m3 needs no maximum of a whole row, so dS^T also
goes to shared memory, transposed, and each of two warpgroups computes half of dQ^T over the keys of both, a step
behind, so that neither waits for the other. TMA adds these to dQ^T in FP16, scaled so that no sum overflows: in any
order, or where it must be repeatable bit for bit, from the last block of keys that a query sees to the first.

Where registers cannot hold dK beside dV, `value_kernel` computes dV and `key_query_kernel` the others, with what wide
heads leave room for: each operand of queries has an empty barrier of its own, so that even a single stage has most of
a step to be loaded again (Q is released after S, dO after dP, Q^T after dK); delta is a plane of row values, not
channels of dO; dQ is added in rows, half of the channels a warpgroup, 64 before dK's product and the others after it.

Shared memory binds: dev/log/2026-11-22-one-kernel.md counts reads and writes, why dO comes scaled, dQ transposed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from sagebwd.kernels.sm90.backward.accumulate import accumulate
from sagebwd.kernels.sm90.backward.arguments import Sizes, steps_of
from sagebwd.kernels.sm90.backward.dq_sums import (
    BOXES,
    allocate_ds,
    allocate_k_t,
    ds_barriers,
)
from sagebwd.kernels.sm90.backward.key_blocks import (
    head_and_number,
    heads_of,
    key_block,
    place_of,
    seq_q_of,
    share_place,
    work_tile_of,
)
from sagebwd.kernels.sm90.backward.loads import (
    OPERANDS,
    Barriers,
    Loaded,
    buffers,
    load,
    load_by_operand,
    origin_of_keys,
    ring_barriers,
)
from sagebwd.kernels.sm90.backward.tile import (
    CONSUMERS,
    DELTA_CHANNELS,
    REGISTERS,
    ROWS,
    delta_parts_weight,
    padded_block,
)


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
            (load_by_operand, (
                descriptors, memory, barriers, origins, work_tile.first, blocks, heads, seq_q,
                tensors.dq_semaphore is not None, KIND, WIDTH,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
    # fmt: on
