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
    block_range,
    dot_16bit,
    exp2,
    interleave,
    load_block,
    load_rows,
    load_transposed,
    load_row_values,
    padded_block,
    rows_of,
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
def largest(x, PER_ROW: tl.constexpr):
    """Largest magnitude of each row of a score tile, or of all of it; a lone NaN may be lost."""
    if PER_ROW:
        return tl.max(tl.abs(x), 1)
    else:
        return tl.max(tl.max(tl.abs(x), 1), 0)


@triton.jit
def largest_bits(p, PER_ROW: tl.constexpr):
    """The same where nothing is negative; NaN wins, as its bits are the largest."""
    bits = p.to(tl.int32, bitcast=True)
    if PER_ROW:
        return tl.max(bits, 1).to(tl.float32, bitcast=True)
    else:
        return tl.max(tl.max(bits, 1), 0).to(tl.float32, bitcast=True)


@triton.jit
def codes_of(x, amax, PER_ROW: tl.constexpr):
    """psi's codes of a score tile."""
    inverse = 127.0 / tl.maximum(amax, TINY)
    if PER_ROW:
        return to_int8(x * inverse[:, None])
    else:
        return to_int8(x * inverse)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
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
    TMA: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One block of keys of one key head, summed over the query heads that share it. BLOCK_Q is the recipe's.

    q, k: operands of S, codes or 16-bit rows. q_t, do_t: transposed codes, where dK and dV are INT8. q_rows: the 16-bit
    operand of dK otherwise. row_values: from `grad_out_kernel`, padded to blocks of BLOCK_Q.
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
    padded_q = padded_block(start_q, batch, BLOCK_Q, VARLEN)
    for member in tl.range(0, group):
        head = head_k * group + member
        z_q = head.to(tl.int64) if VARLEN else batch.to(tl.int64) * heads_k * group + head
        q_head = rows_of(q, batch, head, start_q, q_b, q_h, q_n, TMA)
        do_head = rows_of(do, batch, head, start_q, do_b, do_h, do_n, TMA)
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
                left = length_q - first_q
                q_tile = load_block(
                    q_head, batch, head, start_q, first_q, length_q, q_n, head_dim, not masked,
                    BLOCK_Q, BLOCK_D, VARLEN, TMA,
                )  # fmt: skip
                row_lse, row_delta, row_scale = load_row_values(row_values, block_0 + block, BLOCK_Q)
                if not Q_TOKEN:
                    block_scale = tl.max(row_scale, 0)
                if INT8_S:
                    s = tl.dot(k_tile, q_tile.T, out_dtype=tl.int32).to(tl.float32)
                    if Q_TOKEN:
                        s = s * row_scale[None, :] * key_scale[:, None]
                    else:
                        s = s * (key_scale * block_scale)[:, None]
                else:
                    s = dot_16bit(k_tile, q_tile.T) * scale_2
                if q_mean is not None:
                    mu = tl.load(q_mean + (block_0 + block) * head_dim + columns, mask=columns < head_dim, other=0)
                    exact = load_rows(k_exact, keys, columns, exact_n, left_k, head_dim, False, EVEN).to(tl.float32)
                    bias = tl.sum((exact - shift[None, :]) * mu[None, :], 1) * scale_2
                    s = s + bias[:, None]
                p = exp2(s - row_lse[None, :])
                if masked:
                    keep = visible(
                        (first_k + keys)[:, None] - (first_q + queries)[None, :], lower, upper, HAS_LOWER, HAS_UPPER
                    )
                    p = tl.where(keep & keep_key[:, None], p, 0.0)
                do_tile = load_block(
                    do_head, batch, head, start_q, first_q, length_q, do_n, head_dim, not masked,
                    BLOCK_Q, BLOCK_D, VARLEN, TMA,
                )  # fmt: skip
                dp = dot_16bit(v_tile, do_tile.T)
                ds = p * (dp - row_delta[None, :])
                if key_mask is not None:
                    ds = tl.where(keep_key[:, None], ds, 0.0)
                if q_mean is not None:
                    acc_k += tl.sum(ds, 1)[:, None] * mu[None, :]
                # both operands first: 8 bits of P and dS take fewer registers than 32 while a product runs
                p_max = largest_bits(p, P_PER_KEY)
                if INT8_DV:
                    p_codes = codes_of(p, p_max, P_PER_KEY)
                    p_scale = p_max * (1 / 127.0)
                if INT8_DK:
                    if Q_TOKEN:
                        ds = ds * row_scale[None, :]
                    ds_max = largest(ds, DS_PER_KEY)
                    ds_codes = codes_of(ds, ds_max, DS_PER_KEY)
                    # a NaN in any query's lse or delta shows in P, and must in dK
                    ds_scale = ds_max * (1 / 127.0) + (p_max if P_PER_KEY == DS_PER_KEY else tl.max(p_max, 0)) * 0
                    if not Q_TOKEN:
                        ds_scale = ds_scale * block_scale
                if INT8_DV:
                    operand = load_transposed(do_t, z_q, blocks_q, padded_q + block, head_dim, BLOCK_Q, BLOCK_D, TMA)
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
                if INT8_DK:
                    operand = load_transposed(q_t, z_q, blocks_q, padded_q + block, head_dim, BLOCK_Q, BLOCK_D, TMA)
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
    k_scale,
    k_t,
    k_rows,
    row_values,
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
    TMA: tl.constexpr,
    PAD_Q: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One block of queries of one head. BLOCK_K is the recipe's; PAD_Q is the block row_values are padded to.

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
        for i in tl.range(0, count):
            if masked:
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
            p = exp2(s - row_lse[:, None])
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
            v_tile = load_block(
                v, batch, head_k, start_k, first_k, length_k, v_n, head_dim, not masked,
                BLOCK_K, BLOCK_D, VARLEN, TMA,
            )  # fmt: skip
            dp = dot_16bit(do_tile, v_tile.T)
            ds = p * (dp - row_delta[:, None])
            if masked and key_mask is not None:
                ds = tl.where(keep, ds, 0.0)
            if INT8_DQ:
                if K_TOKEN:
                    ds = ds * key_scale[None, :]
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
                acc = dot_16bit(ds.to(operand.dtype), operand, acc)

    out = dq + batch_64 * dq_b + head.to(tl.int64) * dq_h + at_q * dq_n
    out = out + queries[:, None] * dq_n + columns[None, :]
    tl.store(out, (acc * scale).to(dq.dtype.element_ty), mask=inside[:, None] & (columns[None, :] < head_dim))
