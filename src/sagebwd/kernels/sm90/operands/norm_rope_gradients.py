"""End of the backward of calls with a prologue: dQ of its sums, then the gradients of rotary embedding and RMS norm.

dQ is scaled and rotated back as `bwd_postprocess` does, rounded to 16 bits, and goes on in registers; dK, which the
kernel before wrote, is read. Both become gradients of the projections' outputs in one launch, with each program's
share of the weights' gradients, by the mathematics of `sagebwd.kernels.norm_rope`.

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

from sagebwd.call import Call, Saved, empty_like_rows
from sagebwd.kernels.common.rotation import signs_and_factors
from sagebwd.kernels.common.strided import Strided, pitch_of, row_of
from sagebwd.kernels.common.tile import dot_16bit, padded_block, sequence, to_16bit, whose
from sagebwd.kernels.norm_rope import backward_rows, load_pairs, place, store_pairs, strided
from sagebwd.kernels.runtime.alignment import contiguous
from sagebwd.kernels.runtime.program import launch
from sagebwd.kernels.sm90.operands.bwd_postprocess import dq_sum_scale
from sagebwd.kernels.sm90.operands.bwd_preprocess import float8_scale
from sagebwd.kernels.sm90.widths import BackwardTile


class Tiles(NamedTuple):
    """Rows, part of a block of sums, and heads of a program of Q, and stages; the same of K; warps of both."""

    q_block: int
    q_heads: int
    q_stages: int
    k_block: int
    k_heads: int
    k_stages: int
    warps: int


# By head_dim. At 128 the best of seven on an H200 (16K tokens, 16 heads); at 64 not timed.
TILES = {64: Tiles(32, 8, 2, 16, 8, 2, 4), 128: Tiles(16, 16, 3, 16, 16, 3, 4)}


class Gradients(NamedTuple):
    """Of q and k, each as its own lies, and the programs' shares of those of the weights, (programs, D) FP32."""

    dq: Tensor
    dk: Tensor
    dq_weight: Tensor | None
    dk_weight: Tensor | None


@triton.jit
def times_r(a, b, signs, TURNED: tl.constexpr):
    """Pairs of [a b] R sqrt(D), FP32, by the signs of half of R; of [a b] where there is no rotation."""
    if TURNED:
        of_a, of_b = dot_16bit(a, signs), dot_16bit(b, signs)
        return of_a + of_b, of_a - of_b
    else:
        return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def half_signs(dtype: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr):
    """S, (HALF, HALF), where there is a rotation, else nothing that is read: Triton 3.6 takes no None into a loop."""
    if TURNED:
        return signs_and_factors(dtype, HALF, HALF)[0][0]
    else:
        return tl.zeros((1, 1), dtype)


