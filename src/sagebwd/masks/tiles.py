"""The mask of torch's BlockMask, of which only the tiles that it shows in part are stored.

Making it waits for the device once, for how many tiles there are, and takes as many operators for any number of tokens
until tiles are more than `TILES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sagebwd.masks.mask import BLOCK, HIDES_ALL, MASKED, SHOWS_ALL, SKIP, TILE, WHOLE, Mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Tiles whose pairs are asked for at once: an int64 of each takes 128 MiB.
TILES = 1024


def tiles_of(block_mask: BlockMask) -> Mask:
    """The mask of a BlockMask.

    mask_mod is called for the tiles that the BlockMask shows in part alone.
    """
    tokens, sizes, device = block_mask.seq_lengths, block_mask.BLOCK_SIZE, block_mask.kv_num_blocks.device
    given = _given(block_mask)
    grid = [-(-n // TILE) for n in tokens]
    of_tiles = _of_tiles(given, sizes, grid)
    shows, hides = ((of_tiles == state).flatten(4).all(-1) for state in (WHOLE, SKIP))
    # the last tile of an axis is never whole: what lies beyond the tokens is hidden
    for dim, count in ((2, tokens[0]), (3, tokens[1])):
        if count % TILE:
            shows.select(dim, -1).fill_(False)
    places = (~(shows | hides)).nonzero()
    elements = torch.empty(2 + len(places), TILE, TILE, dtype=torch.bool, device=device)
    for tile, state in ((SHOWS_ALL, True), (HIDES_ALL, False)):
        elements[tile].fill_(state)
    for first in range(0, len(places), TILES):
        some = slice(first, first + TILES)
        _ask(block_mask, given, places[some], elements[2:][some])
    tiles = torch.full_like(shows, HIDES_ALL, dtype=torch.int32).masked_fill_(shows, SHOWS_ALL)
    batch, head, row, column = places.unbind(1)
    tiles[batch, head, row, column] = torch.arange(2, len(elements), device=device, dtype=torch.int32)
    blocks = _blocks_of(elements)[tiles.long()].transpose(3, 4).flatten(4, 5).flatten(2, 3)
    blocks = blocks[:, :, : -(-tokens[0] // BLOCK), : -(-tokens[1] // BLOCK)].contiguous()
    seen = shows.flatten(1, 2).any(1).int()[..., None].repeat(1, 1, TILE)
    seen.flatten(0, 1).index_add_(0, batch * grid[1] + column, elements[2:].any(1).int())
    return Mask(elements, tiles, blocks, seen.flatten(1)[:, : tokens[1]] > 0, queries=tokens[0])


def elements_of_block_mask(block_mask: BlockMask) -> Tensor:
    """Which pairs a BlockMask shows, (B, H, N, M) bool, by operators that a graph holds without reading a number."""
    from torch.nn.attention.flex_attention import create_mask

    tokens, sizes = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    given = _given(block_mask)
    asked = create_mask(block_mask.mask_mod, *given.shape[:2], *tokens, device=str(given.device))
    q, k = (
        (torch.arange(n, device=given.device) // size).clamp(max=given.shape[dim] - 1)
        for n, size, dim in zip(tokens, sizes, (2, 3))
    )
    state = given[:, :, q[:, None], k]
    return (state == WHOLE) | ((state == MASKED) & asked)


def _ask(block_mask: BlockMask, given: Tensor, places: Tensor, seen: Tensor) -> None:
    """Fill in which pairs of some tiles are seen; places (count, 4), batch element, head and tile; seen, of each."""
    tokens, sizes = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    along = torch.arange(TILE, device=places.device)
    batch, head, row, column = places[:, :, None, None].unbind(1)
    q, k = row * TILE + along[:, None], column * TILE + along
    pairs = batch, head, q.clamp(max=tokens[0] - 1), k.clamp(max=tokens[1] - 1)
    # of blocks that hold whole tiles a tile's first pair tells
    at = [x[:, :1, :1] if size % TILE == 0 else x for x, size in zip(pairs[2:], sizes)]
    state = given[batch, head, at[0] // sizes[0], at[1] // sizes[1]]
    asked = torch.logical_and(state == MASKED, _asked(block_mask.mask_mod, *pairs))
    torch.logical_or(state == WHOLE, asked, out=seen)
    for x, n in zip((q, k), tokens):
        if n % TILE:
            seen &= x < n


def _asked(mask_mod: Callable[..., Tensor], batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """mask_mod of every pair of some tiles, (count, TILE, TILE): a function of four scalars, which vmap hands it.

    Args: int64; batch and head (count, 1, 1), q (count, TILE, 1), k (count, 1, TILE), each a token more than before
    until the last, which may be there several times.
    """
    from torch.nn.attention.flex_attention import create_mask

    # one tensor a tile, since vmap takes 2 ms of the host for each that is indexed: its first and last query and key
    tiles = torch.stack([x[:, 0, 0] for x in (batch, head, q, q[:, -1:], k, k[:, :, -1:])], 1)

    def of_tile(number: Tensor, _: Tensor, row: Tensor, column: Tensor) -> Tensor:
        batch, head, first_q, last_q, first_k, last_k = tiles[number].unbind(0)
        return mask_mod(batch, head, torch.minimum(first_q + row, last_q), torch.minimum(first_k + column, last_k))

    return create_mask(of_tile, len(q), 1, q.shape[1], k.shape[2], q.device)[:, 0]


def _given(block_mask: BlockMask) -> Tensor:
    """(B, H, n, m) uint8 of the blocks that a BlockMask lists: WHOLE where it is full, MASKED where it is asked."""
    counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
    # lists may have room for no more blocks than they name, or for more than there are
    rows, columns = (-(-n // size) for n, size in zip(block_mask.seq_lengths, block_mask.BLOCK_SIZE))
    room = max(indices.shape[-1], columns)
    # beyond the last column goes what is in no list
    states = torch.zeros(*counts.shape, room + 1, dtype=torch.uint8, device=indices.device)
    listed = [(counts, indices, MASKED)]
    if block_mask.full_kv_num_blocks is not None:
        listed.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices, WHOLE))
    for counts, indices, state in listed:
        inside = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        states.scatter_(-1, torch.where(inside, indices, room).long(), state)
    return states[:, :, :rows, :columns]


def _blocks_of(elements: Tensor) -> Tensor:
    """(count, n, n) uint8: SKIP, MASKED or WHOLE of each block of tiles."""
    side = TILE // BLOCK
    shown = elements.view(-1, side, BLOCK, side, BLOCK).sum((2, 4), dtype=torch.int32)
    return (shown > 0).to(torch.uint8) + (shown == BLOCK * BLOCK)  # SKIP, MASKED and WHOLE are 0, 1 and 2


def _of_tiles(blocks: Tensor, sizes: tuple[int, int], grid: list[int]) -> Tensor:
    """(B, H, *grid, n, m): the n x m places of each tile between which lie the bounds of blocks of any size."""
    if all(size == TILE for size in sizes):
        return blocks[..., None, None]
    q, k = (
        (torch.arange(count * TILE, device=blocks.device) // size).clamp(max=blocks.shape[dim] - 1).view(count, TILE)
        for count, size, dim in zip(grid, sizes, (2, 3))
    )
    q, k = (x[:, :: math.gcd(size, TILE)] for x, size in zip((q, k), sizes))
    return blocks[:, :, q[:, None, :, None], k[None, :, None, :]]
