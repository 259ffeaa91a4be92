"""Block lists and bit words of a mask for the kernels on Hopper: which blocks a tile meets, one bit a (query, key).

A thread there holds columns 8j + 2t and 8j + 2t + 1 of a row of scores, t of 0 to 3. A tile of `TILE` x `TILE` pairs
is so four words a row: word t has those of its 128 columns at bits 2j and 2j + 1. Of rows of queries the forward reads
them, of rows of keys the backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sagebwd.kernels.masks import blocks as maps
from sagebwd.masks.band import Band
from sagebwd.masks.mask import ROWS, TILE, Mask, shown
from sagebwd.masks.parts import PartsOfCall


class BlockLists(NamedTuple):
    """A mask as a kernel reads it.

    lists: (B or 1, H or 1, programs, ...) int32, a list each: how many blocks are seen in part, how many whole, and
    which, those in part first; the rest is never read. The forward has tiles of queries, and one block at least in
    part. The backward has key heads and blocks of keys, and its lists are of quadruples: a count in the first, then of
    each block of queries its number with its head above `work_splits.HEAD_BIT`, its tile, and how many blocks of keys
    behind the program's its queries see.
    words: (tiles, TILE, 4) int32. tiles: (B or 1, H or 1, N / TILE, M / TILE) int32, which of the words' is there.
    bias: the mask's elements where these are added, (B or 1, H or 1, N or 1, M), whose last stride is 1.
    work_splits: of `sagebwd.kernels.masks.work_splits`, of the backward where its lists may be cut.
    """

    lists: Tensor
    words: Tensor
    tiles: Tensor
    bias: Tensor | None = None
    work_splits: Tensor | None = None


def of_queries(mask: Mask, key_mask: Tensor, tokens: tuple[int, int], band: Band, tile: tuple[int, int]) -> BlockLists:
    """For the forward in tiles of so many queries and keys; arguments as of `sagebwd.kernels.masks.lists.listed`."""
    from sagebwd.kernels.masks import list_kernels

    settings, keys = (len(key_mask), tokens, band, tile), mask.keys_beside(key_mask)
    lists = mask.made(("queries", *settings), lambda: list_kernels.of_queries(mask.blocks, keys, *settings))
    return BlockLists(lists, *_bits(mask, tokens, False), _bias(mask, tokens[1]))


def of_keys(
    mask: Mask, key_mask: Tensor, tokens: tuple[int, int], band: Band, tile: tuple[int, int], group: int,
    heads: int = 0, last_heads: int = 1,
) -> BlockLists:  # fmt: skip
    """For the backward; group: query heads that a key head serves; heads: key heads, if lists are to be cut, whose
    programs then come head by head, but those of the last heads in turns (`sagebwd.kernels.masks.work_splits`)."""
    from sagebwd.kernels.masks import list_kernels

    (words, tiles), keys = _bits(mask, tokens, True), mask.keys_beside(key_mask)
    settings = len(key_mask), tokens, band, tile, group, heads, last_heads
    lists, work_splits = mask.made(
        ("keys", *settings), lambda: list_kernels.of_keys(mask.blocks, tiles, keys, *settings)
    )
    return BlockLists(lists, words, tiles, _bias(mask, tokens[1]), work_splits)


def _bias(mask: Mask, tokens_k: int) -> Tensor | None:
    elements = mask.elements
    if not mask.is_bias:
        return None
    if _lies_otherwise(elements, tokens_k):

        def make() -> Tensor:
            narrow = elements.float() if elements.dtype == torch.float64 else elements
            return narrow.expand(-1, -1, -1, tokens_k).contiguous()

        return mask.made(("bias", tokens_k), make)
    return elements


def _lies_otherwise(elements: Tensor, tokens_k: int) -> bool:
    """Whether kernels do not read a bias where it lies."""
    strided = tokens_k > 1 and elements.stride(3) != 1
    return elements.dtype == torch.float64 or elements.shape[3] != tokens_k or strided


def read(elements: Tensor, batch: int, tokens: tuple[int, int], *, by_query: bool, by_key: bool) -> Mask:
    """The mask of a call's elements in four dimensions: on a GPU by one pass, with the bits that will be read.

    by_query, by_key: whether kernels will read bits of rows of queries, and of keys.
    """
    if not maps.takes(elements):
        return Mask(elements, None, *maps.blocks_of(elements), PartsOfCall())
    from sagebwd.kernels.masks import mask_blocks

    found = mask_blocks.read(elements.expand(-1, -1, *tokens), batch, words=by_query, words_by_key=by_key)
    parts = PartsOfCall()
    for by_key, words in enumerate((found.words, found.words_by_key)):
        if words is not None:
            parts.keep(("bits", tokens, bool(by_key)), (words, found.tiles))
    return Mask(elements, None, found.blocks, found.keys, parts)


def reads_as_it_lies(elements: Tensor, tokens_k: int) -> bool:
    """Whether kernels read a call's elements in four dimensions by one pass, and what they add where it lies."""
    adds = elements.dtype != torch.bool
    return maps.takes(elements) and not (adds and _lies_otherwise(elements, tokens_k))


def _bits(mask: Mask, tokens: tuple[int, int], by_key: bool) -> tuple[Tensor, Tensor]:
    """Words and tiles of a mask."""
    found = mask.made if by_key else mask.taken  # no later direction reads those of queries
    return found(("bits", tokens, by_key), lambda: _packed(mask, tokens, by_key))


def _packed(mask: Mask, tokens: tuple[int, int], by_key: bool) -> tuple[Tensor, Tensor]:
    if mask.tiles is not None:
        return words_of(mask.elements[:, None], by_key)[0], mask.tiles
    return words_of(mask.elements.expand(-1, -1, *tokens), by_key)


def words_of(elements: Tensor, by_key: bool) -> tuple[Tensor, Tensor]:
    """Bits of all tiles of a tensor in four dimensions, (tiles, TILE, 4) int32; by_key, of rows of keys.

    And which of them each tile's are, (B, H, N / TILE, M / TILE) int32.
    """
    if maps.takes(elements):
        from sagebwd.kernels.masks import mask_blocks

        return mask_blocks.words_of(elements, by_key)
    words = []
    for rows in elements.split(ROWS, 2):
        x = F.pad(shown(rows), (0, -rows.shape[3] % TILE, 0, -rows.shape[2] % TILE))
        x = x.unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE)).transpose(3, 4)
        words.append(pack(x.mT if by_key else x))
    words = torch.cat(words, 2)
    shape, words = words.shape[:4], words.flatten(0, 3)
    return words, torch.arange(len(words), dtype=torch.int32, device=words.device).view(shape)


def pack(tiles: Tensor) -> Tensor:
    """Bits of tiles (..., TILE, TILE) bool, as words (..., TILE, 4) int32."""
    pairs = tiles.contiguous().view(torch.int16)  # a byte each
    pairs = ((pairs | pairs >> 7) & 3).int().unflatten(-1, (TILE // 8, 4))
    shift = torch.arange(0, TILE // 4, 2, dtype=torch.int32, device=tiles.device)
    return (pairs << shift[:, None]).sum(-2, dtype=torch.int32)
