"""One pass over a mask's elements on a GPU: the map of its blocks, or its bits, a program for each tile.

What they write is what the functions of the same names in `sagebwd.masks.mask` and `sagebwd.masks.walks` compute with
torch, which is how a CPU does it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.masks import mask as masks

TILE, BLOCK = tl.constexpr(masks.TILE), tl.constexpr(masks.BLOCK)
SIDE = tl.constexpr(masks.TILE // masks.BLOCK)
MASKED, WHOLE = tl.constexpr(masks.MASKED), tl.constexpr(masks.WHOLE)
DTYPES = torch.bool, torch.float16, torch.bfloat16, torch.float32


def takes(elements: Tensor) -> bool:
    """Whether the passes run on a mask's elements."""
    return elements.is_cuda and elements.dtype in DTYPES and elements.numel() > 0


def blocks_of(elements: Tensor) -> tuple[Tensor, Tensor]:
    """`sagebwd.masks.mask.blocks_of` a tensor in four dimensions."""
    batch, heads, *tokens = elements.shape
    sizes = [-(-n // masks.BLOCK) for n in tokens]
    blocks = torch.empty(batch, heads, *sizes, dtype=torch.uint8, device=elements.device)
    keys = torch.zeros(batch, tokens[1], dtype=torch.bool, device=elements.device)
    grid, arguments, options = _launch(elements)
    with torch.cuda.device_of(elements):
        _blocks_kernel[grid](*arguments, blocks, keys.view(torch.uint8), **options)
    return blocks, keys


def words_of(elements: Tensor, by_key: bool) -> Tensor:
    """Bits of all tiles of a tensor in four dimensions, as `sagebwd.masks.walks.pack` has them: (tiles, TILE, 4)."""
    grid, arguments, options = _launch(elements)
    words = torch.empty(*grid, masks.TILE, 4, dtype=torch.int32, device=elements.device)
    with torch.cuda.device_of(elements):
        _words_kernel[grid](*arguments, words, BY_KEY=by_key, **options)
    return words


def _launch(elements: Tensor) -> tuple[tuple[int], tuple[Tensor | int, ...], dict[str, object]]:
    """The grid, the arguments that both kernels begin with, and what they are compiled for."""
    batch, heads, *tokens = elements.shape
    tiles_q, tiles_k = (-(-n // masks.TILE) for n in tokens)
    is_bias = elements.dtype != torch.bool
    # as torch compares: with the number in the elements' precision
    hidden = torch.tensor(masks.hidden(elements.dtype), dtype=elements.dtype).item() if is_bias else 0.0
    at = elements if is_bias else elements.view(torch.uint8)
    arguments = at, *elements.stride(), heads, tiles_q, tiles_k, *tokens
    return (batch * heads * tiles_q * tiles_k,), arguments, {"HIDDEN": hidden, "IS_BIAS": is_bias, "num_warps": 8}


@triton.jit
def _read(
    elements, stride_batch, stride_head, stride_q, stride_k, heads, tiles_q, tiles_k, tokens_q, tokens_k,
    HIDDEN: tl.constexpr, IS_BIAS: tl.constexpr,
):  # fmt: skip
    """What a program's tile shows, where it shows all without a bias, which of it is there, and where it lies."""
    number = tl.program_id(0)
    head, batch = number // (tiles_q * tiles_k) % heads, number // (tiles_q * tiles_k) // heads
    along = tl.arange(0, TILE)
    q, k = number // tiles_k % tiles_q * TILE + along, number % tiles_k * TILE + along
    there = (q < tokens_q)[:, None] & (k < tokens_k)[None, :]
    start = batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
    at = start + q.to(tl.int64)[:, None] * stride_q + k.to(tl.int64)[None, :] * stride_k
    x = tl.load(elements + at, mask=there, other=0)
    if IS_BIAS:
        x = x.to(tl.float32)
        shown, plain = (x > HIDDEN) | (x != x), x == 0
    else:
        shown, plain = x != 0, x != 0
    return shown & there, plain, there, batch, head, q, k


@triton.jit
def _blocks_kernel(
    elements, stride_batch, stride_head, stride_q, stride_k, heads, tiles_q, tiles_k, tokens_q, tokens_k, blocks, keys,
    HIDDEN: tl.constexpr, IS_BIAS: tl.constexpr,
):  # fmt: skip
    shown, plain, there, batch, head, q, k = _read(
        elements, stride_batch, stride_head, stride_q, stride_k, heads, tiles_q, tiles_k, tokens_q, tokens_k, HIDDEN,
        IS_BIAS,
    )  # fmt: skip
    # what lies beyond the tokens does not keep a block from being whole
    some, all_of = _of_blocks(shown) > 0, _of_blocks(plain | (there == 0)) == BLOCK * BLOCK
    state = tl.where(some, tl.where(all_of, WHOLE, MASKED), 0).to(tl.uint8)
    along = tl.arange(0, SIDE)
    row, column = tl.min(q) // BLOCK + along, tl.min(k) // BLOCK + along
    rows, columns = tl.cdiv(tokens_q, BLOCK), tl.cdiv(tokens_k, BLOCK)
    at = ((batch * heads + head).to(tl.int64) * rows + row)[:, None] * columns + column[None, :]
    tl.store(blocks + at, state, mask=(row < rows)[:, None] & (column < columns)[None, :])
    # all that write to a key write the same
    seen = tl.max(shown.to(tl.int32), 0)
    tl.store(keys + batch.to(tl.int64) * tokens_k + k, seen.to(tl.uint8), mask=seen != 0)


@triton.jit
def _of_blocks(x):
    """How many pairs of each block are True."""
    counts = tl.sum(tl.reshape(x.to(tl.int32), [SIDE, BLOCK, SIDE, BLOCK]), 3)
    return tl.sum(counts, 1)


@triton.jit
def _words_kernel(
    elements, stride_batch, stride_head, stride_q, stride_k, heads, tiles_q, tiles_k, tokens_q, tokens_k, words,
    BY_KEY: tl.constexpr, HIDDEN: tl.constexpr, IS_BIAS: tl.constexpr,
):  # fmt: skip
    shown, _, _, _, _, _, _ = _read(
        elements, stride_batch, stride_head, stride_q, stride_k, heads, tiles_q, tiles_k, tokens_q, tokens_k, HIDDEN,
        IS_BIAS,
    )  # fmt: skip
    along, word = tl.arange(0, TILE), tl.arange(0, 4)
    bit = along // 8 * 2 + along % 2
    at = words + tl.program_id(0).to(tl.int64) * (TILE * 4)
    if BY_KEY:
        x = shown.to(tl.int32) << bit[:, None]
        packed = tl.sum(tl.sum(tl.reshape(x, [TILE // 8, 4, 2, TILE]), 2), 0)
        tl.store(at + along[None, :] * 4 + word[:, None], packed)
    else:
        x = shown.to(tl.int32) << bit[None, :]
        packed = tl.sum(tl.sum(tl.reshape(x, [TILE, TILE // 8, 4, 2]), 3), 1)
        tl.store(at + along[:, None] * 4 + word[None, :], packed)
