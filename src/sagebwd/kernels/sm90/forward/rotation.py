"""A row of Q times R (`sagebwd.reference.rotation`), by sums and differences, in the threads that share the row.

Imports no compiler: a thread's numbers, and what threads do with each other's, are whatever the caller has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Share(NamedTuple):
    """Channels of a thread: ``lanes`` threads take ``chunk`` after ``chunk`` of a row's channels by turns."""

    lanes: int
    chunk: int
    elements: int

    def channels(self) -> list[int]:
        """Of each of a thread's elements the first thread's channel; the next thread's is ``chunk`` further."""
        return [i // self.chunk * self.chunk * self.lanes + i % self.chunk for i in range(self.elements)]


class Threads(NamedTuple):
    """What a thread can do beside sums: its lane, whatever another lane has, and one of two."""

    lane: Any
    exchange: Callable[[Any, int], Any]  # x, offset: x of the lane whose number differs in this bit
    select: Callable[[Any, Any, Any], Any]  # condition, where it holds, where not
    fma: Callable[[Any, Any, Any], Any]


def stages(rotation: tuple[int, ...]) -> list[tuple[int, int]]:
    """(distance, channels), in order: of the first ``channels``, pairs that lie ``distance`` apart are added up."""
    bits = range(rotation[0].bit_length() - 1)
    return [(1 << bit, sum(size for size in rotation if size > 1 << bit)) for bit in bits]


def root(rotation: tuple[int, ...]) -> float:
    """What `turned` leaves to be multiplied: the last block's factor."""
    return rotation[-1] ** -0.5


def turned(x: list, rotation: tuple[int, ...], share: Share, threads: Threads) -> list:
    """A thread's share of x R / `root`, R of blocks of these sizes; channels of x beyond them are zeros."""
    channels, (lane, exchange, select, fma) = share.channels(), threads
    end = sum(rotation)

    def if_before(limit: int, channel: int, value: Any, other: Any) -> Any:
        """``value`` if the thread's channel is before a limit; beyond the blocks either will do."""
        if limit == end or channel + share.chunk * (share.lanes - 1) < limit:
            return value
        if channel >= limit:
            return other
        return select(lane < -((channel - limit) // share.chunk), value, other)

    for distance, count in stages(rotation):
        offset = distance // share.chunk
        sums = []
        for i, channel in enumerate(channels):
            if channel >= count:
                pair = x[i]
            elif 0 < offset < share.lanes:  # the pair's other is another thread's
                sign = select((lane & offset) != 0, -1.0, 1.0)
                pair = fma(x[i], sign, exchange(x[i], offset))
            else:
                j = channels.index(channel ^ distance)
                pair = x[j] - x[i] if channel & distance else x[i] + x[j]
            sums.append(if_before(count, channel, pair, x[i]))
        x = sums
    if len(rotation) == 1:
        return x
    factors = []
    for channel in channels:
        factor, limit = 1.0, end
        for size, following in zip(rotation[-2::-1], rotation[:0:-1]):
            limit -= following
            factor = if_before(limit, channel, size**-0.5 / root(rotation), factor)
        factors.append(factor)
    return [one * factor for one, factor in zip(x, factors)]
