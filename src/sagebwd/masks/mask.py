"""Masks of any shape, as the reference and the kernels read them: a tensor's elements, or a BlockMask's tiles.

A tensor is taken as it lies, boolean (True where a query sees a key) or additive, (B or 1, H or 1, N or 1, M or 1).
An additive one hides where it is -inf, or so low that it stands for that (`HIDDEN`), as Transformers' masks are.

Of torch's BlockMask only the tiles that it shows in part are stored, so that memory does not grow with queries x keys.

Beside the elements goes a map of blocks of `BLOCK` queries and keys: what hides all is skipped, what shows all (a
bias of zeros) needs no elements. It is made once a mask (`sagebwd.masks.remember`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Queries and keys of a block of the map: what every tile of the kernels is a multiple of.
BLOCK = 32
# Queries and keys of a stored tile: a multiple of every tile of the kernels.
TILE = 128
SKIP, MASKED, WHOLE = range(3)
# Tiles that are not stored for one place alone.
SHOWS_ALL, HIDES_ALL = range(2)
# A bias of at most this hides: half of the least number, or of bfloat16's for all that have its exponents.
HIDDEN = {torch.float16: -32752.0}
HIDDEN_ELSE = -1.6e38
# Rows of queries, and tiles of a BlockMask, that are looked at together.
ROWS, TILES = 4096, 256


class Mask(NamedTuple):
    """A mask of one call.

    elements: the tensor in four dimensions; or, where there are ``tiles``, (count, TILE, TILE) bool.
    tiles: (B or 1, H or 1, N / TILE, M / TILE) int32, which of the elements' tiles is there; None without a BlockMask.
    blocks: (B or 1, H or 1, N / BLOCK or 1, M / BLOCK or 1) uint8: SKIP, MASKED or WHOLE.
    keys: (B or 1, M or 1) bool, which keys any query of any head sees.
    """

    elements: Tensor
    tiles: Tensor | None
    blocks: Tensor
    keys: Tensor

    @property
    def is_bias(self) -> bool:
        """Whether it is added to the scores."""
        return self.elements.is_floating_point()

    def to(self, device: torch.device | str) -> Mask:
        """The same on another device."""
        return Mask(*(None if x is None else x.to(device) for x in self))

    def part(self, rows: slice, keys: slice) -> Tensor:
        """The elements of some queries and keys, (B or 1, H or 1, rows or 1, keys or 1); 0 beyond the last."""
        if self.tiles is None:
            part = self.elements
            for dim, tokens in ((2, rows), (3, keys)):
                if part.shape[dim] > 1 or tokens.stop == 1:
                    missing = max(0, tokens.stop - part.shape[dim])
                    part = part.narrow(dim, tokens.start, tokens.stop - missing - tokens.start)
                    part = F.pad(part, (0, missing) if dim == 3 else (0, 0, 0, missing))
            return part
        device = self.elements.device
        q = torch.arange(rows.start, rows.stop, device=device).clamp(max=self.tiles.shape[2] * TILE - 1)[:, None]
        k = torch.arange(keys.start, keys.stop, device=device).clamp(max=self.tiles.shape[3] * TILE - 1)
        return self.elements[self.tiles[:, :, q // TILE, k // TILE].long(), q % TILE, k % TILE]


def of_tensor(elements: Tensor) -> Mask:
    """The mask of a tensor in four dimensions."""
    return Mask(elements, None, *blocks_of(elements))


def shown(elements: Tensor) -> Tensor:
    """Where a mask's elements let a key be seen; NaN does, and shows in the output."""
    if elements.dtype == torch.bool:
        return elements
    return ~(elements <= HIDDEN.get(elements.dtype, HIDDEN_ELSE))


def blocks_of(elements: Tensor) -> tuple[Tensor, Tensor]:
    """`Mask.blocks` of a tensor in four dimensions, and which keys any query of any head sees, (B or 1, M or 1)."""
    blocks, keys = [], None
    for rows in elements.split(ROWS, 2):
        visible = shown(rows)
        whole = visible if rows.dtype == torch.bool else rows == 0
        blocks.append(_states(_reduced(visible, False).any(-1).any(-1), _reduced(whole, True).all(-1).all(-1)))
        seen = visible.any(2).any(1)
        keys = seen if keys is None else keys | seen
    return torch.cat(blocks, 2), keys


def _states(any_shown: Tensor, all_shown: Tensor) -> Tensor:
    return (any_shown * MASKED + (any_shown & all_shown) * (WHOLE - MASKED)).to(torch.uint8)


