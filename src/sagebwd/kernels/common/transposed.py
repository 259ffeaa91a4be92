"""Transposed copies of INT8 codes, tokens contiguous: what products that reduce over tokens read."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Packing, padded_head_dim
from sagebwd.kernels.common.strided import Strided, pitch_of, row_of
from sagebwd.kernels.common.tile import block_in_sequence, interleave_rows, load_rows, padded_block, whose
from sagebwd.kernels.runtime.program import launch

NO_SPECIALIZE = ["tokens", "total", "blocks", "grid"]


def pass_warps(block: int, head_dim: int) -> int:
    """Warps of a pass over blocks of tokens: 64 elements a thread, more where a program has no more warps."""
    return min(32, max(4, block * padded_head_dim(head_dim) // 2048))


def launch_pass(
    kernel: Any, packing: Packing, head_dim: int, block: int, *given: Any, planes: int = 1, block_d: int = 0,
    **constants: Any,
) -> None:  # fmt: skip
    """Launch a pass over blocks of tokens, a program each, on what is ``given`` and the sizes of `NO_SPECIALIZE`;
    block_d: columns of a program's tile, all unless given."""
    block_d = block_d or padded_head_dim(head_dim)
    launch(
        kernel,
        (packing.programs(block), planes),
        *given,
        packing.heads,
        packing.extent,
        packing.total,
        packing.blocks(block),
        packing.blocks(block),
        head_dim=head_dim,
        VARLEN=packing.cu_seqlens is not None,
        BLOCK=block,
        BLOCK_D=block_d,
        num_warps=pass_warps(block, block_d),
        **constants,
    )


@triton.jit
def store_transposed(transposed, code, z, block, blocks, columns, head_dim: tl.constexpr, BLOCK: tl.constexpr):
    """Write a block of codes (tokens, D) as (D, tokens), tokens interleaved."""
    pitch = blocks * BLOCK
    at = transposed + z * head_dim * pitch + (block - z * blocks) * BLOCK
    at = at + columns[:, None] * pitch + tl.arange(0, BLOCK)[None, :]
    tl.store(at, tl.trans(interleave_rows(code)), mask=columns[:, None] < head_dim)


@triton.jit
def transpose(
    codes, stride_t, transposed, z, block, blocks, rows, head_dim: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write a block of INT8 rows, of which the first ``rows`` are there, as `store_transposed` does."""
    columns = tl.arange(0, BLOCK_D)
    tile = load_rows(codes, tl.arange(0, BLOCK), columns, stride_t, rows, head_dim, False, head_dim == BLOCK_D)
    store_transposed(transposed, tile, z, block, blocks, columns, head_dim, BLOCK)


@triton.jit(do_not_specialize=["heads", *NO_SPECIALIZE])
def transpose_kernel(
    codes,
    cu_seqlens,
    transposed,
    heads,
    tokens,
    total,
    blocks,
    grid,
    head_dim: tl.constexpr,
    VARLEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Saved INT8 rows, `Strided`, to the transposed copy that backward reads; cheaper to remake than to keep."""
    number, program = block_in_sequence(grid, heads, cu_seqlens, tokens, BLOCK, VARLEN)
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    first = number * BLOCK
    if first >= length:
        return
    block = z * blocks + padded_block(start, batch, BLOCK, VARLEN) + number
    at = row_of(codes, batch, head, start + first)
    transpose(at, pitch_of(codes), transposed, z, block, blocks, length - first, head_dim, BLOCK, BLOCK_D)


def launch_transpose(codes: Tensor, packing: Packing, block: int) -> Tensor:
    """The transposed copy of codes."""
    head_dim = codes.shape[-1]
    transposed = packing.padded(block, block * head_dim, dtype=torch.int8, device=codes.device)
    given = Strided.of(codes, packing), packing.cu_seqlens, transposed
    launch_pass(transpose_kernel, packing, head_dim, block, *given)
    return transposed
