"""Costs of calls, fitted from timings: least squares of relative errors, in which no coefficient is negative.

A call that its host decides says that the GPU took no longer: where a fit says more, that is an error too. Rows are
those of `sagebwd.cli.measure.Timing`; older files lack some columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import exp, log
from operator import mul
from statistics import fmean

import torch

from sagebwd.auto.contenders import LOW, PEERS, PICKED, TORCH
from sagebwd.auto.model import TRAINING, Cost, Size, Times
from sagebwd.masks.kinds import FULL, KINDS, WINDOW

# A call whose ms are less than this many times its host's says of the GPU that it took no longer.
BOUND = 1.15
# Calls that are timed on the GPU, from which on a kind has coefficients of its own.
ENOUGH = 4
# The share of a host's timings that are less than what counts.
_HOST = 0.15
# By which more coefficients have to lower the sum of squares.
_ROUNDING = 1e-9
# Of singular values, below which one counts as 0.
_SINGULAR = 1e-6
# Of rows, pairs and ms, so that equations are of like numbers.
_ROWS, _PAIRS, _FEMTO = 1e6, 1e9, 1e12


def fitted(rows: Iterable[Mapping], source: str, torch_version: str) -> list[Times]:
    """What calls take, of timings of one card; source, torch_version: what is noted beside."""
    groups: dict[tuple, list[Mapping]] = {}
    for row in rows:
        key = row["kind"], row["head_dim"], row["value_dim"], row["direction"], row["recipe"], row["impl"]
        groups.setdefault(key, []).append(row)
    of_host = _hosts(groups)
    found: dict[tuple, tuple[float, ...]] = {}
    picks: dict[tuple, str] = {}  # of torch, which has another function of packed sequences than of dense ones
    times = []
    for key in sorted(groups, key=lambda key: KINDS.index(key[0])):  # FULL comes first
        costs, full = {}, (FULL, *key[1:])
        for name in dict.fromkeys(name for row in groups[key] for name in times_of(row)):
            host = of_host[key[0], *key[3:], name]
            pick = picks.get(key)
            if pick is None:  # low precision, and then what torch picks
                like = found.get((*full, name if name == LOW else picks.get(full)))
            else:
                host = host or (of_host[key[0], *key[3:], pick] if name not in PEERS else None)
                # of a window torch multiplies more
                like = found.get((*full, name) if key[0] == WINDOW else (*key, pick))
            gpu = coefficients(groups[key], name, like, is_other=pick is not None)
            if gpu is None or (name in PEERS and host is None):
                continue
            if name != LOW:
                picks.setdefault(key, name)
            found[*key, name] = gpu
            scales = 1.0, _ROWS, _PAIRS
            costs[name] = Cost(*(round(x * _FEMTO) for x in (host or 0.0, *(x / y for x, y in zip(gpu, scales)))))
        if LOW in costs:
            times.append(Times(*key, costs.pop(LOW), costs, source, torch_version))
    return times


def times_of(row: Mapping) -> dict[str, tuple[float | None, float | None]]:
    """ms and the host's ms of a row by name: of low precision, of what torch picked, and of the others."""
    others = {PICKED.get(name, name): x for name, x in row.get("others", {}).items()}
    return {
        LOW: (row["ms"], row.get("host_ms")),
        PICKED.get(row.get("picked"), TORCH): (row["torch_ms"], row.get("torch_host_ms")),
        **{name: tuple(x) if isinstance(x, (list, tuple)) else (x, None) for name, x in others.items()},
    }


def size_of(row: Mapping) -> Size:
    """How large the call of a row is."""
    tokens, batch = row["tokens"], row["batch"]
    heads, kv_heads = row["heads"], row.get("kv_heads", row["heads"])
    width = row.get("width") or window_of(tokens) + 1
    return Size(tokens, row.get("kv_tokens") or tokens, batch * heads, batch * kv_heads, width)


