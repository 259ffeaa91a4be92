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

from sagebwd.masks import mask as masks
from sagebwd.masks.band import Band
from sagebwd.masks.mask import BLOCK, SKIP, TILE, WHOLE, Mask


class Listed(NamedTuple):
    """A mask as one kernel reads it."""

    elements: Tensor  # of the mask
    lists: Tensor  # (B or 1, H or 1, tokens / rows, ...) int32
    rows: int
    is_tiled: bool
    is_even: bool  # no tile reaches beyond the last token
    first: Tensor | None = None  # (B, H or 1, N, count), elements of the first keys that count, where they are apart


class Lists(NamedTuple):
    """A mask as a call's kernels read it: by blocks of queries in forward and dQ, of keys in dK and dV."""

    by_query: Listed
    by_key: Listed | None = None


def listed(
    mask: Mask, key_mask: Tensor, tokens: tuple[int, int], band: Band, tile: tuple[int, int], by_key: bool,
    first_keys: int,
) -> Listed:  # fmt: skip
    """A mask for a kernel of these tiles; arguments as of `lists_of`."""
    settings = tokens, tile, band, by_key, first_keys
    batch = len(key_mask)
    lists = mask.made(("lists", batch, *settings), lambda: lists_of(mask.blocks, mask.tiles, key_mask, *settings))
    even = all(n % size == 0 for n, size in zip(tokens, tile))
    first = None
    if first_keys:
        of_first = "first", batch, tokens[0], first_keys
        first = mask.made(of_first, lambda: _first_elements(mask, key_mask, tokens[0], first_keys))
    return Listed(mask.elements, lists, tile[by_key], mask.tiles is not None, even, first)


def lists_of(
    blocks: Tensor, tiles: Tensor | None, key_mask: Tensor, tokens: tuple[int, int], tile: tuple[int, int], band: Band,
    by_key: bool = False, first_keys: int = 0,
) -> Tensor:  # fmt: skip
    """Lists of every tile[0] queries, or by_key of every tile[1] keys; arguments as of `order_of`.

    tiles: of `sagebwd.masks.mask.Mask`.

    Returns: (B or 1, H or 1, rows, 2 + blocks of the other axis, and their tiles) int32.
    """
    if masks.by_kernels(blocks):
        from sagebwd.masks import list_kernels

        last = last_of(key_mask, first_keys) if first_keys else None
        return list_kernels.lists_of(blocks, tiles, key_mask, last, tokens, tile, band, by_key)
    order = order_of(blocks, key_mask, tokens, tile, band, first_keys)
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
    first_keys: int = 0,
) -> Tensor:  # fmt: skip
    """How much of each tile of queries and keys is seen: 2 where all of it is, 1 in part, 0 nothing.

    Args: blocks of `sagebwd.masks.mask.Mask`; key_mask (B, M) bool; tokens, of queries and keys; tile, queries and
    keys; first_keys, how many of the first keys that count are left out, fewer than a tile has. The last one's tile is
    then in part; another's is already, as it has keys that do not count.

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
    if first_keys:
        whole = whole & (last_of(key_mask, first_keys)[:, None, None, None] // tile[1] != k // tile[1])
    return visible.int() + (whole & visible).int()


def first_of(key_mask: Tensor, count: int) -> Tensor:
    """The first keys that count, (B, count) int64; the last key in place of those that are not there."""
    nth = torch.arange(1, count + 1, device=key_mask.device).expand(len(key_mask), -1).contiguous()
    return torch.searchsorted(key_mask.cumsum(-1), nth).clamp(max=key_mask.shape[1] - 1)


def last_of(key_mask: Tensor, count: int) -> Tensor:
    """The last of the first keys that count, (B,)."""
    return first_of(key_mask, count)[:, -1].contiguous()


def _first_elements(mask: Mask, key_mask: Tensor, tokens_q: int, count: int) -> Tensor:
    """(B, H or 1, N, count): those of every query and the first keys that count."""
    batch, heads = len(key_mask), (mask.elements if mask.tiles is None else mask.tiles).shape[1]
    first, rows = first_of(key_mask, count)[:, None, None], torch.arange(tokens_q, device=key_mask.device)
    if mask.tiles is not None:
        tiles = mask.tiles.expand(batch, -1, -1, -1)[:, :, rows // TILE]
        tiles = tiles.gather(3, (first // TILE).expand(-1, heads, tokens_q, -1))
        return mask.elements[tiles.long(), rows[:, None] % TILE, first % TILE].contiguous()
    elements = mask.elements.expand(batch, -1, tokens_q, -1)
    if elements.shape[3] == 1:
        return elements.expand(-1, -1, -1, count).contiguous()
    return elements.gather(3, first.expand(-1, heads, tokens_q, -1))


def _coarse(blocks: Tensor, tile: tuple[int, int], padding: int) -> Tensor:
    """(B, H, n, m, blocks in a tile) of a map's blocks."""
    q, k = (size // BLOCK for size in tile)
    blocks = F.pad(blocks, (0, -blocks.shape[3] % k, 0, -blocks.shape[2] % q), value=padding)
    return blocks.unflatten(3, (-1, k)).unflatten(2, (-1, q)).transpose(3, 4).flatten(4)
