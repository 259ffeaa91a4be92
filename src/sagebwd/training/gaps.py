"""Mean gaps to full precision over several comparisons of the same variants, one a seed, and the noise of such a mean.

Two runs with the same settings and the same order of data end at different losses on a GPU, since it adds in another
order each time and training amplifies the difference. A variant with the baseline's own settings ("full precision
repeated") measures that. Its gap d has no other cause, so sqrt(mean d^2) over all such variants is the standard
deviation of the gap of a recipe that changes nothing; that of a mean over n seeds is 1 / sqrt(n) of it. A few repeats
may underestimate it, so the scatter of the gaps over seeds is printed too, and the interval that it makes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from rich.table import Table

from sagebwd.training.run_dir import COMPARISON

STUDENT_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Student's t of 95% confidence, from one degree of freedom on; the last stands for all after."""


@dataclass(frozen=True)
class Gap:
    """Held-out loss minus the baseline's, nats a token: one a comparison in which both came to an end, and the mean.

    Standard deviations of that mean: ``noise``, as repeated baselines tell it, None without any; ``scatter``, as the
    gaps do, None for fewer than two. ``interval`` is the gaps' `interval`. ``diverged`` counts the comparisons in
    which the variant did.
    """

    variant: str
    recipe: str
    gaps: tuple[float, ...]
    mean: float | None
    noise: float | None
    scatter: float | None
    interval: tuple[float, float] | None
    diverged: int


def gaps(folders: list[Path], noise_of: list[Path] | None = None) -> list[Gap]:
    """One row a variant, in the order in which they appear; ``folders`` are outputs of `sagebwd compare`.

    Args: noise_of, more such outputs, of whatever variants, whose repeated baselines count for the noise.

    Raises ValueError for no folders, and for one that holds no comparison or none of whose baseline.
    """
    if not folders:
        raise ValueError("expected at least one folder that `sagebwd compare` has written")
    rows = [row for folder in folders for row in _outcomes(folder)]
    everywhere = rows + [row for folder in set(noise_of or ()) - set(folders) for row in _outcomes(folder)]
    repeats = [row["gap"] for row in everywhere if row["repeats"] and row["gap"] is not None]
    single = math.sqrt(sum(gap**2 for gap in repeats) / len(repeats)) if repeats else None
    found = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        same = [row for row in rows if row["variant"] == name]
        values = tuple(row["gap"] for row in same if row["gap"] is not None)
        middle = mean(values) if values else None
        noise = single / math.sqrt(len(values)) if values and single is not None else None
        scatter = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        diverged = sum(bool(row["diverged"]) for row in same)
        found.append(Gap(name, same[0]["recipe"], values, middle, noise, scatter, interval(values), diverged))
    return found


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Where the mean of many more seeds lies with 95% confidence, by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    half = STUDENT_95[min(len(values) - 1, len(STUDENT_95)) - 1] * stdev(values) / math.sqrt(len(values))
    middle = mean(values)
    return middle - half, middle + half


def _outcomes(folder: Path) -> list[dict]:
    """The rows of a comparison but the baseline's, each with whether it ``repeats`` that one."""
    path = folder / COMPARISON
    if not path.is_file():
        raise ValueError(f"{folder} holds no {COMPARISON}; expected the output folder of `sagebwd compare`")
    rows = json.loads(path.read_text(encoding="utf-8"))["outcomes"]
    if not rows or rows[0].get("gap") != 0:
        raise ValueError(f"{path}: its baseline has not come to a finite loss, so there are no gaps")
    return [{**row, "repeats": row["digest"] == rows[0]["digest"]} for row in rows[1:]]


def table(found: list[Gap]) -> Table:
    """The gaps for a terminal."""
    drawn = Table(title="held-out loss minus the baseline's, nats a token", title_justify="left", box=None)
    for heading in ("variant", "attention", "gap", "noise", "scatter", "95%", "runs", "each"):
        drawn.add_column(heading, justify="left" if heading in ("variant", "attention", "each") else "right")
    for row in found:
        each = " ".join(f"{gap:+.4f}" for gap in row.gaps)
        drawn.add_row(
            row.variant,
            row.recipe,
            "" if row.mean is None else f"{row.mean:+.4f}",
            "" if row.noise is None else f"{row.noise:.4f}",
            "" if row.scatter is None else f"{row.scatter:.4f}",
            "" if row.interval is None else "{:+.3f} to {:+.3f}".format(*row.interval),
            str(len(row.gaps)),
            each + (f" diverged: {row.diverged}" if row.diverged else ""),
        )
    return drawn
