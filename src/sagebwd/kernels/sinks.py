"""`sagebwd.sinks` on a GPU: one pass over Q and O after a forward, one over dO and O in a backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Packing, padded_head_dim
from sagebwd.kernels.common.strided import Strided, pitch_of, row_of
from sagebwd.kernels.common.tile import LN_2, LOG2_E, block_in_sequence, load_rows, to_16bit, whose
from sagebwd.kernels.runtime.alignment import aligned_rows, contiguous
from sagebwd.kernels.runtime.program import launch, zeros
from sagebwd.sinks import FARTHEST

# Queries of a program.
BLOCK = 64
_FARTHEST = tl.constexpr(FARTHEST)


@triton.jit
def mean_of(k_mean, batch, head, heads, group, columns, head_dim):
    """K's mean that a head's queries meet, FP32."""
    at = k_mean + (batch.to(tl.int64) * (heads // group) + head // group) * head_dim
    return tl.load(at + columns, mask=columns < head_dim, other=0)


@triton.jit
def taken_off(q, k_mean, batch, head, heads, group, token, local, left, head_dim: tl.constexpr, BLOCK_D: tl.constexpr):
    """q K's mean of queries from a token on: what K-smoothing takes off their scores, but for the softmax scale."""
    columns = tl.arange(0, BLOCK_D)
    q_at = row_of(q, batch, head, token)
    q_tile = load_rows(q_at, local, columns, pitch_of(q), left, head_dim, False, head_dim == BLOCK_D).to(tl.float32)
    mean = mean_of(k_mean, batch, head, heads, group, columns, head_dim)
    return tl.sum(q_tile * mean[None, :], 1)


