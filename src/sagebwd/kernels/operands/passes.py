"""Launchers of the quantisation passes: they allocate what a pass writes and run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sagebwd.kernels.call import Call, Packing, padded_head_dim, pass_warps
from sagebwd.kernels.operands.codes import grad_out_kernel, quantize_kernel, transpose_kernel
from sagebwd.kernels.replay import Launch, launch
from sagebwd.recipe import INT8


@dataclass
class Quantized:
    """What one quantisation pass wrote; see `quantize_kernel`."""

    codes: Tensor | None = None
    token_scale: Tensor | None = None
    padded_scale: Tensor | None = None
    block_scale: Tensor | None = None
    transposed: Tensor | None = None
    column_sum: Tensor | None = None
    smoothed: Tensor | None = None
    first_row: Tensor | None = None
    first_scale: Tensor | None = None
    block_mean: Tensor | None = None


def launch_quantize(
    x: Tensor,
    packing: Packing,
    group: str,
    block: int,
    mean: Tensor | None = None,
    key_mask: Tensor | None = None,
    *,
    sequence_scale: Tensor | None = None,
    codes: bool = False,
    padded_scale: bool = False,
    transposed: bool = False,
    column_sum: torch.dtype | None = None,
    smoothed: bool = False,
    block_mean: bool = False,
    first_row: torch.dtype | None = None,
    first_key: Tensor | None = None,
    launch: Launch = launch,
) -> Quantized:
    """Smooth x and write the asked-for outputs; first_row as int8 comes with its scale."""
    head_dim, device = x.shape[-1], x.device
    out = Quantized()
    if codes:
        out.codes = torch.empty(x.shape, dtype=torch.int8, device=device)
    if codes or group == "token":
        out.token_scale = packing.per_token(device)
    if padded_scale:
        out.padded_scale = packing.padded(block, block, dtype=torch.float32, device=device)
    if smoothed:
        out.smoothed = torch.empty(x.shape, dtype=x.dtype, device=device)
    if transposed:
        out.transposed = packing.padded(block, block * head_dim, dtype=torch.int8, device=device)
    if group == "channel" or (transposed and group == "block"):
        channels = (head_dim,) if group == "channel" else ()
        out.block_scale = packing.padded(block, *channels, dtype=torch.float32, device=device)
    if column_sum is not None:
        out.column_sum = packing.padded(block, head_dim, dtype=column_sum, device=device)
    if block_mean:
        out.block_mean = packing.padded(block, head_dim, dtype=torch.float32, device=device)
    if first_row is not None:
        shape = packing.batch, packing.heads
        out.first_row = torch.empty(*shape, head_dim, dtype=first_row, device=device)
        if first_row == torch.int8:
            out.first_scale = torch.empty(shape, dtype=torch.float32, device=device)
    rows = out.codes if codes else out.smoothed if smoothed else x
    launch(
        quantize_kernel,
        (packing.grid(block), packing.batch * packing.heads),
        x,
        mean,
        sequence_scale,
        key_mask,
        first_key,
        packing.cu_seqlens,
        out.block_mean,
        out.codes,
        out.token_scale,
        out.padded_scale,
        out.block_scale,
        out.transposed,
        out.column_sum,
        out.smoothed,
        out.first_row,
        out.first_scale,
        *packing.strides(x),
        *packing.strides(rows),
        packing.heads,
        packing.tokens,
        packing.total,
        packing.blocks(block),
        head_dim=head_dim,
        GROUP=group,
        VARLEN=packing.cu_seqlens is not None,
        BLOCK=block,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=pass_warps(block, head_dim),
    )
    return out


def launch_transpose(
    codes: Tensor, packing: Packing, block: int, token_scale: Tensor | None = None, launch: Launch = launch
) -> tuple[Tensor, Tensor | None]:
    """The transposed copy of saved codes, and their scales padded to whole blocks if given."""
    head_dim = codes.shape[-1]
    transposed = packing.padded(block, block * head_dim, dtype=torch.int8, device=codes.device)
    padded_scale = None
    if token_scale is not None:
        padded_scale = packing.padded(block, block, dtype=torch.float32, device=codes.device)
    launch(
        transpose_kernel,
        (packing.grid(block), packing.batch * packing.heads),
        codes,
        token_scale,
        packing.cu_seqlens,
        transposed,
        padded_scale,
        *packing.strides(codes),
        packing.heads,
        packing.tokens,
        packing.total,
        packing.blocks(block),
        head_dim=head_dim,
        VARLEN=packing.cu_seqlens is not None,
        BLOCK=block,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=pass_warps(block, head_dim),
    )
    return transposed, padded_scale


def launch_grad_out(
    call: Call,
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    q_scale: Tensor | None,
    q_int8: Tensor | None,
    *,
    planes: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """row_values, dO's scale, where dV is INT8 its transposed codes, and q_int8 transposed; see `grad_out_kernel`."""
    recipe, queries, block = call.recipe, call.queries, call.recipe.block_q
    channels = (call.head_dim,) if recipe.do_scale == "channel" else ()
    row_values = queries.padded(block, block * 4, dtype=torch.float32, device=do.device)
    scale = queries.padded(block, *channels, dtype=torch.float32, device=do.device)
    transposed = None
    if recipe.dv == INT8:
        transposed = queries.padded(block, block * call.head_dim, dtype=torch.int8, device=do.device)
    q_transposed = None
    if q_int8 is not None:
        q_transposed = queries.padded(block, block * call.head_dim, dtype=torch.int8, device=do.device)
    call.launch(
        grad_out_kernel,
        (queries.grid(block), queries.batch * queries.heads, 1 if q_int8 is None else 2),
        do,
        o,
        lse,
        dlse,
        queries.cu_seqlens,
        q_scale,
        transposed,
        scale,
        row_values,
        q_int8,
        q_transposed,
        *queries.strides(do),
        *queries.strides(o),
        *queries.strides(do if q_int8 is None else q_int8),
        queries.heads,
        queries.tokens,
        queries.total,
        queries.blocks(block),
        head_dim=call.head_dim,
        GROUP=recipe.do_scale,
        PLANES=planes,
        VARLEN=call.varlen,
        BLOCK=block,
        BLOCK_D=call.block_d,
        num_warps=pass_warps(block, call.head_dim),
    )
    return row_values, scale, transposed, q_transposed
