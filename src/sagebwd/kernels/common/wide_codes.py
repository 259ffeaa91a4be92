"""INT8 codes of rows of over 256 channels times R, by pieces of channels: of wide heads' Q and K.

Bound by memory only where R's signs cost little: programs share the blocks of a head, and each makes the signs of a
piece once, which serve all pieces that lie in blocks of R as wide.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Packing
from sagebwd.kernels.common.centered_values import abs_max_of, codes_of, only, store_codes
from sagebwd.kernels.common.chunks import blocks_apart, shared_blocks, shares_of, turned_share
from sagebwd.kernels.common.rotation import (
    MOST,
    PIECE,
    ROUNDING,
    load_pieces,
    part_of,
    piece_width,
    signs_and_factors,
    turned,
    turned_row,
    whole_row,
)
from sagebwd.kernels.common.strided import Strided, pitch_of, row_of
from sagebwd.kernels.common.tile import abs_max, psi_scale, whose
from sagebwd.kernels.runtime.program import launch

# Rows of a program at a time, its warps, and how many loads of rows are under way.
ROWS, WARPS, STAGES = 16, 4, 3


@triton.jit(do_not_specialize=["heads", "tokens", "total", "parts"])
def wide_codes_kernel(
    x, mean, key_mask, cu_seqlens, codes, token_scale, heads, tokens, total, parts, head_dim: tl.constexpr,
    TURNED: tl.constexpr, GROUP: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Codes of (x - mean) R and a scale a token, which is its block's where GROUP is "block".

    x, codes: `Strided`. mean (batch, heads, D), or None. Programs share the blocks of a head, ``parts`` of
    `shares_of`, and take ROWS of a block at a time.
    """
    number, program = shared_blocks(parts, heads, cu_seqlens, tokens, BLOCK, VARLEN)
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    apart = blocks_apart(parts, length, BLOCK, VARLEN)
    if VARLEN:  # noqa: SIM102, settled at compile time
        if number >= apart:
            return
    LOW: tl.constexpr = part_of(TURNED, 0)
    HIGH: tl.constexpr = part_of(TURNED, 1)
    REST: tl.constexpr = part_of(head_dim, 1)
    dtype: tl.constexpr = x.at.dtype.element_ty
    rotation = (signs_and_factors(dtype, LOW, MOST), signs_and_factors(dtype, HIGH, REST))
    mu = None
    if mean is not None:
        of_head = mean + program.to(tl.int64) * head_dim
        mu = (turned_mean(of_head, LOW, MOST), turned_mean(of_head + MOST, HIGH, REST))
    scales = token_scale + z * total + start
    for i in tl.range(number, tl.cdiv(length, BLOCK), apart, num_stages=STAGES):
        first = i * BLOCK
        if GROUP == "token":
            tile = turned_rows(x, mu, rotation, key_mask, batch, head, start, first, length, tokens, head_dim, ROWS)
            scale = psi_scale(largest_of(tile))
            store_scaled(tile, scale, codes, scales, batch, head, start, first, length, head_dim)
        else:  # the registers hold few rows: they are made twice
            amax = tl.zeros((ROWS,), tl.float32)
            end = tl.minimum(first + BLOCK, length)
            for at in range(first, end, ROWS):
                tile = turned_rows(x, mu, rotation, key_mask, batch, head, start, at, length, tokens, head_dim, ROWS)
                amax = tl.maximum(amax, largest_of(tile), propagate_nan=tl.PropagateNan.ALL)
            scale = psi_scale(tl.zeros((ROWS,), tl.float32) + abs_max(amax, 0))
            for at in range(first, end, ROWS):
                tile = turned_rows(x, mu, rotation, key_mask, batch, head, start, at, length, tokens, head_dim, ROWS)
                store_scaled(tile, scale, codes, scales, batch, head, start, at, length, head_dim)


