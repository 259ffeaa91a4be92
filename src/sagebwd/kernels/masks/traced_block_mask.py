"""A BlockMask whose mask_mod a kernel computes, so that reading it in each call needs neither the host nor a wait.

FlexAttention trusts a BlockMask's lists and calls its mask_mod in every call; so does this, on a GPU. Forward reads it
and keeps none of what it read: backward reads it again, of the same tensors, which autograd watches for writes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sagebwd.cache import layout_of
from sagebwd.kernels.masks import blocks as maps
from sagebwd.kernels.runtime.numbers import Numbers
from sagebwd.masks.kinds import ELEMENTS, WORDS_BY_KEY
from sagebwd.masks.mask import TILE, Mask
from sagebwd.masks.parts import PartsOfCall
from sagebwd.masks.trace_mask_mod import Trace, traced

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Bytes that a call may take for tiles of which nobody knows whether they are there: beyond these they are counted,
# which waits for the device. Bits of 65536 queries and keys.
MOST_BYTES = 1 << 29


def refuse_in_capture(what: str) -> None:
    """Raises NotImplementedError for a BlockMask that can be read by a wait alone."""
    raise NotImplementedError(
        f"block_mask: a BlockMask {what} cannot be read while a CUDA graph is captured, since that waits for the "
        "device; pass sagebwd.read_block_mask(block_mask), made before the capture"
    )


class Lists(NamedTuple):
    """Lists of a BlockMask: how many blocks of keys each block of queries sees in part, (B, H, rows), and which,
    (B, H, rows, columns), then the same of blocks that it sees whole, or None."""

    counts: Tensor
    indices: Tensor
    full_counts: Tensor | None
    full_indices: Tensor | None


class TracedBlockMask(NamedTuple):
    """Lists of a BlockMask, what its mask_mod computes, the sizes of its blocks, and its queries and keys."""

    lists: Lists
    trace: Trace
    sizes: tuple[int, int]
    tokens: tuple[int, int]

    @classmethod
    def of(cls, block_mask: BlockMask, device: torch.device) -> TracedBlockMask | None:
        """None on a CPU, where a mask_mod has no trace, and of tensors elsewhere."""
        lists = (
            block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        )  # fmt: skip
        if not maps.by_kernels(lists[1]):
            return None
        trace = traced(block_mask.mask_mod, device)
        if trace is None:
            return None
        for x in (*lists, *trace.tables):
            if x is not None and (x.device != device or x.layout is not torch.strided):
                return None
        trace = trace._replace(numbers=Numbers(trace.numbers))
        return cls(Lists(*lists), trace, tuple(block_mask.BLOCK_SIZE), tuple(block_mask.seq_lengths))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch or 1, heads or 1, queries, keys."""
        return *self.lists.counts.shape[:2], *self.tokens

    @property
    def is_kept(self) -> bool:
        """Never: the tensors are the user's."""
        return False

    def without_watched(self) -> tuple[TracedBlockMask, list[Tensor | None]]:
        """The same without its tensors, all of which backward reads again, and these."""
        tensors = [*self.lists, *self.trace.tables]
        return self.with_watched([None] * len(tensors)), tensors

    def with_watched(self, watched: list[Tensor | None]) -> TracedBlockMask:
        """The BlockMask of which this is left."""
        count = len(self.lists)
        lists, tables = self.lists._make(watched[:count]), tuple(watched[count:])
        return self._replace(lists=lists, trace=self.trace._replace(tables=tables))

    @property
    def tensors(self) -> list[Tensor]:
        """All that is read."""
        return [x for x in (*self.lists, *self.trace.tables) if x is not None]

    @property
    def numbers(self) -> list[int | float]:
        """Values that programs which read it are given."""
        return self.trace.numbers.values

    @property
    def kind(self) -> Hashable:
        """All but what tensors hold, and numbers: what a program that reads it follows from."""
        trace = self.trace
        lists = map(layout_of, self.lists)
        return trace.text, trace.numbers, self.sizes, self.tokens, *lists, *map(layout_of, trace.tables)

    def has_room(self, form: str) -> bool:
        """Whether every tile gets room of its own."""
        tiles = math.prod(self.shape[:2]) * math.prod(-(-n // TILE) for n in self.tokens)
        return tiles * TILE * TILE // (1 if form == ELEMENTS else 8) <= MOST_BYTES

    def read(self, batch: int, form: str) -> Mask:
        """The mask of a call of so many batch elements, as its kernels read it: in a form of
        `sagebwd.masks.kinds`."""
        from sagebwd.kernels.masks import block_mask_pass

        if not self.has_room(form):
            return self.counted().with_parts(PartsOfCall())
        with torch.cuda.device_of(self.lists.indices):
            found = block_mask_pass.read(self.lists, self.trace, self.sizes, self.tokens, batch, form)
        parts = PartsOfCall()
        parts.keep(("keys", batch, self.tokens[1]), found.keys)
        elements = found.stored
        if form != ELEMENTS:
            parts.keep(("bits", self.tokens, form == WORDS_BY_KEY), (found.stored, found.tiles))
            elements = found.tiles.new_empty((0, TILE, TILE), dtype=torch.bool)
        return Mask(elements, found.tiles, found.blocks, found.keys, parts, self.tokens[0])

    def counted(self) -> Mask:
        """The mask with tiles that are shown in part alone, whose number the host waits for."""
        from sagebwd.kernels.masks import block_mask_pass

        if self.lists.indices.is_cuda and torch.cuda.is_current_stream_capturing():
            refuse_in_capture(f"of {self.tokens[0]} queries and {self.tokens[1]} keys")
        with torch.cuda.device_of(self.lists.indices):
            tiles = block_mask_pass.tiles_of(self.lists, self.sizes, self.tokens)
            found = block_mask_pass.elements_of(tiles, int(tiles.count), self.trace, self.sizes, self.tokens)
        return Mask(found.stored, found.tiles, found.blocks, found.keys, queries=self.tokens[0])
