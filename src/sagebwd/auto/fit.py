"""Costs of calls, fitted from timings: least squares of relative errors, in which no coefficient is negative.

A row has the kind, head_dim, value_dim, direction, recipe, impl, batch, heads, kv_heads (heads where it is missing),
tokens, ms and host_ms of low precision, and torch_ms and torch_host_ms; times of what does not run are None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import exp, log
from statistics import fmean, quantiles

from sagebwd.auto.model import FULL, KINDS, Cost, Size, Times

# Prefixes of a row's times.
LOW, TORCH = "", "torch_"
# A call whose ms are less than this many times its host's says nothing of the GPU.
BOUND = 1.15
# Calls that are timed on the GPU, from which on a kind has coefficients of its own.
ENOUGH = 5
# Of rows, pairs and ms, so that equations are of like numbers.
_ROWS, _PAIRS, _FEMTO = 1e6, 1e9, 1e12


def fitted(rows: Iterable[Mapping], source: str, torch: str) -> list[Times]:
    """What calls take, of timings of one card; source, torch: what is noted beside."""
    groups: dict[tuple, list[Mapping]] = {}
    for row in rows:
        key = row["kind"], row["head_dim"], row["value_dim"], row["direction"], row["recipe"], row["impl"]
        groups.setdefault(key, []).append(row)
    of_host: dict[tuple, list[Mapping]] = {}  # which no width changes
    for (kind, _, _, *rest), group in groups.items():
        of_host.setdefault((kind, *rest), []).extend(group)
    hosts = {(*key, prefix): _host(group, prefix) for key, group in of_host.items() for prefix in (LOW, TORCH)}
    found: dict[tuple, tuple[float, ...]] = {}
    times = []
    for key in sorted(groups, key=lambda key: KINDS.index(key[0])):  # FULL comes first
        costs = []
        for prefix in (LOW, TORCH):
            gpu = coefficients(groups[key], prefix, found.get((FULL, *key[1:], prefix)))
            if gpu is None:
                costs.append(None)
                continue
            found[*key, prefix] = gpu
            fixed, row, pair = gpu
            numbers = hosts[(key[0], *key[3:], prefix)], fixed, row / _ROWS, pair / _PAIRS
            costs.append(Cost(*(round(x * _FEMTO) for x in numbers)))
        if costs[0] is not None:
            times.append(Times(*key, *costs, source, torch))
    return times


def size_of(row: Mapping) -> Size:
    """How large the call of a row is."""
    tokens, heads = row["tokens"], row["batch"] * row["heads"]
    return Size(tokens, tokens, heads, row["batch"] * row.get("kv_heads", row["heads"]), window_of(tokens) + 1)


def window_of(tokens: int) -> int:
    """Keys before a query that it sees beside its own, where a window is timed."""
    return tokens // 4


def _host(rows: Sequence[Mapping], prefix: str) -> float:
    """The lower quartile of hosts' ms: what else a machine does only adds."""
    known = [row[f"{prefix}host_ms"] for row in rows if row.get(f"{prefix}host_ms")]
    return quantiles(known, n=4, method="inclusive")[0] if len(known) > 1 else sum(known)


def coefficients(
    rows: Iterable[Mapping], prefix: str, of_full: tuple[float, ...] | None
) -> tuple[float, float, float] | None:
    """ms of a call, of a million rows and of 1e9 pairs, on the GPU; None of what did not run.

    of_full: those without a mask, of which a kind with few timings has a multiple.
    """
    ran = [row for row in rows if row[f"{prefix}ms"] is not None]
    if not ran:
        return None
    timed = [row for row in ran if row[f"{prefix}ms"] >= BOUND * (row.get(f"{prefix}host_ms") or 0)]
    points = []
    for row in timed:
        count, *pairs = size_of(row).work(row["kind"])
        points.append((1.0, count / _ROWS, pairs[prefix == TORCH] / 2 / _PAIRS, row[f"{prefix}ms"]))
    if of_full is not None and len(points) < ENOUGH:
        ratios = [log(ms / sum(map(_times, of_full, x))) for *x, ms in points]
        factor = exp(fmean(ratios)) if ratios else 1.0
        return tuple(factor * x for x in of_full)
    return _least_squares(points) if points else (0.0, 0.0, 0.0)


def _times(a: float, b: float) -> float:
    return a * b


def _least_squares(points: Sequence[tuple[float, ...]]) -> tuple[float, float, float]:
    """c >= 0 for which the sum of (c x / ms - 1)^2 is least: the best of those with some coefficients at zero."""
    scaled = [[x / ms for x in features] for *features, ms in points]
    best: tuple[float, tuple[float, ...]] = (float("inf"), (0.0, 0.0, 0.0))
    for count in range(1, 4):
        for chosen in combinations(range(3), count):
            part = [[row[i] for i in chosen] for row in scaled]
            solved = _solved(part)
            if solved is None or min(solved) < 0:
                continue
            error = sum((sum(map(_times, solved, row)) - 1) ** 2 for row in part)
            if error < best[0]:
                best = error, tuple(solved[chosen.index(i)] if i in chosen else 0.0 for i in range(3))
    return best[1]


def _solved(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """The least squares solution of rows x = 1 by the normal equations; None where they are singular."""
    n = len(rows[0])
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(n)] + [sum(row[i] for row in rows)] for i in range(n)
    ]
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(matrix[k][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-12 * sum(row[0] ** 2 for row in rows):
            return None
        for k in range(n):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i])]
    return [matrix[i][n] / matrix[i][i] for i in range(n)]