@triton.jit(do_not_specialize=["tokens", "total", "grid"])
def weigh_kernel(
    o, lse, weight, q, k_mean, sinks, cu_seqlens, scale, heads, group, tokens, total, grid, head_dim: tl.constexpr,
    value_dim: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A block of queries of a head; o, q: `Strided`, o and lse overwritten; k_mean (B, heads / group, head_dim)."""
    number, program = block_in_sequence(grid, heads, cu_seqlens, tokens, BLOCK, VARLEN)
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    first = number * BLOCK
    if first >= length:
        return
    local = tl.arange(0, BLOCK)
    values = tl.arange(0, BLOCK_V)
    inside = first + local < length
    left = length - first
    row = z * total + start + first + local
    row_lse = tl.load(lse + row, mask=inside, other=float("-inf"))
    blind = row_lse == float("-inf")
    sink = tl.load(sinks + head).to(tl.float32)
    above = sink - row_lse
    if k_mean is not None:
        above -= taken_off(q, k_mean, batch, head, heads, group, start + first, local, left, head_dim, BLOCK_D) * scale
    above = tl.where(blind, float("inf"), above)
    # 1 / (1 + e^|x|) and its complement, of which neither overflows
    small = tl.exp2(-tl.abs(above) * LOG2_E)
    less, more = small / (1 + small), 1 / (1 + small)
    upward = tl.where(above > 0, above, 0) + tl.log2(1 + small) * LN_2
    upward = tl.where(upward > _FARTHEST, _FARTHEST, upward)  # a minimum would drop NaN
    kept = tl.where(above > 0, less, more)
    o_at = row_of(o, batch, head, start + first)
    tile = load_rows(o_at, local, values, pitch_of(o), left, value_dim, False, value_dim == BLOCK_V)
    tl.debug_barrier()  # several warps read the lse and O that one of them overwrites
    tl.store(weight + row, tl.where(above > 0, more, less), mask=inside)
    tl.store(lse + row, tl.where(blind, row_lse, row_lse + upward), mask=inside)
    place = o_at + local[:, None] * pitch_of(o) + values[None, :]
    there = inside[:, None] & (values < value_dim)[None, :]
    tl.store(place, to_16bit(tile.to(tl.float32) * kept[:, None], tile.dtype), mask=there)


@triton.jit(do_not_specialize=["tokens", "total", "grid"])
def gradient_kernel(
    do, dlse, o, weight, dq, k_mean, found, cu_seqlens, scale, heads, group, tokens, total, grid,
    head_dim: tl.constexpr, value_dim: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The share of a block of queries of a head in its sink's gradient, (heads over the batch, grid) FP32.

    do, o, dq: `Strided`; dq is added to where there is a k_mean.
    """
    number, program = block_in_sequence(grid, heads, cu_seqlens, tokens, BLOCK, VARLEN)
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    first = number * BLOCK
    if first >= length:
        return
    local, values = tl.arange(0, BLOCK), tl.arange(0, BLOCK_V)
    inside = first + local < length
    left = length - first
    EVEN: tl.constexpr = value_dim == BLOCK_V
    do_at, o_at = row_of(do, batch, head, start + first), row_of(o, batch, head, start + first)
    do_tile = load_rows(do_at, local, values, pitch_of(do), left, value_dim, False, EVEN).to(tl.float32)
    o_tile = load_rows(o_at, local, values, pitch_of(o), left, value_dim, False, EVEN).to(tl.float32)
    change = -tl.sum(do_tile * o_tile, 1)
    row = z * total + start + first + local
    if dlse is not None:
        change += tl.load(dlse + row, mask=inside, other=0).to(tl.float32)
    change *= tl.load(weight + row, mask=inside, other=0)
    tl.store(found + tl.program_id(0), tl.sum(change, 0))
    if k_mean is not None:
        columns = tl.arange(0, BLOCK_D)
        mean = mean_of(k_mean, batch, head, heads, group, columns, head_dim)
        dq_at = row_of(dq, batch, head, start + first)
        tile = load_rows(dq_at, local, columns, pitch_of(dq), left, head_dim, False, head_dim == BLOCK_D)
        added = to_16bit(tile.to(tl.float32) - change[:, None] * (mean * scale)[None, :], tile.dtype)
        place = dq_at + local[:, None] * pitch_of(dq) + columns[None, :]
        tl.debug_barrier()  # another warp may read the dQ that this one overwrites
        tl.store(place, added, mask=inside[:, None] & (columns < head_dim)[None, :])


def weigh(
    o: Tensor, lse: Tensor, q: Tensor, k_mean: Tensor | None, sinks: Tensor, scale: float, offsets: Tensor | None,
    longest: int,
) -> Tensor:  # fmt: skip
    """`sagebwd.sinks.weigh`."""
    q, sinks = aligned_rows(q), contiguous(sinks)
    packing = Packing.of(q, offsets, longest)
    weight = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    _launch(
        weigh_kernel, packing, k_mean, (q.shape[-1], o.shape[-1]),
        Strided.of(o, packing), lse, weight, Strided.of(q, packing), k_mean, sinks, offsets, scale,
    )  # fmt: skip
    return weight


def gradient_by_block(
    do: Tensor, dlse: Tensor | None, o: Tensor, weight: Tensor, dq: Tensor, k_mean: Tensor | None, scale: float,
    offsets: Tensor | None, longest: int,
) -> Tensor:  # fmt: skip
    """`sagebwd.sinks.gradient` by block of queries, (heads over the batch, blocks); adds to dq."""
    packing = Packing.of(o, offsets, longest)
    shape = packing.heads_in_all, packing.blocks(BLOCK)
    if offsets is None:
        found = torch.empty(shape, dtype=torch.float32, device=o.device)
    else:  # programs of no token write none
        found = zeros(shape, torch.float32, o.device)
    rows = (Strided.of(x, packing) for x in (aligned_rows(do), aligned_rows(o), dq))
    do, of_o, added = rows
    _launch(
        gradient_kernel, packing, k_mean, (dq.shape[-1], o.shape[-1]),
        do, contiguous(dlse), of_o, weight, added, k_mean, found, offsets, scale,
    )  # fmt: skip
    return found


def sum_of_blocks(found: Tensor, heads: int) -> Tensor:
    """The gradient of sinks, (Hq,), of what `gradient_by_block` wrote."""
    return found.view(-1, heads, found.shape[1]).sum((0, 2))


def _launch(kernel: Any, packing: Packing, k_mean: Tensor | None, dims: tuple[int, int], *given: Any) -> None:
    head_dim, value_dim = dims
    group = 1 if k_mean is None else packing.heads // k_mean.shape[1]
    launch(
        kernel, (packing.programs(BLOCK),), *given, packing.heads, group, packing.extent, packing.total,
        packing.blocks(BLOCK), head_dim=head_dim, value_dim=value_dim, VARLEN=packing.cu_seqlens is not None,
        BLOCK=BLOCK, BLOCK_D=padded_head_dim(head_dim), BLOCK_V=padded_head_dim(value_dim),
        num_warps=max(4, padded_head_dim(max(dims)) // 64),
    )  # fmt: skip
