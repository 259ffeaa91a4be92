"""Scores and probabilities of a step, recomputed, and their gradients: S^T, P^T, dS^T of 64 keys by its queries."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from sagebwd.kernels.sm90.backward.block_sparse import bias_of, pairs_seen
from sagebwd.kernels.sm90.backward.pieces import pieces_of
from sagebwd.kernels.sm90.backward.tile import (
    CONSUMERS,
    LOG2_E,
    ROWS,
    anew,
    exp2,
    inside_band,
    operand_float8,
    ring,
    visible,
)


@gluon.jit
def plane(rows, index: gl.constexpr, BLOCK_Q: gl.constexpr, LAYOUT: gl.constexpr):
    """One of the row values of BLOCK_Q queries, as a row of a score tile; with BLOCK_Q 1 one number of a block."""
    return rows.slice(index * BLOCK_Q, BLOCK_Q, 1).load(LAYOUT)


@gluon.jit
def keys_and_scales(tensors, place, z_k, first_k, sizes, LAYOUT: gl.constexpr):
    """64 keys of a sequence from ``first_k`` on, which of them count, and K's scales."""
    keys = first_k + gl.arange(0, ROWS, LAYOUT)
    keep_key = keys < place.length
    scales = tensors.k_scale + z_k.to(gl.int64) * sizes.total_k + place.start
    key_scale = gl.load(scales + keys, mask=keep_key, other=0)
    if tensors.key_mask is not None:
        mask = tensors.key_mask + place.batch.to(gl.int64) * sizes.tokens_k
        keep_key = gl.load(mask + keys, mask=keep_key, other=0) != 0
    return keys, keep_key, key_scale


@gluon.jit
def same_of_pairs(x, LAYOUT: gl.constexpr):
    """One number a key, the same for keys r and r + 8 of every 16, as one register for both."""
    low, _ = gl.split(x.reshape([x.shape[0] // 16, 2, 8]).permute([0, 2, 1]))
    both = gl.join(low, low).permute([0, 2, 1]).reshape(x.shape)
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def queries_of_piece(q_memory, stage, piece: gl.constexpr, WIDTH: gl.constexpr, PIECES: gl.constexpr):
    """Q's channels of a piece of K, transposed: a buffer, or a part of the stage's one."""
    if q_memory.shape[2] == WIDTH:
        return q_memory.index(stage * PIECES + piece).permute((1, 0))
    else:
        return q_memory.index(stage).slice(piece * WIDTH, WIDTH, 1).permute((1, 0))


@gluon.jit
def scores(k, q_memory, full, step, more, none, never, STAGES: gl.constexpr):
    """S^T of a step, if there are more, once Q is there; in flight. k: by pieces of channels; none, never: as of
    `new_product`."""
    PIECES: gl.constexpr = len(k)
    WIDTH: gl.constexpr = k[0].shape[1]
    stage, phase = ring(step, STAGES)
    mbarrier.wait(full.index(stage * (full.shape[0] // STAGES)), phase, pred=more)
    s = warpgroup_mma(k[0], queries_of_piece(q_memory, stage, 0, WIDTH, PIECES), none, use_acc=never, is_async=True)
    for piece in gl.static_range(1, PIECES):
        s = warpgroup_mma(k[piece], queries_of_piece(q_memory, stage, piece, WIDTH, PIECES), s, is_async=True)
    return s


@gluon.jit
def probabilities(
    s, rows, key_scale, keys, keep_key, first_q, first_k, place, queries, group, key_mask, walk, bias, met,
    KIND: gl.constexpr, IN_PART: gl.constexpr, KEYS_END: gl.constexpr, BLOCK_Q: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """P^T, 0 where masked, and whether the block is whole: no mask cuts it, no end.

    IN_PART: a mask or an end may cut the block; met: where that one's list, if there is one, has it.
    KEYS_END: keys past the end are masked too, as they must be where dQ reduces over keys. key_scale is of
    `same_of_pairs`, so that a product with a query's serves two scores.
    """
    LISTED: gl.constexpr = walk is not None
    HAS_LOWER: gl.constexpr = KIND.HAS_LOWER and IN_PART and not LISTED
    HAS_UPPER: gl.constexpr = KIND.HAS_UPPER and IN_PART and not LISTED
    ENDS: gl.constexpr = KEYS_END and IN_PART and not LISTED
    x = s.to(gl.float32) * (plane(rows, 1, BLOCK_Q, LAYOUT) * gl.expand_dims(key_scale, 1))
    if LISTED and IN_PART:
        seen = pairs_seen(walk, met, first_k, keys, keep_key, first_q, queries, KIND, BLOCK_Q, LAYOUT)
        if bias is not None:
            x += bias_of(bias, walk, met, keys, seen, first_q, place, group, BLOCK_Q, LAYOUT) * LOG2_E
    # masked afterwards: a branch before them would let ptxas put off all exponentials until dP is there
    p = exp2(x - plane(rows, 0, BLOCK_Q, LAYOUT))
    whole = first_q + BLOCK_Q <= queries.length
    if ENDS:
        whole = whole & (first_k + ROWS <= place.length)
    whole = whole & inside_band(first_q, first_k, queries.lower, queries.upper, BLOCK_Q, ROWS, HAS_LOWER, HAS_UPPER)
    if HAS_LOWER or HAS_UPPER:  # noqa: SIM102 (one is of compile time)
        if not whole:
            rows_q = first_q + gl.arange(0, BLOCK_Q, gl.SliceLayout(0, LAYOUT))
            distance = gl.expand_dims(keys, 1) - gl.expand_dims(rows_q, 0)
            p = gl.where(visible(distance, queries.lower, queries.upper, HAS_LOWER, HAS_UPPER), p, 0.0)
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
def difference(ones, delta_memory, v_memory, consumer, do_memory, stage, none, ANEW: gl.constexpr):
    """dP^T - delta of a step; in flight.

    ones: powers of two (`delta_parts_weight`). none: zeros. ANEW: V's descriptors are found here, as beside counters
    they would take 14 uniform registers, and what those had would spill.
    """
    PIECES: gl.constexpr = v_memory.shape[0] // CONSUMERS
    delta = delta_memory.index(stage).permute((1, 0))
    dp = warpgroup_mma(ones, delta, none, use_acc=False, is_async=True)
    v = pieces_of(v_memory, anew(consumer) if ANEW else consumer, PIECES)
    for piece in gl.static_range(PIECES):
        do = do_memory.index(stage * PIECES + piece).permute((1, 0))
        dp = warpgroup_mma(v[piece], do, dp, is_async=True)
    return dp


@gluon.jit
def ds_operand(
    p, dp, whole, keep_key, key_mask, walk, KIND: gl.constexpr, IN_PART: gl.constexpr, LAYOUT: gl.constexpr,
    OPERAND: gl.constexpr,
):  # fmt: skip
    """dS^T in e4m3, of P^T and its `difference`, 0 where masked. whole, IN_PART: as of `probabilities`."""
    ds = p * gl.convert_layout(dp, LAYOUT, assert_trivial=True)
    if key_mask is not None and IN_PART and walk is None:
        ds = gl.where(gl.expand_dims(keep_key, 1), ds, 0.0)
    if (KIND.RAGGED and IN_PART) or walk is not None:  # noqa: SIM102 (one is of compile time)
        if not whole:
            # what lies past the end need not be finite
            ds = gl.where(p == 0, 0.0, ds)
    return operand_float8(ds, OPERAND)