@triton.jit
def turned_rows(
    x, mu, rotation, key_mask, batch, head, start, first, length, tokens, head_dim: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """ROWS tokens from ``first`` on less the mean, times R, by pieces; zeros for those that are hidden."""
    local = tl.arange(0, ROWS)
    at, left, pitch = row_of(x, batch, head, start + first), length - first, pitch_of(x)
    REST: tl.constexpr = part_of(head_dim, 1)
    low = turned(load_pieces(at, local, pitch, left, MOST, MOST), rotation[0])
    high = turned(load_pieces(at + MOST, local, pitch, left, REST, REST), rotation[1])
    if mu is not None:
        low, high = less_mean(low, mu[0]), less_mean(high, mu[1])
    tile = low + high
    keep = local < left
    if key_mask is not None:
        hidden = key_mask + batch.to(tl.int64) * tokens + first + local
        keep = keep & (tl.load(hidden, mask=keep, other=0) != 0)
    return only(tile, keep) if mu is not None or key_mask is not None else tile


@triton.jit
def store_scaled(pieces, scale, codes, scales, batch, head, start, first, length, head_dim: tl.constexpr):
    """Write codes and scales of tokens from ``first`` on."""
    local = tl.arange(0, scale.shape[0])
    inside = first + local < length
    tl.store(scales + first + local, scale, mask=inside)
    store_codes(codes_of(pieces, scale), codes, batch, head, start + first, local, inside, head_dim)


@triton.jit
def largest_of(pieces):
    """`abs_max_of`, of pieces of one width with one reduction. NaN wins."""
    wide, rest = tl.abs(pieces[0]), ()
    for piece in tl.static_range(1, len(pieces)):
        if pieces[piece].shape[1] == wide.shape[1]:
            wide = tl.maximum(wide, tl.abs(pieces[piece]), propagate_nan=tl.PropagateNan.ALL)
        else:
            rest += (pieces[piece],)
    return abs_max_of((wide,) + rest)  # noqa: RUF005, triton unpacks no tuples


@triton.jit
def turned_mean(mean, TURNED: tl.constexpr, COLUMNS: tl.constexpr):
    """The first COLUMNS channels of a mean times R, by pieces, of channels that R does not mix with others."""
    found = ()
    for first in tl.static_range(0, COLUMNS, PIECE):
        columns = first + tl.arange(0, piece_width(COLUMNS, first))
        row = tl.load(mean + columns, mask=columns < COLUMNS, other=0)
        found += (turned_row(row, TURNED, first // PIECE),)
    return whole_row(found, TURNED)


@triton.jit
def less_mean(pieces, mu):
    """Pieces of rows less their mean; of keys that are all alike what is left is rounding."""
    largest = tl.max(tl.abs(mu[0]), 0)
    if len(mu) > 1:
        largest = tl.maximum(largest, tl.max(tl.abs(mu[1]), 0))
    found = ()
    for piece in tl.static_range(len(pieces)):
        x = pieces[piece] - mu[piece][None, :]
        found += (tl.where(tl.abs(x) < largest * ROUNDING, 0.0, x),)
    return found


def launch_wide_codes(
    x: Tensor, packing: Packing, group: str, block: int, mean: Tensor | None, key_mask: Tensor | None, turned: int
) -> tuple[Tensor, Tensor]:
    """Codes of x less its mean and their scale a token; ``turned``: channels of the rotation."""
    if group == "token":
        block = ROWS
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    token_scale = packing.per_token(x.device)
    programs, parts = shares_of(packing, block, turned_share(packing, block, PIECE.value))
    launch(
        wide_codes_kernel,
        (programs,),
        Strided.of(x, packing), mean, key_mask, packing.cu_seqlens, Strided.of(codes, packing), token_scale,
        packing.heads, packing.extent, packing.total, parts, head_dim=x.shape[-1], TURNED=turned, GROUP=group,
        VARLEN=packing.cu_seqlens is not None, BLOCK=block, ROWS=ROWS, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return codes, token_scale
