"""Mean gaps to full precision over pairs of runs of one seed, how far chance moves such a mean, and what it excludes.

Two runs with the same settings and the same order of data end at different losses on a GPU, since it adds in another
order each time and training amplifies the difference. A variant with the baseline's own settings ("full precision
repeated") measures that. Its gap d has no other cause, so sqrt(mean d^2) over all such variants is the standard
deviation of the gap of a recipe that changes nothing; that of a mean over n seeds is 1 / sqrt(n) of it. A few repeats
may underestimate it, so the scatter of the gaps over seeds is printed too, and the interval that it makes.

An interval that holds 0 shows no gap, and does not show that there is none. Two one-sided t tests do: they reject that
the mean is ``margin`` or more below 0, and that it is ``margin`` or more above (Schuirmann, 1987). Their p is that of
one test, looked at once: `holm` is of several.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import correlation, mean, stdev

from rich.table import Table

from lab.training.kernel_commit import objection
from lab.training.packed import PACKED, name_of, read
from lab.training.run_dir import COMPARISON

MARGIN = 0.02
"""Nats a token within which two attentions count as equivalent, where nothing else is said."""
CONTINUED_MARGIN = 0.001
"""The same of a model that others trained and that trains on (`python -m lab continue`)."""


@dataclass(frozen=True)
class Gap:
    """Held-out loss minus the baseline's, nats a token: one a pair of runs that ended and count, and the mean.

    Standard deviations of that mean: ``noise``, as repeated baselines tell it, None without any; ``scatter``, as the
    gaps do, None for fewer than two. ``interval`` is the gaps' `interval`, ``p`` their `equivalence` and ``higher``
    their `not_higher`. ``commits`` are those of the kernels of the runs that count, where they name one;
    ``diverged`` counts the pairs in which the variant did, and ``objections`` says why others do not count, each with
    how many.
    """

    variant: str
    recipe: str
    gaps: tuple[float, ...]
    mean: float | None
    noise: float | None
    scatter: float | None
    interval: tuple[float, float] | None
    p: float | None
    higher: float | None
    commits: tuple[str, ...]
    diverged: int
    objections: dict[str, int]


@dataclass(frozen=True)
class AtStep:
    """A variant's gap at an evaluation.

    ``changes``, one a pair, are since the evaluation before; none at the first. ``r`` is the correlation over pairs
    of this gap with that of the last evaluation: where it is near 1 the scatter of the last is here already, and no
    mean of later weights or losses narrows it. None for fewer than three pairs, and where gaps do not differ.
    """

    step: int
    gap: Gap
    changes: tuple[float, ...]
    r: float | None


def gaps(
    folders: list[Path],
    noise_of: list[Path] | None = None,
    margin: float = MARGIN,
    in_full_precision: bool = False,
    faulty: bool = False,
) -> list[Gap]:
    """One row a variant, in the order in which they appear; ``folders`` are outputs of `compare` or `seeds`.

    Args: noise_of, more such outputs, of whatever variants, whose repeated baselines count for the noise; margin, of
    the test of equivalence, nats a token.

    Raises ValueError for no folders, for one that holds no comparison or none of whose baseline, and for a margin of
    0 or less.
    """
    _check(folders, margin)
    key = "gap_in_full_precision" if in_full_precision else "gap"
    rows = [row for folder in folders for row in _outcomes(folder, key)]
    everywhere = rows + [row for folder in set(noise_of or ()) - set(folders) for row in _outcomes(folder, key)]
    repeats = [row["gap"] for row in everywhere if row["repeats"] and row["gap"] is not None]
    single = math.sqrt(sum(gap**2 for gap in repeats) / len(repeats)) if repeats else None
    variants = dict.fromkeys(row["variant"] for row in rows)
    return [_gap([row for row in rows if row["variant"] == name], single, margin, faulty) for name in variants]


def by_step(
    folders: list[Path], margin: float = MARGIN, in_full_precision: bool = False, since: int | None = None
) -> list[AtStep]:
    """The gaps of the pairs that `gaps` counts, at each step at which all of a variant's were evaluated.

    Args: since, a step: each pair's gap at that step is taken off, and later steps alone are given.

    Each folder holds runs.jsonl.xz beside its comparison. Raises ValueError as `gaps` does, where a run of the
    comparison or its evaluations are not in that file, and where a variant has no evaluation at ``since``.
    """
    _check(folders, margin)
    suffix = "_in_full_precision" if in_full_precision else ""
    pairs: dict[str, list[tuple[dict, dict[int, float]]]] = {}
    for folder in folders:
        losses = _evaluated(folder, f"held_out_loss{suffix}")
        for row in _outcomes(folder, f"gap{suffix}"):
            if row["gap"] is None:
                continue
            names = name_of(row), name_of({**row, "variant": row["baseline"]})
            if missing := [name for name in names if not losses.get(name)]:
                raise ValueError(f"{folder / PACKED} has no evaluations of {missing[0]}, which {COMPARISON} compares")
            own, baseline = (losses[name] for name in names)
            at = {step: own[step] - baseline[step] for step in own.keys() & baseline.keys()}
            pairs.setdefault(row["variant"], []).append((row, at))
    found = []
    for of_variant in pairs.values():
        before: tuple[float, ...] = ()
        steps = sorted(set.intersection(*(set(at) for _, at in of_variant)))
        if since is not None:
            if since not in steps:
                evaluated = ", ".join(map(str, steps))
                raise ValueError(
                    f"since={since} is no step at which all of {of_variant[0][0]['variant']!r} were "
                    f"evaluated; accepted: {evaluated}"
                )
            of_variant = [(row, {step: gap - at[since] for step, gap in at.items()}) for row, at in of_variant]
            steps = [step for step in steps if step > since]
        at_steps = [_gap([{**row, "gap": at[step]} for row, at in of_variant], None, margin) for step in steps]
        for step, gap in zip(steps, at_steps):
            changes = tuple(now - then for now, then in zip(gap.gaps, before))
            found.append(AtStep(step, gap, changes, _correlation(gap.gaps, at_steps[-1].gaps)))
            before = gap.gaps
    return found


def _correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's; None for fewer than three values, and where either has no scatter."""
    if len(x) < 3 or len(set(x)) == 1 or len(set(y)) == 1:
        return None
    return correlation(x, y)


