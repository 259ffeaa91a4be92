"""Which blocks a program of a masked call meets: lists made of the mask's map, the band and the mask of keys.

A program takes some tokens of one axis, its rows, and steps over blocks of the other. Its list holds two numbers, how
many blocks it sees whole and how many in part, and then which: first the whole ones, then those in part; the rest is
never read. Where the mask has tiles, each block's follows in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from sagebwd.call import Call
from sagebwd.kernels.host import device
from sagebwd.kernels.portable.config import list_tile, shares_maxima
from sagebwd.masks.band import Band
from sagebwd.masks.mask import BLOCK, SKIP, TILE, WHOLE
from sagebwd.masks.remember import Memory
from sagebwd.recipe import INT8, SIXTEEN_BIT

_memory = Memory()


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


def of_forward(call: Call) -> Lists:
    """For the forward of a call with a mask."""
    apart = call.recipe.o == INT8 and call.recipe.first_key == SIXTEEN_BIT
    listed = _listed(call, "forward", apart)
    if apart:
        first = _memory.get((call.mask.blocks, call.key_mask), "first", lambda: _first_elements(call))
        listed = listed._replace(first=first)
    return Lists(listed)


def of_backward(call: Call) -> Lists:
    """For the backward of a call with a mask."""
    return Lists(_listed(call, "dq"), _listed(call, "dkdv_given" if shares_maxima(call) else "dkdv"))


class Masked(NamedTuple):
    """A mask as a kernel's one argument: elements, lists, and what the kernel is compiled for."""

    at: Tensor  # elements
    lists: Tensor
    batch: int  # strides of elements: 0 where there is one for all, and of tiles
    head: int
    query: int
    key: int
    list_batch: int
    list_head: int
    list_row: int  # of lists; says how long one is
    BIAS: tl.constexpr  # elements are added to scores
    TILE: tl.constexpr  # queries and keys of a stored tile, 0 without
    EVEN: tl.constexpr
    LIST_ROWS: tl.constexpr

    @classmethod
    def of(cls, listed: Listed | None) -> Masked | None:
        """None without a mask."""
        if listed is None:
            return None
        of_elements = (0,) * 4 if listed.is_tiled else strides(listed.elements)
        compiled_for = listed.elements.is_floating_point(), TILE * listed.is_tiled, listed.is_even, listed.rows
        return cls(
            listed.elements, listed.lists, *of_elements, *strides(listed.lists)[:2], listed.lists.stride(2),
            *map(tl.constexpr, compiled_for),
        )  # fmt: skip


def strides(x: Tensor) -> tuple[int, ...]:
    """Strides, 0 where there is one for all."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride()))


def _listed(call: Call, kernel: str, first_apart: bool = False) -> Listed:
    mask, tokens = call.mask, (call.queries.tokens, call.keys.tokens)
    tile, by_key = list_tile(kernel, call.head_dim, call.recipe, device.capability(call.device))
    band = Band.of(call.is_causal, call.window_left, call.window_right)
    settings = tokens, tile, band, by_key, first_apart
    blocks, tiles, key_mask = mask.blocks, mask.tiles, call.key_mask
    lists = _memory.get((blocks, key_mask), settings, lambda: lists_of(blocks, tiles, key_mask, *settings))
    even = all(n % size == 0 for n, size in zip(tokens, tile))
    return Listed(mask.elements, lists, tile[by_key], tiles is not None, even)


def lists_of(
    blocks: Tensor, tiles: Tensor | None, key_mask: Tensor, tokens: tuple[int, int], tile: tuple[int, int], band: Band,
    by_key: bool = False, first_apart: bool = False,
) -> Tensor:  # fmt: skip
    """Lists of every tile[0] queries, or by_key of every tile[1] keys.

    Args: blocks and tiles of `sagebwd.masks.mask.Mask`; key_mask (B, M) bool; tokens, of queries and keys; tile,
    queries and keys; first_apart, whether the first key that counts is left out, whose block is then in part.

    Returns: (B or 1, H or 1, rows, 2 + blocks of the other axis, and their tiles) int32.
    """
    shape = [-(-n // BLOCK) for n in tokens]
    blocks = blocks.expand(-1, -1, *shape)
    visible, whole = _coarse(blocks != SKIP, tile, False).any(-1), _coarse(blocks == WHOLE, tile, True).all(-1)
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
        whole = whole & (key_mask.int().argmax(-1)[:, None, None, None] // tile[1] != k // tile[1])
    whole = whole & visible
    order = visible.int() + whole.int()  # of both axes' blocks: 2 whole, 1 in part, 0 skipped
    if tiles is not None:
        tiles = tiles[:, :, q[:, None] // TILE, k // TILE]
    if by_key:
        order, tiles = order.mT, None if tiles is None else tiles.mT
    listed = torch.argsort(order, dim=-1, descending=True, stable=True)
    found = [(order == 2).sum(-1, keepdim=True), (order == 1).sum(-1, keepdim=True), listed]
    if tiles is not None:
        found.append(tiles.expand_as(listed).gather(-1, listed))
    return torch.cat(found, -1).int()


def _first_elements(call: Call) -> Tensor:
    mask, key_mask, tokens_q = call.mask, call.key_mask, call.queries.tokens
    batch, heads = len(key_mask), (mask.elements if mask.tiles is None else mask.tiles).shape[1]
    first, rows = key_mask.int().argmax(-1), torch.arange(tokens_q, device=key_mask.device)
    if mask.tiles is not None:
        tiles = mask.tiles.expand(batch, -1, -1, -1)[:, :, rows // TILE]
        tiles = tiles.gather(3, (first // TILE)[:, None, None, None].expand(-1, heads, tokens_q, 1))[..., 0]
        return mask.elements[tiles.long(), rows % TILE, (first % TILE)[:, None, None]]
    elements = mask.elements.expand(batch, -1, tokens_q, -1)
    if elements.shape[3] == 1:
        return elements[..., 0].contiguous()
    return elements.gather(3, first[:, None, None, None].expand(-1, heads, tokens_q, 1))[..., 0]


def _coarse(blocks: Tensor, tile: tuple[int, int], padding: bool) -> Tensor:
    """(B, H, n, m, blocks in a tile) of a map's blocks."""
    q, k = (size // BLOCK for size in tile)
    blocks = F.pad(blocks, (0, -blocks.shape[3] % k, 0, -blocks.shape[2] % q), value=padding)
    return blocks.unflatten(3, (-1, k)).unflatten(2, (-1, q)).transpose(3, 4).flatten(4)
