"""Mean gaps to full precision over pairs of runs of one seed, how far chance moves such a mean, and what it excludes.

Two runs with the same settings and the same order of data end at different losses on a GPU, since it adds in another
order each time and training amplifies the difference. A variant with the baseline's own settings ("full precision
repeated") measures that. Its gap d has no other cause, so sqrt(mean d^2) over all such variants is the standard
deviation of the gap of a recipe that changes nothing; that of a mean over n seeds is 1 / sqrt(n) of it. A few repeats
may underestimate it, so the scatter of the gaps over seeds is printed too, and the interval that it makes.

An interval that holds 0 shows no gap, and does not show that there is none. Two one-sided t tests do: they reject that
the mean is ``margin`` or more below 0, and that it is ``margin`` or more above (Schuirmann, 1987).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from rich.table import Table

from sagebwd.training import student
from sagebwd.training.kernel_commit import objection
from sagebwd.training.run_dir import COMPARISON

MARGIN = 0.02
"""Nats a token within which two attentions count as equivalent, where nothing else is said."""


@dataclass(frozen=True)
class Gap:
    """Held-out loss minus the baseline's, nats a token: one a pair of runs that ended and count, and the mean.

    Standard deviations of that mean: ``noise``, as repeated baselines tell it, None without any; ``scatter``, as the
    gaps do, None for fewer than two. ``interval`` is the gaps' `interval` and ``p`` their `equivalence`. ``commits``
    are those of the kernels of the runs that count, where they name one; ``diverged`` counts the pairs in which the
    variant did, and ``objections`` says why others do not count, each with how many.
    """

    variant: str
    recipe: str
    gaps: tuple[float, ...]
    mean: float | None
    noise: float | None
    scatter: float | None
    interval: tuple[float, float] | None
    p: float | None
    commits: tuple[str, ...]
    diverged: int
    objections: dict[str, int]


def gaps(
    folders: list[Path], noise_of: list[Path] | None = None, margin: float = MARGIN, in_full_precision: bool = False
) -> list[Gap]:
    """One row a variant, in the order in which they appear; ``folders`` are outputs of `sagebwd compare` or `seeds`.

    Args: noise_of, more such outputs, of whatever variants, whose repeated baselines count for the noise; margin, of
    the test of equivalence, nats a token.

    Raises ValueError for no folders, for one that holds no comparison or none of whose baseline, and for a margin of
    0 or less.
    """
    if not folders:
        raise ValueError("expected at least one folder that `sagebwd compare` or `sagebwd seeds` has written")
    if not margin > 0:
        raise ValueError(f"margin={margin} must be a number of nats above 0")
    key = "gap_in_full_precision" if in_full_precision else "gap"
    rows = [row for folder in folders for row in _outcomes(folder, key)]
    everywhere = rows + [row for folder in set(noise_of or ()) - set(folders) for row in _outcomes(folder, key)]
    repeats = [row["gap"] for row in everywhere if row["repeats"] and row["gap"] is not None]
    single = math.sqrt(sum(gap**2 for gap in repeats) / len(repeats)) if repeats else None
    variants = dict.fromkeys(row["variant"] for row in rows)
    return [_gap([row for row in rows if row["variant"] == name], single, margin) for name in variants]


def _gap(rows: list[dict], single: float | None, margin: float) -> Gap:
    """Of one variant's rows; ``single`` is the noise of one gap."""
    refused = [reason for row in rows if (reason := objection(row["recipe"], row.get("commit")))]
    counted = [row for row in rows if not objection(row["recipe"], row.get("commit")) and row["gap"] is not None]
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
        commits=tuple(dict.fromkeys(row["commit"] for row in counted if row.get("commit"))),
        diverged=sum(bool(row["diverged"]) for row in rows),
        objections={reason: refused.count(reason) for reason in dict.fromkeys(refused)},
    )


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Where the mean of many more seeds lies with that confidence, by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    half = student.critical(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    middle = mean(values)
    return middle - half, middle + half


def equivalence(values: Sequence[float], margin: float = MARGIN) -> float | None:
    """The larger p of two one-sided t tests, that the mean is not -``margin`` or less, and not ``margin`` or more.

    Below .05 the 90% `interval` lies within the margins, and equivalence is shown at 5%. None for fewer than two
    values.
    """
    if len(values) < 2:
        return None
    nearer, error = margin - abs(mean(values)), stdev(values) / math.sqrt(len(values))
    if error == 0:
        return float(nearer <= 0)
    return student.above(nearer / error, len(values) - 1)


def _outcomes(folder: Path, key: str) -> list[dict]:
    """The rows of a comparison but the baselines', one a seed, each with its ``key`` as the gap and whether it
    ``repeats`` the baseline."""
    path = folder / COMPARISON
    if not path.is_file():
        raise ValueError(f"{folder} holds no {COMPARISON}; expected the output folder of `sagebwd compare` or `seeds`")
    seeds: dict[int | None, list[dict]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["outcomes"]:
        seeds.setdefault(row.get("seed"), []).append(row)
    paired = [rows for rows in seeds.values() if rows[0]["gap"] == 0]
    if not paired:
        raise ValueError(f"{path}: its baseline has not come to a finite loss, so there are no gaps")
    if any(key not in row for rows in paired for row in rows):
        raise ValueError(f"{path} has no losses in full precision; expected an output of `sagebwd continue`")
    return [
        {**row, "gap": row[key], "repeats": row["digest"] == rows[0]["digest"]} for rows in paired for row in rows[1:]
    ]


def table(found: list[Gap], margin: float = MARGIN) -> Table:
    """The gaps for a terminal; margin, of the test whose p they hold."""
    title = f"held-out loss minus the baseline's, nats a token; p: of a gap beyond ±{margin:g} (TOST)"
    drawn = Table(title=title, title_justify="left", box=None)
    left = ("variant", "attention", "commit", "each")
    digits = max(4, 2 - math.floor(math.log10(margin)))  # two more than the margin's first
    for heading in ("variant", "attention", "gap", "95%", "pairs", "p", "noise", "scatter", "commit", "each"):
        drawn.add_column(heading, justify="left" if heading in left else "right")
    for row in found:
        notes = [f"{gap:+.{digits}f}" for gap in row.gaps]
        notes += [f"diverged: {row.diverged}"] if row.diverged else []
        notes += [f"not counted: {count}, {reason}" for reason, count in row.objections.items()]
        drawn.add_row(
            row.variant,
            row.recipe,
            "" if row.mean is None else f"{row.mean:+.{digits}f}",
            "" if row.interval is None else " to ".join(f"{end:+.{digits}f}" for end in row.interval),
            str(len(row.gaps)),
            "" if row.p is None else f"{row.p:.4f}",
            "" if row.noise is None else f"{row.noise:.{digits}f}",
            "" if row.scatter is None else f"{row.scatter:.{digits}f}",
            " ".join(row.commits),
            " ".join(notes),
        )
    return drawn