def left(folders: list[Path]) -> list[str]:
    """Runs of `seeds` that had not ended when their comparison was written."""
    files = [folder / COMPARISON for folder in folders if (folder / COMPARISON).is_file()]
    return [name for path in files for name in json.loads(path.read_text(encoding="utf-8")).get("left", ())]


def _check(folders: list[Path], margin: float) -> None:
    if not folders:
        raise ValueError("expected at least one folder that `python -m lab compare` or `seeds` has written")
    if not margin > 0:
        raise ValueError(f"margin={margin} must be a number of nats above 0")


def _evaluated(folder: Path, loss: str) -> dict[str, dict[int, float]]:
    """By run and step, the losses of that name that the folder's packed runs have."""
    if not (folder / PACKED).is_file():
        raise ValueError(f"{folder} holds no {PACKED}; `python -m lab.training.packed pack` writes it")
    return {run["run"]: {line["step"]: line[loss] for line in run["metrics"] if loss in line} for run in read(folder)}


def _gap(rows: list[dict], single: float | None, margin: float, faulty: bool = False) -> Gap:
    """Of one variant's rows; ``single`` is the noise of one gap; ``faulty``: of those that do not count."""
    objections = [objection(row["recipe"], row.get("commit")) for row in rows]
    refused = [] if faulty else [reason for reason in objections if reason]
    counted = [row for row, reason in zip(rows, objections) if bool(reason) == faulty and row["gap"] is not None]
    values = tuple(row["gap"] for row in counted)
    return Gap(
        variant=rows[0]["variant"],
        recipe=rows[0]["recipe"],
        gaps=values,
        mean=mean(values) if values else None,
        noise=single / math.sqrt(len(values)) if values and single is not None else None,
        scatter=stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None,
        interval=interval(values),
        p=equivalence(values, margin),
        higher=not_higher(values, margin),
        commits=tuple(dict.fromkeys(row["commit"] for row in counted if row.get("commit"))),
        diverged=sum(bool(row["diverged"]) for row in rows),
        objections={reason: refused.count(reason) for reason in dict.fromkeys(refused)},
    )


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Where the mean of many more seeds lies with that confidence, by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    half = critical(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    middle = mean(values)
    return middle - half, middle + half


def equivalence(values: Sequence[float], margin: float = MARGIN) -> float | None:
    """The larger p of two one-sided t tests, that the mean is not -``margin`` or less, and not ``margin`` or more.

    Below .05 the 90% `interval` lies within the margins, and equivalence is shown at 5%. None for fewer than two
    values.
    """
    return None if len(values) < 2 else _beyond(margin - abs(mean(values)), values)


def not_higher(values: Sequence[float], margin: float = MARGIN) -> float | None:
    """p of the one t test that the mean is not ``margin`` or more: below .05 the variant is not worse by as much.

    None for fewer than two values.
    """
    return None if len(values) < 2 else _beyond(margin - mean(values), values)


def _beyond(nearer: float, values: Sequence[float]) -> float:
    """The probability of a mean that lies ``nearer`` to 0 than the margin, or more, if it is at the margin."""
    error = stdev(values) / math.sqrt(len(values))
    return float(nearer <= 0) if error == 0 else above(nearer / error, len(values) - 1)


def holm(ps: Sequence[float]) -> list[float]:
    """The p of several tests, corrected so that any of them is wrong at the level of one (Holm, 1979).

    The least p times their number, the next times one less and so on, none below one before it and none above 1.
    """
    found, least = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda index: ps[index])):
        least = max(least, min(1.0, ps[index] * (len(ps) - rank)))
        found[index] = least
    return found


