"""Rows of `sagebwd.diagnostics.trace` taken together: a head over windows of text, a layer over its heads and windows.

The error of a layer is ||recipe - exact|| / ||exact|| of all its heads together: a head whose queries all read one key
has gradients near zero, so that a ratio of its own says nothing. Windows count alike, by the root mean square
of their errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from sagebwd.diagnostics.trace import OUTPUTS, PAIRS, TENSORS, Row, Source

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


def overall(rows: Sequence[Row]) -> dict[str, dict[str, tuple[float, float]]]:
    """By recipe and tensor: the root mean square of a layer's error over layers and windows, and the largest."""
    every = by_window(rows)
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for recipe in dict.fromkeys(row.recipe for row in rows):
        errors = {name: [row.relative_l2[name] for row in every if row.recipe == recipe] for name in OUTPUTS}
        found[recipe] = {name: (math.hypot(*own) / math.sqrt(len(own)), max(own)) for name, own in errors.items()}
    return found


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
