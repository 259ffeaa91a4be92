"""Codes of Q and K straight from the projections' outputs: RMS norm, rotary embedding and psi in two launches.

Rows are normalised and rotated as `sagebwd.kernels.norm_rope` does, and rounded to 16 bits; codes, scales and K's
mean are those of the recipe of these rows, which are not written. The first launch makes Q's codes and sums up the
keys that K's mean is of, the second makes K's codes (`quantize_k`).

A row is in registers as pairs of channels (a, b) that rotate together, so R takes half as many products: R of all
channels is (S S; S -S) / sqrt(D), where S are the signs of R of half of them, whether pairs are the two halves of a
row or channels side by side::

    [a b] R = [(a S + b S)  (a S - b S)] / sqrt(D)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Call
from sagebwd.kernels.common.rotation import signs_and_factors, turned_row
from sagebwd.kernels.common.strided import Strided, pitch_of, row_of
from sagebwd.kernels.common.tile import abs_max, divide, dot_16bit, psi_scale, sequence, to_16bit, to_int8, whose
from sagebwd.kernels.norm_rope import load_pairs, place, store_pairs, strided
from sagebwd.kernels.runtime.alignment import contiguous
from sagebwd.kernels.runtime.program import launch
from sagebwd.kernels.sm90.operands.quantize_k import (
    BLOCK_AT,
    BLOCK_EVERY,
    LANES,
    MOST_SAMPLED_CHUNKS,
    SAMPLED_CHUNK,
    SAMPLED_KEYS,
    STEP,
    QuantizedK,
    centred,
    chunks_of,
    mean_of,
    store_codes,
)


class Tiles(NamedTuple):
    """Rows and heads of a program of Q, warps, stages of its loads; the same of K, whose rows are a scale block."""

    q_block: int
    q_heads: int
    q_warps: int
    q_stages: int
    k_heads: int
    k_warps: int
    k_stages: int


# By head_dim: at 256 a block of keys does not fit registers. Not timed yet.
TILES = {64: Tiles(32, 8, 4, 2, 4, 8, 2), 128: Tiles(32, 8, 4, 2, 4, 8, 2)}


class Codes(NamedTuple):
    """INT8 codes of Q in its shape and of K, FP32 scales, and 1 / rms of their rows, None where there is no norm."""

    q: Tensor
    q_scale: Tensor
    k: QuantizedK
    q_inverse_rms: Tensor | None
    k_inverse_rms: Tensor | None


@triton.jit
def rotated_pairs(
    x, weight, cos, sin, inverse_rms, row, batch, head, token, left, eps, head_dim: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pairs of BLOCK rows of a head, 16 bit, (BLOCK, HALF) each; ``left`` of them are in memory.

    inverse_rms: None without a norm; where ``row`` is not None, 1 / rms is written from there on.
    """
    local = tl.arange(0, BLOCK)
    a, b = load_pairs(row_of(x, batch, head, token), local, pitch_of(x), left, head_dim, HALF, INTERLEAVED)
    if inverse_rms is not None:
        # z = x w / sqrt(mean(x^2) + eps)
        r = 1 / tl.sqrt(tl.sum(a * a + b * b, 1) / head_dim + eps)
        if row is not None:
            tl.store(inverse_rms + row + local, r, mask=local < left)
        a, b = a * r[:, None], b * r[:, None]
        if weight is not None:
            weight_a, weight_b = load_pairs(weight, tl.arange(0, 1), 0, 1, head_dim, HALF, INTERLEAVED)
            a, b = a * weight_a, b * weight_b
    if cos is not None:
        # a' = a cos - b sin, b' = b cos + a sin
        cos_at, sin_at = row_of(cos, batch, head, token), row_of(sin, batch, head, token)
        cos_a, cos_b = load_pairs(cos_at, local, pitch_of(cos), left, head_dim, HALF, INTERLEAVED)
        sin_a, sin_b = load_pairs(sin_at, local, pitch_of(sin), left, head_dim, HALF, INTERLEAVED)
        a, b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    return to_16bit(a, x.at.dtype.element_ty), to_16bit(b, x.at.dtype.element_ty)


@triton.jit
def times_r(a, b, signs):
    """Pairs of [a b] R sqrt(D), FP32; signs of half of R, or None: then of [a b]."""
    if signs is None:
        return a.to(tl.float32), b.to(tl.float32)
    else:
        of_a, of_b = dot_16bit(a, signs), dot_16bit(b, signs)
        return of_a + of_b, of_a - of_b


