"""dK and dV, by key block: each program meets every query block that sees its keys, and recomputes P.

It works on S^T, so that P^T and dS^T leave one product in the registers in which the next one takes them. dS carries
Q's scale per token, on which dK reduces, before it is quantised.
Both are written where the caller wants them, which is alike: one set of strides holds for the two.
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
    largest_bits,
    load_block,
    load_mask,
    load_row_values,
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


@triton.jit(do_not_specialize=["tokens_q", "tokens_k", "total_k", "blocks_q", "tiles_k", "grid", "lower", "upper"])
def dkdv_kernel(
    q,
    k,
    v,
    do,
    k_scale,
    do_scale,
    q_t,
    do_t,
    q_rows,
    row_values,
    q_mean,
    k_exact,
    k_mean,
    tile_maxima,
    dk,
    dv,
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
    dk_b,
    dk_h,
    dk_n,
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
    INT8_S: tl.constexpr,
    INT8_DV: tl.constexpr,
    INT8_DK: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    DO_CHANNEL: tl.constexpr,
    P_PER_KEY: tl.constexpr,
    DS_PER_KEY: tl.constexpr,
    HAS_LOWER: tl.constexpr,
    HAS_UPPER: tl.constexpr,
    VARLEN: tl.constexpr,
    TMA: tl.constexpr,
    BIAS: tl.constexpr,
    MASK_TILE: tl.constexpr,
    MASK_EVEN: tl.constexpr,
    LIST_ROWS: tl.constexpr,
    PAD_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One block of keys of one key head, summed over the query heads that share it. PAD_Q and TILE_K are the recipe's.

    q, k: operands of S, codes or 16-bit rows. q_t, do_t: transposed codes, where dK and dV are INT8. q_rows: the
    16-bit operand of dK otherwise. row_values: from `grad_out_kernel`, padded to blocks of PAD_Q. TMA: q, do, q_t
    and do_t are descriptors. tile_maxima: what `dq_kernel` wrote, where P and dS have one scale a tile; with it a step
    may take a part of a tile, BLOCK_Q of its queries against BLOCK_K of its keys. Without it BLOCK_Q is PAD_Q.
    """
    EVEN: tl.constexpr = head_dim == BLOCK_D
    STEPS: tl.constexpr = PAD_Q // BLOCK_Q
    batch_head = tl.program_id(0) // grid
    block_k = tl.program_id(0) % grid
    batch = batch_head // heads_k
    head_k = batch_head % heads_k
    start_q, length_q = sequence(cu_seqlens_q, batch, tokens_q, VARLEN)
    start_k, length_k = sequence(cu_seqlens_k, batch, tokens_k, VARLEN)
    first_k = block_k * BLOCK_K
    if first_k >= length_k:
        return
    batch_64 = batch.to(tl.int64)
    z_k = head_k.to(tl.int64) if VARLEN else batch_head.to(tl.int64)
    if VARLEN:
        lower += length_k - length_q
        upper += length_k - length_q
    queries = tl.arange(0, BLOCK_Q)
    keys = tl.arange(0, BLOCK_K)
    columns = tl.arange(0, BLOCK_D)
    left_k = length_k - first_k
    at_k = (start_k + first_k).to(tl.int64)
    k += batch_64 * k_b + head_k.to(tl.int64) * k_h + at_k * k_n
    v += batch_64 * v_b + head_k.to(tl.int64) * v_h + at_k * v_n
    k_tile = load_rows(k, keys, columns, k_n, left_k, head_dim, False, EVEN)
    v_tile = load_rows(v, keys, columns, v_n, left_k, head_dim, False, EVEN)
    scale_2 = scale * LOG2_E
    if INT8_S:
        key_scale = tl.load(k_scale + z_k * total_k + at_k + keys, mask=keys < left_k, other=0)
        if Q_TOKEN:
            key_scale *= scale_2
    keep_key = keys < left_k
    if key_mask is not None:
        keep_key = keep_key & (tl.load(key_mask + batch_64 * tokens_k + first_k + keys, mask=keep_key, other=0) != 0)
    if q_mean is not None:
        k_exact += batch_64 * exact_b + head_k.to(tl.int64) * exact_h + at_k * exact_n
        k_mean += (batch * heads_k + head_k).to(tl.int64) * head_dim
        shift = tl.load(k_mean + columns, mask=columns < head_dim, other=0)

    begin, full_begin, full_end, end = block_range(
        first_k, length_q, -upper, -lower, BLOCK_K, BLOCK_Q, HAS_UPPER, HAS_LOWER, key_mask is not None
    )
    # a tile that holds keys past the end masks them in every block
    full_begin = tl.where(left_k < BLOCK_K, end, full_begin)
    full_end = tl.where(left_k < BLOCK_K, end, full_end)

    acc_k = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    acc_v = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    padded_q = padded_block(start_q, batch, PAD_Q, VARLEN)
    steps_q, step_0 = blocks_q * STEPS, padded_q * STEPS
    for member in tl.range(0, group):
        head = head_k * group + member
        z_q = head.to(tl.int64) if VARLEN else batch.to(tl.int64) * heads_k * group + head
        q_head = rows_of(q, batch, head, start_q, q_b, q_h, q_n, TMA)
        do_head = rows_of(do, batch, head, start_q, do_b, do_h, do_n, TMA)
        tile_0 = z_q * blocks_q + padded_q
        if tile_maxima is not None:
            maxima = tile_maxima + ((z_q * tiles_k + first_k // TILE_K) * blocks_q + padded_q) * 2
        if mask is not None:
            mask_head = mask + batch_64 * mask_b + head.to(tl.int64) * mask_h
            list_at = batch_64 * list_b + head.to(tl.int64) * list_h + (first_k // LIST_ROWS).to(tl.int64) * list_n
        for masked in tl.static_range(2):
            count = full_end - full_begin
            if masked:
                count = end - begin - count
            if mask is not None:
                count = tl.load(lists + list_at + masked)
                listed = lists + list_at + 2 + masked * tl.load(lists + list_at)
            for i in tl.range(0, count):
                if mask is not None:
                    block = tl.load(listed + i)
                elif masked:
                    block = begin + i + tl.where(begin + i >= full_begin, full_end - full_begin, 0)
                else:
                    block = full_begin + i
                tile = tile_0 + block // STEPS
                first_q = block * BLOCK_Q
                left = length_q - first_q
                q_tile = load_block(
                    q_head, batch, head, start_q, first_q, length_q, q_n, head_dim, not masked,
                    BLOCK_Q, BLOCK_D, VARLEN, TMA,
                )  # fmt: skip
                row_lse, row_delta, row_scale = load_row_values(row_values, tile_0 * STEPS + block, BLOCK_Q)
                if not Q_TOKEN:
                    # every query has the same, and the first is never padding
                    block_scale = tl.load(row_values + (tile_0 * STEPS + block) * (BLOCK_Q * 4) + 2)
                if tile_maxima is not None:
                    p_max = tl.load(maxima + block // STEPS * 2)
                    ds_max = tl.load(maxima + block // STEPS * 2 + 1)
                if INT8_S:
                    s = tl.dot(k_tile, q_tile.T, out_dtype=tl.int32).to(tl.float32)
                    if Q_TOKEN:
                        s = s * row_scale[None, :] * key_scale[:, None]
                    else:
                        s = s * (key_scale * (block_scale * scale_2))[:, None]
                else:
                    s = dot_16bit(k_tile, q_tile.T) * scale_2
                if q_mean is not None:
                    mu = tl.load(q_mean + tile * head_dim + columns, mask=columns < head_dim, other=0)
                    exact = load_rows(k_exact, keys, columns, exact_n, left_k, head_dim, False, EVEN).to(tl.float32)
                    bias = tl.sum((exact - shift[None, :]) * mu[None, :], 1) * scale_2
                    s = s + bias[:, None]
                if mask is not None and masked:
                    element = load_mask(
                        mask_head, listed + i, first_q, first_k, queries[None, :], keys[:, None], left, left_k, mask_q,
                        mask_k, list_n, MASK_TILE, MASK_EVEN,
                    )  # fmt: skip
                    if BIAS:
                        s += element.to(tl.float32) * LOG2_E
                p = exp2(s - row_lse[None, :])
                if BIAS:
                    p = tl.where(p > 1, 1.0, p)  # beside a large bias lse loses the digits that keep it so
                if masked:
                    keep = visible(
                        (first_k + keys)[:, None] - (first_q + queries)[None, :], lower, upper, HAS_LOWER, HAS_UPPER
                    )
                    if mask is not None:
                        keep = keep & shows(element, mask.dtype.element_ty, BIAS)
                    if VARLEN:  # Q and dO past the end, where TMA reads the next sequence's, need not be finite
                        keep = keep & (queries < left)[None, :]
                    p = tl.where(keep & keep_key[:, None], p, 0.0)
                do_tile = load_block(
                    do_head, batch, head, start_q, first_q, length_q, do_n, head_dim, not masked,
                    BLOCK_Q, BLOCK_D, VARLEN, TMA,
                )  # fmt: skip
                if BLOCK_D > 64:
                    # adding up from -delta keeps one vector less in registers; slower where they are not short
                    dp = dot_16bit(v_tile, do_tile.T, tl.zeros((BLOCK_K, BLOCK_Q), tl.float32) - row_delta[None, :])
                else:
                    dp = dot_16bit(v_tile, do_tile.T) - row_delta[None, :]
                ds = p * dp
                if masked and VARLEN:
                    ds = tl.where(keep, ds, 0.0)
                if key_mask is not None:
                    ds = tl.where(keep_key[:, None], ds, 0.0)
                if q_mean is not None:
                    acc_k += tl.sum(ds, 1)[:, None] * mu[None, :]
                # both operands first: 8 bits of P and dS take fewer registers than 32 while a product runs
                if tile_maxima is None:
                    p_max = largest_bits(p, P_PER_KEY)
                if INT8_DV:
                    p_codes = codes_of(p, p_max, P_PER_KEY)
                    p_scale = p_max * (1 / 127.0)
                if INT8_DK:
                    if Q_TOKEN:
                        ds = ds * row_scale[None, :]
                    if tile_maxima is None:
                        ds_max = largest(ds, DS_PER_KEY)
                    ds_codes = codes_of(ds, ds_max, DS_PER_KEY)
                    # a NaN in any query's lse or delta shows in P, and must in dK
                    ds_scale = ds_max * (1 / 127.0) + (tl.max(p_max, 0) if P_PER_KEY and not DS_PER_KEY else p_max) * 0
                    if not Q_TOKEN:
                        ds_scale = ds_scale * block_scale
                if INT8_DV:
                    operand = load_transposed(do_t, z_q, steps_q, step_0 + block, head_dim, BLOCK_Q, BLOCK_D, TMA)
                    part = tl.dot(interleave(p_codes), operand, out_dtype=tl.int32).to(tl.float32)
                    if DO_CHANNEL:
                        channel = tl.load(do_scale + tile * head_dim + columns, mask=columns < head_dim, other=0)
                        part = part * channel[None, :]
                    else:
                        p_scale = p_scale * tl.load(do_scale + tile)
                    if P_PER_KEY:
                        acc_v += part * p_scale[:, None]
                    else:
                        acc_v += part * p_scale
                else:
                    if masked and VARLEN and TMA:
                        do_tile = tl.where((queries < left)[:, None], do_tile, 0.0)
                    acc_v = dot_16bit(to_16bit(p, do_tile.dtype), do_tile, acc_v)
                if INT8_DK:
                    operand = load_transposed(q_t, z_q, steps_q, step_0 + block, head_dim, BLOCK_Q, BLOCK_D, TMA)
                    part = tl.dot(interleave(ds_codes), operand, out_dtype=tl.int32).to(tl.float32)
                    if DS_PER_KEY:
                        acc_k += part * ds_scale[:, None]
                    else:
                        acc_k += part * ds_scale
                else:
                    rows_at = q_rows + batch_64 * rows_b + head.to(tl.int64) * rows_h
                    rows_at += (start_q + first_q).to(tl.int64) * rows_n
                    operand = load_rows(rows_at, queries, columns, rows_n, left, head_dim, not masked, EVEN)
                    acc_k = dot_16bit(to_16bit(ds, operand.dtype), operand, acc_k)

    out = batch_64 * dk_b + head_k.to(tl.int64) * dk_h + at_k * dk_n
    out = out + keys[:, None] * dk_n + columns[None, :]
    written = (keys < left_k)[:, None] & (columns[None, :] < head_dim)
    tl.store(dk + out, to_16bit(acc_k * scale, dk.dtype.element_ty), mask=written)
    tl.store(dv + out, to_16bit(acc_v, dv.dtype.element_ty), mask=written)


def launch_dkdv(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    k_scale: Tensor,
    do_scale: Tensor,
    q_t: Tensor | None,
    do_t: Tensor | None,
    q_rows: Tensor | None,
    row_values: Tensor,
    smooth_q: SmoothQ,
    tile_maxima: Tensor | None,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Write dk and dv, which lie alike; the operands as `dkdv_kernel` takes them."""
    recipe, queries, keys = call.recipe, call.queries, call.keys
    listed = None if call.lists is None else call.lists.by_key
    kernel = "dkdv" if tile_maxima is None else "dkdv_given"

    def run(config: Config) -> None:
        blocked = {"q": q, "do": do, "q_t": q_t, "do_t": do_t}
        block_q = config.block_q(recipe)
        if config.tma:
            rows_block = (block_q, call.block_d)
            views = {name: (queries.view(blocked[name]), rows_block) for name in ("q", "do")}
            copies = {"q_t": q_t, "do_t": do_t}
            views |= {
                n: (transposed_view(x, call.head_dim), rows_block[::-1]) for n, x in copies.items() if x is not None
            }
            blocked |= described(views) or {}
        grid = keys.grid(config.rows)
        launch(
            dkdv_kernel,
            (grid * keys.batch * keys.heads,),
            blocked["q"],
            k,
            v,
            blocked["do"],
            k_scale,
            do_scale,
            blocked["q_t"],
            blocked["do_t"],
            None if recipe.dk == INT8 else q_rows,
            row_values,
            smooth_q.q_mean,
            smooth_q.k,
            smooth_q.k_mean,
            tile_maxima,
            dk,
            dv,
            call.key_mask,
            queries.cu_seqlens,
            keys.cu_seqlens,
            *lists.arguments(listed),
            *queries.strides(q),
            *keys.strides(k),
            *keys.strides(v),
            *queries.strides(do),
            *((0, 0, 0) if recipe.dk == INT8 else queries.strides(q_rows)),
            *((0, 0, 0) if smooth_q.k is None else keys.strides(smooth_q.k)),
            *keys.strides(dk),
            keys.heads,
            call.group,
            queries.tokens,
            keys.tokens,
            keys.total,
            queries.blocks(recipe.block_q),
            keys.grid(recipe.block_k),
            grid,
            **call.band,
            scale=call.scale,
            head_dim=call.head_dim,
            INT8_S=recipe.s == INT8,
            INT8_DV=recipe.dv == INT8,
            INT8_DK=recipe.dk == INT8,
            Q_TOKEN=recipe.q_scale == "token",
            DO_CHANNEL=recipe.do_scale == "channel",
            P_PER_KEY=recipe.p_scale_dv == "key",
            DS_PER_KEY=recipe.ds_scale_dk == "key",
            VARLEN=call.packed,
            **lists.options(listed),
            TMA=isinstance(blocked["q"], TensorDescriptor),
            PAD_Q=recipe.block_q,
            TILE_K=recipe.block_k,
            BLOCK_Q=block_q,
            BLOCK_K=config.rows,
            BLOCK_D=call.block_d,
            **config.options,
        )

    run_best(kernel, call, run)
