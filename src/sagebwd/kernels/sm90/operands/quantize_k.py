"""Quantize K to INT8 in two launches, for recipes whose V stays in 16 bit; V's channel maxima for their backward.

The first sums K up in chunks of tokens, the second takes K's mean from the chunks' sums and quantises K less its mean.
K has one scale a lane (`sagebwd.recipe`), written once for kernels that hold score tiles in quads and once a token for
those that do not. Q's codes the forward makes itself (`sagebwd.kernels.sm90.forward.quantize`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Packing, padded_head_dim
from sagebwd.kernels.common.centered_values import abs_max_of
from sagebwd.kernels.common.chunks import (
    CHUNK,
    MOST_CHUNKS,
    blocks_apart,
    chunk_range,
    chunks_of,
    chunks_of_sequence,
    shared_blocks,
    shares_of,
    turned_share,
)
from sagebwd.kernels.common.rotation import (
    PIECE,
    ROUNDING,
    floats,
    load_pieces,
    piece_width,
    signs_and_factors,
    store_signs,
    turned,
    turned_row,
    whole_row,
)
from sagebwd.kernels.common.strided import Strided, head_of, pitch_of, row_of
from sagebwd.kernels.common.tile import (
    abs_max,
    block_in_sequence,
    divide,
    in_sequence,
    load_rows,
    padded_block,
    psi_scale,
    to_int8,
    whose,
)
from sagebwd.kernels.runtime.program import launch
from sagebwd.recipe import SAMPLE, SAMPLE_AT, SAMPLE_OF, SAMPLED_FROM

LANES = tl.constexpr(4)
# Tokens of a step of a program that sums up. On an H200, head_dim 128, 16384 tokens x 2048, K's codes take 33 us with
# 4 warps, 52 with 8 (benchmarks/results/passes_h200_2026-11-23.txt).
STEP, WARPS = SAMPLE, 4
# Where programs hold R's signs: so many channels of all tiles of K that are under way in one.
TURNED_STAGES = 256
BLOCK_AT, BLOCK_EVERY, SAMPLED_KEYS = map(tl.constexpr, (SAMPLE_AT, SAMPLE_OF, SAMPLED_FROM))
# Chunks as `chunks_of` has them where a quarter of the keys is summed up.
SAMPLED_CHUNK, MOST_SAMPLED_CHUNKS = 1024, 16
MOST_SUMMED, MOST_SAMPLED = tl.constexpr(MOST_CHUNKS), tl.constexpr(MOST_SAMPLED_CHUNKS)
# V's: so many steps' loads are under way at a time.
MAXIMA = {"BLOCK": 32, "STAGES": 4, "num_warps": 4}


class QuantizedK(NamedTuple):
    """Outputs of `launch_quantize_k`: INT8 K in k's shape, FP32 scales, and K's mean."""

    k_int8: Tensor
    k_scale: Tensor  # one a token
    lane_scale: Tensor  # (heads, padded blocks, 4)
    k_mean: Tensor  # (batch, heads, D)
    largest_norm: Tensor  # (batch * heads,): no key as its codes have it has a larger one
    tiles_taken: Tensor  # one INT32, 0: what a forward's programs count up, and leave at 0


@triton.jit(do_not_specialize=["heads", "tokens", "chunk", "chunks", "all_heads"])
def sum_keys_kernel(
    k, sums, turned_sums, counts, largest, key_mask, cu_seqlens, heads, tokens, chunk, chunks, all_heads,
    head_dim: tl.constexpr, TURNED: tl.constexpr, SAMPLED: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum of a chunk's visible keys, and their number: sums (chunks, heads, D), counts (chunks, heads).

    k: `Strided`. A program has a piece of channels. SAMPLED: of many keys some count (`sagebwd.recipe.Recipe.k_mean`),
    BLOCK of every so many. largest (heads,) is set to 0 for the next kernel. TURNED: turned_sums, as sums, are of
    `turned_row`.
    """
    if head_dim <= PIECE:
        sum_piece(
            tl.program_id(0), k, sums, turned_sums, counts, largest, key_mask, cu_seqlens, heads, tokens, chunk,
            chunks, all_heads, 0, head_dim, TURNED, SAMPLED, VARLEN, BLOCK,
        )  # fmt: skip
    elif tl.program_id(0) % 2 == 0:
        sum_piece(
            tl.program_id(0) // 2, k, sums, turned_sums, counts, largest, key_mask, cu_seqlens, heads, tokens, chunk,
            chunks, all_heads, 0, head_dim, TURNED, SAMPLED, VARLEN, BLOCK,
        )  # fmt: skip
    else:
        sum_piece(
            tl.program_id(0) // 2, k, sums, turned_sums, counts, largest, key_mask, cu_seqlens, heads, tokens, chunk,
            chunks, all_heads, 1, head_dim, TURNED, SAMPLED, VARLEN, BLOCK,
        )  # fmt: skip


