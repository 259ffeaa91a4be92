"""Quantisation passes: psi, transposed INT8 copies, and what backward needs of dO and lse.

All are bound by memory: each reads its tensor once and writes what the attention kernels will read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sagebwd.kernels.tile import (
    LOG2_E,
    ROUND_BITS,
    abs_max,
    divide,
    interleave_rows,
    load_rows,
    load_transposed,
    padded_block,
    pair_rows,
    psi_scale,
    to_16bit,
    to_int8,
    whose,
)

NO_SPECIALIZE = ["tokens", "total", "blocks"]


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def quantize_kernel(
    x,
    mean,
    sequence_scale,
    key_mask,
    first_key,
    cu_seqlens,
    block_mean,
    codes,
    token_scale,
    padded_scale,
    block_scale,
    transposed,
    column_sum,
    smoothed,
    first_row,
    first_scale,
    stride_b,
    stride_h,
    stride_t,
    out_b,
    out_h,
    out_t,
    heads,
    tokens,
    total,
    blocks,
    head_dim: tl.constexpr,
    GROUP: tl.constexpr,
    VARLEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Smooth and quantise one block of tokens; each output is written if its pointer is not None.

    x: rows. mean (batch, heads, D): subtracted. block_mean (heads, blocks, D): the block's own mean, subtracted and
    written. codes, smoothed: rows, contiguous. token_scale: one a token; padded_scale: the same, in whole blocks.
    block_scale: one a block, or one a channel of it. sequence_scale (batch, heads, D): read where GROUP is "sequence".
    transposed: INT8, see `tile`. column_sum: 128 times the sum of a block's codes, by column, exact in FP32; as int32
    ROUND's bits are added, so that its bits are the FP32 of ROUND + that sum.

    first_row (batch, heads, D): the sequence's first token, smoothed, or as int8 its codes, with its scale in
    first_scale (batch, heads) if not None. first_key (batch,): which token that is, where not the first of all.
    """
    batch, head, z, start, length = whose(tl.program_id(1), heads, cu_seqlens, tokens, VARLEN)
    first = tl.program_id(0) * BLOCK
    if first >= length:
        return
    block = z * blocks + padded_block(start, batch, BLOCK, VARLEN) + tl.program_id(0)
    rows = first + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    EVEN: tl.constexpr = head_dim == BLOCK_D
    inside = rows < length
    keep = inside
    x += batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + (start + first).to(tl.int64) * stride_t
    tile = load_rows(x, tl.arange(0, BLOCK), columns, stride_t, length - first, head_dim, False, EVEN).to(tl.float32)
    if mean is not None:
        tile -= tl.load(mean + tl.program_id(1) * head_dim + columns, mask=columns < head_dim, other=0)[None, :]
    if key_mask is not None:
        keep = keep & (tl.load(key_mask + batch.to(tl.int64) * tokens + rows, mask=inside, other=0) != 0)
    if block_mean is not None:
        mu = tl.sum(tile, 0) / tl.minimum(length - first, BLOCK).to(tl.float32)
        tl.store(block_mean + block * head_dim + columns, mu, mask=columns < head_dim)
        tile -= mu[None, :]
    if mean is not None or key_mask is not None or block_mean is not None:
        tile = tl.where(keep[:, None], tile, 0.0)

    row = z * total + start + rows
    out = batch.to(tl.int64) * out_b + head.to(tl.int64) * out_h + (start + first).to(tl.int64) * out_t
    out = out + tl.arange(0, BLOCK)[:, None] * out_t + columns[None, :]
    written = inside[:, None] & (columns[None, :] < head_dim)
    if smoothed is not None:
        tl.store(smoothed + out, to_16bit(tile, smoothed.dtype.element_ty), mask=written)
    if GROUP == "token":
        amax = abs_max(tile, 1)
    elif GROUP == "lane":
        lanes = abs_max(abs_max(tile, 1).reshape(BLOCK // 8, 4, 2), 2)
        lanes = abs_max(lanes, 0)[None, :, None].broadcast_to(BLOCK // 8, 4, 2)
        amax = lanes.reshape(BLOCK)
    elif GROUP == "block":
        amax = abs_max(abs_max(tile, 1), 0)
    elif GROUP == "channel":
        amax = abs_max(tile, 0)
    if GROUP == "sequence":
        scale = tl.load(sequence_scale + tl.program_id(1) * head_dim + columns, mask=columns < head_dim, other=1)
    else:
        scale = psi_scale(amax)
    inverse = 1.0 / scale
    if GROUP == "token" or GROUP == "lane":
        code = to_int8(divide(tile, scale[:, None], inverse[:, None]))
        tl.store(token_scale + row, scale, mask=inside)
        if padded_scale is not None:
            tl.store(padded_scale + block * BLOCK + tl.arange(0, BLOCK), scale)
    elif GROUP == "block":
        code = to_int8(divide(tile, scale, inverse))
        repeated = tl.zeros((BLOCK,), tl.float32) + scale
        if token_scale is not None:
            tl.store(token_scale + row, repeated, mask=inside)
        if padded_scale is not None:
            tl.store(padded_scale + block * BLOCK + tl.arange(0, BLOCK), repeated)
        if block_scale is not None:
            tl.store(block_scale + block, scale)
    else:
        code = to_int8(divide(tile, scale[None, :], inverse[None, :]))
        if GROUP == "channel":
            tl.store(block_scale + block * head_dim + columns, scale, mask=columns < head_dim)
    if codes is not None:
        tl.store(codes + out, code, mask=written)
    if first_row is not None:
        token = 0 * tokens
        if first_key is not None:
            token = tl.load(first_key + batch)
        if (token >= first) & (token < first + BLOCK):
            chosen = code.to(tl.int32) if first_row.dtype.element_ty == tl.int8 else tile
            chosen = tl.sum(tl.where((rows == token)[:, None], chosen, 0), 0).to(first_row.dtype.element_ty)
            tl.store(first_row + tl.program_id(1) * head_dim + columns, chosen, mask=columns < head_dim)
            if first_scale is not None:
                of_token = tl.zeros((BLOCK,), tl.float32) + scale
                tl.store(first_scale + tl.program_id(1), tl.sum(tl.where(rows == token, of_token, 0.0), 0))
    if transposed is not None:
        store_transposed(transposed, code, z, block, blocks, columns, head_dim, BLOCK)
    if column_sum is not None:
        # read again as it lies: of the codes themselves triton would make two, one a layout
        tl.debug_barrier()
        code = load_transposed(transposed, z, blocks, block - z * blocks, head_dim, BLOCK, BLOCK_D, False)
        total = tl.sum(code.to(tl.int32), 0) * 128
        if column_sum.dtype.element_ty == tl.int32:
            total += ROUND_BITS
        tl.store(
            column_sum + block * head_dim + columns, total.to(column_sum.dtype.element_ty), mask=columns < head_dim
        )


@triton.jit
def store_transposed(
    transposed, code, z, block, blocks, columns, head_dim: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr = False,
):  # fmt: skip
    """Write a block of codes (tokens, D) as (D, tokens), tokens interleaved or, PAIRS, in the order of `pair_rows`."""
    pitch = blocks * BLOCK
    at = transposed + z * head_dim * pitch + (block - z * blocks) * BLOCK
    at = at + columns[:, None] * pitch + tl.arange(0, BLOCK)[None, :]
    code = pair_rows(code) if PAIRS else interleave_rows(code)
    tl.store(at, tl.trans(code), mask=columns[:, None] < head_dim)


@triton.jit
def transpose(
    codes, stride_t, transposed, z, block, blocks, rows, head_dim: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write a block of INT8 rows, of which the first ``rows`` are there, as `store_transposed` does."""
    columns = tl.arange(0, BLOCK_D)
    tile = load_rows(codes, tl.arange(0, BLOCK), columns, stride_t, rows, head_dim, False, head_dim == BLOCK_D)
    store_transposed(transposed, tile, z, block, blocks, columns, head_dim, BLOCK)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def transpose_kernel(
    codes,
    token_scale,
    cu_seqlens,
    transposed,
    padded_scale,
    stride_b,
    stride_h,
    stride_t,
    heads,
    tokens,
    total,
    blocks,
    head_dim: tl.constexpr,
    VARLEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Saved INT8 rows to the transposed copy that backward reads; cheaper to remake than to keep.

    padded_scale: token_scale in whole blocks, if not None; 0 in the padding.
    """
    batch, head, z, start, length = whose(tl.program_id(1), heads, cu_seqlens, tokens, VARLEN)
    first = tl.program_id(0) * BLOCK
    if first >= length:
        return
    block = z * blocks + padded_block(start, batch, BLOCK, VARLEN) + tl.program_id(0)
    codes += batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + (start + first).to(tl.int64) * stride_t
    transpose(codes, stride_t, transposed, z, block, blocks, length - first, head_dim, BLOCK, BLOCK_D)
    if padded_scale is not None:
        local = tl.arange(0, BLOCK)
        scale = tl.load(token_scale + z * total + start + first + local, mask=first + local < length, other=0)
        tl.store(padded_scale + block * BLOCK + local, scale)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def grad_out_kernel(
    do,
    o,
    lse,
    dlse,
    cu_seqlens,
    q_scale,
    transposed,
    block_scale,
    rows,
    codes,
    codes_transposed,
    do_b,
    do_h,
    do_t,
    o_b,
    o_h,
    o_t,
    codes_b,
    codes_h,
    codes_t,
    heads,
    tokens,
    total,
    blocks,
    head_dim: tl.constexpr,
    GROUP: tl.constexpr,
    PLANES: tl.constexpr,
    VARLEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dO's codes and scale, and four FP32 values a query, padded to whole blocks: lse in base 2, delta, q_scale, 0.

    delta = rowsum(dO * O) - dlse. One load of four brings a block of them to the attention kernels; loads of fewer
    values than a program has threads are repeated by every thread. PLANES: they lie one after the other instead, a
    block of each: lse, q_scale, delta * q_scale, delta. lse is +inf where a query sees no key and in the
    padding, so that P comes out 0 there without a mask.

    codes: Q's saved ones, if not None; programs of a second plane of the grid write their transposed copy.
    """
    batch, head, z, start, length = whose(tl.program_id(1), heads, cu_seqlens, tokens, VARLEN)
    first = tl.program_id(0) * BLOCK
    if first >= length:
        return
    block = z * blocks + padded_block(start, batch, BLOCK, VARLEN) + tl.program_id(0)
    if codes is not None:  # noqa: SIM102, settled at compile time
        if tl.program_id(2) == 1:
            codes += batch.to(tl.int64) * codes_b + head.to(tl.int64) * codes_h
            codes += (start + first).to(tl.int64) * codes_t
            transpose(codes, codes_t, codes_transposed, z, block, blocks, length - first, head_dim, BLOCK, BLOCK_D)
            return
    local = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    EVEN: tl.constexpr = head_dim == BLOCK_D
    inside = first + local < length
    do += batch.to(tl.int64) * do_b + head.to(tl.int64) * do_h + (start + first).to(tl.int64) * do_t
    o += batch.to(tl.int64) * o_b + head.to(tl.int64) * o_h + (start + first).to(tl.int64) * o_t
    tile = load_rows(do, local, columns, do_t, length - first, head_dim, False, EVEN).to(tl.float32)
    out = load_rows(o, local, columns, o_t, length - first, head_dim, False, EVEN).to(tl.float32)

    row = z * total + start + first + local
    row_delta = tl.sum(tile * out, 1)
    if dlse is not None:
        row_delta -= tl.load(dlse + row, mask=inside, other=0).to(tl.float32)
    row_lse = tl.load(lse + row, mask=inside, other=float("-inf"))
    # + 0 * delta: backward looks for NaN in P, so it must be there even if O or dlse alone has it
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E) + row_delta * 0
    row_scale = row_delta * 0
    if q_scale is not None:
        row_scale = tl.load(q_scale + row, mask=inside, other=0)
    rows += block * BLOCK * 4
    if PLANES:
        tl.store(rows + local, row_lse)
        tl.store(rows + BLOCK + local, row_scale)
        tl.store(rows + 2 * BLOCK + local, row_delta * row_scale)
        tl.store(rows + 3 * BLOCK + local, row_delta)
    else:
        packed = tl.join(tl.join(row_lse, row_scale), tl.join(row_delta, row_delta * 0))
        tl.store(rows + tl.arange(0, BLOCK * 4), packed.reshape(BLOCK * 4))

    if GROUP == "block":
        amax = abs_max(abs_max(tile, 1), 0)
        scale = psi_scale(amax)
        code = to_int8(divide(tile, scale, 1.0 / scale))
        tl.store(block_scale + block, scale)
    else:
        amax = abs_max(tile, 0)
        scale = psi_scale(amax)
        code = to_int8(divide(tile, scale[None, :], (1.0 / scale)[None, :]))
        tl.store(block_scale + block * head_dim + columns, scale, mask=columns < head_dim)
    if transposed is not None:
        store_transposed(transposed, code, z, block, blocks, columns, head_dim, BLOCK)
