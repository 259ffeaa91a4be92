"""Passes before and after the e4m3 gradient products: row values, bounds, operands transposed, and dQ at last."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.kernels.call import Call, pass_warps
from sagebwd.kernels.operands.fp8 import CLEARED, DELTA_CHANNELS, finish_dq_kernel, float8_kernel, row_values_kernel


class RowValues(NamedTuple):
    """What `row_values_kernel` writes of the queries; see there. dq_sums: FP16 zeros, (heads * D, padded queries)."""

    planes: Tensor
    delta_parts: Tensor
    do_scaled: Tensor
    do_factor: Tensor
    q_factor: Tensor
    spread: Tensor
    dq_sums: Tensor


def launch_row_values(
    call: Call,
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    row_max: Tensor,
    v_scale: Tensor,
    q: Tensor,
    q_scale: Tensor,
    k: Tensor,
    k_scale: Tensor,
    largest: Tensor,
    block: int,
) -> RowValues:
    """Row values of ``block`` queries, and in ``largest``, zeros before, the bits of dO's, Q's and K's largest."""
    queries, keys = call.queries, call.keys
    programs = queries.batch * queries.heads
    grid = max(queries.grid(block), keys.grid(block)), programs + keys.batch * keys.heads
    # each program clears its share, of two a word, in whole steps
    clearing = max(math.prod(grid), 1)
    rows, columns = queries.heads_in_all * call.head_dim, queries.blocks(block) * block
    share = -(-rows * columns // (2 * CLEARED.value * clearing)) * CLEARED.value
    zeros = torch.empty(share * clearing, dtype=torch.int32, device=do.device)
    out = RowValues(
        queries.padded(block, block * 2, dtype=torch.float32, device=do.device),
        queries.padded(block, block * DELTA_CHANNELS.value, dtype=do.dtype, device=do.device),
        queries.by_head(do),
        *queries.per_token(do.device, 3).unbind(),
        zeros.view(torch.float16)[: rows * columns].view(rows, columns),
    )
    call.launch(
        row_values_kernel,
        grid,
        do,
        o,
        lse,
        dlse,
        row_max,
        v_scale,
        q,
        q_scale,
        k,
        k_scale,
        queries.cu_seqlens,
        keys.cu_seqlens,
        out.planes,
        out.delta_parts,
        out.do_factor,
        out.q_factor,
        out.spread,
        out.do_scaled,
        largest,
        zeros,
        share,
        *queries.strides(do),
        *queries.strides(o),
        *queries.strides(q),
        *keys.strides(k),
        queries.heads,
        keys.heads,
        programs,
        queries.tokens,
        keys.tokens,
        queries.total,
        keys.total,
        queries.blocks(block),
        TOKEN=call.recipe.q_scale == "token",
        K_TOKEN=call.recipe.k_scale != "block",
        **_shape(call, block),
    )
    return out


def launch_float8(
    call: Call,
    do: Tensor,
    do_factor: Tensor,
    q: Tensor,
    q_factor: Tensor,
    k: Tensor,
    k_scale: Tensor,
    largest: Tensor,
    block: int,
    span: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The transposed e4m3 copies of dO, Q and K, in blocks of ``block`` queries and ``span`` keys."""
    queries, keys, head_dim = call.queries, call.keys, call.head_dim
    float8 = {"dtype": torch.float8_e4m3fn, "device": do.device}
    do_t, q_t = (queries.padded(block, block * head_dim, **float8) for _ in range(2))
    k_t = keys.padded(span, span * head_dim, **float8)
    programs = queries.batch * queries.heads
    call.launch(
        float8_kernel,
        (max(queries.grid(block), keys.grid(span) * (span // block)), 2 * programs + keys.batch * keys.heads),
        do,
        q,
        k,
        do_factor,
        q_factor,
        k_scale,
        queries.cu_seqlens,
        keys.cu_seqlens,
        largest,
        do_t,
        q_t,
        k_t,
        *queries.strides(do),
        *queries.strides(q),
        *keys.strides(k),
        queries.heads,
        keys.heads,
        programs,
        queries.tokens,
        keys.tokens,
        queries.total,
        keys.total,
        queries.blocks(block),
        keys.blocks(span),
        SPAN=span,
        **_shape(call, block),
    )
    return do_t, q_t, k_t


def dq_sum_scale(call: Call) -> float:
    """What sums of dS' K' are multiplied by, lest FP16 overflow.

    A row of P adds up to 1, of 2^e P to at most 448 for each key, dP - delta is within 2 and K' within 448; an eighth
    of 448 * 2 * 448 leaves room for e4m3's rounding.
    """
    return 2.0 ** -(3 + max(call.keys.tokens - 1, 0).bit_length())


def launch_finish_dq(call: Call, summed: Tensor, spread: Tensor, largest: Tensor, dq: Tensor, block: int) -> None:
    """Write dq from its FP16 sums times `dq_sum_scale`, padded to blocks of ``block``; see `finish_dq_kernel`."""
    queries = call.queries
    call.launch(
        finish_dq_kernel,
        (queries.grid(block), queries.batch * queries.heads),
        summed,
        spread,
        largest,
        queries.cu_seqlens,
        dq,
        *queries.strides(dq),
        queries.heads,
        call.keys.heads,
        queries.tokens,
        queries.total,
        queries.blocks(block),
        call.scale / dq_sum_scale(call),
        **_shape(call, block),
    )


def _shape(call: Call, block: int) -> dict[str, object]:
    """The constants of every pass, and its warps."""
    return {
        "head_dim": call.head_dim, "VARLEN": call.varlen, "BLOCK": block, "BLOCK_D": call.block_d,
        "num_warps": pass_warps(block, call.head_dim),
    }  # fmt: skip
