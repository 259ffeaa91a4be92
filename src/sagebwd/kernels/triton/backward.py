"""Backward in two kernels without atomics: dK and dV by key block, dQ by query block; each recomputes P.

Both keep score tiles in registers from S to the next product's operand: dK and dV work on S^T, dQ on S, so neither
transposes a tile. Scales on an axis that a product reduces over are folded into dS before it is quantised.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sagebwd.kernels.triton.tile import (
    LOG2_E,
    TINY,
    abs_max,
    block_range,
    dot_16bit,
    interleave,
    load_rows,
    load_transposed,
    padded_block,
    sequence,
    to_int8,
    visible,
)

NO_SPECIALIZE = [
    "tokens_q",
    "tokens_k",
    "total_q",
    "total_k",
    "blocks_q",
    "blocks_k",
    "grid",
    "lower",
    "upper",
]


@triton.jit
def quantize_tile(x, PER_ROW: tl.constexpr):
    """psi of a score tile: codes and scale, one a row or one for all of it."""
    if PER_ROW:
        amax = abs_max(x, 1)
        codes = to_int8(x * (127.0 / tl.maximum(amax, TINY))[:, None])
    else:
        amax = abs_max(abs_max(x, 1), 0)
        codes = to_int8(x * (127.0 / tl.maximum(amax, TINY)))
    return codes, amax * (1 / 127.0)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def dkdv_kernel(
    q,
    k,
    v,
    do,
    q_scale,
    k_scale,
    do_scale,
    q_t,
    do_t,
    q_rows,
    lse2,
    delta,
    q_mean,
    k_exact,
    k_mean,
    dk,
    dv,
    key_mask,
    cu_seqlens_q,
    cu_seqlens_k,
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
    total_q,
    total_k,
    blocks_q,
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
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One block of keys of one key head, summed over the query heads that share it. BLOCK_Q is the recipe's.

    q, k: operands of S, codes or 16-bit rows. q_t, do_t: transposed codes, where dK and dV are INT8. q_rows: the 16-bit
    operand of dK otherwise. lse2, delta: from `grad_out_kernel`, padded to blocks of BLOCK_Q.
    """
    EVEN: tl.constexpr = head_dim == BLOCK_D
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
        key_scale = tl.load(k_scale + z_k * total_k + at_k + keys, mask=keys < left_k, other=0) * scale_2
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
    pitch = blocks_q * BLOCK_Q
    padded_q = padded_block(start_q, batch, BLOCK_Q, VARLEN)
    for member in tl.range(0, group):
        head = head_k * group + member
        z_q = head.to(tl.int64) if VARLEN else batch.to(tl.int64) * heads_k * group + head
        q_head = q + batch_64 * q_b + head.to(tl.int64) * q_h + start_q.to(tl.int64) * q_n
        do_head = do + batch_64 * do_b + head.to(tl.int64) * do_h + start_q.to(tl.int64) * do_n
        block_0 = z_q * blocks_q + padded_q
        for masked in tl.static_range(2):
            count = full_end - full_begin
            if masked:
                count = end - begin - count
            for i in tl.range(0, count):
                if masked:
                    block = begin + i + tl.where(begin + i >= full_begin, full_end - full_begin, 0)
                else:
                    block = full_begin + i
                first_q = block * BLOCK_Q
                first_64 = first_q.to(tl.int64)
                left = length_q - first_q
                q_tile = load_rows(q_head + first_64 * q_n, queries, columns, q_n, left, head_dim, not masked, EVEN)
                at = (block_0 + block) * BLOCK_Q + queries
                row_lse = tl.load(lse2 + at)
                row_delta = tl.load(delta + at)
                if INT8_S or (INT8_DK and Q_TOKEN):
                    row = z_q * total_q + start_q + first_q + queries
                    if masked:
                        row_scale = tl.load(q_scale + row, mask=queries < left, other=0)
                    else:
                        row_scale = tl.load(q_scale + row)
                if INT8_S:
                    s = tl.dot(k_tile, q_tile.T, out_dtype=tl.int32).to(tl.float32) * row_scale[None, :]
                    if q_mean is None:
                        s = s * key_scale[:, None] - row_lse[None, :]
                    else:
                        s = s * key_scale[:, None]
                else:
                    s = dot_16bit(k_tile, q_tile.T) * scale_2
                    if q_mean is None:
                        s = s - row_lse[None, :]
                if q_mean is not None:
                    mu = tl.load(q_mean + (block_0 + block) * head_dim + columns, mask=columns < head_dim, other=0)
                    exact = load_rows(k_exact, keys, columns, exact_n, left_k, head_dim, False, EVEN).to(tl.float32)
                    bias = tl.sum((exact - shift[None, :]) * mu[None, :], 1) * scale_2
                    s = s + bias[:, None] - row_lse[None, :]
                p = tl.exp2(s)
                if masked:
                    keep = visible(
                        (first_k + keys)[:, None] - (first_q + queries)[None, :], lower, upper, HAS_LOWER, HAS_UPPER
                    )
                    p = tl.where(keep & keep_key[:, None], p, 0.0)
                do_tile = load_rows(
                    do_head + first_64 * do_n, queries, columns, do_n, left, head_dim, not masked, EVEN
                )
                dp = dot_16bit(v_tile, do_tile.T)
                ds = p * (dp - row_delta[None, :])
                if key_mask is not None:
                    ds = tl.where(keep_key[:, None], ds, 0.0)
                at_t = z_q * head_dim * pitch + (padded_q + block) * BLOCK_Q
                if INT8_DV:
                    p_codes, p_scale = quantize_tile(p, P_PER_KEY)
                    operand = load_transposed(do_t + at_t, queries, columns, pitch, head_dim, EVEN)
                    part = tl.dot(interleave(p_codes), operand, out_dtype=tl.int32).to(tl.float32)
                    if DO_CHANNEL:
                        channel = tl.load(
                            do_scale + (block_0 + block) * head_dim + columns, mask=columns < head_dim, other=0
                        )
                        part = part * channel[None, :]
                    else:
                        p_scale = p_scale * tl.load(do_scale + block_0 + block)
                    if P_PER_KEY:
                        acc_v += part * p_scale[:, None]
                    else:
                        acc_v += part * p_scale
                else:
                    acc_v = dot_16bit(p.to(do_tile.dtype), do_tile, acc_v)
                if q_mean is not None:
                    acc_k += tl.sum(ds, 1)[:, None] * mu[None, :]
                if INT8_DK:
                    if Q_TOKEN:
                        ds = ds * row_scale[None, :]
                    ds_codes, ds_scale = quantize_tile(ds, DS_PER_KEY)
                    if not Q_TOKEN:
                        ds_scale = ds_scale * tl.load(q_scale + z_q * total_q + start_q + first_q)
                    operand = load_transposed(q_t + at_t, queries, columns, pitch, head_dim, EVEN)
                    part = tl.dot(interleave(ds_codes), operand, out_dtype=tl.int32).to(tl.float32)
                    if DS_PER_KEY:
                        acc_k += part * ds_scale[:, None]
                    else:
                        acc_k += part * ds_scale
                else:
                    rows_at = q_rows + batch_64 * rows_b + head.to(tl.int64) * rows_h
                    rows_at += (start_q + first_q).to(tl.int64) * rows_n
                    operand = load_rows(rows_at, queries, columns, rows_n, left, head_dim, not masked, EVEN)
                    acc_k = dot_16bit(ds.to(operand.dtype), operand, acc_k)

    out = batch_64 * dk_b + head_k.to(tl.int64) * dk_h + at_k * dk_n
    out = out + keys[:, None] * dk_n + columns[None, :]
    written = (keys < left_k)[:, None] & (columns[None, :] < head_dim)
    tl.store(dk + out, (acc_k * scale).to(dk.dtype.element_ty), mask=written)
    tl.store(dv + out, acc_v.to(dv.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def dq_kernel(
    q,
    k,
    v,
    do,
    q_scale,
    k_scale,
    k_t,
    k_rows,
    lse2,
    delta,
    q_mean,
    k_exact,
    k_mean,
    dq,
    key_mask,
    cu_seqlens_q,
    cu_seqlens_k,
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
    total_q,
    total_k,
    blocks_q,
    blocks_k,
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
    PAD_Q: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One block of queries of one head. BLOCK_K is the recipe's; PAD_Q is the block that lse2 and delta are padded to.

    q, k: operands of S. k_t: transposed codes where dQ is INT8; k_rows: its 16-bit operand otherwise.
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
    row_lse = tl.load(lse2 + padded_q + queries, mask=inside, other=float("inf"))
    row_delta = tl.load(delta + padded_q + queries, mask=inside, other=0)
    scale_2 = scale * LOG2_E
    if INT8_S:
        row_scale = tl.load(q_scale + z_q * total_q + at_q + queries, mask=inside, other=0) * scale_2
    k += batch_64 * k_b + head_k.to(tl.int64) * k_h + start_k.to(tl.int64) * k_n
    v += batch_64 * v_b + head_k.to(tl.int64) * v_h + start_k.to(tl.int64) * v_n
    if INT8_S or INT8_DQ:
        k_scale += z_k * total_k + start_k
    if INT8_DQ:
        pitch = blocks_k * BLOCK_K
        k_t += z_k * head_dim * pitch + padded_block(start_k, batch, BLOCK_K, VARLEN) * BLOCK_K
    else:
        k_rows += batch_64 * rows_b + head_k.to(tl.int64) * rows_h + start_k.to(tl.int64) * rows_n
    if q_mean is not None:
        mu_at = q_mean + (z_q * blocks_q + padded_block(start_q, batch, PAD_Q, VARLEN) + block_q) * head_dim
        mu = tl.load(mu_at + columns, mask=columns < head_dim, other=0)
        k_exact += batch_64 * exact_b + head_k.to(tl.int64) * exact_h + start_k.to(tl.int64) * exact_n
        k_mean += (batch * heads_k + head_k).to(tl.int64) * head_dim
        shift = tl.load(k_mean + columns, mask=columns < head_dim, other=0)
    if key_mask is not None:
        key_mask += batch_64 * tokens_k

    begin, full_begin, full_end, end = block_range(
        first_q, length_k, lower, upper, BLOCK_Q, BLOCK_K, HAS_LOWER, HAS_UPPER, key_mask is not None
    )
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for masked in tl.static_range(2):
        count = full_end - full_begin
        if masked:
            count = end - begin - count
        for i in tl.range(0, count):
            if masked:
                block = begin + i + tl.where(begin + i >= full_begin, full_end - full_begin, 0)
            else:
                block = full_begin + i
            first_k = block * BLOCK_K
            first_64 = first_k.to(tl.int64)
            left = length_k - first_k
            k_tile = load_rows(k + first_64 * k_n, keys, columns, k_n, left, head_dim, not masked, EVEN)
            if INT8_S or (INT8_DQ and K_TOKEN):
                if masked:
                    key_scale = tl.load(k_scale + first_k + keys, mask=keys < left, other=0)
                else:
                    key_scale = tl.load(k_scale + first_k + keys)
            if INT8_S:
                s = tl.dot(q_tile, k_tile.T, out_dtype=tl.int32).to(tl.float32) * key_scale[None, :]
                if q_mean is None:
                    s = s * row_scale[:, None] - row_lse[:, None]
                else:
                    s = s * row_scale[:, None]
            else:
                s = dot_16bit(q_tile, k_tile.T) * scale_2
                if q_mean is None:
                    s = s - row_lse[:, None]
            if q_mean is not None:
                exact = load_rows(k_exact + first_64 * exact_n, keys, columns, exact_n, left, head_dim, False, EVEN)
                bias = tl.sum((exact.to(tl.float32) - shift[None, :]) * mu[None, :], 1) * scale_2
                s = s + bias[None, :] - row_lse[:, None]
            p = tl.exp2(s)
            if masked:
                keep = (
                    visible(
                        (first_k + keys)[None, :] - (first_q + queries)[:, None], lower, upper, HAS_LOWER, HAS_UPPER
                    )
                    & (keys < left)[None, :]
                )
                if key_mask is not None:
                    keep = keep & (tl.load(key_mask + first_k + keys, mask=keys < left, other=0) != 0)[None, :]
                p = tl.where(keep, p, 0.0)
            v_tile = load_rows(v + first_64 * v_n, keys, columns, v_n, left, head_dim, not masked, EVEN)
            dp = dot_16bit(do_tile, v_tile.T)
            ds = p * (dp - row_delta[:, None])
            if key_mask is not None:
                ds = tl.where(keep, ds, 0.0)
            if INT8_DQ:
                if K_TOKEN:
                    ds = ds * key_scale[None, :]
                ds_codes, ds_scale = quantize_tile(ds, DS_PER_QUERY)
                if not K_TOKEN:
                    ds_scale = ds_scale * tl.load(k_scale + first_k)
                operand = load_transposed(k_t + first_k, keys, columns, pitch, head_dim, EVEN)
                part = tl.dot(interleave(ds_codes), operand, out_dtype=tl.int32).to(tl.float32)
                if DS_PER_QUERY:
                    acc += part * ds_scale[:, None]
                else:
                    acc += part * ds_scale
            else:
                operand = load_rows(
                    k_rows + first_64 * rows_n, keys, columns, rows_n, left, head_dim, not masked, EVEN
                )
                acc = dot_16bit(ds.to(operand.dtype), operand, acc)

    out = dq + batch_64 * dq_b + head.to(tl.int64) * dq_h + at_q * dq_n
    out = out + queries[:, None] * dq_n + columns[None, :]
    tl.store(out, (acc * scale).to(dq.dtype.element_ty), mask=inside[:, None] & (columns[None, :] < head_dim))
