"""Codes of Q and K straight from the projections' outputs: RMS norm, rotary embedding and psi in two launches.

Rows are normalised and rotated as `sagebwd.kernels.norm_rope` does, and rounded to 16 bits; codes, scales and K's
mean are those of the recipe of these rows, which are not written. The first launch (cuda/query_codes.cu) makes Q's
codes and sums up the keys that K's mean is of, the second (cuda/key_codes.cu) makes K's codes.

CUDA C++, as of 16 bits in and 8 out it is a pass of few bytes an instruction: R is two tensor core products of
16 x 16 signs and three levels of sums in registers, and a thread has both channels of a pair.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.call import Call, Prologue, empty_like_rows
from sagebwd.kernels.runtime.alignment import aligned_rows, contiguous, fits_tma
from sagebwd.kernels.runtime.device import capability
from sagebwd.kernels.runtime.nvrtc import Source, kernel_of
from sagebwd.kernels.runtime.program import copy, launch
from sagebwd.kernels.sm90.forward.variant import SCALE_BLOCK
from sagebwd.kernels.sm90.operands.quantize_k import (
    LANES,
    MOST_SAMPLED_CHUNKS,
    SAMPLED_CHUNK,
    QuantizedK,
    chunks_of,
)

SOURCES = Path(__file__).parent / "cuda"
# Tokens of a warp of Q; warps and heads of a thread block, and thread blocks that a multiprocessor holds, of Q and of
# K. Timed within whole blocks; no others were.
TOKENS = 8
Q_WARPS, Q_HEADS, Q_BLOCKS_AN_SM = 4, 4, 4
K_WARPS, K_HEADS, K_BLOCKS_AN_SM = SCALE_BLOCK // 16, 8, 2


class Codes(NamedTuple):
    """INT8 codes of Q in its shape and of K, FP32 scales, and 1 / rms of their rows, None where there is no norm."""

    q_int8: Tensor
    q_scale: Tensor
    k: QuantizedK
    q_inverse_rms: Tensor | None
    k_inverse_rms: Tensor | None


def macros_of(head_dim: int, turned: int, dtype: torch.dtype, prologue: Prologue) -> dict[str, int]:
    """Macros of rows.cuh that follow from a call."""
    weight, cos = prologue.q_weight if prologue.k_weight is None else prologue.k_weight, prologue.q_cos
    return {
        "D": head_dim, "HALF": dtype == torch.float16, "TURNED": turned, "INTERLEAVED": prologue.interleaved,
        "NORM": prologue.eps is not None, "ROPE": cos is not None,
        "WEIGHT_BYTES": 0 if weight is None else _bytes(weight, dtype),
        "TABLE_BYTES": 2 if cos is None else _bytes(cos, dtype),
    }  # fmt: skip


def sources(head_dim: int, turned: int, dtype: torch.dtype, prologue: Prologue) -> tuple[Source, Source]:
    """What makes Q's codes, and K's; turned: channels of the rotation, or 0. Tables and weights as `read_prologue`."""
    shared, found = macros_of(head_dim, turned, dtype, prologue), []
    for name, warps, heads, blocks_an_sm, rows in (
        ("query_codes", Q_WARPS, Q_HEADS, Q_BLOCKS_AN_SM, 2 + Q_WARPS),
        ("key_codes", K_WARPS, K_HEADS, K_BLOCKS_AN_SM, 1 + K_HEADS),
    ):
        macros = shared | {"WARPS": warps, "HEADS": heads, "CTAS": blocks_an_sm}
        files = SOURCES / "rows.cuh", SOURCES / f"{name}.cu"
        few = 4 * (heads + 2 * warps * (LANES.value + 1))  # what warps of K tell each other
        found.append(
            Source(name, files, tuple((x, int(y)) for x, y in macros.items()), warps, rows * 4 * head_dim + few)
        )
    return tuple(found)


def launch_norm_rope_codes(call: Call, q: Tensor, k: Tensor) -> Codes:
    """Codes of q and k normalised and rotated as ``call.prologue`` says; k_mean of a sample if the recipe says so.

    q, k: 16 bit, (B, H, N, D) or packed, any strides but the last dimension's; D 64 or 128, all of which rotates or
    none. No key is masked.
    """
    queries, keys, device = call.queries, call.keys, q.device
    prologue = read_prologue(call.prologue, q.dtype)
    head_dim, with_norm, sampled = q.shape[-1], prologue.eps is not None, call.recipe.k_mean == "sample"
    q, k = (x if fits_tma(x) else copy(empty_like_rows(x), x) for x in (q, k))
    all_heads, owners = keys.heads_in_all, keys.batch * keys.heads
    out = Codes(
        torch.empty(q.shape, dtype=torch.int8, device=device),
        queries.per_token(device),
        QuantizedK(
            torch.empty(k.shape, dtype=torch.int8, device=device),
            keys.per_token(device),
            keys.padded(SCALE_BLOCK, LANES.value, dtype=torch.float32, device=device),
            torch.empty(keys.batch, keys.heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(owners, dtype=torch.float32, device=device),
            torch.empty(1, dtype=torch.int32, device=device),
        ),
        queries.per_token(device) if with_norm else None,
        keys.per_token(device) if with_norm else None,
    )
    chunk, chunks = chunks_of(keys, SAMPLED_CHUNK, MOST_SAMPLED_CHUNKS)
    sums = torch.empty(chunks, all_heads, head_dim, dtype=torch.float32, device=device)
    turned_sums = torch.empty_like(sums) if call.turned else None
    counts = torch.empty(chunks, all_heads, dtype=torch.float32, device=device)
    # packed sequences of queries are one: their rows have nothing in common but places in cos and sin
    q_batch, q_tokens = (1, queries.total) if call.packed else (queries.batch, queries.tokens)
    k_batch = 1 if call.packed else keys.batch
    eps = prologue.eps if with_norm else 0.0
    of_queries, of_keys = sources(head_dim, call.turned, q.dtype, prologue)
    arch = capability(call.device)
    q_programs = q_batch * -(-queries.heads // Q_HEADS) * -(-q_tokens // (TOKENS * Q_WARPS))
    launch(
        kernel_of(of_queries, arch),
        (chunks * all_heads + q_programs,),
        q, *queries.strides(q), out.q_int8, *queries.strides(out.q_int8), out.q_scale, out.q_inverse_rms,
        prologue.q_weight, *tables_of(prologue.q_cos, prologue.q_sin),
        queries.heads, q_tokens, k, *keys.strides(k), prologue.k_weight,
        *tables_of(prologue.k_cos, prologue.k_sin), sums, turned_sums, counts, out.k.largest_norm, keys.cu_seqlens,
        keys.heads, keys.extent, chunk, chunks, all_heads, int(sampled), eps,
    )  # fmt: skip
    launch(
        kernel_of(of_keys, arch),
        (max(keys.blocks(SCALE_BLOCK), 1) * k_batch * -(-keys.heads // K_HEADS),),
        k, *keys.strides(k), out.k.k_int8, *keys.strides(out.k.k_int8), out.k.k_scale, out.k.lane_scale,
        out.k_inverse_rms, prologue.k_weight, *tables_of(prologue.k_cos, prologue.k_sin),
        sums, turned_sums, counts, out.k.k_mean,
        out.k.largest_norm, out.k.tiles_taken, keys.cu_seqlens, keys.heads, keys.extent, keys.total,
        keys.blocks(SCALE_BLOCK), chunk, chunks, all_heads, eps,
    )  # fmt: skip
    return out


def read_prologue(prologue: Prologue, dtype: torch.dtype) -> Prologue:
    """The prologue with tensors as the kernels read them: weights alike, tables alike, of 16 bits as Q or FP32."""
    eps, interleaved, *tensors = prologue
    weights, tables = tensors[:2], tensors[2:]
    return Prologue(eps, interleaved, *_numbers(weights, dtype), *_numbers(tables, dtype))


def _numbers(tensors: list[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    """In chunks of 16 bytes that begin where they may; FP32 unless all are of a dtype, or none."""
    given = [x for x in tensors if x is not None]
    wanted = dtype if all(x.dtype == dtype for x in given) else torch.float32
    found = []
    for x in tensors:
        if x is not None and x.dtype != wanted:
            x = copy(x.new_empty(x.shape, dtype=wanted), x)
        x = contiguous(x) if x is None or x.dim() == 1 else aligned_rows(x)
        found.append(x if x is None or x.dim() == 1 or fits_tma(x) else copy(x.new_empty(x.shape), x))
    return found


def _bytes(x: Tensor, dtype: torch.dtype) -> int:
    return 2 if x.dtype == dtype else 4


def tables_of(cos: Tensor | None, sin: Tensor | None) -> tuple:
    """cos and sin, and bytes between their sequences and tokens, in which they are alike."""
    if cos is None:
        return None, None, 0, 0
    if cos.stride() != sin.stride():
        cos, sin = contiguous(cos), contiguous(sin)
    size = cos.element_size()
    return cos, sin, cos.stride(0) * size if cos.shape[0] > 1 else 0, cos.stride(1) * size
