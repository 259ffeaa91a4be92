"""dQ, by query block: each program meets every key block that its queries see, and recomputes P.

Recomputing S and dP costs two products more than adding dQ up with atomics beside dK and dV, and saves the transpose
of dS through shared memory, the atomics and their FP32 buffer; it was faster (docs/log), and is repeatable.
dQ is written where the caller wants it, with any strides but the last dimension's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sagebwd.call import Call
from sagebwd.kernels.host.replay import launch
from sagebwd.kernels.operands.tile import (
    LOG2_E,
    block_range,
    codes_of,
    dot_16bit,
    exp2,
    interleave,
    largest,
    largest_of_tile,
    load_block,
    load_mask,
    load_rows,
    load_transposed,
    padded_block,
    rows_of,
    sequence,
    shows,
    to_16bit,
    visible,
)
from sagebwd.kernels.portable import lists
from sagebwd.kernels.portable.config import Config
from sagebwd.kernels.portable.descriptor import SmoothQ, described, transposed_view
from sagebwd.kernels.portable.tune import run_best
from sagebwd.recipe import INT8


@triton.jit(
    do_not_specialize=["tokens_q", "tokens_k", "total_k", "blocks_q", "blocks_k", "tiles_k", "grid", "lower", "upper"]
)
def dq_kernel(
    q,
    k,
    v,
    do,
    k_scale,
    k_t,
    k_rows,
    row_values,
    q_mean,
    k_exact,
    k_mean,
    tile_maxima,
    dq,
    key_mask,
    cu_seqlens_q,
    cu_seqlens_k,
    mask,
    lists,
    mask_b,
    mask_h,
    mask_q,
    mask_k,
    list_b,
    list_h,
    list_n,
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    do_b,
    do_h,
    do_n,
    rows_b,
    rows_h,
    rows_n,
    exact_b,
    exact_h,
    exact_n,
    dq_b,
    dq_h,
    dq_n,
    heads,
    group,
    tokens_q,
    tokens_k,
    total_k,
    blocks_q,
    blocks_k,
    tiles_k,
    grid,
    lower,
    upper,
    scale,
    head_dim: tl.constexpr,
    INT8_S: tl.constexpr,
    INT8_DQ: tl.constexpr,
    K_TOKEN: tl.constexpr,
    DS_PER_QUERY: tl.constexpr,
    HAS_LOWER: tl.constexpr,
    HAS_UPPER: tl.constexpr,
    VARLEN: tl.constexpr,
    TMA: tl.constexpr,
    BIAS: tl.constexpr,
    MASK_TILE: tl.constexpr,
    MASK_EVEN: tl.constexpr,
    LIST_ROWS: tl.constexpr,
    PAD_Q: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One block of queries of one head. BLOCK_K is the recipe's; PAD_Q is the block row_values are padded to.

    q, k: operands of S. k_t: transposed codes where dQ is INT8; k_rows: its 16-bit operand otherwise. TMA: k, v and
    k_t are descriptors. tile_maxima (heads, tiles_k, blocks_q, 2): the largest P and |dS| of each tile, for dK and dV;
    written where not None, and BLOCK_Q is PAD_Q then.
    """
    EVEN: tl.constexpr = head_dim == BLOCK_D
    batch_head = tl.program_id(0) // grid
    # the last queries see the most keys: start them first
    block_q = grid - 1 - tl.program_id(0) % grid
    batch = batch_head // heads
    head = batch_head % heads
    head_k = head // group
    start_q, length_q = sequence(cu_seqlens_q, batch, tokens_q, VARLEN)
    start_k, length_k = sequence(cu_seqlens_k, batch, tokens_k, VARLEN)
    first_q = block_q * BLOCK_Q
    if first_q >= length_q:
        return
    heads_k = heads // group
    batch_64 = batch.to(tl.int64)
    z_q = head.to(tl.int64) if VARLEN else batch_head.to(tl.int64)
    z_k = head_k.to(tl.int64) if VARLEN else (batch * heads_k + head_k).to(tl.int64)
    if VARLEN:
        lower += length_k - length_q
        upper += length_k - length_q
    queries = tl.arange(0, BLOCK_Q)
    keys = tl.arange(0, BLOCK_K)
    columns = tl.arange(0, BLOCK_D)
    left_q = length_q - first_q
    inside = queries < left_q
    at_q = (start_q + first_q).to(tl.int64)
    q += batch_64 * q_b + head.to(tl.int64) * q_h + at_q * q_n
    do += batch_64 * do_b + head.to(tl.int64) * do_h + at_q * do_n
    q_tile = load_rows(q, queries, columns, q_n, left_q, head_dim, False, EVEN)
    do_tile = load_rows(do, queries, columns, do_n, left_q, head_dim, False, EVEN)
    padded_q = (z_q * blocks_q + padded_block(start_q, batch, PAD_Q, VARLEN)) * PAD_Q + first_q
    row_lse = tl.load(row_values + (padded_q + queries) * 4, mask=inside, other=float("inf"))
    row_delta = tl.load(row_values + (padded_q + queries) * 4 + 1, mask=inside, other=0)
    scale_2 = scale * LOG2_E
    if INT8_S:
        row_scale = tl.load(row_values + (padded_q + queries) * 4 + 2, mask=inside, other=0) * scale_2
    k = rows_of(k, batch, head_k, start_k, k_b, k_h, k_n, TMA)
    v = rows_of(v, batch, head_k, start_k, v_b, v_h, v_n, TMA)
    padded_k = padded_block(start_k, batch, BLOCK_K, VARLEN)
    if INT8_S or INT8_DQ:
        k_scale += z_k * total_k + start_k
    if not INT8_DQ:
        k_rows += batch_64 * rows_b + head_k.to(tl.int64) * rows_h + start_k.to(tl.int64) * rows_n
    if q_mean is not None:
        mu_at = q_mean + (z_q * blocks_q + padded_block(start_q, batch, PAD_Q, VARLEN) + block_q) * head_dim
        mu = tl.load(mu_at + columns, mask=columns < head_dim, other=0)
        k_exact += batch_64 * exact_b + head_k.to(tl.int64) * exact_h + start_k.to(tl.int64) * exact_n
        k_mean += (batch * heads_k + head_k).to(tl.int64) * head_dim
        shift = tl.load(k_mean + columns, mask=columns < head_dim, other=0)
    if key_mask is not None:
        key_mask += batch_64 * tokens_k
    if mask is not None:
        mask += batch_64 * mask_b + head.to(tl.int64) * mask_h
        lists += batch_64 * list_b + head.to(tl.int64) * list_h + (first_q // LIST_ROWS).to(tl.int64) * list_n
    if tile_maxima is not None:
        # by key block first: the kernel that reads them walks along the queries
        tile_maxima += (z_q * tiles_k * blocks_q + padded_block(start_q, batch, PAD_Q, VARLEN) + block_q) * 2

    begin, full_begin, full_end, end = block_range(
        first_q, length_k, lower, upper, BLOCK_Q, BLOCK_K, HAS_LOWER, HAS_UPPER, key_mask is not None
    )
    # a NaN anywhere in a query's row is in its delta, and must be in its dQ
    poison = row_delta * 0 if DS_PER_QUERY else tl.sum(row_delta * 0, 0)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for masked in tl.static_range(2):
        count = full_end - full_begin
        if masked:
            count = end - begin - count
        if mask is not None:
            count = tl.load(lists + masked)
            listed = lists + 2 + masked * tl.load(lists)
        for i in tl.range(0, count):
            if mask is not None:
                block = tl.load(listed + i)
            elif masked:
                block = begin + i + tl.where(begin + i >= full_begin, full_end - full_begin, 0)
            else:
                block = full_begin + i
            first_k = block * BLOCK_K
            first_64 = first_k.to(tl.int64)
            left = length_k - first_k
            k_tile = load_block(
                k, batch, head_k, start_k, first_k, length_k, k_n, head_dim, not masked,
                BLOCK_K, BLOCK_D, VARLEN, TMA,
            )  # fmt: skip
            if INT8_S or INT8_DQ:
                if not K_TOKEN:
                    block_scale = tl.load(k_scale + first_k)
                elif masked:
                    key_scale = tl.load(k_scale + first_k + keys, mask=keys < left, other=0)
                else:
                    key_scale = tl.load(k_scale + first_k + keys)
            if INT8_S:
                s = tl.dot(q_tile, k_tile.T, out_dtype=tl.int32).to(tl.float32)
                if K_TOKEN:
                    s = s * key_scale[None, :] * row_scale[:, None]
                else:
                    s = s * (row_scale * block_scale)[:, None]
            else:
                s = dot_16bit(q_tile, k_tile.T) * scale_2
            if q_mean is not None:
                exact = load_rows(k_exact + first_64 * exact_n, keys, columns, exact_n, left, head_dim, False, EVEN)
                bias = tl.sum((exact.to(tl.float32) - shift[None, :]) * mu[None, :], 1) * scale_2
                s = s + bias[None, :]
            if mask is not None and masked:
                element = load_mask(
                    mask, listed + i, first_q, first_k, queries[:, None], keys[None, :], left_q, left, mask_q, mask_k,
                    list_n, MASK_TILE, MASK_EVEN,
                )  # fmt: skip
                if BIAS:
                    s += element.to(tl.float32) * LOG2_E
            p = exp2(s - row_lse[:, None])
            if BIAS:
                p = tl.where(p > 1, 1.0, p)  # beside a large bias lse loses the digits that keep it so
            if masked:
                keep = (
                    visible(
                        (first_k + keys)[None, :] - (first_q + queries)[:, None], lower, upper, HAS_LOWER, HAS_UPPER
                    )
                    & (keys < left)[None, :]
                )
                if key_mask is not None:
                    keep = keep & (tl.load(key_mask + first_k + keys, mask=keys < left, other=0) != 0)[None, :]
                if mask is not None:
                    keep = keep & shows(element, mask.dtype.element_ty, BIAS)
                p = tl.where(keep, p, 0.0)
            v_tile = load_block(
                v, batch, head_k, start_k, first_k, length_k, v_n, head_dim, not masked,
                BLOCK_K, BLOCK_D, VARLEN, TMA,
            )  # fmt: skip
            if tile_maxima is not None and BLOCK_D > 64:
                # rounded as dkdv rounds it, so that the maxima are those of its own tiles
                dp = dot_16bit(do_tile, v_tile.T, tl.zeros((BLOCK_Q, BLOCK_K), tl.float32) - row_delta[:, None])
            else:
                dp = dot_16bit(do_tile, v_tile.T) - row_delta[:, None]
            ds = p * dp
            if masked and (key_mask is not None or VARLEN):  # V of a masked key, or past the end, need not be finite
                ds = tl.where(keep, ds, 0.0)
            if INT8_DQ:
                if K_TOKEN:
                    ds = ds * key_scale[None, :]
                if tile_maxima is not None:
                    p_max, ds_max = largest_of_tile(p, ds)
                    at = tile_maxima + block.to(tl.int64) * blocks_q * 2
                    tl.store(at, p_max)
                    tl.store(at + 1, ds_max)
                else:
                    ds_max = largest(ds, DS_PER_QUERY)
                ds_codes = codes_of(ds, ds_max, DS_PER_QUERY)
                ds_scale = ds_max * (1 / 127.0) + poison
                if not K_TOKEN:
                    ds_scale = ds_scale * block_scale
                operand = load_transposed(k_t, z_k, blocks_k, padded_k + block, head_dim, BLOCK_K, BLOCK_D, TMA)
                part = tl.dot(interleave(ds_codes), operand, out_dtype=tl.int32).to(tl.float32)
                if DS_PER_QUERY:
                    acc += part * ds_scale[:, None]
                else:
                    acc += part * ds_scale
            else:
                operand = load_rows(
                    k_rows + first_64 * rows_n, keys, columns, rows_n, left, head_dim, not masked, EVEN
                )
                acc = dot_16bit(to_16bit(ds, operand.dtype), operand, acc)

    out = dq + batch_64 * dq_b + head.to(tl.int64) * dq_h + at_q * dq_n
    out = out + queries[:, None] * dq_n + columns[None, :]
    tl.store(out, to_16bit(acc * scale, dq.dtype.element_ty), mask=inside[:, None] & (columns[None, :] < head_dim))


def launch_dq(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    k_scale: Tensor,
    k_t: Tensor | None,
    k_rows: Tensor | None,
    row_values: Tensor,
    smooth_q: SmoothQ,
    tile_maxima: Tensor | None,
    dq: Tensor,
) -> None:
    """Write dq; the operands as `dq_kernel` takes them."""
    recipe, queries, keys = call.recipe, call.queries, call.keys
    listed = None if call.lists is None else call.lists.by_query

    def run(config: Config) -> None:
        blocked = {"k": k, "v": v, "k_t": k_t}
        if config.tma:
            rows_block = (recipe.block_k, call.block_d)
            views = {name: (keys.view(blocked[name]), rows_block) for name in ("k", "v")}
            if k_t is not None:
                views["k_t"] = transposed_view(k_t, call.head_dim), rows_block[::-1]
            blocked |= described(views) or {}
        grid = queries.grid(config.rows)
        launch(
            dq_kernel,
            (grid * queries.batch * queries.heads,),
            q,
            blocked["k"],
            blocked["v"],
            do,
            k_scale,
            blocked["k_t"],
            None if recipe.dq == INT8 else k_rows,
            row_values,
            smooth_q.q_mean,
            smooth_q.k,
            smooth_q.k_mean,
            tile_maxima,
            dq,
            call.key_mask,
            queries.cu_seqlens,
            keys.cu_seqlens,
            *lists.arguments(listed),
            *queries.strides(q),
            *keys.strides(k),
            *keys.strides(v),
            *queries.strides(do),
            *((0, 0, 0) if recipe.dq == INT8 else keys.strides(k_rows)),
            *((0, 0, 0) if smooth_q.k is None else keys.strides(smooth_q.k)),
            *queries.strides(dq),
            queries.heads,
            call.group,
            queries.tokens,
            keys.tokens,
            keys.total,
            queries.blocks(recipe.block_q),
            keys.blocks(recipe.block_k),
            keys.grid(recipe.block_k),
            grid,
            **call.band,
            scale=call.scale,
            head_dim=call.head_dim,
            INT8_S=recipe.s == INT8,
            INT8_DQ=recipe.dq == INT8,
            K_TOKEN=recipe.k_scale != "block",
            DS_PER_QUERY=recipe.ds_scale_dq == "query",
            VARLEN=call.packed,
            **lists.options(listed),
            TMA=isinstance(blocked["k"], TensorDescriptor),
            PAD_Q=recipe.block_q,
            BLOCK_Q=config.rows,
            BLOCK_K=recipe.block_k,
            BLOCK_D=call.block_d,
            **config.options,
        )

    run_best("dq", call, run)
