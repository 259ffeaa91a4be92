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
    do, q, k, do_factor, q_scale, spread, k_scale, cu_seqlens, cu_seqlens_k, largest, do_t, q_t, k_t, do_stride_b,
    do_stride_h, do_stride_t, q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_t, heads, heads_k,
    programs, tokens, tokens_k, total, total_k, blocks, blocks_k, spans, head_dim: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The operands of dV, dK and dQ: `write_float8` of dO, of Q's codes and of K's, one after the other along the
    second axis, of which dO and Q have ``programs`` each.

    do_t, q_t: (heads, D, padded queries). k_t: (heads, blocks of SPAN keys, D, SPAN), its rows PAIRS, each row in the
    first of ``spans`` times its place.
    """
    program = tl.program_id(1)
    if program < programs:
        write_float8(
            do, do_factor, None, cu_seqlens, largest, do_t, program, do_stride_b, do_stride_h, do_stride_t, heads,
            heads_k, tokens, total, blocks, None, head_dim, 0, VARLEN, BLOCK, BLOCK, BLOCK_D,
        )  # fmt: skip
    elif program < 2 * programs:
        write_float8(
            q, q_scale, spread, cu_seqlens, largest, q_t, program - programs, q_stride_b, q_stride_h, q_stride_t,
            heads, heads_k, tokens, total, blocks, None, head_dim, 1, VARLEN, BLOCK, BLOCK, BLOCK_D,
        )  # fmt: skip
    else:
        write_float8(
            k, k_scale, None, cu_seqlens_k, largest, k_t, program - 2 * programs, k_stride_b, k_stride_h, k_stride_t,
            heads_k, heads_k, tokens_k, total_k, blocks_k, spans, head_dim, 2, VARLEN, BLOCK, SPAN, BLOCK_D,
        )  # fmt: skip


@triton.jit
def write_float8(
    x, factor, spread, cu_seqlens, largest, transposed, program, stride_b, stride_h, stride_t, heads, heads_k, tokens,
    total, blocks, spans, head_dim: tl.constexpr, WHOSE: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """e4m3 of BLOCK rows times their factor, spread if not None and 2^g, transposed by `store_transposed`; zeros up to
    a sequence's end in whole SPANs, of which a head has ``blocks``. spans: None, or as of `float8_kernel`'s k_t.
    WHOSE: which of the three largest magnitudes."""
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    first = tl.program_id(0) * BLOCK
    if first < tl.cdiv(length, SPAN) * SPAN:
        parts: tl.constexpr = SPAN // BLOCK
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
        code = tile.to(tl.float32) * multiplier[:, None] * float8_factor(tl.load(largest + owner * 3 + WHOSE))
        code = code.to(tl.float8e4nv).to(tl.int8, bitcast=True)
        at = transposed.to(tl.pointer_type(tl.int8), bitcast=True)
        number = z * blocks + padded_block(start, batch, SPAN, VARLEN)  # of the sequence's first SPAN
        if spans is None:
            block = number * parts + tl.program_id(0)
            store_transposed(at, code, z, block, blocks * parts, columns, head_dim, BLOCK)
        else:
            number += tl.program_id(0) // parts
            block = number * spans * parts + tl.program_id(0) % parts
            store_transposed(at, code, number, block, spans * parts, columns, head_dim, BLOCK, True)


def key_copies(call: Call, dk: Tensor, span: int) -> Tensor:
    """Memory for K's copy, (heads, blocks of ``span`` keys, D, span): dk's if each block's dK takes as much as two.

    Each row is then the first half of one twice as long. Who reads a block, once, is who writes its dK afterwards.
    """
    keys, head_dim, float8 = call.keys, call.head_dim, torch.float8_e4m3fn
    if call.packed or keys.tokens % span != 0:
        return keys.padded(span, head_dim, span, dtype=float8, device=dk.device)
    return dk.view(float8).view(keys.heads_in_all, keys.blocks(span), head_dim, 2 * span)


def launch_float8(
    call: Call,
    do: Tensor,
    do_factor: Tensor,
    q: Tensor,
    q_scale: Tensor,
    spread: Tensor,
    k: Tensor,
    k_scale: Tensor,
    largest: Tensor,
    k_t: Tensor,
    block: int,
    span: int,
) -> tuple[Tensor, Tensor]:
    """The transposed e4m3 copies of dO and Q in blocks of ``block`` queries; K's goes to ``k_t`` (`key_copies`)."""
    queries, keys, head_dim = call.queries, call.keys, call.head_dim
    do_t, q_t = (
        queries.padded(block, block * head_dim, dtype=torch.float8_e4m3fn, device=do.device) for _ in range(2)
    )
    programs = queries.batch * queries.heads
    launch(
        float8_kernel,
        (max(queries.grid(block), keys.grid(span) * (span // block)), 2 * programs + keys.batch * keys.heads),
        do,
        q,
        k,
        do_factor,
        q_scale,
        spread,
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
        k_t.shape[-1] // span,
        SPAN=span,
        **shape_of(call, block),
    )
    return do_t, q_t
