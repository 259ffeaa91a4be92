"""Postprocess of the backward: scale and rotate the FP16 sums of dQ back, and write dQ in the input's dtype."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Call
from sagebwd.kernels.common.chunks import blocks_apart, shared_blocks, shares_of
from sagebwd.kernels.common.rotation import floats, load_pieces, signs_and_factors, turned
from sagebwd.kernels.common.strided import Strided, pitch_of, row_of
from sagebwd.kernels.common.tile import padded_block, sequence, to_16bit, whose
from sagebwd.kernels.common.transposed import pass_warps
from sagebwd.kernels.runtime.program import launch
from sagebwd.kernels.sm90.operands.bwd_preprocess import float8_scale, shape_of
from sagebwd.kernels.sm90.widths import BackwardTile

# Where a program makes R's signs, so many blocks of queries take them.
TURNED_BLOCKS, TURNED_STAGES = 4, 3


@triton.jit
def sum_scale_of_length(length, UNDONE: tl.constexpr):
    """`dq_sum_scale` of a packed sequence of so many keys: 2^-(3 + bits of the last one's number), or 1 over it."""
    bits = (tl.maximum(length - 1, 0).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    bits = 3 + tl.maximum(bits, 0)
    return ((127 + (bits if UNDONE else -bits)) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["tokens", "total", "blocks", "parts"])
def finish_dq_kernel(
    summed, spread, largest, cu_seqlens, cu_seqlens_k, dq, heads, heads_k, tokens, total, blocks, parts, scale,
    head_dim: tl.constexpr, channels: tl.constexpr, TURNED: tl.constexpr, IN_ROWS: tl.constexpr,
    STAGES: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dQ from its FP16 sums, (heads, D, blocks * BLOCK): times each row's spread, K's scale and ``scale``.

    IN_ROWS: they are (heads, blocks * BLOCK, D). channels: of D, those that dQ has. Programs share the blocks of a
    head, ``parts`` of `shares_of`: fewer where each makes R's signs. scale: of packed sequences what
    `sum_scale_of_length` has to be divided by. TURNED: the sums are of keys times R, of so many channels, and dQ is
    turned back; or 0.
    """
    number, program = shared_blocks(parts, heads, cu_seqlens, tokens, BLOCK, VARLEN)
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    owner = batch * heads_k + head // (heads // heads_k)
    if VARLEN:
        _, length_k = sequence(cu_seqlens_k, batch, tokens, VARLEN)
        scale *= sum_scale_of_length(length_k, True)
    apart = blocks_apart(parts, length, BLOCK, VARLEN)
    if TURNED:
        if VARLEN:  # noqa: SIM102, settled at compile time
            if number >= apart:
                return
        rotation = signs_and_factors(summed.dtype.element_ty, TURNED, head_dim)
        for i in tl.range(number, tl.cdiv(length, BLOCK), apart, num_stages=STAGES):
            finish_block(
                summed, spread, largest, rotation, dq, i, batch, head, z, start, length, owner, total, blocks, scale,
                head_dim, channels, IN_ROWS, VARLEN, BLOCK, BLOCK_D,
            )  # fmt: skip
    elif number * BLOCK < length:
        finish_block(
            summed, spread, largest, None, dq, number, batch, head, z, start, length, owner, total, blocks, scale,
            head_dim, channels, IN_ROWS, VARLEN, BLOCK, BLOCK_D,
        )  # fmt: skip


@triton.jit
def finish_block(
    summed, spread, largest, rotation, dq, number, batch, head, z, start, length, owner, total, blocks, scale,
    head_dim: tl.constexpr, channels: tl.constexpr, IN_ROWS: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Postprocess one query block of `finish_dq_kernel`."""
    first = number * BLOCK
    pitch = blocks * BLOCK
    padded = (padded_block(start, batch, BLOCK, VARLEN) + number) * BLOCK
    local = tl.arange(0, BLOCK)
    inside = first + local < length
    if IN_ROWS:
        tile = load_pieces(summed + (z * pitch + padded) * head_dim, local, head_dim, BLOCK, head_dim, head_dim)
    else:
        columns = tl.arange(0, BLOCK_D)
        at = summed + (z * head_dim + columns)[:, None] * pitch + padded + local[None, :]
        tile = (tl.trans(tl.load(at, mask=(columns < head_dim)[:, None], other=0)),)
    if rotation is not None:
        tile = turned(tile, rotation)  # dQ = dQ' R^T, and R is symmetric
    else:
        tile = floats(tile)
    factor = tl.load(spread + z * total + start + first + local, mask=inside, other=0)
    factor = factor * (float8_scale(tl.load(largest + owner)) * scale)
    at = row_of(dq, batch, head, start + first) + local.to(tl.int64)[:, None] * pitch_of(dq)
    for piece in tl.static_range(len(tile)):
        columns = piece * tile[0].shape[1] + tl.arange(0, tile[piece].shape[1])
        kept = inside[:, None] & (columns < channels)[None, :]
        tl.store(at + columns[None, :], to_16bit(tile[piece] * factor[:, None], dq.at.dtype.element_ty), mask=kept)


def dq_sum_scale(call: Call) -> float:
    """Scale of the FP16 sums of dS' K', lest they overflow.

    A row of P adds up to 1, of 2^e P to at most 448 for each key, dP - delta is within 2 and K' within 448; an eighth
    of 448 * 2 * 448 leaves room for e4m3's rounding. Of packed sequences 1: each has its own (`sum_scale_of_length`).
    """
    if call.packed:
        return 1.0
    return 2.0 ** -(3 + max(call.keys.tokens - 1, 0).bit_length())


def launch_finish_dq(
    call: Call, summed: Tensor, spread: Tensor, largest: Tensor, dq: Tensor, tile: BackwardTile
) -> None:
    """Write dq from its FP16 sums times `dq_sum_scale`, padded to blocks of queries; see `finish_dq_kernel`."""
    queries, block = call.queries, tile.queries
    programs, parts = shares_of(queries, block, TURNED_BLOCKS if call.rotation else 1)
    launch(
        finish_dq_kernel,
        (programs,),
        summed,
        spread,
        largest,
        queries.cu_seqlens,
        call.keys.cu_seqlens,
        Strided.of(dq, queries),
        queries.heads,
        call.keys.heads,
        queries.extent,
        queries.total,
        queries.blocks(block),
        parts,
        call.scale / dq_sum_scale(call),
        channels=call.columns[0],
        IN_ROWS=tile.dq_in_rows,
        STAGES=TURNED_STAGES,
        num_warps=pass_warps(block, call.head_dim),
        **shape_of(call, block),
    )
