"""S^T, P^T, dP^T - delta and dS^T of a step: 64 keys of a warpgroup by a block of queries."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from sagebwd.kernels.sm90.backward.block_sparse import bias_of, visible_pairs
from sagebwd.kernels.sm90.backward.tile import (
    CONSUMERS,
    LOG2_E,
    ROWS,
    exp2,
    inside_band,
    opaque,
    operand_float8,
    pieces_of,
    ring,
    visible,
)


@gluon.jit
def plane(rows, index: gl.constexpr, BLOCK_Q: gl.constexpr, LAYOUT: gl.constexpr):
    """Row value number ``index`` of BLOCK_Q queries, as a row of a score tile; with BLOCK_Q 1, of the whole block."""
    return rows.slice(index * BLOCK_Q, BLOCK_Q, 1).load(LAYOUT)


@gluon.jit
def keys_and_scales(tensors, work_tile, z_k, first_k, sizes, LAYOUT: gl.constexpr):
    """64 keys of a sequence from ``first_k`` on, which of them are visible at all, and K's scales."""
    keys = first_k + gl.arange(0, ROWS, LAYOUT)
    keep_key = keys < work_tile.length
    scales = tensors.k_scale + z_k.to(gl.int64) * sizes.total_k + work_tile.start
    key_scale = gl.load(scales + keys, mask=keep_key, other=0)
    if tensors.key_mask is not None:
        mask = tensors.key_mask + work_tile.batch.to(gl.int64) * sizes.tokens_k
        keep_key = gl.load(mask + keys, mask=keep_key, other=0) != 0
    return keys, keep_key, key_scale