def window_of(tokens: int) -> int:
    """Keys before a query that it sees beside its own, in a window whose width is not given."""
    return tokens // 4


def _hosts(groups: Mapping[tuple, list[Mapping]]) -> dict[tuple, float | None]:
    """Hosts' ms by kind, direction, recipe, kernels and name, which no width changes; None of none.

    Of all timings a low quantile (`_HOST`): a host that is disturbed takes longer, never less.
    """
    known: dict[tuple, list[float]] = {}
    for (kind, _, _, *rest), group in groups.items():
        for row in group:
            for name, (_, host_ms) in times_of(row).items():
                known.setdefault((kind, *rest, name), []).extend([host_ms] if host_ms else [])
    return {place: sorted(ms)[int(_HOST * len(ms))] if ms else None for place, ms in known.items()}


def coefficients(
    rows: Iterable[Mapping], name: str, like: tuple[float, ...] | None, *, is_other: bool = False
) -> tuple[float, ...] | None:
    """ms of a call, of a million rows and of 1e9 pairs, on the GPU; None of no timing.

    like: those of calls without a mask, or of what torch picks, of which a contender with few timings has a multiple.
    is_other: beside low precision and torch's pick; then so has one whose timed calls have about as many rows each,
    which do not tell rows from launches.
    """
    ran = [(row, *times_of(row)[name]) for row in rows if times_of(row).get(name, (None,))[0] is not None]
    if not ran:
        return None
    points, bounds = [], []
    for row, ms, host_ms in ran:
        work = size_of(row).work(name, row["kind"], row["direction"] == TRAINING)
        point = 1.0, work.rows / _ROWS, work.pairs / 2 / _PAIRS, ms
        (points if ms >= BOUND * (host_ms or 0) else bounds).append(point)
    counts = [point[1] for point in points]
    if like is not None and not any(like):  # of calls that are all their host's there is no multiple
        like = None
    few = len(points) < ENOUGH or (is_other and max(counts) < 2 * min(counts))
    if like is None or not few:
        fit = _least_squares(points, bounds) if points else (0.0,) * 3
        if like is None or not is_other or fit[2] > 0:  # products take time
            return fit
    ratios = [log(ms / sum(map(mul, like, x))) for *x, ms in points]
    factor = exp(fmean(ratios)) if ratios else 1.0
    return tuple(factor * x for x in like)


def _least_squares(points: Sequence[tuple[float, ...]], bounds: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """c >= 0 for which the sum of (c x / ms - 1)^2 is least: the best of those with some coefficients at zero.

    bounds: points that count where c x > ms.
    """
    rows, below = ([[x / ms for x in features] for *features, ms in of] for of in (points, bounds))
    count = len(rows[0])
    least, best = float("inf"), (0.0,) * count
    for chosen in (chosen for size in range(1, count + 1) for chosen in combinations(range(count), size)):
        part, limits = ([[row[i] for i in chosen] for row in of] for of in (rows, below))
        over: list[list[float]] = []  # of the limits, those that the solution passes
        for _ in range(len(limits) + 1):
            solved = _solved(part + over)
            if solved is None or min(solved) < 0:
                break
            passed = [row for row in limits if sum(map(mul, solved, row)) > 1 + _ROUNDING]
            error = sum((sum(map(mul, solved, row)) - 1) ** 2 for row in part + passed)
            if error < least - _ROUNDING:
                least, best = error, tuple(solved[chosen.index(i)] if i in chosen else 0.0 for i in range(count))
            if passed == over:
                break
            over = passed
    return best


def _solved(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """The least squares solution of rows x = 1; None where there are several."""
    matrix = torch.tensor(rows, dtype=torch.float64, device="cpu")
    found = torch.linalg.lstsq(matrix, torch.ones_like(matrix[:, :1]), driver="gelsd", rcond=_SINGULAR)
    return found.solution.flatten().tolist() if found.rank == matrix.shape[1] else None
