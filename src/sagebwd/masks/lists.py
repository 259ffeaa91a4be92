"""Which blocks a program of a masked call meets: lists made of the mask's map, the band and the mask of keys.

A program takes some tokens of one axis, its rows, and steps over blocks of the other. Its list holds two numbers, how
many blocks it sees whole and how many in part, and then which: first the whole ones, then those in part; the rest is
never read. Where the mask has tiles, each block's follows in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sagebwd.masks.band import Band
from sagebwd.masks.mask import BLOCK, SKIP, TILE, WHOLE, Mask


class Listed(NamedTuple):
    """A mask as one kernel reads it."""

    elements: Tensor  # of the mask
    lists: Tensor  # (B or 1, H or 1, tokens / rows, ...) int32
    rows: int
    is_tiled: bool
    is_even: bool  # no tile reaches beyond the last token
    first: Tensor | None = None  # (B, H or 1, N), elements of the first key that counts, where it is apart


class Lists(NamedTuple):
    """A mask as a call's kernels read it: by blocks of queries in forward and dQ, of keys in dK and dV."""

    by_query: Listed
    by_key: Listed | None = None


def listed(
    mask: Mask, key_mask: Tensor, tokens: tuple[int, int], band: Band, tile: tuple[int, int], by_key: bool,
    first_apart: bool,
) -> Listed:  # fmt: skip
    """A mask for a kernel of these tiles; arguments as of `lists_of`."""
    settings = tokens, tile, band, by_key, first_apart
    batch = len(key_mask)
    lists = mask.made(("lists", batch, *settings), lambda: lists_of(mask.blocks, mask.tiles, key_mask, *settings))
    even = all(n % size == 0 for n, size in zip(tokens, tile))
    first = None
    if first_apart:
        first = mask.made(("first", batch, tokens[0]), lambda: _first_elements(mask, key_mask, tokens[0]))
    return Listed(mask.elements, lists, tile[by_key], mask.tiles is not None, even, first)


def lists_of(
    blocks: Tensor, tiles: Tensor | None, key_mask: Tensor, tokens: tuple[int, int], tile: tuple[int, int], band: Band,
    by_key: bool = False, first_apart: bool = False,
) -> Tensor:  # fmt: skip
    """Lists of every tile[0] queries, or by_key of every tile[1] keys; arguments as of `order_of`.

    tiles: of `sagebwd.masks.mask.Mask`.

    Returns: (B or 1, H or 1, rows, 2 + blocks of the other axis, and their tiles) int32.
    """
    if blocks.is_cuda:
        from sagebwd.masks import list_kernels

        first = first_of(key_mask) if first_apart else None
        return list_kernels.lists_of(blocks, tiles, key_mask, first, tokens, tile, band, by_key)
    order = order_of(blocks, key_mask, tokens, tile, band, first_apart)
    if tiles is not None:
        q, k = (torch.arange(n, device=blocks.device) * size // TILE for n, size in zip(order.shape[2:], tile))
        tiles = tiles[:, :, q[:, None], k]
    if by_key:
        order, tiles = order.mT, None if tiles is None else tiles.mT
    listed = torch.argsort(order, dim=-1, descending=True, stable=True)
    found = [(order == 2).sum(-1, keepdim=True), (order == 1).sum(-1, keepdim=True), listed]
    if tiles is not None:
        found.append(tiles.expand_as(listed).gather(-1, listed))
    return torch.cat(found, -1).int()


def order_of(
    blocks: Tensor, key_mask: Tensor, tokens: tuple[int, int], tile: tuple[int, int], band: Band,
    first_apart: bool = False,
) -> Tensor:  # fmt: skip
    """How much of each tile of queries and keys is seen: 2 where all of it is, 1 in part, 0 nothing.

    Args: blocks of `sagebwd.masks.mask.Mask`; key_mask (B, M) bool; tokens, of queries and keys; tile, queries and
    keys; first_apart, whether the first key that counts is left out, whose tile is then in part.

    Returns: (B or 1, H or 1, tiles of queries, tiles of keys) int32.
    """
    shape = [-(-n // BLOCK) for n in tokens]
    blocks = blocks.expand(-1, -1, *shape)
    visible, whole = _coarse(blocks, tile, SKIP).amax(-1) != SKIP, _coarse(blocks, tile, WHOLE).amin(-1) == WHOLE
    q, k = (torch.arange(count, device=blocks.device) * size for count, size in zip(visible.shape[2:], tile))
    nearest, farthest = k[None, :] - (q + tile[0] - 1)[:, None], (k + tile[1] - 1)[None, :] - q[:, None]
    if band.lower is not None:
        visible, whole = visible & (farthest >= band.lower), whole & (nearest >= band.lower)
    if band.upper is not None:
        visible, whole = visible & (nearest <= band.upper), whole & (farthest <= band.upper)
    counts = F.pad(key_mask, (0, -tokens[1] % tile[1])).unflatten(1, (-1, tile[1]))[:, None, None]
    visible, whole = visible & counts.any(-1), whole & counts.all(-1)
    if tokens[0] % tile[0]:
        whole = whole & (q + tile[0] <= tokens[0])[:, None]
    if first_apart:
        whole = whole & (first_of(key_mask)[:, None, None, None] // tile[1] != k // tile[1])
    return visible.int() + (whole & visible).int()


def first_of(key_mask: Tensor) -> Tensor:
    """The first key that counts, (B,) int64; 0 where none does."""
    return key_mask.view(torch.uint8).argmax(-1)


def _first_elements(mask: Mask, key_mask: Tensor, tokens_q: int) -> Tensor:
    batch, heads = len(key_mask), (mask.elements if mask.tiles is None else mask.tiles).shape[1]
    first, rows = first_of(key_mask), torch.arange(tokens_q, device=key_mask.device)
    if mask.tiles is not None:
        tiles = mask.tiles.expand(batch, -1, -1, -1)[:, :, rows // TILE]
        tiles = tiles.gather(3, (first // TILE)[:, None, None, None].expand(-1, heads, tokens_q, 1))[..., 0]
        return mask.elements[tiles.long(), rows % TILE, (first % TILE)[:, None, None]]
    elements = mask.elements.expand(batch, -1, tokens_q, -1)
    if elements.shape[3] == 1:
        return elements[..., 0].contiguous()
    return elements.gather(3, first[:, None, None, None].expand(-1, heads, tokens_q, 1))[..., 0]


def _coarse(blocks: Tensor, tile: tuple[int, int], padding: int) -> Tensor:
    """(B, H, n, m, blocks in a tile) of a map's blocks."""
    q, k = (size // BLOCK for size in tile)
    blocks = F.pad(blocks, (0, -blocks.shape[3] % k, 0, -blocks.shape[2] % q), value=padding)
    return blocks.unflatten(3, (-1, k)).unflatten(2, (-1, q)).transpose(3, 4).flatten(4)
