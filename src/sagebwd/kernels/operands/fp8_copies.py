"""Transposed e4m3 copies of dO and Q, scaled by powers of two: operands of dV and dK."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Call
from sagebwd.kernels.operands.fp8_rows import SIZES, shape_of
from sagebwd.kernels.operands.transposed import store_transposed
from sagebwd.kernels.replay import launch
from sagebwd.kernels.tile import load_rows, padded_block, whose


@triton.jit
def float8_factor(bits):
    """2^g for a largest magnitude of these bits: what leaves it at most 448, which is 1.75 * 2^8."""
    exponent = tl.maximum((bits + 0x1FFFFF) >> 23, 16)
    return ((262 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def float8_scale(bits):
    """2^-g: what takes back `float8_factor` of the same bits; NaN where the largest was not finite, as codes are."""
    exponent = tl.maximum((bits + 0x1FFFFF) >> 23, 16)
    scale = ((exponent - 8) << 23).to(tl.float32, bitcast=True)
    return tl.where(bits >= 0x7F800000, float("nan"), scale)


@triton.jit(do_not_specialize=SIZES)
def float8_kernel(
    do, q, do_factor, q_scale, spread, cu_seqlens, largest, do_t, q_t, do_stride_b, do_stride_h, do_stride_t,
    q_stride_b, q_stride_h, q_stride_t, heads, heads_k, programs, tokens, total, blocks, head_dim: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The operands of dV and dK: `write_float8` of dO and of Q's codes, one after the other along the second axis, of
    which each has ``programs``."""
    program = tl.program_id(1)
    if program < programs:
        write_float8(
            do, do_factor, None, cu_seqlens, largest, do_t, program, do_stride_b, do_stride_h, do_stride_t, heads,
            heads_k, tokens, total, blocks, head_dim, VARLEN, BLOCK, BLOCK_D,
        )  # fmt: skip
    else:
        write_float8(
            q, q_scale, spread, cu_seqlens, largest + 1, q_t, program - programs, q_stride_b, q_stride_h, q_stride_t,
            heads, heads_k, tokens, total, blocks, head_dim, VARLEN, BLOCK, BLOCK_D,
        )  # fmt: skip


@triton.jit
def write_float8(
    x, factor, spread, cu_seqlens, largest, transposed, program, stride_b, stride_h, stride_t, heads, heads_k, tokens,
    total, blocks, head_dim: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """e4m3 of BLOCK rows times their factor, spread if not None and 2^g, transposed by `store_transposed`; zeros past
    a sequence's end. largest: bits of the largest magnitude, one of three a key head."""
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    first = tl.program_id(0) * BLOCK
    if first < length:
        block = z * blocks + padded_block(start, batch, BLOCK, VARLEN) + tl.program_id(0)
        local = tl.arange(0, BLOCK)
        columns = tl.arange(0, BLOCK_D)
        inside = first + local < length
        x += batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + (start + first).to(tl.int64) * stride_t
        tile = load_rows(x, local, columns, stride_t, length - first, head_dim, False, head_dim == BLOCK_D)
        owner = batch * heads_k + head // (heads // heads_k)
        row = z * total + start + first + local
        multiplier = tl.load(factor + row, mask=inside, other=0)
        if spread is not None:
            multiplier *= tl.load(spread + row, mask=inside, other=0)
        code = tile.to(tl.float32) * multiplier[:, None] * float8_factor(tl.load(largest + owner * 3))
        code = code.to(tl.float8e4nv).to(tl.int8, bitcast=True)
        at = transposed.to(tl.pointer_type(tl.int8), bitcast=True)
        store_transposed(at, code, z, block, blocks, columns, head_dim, BLOCK)


def launch_float8(
    call: Call,
    do: Tensor,
    do_factor: Tensor,
    q: Tensor,
    q_scale: Tensor,
    spread: Tensor,
    largest: Tensor,
    block: int,
) -> tuple[Tensor, Tensor]:
    """The transposed e4m3 copies of dO and Q in blocks of ``block`` queries."""
    queries, head_dim = call.queries, call.head_dim
    do_t, q_t = (
        queries.padded(block, block * head_dim, dtype=torch.float8_e4m3fn, device=do.device) for _ in range(2)
    )
    programs = queries.batch * queries.heads
    launch(
        float8_kernel,
        (queries.grid(block), 2 * programs),
        do,
        q,
        do_factor,
        q_scale,
        spread,
        queries.cu_seqlens,
        largest,
        do_t,
        q_t,
        *queries.strides(do),
        *queries.strides(q),
        queries.heads,
        call.keys.heads,
        programs,
        queries.tokens,
        queries.total,
        queries.blocks(block),
        **shape_of(call, block),
    )
    return do_t, q_t
