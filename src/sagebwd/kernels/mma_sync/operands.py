"""Passes beside the CUDA kernels: scales by pairs before forward, gradients from FP32 sums after backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Call, Packing
from sagebwd.kernels.common.rotation import store_turned
from sagebwd.kernels.common.strided import Strided, pitch_of, row_of
from sagebwd.kernels.common.tile import (
    ROUND,
    block_and_head,
    interleave_rows,
    load_rows,
    padded_block,
    to_16bit,
    whose,
)
from sagebwd.kernels.common.transposed import NO_SPECIALIZE, launch_pass
from sagebwd.kernels.mma_sync.variant import KEYS, QUERIES

# How a block of FP32 sums lies.
IN_ROWS, IN_REGISTERS, PAIRS_IN_REGISTERS = map(tl.constexpr, range(3))


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def pair_scales_kernel(
    k_scale,
    v_scale,
    column_sum,
    v,
    v_mean,
    key_mask,
    first_keys,
    cu_seqlens,
    k_scales,
    v_scales,
    first_values,
    heads,
    tokens,
    total,
    blocks,
    grid,
    head_dim: tl.constexpr,
    FIRST: tl.constexpr,
    SPLIT: tl.constexpr,
    VARLEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Scales of a block of keys, and of V's channels there, as `forward` in cuda/forward.cu reads them.

    Of each pair the two scales, then what an INT32 sum lacks that starts from ROUND, times them: ROUND itself of S,
    and of P V, whose codes are less 128, 128 times the codes' column sum, of which each of SPLIT sums takes its
    part. A key that nobody sees has 0 and -inf; so
    have the FIRST ones, which are apart, or those that first_keys (batch, FIRST) names.

    first_values (batch, heads, D, FIRST): V of several that are apart, less its mean, tokens interleaved; of v,
    `Strided`. Where there are fewer it is 0.
    """
    number, program = block_and_head(grid)
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    first = number * BLOCK
    if first >= length:
        return
    block = z * blocks + padded_block(start, batch, BLOCK, VARLEN) + number
    keys = first + tl.arange(0, BLOCK)
    inside = keys < length
    seen = inside
    if key_mask is not None:
        seen = seen & (tl.load(key_mask + batch.to(tl.int64) * tokens + keys, mask=inside, other=0) != 0)
    if FIRST:
        if first_keys is not None:  # each key up to the last of them that a mask leaves is one
            seen = seen & (keys > tl.load(first_keys + batch * FIRST + (FIRST - 1)))
        else:
            seen = seen & (keys >= FIRST)
    scale = tl.load(k_scale + z * total + start + keys, mask=inside, other=0)
    scale = tl.where(seen, scale, 0.0)
    lacking = tl.where(seen, scale * -ROUND, float("-inf"))
    packed = tl.join(scale, lacking).reshape(BLOCK // 2, 2, 2).permute(0, 2, 1)
    tl.store(k_scales + block * (BLOCK * 2) + tl.arange(0, BLOCK * 2), packed.reshape(BLOCK * 2))
    columns = tl.arange(0, BLOCK_D)
    scale = tl.load(v_scale + block * head_dim + columns)
    lacking = (tl.load(column_sum + block * head_dim + columns) / SPLIT - ROUND) * scale
    packed = tl.join(scale, lacking).reshape(BLOCK_D // 2, 2, 2).permute(0, 2, 1)
    tl.store(v_scales + block * (head_dim * 2) + tl.arange(0, BLOCK_D * 2), packed.reshape(BLOCK_D * 2))
    if first_values is not None:  # noqa: SIM102, settled at compile time
        if number == 0:
            nth = tl.arange(0, FIRST)
            their = nth
            if first_keys is not None:
                their = tl.load(first_keys + batch * FIRST + nth)
            rows = row_of(v, batch, head, start)
            tile = load_rows(rows, their.to(tl.int64), columns, pitch_of(v), length, head_dim, False, True)
            if v_mean is not None:
                tile = tile.to(tl.float32) - tl.load(v_mean + program * head_dim + columns)[None, :]
                tile = tl.where((their < length)[:, None], tile, 0.0)
            tile = interleave_rows(to_16bit(tile.to(tl.float32), v.at.dtype.element_ty))
            at = first_values + (program.to(tl.int64) * head_dim + columns[:, None]) * FIRST + nth[None, :]
            tl.store(at, tl.trans(tile))


def pair_scales(
    call: Call, k_scale: Tensor, v_scale: Tensor, column_sum: Tensor, v: Tensor, v_mean: Tensor | None,
    first_keys: Tensor | None, split: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """k_scales (heads_k, blocks, 256) and v_scales (heads_k, blocks, 2 D), FP32, and first_values or None.

    first_values (batch, heads_k, D, 16), as v, where the recipe has 16 keys apart; see `pair_scales_kernel`.
    """
    keys, device, count = call.keys, k_scale.device, call.recipe.first_keys
    k_scales = keys.padded(KEYS, 2 * KEYS, dtype=torch.float32, device=device)
    v_scales = keys.padded(KEYS, 2 * call.head_dim, dtype=torch.float32, device=device)
    first_values = None
    if count > 1:
        first_values = torch.empty(keys.batch, keys.heads, call.head_dim, count, dtype=v.dtype, device=device)
    launch_pass(
        pair_scales_kernel, keys, call.head_dim, KEYS,
        k_scale, v_scale, column_sum, Strided.of(v, keys), v_mean, call.key_mask, first_keys, keys.cu_seqlens,
        k_scales, v_scales, first_values, FIRST=count, SPLIT=split,
    )  # fmt: skip
    return k_scales, v_scales, first_values


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def finish_kernel(
    sums,
    cu_seqlens,
    out,
    scale,
    heads,
    tokens,
    total,
    blocks,
    grid,
    head_dim: tl.constexpr,
    TURNED: tl.constexpr,
    ORDER: tl.constexpr,
    VARLEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Scale a block of FP32 sums (heads, blocks, BLOCK, D), rotate it back and write it to out, `Strided`.

    ORDER: of a block, IN_ROWS; IN_REGISTERS of a product, (rows / 16, D / 8, half, channel, row, pair): row
    16 m + 8 h + g and channel 8 n + 2 t + b at [m, n, h, b, g, t]; PAIRS_IN_REGISTERS: channel 16 n + 8 e + 2 t + b at
    [m, n, h, g, t, e, b]. TURNED: channels of the rotation, or 0.
    """
    number, program = block_and_head(grid)
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    first = number * BLOCK
    if first >= length:
        return
    sums += (z * blocks + padded_block(start, batch, BLOCK, VARLEN) + number).to(tl.int64) * (BLOCK * head_dim)
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    inside = first + rows < length
    if ORDER == IN_REGISTERS:
        tile = tl.load(sums + tl.arange(0, BLOCK * BLOCK_D)).reshape(BLOCK // 16, BLOCK_D // 8, 2, 2, 8, 4)
        tile = tile.permute(0, 2, 4, 1, 5, 3).reshape(BLOCK, BLOCK_D)
    elif ORDER == PAIRS_IN_REGISTERS:
        tile = tl.load(sums + tl.arange(0, BLOCK * BLOCK_D)).reshape(BLOCK // 16, BLOCK_D // 16, 2, 8, 4, 2, 2)
        tile = tile.permute(0, 2, 3, 1, 5, 4, 6).reshape(BLOCK, BLOCK_D)
    else:
        tile = load_rows(sums, rows, columns, BLOCK_D, length - first, head_dim, False, True)
    at = row_of(out, batch, head, start + first)
    if TURNED:
        store_turned(at, rows, pitch_of(out), inside, tile, scale, head_dim, TURNED, BLOCK_D)
    else:
        at = at + rows[:, None] * pitch_of(out) + columns[None, :]
        tl.store(at, to_16bit(tile * scale, out.at.dtype.element_ty), mask=inside[:, None])


def finish(call: Call, packing: Packing, sums: Tensor, out: Tensor, scale: float, order: tl.constexpr) -> None:
    """Write dq or dk from sums in an order of `finish_kernel`: dk's IN_ROWS, dq's of registers."""
    block = KEYS if order == IN_ROWS else QUERIES
    launch_pass(
        finish_kernel, packing, call.head_dim, block, sums, packing.cu_seqlens, Strided.of(out, packing), scale,
        TURNED=call.turned, ORDER=order.value,
    )  # fmt: skip