@gluon.jit
def same_of_pairs(x, LAYOUT: gl.constexpr):
    """One register for keys r and r + 8 of every 16, whose numbers are the same."""
    low, _ = gl.split(x.reshape([x.shape[0] // 16, 2, 8]).permute([0, 2, 1]))
    both = gl.join(low, low).permute([0, 2, 1]).reshape(x.shape)
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def q_piece(q_smem, stage, piece: gl.constexpr, WIDTH: gl.constexpr, PIECES: gl.constexpr):
    """Q^T's channels of a K piece: a buffer of its own, or a slice of the stage's one."""
    if q_smem.shape[2] == WIDTH:
        return q_smem.index(stage * PIECES + piece).permute((1, 0))
    else:
        return q_smem.index(stage).slice(piece * WIDTH, WIDTH, 1).permute((1, 0))


@gluon.jit
def scores(k, q_smem, full, step, more, acc_init, opaque_false, STAGES: gl.constexpr):
    """S^T = K Q^T of a step, if there are more, once Q is loaded; in flight. k: by channel pieces; acc_init and
    opaque_false: as in `fp32_accumulate.new_product`."""
    PIECES: gl.constexpr = len(k)
    WIDTH: gl.constexpr = k[0].shape[1]
    stage, phase = ring(step, STAGES)
    mbarrier.wait(full.index(stage * (full.shape[0] // STAGES)), phase, pred=more)
    q = q_piece(q_smem, stage, 0, WIDTH, PIECES)
    s = warpgroup_mma(k[0], q, acc_init, use_acc=opaque_false, is_async=True)  # S^T = K Q^T
    for piece in gl.static_range(1, PIECES):
        s = warpgroup_mma(k[piece], q_piece(q_smem, stage, piece, WIDTH, PIECES), s, is_async=True)  # S^T += K Q^T
    return s


@gluon.jit
def probabilities(
    s, rows, key_scale, keys, keep_key, first_q, first_k, work_tile, seq_q, group, key_mask, sparse, bias, entry_at,
    KIND: gl.constexpr, IN_PART: gl.constexpr, KEYS_END: gl.constexpr, BLOCK_Q: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """P^T = exp2(S^T - lse), 0 where masked, and whether the block is whole: cut by no mask and no end.

    IN_PART: a mask or an end may cut the block; entry_at: the block's entry in its list, if there is one.
    KEYS_END: keys past the end are masked too, as they must be where dQ reduces over keys. key_scale comes from
    `same_of_pairs`, so that one product with a query's scale serves two scores.
    """
    LISTED: gl.constexpr = sparse is not None
    HAS_LOWER: gl.constexpr = KIND.HAS_LOWER and IN_PART and not LISTED
    HAS_UPPER: gl.constexpr = KIND.HAS_UPPER and IN_PART and not LISTED
    ENDS: gl.constexpr = KEYS_END and IN_PART and not LISTED
    x = s.to(gl.float32) * (plane(rows, 1, BLOCK_Q, LAYOUT) * gl.expand_dims(key_scale, 1))  # S^T, in base 2
    if LISTED and IN_PART:
        seen = visible_pairs(sparse, entry_at, first_k, keys, keep_key, first_q, seq_q, KIND, BLOCK_Q, LAYOUT)
        if bias is not None:
            x += bias_of(bias, sparse, entry_at, keys, seen, first_q, work_tile, group, BLOCK_Q, LAYOUT) * LOG2_E
    # masked afterwards: a branch before them would let ptxas put off all exponentials until dP is there
    p = exp2(x - plane(rows, 0, BLOCK_Q, LAYOUT))  # P^T = exp2(S^T - lse)
    whole = first_q + BLOCK_Q <= seq_q.length
    if ENDS:
        whole = whole & (first_k + ROWS <= work_tile.length)
    whole = whole & inside_band(first_q, first_k, seq_q.lower, seq_q.upper, BLOCK_Q, ROWS, HAS_LOWER, HAS_UPPER)
    if HAS_LOWER or HAS_UPPER:  # noqa: SIM102 (one is of compile time)
        if not whole:
            rows_q = first_q + gl.arange(0, BLOCK_Q, gl.SliceLayout(0, LAYOUT))
            distance = gl.expand_dims(keys, 1) - gl.expand_dims(rows_q, 0)
            p = gl.where(visible(distance, seq_q.lower, seq_q.upper, HAS_LOWER, HAS_UPPER), p, 0.0)
    if LISTED:
        whole = not IN_PART
        if IN_PART:
            p = gl.where(seen, p, 0.0)
    elif key_mask is not None and IN_PART:
        p = gl.where(gl.expand_dims(keep_key, 1), p, 0.0)
    elif ENDS:  # noqa: SIM102 (one is of compile time)
        if not whole:
            p = gl.where(gl.expand_dims(keep_key, 1), p, 0.0)
    return p, whole


@gluon.jit
def dp_minus_delta(ones, delta_smem, v_smem, consumer, do_smem, stage, acc_init, OPAQUE: gl.constexpr):
    """dP^T - delta = V dO^T - delta of a step; in flight.

    ones: powers of two (`delta_parts_weight`). acc_init: zeros. OPAQUE: V's descriptors are computed here, as beside
    semaphores they would take 14 uniform registers, whose former contents would spill.
    """
    PIECES: gl.constexpr = v_smem.shape[0] // CONSUMERS
    delta = delta_smem.index(stage).permute((1, 0))
    dp = warpgroup_mma(ones, delta, acc_init, use_acc=False, is_async=True)  # -delta, from its parts
    v = pieces_of(v_smem, opaque(consumer) if OPAQUE else consumer, PIECES)
    for piece in gl.static_range(PIECES):
        do = do_smem.index(stage * PIECES + piece).permute((1, 0))
        dp = warpgroup_mma(v[piece], do, dp, is_async=True)  # dP^T - delta += V dO^T
    return dp


@gluon.jit
def ds_operand(
    p, dp, whole, keep_key, key_mask, sparse, KIND: gl.constexpr, IN_PART: gl.constexpr, LAYOUT: gl.constexpr,
    OPERAND: gl.constexpr,
):  # fmt: skip
    """dS^T = P^T * (dP^T - delta) in e4m3, 0 where masked. whole, IN_PART: as in `probabilities`."""
    ds = p * gl.convert_layout(dp, LAYOUT, assert_trivial=True)  # dS^T = P^T * (dP^T - delta)
    if key_mask is not None and IN_PART and sparse is None:
        ds = gl.where(gl.expand_dims(keep_key, 1), ds, 0.0)
    if (KIND.RAGGED and IN_PART) or sparse is not None:  # noqa: SIM102 (one is of compile time)
        if not whole:
            # what lies past the end need not be finite
            ds = gl.where(p == 0, 0.0, ds)
    return operand_float8(ds, OPERAND)