@triton.jit
def load_sums(
    summed, z, first, pitch, head_dim: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    IN_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pairs of a block of dQ's FP16 sums, (BLOCK, HALF) each; first: the block's first of ``pitch`` rows a head."""
    local = tl.arange(0, BLOCK)
    if IN_ROWS:
        rows = summed + (z * pitch + first) * head_dim
        a, b = load_pairs(rows, local, head_dim, BLOCK, head_dim, HALF, INTERLEAVED)
        return a.to(summed.dtype.element_ty), b.to(summed.dtype.element_ty)
    else:
        channels = tl.arange(0, HALF)
        apart = HALF
        if INTERLEAVED:
            channels *= 2
            apart = 1
        at = summed + (z * head_dim + channels)[:, None] * pitch + first + local[None, :]
        return tl.trans(tl.load(at)), tl.trans(tl.load(at + apart * pitch))


@triton.jit
def finish_queries(
    summed, spread, largest, cu_seqlens, x, dx, inverse_rms, weight, dweight, cos, sin, heads, heads_k, tokens, total,
    blocks, scale, program, head_dim: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr, IN_ROWS: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS queries of several heads; dweight: the program's share, zeros where a sequence ends before.

    summed: of sequences that are padded to whole BLOCKs.
    """
    batch, first, head = place(program, heads, tokens, ROWS, HEADS)
    start, length = sequence(cu_seqlens, batch, tokens, VARLEN)
    local, one, left = tl.arange(0, ROWS), tl.arange(0, 1), length - first
    padded = padded_block(start, batch, BLOCK, VARLEN) * BLOCK + first
    if weight is not None:
        weight_a, weight_b = load_pairs(weight, one, 0, 1, head_dim, HALF, INTERLEAVED)
        dweight_a, dweight_b = tl.zeros((HALF,), tl.float32), tl.zeros((HALF,), tl.float32)
    if left > 0:
        signs = half_signs(summed.dtype.element_ty, HALF, TURNED)
        for step in tl.range(tl.minimum(heads - head, HEADS), num_stages=STAGES):
            number = head + step
            z = whose(batch * heads + number, heads, cu_seqlens, tokens, VARLEN)[2]
            owner = batch * heads_k + number // (heads // heads_k)
            row = z * total + start + first + local
            # dQ = dQ' R
            a, b = load_sums(summed, z, padded, blocks * BLOCK, head_dim, HALF, INTERLEAVED, IN_ROWS, ROWS)
            a, b = times_r(a, b, signs, TURNED)
            factor = tl.load(spread + row, mask=local < left, other=0)
            factor = factor * (float8_scale(tl.load(largest + owner)) * scale)
            if TURNED:
                a, b = a * TURNED**-0.5, b * TURNED**-0.5
            a = to_16bit(a * factor[:, None], dx.at.dtype.element_ty).to(tl.float32)
            b = to_16bit(b * factor[:, None], dx.at.dtype.element_ty).to(tl.float32)
            if cos is not None:
                # da = da' cos + db' sin, db = db' cos - da' sin
                cos_at, sin_at = row_of(cos, batch, number, start + first), row_of(sin, batch, number, start + first)
                cos_a, cos_b = load_pairs(cos_at, local, pitch_of(cos), left, head_dim, HALF, INTERLEAVED)
                sin_a, sin_b = load_pairs(sin_at, local, pitch_of(sin), left, head_dim, HALF, INTERLEAVED)
                a, b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
            if inverse_rms is not None:
                x_at = row_of(x, batch, number, start + first)
                unit_a, unit_b = load_pairs(x_at, local, pitch_of(x), left, head_dim, HALF, INTERLEAVED)
                r = tl.load(inverse_rms + row, mask=local < left, other=0)[:, None]
                unit_a, unit_b = unit_a * r, unit_b * r
                if weight is not None:
                    # dw += dz x r
                    dweight_a += tl.sum(a * unit_a, 0)
                    dweight_b += tl.sum(b * unit_b, 0)
                    a, b = a * weight_a, b * weight_b
                # dx = r (dz w - x r mean(dz w x r))
                mean = (tl.sum(a * unit_a + b * unit_b, 1) / head_dim)[:, None]
                a, b = (a - unit_a * mean) * r, (b - unit_b * mean) * r
            at = row_of(dx, batch, number, start + first)
            store_pairs(at, a, b, local, pitch_of(dx), left, head_dim, HALF, INTERLEAVED)
    if weight is not None:
        dweight += program.to(tl.int64) * head_dim
        store_pairs(dweight, dweight_a[None, :], dweight_b[None, :], one, 0, 1, head_dim, HALF, INTERLEAVED)


@triton.jit(do_not_specialize=["tokens", "total", "blocks", "k_tokens", "q_programs"])
def finish_gradients_kernel(
    summed, spread, largest, cu_seqlens, q, dq, q_inverse_rms, q_weight, dq_weight, q_cos, q_sin, heads, tokens, total,
    blocks, scale, dk_out, k, dk, k_inverse_rms, k_weight, dk_weight, k_cos, k_sin, heads_k, k_tokens,
    q_programs, head_dim: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr,
    IN_ROWS: tl.constexpr, VARLEN: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, STAGES: tl.constexpr, BLOCK_K: tl.constexpr, HEADS_K: tl.constexpr, STAGES_K: tl.constexpr,
):  # fmt: skip
    """`finish_queries`, then rows of dK; q, k, dq, dk, dk_out, cos and sin: `Strided`. largest: of key heads' K."""
    program = tl.program_id(0)
    if program < q_programs:
        finish_queries(
            summed, spread, largest, cu_seqlens, q, dq, q_inverse_rms, q_weight, dq_weight, q_cos, q_sin, heads,
            heads_k, tokens, total, blocks, scale, program, head_dim, HALF, TURNED, INTERLEAVED, IN_ROWS, VARLEN,
            BLOCK, ROWS, HEADS, STAGES,
        )  # fmt: skip
    else:
        backward_rows(
            dk_out, dk, k, k_inverse_rms, k_weight, dk_weight, k_cos, k_sin, heads_k, k_tokens, program - q_programs,
            head_dim, ROTARY, HALF, head_dim - ROTARY, INTERLEAVED, BLOCK_K, HEADS_K, STAGES_K,
        )  # fmt: skip


def launch_finish_gradients(
    call: Call, saved: Saved, summed: Tensor, spread: Tensor, largest: Tensor, dk_out: Tensor, q: Tensor | None,
    k: Tensor | None, dq: Tensor, tile: BackwardTile, tiles: Tiles | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of the projections' outputs: dq, whose memory it is, from its FP16 sums; dk from ``dk_out``.

    q, k: as forward was given them; None where there is no norm. summed, spread, largest: as `launch_finish_dq`.
    """
    queries, keys, prologue, block = call.queries, call.keys, call.prologue, tile.queries
    tiles = tiles or TILES[call.head_dim]
    head_dim, device, all_packed = call.head_dim, dq.device, call.packed
    dk = empty_like_rows(dk_out if k is None else k)
    k_batch, k_tokens = (1, keys.total) if all_packed else (keys.batch, keys.tokens)
    q_block = min(tiles.q_block, block)
    q_programs = queries.batch * max(queries.grid(q_block), 1) * -(-queries.heads // tiles.q_heads)
    k_programs = k_batch * -(-keys.heads // tiles.k_heads) * -(-k_tokens // tiles.k_block)

    def shares(weight: Tensor | None, programs: int) -> Tensor | None:
        return None if weight is None else torch.empty(programs, head_dim, dtype=torch.float32, device=device)

    out = Gradients(dq, dk, shares(prologue.q_weight, q_programs), shares(prologue.k_weight, k_programs))
    q_cos, q_sin, k_cos, k_sin = map(strided, (prologue.q_cos, prologue.q_sin, prologue.k_cos, prologue.k_sin))
    launch(
        finish_gradients_kernel,
        (q_programs + k_programs,),
        summed, spread, largest, queries.cu_seqlens, None if q is None else Strided.of(q, queries),
        Strided.of(dq, queries), saved.q_inverse_rms, contiguous(prologue.q_weight), out.dq_weight, q_cos, q_sin,
        queries.heads, queries.tokens, queries.total, queries.blocks(block), call.scale / dq_sum_scale(call),
        Strided.of(dk_out, keys), None if k is None else Strided.of(k, keys), Strided.of(dk, keys),
        saved.k_inverse_rms, contiguous(prologue.k_weight), out.dk_weight, k_cos, k_sin, keys.heads, k_tokens,
        q_programs, head_dim=head_dim, HALF=head_dim // 2, TURNED=call.turned,
        INTERLEAVED=prologue.interleaved, IN_ROWS=tile.dq_in_rows, VARLEN=all_packed,
        ROTARY=0 if k_cos is None else head_dim, BLOCK=block, ROWS=q_block, HEADS=tiles.q_heads, STAGES=tiles.q_stages,
        BLOCK_K=tiles.k_block, HEADS_K=tiles.k_heads, STAGES_K=tiles.k_stages,
        num_warps=tiles.warps,
    )  # fmt: skip
    return out
