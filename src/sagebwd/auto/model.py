"""What a call takes in low precision and by each contender in full precision, in ms: a model of all, by card.

A call takes what its host takes, or else ``fixed + row x rows + pair x pairs`` on the GPU: launches, passes over the
rows of Q and of K and V, and products of queries and keys. The four are a `Cost`, of a card, a pair of widths, a kind
of mask and a direction. ``model.json`` has those of this project's cards, which `python -m tools.fit_auto` fits to
timings; `sagebwd.auto.timings` has those of a machine. Imports neither torch nor triton.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sagebwd.auto.contenders import EFFICIENT, LOW, PEERS
from sagebwd.masks.kinds import CAUSAL, PACKED, WINDOW
from sagebwd.numerics import rounded_up

# Of a call whose inputs need no gradient, and of forward and backward together.
FORWARD, TRAINING = "forward", "training"
DIRECTIONS = (FORWARD, TRAINING)
# Queries, and keys, of a tile: about all kernels' on Hopper. Multiprocessors of an H100 and of an H200.
TILE, MULTIPROCESSORS = 128, 132
# In which `_in_waves` counts, so that a trace has integers alone.
_PARTS = 1 << 10
# Low precision has to be faster by so many percent, else the call is one for full precision.
MARGIN = 3
# Of the units that people read: microseconds, nanoseconds and picoseconds, as femtoseconds.
UNITS = 10**9, 10**9, 10**6, 10**3
_MILLI = 10**12


class Work(NamedTuple):
    """The work of a call for a contender.

    rows: of Q, K and V that are passed over. pairs: twice those of a query and a key that are multiplied.
    """

    rows: int
    pairs: int


class Size(NamedTuple):
    """How large a call is that others compute too.

    queries, keys: tokens of a sequence, of packed ones the mean, rounded up. heads, kv_heads: of all sequences
    together. width: of a window, the keys in it. by_torch: whether torch is one of them, and not by a mask too large
    to make. longest: keys of the longest packed sequence, 0 where all are alike, or a trace does not know.
    """

    queries: int
    keys: int
    heads: int
    kv_heads: int
    width: int = 0
    by_torch: bool = True
    longest: int = 0

    def is_for(self, contender: str) -> bool:
        """Whether a contender takes such calls: torch's memory-efficient kernel takes no grouped heads."""
        return contender in PEERS or (self.by_torch and (contender != EFFICIENT or self.heads == self.kv_heads))

    def work(self, contender: str, kind: str, training: bool) -> Work:
        """The work of a contender (`sagebwd.auto.contenders`) under a kind of mask, of forward or with backward.

        A tile that a mask or an end cuts is multiplied whole. Torch gets a window as a mask of elements, and
        multiplies all. Packed sequences count as causal, of a length halfway between the mean and the longest; of
        masks of elements all pairs count.
        """
        queries, keys, heads, kv_heads = self.queries, self.keys, self.heads, self.kv_heads
        is_low, is_peer = contender == LOW, contender in PEERS
        longest = max(keys, self.longest)
        n, m = rounded_up(queries, TILE), rounded_up(keys, TILE)
        if kind == WINDOW and self.width < keys and (is_low or is_peer):
            pairs = 2 * n * min(m, rounded_up(self.width + TILE - 1, TILE))  # queries of a tile see these together
        elif kind not in (CAUSAL, PACKED):
            pairs = 2 * n * m
        elif n <= m:
            pairs = n * (n + TILE) if kind == CAUSAL else n * (2 * m - n + TILE)
        else:
            pairs = m * (2 * n - m + TILE) if kind == CAUSAL else m * (m + TILE)
        if kind == PACKED:
            pairs = pairs * (keys + longest) // (2 * keys)
        rows, longer = heads * queries + kv_heads * keys, _in_waves(heads * n // TILE, is_peer)
        if training:
            if is_low:  # dQ is added up in FP32 and passed over once more
                rows = (6 * heads * queries + 4 * kv_heads * keys) // 5
            else:  # gradients of K and V are those of each query head, which are added up, by peers in memory
                rows += (heads - kv_heads + (heads if is_peer and heads > kv_heads else 0)) * keys
            # two of seven products are forward's
            backward = _in_waves((kv_heads if is_low else heads) * m // TILE, is_peer)
            longer = (2 * longer + 5 * backward) // 7
        return Work(rows, pairs * heads * longer // _PARTS)


def _in_waves(tiles: int, is_peer: bool) -> int:
    """How much longer tiles take than on multiprocessors that are all busy, in `_PARTS`.

    Of the last wave, in which some have no tile, half counts: tiles differ, and a multiprocessor may run two. Peers'
    schedulers even waves out. By minima and maxima: a trace compiles anew for each branch that a length takes.
    """
    busy = max(tiles, MULTIPROCESSORS)
    waves = busy if is_peer else rounded_up(tiles, MULTIPROCESSORS)
    return _PARTS * (busy + waves) // (2 * tiles)


class Cost(NamedTuple):
    """What a call takes, in femtoseconds, so that a trace compares integers: of a pair, half of it counts twice."""

    host: int
    fixed: int
    row: int
    pair: int

    @classmethod
    def of(cls, host_us: float, fixed_us: float, row_ns: float, pair_ps: float) -> Cost:
        """Of the units that ``model.json`` has."""
        return cls(*(round(x * unit) for x, unit in zip((host_us, fixed_us, row_ns, pair_ps), UNITS)))

    def with_margin(self) -> Cost:
        """What low precision counts as: `MARGIN` percent more."""
        return Cost(*((x * (100 + MARGIN) + 50) // 100 for x in self))

    def ms(self, work: Work) -> float:
        """Of a call's work for whom the cost is."""
        return max(taken(self, work)) / 2 / _MILLI


def taken(cost: tuple[int, ...], work: Work) -> tuple[int, int]:
    """Twice what the host and what the GPU take by a `Cost`."""
    host, fixed, row, pair = cost
    return 2 * host, 2 * (fixed + row * work.rows) + pair * work.pairs


def is_less(ours: tuple[int, int], theirs: tuple[int, int]) -> bool:
    """Whether the greater of two numbers is no more than that of two others, by comparisons, which a trace guards.

    Guards have 64 bits, which are enough for calls of an hour.
    """
    return (ours[0] <= theirs[0] or ours[0] <= theirs[1]) and (ours[1] <= theirs[0] or ours[1] <= theirs[1])


def with_margin(ms: float) -> float:
    """What milliseconds of low precision count as, as `Cost.with_margin`."""
    return ms * (1 + MARGIN / 100)


class Times(NamedTuple):
    """What calls of one kind take at one pair of widths.

    recipe, impl: what ran in low precision, and on whose kernels (`sagebwd.dispatch.Choice.name`). low: None where
    these are not what would run. full: contenders in full precision, by name (`sagebwd.auto.contenders`): first what
    torch picks; none where torch does not run it. source: what they were fitted from. torch: the version that was
    timed.
    """

    kind: str
    head_dim: int
    value_dim: int
    direction: str
    recipe: str
    impl: str
    low: Cost | None
    full: Mapping[str, Cost]
    source: str
    torch: str

    def ms(self, size: Size) -> tuple[float | None, dict[str, float]]:
        """Of low precision and of each contender in full precision."""
        of = self.kind, self.direction == TRAINING
        asked = filter(size.is_for, self.full)
        full = {name: self.full[name].ms(size.work(name, *of)) for name in asked}
        return None if self.low is None else self.low.ms(size.work(LOW, *of)), full


def widths_text(head_dim: int, value_dim: int) -> str:
    """A pair of widths as the command line takes it: one number where they are equal."""
    return str(head_dim) if head_dim == value_dim else f"{head_dim}/{value_dim}"


@cache
def of_this_project() -> dict[str, tuple[Times, ...]]:
    """``model.json``, by card."""
    path = Path(__file__).with_suffix(".json")
    content, found = json.loads(path.read_text(encoding="utf-8")), {}
    for card, of in content.items():
        source = f"this project's timings ({len(of['files'])} files, named in {path.name})"
        found[card] = tuple(
            Times(*place, Cost.of(*low), {name: Cost.of(*x) for name, x in full.items()}, source, of["torch"])
            for *place, low, full in of["times"]
        )
    return found


def is_newer(torch_version: str, timed: str) -> bool:
    """Whether a version of torch is newer than the one that was timed, by its first two numbers."""
    first, second = (tuple(int(x) for x in text.split(".")[:2]) for text in (torch_version, timed))
    return first > second
