"""Scores and probabilities of a step, recomputed: S^T of 64 keys by a block of queries, and P^T of it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from sagebwd.kernels.sm90.backward.tile import ROWS, exp2, inside_band, ring, visible


@gluon.jit
def plane(rows, index: gl.constexpr, BLOCK_Q: gl.constexpr, LAYOUT: gl.constexpr):
    """One of the row values of BLOCK_Q queries, as a row of a score tile; with BLOCK_Q 1 one number of a block."""
    return rows.slice(index * BLOCK_Q, BLOCK_Q, 1).load(LAYOUT)


@gluon.jit
def keys_and_scales(
    k_scale, key_mask, batch, z_k, start_k, length_k, first_k, tokens_k, total_k, LAYOUT: gl.constexpr
):  # fmt: skip
    """64 keys of a sequence from ``first_k`` on, which of them count, and K's scales."""
    keys = first_k + gl.arange(0, ROWS, LAYOUT)
    keep_key = keys < length_k
    key_scale = gl.load(k_scale + z_k.to(gl.int64) * total_k + start_k + keys, mask=keep_key, other=0)
    if key_mask is not None:
        keep_key = gl.load(key_mask + batch.to(gl.int64) * tokens_k + keys, mask=keep_key, other=0) != 0
    return keys, keep_key, key_scale


@gluon.jit
def same_of_pairs(x, LAYOUT: gl.constexpr):
    """One number a key, the same for keys r and r + 8 of every 16, as one register for both."""
    low, _ = gl.split(x.reshape([x.shape[0] // 16, 2, 8]).permute([0, 2, 1]))
    both = gl.join(low, low).permute([0, 2, 1]).reshape(x.shape)
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def scores(k, q_memory, full, step, more, none, never, STAGES: gl.constexpr):
    """S^T of a step, if there are more, once Q is there; in flight. none, never: as of `new_product`."""
    stage, phase = ring(step, STAGES)
    mbarrier.wait(full.index(stage * 3), phase, pred=more)
    q = q_memory.index(stage).permute((1, 0))
    return warpgroup_mma(k, q, none, use_acc=never, is_async=True)


@gluon.jit
def probabilities(
    s, rows, key_scale, keys, keep_key, first_q, first_k, length_q, length_k, lower, upper, key_mask,
    HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr, KEYS_END: gl.constexpr, BLOCK_Q: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """P^T, 0 where masked, and whether the block is whole: no mask cuts it, no end.

    KEYS_END: keys past the end are masked too, as they must be where dQ reduces over keys. key_scale is of
    `same_of_pairs`, so that a product with a query's serves two scores.
    """
    x = s.to(gl.float32) * (plane(rows, 1, BLOCK_Q, LAYOUT) * gl.expand_dims(key_scale, 1))
    # masked afterwards: a branch before them would let ptxas put off all exponentials until dP is there
    p = exp2(x - plane(rows, 0, BLOCK_Q, LAYOUT))
    whole = first_q + BLOCK_Q <= length_q
    if KEYS_END:
        whole = whole & (first_k + ROWS <= length_k)
    whole = whole & inside_band(first_q, first_k, lower, upper, BLOCK_Q, ROWS, HAS_LOWER, HAS_UPPER)
    if HAS_LOWER or HAS_UPPER:  # noqa: SIM102 (one is of compile time)
        if not whole:
            queries = first_q + gl.arange(0, BLOCK_Q, gl.SliceLayout(0, LAYOUT))
            distance = gl.expand_dims(keys, 1) - gl.expand_dims(queries, 0)
            p = gl.where(visible(distance, lower, upper, HAS_LOWER, HAS_UPPER), p, 0.0)
    if key_mask is not None:
        p = gl.where(gl.expand_dims(keep_key, 1), p, 0.0)
    elif KEYS_END:  # noqa: SIM102 (one is of compile time)
        if not whole:
            p = gl.where(gl.expand_dims(keep_key, 1), p, 0.0)
    return p, whole
