"""Block map, visible keys and bit words of a mask, by one GPU pass over its elements, one program a tile.

The same numbers as `sagebwd.masks.mask.blocks_of` and `sagebwd.kernels.masks.sm90_block_lists.words_of`, which compute
them with torch on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.kernels.runtime import program
from sagebwd.masks import mask as masks

TILE, BLOCK = tl.constexpr(masks.TILE), tl.constexpr(masks.BLOCK)
SIDE = tl.constexpr(masks.TILE // masks.BLOCK)
SKIP, MASKED, WHOLE = tl.constexpr(masks.SKIP), tl.constexpr(masks.MASKED), tl.constexpr(masks.WHOLE)
# Multiples of which Triton tells its compiler, and arguments of which it is told nothing.
_UNIT = 16
_OF_LENGTHS = ["stride_batch", "stride_head", "stride_q", "tiles_q", "tiles_k", "tokens_q", "tokens_k"]


class Pass(NamedTuple):
    """What a pass writes; None where it was not asked for.

    blocks: of `sagebwd.masks.mask.Mask`. keys: (batch, M) bool, which keys any query of any head sees. words: bits of
    rows of queries, and words_by_key of rows of keys, (tiles, TILE, 4) int32, as `sm90_block_lists.pack` has them.
    tiles: (B or 1, H or 1, N / TILE, M / TILE) int32, which of the words' is there.
    """

    blocks: Tensor | None
    keys: Tensor | None
    words: Tensor | None
    words_by_key: Tensor | None
    tiles: Tensor | None


def blocks_of(elements: Tensor) -> tuple[Tensor, Tensor]:
    """`sagebwd.masks.mask.blocks_of` a tensor in four dimensions."""
    found = read(elements, elements.shape[0])
    return found.blocks, found.keys


def words_of(elements: Tensor, by_key: bool) -> tuple[Tensor, Tensor]:
    """`sagebwd.kernels.masks.sm90_block_lists.words_of` a tensor in four dimensions."""
    with torch.cuda.device_of(elements):  # at once: a program would be that of so many tiles alone
        found = Pass(*_read(elements, 1, False, not by_key, by_key))
    return found.words_by_key if by_key else found.words, found.tiles


def read(elements: Tensor, batch: int = 1, *, words: bool = False, words_by_key: bool = False) -> Pass:
    """Blocks and keys of a tensor in four dimensions, and the words that are asked for; batch: the keys', elements' or
    any where that is 1."""
    with torch.cuda.device_of(elements):
        return Pass(*program.run(_read, elements, batch, True, words, words_by_key))


def _read(elements: Tensor, batch: int, blocks: bool, words: bool, words_by_key: bool) -> Pass:
    (given, heads, *tokens), device = elements.shape, elements.device
    map_of, grid = ([-(-n // size) for n in tokens] for size in (masks.BLOCK, masks.TILE))
    count = given * heads * grid[0] * grid[1]
    found = Pass(
        torch.empty(given, heads, *map_of, dtype=torch.uint8, device=device) if blocks else None,
        program.zeros((batch, tokens[1]), torch.bool, device) if blocks else None,
        *(
            torch.empty(count, masks.TILE, 4, dtype=torch.int32, device=device) if wanted else None
            for wanted in (words, words_by_key)
        ),
        torch.empty(given, heads, *grid, dtype=torch.int32, device=device) if words or words_by_key else None,
    )
    is_bias, last = elements.dtype != torch.bool, elements.stride(3)
    strides = [0 if size == 1 else stride for size, stride in zip(elements.shape[:3], elements.stride())]
    # rows that are read 16 elements at a time, or one: no other length has kernels of its own
    unit, other = (1, _UNIT) if any(x % _UNIT for x in (*strides, tokens[1])) else (_UNIT, 1)
    # as torch compares: with the number in the elements' precision
    hidden = torch.tensor(masks.hidden(elements.dtype), dtype=elements.dtype).item() if is_bias else 0.0
    program.launch_by_length(
        tuple(tokens),
        {"UNIT": other},
        _pass_kernel,
        (count,),
        elements if is_bias else elements.view(torch.uint8),
        *(x // unit for x in strides),
        last,
        heads,
        *grid,
        tokens[0],
        tokens[1] // unit,
        batch // given,
        found.blocks,
        found.keys.view(torch.uint8) if blocks else None,
        *found[2:],
        HIDDEN=hidden,
        IS_BIAS=is_bias,
        UNIT=unit,
        num_warps=8,
    )
    return found


@triton.jit(do_not_specialize=_OF_LENGTHS)
def _pass_kernel(
    elements, stride_batch, stride_head, stride_q, stride_k, heads, tiles_q, tiles_k, tokens_q, tokens_k, copies,
    blocks, keys, words, words_by_key, tiles, HIDDEN: tl.constexpr, IS_BIAS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """copies: batch elements of ``keys`` for each of the mask's. UNIT: of tokens_k, and of strides but the last."""
    tokens_k, stride_q = tokens_k * UNIT, stride_q * UNIT
    stride_batch, stride_head = stride_batch * UNIT, stride_head * UNIT
    number = tl.program_id(0)
    head, batch = number // (tiles_q * tiles_k) % heads, number // (tiles_q * tiles_k) // heads
    along, word = tl.arange(0, TILE), tl.arange(0, 4)
    first_q, first_k = number // tiles_k % tiles_q * TILE, number % tiles_k * TILE
    q, k = first_q + along, first_k + along
    there = (q < tokens_q)[:, None] & (k < tokens_k)[None, :]
    start = batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
    at = start + q.to(tl.int64)[:, None] * stride_q + k.to(tl.int64)[None, :] * stride_k
    x = tl.load(elements + at, mask=there, other=0)
    # cut: what keeps a block from being whole
    if IS_BIAS:
        x = x.to(tl.float32)
        shown, cut = ((x > HIDDEN) | (x != x)) & there, x != 0
    else:
        shown, cut = x != 0, (x == 0) & there
    at_words = number.to(tl.int64) * (TILE * 4)
    if words is not None:
        tl.store(words + at_words + along[:, None] * 4 + word[None, :], _bits_of(shown, False))
    if words_by_key is not None:
        tl.store(words_by_key + at_words + along[None, :] * 4 + word[:, None], _bits_of(shown, True))
    if blocks is not None:
        state = _states_of(shown, cut)
        side = tl.arange(0, SIDE)
        row, column = first_q // BLOCK + side, first_k // BLOCK + side
        rows, columns = tl.cdiv(tokens_q, BLOCK), tl.cdiv(tokens_k, BLOCK)
        at_blocks = ((batch * heads + head).to(tl.int64) * rows + row)[:, None] * columns + column[None, :]
        tl.store(blocks + at_blocks, state, mask=(row < rows)[:, None] & (column < columns)[None, :])
        # all that write to a key write the same
        seen = tl.max(shown.to(tl.int32), 0)
        for copy in range(copies):
            row_of_keys = keys + (batch * copies + copy).to(tl.int64) * tokens_k
            tl.store(row_of_keys + k, seen.to(tl.uint8), mask=seen != 0)
    if tiles is not None:
        tl.store(tiles + number, number)


