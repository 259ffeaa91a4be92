"""Quantize blocks of tokens to INT8 with psi, smoothed if asked: every scale group but those by lane.

Bound by memory: each tensor is read once, and what the attention kernels read is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Packing
from sagebwd.kernels.common.rotation import load_turned
from sagebwd.kernels.common.strided import Strided, pitch_of, row_of, tile_of
from sagebwd.kernels.common.tile import (
    abs_max,
    block_in_sequence,
    divide,
    load_rows,
    load_transposed,
    padded_block,
    psi_scale,
    to_16bit,
    to_int8,
    whose,
)
from sagebwd.kernels.common.transposed import NO_SPECIALIZE, launch_pass, store_transposed
from sagebwd.kernels.common.wide_codes import launch_wide_codes
from sagebwd.numerics import MOST_ROTATED


@triton.jit(do_not_specialize=["heads", *NO_SPECIALIZE])
def quantize_kernel(
    x,
    mean,
    sequence_scale,
    key_mask,
    cu_seqlens,
    codes,
    token_scale,
    block_scale,
    transposed,
    column_sum,
    smoothed,
    heads,
    tokens,
    total,
    blocks,
    grid,
    head_dim: tl.constexpr,
    TURNED: tl.constexpr,
    GROUP: tl.constexpr,
    VARLEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Smooth and quantise one block of tokens; each output is written if its pointer is not None.

    x, codes, smoothed: `Strided`. mean (batch, heads, D): subtracted. token_scale: one a token. block_scale: one a
    block, or one a channel of it. sequence_scale (batch, heads, D): read where GROUP is "sequence". transposed: INT8,
    see `tile`. column_sum: 128 times the sum of a block's codes, by column, exact in FP32. TURNED: codes are of
    smoothed tokens times R, of so many channels, or 0: of up to `MOST_ROTATED` (`wide_codes_kernel` has more). Where
    BLOCK_D divides head_dim, each plane of the grid has its own columns; scales must not be of rows then.
    """
    number, program = block_in_sequence(grid, heads, cu_seqlens, tokens, BLOCK, VARLEN)
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    first = number * BLOCK
    if first >= length:
        return
    block = z * blocks + padded_block(start, batch, BLOCK, VARLEN) + number
    rows = first + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    if head_dim > BLOCK_D:
        columns += tl.program_id(1) * BLOCK_D
    EVEN: tl.constexpr = head_dim % BLOCK_D == 0
    inside = rows < length
    keep = inside
    x_at = row_of(x, batch, head, start + first)
    pitch = pitch_of(x)
    tile = load_rows(x_at, tl.arange(0, BLOCK), columns, pitch, length - first, head_dim, False, EVEN).to(tl.float32)
    if mean is not None:
        tile -= tl.load(mean + program.to(tl.int64) * head_dim + columns, mask=columns < head_dim, other=0)[None, :]
    if key_mask is not None:
        keep = keep & (tl.load(key_mask + batch.to(tl.int64) * tokens + rows, mask=inside, other=0) != 0)
    if mean is not None or key_mask is not None:
        tile = tl.where(keep[:, None], tile, 0.0)

    row = z * total + start + rows
    written = inside[:, None] & (columns[None, :] < head_dim)
    if smoothed is not None:
        out = tile_of(smoothed, batch, head, start + first, tl.arange(0, BLOCK), columns)
        tl.store(smoothed.at + out, to_16bit(tile, smoothed.at.dtype.element_ty), mask=written)
    if TURNED:
        taken_off = None
        if mean is not None:
            taken_off = mean + program.to(tl.int64) * head_dim
        tile = load_turned(x_at, tl.arange(0, BLOCK), pitch, length - first, taken_off, head_dim, TURNED, BLOCK_D)
        if mean is not None or key_mask is not None:
            tile = tl.where(keep[:, None], tile, 0.0)
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
        scale = tl.load(sequence_scale + program.to(tl.int64) * head_dim + columns, mask=columns < head_dim, other=1)
    else:
        scale = psi_scale(amax)
    inverse = 1.0 / scale
    if GROUP == "token" or GROUP == "lane":
        code = to_int8(divide(tile, scale[:, None], inverse[:, None]))
        tl.store(token_scale + row, scale, mask=inside)
    elif GROUP == "block":
        code = to_int8(divide(tile, scale, inverse))
        repeated = tl.zeros((BLOCK,), tl.float32) + scale
        if token_scale is not None:
            tl.store(token_scale + row, repeated, mask=inside)
        if block_scale is not None:
            tl.store(block_scale + block, scale)
    else:
        code = to_int8(divide(tile, scale[None, :], inverse[None, :]))
        if GROUP == "channel":
            tl.store(block_scale + block * head_dim + columns, scale, mask=columns < head_dim)
    if codes is not None:
        out = tile_of(codes, batch, head, start + first, tl.arange(0, BLOCK), columns)
        tl.store(codes.at + out, code, mask=written)
    if transposed is not None:
        store_transposed(transposed, code, z, block, blocks, columns, head_dim, BLOCK)
    if column_sum is not None:
        # read again as it lies: of the codes themselves triton would make two, one a layout
        tl.debug_barrier()
        of_columns = transposed
        if head_dim > BLOCK_D:
            of_columns += tl.program_id(1) * BLOCK_D * blocks * BLOCK
        code = load_transposed(of_columns, z, blocks, block - z * blocks, head_dim, BLOCK, BLOCK_D, False)
        total = tl.sum(code.to(tl.int32), 0) * 128
        tl.store(column_sum + block * head_dim + columns, total.to(tl.float32), mask=columns < head_dim)


