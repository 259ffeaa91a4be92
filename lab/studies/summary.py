"""What a trace says of a whole model beside its errors: heads by the weight of the first key, idle heads, shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from rich.table import Table

from sagebwd.diagnostics import layers
from sagebwd.diagnostics.tables import LABELS, headed, where
from sagebwd.diagnostics.trace import OUTPUTS, Row

IDLE = 0.01
"""The share of its layer's dQ below which a head is idle; a ninth of it or so is that of an equal head."""
WEIGHTS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
"""Bounds of the first key's mean weight between which heads are taken together."""


def tables(rows: Sequence[Row]) -> list[Table]:
    """Of rows of `sagebwd.diagnostics.trace.measure`, of any number of windows."""
    apart = idle(rows)
    found = [_by_weight(rows, apart)]
    found += [_idle(rows, apart)] if apart else []
    return found + ([_shares(rows)] if any(row.attribution for row in rows) else [])


def idle(rows: Sequence[Row]) -> dict[tuple[int, int], float]:
    """Layer and head of those whose dQ, over all windows, is less than `IDLE` of their layer's, and its share."""
    heads = layers.over_windows([row for row in rows if row.recipe == rows[0].recipe])
    whole: dict[int, float] = {}
    for row in heads:
        whole[row.layer] = math.hypot(whole.get(row.layer, 0.0), row.norm["dq"])
    shares = {(row.layer, row.head): row.norm["dq"] / whole[row.layer] for row in heads if whole[row.layer]}
    return {place: share for place, share in shares.items() if share < IDLE}


def by_weight(rows: Sequence[Row], apart: dict[tuple[int, int], float]) -> dict[tuple[str, float], list[Row]]:
    """By recipe and upper bound of `WEIGHTS`, in their order: the rows of heads, but of those that are idle."""
    found: dict[tuple[str, float], list[Row]] = {}
    for recipe in dict.fromkeys(row.recipe for row in rows):
        own = [row for row in rows if row.recipe == recipe and (row.layer, row.head) not in apart]
        for least, most in pairwise(WEIGHTS):
            end = math.inf if most == WEIGHTS[-1] else most
            found[recipe, most] = [row for row in own if least <= row.first_weight < end]
    return found


def shares(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, float]]:
    """By recipe and product that `sagebwd.diagnostics.trace` attributes to: the median layer's share of each error."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in layers.means(rows):
        for source, parts in row.attribution.items():
            own = found.setdefault((row.recipe, source), {name: [] for name in OUTPUTS})
            for name in OUTPUTS:
                own[name].append(parts[name].share)
    return {place: {name: median(values) for name, values in own.items()} for place, own in found.items()}


def _shares(rows: Sequence[Row]) -> Table:
    title = "share of the squared error that a product alone makes, in the median layer"
    table = headed(title, "recipe", "product", *(LABELS[name] for name in OUTPUTS))
    for (recipe, source), own in shares(rows).items():
        table.add_row(recipe, LABELS.get(source, source.upper()), *(f"{share:.0%}" for share in own.values()))
    return table


def _by_weight(rows: Sequence[Row], apart: dict[tuple[int, int], float]) -> Table:
    names = [LABELS[name] for name in OUTPUTS]
    table = headed(
        "heads by the mean weight of the first key, each window by itself: medians of a head's own relative L2",
        "recipe", "weight", "heads", "norm of its value", "largest logit", *names,
    )  # fmt: skip
    for (recipe, most), own in by_weight(rows, apart).items():
        if own:
            least = WEIGHTS[WEIGHTS.index(most) - 1]
            facts = median(row.first_value for row in own), median(row.largest_logit for row in own)
            errors = [f"{median(row.relative_l2[name] for row in own):.4f}" for name in OUTPUTS]
            table.add_row(
                recipe, f"{least:g} to {most:g}", str(len(own)), f"{facts[0]:.2f}", f"{facts[1]:.0f}", *errors
            )
    return table


def _idle(rows: Sequence[Row], apart: dict[tuple[int, int], float]) -> Table:
    title = f"idle heads, whose dQ is below {IDLE:g} of their layer's: their own relative L2"
    names = [LABELS[name] for name in OUTPUTS]
    table = headed(
        title, "layer", "recipe", "share of dQ", "weight of the first key", "heaviest key", "its weight", *names
    )
    for row in layers.over_windows([row for row in rows if (row.layer, row.head) in apart]):
        errors = [f"{row.relative_l2[name]:.4f}" for name in OUTPUTS]
        table.add_row(
            where(row), row.recipe, f"{apart[row.layer, row.head]:.4f}", f"{row.first_weight:.3f}", str(row.sink),
            f"{row.sink_weight:.3f}", *errors,
        )  # fmt: skip
    return table
