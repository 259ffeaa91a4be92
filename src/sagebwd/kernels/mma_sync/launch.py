"""The kernels of mma.sync: which passes run and what they hand on, forward and backward.

Masks of elements, a negative softmax scale, the largest logits and deterministic gradients are the portable kernels',
to the same recipe: what forward leaves is the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.call import Call, Packing, Saved, empty_gradients, empty_like_rows
from sagebwd.kernels.common.centered_values import launch_centered_values
from sagebwd.kernels.common.means import launch_statistics
from sagebwd.kernels.common.transposed import launch_transpose
from sagebwd.kernels.mma_sync.variant import (
    BACKWARD,
    FORWARD,
    KEYS,
    QUERIES,
    ROWS_OF_CODES,
    finish_variant,
    quantize_variant,
    row_values_variant,
    variant_of,
)
from sagebwd.kernels.portable import launch as portable
from sagebwd.kernels.runtime.alignment import fits_tma
from sagebwd.kernels.runtime.cuda import CudaKernel
from sagebwd.kernels.runtime.device import capability
from sagebwd.kernels.runtime.nvrtc import kernel_of
from sagebwd.kernels.runtime.program import copy, launch, zeros
from sagebwd.masks.band import FARTHEST
from sagebwd.recipe import INT8

prepare = portable.prepare


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
    """o, lse of the smoothed scores, and what backward reads."""
    if _is_portable(call) or call.max_logits:  # row maxima are not these kernels'
        return portable.forward(call, q, k, v)
    recipe, queries, keys = call.recipe, call.queries, call.keys
    k_mean, v_mean, _, first_keys = launch_statistics(recipe, k, v, keys, call.key_mask)
    k_shift, v_shift = k_mean if recipe.smooth_k else None, v_mean if recipe.smooth_v else None
    arch, settings = capability(call.device), {"half": q.dtype == torch.float16, "first_keys": recipe.first_keys}
    codes = kernel_of(quantize_variant(call.head_dim, turned=call.turned, **settings).source, arch)
    x = quantize(call, codes, _in_chunks(q), _in_chunks(k), _in_chunks(v), k_shift, v_shift, first_keys)

    o, lse = empty_like_rows(q), queries.per_token(q.device)
    variant = variant_of(FORWARD, call.head_dim, arch, **settings)
    grid = queries.blocks(variant.rows)
    launch(
        kernel_of(variant.source, arch),
        (grid * queries.heads_in_all,),
        *_strided(x.q_int8, queries),
        x.q_scale,
        *_strided(x.k_int8, keys),
        x.k_scale,
        x.values,
        v_shift,
        x.first_values,
        first_keys,
        *_strided(o, queries),
        lse,
        queries.cu_seqlens,
        keys.cu_seqlens,
        queries.heads,
        call.group,
        queries.extent,
        keys.extent,
        queries.total,
        keys.total,
        keys.blocks(KEYS),
        grid,
        *_band(call),
        float(call.scale),
    )
    return Saved(o, lse, x.q_int8, x.q_scale, x.k_int8, x.k_scale, None, k_mean)


def backward(
    call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; dq is added up in an order that changes from run to run, unless the call is ``deterministic``."""
    if _is_portable(call) or call.deterministic:
        return portable.backward(call, saved, do, dlse, q, k, v)
    queries, keys = call.queries, call.keys
    int8_dp, arch, half = call.recipe.dp == INT8, capability(call.device), v.dtype == torch.float16
    do, center, v_scale = _in_chunks(do), None, None
    if int8_dp:
        dp_v, v_scale, center, _ = launch_centered_values(call, saved, v)
    else:
        dp_v = _in_chunks(v)
    turned_do = sum(call.value_rotation)
    of_rows = row_values_variant(call.head_dim, half=half, int8_dp=int8_dp, turned=turned_do)
    x = row_values(call, kernel_of(of_rows.source, arch), saved, do, dlse, center)
    k_t = launch_transpose(saved.k_int8, keys, KEYS)
    blocks_q, blocks_k = queries.blocks(QUERIES), keys.blocks(KEYS)
    dq_sums = zeros((queries.heads_in_all, blocks_q, QUERIES * call.head_dim), torch.float32, do.device)
    dq, dk, dv = empty_gradients(call.head_dim, saved.o, v)

    variant = variant_of(BACKWARD, call.head_dim, arch, half=half, int8_dp=int8_dp, turned=call.turned)
    grid = keys.blocks(KEYS)
    launch(
        kernel_of(variant.source, arch),
        (grid * keys.heads_in_all,),
        *_strided(saved.q_int8, queries),
        *_strided(saved.k_int8, keys),
        *_strided(dp_v, keys),
        *_strided(x.do_int8 if int8_dp else do, queries),
        k_t,
        x.q_t,
        x.do_t,
        saved.k_scale,
        call.key_mask,
        x.do_scale,
        x.values,
        dq_sums,
        *_strided(dk, keys),
        *_strided(dv, keys),
        queries.cu_seqlens,
        keys.cu_seqlens,
        keys.heads,
        call.group,
        queries.extent,
        keys.extent,
        keys.total,
        blocks_q,
        blocks_k,
        grid,
        *_band(call),
        float(call.scale),
        *((v_scale,) if int8_dp else ()),
    )
    finish(call, kernel_of(finish_variant(variant).source, arch), dq_sums, dq)
    return dq, dk, dv


def _is_portable(call: Call) -> bool:
    """Whether a call's mask or scale is none of these kernels': a row's largest score wants scales above 0."""
    return call.lists is not None or call.scale < 0


def _strided(x: Tensor, packing: Packing) -> tuple:
    """A tensor, and elements between its sequences, heads and tokens."""
    return x, *packing.strides(x)


def _band(call: Call) -> tuple[int, int]:
    """Bounds on key - query, where there is none far away."""
    band = call.band
    return band["lower"] if band["HAS_LOWER"] else -FARTHEST, band["upper"] if band["HAS_UPPER"] else FARTHEST


def _in_chunks(x: Tensor) -> Tensor:
    """Rows as cp.async reads them, in 16 bytes."""
    return x if fits_tma(x) else copy(empty_like_rows(x), x)


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
