"""Which blocks a program of a masked call meets: lists made of the mask's map, the band and the mask of keys.

A program takes some tokens of one axis, its rows, and steps over blocks of the other. Its list holds two numbers, how
many blocks it sees whole and how many in part, and then which: first the whole ones, then those in part; the rest is
never read. Where the mask has tiles, each block's follows in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.kernels.masks import list_kernels
from sagebwd.kernels.runtime.alignment import aligned_rows
from sagebwd.masks.band import Band
from sagebwd.masks.mask import TILE, Mask


class Listed(NamedTuple):
    """A mask as one kernel reads it."""

    elements: Tensor  # of the mask
    lists: Tensor  # (B or 1, H or 1, tokens / rows, ...) int32
    rows: int
    is_tiled: bool
    is_even: bool  # no tile reaches beyond the last token
    first: Tensor | None = None  # (B, H or 1, N, count), elements of the first keys that count, where they are apart

    def of(self, batch: slice, heads: slice) -> Listed:
        """The same of some sequences and query heads, for a backward."""

        def cut(x: Tensor) -> Tensor:
            return x[batch if x.shape[0] > 1 else slice(None), heads if x.shape[1] > 1 else slice(None)]

        elements = self.elements if self.is_tiled else cut(self.elements)
        return self._replace(elements=elements, lists=aligned_rows(cut(self.lists)))  # which are short


class Lists(NamedTuple):
    """A mask as a call's kernels read it: by blocks of queries in forward and dQ, of keys in dK and dV."""

    by_query: Listed
    by_key: Listed | None = None

    def of(self, batch: slice, heads: slice) -> Lists:
        """The same of some sequences and query heads, for a backward."""
        return Lists(*(x.of(batch, heads) for x in self))


def listed(
    mask: Mask, key_mask: Tensor, tokens: tuple[int, int], band: Band, tile: tuple[int, int], by_key: bool,
    first_keys: int,
) -> Listed:  # fmt: skip
    """A mask for a kernel of these tiles: lists of every tile[0] queries, or by_key of every tile[1] keys.

    Args: key_mask (B, M) bool; tokens, of queries and keys; tile, queries and keys; first_keys, how many of the first
    keys that count are left out, fewer than a tile has. The last one's tile is then in part; another's is already, as
    it has keys that do not count.
    """
    settings = len(key_mask), tokens, tile, band, by_key

    def make() -> Tensor:
        last = last_of(key_mask, first_keys) if first_keys else None
        return list_kernels.lists_of(mask.blocks, mask.tiles, mask.keys_beside(key_mask), last, *settings)

    lists = mask.made(("lists", first_keys, *settings), make)
    even = all(n % size == 0 for n, size in zip(tokens, tile))
    first = None
    if first_keys:
        of_first = "first", len(key_mask), tokens[0], first_keys
        first = mask.made(of_first, lambda: _first_elements(mask, key_mask, tokens[0], first_keys))
    return Listed(mask.elements, lists, tile[by_key], mask.tiles is not None, even, first)


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
