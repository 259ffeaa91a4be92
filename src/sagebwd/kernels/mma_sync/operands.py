"""Passes beside the attention kernels: codes before forward, values and codes of queries before backward, dQ after."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.call import Call, Saved
from sagebwd.kernels.mma_sync.variant import KEYS, QUERIES, ROWS_OF_CODES
from sagebwd.kernels.runtime.cuda import CudaKernel
from sagebwd.kernels.runtime.program import launch


class Operands(NamedTuple):
    """What `forward` in cuda/forward.cu reads, as cuda/quantize.cu leaves it."""

    q_int8: Tensor  # codes, of q's shape
    q_scale: Tensor
    k_int8: Tensor
    k_scale: Tensor
    values: Tensor  # (heads_k, blocks, 136 D + 1024) bytes: V's codes, then scales by pairs of keys and of channels
    first_values: Tensor | None  # (batch, heads_k, D, 16) as v, of keys that are apart


def quantize(
    call: Call, kernel: CudaKernel, q: Tensor, k: Tensor, v: Tensor, k_mean: Tensor | None, v_mean: Tensor | None,
    first_keys: Tensor | None,
) -> Operands:  # fmt: skip
    """Codes of q, k and v, in one launch of `quantize` in cuda/quantize.cu."""
    queries, keys, count, device = call.queries, call.keys, call.recipe.first_keys, q.device
    first_values = None
    if count:
        first_values = torch.empty(keys.batch, keys.heads, call.head_dim, count, dtype=v.dtype, device=device)
    made = Operands(
        torch.empty(q.shape, dtype=torch.int8, device=device), queries.per_token(device),
        torch.empty(k.shape, dtype=torch.int8, device=device), keys.per_token(device),
        keys.padded(KEYS, KEYS * call.head_dim + 8 * (KEYS + call.head_dim), dtype=torch.int8, device=device),
        first_values,
    )  # fmt: skip
    grids = queries.blocks(ROWS_OF_CODES), keys.blocks(ROWS_OF_CODES), keys.blocks(KEYS)
    programs = grids[0] * queries.heads_in_all + (grids[1] + grids[2]) * keys.heads_in_all
    launch(
        kernel, (programs,), q, *queries.strides(q), k, *keys.strides(k), v, *keys.strides(v), k_mean, v_mean,
        call.key_mask, first_keys, made.q_int8, *queries.strides(made.q_int8), made.q_scale,
        made.k_int8, *keys.strides(made.k_int8), made.k_scale, made.values,
        first_values, queries.cu_seqlens, keys.cu_seqlens,
        queries.heads_in_all, keys.heads_in_all, queries.heads, keys.heads, queries.extent, keys.extent,
        queries.total, keys.total, keys.blocks(KEYS), *grids,
    )  # fmt: skip
    return made


class RowValues(NamedTuple):
    """What `backward` in cuda/backward.cu reads of queries, as cuda/row_values.cu leaves it."""

    values: Tensor  # (heads, blocks, 256) FP32
    do_scale: Tensor  # (heads, blocks)
    do_t: Tensor  # (heads, D, blocks 64), tokens interleaved
    q_t: Tensor
    do_int8: Tensor | None  # codes of dO R, of dO's shape, where dP is INT8


def row_values(
    call: Call, kernel: CudaKernel, saved: Saved, do: Tensor, dlse: Tensor | None, center: Tensor | None
) -> RowValues:
    """Values and codes of queries, in one launch of `row_values` in cuda/row_values.cu; center: of an INT8 dP, c R."""
    queries, device, o, q_int8 = call.queries, do.device, saved.o, saved.q_int8
    do_int8 = None if center is None else torch.empty(do.shape, dtype=torch.int8, device=device)
    do_t, q_t = (queries.padded(QUERIES, QUERIES * call.head_dim, dtype=torch.int8, device=device) for _ in range(2))
    values = queries.padded(QUERIES, QUERIES * 4, dtype=torch.float32, device=device)
    do_scale = queries.padded(QUERIES, dtype=torch.float32, device=device)
    launch(
        kernel, (queries.programs(QUERIES),), do, *queries.strides(do), o, *queries.strides(o),
        q_int8, *queries.strides(q_int8), saved.lse, dlse, saved.q_scale, center,
        do_int8, *((0, 0, 0) if do_int8 is None else queries.strides(do_int8)), do_t, q_t, do_scale, values,
        queries.cu_seqlens, queries.heads, call.group, queries.extent, queries.total, queries.blocks(QUERIES),
        queries.blocks(QUERIES),
    )  # fmt: skip
    return RowValues(values, do_scale, do_t, q_t, do_int8)


def finish(call: Call, kernel: CudaKernel, sums: Tensor, dq: Tensor) -> None:
    """Write dq from the FP32 sums (heads, blocks, 64 D) of backward, by `finish` in cuda/finish.cu."""
    queries = call.queries
    launch(
        kernel, (queries.programs(QUERIES),), sums, dq, *queries.strides(dq), queries.cu_seqlens,
        queries.heads, queries.extent, queries.blocks(QUERIES), queries.blocks(QUERIES),
    )  # fmt: skip
