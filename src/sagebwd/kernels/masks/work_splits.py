"""Work splits of the backward: each program takes one block list, or one share of a long list.

Keys that all queries see, as sinks and global tokens are, have lists many times as long as the others. Lists are cut
into shares of even lengths, at most what half of one of 132 processors would have of all blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Shares beyond one a list, at most; no more lists are cut.
MOST = 2 * 132
# Blocks of a list that is not cut: a program has work of its own beside them.
LEAST = 32
# Numbers of a program, and of a block in a list, before which as many are its counts.
FIELDS, ENTRY = 8, 4
# Where a listed block of queries has its head, of those that share a key head.
HEAD_BIT = 20
# The backward's lists are multiples of so many numbers: strides of whole 16 numbers are one kernel's.
LENGTHS = 16


def work_splits_of(lists: Tensor, batch: int, heads: int, interleave_heads: bool) -> Tensor:
    """What programs take of lists of ``batch * heads`` key heads.

    Args: lists as of `sagebwd.kernels.masks.sm90_block_lists.of_keys`; interleave_heads, whether key heads
        take programs in turn.

    Returns: (batch * heads * blocks of keys + `MOST`, FIELDS) int32: the key head counted over the batch, the block of
    keys, where the share begins in the lists as if it were a list, of how many blocks seen in part and of how many at
    all it is, how many shares the list has, and its number among the lists that are cut, which come first. Behind the
    last share are blocks of keys that are not there.
    """
    blocks_k, row = lists.shape[2:]
    of_list = torch.arange(lists.shape[:3].numel(), device=lists.device).view(lists.shape[:3])
    of_list = of_list.expand(batch, heads, -1).flatten()
    counts = lists.flatten(0, 2)[of_list, :2].long()
    in_part, length = counts[:, 0], counts.sum(-1)
    longest = (length.sum() // MOST + 1).clamp(min=LEAST)
    splits = ((length + longest - 1) // longest).clamp(min=1)

    number = torch.arange(len(length), device=lists.device)
    if interleave_heads:
        number = number.view(-1, blocks_k).mT.flatten()
    number = number[torch.argsort((splits[number] == 1).int(), stable=True)]
    ends = splits[number].cumsum(0)
    program = torch.arange(len(length) + MOST, device=lists.device)
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