@triton.jit
def _bits_of(shown, BY_KEY: tl.constexpr):
    """Words of a tile (TILE, TILE), (TILE, 4) int32 as `sm90_block_lists.pack` has them; by key (4, TILE), a row of
    keys in each column."""
    along = tl.arange(0, TILE)
    bit = along // 8 * 2 + along % 2
    if BY_KEY:
        packed = shown.to(tl.int32) << bit[:, None]
        return tl.sum(tl.sum(tl.reshape(packed, [TILE // 8, 4, 2, TILE]), 2), 0)
    else:
        packed = shown.to(tl.int32) << bit[None, :]
        return tl.sum(tl.sum(tl.reshape(packed, [TILE, TILE // 8, 4, 2]), 3), 1)


@triton.jit
def _states_of(shown, cut):
    """SKIP, MASKED or WHOLE of the blocks of a tile, (SIDE, SIDE) uint8; cut: what keeps one from being whole."""
    return tl.where(_of_blocks(shown) == 0, SKIP, tl.where(_of_blocks(cut) == 0, WHOLE, MASKED)).to(tl.uint8)


@triton.jit
def _of_blocks(x):
    """How many pairs of each block are True."""
    counts = tl.sum(tl.reshape(x.to(tl.int32), [SIDE, BLOCK, SIDE, BLOCK]), 3)
    return tl.sum(counts, 1)