@triton.jit
def sum_piece(
    number, k, sums, turned_sums, counts, largest, key_mask, cu_seqlens, heads, tokens, chunk, chunks, all_heads,
    piece: tl.constexpr, head_dim: tl.constexpr, TURNED: tl.constexpr, SAMPLED: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program of `sum_keys_kernel`."""
    WIDTH: tl.constexpr = piece_width(head_dim, piece * PIECE)
    of_chunk = number // chunks
    block = number % chunks
    part, batch_head = in_sequence(block, of_chunk, heads, cu_seqlens, tokens, chunk, VARLEN)
    batch, head, _, start, length = whose(batch_head, heads, cu_seqlens, tokens, VARLEN)
    columns = piece * PIECE + tl.arange(0, WIDTH)
    EVEN: tl.constexpr = piece * PIECE + WIDTH <= head_dim
    local = tl.arange(0, BLOCK)
    rows = head_of(k, batch, head)
    total = tl.zeros((BLOCK, WIDTH), tl.float32)
    kept = tl.zeros((BLOCK,), tl.float32)
    MOST: tl.constexpr = MOST_SAMPLED if SAMPLED else MOST_SUMMED
    begin, end = chunk_range(part, chunk, length, MOST, VARLEN)
    step = BLOCK
    if SAMPLED:
        begin += tl.where(length < SAMPLED_KEYS, 0, BLOCK_AT)
        step = tl.where(length < SAMPLED_KEYS, BLOCK, BLOCK_EVERY)
    for first in range(begin, end, step):
        at = rows + (start + first).to(tl.int64) * pitch_of(k)
        tile = load_rows(at, local, columns, pitch_of(k), length - first, head_dim, False, EVEN).to(tl.float32)
        keep = first + local < length
        if key_mask is not None:
            keep = keep & (tl.load(key_mask + batch.to(tl.int64) * tokens + first + local, mask=keep, other=0) != 0)
            tile = tl.where(keep[:, None], tile, 0.0)
        total += tile
        kept += keep.to(tl.float32)
    at = block * all_heads + of_chunk
    row = tl.sum(total, 0)
    tl.store(sums + at.to(tl.int64) * head_dim + columns, row, mask=columns < head_dim)
    if TURNED:
        tl.store(
            turned_sums + at.to(tl.int64) * head_dim + columns, turned_row(row, TURNED, piece), mask=columns < head_dim
        )
    if piece == 0:
        tl.store(counts + at, tl.sum(kept, 0))
        if part == 0:
            tl.store(largest + batch_head, 0)


@triton.jit(do_not_specialize=["heads", "tokens", "total", "blocks", "parts", "chunks", "all_heads"])
def key_codes_kernel(
    k, sums, turned_sums, counts, k_int8, k_scale, lane_scale, largest, mean, taken, key_mask, cu_seqlens, heads,
    tokens, total, blocks, parts, chunks, all_heads, head_dim: tl.constexpr, TURNED: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantize blocks of keys less their mean, a scale for each lane; sums and counts are `sum_keys_kernel`'s.

    Programs share the blocks of a head, ``parts`` of `shares_of`: fewer where each makes R's signs. k, codes:
    `Strided`; codes have COLUMNS channels, zeros beyond k's. TURNED: keys less their mean are taken times R, of so
    many channels, or 0. largest: int32, raised to the bits of what no norm of a head's keys as codes exceeds; atomics,
    as the order does not matter.
    """
    number, batch_head = shared_blocks(parts, heads, cu_seqlens, tokens, BLOCK, VARLEN)
    batch, head, z, start, length = whose(batch_head, heads, cu_seqlens, tokens, VARLEN)
    apart = blocks_apart(parts, length, BLOCK, VARLEN)
    if VARLEN:  # noqa: SIM102, settled at compile time
        if number >= apart:
            return
    chunk = tl.arange(0, CHUNKS)
    first_chunk, chunks = chunks_of_sequence(LEAST, chunks, cu_seqlens, batch, CHUNKS, VARLEN)
    at = (first_chunk + chunk) * all_heads + (head if VARLEN else batch_head)
    count = tl.sum(tl.load(counts + at, mask=chunk < chunks, other=0), 0)
    mu = means(sums, at, count, chunk < chunks, head_dim, COLUMNS)
    if number == 0:
        for piece in tl.static_range(len(mu)):
            columns = piece * mu[0].shape[0] + tl.arange(0, mu[piece].shape[0])
            tl.store(mean + batch_head.to(tl.int64) * head_dim + columns, mu[piece], mask=columns < head_dim)
        if batch_head == 0:
            tl.store(taken, 0)
    if TURNED:
        mu = whole_row(means(turned_sums, at, count, chunk < chunks, head_dim, COLUMNS), TURNED)
        rotation = signs_and_factors(k.at.dtype.element_ty, TURNED, COLUMNS)
    last = tl.cdiv(length, BLOCK)
    if VARLEN:  # a forward reads the scales of one block of a sequence without keys too
        last = tl.maximum(last, 1)
    if TURNED:
        for i in tl.range(number, last, apart, num_stages=STAGES):
            store_quantized(
                k, mu, rotation, k_int8, k_scale, lane_scale, largest, key_mask, i, batch, head, batch_head, z, start,
                length, tokens, total, blocks, head_dim, VARLEN, BLOCK, COLUMNS,
            )  # fmt: skip
    elif number < last:
        store_quantized(
            k, mu, None, k_int8, k_scale, lane_scale, largest, key_mask, number, batch, head, batch_head, z, start,
            length, tokens, total, blocks, head_dim, VARLEN, BLOCK, COLUMNS,
        )  # fmt: skip


@triton.jit
def means(sums, at, count, there, head_dim: tl.constexpr, COLUMNS: tl.constexpr):
    """A head's mean from its chunks' sums, by pieces of channels; at: the head of each chunk that is ``there``."""
    pieces = ()
    for first in tl.static_range(0, COLUMNS, PIECE):
        pieces += (mean_of(sums, at, count, there, first, head_dim, piece_width(COLUMNS, first)),)
    return pieces


@triton.jit
def mean_of(sums, at, count, there, FIRST: tl.constexpr, head_dim: tl.constexpr, WIDTH: tl.constexpr):
    """Of WIDTH channels from FIRST on."""
    columns = FIRST + tl.arange(0, WIDTH)
    at = at.to(tl.int64)[:, None] * head_dim + columns[None, :]
    there = there[:, None] & (columns < head_dim)[None, :]
    return tl.sum(tl.load(sums + at, mask=there, other=0), 0) / tl.maximum(count, 1.0)


@triton.jit
def store_quantized(
    k, mu, rotation, k_int8, k_scale, lane_scale, largest, key_mask, number, batch, head, batch_head, z, start, length,
    tokens, total, blocks, head_dim: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantize one block of `key_codes_kernel`; mu: K's mean, of rotated keys if they are, by pieces of channels."""
    first = number * BLOCK
    local = tl.arange(0, BLOCK)
    inside = first + local < length
    keep = inside
    k_at = row_of(k, batch, head, start + first)
    tile = load_pieces(k_at, local, pitch_of(k), length - first, head_dim, COLUMNS)
    if rotation is not None:
        tile = turned(tile, rotation)
    else:
        tile = floats(tile)
    if key_mask is not None:
        keep = keep & (tl.load(key_mask + batch.to(tl.int64) * tokens + first + local, mask=inside, other=0) != 0)
    store_codes(
        centred(tile, mu, keep), mu, inside, k_int8, k_scale, lane_scale, largest, number, batch, head, batch_head, z,
        start, total, blocks, head_dim, rotation is not None, VARLEN, BLOCK, COLUMNS,
    )  # fmt: skip


@triton.jit
def store_codes(
    tile, mu, inside, k_int8, k_scale, lane_scale, largest, number, batch, head, batch_head, z, start, total, blocks,
    head_dim: tl.constexpr, ROTATED: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Codes and scales of a block of keys less their mean, FP32 by pieces of channels, as `key_codes_kernel` has them.

    Keys beyond the sequence are zeros. ROTATED: what is left of keys that are all alike is rounding.
    """
    first = number * BLOCK
    local = tl.arange(0, BLOCK)
    lanes = abs_max(abs_max(abs_max_of(tile).reshape(BLOCK // 8, LANES, 2), 2), 0)
    if ROTATED:
        largest_mu = tl.max(tl.abs(mu[0]), 0)
        if len(mu) > 1:
            largest_mu = tl.maximum(largest_mu, tl.max(tl.abs(mu[1]), 0))
        lanes = tl.where(lanes < largest_mu * ROUNDING, 0.0, lanes)
    of_lanes = psi_scale(lanes)
    scale = of_lanes[None, :, None].broadcast_to(BLOCK // 8, LANES, 2).reshape(BLOCK)
    out = row_of(k_int8, batch, head, start + first) + local[:, None] * pitch_of(k_int8)
    squares = tl.zeros((BLOCK,), tl.float32)
    for piece in tl.static_range(len(tile)):
        columns = piece * tile[0].shape[1] + tl.arange(0, tile[piece].shape[1])
        x_int8 = to_int8(divide(tile[piece], scale[:, None], (1.0 / scale)[:, None]))
        tl.store(out + columns[None, :], x_int8, mask=inside[:, None] & (columns < COLUMNS)[None, :])
        squares += tl.sum(tile[piece] * tile[piece], 1)
    tl.store(k_scale + z * total + start + first + local, scale, mask=inside)
    block = z * blocks + padded_block(start, batch, BLOCK, VARLEN) + number
    tl.store(lane_scale + block * LANES + tl.arange(0, LANES), of_lanes)
    # a lane of zeros has the scale 1, and nothing to round
    step = tl.max(tl.where(lanes == 0, 0.0, of_lanes), 0)
    norm = tl.sqrt(tl.max(squares, 0)) + step * (0.5 * head_dim**0.5)
    tl.atomic_max(largest + batch_head, norm.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def centred(pieces, mu, keep):
    """Tile less the mean, by pieces; 0 for masked keys."""
    found = ()
    for piece in tl.static_range(len(pieces)):
        found += (tl.where(keep[:, None], pieces[piece] - mu[piece][None, :], 0.0),)
    return found


@triton.jit(do_not_specialize=["heads", "tokens", "chunk", "chunks"])
def channel_maxima_kernel(
    maxima, signs, copy, key_mask, cu_seqlens, v, heads, tokens, chunk, chunks, head_dim: tl.constexpr,
    TURNED: tl.constexpr, TURNED_D: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Raise ``maxima`` (heads, D) int32 to the bits of a chunk's largest magnitudes by channel.

    Of the tokens of v, `Strided`, that count; bits, so that NaN wins; with atomics, as the order does not matter.
    signs (TURNED_D, TURNED_D) INT8: where not None, R's are written for the next kernel. copy: `Strided`, written as v
    is, or None.
    """
    if signs is not None:  # noqa: SIM102, settled at compile time
        if tl.program_id(0) == 0:
            store_signs(signs, TURNED, TURNED_D)
    part, batch_head = block_in_sequence(chunks, heads, cu_seqlens, tokens, chunk, VARLEN)
    batch, head, _, start, length = whose(batch_head, heads, cu_seqlens, tokens, VARLEN)
    columns = tl.arange(0, BLOCK_D)
    local = tl.arange(0, BLOCK)
    rows = head_of(v, batch, head)
    largest = tl.zeros((BLOCK, BLOCK_D), tl.int32)
    begin, end = chunk_range(part, chunk, length, MOST_SUMMED, VARLEN)
    for first in tl.range(begin, end, BLOCK, num_stages=STAGES):
        at = rows + (start + first).to(tl.int64) * pitch_of(v)
        tile = load_rows(at, local, columns, pitch_of(v), length - first, head_dim, False, head_dim == BLOCK_D)
        if copy is not None:
            to = row_of(copy, batch, head, start + first) + local[:, None] * pitch_of(copy) + columns[None, :]
            tl.store(to, tile, mask=(first + local < length)[:, None] & (columns < head_dim)[None, :])
        tile = tile.to(tl.float32)
        if key_mask is not None:
            keep = first + local < length
            keep = keep & (tl.load(key_mask + batch.to(tl.int64) * tokens + first + local, mask=keep, other=0) != 0)
            tile = tl.where(keep[:, None], tile, 0.0)
        largest = tl.maximum(largest, tl.abs(tile).to(tl.int32, bitcast=True))
    if begin < length:
        at = maxima + batch_head.to(tl.int64) * head_dim + columns
        tl.atomic_max(at, tl.max(largest, 0), mask=columns < head_dim, sem="relaxed")


def launch_channel_maxima(
    v: Tensor, keys: Packing, key_mask: Tensor | None, maxima: Tensor, signs: Tensor | None = None, turned: int = 0,
    copy: Tensor | None = None,
) -> None:  # fmt: skip
    """`channel_maxima_kernel` of v, (B, H, N, D) or packed; maxima (batch, heads, D); R is of ``turned`` channels."""
    head_dim = v.shape[-1]
    chunk, chunks = chunks_of(keys)
    launch(
        channel_maxima_kernel,
        (chunks * keys.heads_in_all,),
        maxima, signs, None if copy is None else Strided.of(copy, keys), key_mask, keys.cu_seqlens,
        Strided.of(v, keys), keys.heads, keys.extent, chunk, chunks,
        head_dim=head_dim, TURNED=turned, TURNED_D=0 if signs is None else signs.shape[0],
        VARLEN=keys.cu_seqlens is not None, BLOCK_D=padded_head_dim(head_dim), **MAXIMA,
    )  # fmt: skip


def launch_quantize_k(
    k: Tensor, keys: Packing, key_mask: Tensor | None, block_k: int, *, columns: int | None = None,
    k_sampled: bool = False, turned: int = 0,
) -> QuantizedK:  # fmt: skip
    """Quantize k less its mean, (B, H, N, D) or packed, of any strides but the last dimension's.

    columns: channels of the codes, zeros beyond k's, or None: k's. k_sampled: the mean is that of a sample, where
    there is no mask. turned: channels of the rotation under which codes are made, or 0.
    """
    head_dim, device = k.shape[-1], k.device
    columns = columns or head_dim
    out = QuantizedK(
        torch.empty((*k.shape[:-1], columns), dtype=torch.int8, device=device),
        keys.per_token(device),
        keys.padded(block_k, LANES.value, dtype=torch.float32, device=device),
        torch.empty(keys.batch, keys.heads, head_dim, dtype=torch.float32, device=device),
        torch.empty(keys.batch * keys.heads, dtype=torch.float32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )
    k_sampled = k_sampled and key_mask is None
    most = MOST_SAMPLED_CHUNKS if k_sampled else MOST_CHUNKS
    chunk, chunks = chunks_of(keys, SAMPLED_CHUNK if k_sampled else CHUNK, most)
    all_heads = keys.heads_in_all
    sums = torch.empty(chunks, all_heads, head_dim, dtype=torch.float32, device=device)
    turned_sums = torch.empty_like(sums) if turned else None
    counts = torch.empty(chunks, all_heads, dtype=torch.float32, device=device)
    largest = out.largest_norm.view(torch.int32)
    packed = keys.cu_seqlens is not None
    shape = {"head_dim": head_dim, "TURNED": turned, "VARLEN": packed}
    launch(
        sum_keys_kernel,
        ((2 if head_dim > PIECE.value else 1) * chunks * all_heads,),
        Strided.of(k, keys), sums, turned_sums, counts, largest, key_mask, keys.cu_seqlens, keys.heads, keys.extent,
        chunk, chunks, all_heads, SAMPLED=k_sampled, BLOCK=STEP, num_warps=WARPS, **shape,
    )  # fmt: skip
    block_d = padded_head_dim(columns)
    # a program of each sequence, without a key too: the forward reads what it writes
    programs, parts = shares_of(keys, block_k, turned_share(keys, block_k, block_d) if turned else 1)
    launch(
        key_codes_kernel,
        (programs,),
        Strided.of(k, keys), sums, turned_sums, counts, Strided.of(out.k_int8, keys), out.k_scale, out.lane_scale,
        largest, out.k_mean, out.tiles_taken, key_mask, keys.cu_seqlens, keys.heads, keys.extent, keys.total,
        keys.blocks(block_k), parts, chunks, all_heads, BLOCK=block_k,
        LEAST=SAMPLED_CHUNK if k_sampled else CHUNK, CHUNKS=most,
        STAGES=max(2, TURNED_STAGES // block_d), COLUMNS=columns, num_warps=WARPS * max(1, block_d // 128), **shape,
    )  # fmt: skip
    return out
