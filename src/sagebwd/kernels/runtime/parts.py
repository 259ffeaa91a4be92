"""Parts of a call: sequences and key heads with their query heads, whose numbers depend on no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from sagebwd.call import Call, Saved
from sagebwd.kernels.runtime.alignment import aligned_rows, contiguous


class Part(NamedTuple):
    """A part: its call, and which sequences of the batch (all of packed ones) and heads of queries and of keys it has.

    Its values of tokens are contiguous as they lie: it has all heads of its sequences, or one sequence if dense.
    """

    call: Call
    batch: slice
    queries: slice
    keys: slice

    @classmethod
    def of(cls, call: Call, batch: slice, keys: slice) -> Part:
        """The part of some sequences and key heads."""
        queries = slice(keys.start * call.group, keys.stop * call.group)
        sequences = batch.stop - batch.start
        mine = call._replace(
            queries=call.queries._replace(batch=sequences, heads=queries.stop - queries.start),
            keys=call.keys._replace(batch=sequences, heads=keys.stop - keys.start),
            key_mask=None if call.key_mask is None else contiguous(call.key_mask[batch]),
            lists=None if call.lists is None else call.lists.of(batch, queries),
        )
        return cls(mine, batch, queries, keys)

    def rows(self, x: Tensor | None, heads: slice) -> Tensor | None:
        """Its rows of a tensor of all: of ``queries`` or ``keys``."""
        return x if x is None else x[:, heads] if self.call.packed else x[self.batch, heads]

    def values(self, x: Tensor | None, heads: slice) -> Tensor | None:
        """The same of values of tokens."""
        return x if x is None else contiguous(x[heads] if self.call.packed else x[self.batch, heads])

    def given(
        self, saved: Saved, do: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor
    ) -> tuple[Saved, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
        """What a backward reads of it."""
        rows = {"o": self.queries, "q_int8": self.queries, "k_int8": self.keys}
        values = {"lse": self.queries, "q_scale": self.queries, "row_max": self.queries, "k_scale": self.keys}
        mine = saved._replace(
            k_mean=contiguous(saved.k_mean[self.batch, self.keys]),
            **{name: aligned_rows(self.rows(getattr(saved, name), heads)) for name, heads in rows.items()},
            **{name: self.values(getattr(saved, name), heads) for name, heads in values.items()},
        )
        do, q = (aligned_rows(self.rows(x, self.queries)) for x in (do, q))
        k, v = (aligned_rows(self.rows(x, self.keys)) for x in (k, v))
        return mine, do, self.values(dlse, self.queries), q, k, v


def parts_of(call: Call, most: int) -> Iterator[Part]:
    """A call by parts of at most so many key heads, counted over the batch: as few as these make, of even sizes."""
    heads, batch = call.keys.heads, call.keys.batch
    if call.packed:
        divided = [(slice(0, batch), keys) for keys in _evenly(heads, most)]
    elif most < heads:
        divided = [(slice(n, n + 1), keys) for n in range(batch) for keys in _evenly(heads, most)]
    else:
        divided = [(sequences, slice(0, heads)) for sequences in _evenly(batch, most // heads)]
    return (Part.of(call, *of) for of in divided)


def _evenly(count: int, most: int) -> list[slice]:
    step = -(-count // -(-count // most))
    return [slice(first, min(first + step, count)) for first in range(0, count, step)]
