"""Transposed e4m3 copies of dO, Q and K, scaled by powers of two: operands of dV, dK and dQ."""

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
    do, q, k, do_factor, q_factor, k_scale, cu_seqlens, cu_seqlens_k, largest, do_t, q_t, k_t, do_stride_b,
    do_stride_h, do_stride_t, q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t, heads, heads_k,
    programs, tokens, tokens_k, total, total_k, blocks, blocks_k, head_dim: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The operands of dV, dK and dQ: `write_float8` of dO, of Q's codes and of K's, one after the other along the
    second axis, of which dO and Q have ``programs`` each. K's rows are PAIRS, its sequences padded to SPAN."""
    program = tl.program_id(1)
    if program < programs:
        write_float8(
            do, do_factor, cu_seqlens, largest, do_t, program, do_stride_b, do_stride_h, do_stride_t, heads, heads_k,
            tokens, total, blocks, head_dim, 0, False, VARLEN, BLOCK, BLOCK, BLOCK_D,
        )  # fmt: skip
    elif program < 2 * programs:
        write_float8(
            q, q_factor, cu_seqlens, largest, q_t, program - programs, q_stride_b, q_stride_h, q_stride_t, heads,
            heads_k, tokens, total, blocks, head_dim, 1, False, VARLEN, BLOCK, BLOCK, BLOCK_D,
        )  # fmt: skip
    else:
        write_float8(
            k, k_scale, cu_seqlens_k, largest, k_t, program - 2 * programs, k_stride_b, k_stride_h, k_stride_t,
            heads_k, heads_k, tokens_k, total_k, blocks_k, head_dim, 2, True, VARLEN, BLOCK, SPAN, BLOCK_D,
        )  # fmt: skip


@triton.jit
def write_float8(
    x, factor, cu_seqlens, largest, transposed, program, stride_b, stride_h, stride_t, heads, heads_k, tokens, total,
    blocks, head_dim: tl.constexpr, WHOSE: tl.constexpr, PAIRS: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """e4m3 of BLOCK rows times their factor and 2^g, transposed by `store_transposed`; zeros up to a sequence's end in
    whole SPANs, of which a head has ``blocks``. WHOSE: which of the three largest magnitudes."""
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    first = tl.program_id(0) * BLOCK
    if first < tl.cdiv(length, SPAN) * SPAN:
        parts: tl.constexpr = SPAN // BLOCK
        block = (z * blocks + padded_block(start, batch, SPAN, VARLEN)) * parts + tl.program_id(0)
        local = tl.arange(0, BLOCK)
        columns = tl.arange(0, BLOCK_D)
        inside = first + local < length
        x += batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + (start + first).to(tl.int64) * stride_t
        tile = load_rows(x, local, columns, stride_t, length - first, head_dim, False, head_dim == BLOCK_D)
        owner = batch * heads_k + head // (heads // heads_k)
        multiplier = tl.load(factor + z * total + start + first + local, mask=inside, other=0)
        code = tile.to(tl.float32) * multiplier[:, None] * float8_factor(tl.load(largest + owner * 3 + WHOSE))
        code = code.to(tl.float8e4nv).to(tl.int8, bitcast=True)
        at = transposed.to(tl.pointer_type(tl.int8), bitcast=True)
        store_transposed(at, code, z, block, blocks * parts, columns, head_dim, BLOCK, PAIRS)


def launch_float8(
    call: Call,
    do: Tensor,
    do_factor: Tensor,
    q: Tensor,
    q_factor: Tensor,
    k: Tensor,
    k_scale: Tensor,
    largest: Tensor,
    block: int,
    span: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The transposed e4m3 copies of dO, Q and K, in blocks of ``block`` queries and ``span`` keys."""
    queries, keys, head_dim = call.queries, call.keys, call.head_dim
    float8 = {"dtype": torch.float8_e4m3fn, "device": do.device}
    do_t, q_t = (queries.padded(block, block * head_dim, **float8) for _ in range(2))
    k_t = keys.padded(span, span * head_dim, **float8)
    programs = queries.batch * queries.heads
    launch(
        float8_kernel,
        (max(queries.grid(block), keys.grid(span) * (span // block)), 2 * programs + keys.batch * keys.heads),
        do,
        q,
        k,
        do_factor,
        q_factor,
        k_scale,
        queries.cu_seqlens,
        keys.cu_seqlens,
        largest,
        do_t,
        q_t,
        k_t,
        *queries.strides(do),
        *queries.strides(q),
        *keys.strides(k),
        queries.heads,
        keys.heads,
        programs,
        queries.tokens,
        keys.tokens,
        queries.total,
        keys.total,
        queries.blocks(block),
        keys.blocks(span),
        SPAN=span,
        **shape_of(call, block),
    )
    return do_t, q_t, k_t
