"""Packed documents, for `attention --packed`: sequences one after another, without padding, causal."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.shapes import DEFAULT_WIDTHS, MODEL_WIDTH, Shape, widths_of

EQUAL = ((2048,) * 16, (2048,) * 8)
MIXED = (1317, 4099, 700, 8192, 2500, 333, 6000, 1024, 5000, 3603)
"""Lengths of which few are multiples of a kernel's tiles, 32768 tokens in all."""
GROUP = 4
"""Query heads that read one key head, where heads are grouped."""


@dataclass(frozen=True)
class Packed(Shape):
    """One call of `sage_attention_varlen`: tensors are (tokens, heads, head_dim), sequences of ``lengths`` in them.

    batch is 1, and tokens is the sum of the lengths, which are those of queries and keys alike.
    """

    lengths: tuple[int, ...] = ()

    @staticmethod
    def of(
        head_dim: int, heads: int, kv_heads: int, lengths: Iterable[int], value_dim: int | None = None
    ) -> Packed:  # fmt: skip
        """A causal call of such sequences."""
        lengths = tuple(lengths)
        return Packed(head_dim, heads, kv_heads, 1, sum(lengths), True, value_dim, lengths)

    def __str__(self) -> str:
        count, least, most = len(self.lengths), min(self.lengths), max(self.lengths)
        each = f"x {most}" if least == most else f"of {least} to {most}"
        return f"{self.name} packed {count} {each} causal"

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    def offsets(self, device: str) -> Tensor:
        """Where each sequence starts, and the total: (sequences + 1,) int32."""
        return torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=device)

    def sequences(self) -> list[slice]:
        """The tokens of each sequence."""
        bounds = [0, *itertools.accumulate(self.lengths)]
        return [slice(start, end) for start, end in itertools.pairwise(bounds)]

    def short(self) -> Packed:
        """Itself: whoever computes it knows where its sequences end."""
        return self

    def inputs(self, device: str, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gaussian q, k, v and do, the same for all."""
        return tuple(x[0].transpose(0, 1).contiguous() for x in super().inputs(device, dtype, seed))

    def last_key_head(self, x: Tensor) -> Tensor:
        """The last key head, or the query heads that read it: (1, heads, tokens, head_dim)."""
        return super().last_key_head(x.transpose(0, 1)[None])

    def flops(self, direction: str) -> float:
        """Useful operations of one direction, the sum over sequences."""
        call = self.head_dim, self.heads, self.kv_heads, self.batch
        return sum(Shape(*call, n, self.is_causal, self.value_dim).flops(direction) for n in self.lengths)


def packed_shapes(widths: Iterable[str] = DEFAULT_WIDTHS) -> list[Packed]:
    """Of each head_dim sequences of one length and of mixed ones, and the mixed ones with grouped heads.

    Heads are 2048 / value's head_dim; where they are grouped, as many of them as there are whole groups.

    widths: of `benchmarks.shapes.WIDTHS`. Raises ValueError for another.
    """
    found = []
    for head_dim, value_dim in widths_of(widths):
        heads = MODEL_WIDTH // value_dim
        found += [Packed.of(head_dim, heads, heads, lengths, value_dim) for lengths in (*EQUAL, MIXED)]
        found.append(Packed.of(head_dim, heads // GROUP * GROUP, heads // GROUP, MIXED, value_dim))
    return found
