"""dK and dV, by key block: each program visits every query block that sees its keys, and recomputes P.

It works on S^T, so that P^T and dS^T leave one product in the registers in which the next one takes them. dS carries
Q's scale per token, on which dK reduces, before it is quantised.
Both are written where the caller wants them, which is alike: one set of strides holds for the two.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Call
from sagebwd.kernels.common.rotation import part_of, store_turned
from sagebwd.kernels.common.strided import Strided, head_of, pitch_of, row_of, rows_of, tile_of
from sagebwd.kernels.common.tile import (
    LOG2_E,
    abs_max,
    block_in_sequence,
    dot_16bit,
    largest,
    largest_bits,
    load_block,
    load_rows,
    load_transposed,
    padded_block,
    quantize_tile,
    sequence,
    to_16bit,
)
from sagebwd.kernels.portable.blocks import (
    Bounds,
    block_of,
    block_range_of,
    list_of,
    load_elements,
    mask_all_where,
    shows,
    steps_of,
    within,
)
from sagebwd.kernels.portable.config import SLICE, Config, tiles_of, tiles_of_keys
from sagebwd.kernels.portable.descriptor import described, transposed_view
from sagebwd.kernels.portable.lists import by_length, masks_of
from sagebwd.kernels.portable.pieces import Rows, scores_by_pieces
from sagebwd.kernels.portable.recompute import (
    accumulate,
    int8_product,
    load_row_values,
    recompute_p,
    score_gradients,
    scores_of,
)
from sagebwd.kernels.portable.softmax import times
from sagebwd.kernels.portable.tune import run_best
from sagebwd.kernels.runtime.program import launch_by_length
from sagebwd.recipe import INT8


class Groups(NamedTuple):
    """Scale groups of Q, P and dS, and the channels of the rotation that q_t is under, or 0."""

    Q_TOKEN: tl.constexpr
    P_PER_KEY: tl.constexpr
    DS_PER_KEY: tl.constexpr
    TURNED: tl.constexpr

    @classmethod
    def of(cls, call: Call) -> Groups:
        """As the kernel is compiled for them."""
        recipe = call.recipe
        chosen = (
            recipe.q_scale == "token", recipe.p_scale_dv == "key", recipe.ds_scale_dk == "key",
            call.turned if recipe.dk == INT8 else 0,
        )  # fmt: skip
        return cls(*map(tl.constexpr, chosen))


@triton.jit
def quantize_ds(ds, ds_max, p_max, row_scale, block_scale, groups):
    """INT8 dS by psi, after Q's per-query scale, and its scale, which includes Q's per-block scale.

    Each is None where Q has the other. ds_max: the largest |dS| of the tile, None where it is not known; p_max: of P.
    """
    if row_scale is not None:
        ds = ds * row_scale[None, :]
    if ds_max is None:
        ds_max = largest(ds, groups.DS_PER_KEY)
    codes = quantize_tile(ds, ds_max, groups.DS_PER_KEY)
    # a NaN in any query's lse or delta shows in P, and must in dK
    poison = (abs_max(p_max, 0) if groups.P_PER_KEY and not groups.DS_PER_KEY else p_max) * 0
    scale = ds_max * (1 / 127.0) + poison
    if block_scale is not None:
        scale = scale * block_scale
    return codes, scale


class KeyTile(NamedTuple):
    """A program's keys: their sequence, key head and numbers, K and V with their scales, and which of them count."""

    batch: tl.tensor
    head: tl.tensor
    first: tl.tensor
    left: tl.tensor  # from the first on
    numbers: tl.tensor  # from the first on, too
    k: tl.tensor | Rows
    v: tl.tensor | Rows
    k_scale: tl.tensor | None  # where S is INT8; with the softmax scale in base 2 where Q's scales are one a token
    v_scale: tl.tensor | None  # where dP is INT8
    keep: tl.tensor


