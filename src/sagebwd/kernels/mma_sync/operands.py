"""Passes beside the attention kernels: codes before forward, gradients from FP32 sums after backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Call, Packing
from sagebwd.kernels.common.rotation import store_turned
from sagebwd.kernels.common.strided import Strided, pitch_of, row_of
from sagebwd.kernels.common.tile import block_and_head, load_rows, padded_block, to_16bit, whose
from sagebwd.kernels.common.transposed import NO_SPECIALIZE, launch_pass
from sagebwd.kernels.mma_sync.variant import KEYS, QUERIES, ROWS_OF_CODES
from sagebwd.kernels.runtime.cuda import CudaKernel
from sagebwd.kernels.runtime.program import launch

# How a block of FP32 sums lies.
IN_ROWS, IN_REGISTERS, PAIRS_IN_REGISTERS = map(tl.constexpr, range(3))


class Operands(NamedTuple):
    """What `forward` in cuda/forward.cu reads, as cuda/quantize.cu leaves it."""

    q8: Tensor  # codes, of q's shape
    q_scale: Tensor
    k8: Tensor
    k_scale: Tensor
    k_scales: Tensor  # (heads_k, blocks, 256) FP32, by pairs
    v8_t: Tensor  # (heads_k, D, blocks 128), tokens interleaved
    v_scales: Tensor  # (heads_k, blocks, 2 D) FP32, by pairs
    first_values: Tensor | None  # (batch, heads_k, D) FP32, or (batch, heads_k, D, 16) as v, of keys that are apart


def quantize(
    call: Call, kernel: CudaKernel, q: Tensor, k: Tensor, v: Tensor, k_mean: Tensor | None, v_mean: Tensor | None,
    first_keys: Tensor | None,
) -> Operands:  # fmt: skip
    """Codes of q, k and v, in one launch of `quantize` in cuda/quantize.cu."""
    queries, keys, count, device = call.queries, call.keys, call.recipe.first_keys, q.device
    first_values = None
    if count:
        dtype, several = (torch.float32, ()) if count == 1 else (v.dtype, (count,))
        first_values = torch.empty(keys.batch, keys.heads, call.head_dim, *several, dtype=dtype, device=device)
    made = Operands(
        torch.empty(q.shape, dtype=torch.int8, device=device), queries.per_token(device),
        torch.empty(k.shape, dtype=torch.int8, device=device), keys.per_token(device),
        keys.padded(KEYS, 2 * KEYS, dtype=torch.float32, device=device),
        keys.padded(KEYS, KEYS * call.head_dim, dtype=torch.int8, device=device),
        keys.padded(KEYS, 2 * call.head_dim, dtype=torch.float32, device=device), first_values,
    )  # fmt: skip
    grids = queries.grid(ROWS_OF_CODES), keys.grid(ROWS_OF_CODES), keys.grid(KEYS)
    programs = queries.batch * (grids[0] * queries.heads + (grids[1] + grids[2]) * keys.heads)
    launch(
        kernel, (programs,), q, *queries.strides(q), k, *keys.strides(k), v, *keys.strides(v), k_mean, v_mean,
        call.key_mask, first_keys, made.q8, *queries.strides(made.q8), made.q_scale, made.k8, *keys.strides(made.k8),
        made.k_scale, made.k_scales, made.v8_t, made.v_scales, first_values, queries.cu_seqlens, keys.cu_seqlens,
        queries.batch, queries.heads, keys.heads, queries.tokens, keys.tokens, queries.total, keys.total,
        keys.blocks(KEYS), *grids,
    )  # fmt: skip
    return made


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
