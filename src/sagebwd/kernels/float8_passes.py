"""Passes before and after the e4m3 gradient products: row values, bounds, operands transposed, and dQ at last."""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd.kernels.call import Call, Packing, padded_head_dim, pass_warps
from sagebwd.kernels.float8 import (
    DELTA_CHANNELS,
    finish_dq_kernel,
    float8_kernel,
    largest_kernel,
    row_values_kernel,
)
from sagebwd.kernels.launches import Launch, launch

# Whose largest magnitude: places in a row of ``largest``.
DO, Q, K = 0, 1, 2


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
    block: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Planes of row values of ``block`` queries, and what else `row_values_kernel` writes.

    These are the parts of -delta, dO scaled, the factors of dO and Q, the spread of dQ's rows, and ``largest``.
    """
    queries, keys = call.queries, call.keys
    row_values = queries.padded(block, block * 2, dtype=torch.float32, device=do.device)
    delta_parts = queries.padded(block, block * DELTA_CHANNELS.value, dtype=do.dtype, device=do.device)
    do_scaled = queries.by_head(do)
    do_factor, q_factor, spread = (queries.per_token(do.device) for _ in range(3))
    largest = torch.zeros(keys.batch * keys.heads, 3, dtype=torch.int32, device=do.device)
    shape = {"head_dim": call.head_dim, "VARLEN": call.varlen, "BLOCK": block, "BLOCK_D": call.block_d}
    call.launch(
        row_values_kernel,
        (queries.grid(block), queries.batch * queries.heads),
        do,
        o,
        lse,
        None if dlse is None else dlse.contiguous(),
        row_max,
        v_scale,
        q,
        q_scale,
        queries.cu_seqlens,
        row_values,
        delta_parts,
        do_factor,
        q_factor,
        spread,
        do_scaled,
        largest,
        *queries.strides(do),
        *queries.strides(o),
        *queries.strides(q),
        queries.heads,
        call.group,
        queries.tokens,
        queries.total,
        queries.blocks(block),
        TOKEN=call.recipe.q_scale == "token",
        num_warps=pass_warps(block, call.head_dim),
        **shape,
    )
    call.launch(
        largest_kernel,
        (keys.grid(block), keys.batch * keys.heads),
        k,
        k_scale,
        keys.cu_seqlens,
        largest,
        *keys.strides(k),
        keys.heads,
        keys.tokens,
        keys.total,
        TOKEN=call.recipe.k_scale == "token",
        num_warps=pass_warps(block, call.head_dim),
        **shape,
    )
    return row_values, delta_parts, do_scaled, do_factor, q_factor, spread, largest


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
        call.group,
        queries.tokens,
        queries.total,
        queries.blocks(block),
        call.scale / dq_sum_scale(call),
        head_dim=call.head_dim,
        VARLEN=call.varlen,
        BLOCK=block,
        BLOCK_D=call.block_d,
        num_warps=pass_warps(block, call.head_dim),
    )


def launch_float8(
    x: Tensor,
    factor: Tensor,
    largest: Tensor,
    whose: int,
    packing: Packing,
    group: int,
    block: int,
    *,
    pairs: bool = False,
    launch: Launch = launch,
) -> Tensor:
    """The transposed e4m3 copy of rows, ``pairs`` as in `store_transposed`."""
    head_dim = x.shape[-1]
    transposed = packing.padded(block, block * head_dim, dtype=torch.int8, device=x.device)
    launch(
        float8_kernel,
        (packing.grid(block), packing.batch * packing.heads),
        x,
        factor,
        packing.cu_seqlens,
        largest,
        transposed,
        *packing.strides(x),
        packing.heads,
        group,
        packing.tokens,
        packing.total,
        packing.blocks(block),
        head_dim=head_dim,
        WHOSE=whose,
        PAIRS=pairs,
        VARLEN=packing.cu_seqlens is not None,
        BLOCK=block,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=pass_warps(block, head_dim),
    )
    return transposed.view(torch.float8_e4m3fn)