class QueryBlock(NamedTuple):
    """A block of queries of one head that meets the keys."""

    head: tl.tensor
    z: tl.tensor  # the head in per-token tensors
    start: tl.tensor  # its sequence's first token
    first: tl.tensor
    left: tl.tensor  # from the first on
    numbers: tl.tensor  # from the first on, too
    number: tl.tensor  # the block's, in its sequence
    before: tl.tensor  # blocks of the head before the sequence's first, with padding
    tile: tl.tensor  # number, among all heads', of the recipe's block of queries that it is, or is a part of


@triton.jit
def load_keys(
    k, v, batch, head, start, keys, left, head_dim: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """K and V of a program, whose first key is ``start``, counted over all sequences; `Rows` of them if WIDE."""
    EVEN: tl.constexpr = head_dim == BLOCK_D
    columns = tl.arange(0, BLOCK_D)
    k_at = row_of(k, batch, head, start)
    v_at = row_of(v, batch, head, start)
    if WIDE:
        return Rows(k_at, keys, pitch_of(k), left), Rows(v_at, keys, pitch_of(v), left)
    else:
        k_tile = load_rows(k_at, keys, columns, pitch_of(k), left, head_dim, False, EVEN)
        v_tile = load_rows(v_at, keys, columns, pitch_of(v), left, head_dim, False, EVEN)
        return k_tile, v_tile


@triton.jit
def keys_that_count(key_mask, batch, first, keys, left, tokens):
    """Which of a program's keys are there and are not masked; key_mask may be None."""
    keep = keys < left
    if key_mask is not None:
        mask_at = key_mask + batch.to(tl.int64) * tokens + first + keys
        keep = keep & (tl.load(mask_at, mask=keep, other=0) != 0)
    return keep


@triton.jit
def probabilities(
    keys, block, q_tile, row_lse, row_scale, s_scale, scale_2, mask, elements, entry, bounds, head_dim: tl.constexpr,
    INT8: tl.constexpr, MASKED: tl.constexpr, VARLEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """P^T of a block of queries, 0 where masked, and which of its pairs are visible, of a block that may be cut."""
    if WIDE:
        s = scores_by_pieces(keys.k, q_tile, head_dim, not MASKED)  # S^T = K Q^T
    else:
        s = times(keys.k, q_tile)  # (1) [GEMM] S^T = K Q^T
    s = scores_of(s, keys.k_scale, row_scale, s_scale, scale_2, INT8)
    if mask is not None and MASKED:
        element = load_elements(
            mask, elements, entry, block.first, keys.first, block.numbers[None, :], keys.numbers[:, None], block.left,
            keys.left,
        )  # fmt: skip
        if mask.BIAS:
            s += element.to(tl.float32) * LOG2_E
    p = recompute_p(s, row_lse[None, :], mask)  # (3) P^T = exp2(S^T - lse)
    keep = True
    if MASKED:
        keep = within((keys.first + keys.numbers)[:, None] - (block.first + block.numbers)[None, :], bounds)
        if mask is not None:
            keep = keep & shows(element, mask)
        if VARLEN:  # Q and dO past the end, where TMA reads the next sequence's, need not be finite
            keep = keep & (block.numbers < block.left)[None, :]
        p = tl.where(keep & keys.keep[:, None], p, 0.0)
    return p, keep


@triton.jit
def add_dv(
    acc, p, p_int8, p_scale, do_tile, do_t, do_rows, do_scale, keys, block, steps_q, groups, head_dim: tl.constexpr,
    BLOCK_D: tl.constexpr, FIRST_D: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """(5) [GEMM] dV += P^T dO, INT8 where there is a do_t; do_rows: dO in 16 bit where do_tile has codes, or None."""
    if do_t is not None:
        BLOCK_Q: tl.constexpr = p.shape[1]
        operand = load_transposed(
            do_t, block.z, steps_q, block.before + block.number, head_dim, BLOCK_Q, BLOCK_D, TMA, FIRST_D
        )
        part = int8_product(p_int8, operand)  # P^T dO
        p_scale = p_scale * tl.load(do_scale + block.tile)
        return accumulate(acc, part, p_scale, groups.P_PER_KEY)  # dV += P^T dO
    else:
        if do_rows is not None:
            rows_at = row_of(do_rows, keys.batch, block.head, block.start + block.first)
            do_tile = load_rows(
                rows_at, block.numbers, FIRST_D + tl.arange(0, BLOCK_D), pitch_of(do_rows), block.left, head_dim,
                not MASKED, head_dim >= FIRST_D + BLOCK_D,
            )  # fmt: skip
        elif MASKED and VARLEN and TMA:
            do_tile = tl.where((block.numbers < block.left)[:, None], do_tile, 0.0)
        return dot_16bit(to_16bit(p, do_tile.dtype), do_tile, acc)  # dV += P^T dO


@triton.jit
def add_dk(
    acc, ds, ds_int8, ds_scale, q_t, q_rows, keys, block, steps_q, groups, head_dim: tl.constexpr,
    BLOCK_D: tl.constexpr, FIRST_D: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """(6) [GEMM] dK += dS^T Q, INT8 where there is a q_t, else with q_rows, Q in 16 bit."""
    if q_t is not None:
        BLOCK_Q: tl.constexpr = ds.shape[1]
        operand = load_transposed(
            q_t, block.z, steps_q, block.before + block.number, head_dim, BLOCK_Q, BLOCK_D, TMA, FIRST_D
        )
        return accumulate(acc, int8_product(ds_int8, operand), ds_scale, groups.DS_PER_KEY)  # dK += dS^T Q
    else:
        rows_at = row_of(q_rows, keys.batch, block.head, block.start + block.first)
        operand = load_rows(
            rows_at, block.numbers, FIRST_D + tl.arange(0, BLOCK_D), pitch_of(q_rows), block.left, head_dim,
            not MASKED, head_dim >= FIRST_D + BLOCK_D,
        )  # fmt: skip
        return dot_16bit(to_16bit(ds, operand.dtype), operand, acc)  # dK += dS^T Q


@triton.jit(
    do_not_specialize=["heads_k", "tokens_q", "tokens_k", "total_k", "blocks_q", "tiles_k", "grid", "lower", "upper"]
)
def dkdv_kernel(
    q,
    k,
    v,
    do,
    q_tma,
    do_tma,
    k_scale,
    v_scale,
    do_scale,
    q_t,
    do_t,
    q_rows,
    do_rows,
    row_values,
    tile_maxima,
    dk,
    dv,
    key_mask,
    cu_seqlens_q,
    cu_seqlens_k,
    mask,
    groups,
    heads_k,
    group,
    tokens_q,
    tokens_k,
    total_k,
    blocks_q,
    tiles_k,
    grid,
    lower,
    upper,
    scale,
    head_dim: tl.constexpr,
    HAS_LOWER: tl.constexpr,
    HAS_UPPER: tl.constexpr,
    PAD_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
):
    """dK and dV of one key block of one key head, summed over its query heads. PAD_Q and TILE_K are the recipe's.

    REST: columns of a tile of a wide call's channels from BLOCK_D on, or 0.

    q, k, v, do, dk, q_rows, do_rows: `Strided`; dv lies as dk does. q, k: operands of S, codes or 16-bit rows; v, do:
    of dP, codes where there is a v_scale. q_t, do_t: transposed codes, where dK and dV are INT8, else
    None. q_rows, do_rows: the 16-bit operands of dK and dV otherwise. q_tma, do_tma: descriptors of q and do, and then
    q_t and do_t are some, or None. row_values: from `grad_out_kernel`, padded to blocks of PAD_Q. tile_maxima: what
    `dq_kernel` wrote, where P and dS have one scale a tile; with it a step may take a part of a tile, BLOCK_Q of its
    queries against BLOCK_K of its keys. Without it BLOCK_Q is PAD_Q. mask: `Masked`, or None.
    """
    VARLEN: tl.constexpr = cu_seqlens_q is not None
    TMA: tl.constexpr = q_tma is not None
    WIDE: tl.constexpr = REST > 0
    STEPS: tl.constexpr = PAD_Q // BLOCK_Q
    INT8_S: tl.constexpr = k.at.dtype.element_ty == tl.int8
    block_k, batch_head = block_in_sequence(grid, heads_k, cu_seqlens_k, tokens_k, BLOCK_K, VARLEN)
    batch = batch_head // heads_k
    head_k = batch_head % heads_k
    start_q, length_q = sequence(cu_seqlens_q, batch, tokens_q, VARLEN)
    start_k, length_k = sequence(cu_seqlens_k, batch, tokens_k, VARLEN)
    first_k = block_k * BLOCK_K
    if first_k >= length_k:
        return
    z_k = head_k.to(tl.int64) if VARLEN else batch_head.to(tl.int64)
    if VARLEN:
        lower += length_k - length_q
        upper += length_k - length_q
    bounds = Bounds(lower, upper, HAS_LOWER, HAS_UPPER)
    queries = tl.arange(0, BLOCK_Q)
    numbers, left = tl.arange(0, BLOCK_K), length_k - first_k
    k_tile, v_tile = load_keys(k, v, batch, head_k, start_k + first_k, numbers, left, head_dim, BLOCK_D, WIDE)
    scale_2 = scale * LOG2_E
    # Triton 3.6 returns no None from a function, so that what may be one is loaded here
    key_scale, value_scale = None, None
    scales_at = (start_k + first_k).to(tl.int64)
    if INT8_S:
        key_scale = tl.load(k_scale + z_k * total_k + scales_at + numbers, mask=numbers < left, other=0)
        if groups.Q_TOKEN:
            key_scale *= scale_2
    if v_scale is not None:
        value_scale = tl.load(v_scale + z_k * total_k + scales_at + numbers, mask=numbers < left, other=0)[:, None]
    keep_k = keys_that_count(key_mask, batch, first_k, numbers, left, tokens_k)
    keys = KeyTile(batch, head_k, first_k, left, numbers, k_tile, v_tile, key_scale, value_scale, keep_k)

    towards_keys = Bounds(-upper, -lower, HAS_UPPER, HAS_LOWER)
    m_range = block_range_of(first_k, length_q, towards_keys, BLOCK_K, BLOCK_Q, key_mask is not None)
    m_range = mask_all_where(m_range, keys.left < BLOCK_K)  # keys past the end are masked in every block

    acc_k = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    acc_v = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    if WIDE:
        rest_k = tl.zeros((BLOCK_K, REST), tl.float32)
        rest_v = tl.zeros((BLOCK_K, REST), tl.float32)
    padded_q = padded_block(start_q, batch, PAD_Q, VARLEN)
    steps_q, step_0 = blocks_q * STEPS, padded_q * STEPS
    for member in tl.range(0, group):
        head = head_k * group + member
        z_q = head.to(tl.int64) if VARLEN else batch.to(tl.int64) * heads_k * group + head
        q_at = rows_of(q, batch, head, start_q)
        do_at = rows_of(do, batch, head, start_q)
        tile_0 = z_q * blocks_q + padded_q
        if tile_maxima is not None:
            maxima = tile_maxima + ((z_q * tiles_k + first_k // TILE_K) * blocks_q + padded_q) * 2
        elements, lists = None, None
        if mask is not None:
            elements = head_of(mask, batch, head)
            lists = list_of(mask, batch, head, first_k)
        for masked in tl.static_range(2):
            count, listed = steps_of(m_range, lists, masked)
            for i in tl.range(0, count):
                number = block_of(i, m_range, mask, listed, masked)
                tile, first_q = tile_0 + number // STEPS, number * BLOCK_Q
                block = QueryBlock(
                    head, z_q, start_q, first_q, length_q - first_q, queries, number, step_0, tile
                )  # fmt: skip
                if WIDE:
                    q_tile = Rows(q_at + first_q.to(tl.int64) * pitch_of(q), queries, pitch_of(q), block.left)
                else:
                    q_tile = load_block(
                        q_at, q_tma, batch, head, start_q, first_q, length_q, pitch_of(q), head_dim, not masked,
                        BLOCK_Q, BLOCK_D, VARLEN,
                    )  # fmt: skip
                row_lse, row_delta, row_scale, of_do = load_row_values(row_values, tile_0 * STEPS + number, BLOCK_Q)
                block_scale, s_scale, p_max, ds_max = None, None, None, None
                if not groups.Q_TOKEN:
                    # every query has the same, and the first is never padding
                    block_scale = tl.load(row_values + (tile_0 * STEPS + number) * (BLOCK_Q * 4) + 2)
                    row_scale, s_scale = None, block_scale * scale_2
                if tile_maxima is not None:
                    p_max = tl.load(maxima + number // STEPS * 2)
                    ds_max = tl.load(maxima + number // STEPS * 2 + 1)
                p, keep = probabilities(  # P^T = exp2(S^T - lse), S^T = K Q^T
                    keys, block, q_tile, row_lse, row_scale, s_scale, scale_2, mask, elements, listed + i, bounds,
                    head_dim, INT8_S, masked, VARLEN, WIDE,
                )  # fmt: skip
                if WIDE:
                    do_tile = Rows(do_at + first_q.to(tl.int64) * pitch_of(do), queries, pitch_of(do), block.left)
                else:
                    do_tile = load_block(
                        do_at, do_tma, batch, head, start_q, first_q, length_q, pitch_of(do), head_dim, not masked,
                        BLOCK_Q, BLOCK_D, VARLEN,
                    )  # fmt: skip
                # (2) [GEMM] dP^T - delta = V dO^T - delta, and (4) dS^T = P^T * (dP^T - delta); adding up from -delta
                # keeps one vector less in registers; slower where they are not short
                ds = score_gradients(
                    p, keys.v, do_tile, keys.v_scale, row_delta[None, :], BLOCK_D > 64, head_dim, not masked, WIDE
                )
                if v_scale is not None:  # dS is over dO's scale
                    if q_t is not None and groups.Q_TOKEN:
                        row_scale *= of_do
                    else:
                        ds = ds * of_do[None, :]
                if masked and VARLEN:
                    ds = tl.where(keep, ds, 0.0)
                if key_mask is not None:
                    ds = tl.where(keys.keep[:, None], ds, 0.0)
                # both operands first: 8 bits of P and dS take fewer registers than 32 while a product runs
                if tile_maxima is None:
                    p_max = largest_bits(p, groups.P_PER_KEY)
                p_int8, p_scale, ds_int8, ds_scale = None, None, None, None
                if do_t is not None:
                    p_int8 = quantize_tile(p, p_max, groups.P_PER_KEY)
                    p_scale = p_max * (1 / 127.0)
                if q_t is not None:
                    ds_int8, ds_scale = quantize_ds(ds, ds_max, p_max, row_scale, block_scale, groups)
                acc_v = add_dv(  # dV += P^T dO
                    acc_v, p, p_int8, p_scale, do_tile, do_t, do_rows, do_scale, keys, block, steps_q, groups,
                    head_dim, BLOCK_D, 0, masked, TMA, VARLEN,
                )  # fmt: skip
                if WIDE:
                    rest_v = add_dv(
                        rest_v, p, p_int8, p_scale, do_tile, do_t, do_rows, do_scale, keys, block, steps_q, groups,
                        head_dim, REST, BLOCK_D, masked, TMA, VARLEN,
                    )  # fmt: skip
                acc_k = add_dk(  # dK += dS^T Q
                    acc_k, ds, ds_int8, ds_scale, q_t, q_rows, keys, block, steps_q, groups, head_dim, BLOCK_D, 0,
                    masked, TMA,
                )  # fmt: skip
                if WIDE:
                    rest_k = add_dk(
                        rest_k, ds, ds_int8, ds_scale, q_t, q_rows, keys, block, steps_q, groups, head_dim, REST,
                        BLOCK_D, masked, TMA,
                    )  # fmt: skip

    store_keys(dk, dv, acc_k, acc_v, keys, start_k, scale, 0, head_dim, part_of(groups.TURNED, 0), WIDE)
    if WIDE:
        store_keys(dk, dv, rest_k, rest_v, keys, start_k, scale, BLOCK_D, head_dim, part_of(groups.TURNED, 1), WIDE)


@triton.jit
def store_keys(
    dk, dv, acc_k, acc_v, keys, start, scale, FIRST_D: tl.constexpr, head_dim: tl.constexpr, TURNED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Write dK and dV of a program's keys, of channels from FIRST_D on, of which the rotation has TURNED."""
    BLOCK_D: tl.constexpr = acc_k.shape[1]
    columns = FIRST_D + tl.arange(0, BLOCK_D)
    out = tile_of(dk, keys.batch, keys.head, start + keys.first, keys.numbers, columns)
    written = (keys.numbers < keys.left)[:, None] & (columns[None, :] < head_dim)
    if not TURNED:
        tl.store(dk.at + out, to_16bit(acc_k * scale, dk.at.dtype.element_ty), mask=written)
    tl.store(dv + out, to_16bit(acc_v, dv.dtype.element_ty), mask=written)
    if TURNED:
        at = row_of(dk, keys.batch, keys.head, start + keys.first) + FIRST_D
        inside = keys.numbers < keys.left
        store_turned(at, keys.numbers, pitch_of(dk), inside, acc_k, scale, head_dim - FIRST_D, TURNED, BLOCK_D, WIDE)


def launch_dkdv(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    k_scale: Tensor,
    v_scale: Tensor | None,
    do_scale: Tensor,
    q_t: Tensor | None,
    do_t: Tensor | None,
    q_rows: Tensor | None,
    do_rows: Tensor,
    row_values: Tensor,
    tile_maxima: Tensor | None,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Write dk and dv, which lie alike; the operands as `dkdv_kernel` takes them."""
    recipe, queries, keys = call.recipe, call.queries, call.keys
    kernel = "dkdv" if tile_maxima is None else "dkdv_given"
    # dV's operand, where dP's is none: that is of codes, or of pieces of channels
    apart = recipe.dv != INT8 and (v_scale is not None or call.head_dim > SLICE)

    def run(config: Config) -> None:
        tma = {}
        block_q = config.block_q(recipe)
        if config.tma:
            rows_block = (block_q, call.block_d)
            copies = {"q_t": q_t, "do_t": do_t}
            views = {"q": (queries.view(q), rows_block), "do": (queries.view(do), rows_block)}
            views |= {
                n: (transposed_view(x, call.head_dim), rows_block[::-1]) for n, x in copies.items() if x is not None
            }
            tma = described(views) or {}
        grid = keys.blocks(config.rows)
        launch_by_length(
            *by_length(call, by_key=True),
            dkdv_kernel,
            (grid * keys.heads_in_all,),
            Strided.of(q, queries),
            Strided.of(k, keys),
            Strided.of(v, keys),
            Strided.of(do, queries),
            tma.get("q"),
            tma.get("do"),
            k_scale,
            v_scale,
            do_scale,
            tma.get("q_t", q_t),
            tma.get("do_t", do_t),
            None if recipe.dk == INT8 else Strided.of(q_rows, queries),
            Strided.of(do_rows, queries) if apart else None,
            row_values,
            tile_maxima,
            Strided.of(dk, keys),
            dv,
            *masks_of(call, by_key=True),
            Groups.of(call),
            keys.heads,
            call.group,
            queries.extent,
            keys.extent,
            keys.total,
            queries.blocks(recipe.block_q),
            tiles_of_keys(call),
            grid,
            PAD_Q=recipe.block_q,
            TILE_K=recipe.block_k,
            BLOCK_Q=block_q,
            BLOCK_K=config.rows,
            **tiles_of(call.head_dim),
            **config.options(call),
        )

    run_best(kernel, call, run)