# Of more channels than R's blocks: tokens of a program where all have scales of their own, and channels, within these
# ends, where scales are of channels.
WIDE_ROWS, WIDE_COLUMNS = 32, (32, 128)


@dataclass
class Quantized:
    """Outputs of one quantisation pass; see `quantize_kernel`."""

    codes: Tensor | None = None
    token_scale: Tensor | None = None
    block_scale: Tensor | None = None
    transposed: Tensor | None = None
    column_sum: Tensor | None = None
    smoothed: Tensor | None = None


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
    transposed: bool = False,
    column_sum: bool = False,
    smoothed: bool = False,
    turned: int = 0,
) -> Quantized:
    """Smooth x and write the asked-for outputs; ``turned``: channels of the rotation under which codes are made."""
    head_dim, device = x.shape[-1], x.device
    if turned and head_dim > MOST_ROTATED:
        return Quantized(*launch_wide_codes(x, packing, group, block, mean, key_mask, turned))
    if head_dim > MOST_ROTATED and group == "token" and not transposed:
        block = min(block, WIDE_ROWS)
    block_d, least, most = 0, *WIDE_COLUMNS
    if head_dim > MOST_ROTATED and group in ("channel", "sequence") and head_dim % least == 0:
        block_d = math.gcd(head_dim, most)
    out = Quantized()
    if codes:
        out.codes = torch.empty(x.shape, dtype=torch.int8, device=device)
    if codes or group == "token":
        out.token_scale = packing.per_token(device)
    if smoothed:
        out.smoothed = torch.empty(x.shape, dtype=x.dtype, device=device)
    if transposed:
        out.transposed = packing.padded(block, block * head_dim, dtype=torch.int8, device=device)
    if group == "channel" or (transposed and group == "block"):
        channels = (head_dim,) if group == "channel" else ()
        out.block_scale = packing.padded(block, *channels, dtype=torch.float32, device=device)
    if column_sum:
        out.column_sum = packing.padded(block, head_dim, dtype=torch.float32, device=device)
    launch_pass(
        quantize_kernel,
        packing,
        head_dim,
        block,
        Strided.of(x, packing),
        mean,
        sequence_scale,
        key_mask,
        packing.cu_seqlens,
        Strided.of(out.codes, packing) if codes else None,
        out.token_scale,
        out.block_scale,
        out.transposed,
        out.column_sum,
        Strided.of(out.smoothed, packing) if smoothed else None,
        TURNED=turned,
        GROUP=group,
        planes=head_dim // block_d if block_d else 1,
        block_d=block_d,
    )
    return out
