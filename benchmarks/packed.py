"""Packed documents, for `attention --packed`: sequences one after another, without padding, causal."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.shapes import DEFAULT_WIDTHS, MODEL_WIDTH, Shape, widths_of

GROUP = 4
"""Query heads that read one key head, where heads are grouped."""


def lognormal(
    median: float, sigma: float, least: int, most: int, *, documents: int | None = None, tokens: int | None = None
) -> tuple[int, ...]:  # fmt: skip
    """Lengths of so many documents, or of documents of so many tokens, the last one cut; the same in every run."""
    draw, lengths = random.Random(0), []
    while len(lengths) < documents if tokens is None else sum(lengths) < tokens:
        length = round(draw.lognormvariate(math.log(median), sigma))
        if least <= length <= most:
            lengths.append(length)
    if tokens is not None:
        lengths[-1] -= sum(lengths) - tokens
    return tuple(lengths)


DOCUMENTS = {
    "16x2k": (2048,) * 16,
    "8x2k": (2048,) * 8,
    "mixed": (1317, 4099, 700, 8192, 2500, 333, 6000, 1024, 5000, 3603),
    "heavy-tailed": lognormal(600, 1.5, 16, 32768, tokens=32768),
    "web": lognormal(600, 1.0, 16, 32768, documents=512),
    "sft": lognormal(300, 0.9, 50, 2000, documents=512),
}
"""Lengths by name: of mixed ones few are multiples of a kernel's tiles; the last three are drawn as those of corpora
are distributed, of texts packed into 32768 tokens, of a batch of texts, and of a batch of conversations."""
GROUPED = "mixed"
"""The lengths that grouped heads are timed with too."""
CPU_DOCUMENTS, CPU_SHARE = 4, 64
"""So many documents a CPU gets, of such a share of their tokens: to try a command out takes seconds."""


@dataclass(frozen=True)
class Packed(Shape):
    """One call of `sage_attention_varlen`: tensors are (tokens, heads, head_dim), sequences of ``lengths`` in them.

    batch is 1, and tokens is the sum of the lengths, which are those of queries and keys alike. bound: what is given
    as ``max_seqlen`` where it is more than the longest.
    """

    lengths: tuple[int, ...] = ()
    bound: int = 0

    @staticmethod
    def of(
        head_dim: int, heads: int, kv_heads: int, lengths: Iterable[int], value_dim: int | None = None, bound: int = 0
    ) -> Packed:  # fmt: skip
        """A causal call of such sequences."""
        lengths = tuple(lengths)
        return Packed(head_dim, heads, kv_heads, 1, sum(lengths), True, value_dim, lengths=lengths, bound=bound)

    def __str__(self) -> str:
        count, least, most = len(self.lengths), min(self.lengths), max(self.lengths)
        each = f"x {most}" if least == most else f"of {least} to {most}"
        return f"{self.name} packed {count} {each} causal"

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, or the bound."""
        return max(*self.lengths, self.bound)

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


def packed_shapes(
    widths: Iterable[str] = DEFAULT_WIDTHS, documents: Iterable[str] | None = None, device: str = "cuda"
) -> list[Packed]:
    """Of each head_dim documents of each kind of lengths, and of `GROUPED` ones with grouped heads too.

    Heads are 2048 / value's head_dim; where they are grouped, as many of them as there are whole groups.

    Args: widths, of `benchmarks.shapes.WIDTHS`; documents, of `DOCUMENTS`, all unless given. Raises ValueError for
    others.
    """
    names = list(documents or DOCUMENTS)
    for name in names:
        if name not in DOCUMENTS:
            raise ValueError(f"documents={name!r} are not known; accepted: {', '.join(DOCUMENTS)}")
    found = []
    for head_dim, value_dim in widths_of(widths):
        heads = MODEL_WIDTH // value_dim
        for name in names:
            lengths = DOCUMENTS[name]
            if device == "cpu":
                lengths = [max(1, length // CPU_SHARE) for length in lengths[:CPU_DOCUMENTS]]
            found.append(Packed.of(head_dim, heads, heads, lengths, value_dim))
            if name == GROUPED:
                found.append(Packed.of(head_dim, heads // GROUP * GROUP, heads // GROUP, lengths, value_dim))
    return found
