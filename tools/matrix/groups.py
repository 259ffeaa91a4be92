"""Rows that share kernels, in groups that processes take one after another."""

from __future__ import annotations

from collections.abc import Iterable

from sagebwd.kernels.capabilities import MAX_HEAD_DIM
from sagebwd.kernels.sm90.widths import FORMS as HOPPER
from sagebwd.recipe import AUTO
from tools.matrix import large
from tools.matrix.forms import FORMS, LIKE, Cell

# Seconds that an H200's host compiles for a row of `auto` at a width of 100 to 128, no multiple of 16.
COSTS = {"dense": 17, "packed": 24, "padded": 17, "masked": 23}
# Groups that take longer are parted, so that none goes on alone when all others are done.
LONGEST = 60


def groups_of(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Rows that share kernels together, the groups that take longest first; of `large` before all, one of a form."""
    found: dict[tuple, list[Cell]] = {}
    for cell in cells:
        key = (cell.width, cell.recipe, cell.dtype, cell.layout)
        found.setdefault((cell.form,) if cell.form in large.FORMS else key, []).append(cell)
    parts = [part for group in found.values() for part in _parts(group)]
    return sorted(parts, key=lambda group: (group[0].form in large.FORMS, sum(costs(group))), reverse=True)


def _parts(group: list[Cell]) -> list[list[Cell]]:
    """The group, where that is long, in parts; rows of one form and of those like it stay in one."""
    order = list(FORMS) + list(large.FORMS)
    group = sorted(group, key=lambda cell: (order.index(_leader(cell)), order.index(cell.form)))
    parts: list[list[Cell]] = []
    for cell, cost in zip(group, costs(group)):
        follows = bool(parts) and _leader(parts[-1][-1]) == _leader(cell)
        if not parts or (not follows and sum(costs(parts[-1])) + cost > LONGEST):
            parts.append([])
        parts[-1].append(cell)
    return parts


def _leader(cell: Cell) -> str:
    return LIKE.get(cell.form, cell.form)


def costs(group: list[Cell]) -> list[float]:
    """Seconds that each row of a group compiles, roughly: none after one of the same form, or like it."""
    met: set[tuple] = set()
    found = []
    for cell in group:
        kernels = cell.width, _leader(cell)
        refused = cell.width > MAX_HEAD_DIM or cell.recipe == "mixed"
        cost = 0.0 if refused or kernels in met else COSTS[cell.layout] * (0.4 + cell.width / 200)
        cost *= 1 if cell.width % 16 else 0.5
        if cell.recipe == AUTO:  # on Hopper's kernels, of which others compile most; most masks are one kernel's there
            cost *= 1 if (cell.head_dim, cell.value_dim) in HOPPER else 0.05
            cost *= 0.2 if cell.layout == "masked" else 1
        found.append(cost if cell.recipe in (AUTO, "token") else 0.7 * cost)
        met.add(kernels)
    return found
