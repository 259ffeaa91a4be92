"""dQ from the FP16 sums that the one-kernel backward leaves."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Call
from sagebwd.kernels.operands.fp8_copies import float8_scale
from sagebwd.kernels.operands.fp8_rows import shape_of
from sagebwd.kernels.operands.transposed import NO_SPECIALIZE
from sagebwd.kernels.replay import launch
from sagebwd.kernels.tile import padded_block, to_16bit, whose


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def finish_dq_kernel(
    summed, spread, largest, cu_seqlens, dq, dq_b, dq_h, dq_n, heads, heads_k, tokens, total, blocks, scale,
    head_dim: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    BY_REGISTER: tl.constexpr = False,
):  # fmt: skip
    """dQ from its FP16 sums, times each row's spread, K's scale and ``scale``.

    summed: (heads, D, blocks * BLOCK), or BY_REGISTER (heads, blocks, D * BLOCK), see `block_by_register`.
    """
    batch, head, z, start, length = whose(tl.program_id(1), heads, cu_seqlens, tokens, VARLEN)
    first = tl.program_id(0) * BLOCK
    if first >= length:
        return
    pitch = blocks * BLOCK
    padded = (padded_block(start, batch, BLOCK, VARLEN) + tl.program_id(0)) * BLOCK
    local = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    inside = first + local < length
    kept = inside[:, None] & (columns < head_dim)[None, :]
    if BY_REGISTER:
        tl.static_assert(head_dim == BLOCK_D)
        tile = block_by_register(summed + (z * pitch + padded) * head_dim, BLOCK, BLOCK_D).to(tl.float32)
    else:
        at = summed + (z * head_dim + columns)[:, None] * pitch + padded + local[None, :]
        tile = tl.trans(tl.load(at, mask=(columns < head_dim)[:, None], other=0)).to(tl.float32)
    factor = tl.load(spread + z * total + start + first + local, mask=inside, other=0)
    owner = batch * heads_k + head // (heads // heads_k)
    factor = factor * (float8_scale(tl.load(largest + owner * 3 + 2)) * scale)
    dq += batch.to(tl.int64) * dq_b + head.to(tl.int64) * dq_h + (start + first).to(tl.int64) * dq_n
    at = dq + local.to(tl.int64)[:, None] * dq_n + columns[None, :]
    tl.store(at, to_16bit(tile * factor[:, None], dq.dtype.element_ty), mask=kept)


@triton.jit
def block_by_register(block, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK, BLOCK_D) of dQ from dQ^T as warpgroups of 64 channels hold it in registers, 8 of a thread at a time.

    Threads count as warp, 8 rows, 4 columns; registers as columns' eights, rows r and r + 8, and two columns.
    """
    values = tl.load(block + tl.arange(0, BLOCK * BLOCK_D))
    values = tl.reshape(values, (BLOCK_D // 64, BLOCK // 16, 4, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(values, (1, 5, 4, 7, 0, 2, 6, 3)), (BLOCK, BLOCK_D))


def dq_sum_scale(call: Call) -> float:
    """What sums of dS' K' are multiplied by, lest FP16 overflow.

    A row of P adds up to 1, of 2^e P to at most 448 for each key, dP - delta is within 2 and K' within 448; an eighth
    of 448 * 2 * 448 leaves room for e4m3's rounding.
    """
    return 2.0 ** -(3 + max(call.keys.tokens - 1, 0).bit_length())


def launch_finish_dq(
    call: Call, summed: Tensor, spread: Tensor, largest: Tensor, dq: Tensor, block: int, by_register: bool = False
) -> None:
    """Write dq from its FP16 sums times `dq_sum_scale`, padded to blocks of ``block``; see `finish_dq_kernel`."""
    queries = call.queries
    launch(
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
        BY_REGISTER=by_register,
        **shape_of(call, block),
    )
