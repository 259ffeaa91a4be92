"""Rows of `sagebwd.diagnostics.trace` taken together: a head over windows of text, a layer over its heads and windows.

The error of a layer is ||recipe - exact|| / ||exact|| of all its heads together: a head whose queries all read one key
has gradients near zero, so that a ratio of its own says nothing (`idle`). Windows count alike, by the root mean square
of their errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from sagebwd.diagnostics.trace import OUTPUTS, PAIRS, TENSORS, Row, Source

IDLE = 0.01
"""The share of its layer's dQ below which a head is idle; a ninth of it or so is that of an equal head."""

MEANS = "ds_bound", "ds_peak_to_rms", "first_weight", "first_value", "saturated"


def means(rows: Sequence[Row]) -> list[Row]:
    """A row for each recipe and layer, in their order, of the rows of its heads and windows; head and window None."""
    return over_windows(by_window(rows))


def by_window(rows: Sequence[Row]) -> list[Row]:
    """A row for each recipe, layer and window, in their order; head None."""
    found = _together(rows, lambda row: (row.recipe, row.layer, row.window), lambda row: row.norm)
    return [replace(row, head=None) for row in found]


def over_windows(rows: Sequence[Row]) -> list[Row]:
    """A row for each recipe, layer and head, in their order; window None."""
    alike = dict.fromkeys(TENSORS, 1.0)
    found = _together(rows, lambda row: (row.recipe, row.layer, row.head), lambda row: alike)
    return [replace(row, window=None) for row in found]


def idle(rows: Sequence[Row]) -> dict[tuple[int, int], float]:
    """Layer and head of those whose dQ, over all windows, is less than `IDLE` of their layer's, and its share."""
    heads = over_windows([row for row in rows if row.recipe == rows[0].recipe])
    whole: dict[int, float] = {}
    for row in heads:
        whole[row.layer] = math.hypot(whole.get(row.layer, 0.0), row.norm["dq"])
    shares = {(row.layer, row.head): row.norm["dq"] / whole[row.layer] for row in heads if whole[row.layer]}
    return {place: share for place, share in shares.items() if share < IDLE}


def _together(
    rows: Sequence[Row], key: Callable[[Row], tuple], weights: Callable[[Row], dict[str, float]]
) -> list[Row]:
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return [_one(group, [weights(row) for row in group]) for group in groups.values()]


def _one(rows: list[Row], weights: list[dict[str, float]]) -> Row:
    """The first row with the errors of all, by their weights' squares, the largest logit and the heaviest key of all,
    and means of the rest."""

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(rows)

    def together(name: str, errors: list[float]) -> float:
        sizes = [weight[name] for weight in weights]
        if math.inf in errors or not any(sizes):
            return max(errors)
        return math.hypot(*(error * size for error, size in zip(errors, sizes))) / math.hypot(*sizes)

    relative_l2 = {name: together(name, [row.relative_l2[name] for row in rows]) for name in TENSORS}

    def source_of(source: str, name: str) -> Source:
        parts, total = [row.attribution[source][name] for row in rows], relative_l2[name]
        alone, without = (together(name, [getattr(part, key) for part in parts]) for key in ("alone", "without"))
        return Source(alone, without, (alone / total) ** 2 if total else 0.0)

    heaviest = max(rows, key=lambda row: row.sink_weight)
    return replace(
        rows[0],
        cosine={name: mean(row.cosine[name] for row in rows) for name in TENSORS},
        relative_l2=relative_l2,
        rms={name: mean(row.rms[name] for row in rows) for name in PAIRS},
        largest_logit=max(row.largest_logit for row in rows),
        sink=heaviest.sink,
        sink_weight=heaviest.sink_weight,
        **{name: mean(getattr(row, name) for row in rows) for name in MEANS},
        attribution={source: {name: source_of(source, name) for name in OUTPUTS} for source in rows[0].attribution},
        norm={name: math.hypot(*(row.norm[name] for row in rows)) for name in TENSORS},
    )