@triton.jit
def half_signs(dtype: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr):
    """S, (HALF, HALF), where there is a rotation."""
    if TURNED:
        return signs_and_factors(dtype, HALF, HALF)[0][0]
    else:
        return None


@triton.jit
def side_by_side(a, b, INTERLEAVED: tl.constexpr):
    """A tile of pairs by pieces of channels in their order."""
    if INTERLEAVED:
        return (tl.join(a, b).reshape(a.shape[0], 2 * a.shape[1]),)
    else:
        return (a, b)


@triton.jit
def query_codes(
    q, q_int8, q_scale, inverse_rms, weight, cos, sin, heads, tokens, eps, program, head_dim: tl.constexpr,
    HALF: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """psi of a block of tokens, a scale a row, of several heads; packed sequences are one."""
    batch, first, head = place(program, heads, tokens, BLOCK, HEADS)
    local, left = tl.arange(0, BLOCK), tokens - first
    signs = half_signs(q.at.dtype.element_ty, HALF, TURNED)
    for step in tl.range(tl.minimum(heads - head, HEADS), num_stages=STAGES):
        number = head + step
        row = (batch.to(tl.int64) * heads + number) * tokens + first
        a, b = rotated_pairs(
            q, weight, cos, sin, inverse_rms, row, batch, number, first, left, eps, head_dim, HALF, INTERLEAVED, BLOCK
        )
        a, b = times_r(a, b, signs)
        scale = psi_scale(abs_max(tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL), 1))
        inverse = (1.0 / scale)[:, None]
        a, b = divide(a, scale[:, None], inverse), divide(b, scale[:, None], inverse)
        at = row_of(q_int8, batch, number, first) + local[:, None] * pitch_of(q_int8)
        pieces = side_by_side(to_int8(a), to_int8(b), INTERLEAVED)
        for piece in tl.static_range(len(pieces)):
            columns = piece * HALF + tl.arange(0, pieces[piece].shape[1])
            tl.store(at + columns[None, :], pieces[piece], mask=(local < left)[:, None])
        if TURNED:
            scale *= TURNED**-0.5
        tl.store(q_scale + row + local, scale, mask=local < left)


@triton.jit
def key_sums(
    k, sums, turned_sums, counts, largest, weight, cos, sin, inverse_rms, cu_seqlens, heads, tokens, chunk, chunks,
    all_heads, eps, program, head_dim: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr, SAMPLED: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What `quantize_k.sum_keys_kernel` writes, of rotated keys."""
    batch_head, part = program // chunks, program % chunks
    batch, head = batch_head // heads, batch_head % heads
    start, length = sequence(cu_seqlens, batch, tokens, VARLEN)
    local = tl.arange(0, BLOCK)
    sum_a, sum_b = tl.zeros((BLOCK, HALF), tl.float32), tl.zeros((BLOCK, HALF), tl.float32)
    kept = tl.zeros((BLOCK,), tl.float32)
    begin, step = part * chunk, BLOCK
    if SAMPLED:
        begin += tl.where(length < SAMPLED_KEYS, 0, BLOCK_AT)
        step = tl.where(length < SAMPLED_KEYS, BLOCK, BLOCK_EVERY)
    for first in range(begin, tl.minimum(part * chunk + chunk, length), step):
        a, b = rotated_pairs(
            k, weight, cos, sin, inverse_rms, None, batch, head, start + first, length - first, eps, head_dim, HALF,
            INTERLEAVED, BLOCK,
        )  # fmt: skip
        keep = first + local < length
        sum_a += tl.where(keep[:, None], a.to(tl.float32), 0.0)
        sum_b += tl.where(keep[:, None], b.to(tl.float32), 0.0)
        kept += keep.to(tl.float32)
    at = part * all_heads + batch_head
    a, b, one = tl.sum(sum_a, 0), tl.sum(sum_b, 0), tl.arange(0, 1)
    store_pairs(sums + at * head_dim, a[None, :], b[None, :], one, 0, 1, head_dim, HALF, INTERLEAVED)
    if TURNED:
        a, b = turned_row(a, HALF, 0), turned_row(b, HALF, 0)
        low, high = (a + b) * 2**-0.5, (a - b) * 2**-0.5
        store_pairs(turned_sums + at * head_dim, low[None, :], high[None, :], one, 0, 1, head_dim, HALF, INTERLEAVED)
    tl.store(counts + at, tl.sum(kept, 0))
    if part == 0:
        tl.store(largest + batch_head, 0)


@triton.jit(do_not_specialize=["q_tokens", "k_tokens", "chunk", "chunks", "all_heads", "k_programs"])
def query_codes_kernel(
    q, q_int8, q_scale, q_inverse_rms, q_weight, q_cos, q_sin, q_heads, q_tokens, k, sums, turned_sums, counts,
    largest, k_inverse_rms, k_weight, k_cos, k_sin, k_heads, k_tokens, cu_seqlens, chunk, chunks, all_heads, eps,
    k_programs, head_dim: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr,
    SAMPLED: tl.constexpr, VARLEN: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of K's keys, whose programs take longest and come first; then Q's codes. q, k, cos, sin: `Strided`."""
    program = tl.program_id(0)
    if program < k_programs:
        key_sums(
            k, sums, turned_sums, counts, largest, k_weight, k_cos, k_sin, k_inverse_rms, cu_seqlens, k_heads,
            k_tokens, chunk, chunks, all_heads, eps, program, head_dim, HALF, TURNED, INTERLEAVED, SAMPLED, VARLEN,
            STEP,
        )  # fmt: skip
    else:
        query_codes(
            q, q_int8, q_scale, q_inverse_rms, q_weight, q_cos, q_sin, q_heads, q_tokens, eps, program - k_programs,
            head_dim, HALF, TURNED, INTERLEAVED, BLOCK, HEADS, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "total", "blocks", "chunks", "all_heads"])
