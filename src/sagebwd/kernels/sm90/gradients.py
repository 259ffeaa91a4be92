"""The sm_90a backward: what it runs, its passes and its launch; dQ that must be repeatable is the Gluon kernel's."""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd.call import Call, Saved
from sagebwd.kernels.alignment import fits_tma
from sagebwd.kernels.gluon import gradients as gluon
from sagebwd.kernels.operands.fp8_copies import launch_float8
from sagebwd.kernels.operands.fp8_dq import dq_sum_scale, launch_finish_dq
from sagebwd.kernels.operands.fp8_rows import RowValues, launch_row_values
from sagebwd.kernels.operands.lane_codes import launch_channel_scale
from sagebwd.kernels.replay import launch
from sagebwd.kernels.sm90.compile import kernel, unavailable
from sagebwd.kernels.sm90.config import BACKWARD, BackwardArguments, BackwardVariant
from sagebwd.kernels.support import lacks, other_dtype, outside
from sagebwd.recipe import Recipe


def unsupported(recipe: Recipe, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why this kernel cannot run a backward, or None; whether the GPU is one of its is asked elsewhere."""
    return (
        outside("head_dim ", head_dim, tuple(BACKWARD))
        or other_dtype(dtype)
        or lacks(recipe, gluon.FLOAT8_BACKWARD)
        or unavailable()
    )


def backward(
    call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv."""
    if call.deterministic:
        return gluon.backward(call, saved, do, dlse, q, k, v)
    if saved.v_scale is None:
        saved = saved._replace(v_scale=launch_channel_scale(v, call.keys, call.key_mask))
    chosen = BACKWARD[call.head_dim]
    block_q, span = chosen["queries"], 64 * chosen["warpgroups"]
    bits = call.keys.batch * call.keys.heads * 3
    largest = torch.zeros(bits, dtype=torch.int32, device=do.device)
    values = launch_row_values(call, saved, do, dlse, largest, block_q)
    copies = launch_float8(
        call, do, values.do_factor, saved.q_int8, values.q_factor, saved.k_int8, saved.k_scale, largest, block_q, span
    )
    dk, dv = launch_backward(call, saved, v, values, copies, largest)
    dq = torch.empty_like(do, memory_format=torch.contiguous_format)
    launch_finish_dq(call, values.dq_sums, values.spread, largest, dq, block_q, by_register=True)
    return dq, dk, dv


def launch_backward(
    call: Call, saved: Saved, v: Tensor, values: RowValues, copies: tuple[Tensor, Tensor, Tensor], largest: Tensor
) -> tuple[Tensor, Tensor]:
    """dk and dv; dQ's sums are added to ``values.dq_sums``. copies: of dO, Q and K, transposed."""
    queries, keys, head_dim = call.queries, call.keys, call.head_dim
    chosen = BACKWARD[head_dim]
    block_q, span = chosen["queries"], 64 * chosen["warpgroups"]
    # an expanded V too: TMA takes no stride of 0
    v = v if fits_tma(v) and 0 not in v.stride() else v.contiguous()
    dk, dv = (torch.empty_like(v, memory_format=torch.contiguous_format) for _ in range(2))
    band = call.band
    in_whole = span * chosen["cluster"]
    variant = BackwardVariant(
        head_dim, str(v.dtype).removeprefix("torch."), **chosen, lower=band["HAS_LOWER"], upper=band["HAS_UPPER"],
        varlen=call.packed, ragged=not call.packed and keys.tokens % in_whole != 0,
        key_mask=call.key_mask is not None, lane_scale=call.recipe.k_scale == "lane",
    )  # fmt: skip
    blocks, heads = queries.blocks(block_q), queries.heads_in_all
    do_t, q_t, k_t = (x.view(torch.uint8).view(x.shape[0], head_dim, -1) for x in copies)
    arguments = BackwardArguments(
        q=saved.q_int8,
        k=saved.k_int8,
        v=v,
        do=values.do_scaled,
        q_t=q_t,
        k_t=k_t,
        do_t=do_t,
        rows=values.planes,
        delta=values.delta_parts.view(heads, blocks * block_q, -1),
        k_scale=saved.k_scale,
        largest=largest.view(-1, 3),
        key_mask=None if call.key_mask is None else call.key_mask.view(torch.uint8),
        dq_sums=values.dq_sums.view(heads, blocks, head_dim * block_q),
        dk=dk,
        dv=dv,
        cu_seqlens_q=queries.cu_seqlens,
        cu_seqlens_k=keys.cu_seqlens,
        longest=keys.tokens,
        lower=band["lower"],
        upper=band["upper"],
        scale=call.scale,
        sum_scale=dq_sum_scale(call),
    )
    launch(kernel(variant), (), *arguments)
    return dk, dv