def _outcomes(folder: Path, key: str) -> list[dict]:
    """The rows of a comparison but the baselines', one a seed, each with its ``key`` as the gap, the variant of its
    ``baseline`` and whether it ``repeats`` that."""
    path = folder / COMPARISON
    if not path.is_file():
        raise ValueError(f"{folder} holds no {COMPARISON}; expected an output of `python -m lab compare` or `seeds`")
    seeds: dict[int | None, list[dict]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["outcomes"]:
        seeds.setdefault(row.get("seed"), []).append(row)
    paired = [rows for rows in seeds.values() if rows[0]["gap"] == 0]
    if not paired:
        raise ValueError(f"{path}: its baseline has not come to a finite loss, so there are no gaps")
    if any(key not in row for rows in paired for row in rows):
        raise ValueError(f"{path} has no losses in full precision; expected an output of `python -m lab continue`")
    return [
        {**row, "gap": row[key], "baseline": rows[0]["variant"], "repeats": row["digest"] == rows[0]["digest"]}
        for rows in paired
        for row in rows[1:]
    ]


def table(found: list[Gap], margin: float = MARGIN) -> Table:
    """The gaps for a terminal; margin, of the test whose p they hold."""
    title = f"held-out loss minus the baseline's, nats a token; p: of a gap beyond ±{margin:g} (TOST)"
    drawn = Table(title=title, title_justify="left", box=None)
    left = ("variant", "attention", "commit", "each")
    digits = _digits(margin)
    for heading in (
        "variant",
        "attention",
        "gap",
        "95%",
        "pairs",
        "p",
        "p higher",
        "noise",
        "scatter",
        "commit",
        "each",
    ):
        drawn.add_column(heading, justify="left" if heading in left else "right")
    for row in found:
        drawn.add_row(
            row.variant,
            row.recipe,
            "" if row.mean is None else f"{row.mean:+.{digits}f}",
            _spelt(row.interval, digits),
            str(len(row.gaps)),
            "" if row.p is None else f"{row.p:.4f}",
            "" if row.higher is None else f"{row.higher:.4f}",
            "" if row.noise is None else f"{row.noise:.{digits}f}",
            "" if row.scatter is None else f"{row.scatter:.{digits}f}",
            " ".join(row.commits),
            _each(row, digits),
        )
    return drawn


def table_by_step(found: list[AtStep], margin: float = MARGIN) -> Table:
    """The gaps at each evaluation for a terminal.

    ``change`` is the mean of a pair's since the evaluation before, ``r`` the correlation with the last gap.

    Where all pairs have the same gap, as before the first step, they are one measurement: no interval and no p.
    """
    title = f"held-out loss minus the baseline's, nats a token; p: of a gap beyond ±{margin:g} (TOST)"
    drawn = Table(title=title, title_justify="left", box=None)
    digits = _digits(margin)
    for heading in ("variant", "step", "gap", "95%", "pairs", "p", "change", "95% of it", "r", "each"):
        drawn.add_column(heading, justify="left" if heading in ("variant", "each") else "right")
    for at in found:
        one = len(set(at.gap.gaps)) < 2
        drawn.add_row(
            at.gap.variant,
            str(at.step),
            "" if at.gap.mean is None else f"{at.gap.mean:+.{digits}f}",
            "" if one else _spelt(at.gap.interval, digits),
            str(len(at.gap.gaps)),
            "" if one or at.gap.p is None else f"{at.gap.p:.4f}",
            f"{mean(at.changes):+.{digits}f}" if at.changes else "",
            _spelt(interval(at.changes), digits),
            "" if at.r is None else f"{at.r:.2f}",
            _each(at.gap, digits),
        )
    return drawn


def _digits(margin: float) -> int:
    """After the point: two more than the margin's first."""
    return max(4, 2 - math.floor(math.log10(margin)))


def _spelt(between: tuple[float, float] | None, digits: int) -> str:
    return "" if between is None else " to ".join(f"{end:+.{digits}f}" for end in between)


def _each(row: Gap, digits: int) -> str:
    """Its gaps, and why others are not among them."""
    notes = [f"{gap:+.{digits}f}" for gap in row.gaps]
    notes += [f"diverged: {row.diverged}"] if row.diverged else []
    notes += [f"not counted: {count}, {reason}" for reason, count in row.objections.items()]
    return " ".join(notes)


# Student's t of whole degrees of freedom. The probability of |T| < t is a finite sum (Abramowitz and Stegun, 26.7.3
# and 26.7.4), so nothing is tabulated.


def within(t: float, freedom: int) -> float:
    """The probability that |T| is below ``t``, of 0 or more, with ``freedom`` degrees of freedom, at least 1."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, squared = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for index in range(1 + odd, freedom, 2):
        total += term
        term *= squared * index / (index + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def above(t: float, freedom: int) -> float:
    """The probability that T is above ``t``, of either sign."""
    tail = (1 - within(abs(t), freedom)) / 2
    return tail if t > 0 else 1 - tail


def critical(confidence: float, freedom: int) -> float:
    """The t that |T| stays below with a probability of ``confidence``, which is above 0 and below 1."""
    low, high = 0.0, 1.0
    while within(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < confidence else (low, middle)
    return high