def key_codes_kernel(
    k, sums, turned_sums, counts, k_int8, scales, lane_scales, largest, mean, taken, inverse_rms, weight, cos, sin,
    cu_seqlens, heads, tokens, total, blocks, chunks, all_heads, eps, head_dim: tl.constexpr, HALF: tl.constexpr,
    TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, VARLEN: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What `quantize_k.key_codes_kernel` writes, of rotated keys, and 1 / rms of their rows."""
    batch, first, head = place(tl.program_id(0), heads, tokens, BLOCK, HEADS)
    start, length = sequence(cu_seqlens, batch, tokens, VARLEN)
    number, left = first // BLOCK, length - first
    inside = first + tl.arange(0, BLOCK) < length
    # a forward reads the scales of one block of a sequence without keys too
    if number < tl.maximum(tl.cdiv(length, BLOCK), 1):
        signs, chunk = half_signs(k.at.dtype.element_ty, HALF, TURNED), tl.arange(0, CHUNKS)
        for step in tl.range(tl.minimum(heads - head, HEADS), num_stages=STAGES):
            batch_head = batch * heads + head + step
            z = whose(batch_head, heads, cu_seqlens, tokens, VARLEN)[2]
            at = chunk * all_heads + batch_head
            count = tl.sum(tl.load(counts + at, mask=chunk < chunks, other=0), 0)
            if number == 0:
                columns = tl.arange(0, head_dim)
                mu = mean_of(sums, at, count, chunk < chunks, 0, head_dim, head_dim)
                tl.store(mean + batch_head * head_dim + columns, mu)
                if batch_head == 0:
                    tl.store(taken, 0)
            mu_sums = turned_sums if TURNED else sums
            if INTERLEAVED:
                mu = (mean_of(mu_sums, at, count, chunk < chunks, 0, head_dim, head_dim),)
            else:
                mu = (
                    mean_of(mu_sums, at, count, chunk < chunks, 0, head_dim, HALF),
                    mean_of(mu_sums, at, count, chunk < chunks, HALF, head_dim, HALF),
                )
            a, b = rotated_pairs(
                k, weight, cos, sin, inverse_rms, z * total + start + first, batch, head + step, start + first, left,
                eps, head_dim, HALF, INTERLEAVED, BLOCK,
            )  # fmt: skip
            a, b = times_r(a, b, signs)
            if TURNED:
                a, b = a * TURNED**-0.5, b * TURNED**-0.5
            tile = centred(side_by_side(a, b, INTERLEAVED), mu, inside)
            store_codes(
                tile, mu, inside, k_int8, scales, lane_scales, largest, number, batch, head + step, batch_head, z,
                start, total, blocks, head_dim, TURNED > 0, VARLEN, BLOCK, head_dim,
            )  # fmt: skip


def launch_norm_rope_codes(call: Call, q: Tensor, k: Tensor, block_k: int, tiles: Tiles | None = None) -> Codes:
    """Codes of q and k normalised and rotated as ``call.prologue`` says; k_mean of a sample if the recipe says so.

    q, k: 16 bit, (B, H, N, D) or packed, any strides but the last dimension's; D of `TILES`, all of which rotates or
    none. No key is masked.
    """
    queries, keys, prologue, device = call.queries, call.keys, call.prologue, q.device
    tiles = tiles or TILES[call.head_dim]
    head_dim, with_norm, sampled = q.shape[-1], prologue.eps is not None, call.recipe.k_mean == "sample"
    all_heads = keys.batch * keys.heads
    out = Codes(
        torch.empty(q.shape, dtype=torch.int8, device=device),
        queries.per_token(device),
        QuantizedK(
            torch.empty(k.shape, dtype=torch.int8, device=device),
            keys.per_token(device),
            keys.padded(block_k, LANES.value, dtype=torch.float32, device=device),
            torch.empty(keys.batch, keys.heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(all_heads, dtype=torch.float32, device=device),
            torch.empty(1, dtype=torch.int32, device=device),
        ),
        queries.per_token(device) if with_norm else None,
        keys.per_token(device) if with_norm else None,
    )
    chunk, chunks = chunks_of(keys, SAMPLED_CHUNK, MOST_SAMPLED_CHUNKS)
    sums = torch.empty(chunks, all_heads, head_dim, dtype=torch.float32, device=device)
    turned_sums = torch.empty_like(sums) if call.turned else None
    counts = torch.empty(chunks, all_heads, dtype=torch.float32, device=device)
    largest = out.k.largest_norm.view(torch.int32)
    # packed sequences of queries are one: their rows have nothing in common but places in cos and sin
    q_batch, q_tokens = (1, queries.total) if call.packed else (queries.batch, queries.tokens)
    q_weight, k_weight = contiguous(prologue.q_weight), contiguous(prologue.k_weight)
    q_cos, q_sin, k_cos, k_sin = (strided(x) for x in (prologue.q_cos, prologue.q_sin, prologue.k_cos, prologue.k_sin))
    eps = prologue.eps if with_norm else 0.0
    shape = {
        "head_dim": head_dim, "HALF": head_dim // 2, "TURNED": call.turned, "INTERLEAVED": prologue.interleaved,
        "VARLEN": call.packed,
    }  # fmt: skip
    q_programs = q_batch * -(-queries.heads // tiles.q_heads) * -(-q_tokens // tiles.q_block)
    launch(
        query_codes_kernel,
        (chunks * all_heads + q_programs,),
        Strided.of(q, queries), Strided.of(out.q, queries), out.q_scale, out.q_inverse_rms, q_weight, q_cos, q_sin,
        queries.heads, q_tokens, Strided.of(k, keys), sums, turned_sums, counts, largest, out.k_inverse_rms, k_weight,
        k_cos, k_sin, keys.heads, keys.tokens, keys.cu_seqlens, chunk, chunks, all_heads, eps, chunks * all_heads,
        SAMPLED=sampled, STEP=STEP, BLOCK=tiles.q_block, HEADS=tiles.q_heads, STAGES=tiles.q_stages,
        num_warps=tiles.q_warps, **shape,
    )  # fmt: skip
    k_programs = max(keys.grid(block_k), 1) * keys.batch * -(-keys.heads // tiles.k_heads)
    launch(
        key_codes_kernel,
        (k_programs,),
        Strided.of(k, keys), sums, turned_sums, counts, Strided.of(out.k.k, keys), out.k.k_scale, out.k.lane_scale,
        largest, out.k.k_mean, out.k.tiles_taken, out.k_inverse_rms, k_weight, k_cos, k_sin, keys.cu_seqlens,
        keys.heads, keys.tokens, keys.total, keys.blocks(block_k), chunks, all_heads, eps, CHUNKS=MOST_SAMPLED_CHUNKS,
        BLOCK=block_k, HEADS=tiles.k_heads, STAGES=tiles.k_stages, num_warps=tiles.k_warps, **shape,
    )  # fmt: skip
    return out