def _reduced(x: Tensor, padding: bool) -> Tensor:
    """(B, H, n, m, BLOCK, BLOCK) of (B, H, N, M); a dimension of one token stays one."""
    for dim in (2, 3):
        missing = -x.shape[dim] % BLOCK if x.shape[dim] > 1 else 0
        if missing:
            x = F.pad(x, (0, missing) if dim == 3 else (0, 0, 0, missing), value=padding)
    q, k = (min(BLOCK, x.shape[dim]) for dim in (2, 3))
    return x.unflatten(3, (-1, k)).unflatten(2, (-1, q)).transpose(3, 4)


def tiles_of(block_mask: BlockMask) -> Mask:
    """The mask of a BlockMask.

    mask_mod is called for the tiles that the BlockMask shows in part alone.
    """
    from torch.nn.attention.flex_attention import create_mask

    tokens_q, tokens_k = block_mask.seq_lengths
    sizes, device = block_mask.BLOCK_SIZE, block_mask.kv_num_blocks.device
    asked = _listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = torch.zeros_like(asked)
    if block_mask.full_kv_num_blocks is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    grid = -(-tokens_q // TILE), -(-tokens_k // TILE)
    shows, hides = _of_tiles(full, sizes, grid).all(-1).all(-1), ~_of_tiles(asked | full, sizes, grid).any(-1).any(-1)
    # the last tile of an axis is never whole: what lies beyond the tokens is hidden
    for dim, tokens in ((2, tokens_q), (3, tokens_k)):
        if tokens % TILE:
            shows.select(dim, -1).fill_(False)
    b, h, i, j = (~shows & ~hides).nonzero(as_tuple=True)

    def asked_of(tile: Tensor, _: Tensor, row: Tensor, column: Tensor) -> Tensor:
        at, q, k = (b[tile], h[tile]), i[tile] * TILE + row, j[tile] * TILE + column
        inside = (q < tokens_q) & (k < tokens_k)
        q, k = q.clamp(max=tokens_q - 1), k.clamp(max=tokens_k - 1)
        place = q // sizes[0], k // sizes[1]
        return inside & (full[(*at, *place)] | (asked[(*at, *place)] & block_mask.mask_mod(*at, q, k)))

    constant = torch.stack([torch.ones(TILE, TILE, dtype=torch.bool), torch.zeros(TILE, TILE, dtype=torch.bool)])
    elements = [constant.to(device)]
    for first in range(0, len(b), TILES):
        some = slice(first, first + TILES)
        count = len(b[some])
        elements.append(create_mask(_shifted(asked_of, first), count, 1, TILE, TILE, device)[:, 0])
    elements = torch.cat(elements)
    tiles = torch.where(shows, SHOWS_ALL, HIDES_ALL).int()
    tiles[b, h, i, j] = torch.arange(2, len(elements), device=device, dtype=torch.int32)
    reduced = _reduced(elements[:, None], False)[:, 0]
    states = _states(reduced.any(-1).any(-1), reduced.all(-1).all(-1))[tiles.long()]
    states = states.transpose(3, 4).flatten(4, 5).flatten(2, 3)[:, :, : -(-tokens_q // BLOCK), : -(-tokens_k // BLOCK)]
    seen = torch.zeros(len(asked), grid[1], TILE, dtype=torch.int32, device=device)
    columns = elements.any(1).int()
    seen.index_put_((b, j), columns[2:], accumulate=True)
    seen += shows.any(2).any(1).int()[..., None]
    return Mask(elements, tiles, states.contiguous(), seen.flatten(1)[:, :tokens_k] > 0)


def _shifted(mask_mod: Callable[..., Tensor], by: int) -> Callable[..., Tensor]:
    return lambda b, h, q, k: mask_mod(b + by, h, q, k)


def _listed(counts: Tensor, indices: Tensor) -> Tensor:
    """(B, H, n, m) bool: the blocks that a BlockMask lists."""
    columns = indices.shape[-1]
    listed = torch.arange(columns, device=indices.device) < counts[..., None]
    dense = torch.zeros(*counts.shape, columns + 1, dtype=torch.bool, device=indices.device)
    return dense.scatter_(-1, torch.where(listed, indices, columns).long(), True)[..., :columns]


def _of_tiles(blocks: Tensor, sizes: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """(B, H, *grid, n, m): the n x m places of each tile between which lie the bounds of blocks of any size."""
    q, k = (
        (torch.arange(count * TILE, device=blocks.device) // size).clamp(max=blocks.shape[dim] - 1).view(count, TILE)
        for count, size, dim in zip(grid, sizes, (2, 3))
    )
    q, k = (x[:, :: math.gcd(size, TILE)] for x, size in zip((q, k), sizes))
    return blocks[:, :, q[:, None, :, None], k[None, :, None, :]]
