"""The functions of `sagebwd.kernels.masks.list_kernels` with torch: what its kernels are held to, and stand-ins."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sagebwd.kernels.masks import list_kernels, work_splits
from sagebwd.kernels.masks.work_splits import ENTRY, HEAD_BIT, LENGTHS
from sagebwd.masks.band import Band
from sagebwd.masks.mask import BLOCK, SKIP, TILE, WHOLE


def lists_of(
    blocks: Tensor, tiles: Tensor | None, key_mask: Tensor | None, last: Tensor | None, batch: int,
    tokens: tuple[int, int], tile: tuple[int, int], band: Band, by_key: bool,
) -> Tensor:  # fmt: skip
    order = order_of(blocks, key_mask, batch, tokens, tile, band, last)
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
    blocks: Tensor, key_mask: Tensor | None, batch: int, tokens: tuple[int, int], tile: tuple[int, int], band: Band,
    last: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """How much of each tile of queries and keys is seen: 2 where all of it is, 1 in part, 0 nothing.

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
    if key_mask is None:
        key_mask = torch.ones(batch, tokens[1], dtype=torch.bool, device=blocks.device)
    counts = F.pad(key_mask, (0, -tokens[1] % tile[1])).unflatten(1, (-1, tile[1]))[:, None, None]
    visible, whole = visible & counts.any(-1), whole & counts.all(-1)
    if tokens[0] % tile[0]:
        whole = whole & (q + tile[0] <= tokens[0])[:, None]
    if last is not None:
        whole = whole & (last[:, None, None, None] // tile[1] != k // tile[1])
    return visible.int() + (whole & visible).int()


def _coarse(blocks: Tensor, tile: tuple[int, int], padding: int) -> Tensor:
    """(B, H, n, m, blocks in a tile) of a map's blocks."""
    q, k = (size // BLOCK for size in tile)
    blocks = F.pad(blocks, (0, -blocks.shape[3] % k, 0, -blocks.shape[2] % q), value=padding)
    return blocks.unflatten(3, (-1, k)).unflatten(2, (-1, q)).transpose(3, 4).flatten(4)


def of_queries(
    blocks: Tensor, key_mask: Tensor | None, batch: int, tokens: tuple[int, int], band: Band, tile: tuple[int, int]
) -> Tensor:
    order = order_of(blocks, key_mask, batch, tokens, tile, band)
    in_part, whole = _counts(order)
    # the kernel's first step is one with masks, whose bits say that the block is whole, or that nothing is seen
    missing = (in_part == 0).int()
    return torch.cat([in_part + missing, (whole - missing).clamp(min=0), _in_part_first(order).int()], -1)


def of_keys(
    blocks: Tensor, tiles: Tensor, key_mask: Tensor | None, batch: int, tokens: tuple[int, int], band: Band,
    tile: tuple[int, int], group: int, heads: int = 0, last_heads: int = 1,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    order = order_of(blocks, key_mask, batch, tokens, tile, band)
    q, k = (torch.arange(n, device=order.device) * size // TILE for n, size in zip(order.shape[2:], tile))
    seen = (order > 0).int()
    rank = seen.flip(-1).cumsum(-1).flip(-1) - seen
    number = torch.arange(order.shape[2], device=order.device)[:, None]
    order, of_tile, rank = (
        _by_key(x, group) for x in torch.broadcast_tensors(order, tiles[:, :, q[:, None], k], rank)
    )
    entry = number + (torch.arange(group, device=order.device) << HEAD_BIT)[:, None, None]
    entry = entry.expand(group, len(number), order.shape[2]).flatten(0, 1).mT.expand_as(order)
    found = torch.stack([entry, of_tile, rank, torch.zeros_like(rank)], -1)
    found = found.gather(-2, _in_part_first(order)[..., None].expand_as(found)).flatten(-2)
    lists = torch.cat([F.pad(torch.cat(_counts(order), -1), (0, 2)), found], -1).int()
    lists = F.pad(lists, (0, -lists.shape[-1] % LENGTHS))
    return lists, work_splits_of(lists, batch, heads, last_heads) if heads else None


def _counts(order: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each list are seen in part, and whole."""
    return tuple((order == state).sum(-1, keepdim=True).int() for state in (1, 2))


def _in_part_first(order: Tensor) -> Tensor:
    return torch.argsort((order - 1) % 3, dim=-1, stable=True)


def _by_key(x: Tensor, group: int) -> Tensor:
    """(B, H or 1, n, m) as (B, key heads or 1, m, group * n)."""
    heads = x.shape[1]
    x = x.expand(-1, group, -1, -1) if heads == 1 else x
    return x.unflatten(1, (-1, group)).flatten(2, 3).mT.contiguous()


def work_splits_of(lists: Tensor, batch: int, heads: int, last_heads: int) -> Tensor:
    """What programs take of lists of ``batch * heads`` key heads (`sagebwd.kernels.masks.work_splits`)."""
    blocks_k, row = lists.shape[2:]
    of_list = torch.arange(lists.shape[:3].numel(), device=lists.device).view(lists.shape[:3])
    of_list = of_list.expand(batch, heads, -1).flatten()
    counts = lists.flatten(0, 2)[of_list, :2].long()
    in_part, length = counts[:, 0], counts.sum(-1)
    longest = (length.sum() // work_splits.MOST + 1).clamp(min=work_splits.LEAST)
    splits = ((length + longest - 1) // longest).clamp(min=1)

    number = torch.arange(len(length), device=lists.device)
    number = torch.cat(
        [number[: -last_heads * blocks_k], number[-last_heads * blocks_k :].view(-1, blocks_k).mT.flatten()]
    )
    number = number[torch.argsort((splits[number] == 1).int(), stable=True)]
    ends = splits[number].cumsum(0)
    program = torch.arange(len(length) + work_splits.MOST, device=lists.device)
    position = torch.searchsorted(ends, program, right=True)
    there = position < len(number)
    position = position.clamp(max=len(number) - 1)
    number = number[position]
    split, splits, length = program - ends[position] + splits[number], splits[number], length[number]
    begin, end = split * length // splits, (split + 1) * length // splits
    in_part = torch.minimum((in_part[number] - begin).clamp(min=0), end - begin)
    at = of_list[number] * row + begin * ENTRY
    block = torch.where(there, number % blocks_k, blocks_k)
    fields = number // blocks_k, block, at, in_part, end - begin, splits, position, torch.zeros_like(at)
    return torch.stack(fields, -1).int()


def stand_in(patch: Callable[[object, str, object], None]) -> None:
    """Take the place of `list_kernels`' functions by ``setattr``, where launches are watched, or kernels not run."""
    for function in (lists_of, of_queries, of_keys):
        patch(list_kernels, function.__name__, function)
