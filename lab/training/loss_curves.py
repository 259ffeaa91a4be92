"""Loss curves of packed runs in one figure: a column for each experiment, with the curves of all its seeds.

    python -m lab.training.loss_curves PICTURE.png "TITLE=FOLDER[,FOLDER...]"...

The folders of one experiment hold one seed or several, as `lab.training.packed` writes them. Above is the
training loss, below the held-out loss minus that of `BASELINE` with the same seed. Variants that `COLORS` lacks are
left out, and so are runs whose kernels were faulty (`lab.training.kernel_commit`), by the comparison.json beside.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.training.kernel_commit import objection
from lab.training.packed import by_seed, name_of, read
from lab.training.report import Run, gap, smoothed
from lab.training.run_dir import COMPARISON
from sagebwd.diagnostics.plots import save

BASELINE = "full precision"
COLORS = {BASELINE: "black", f"{BASELINE} repeated": "0.6", "token": "C0", "paper": "C3", "mixed": "C2"}


def draw(experiments: dict[str, Sequence[Path]], picture: Path) -> None:
    """Draw the experiments, title to folders, into a PNG.

    Raises ValueError where a folder holds no run named `BASELINE`.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    figure, axes = plt.subplots(
        2, len(experiments), figsize=(4.4 * len(experiments), 6), sharex="col", squeeze=False, layout="constrained"
    )
    for column, (title, folders) in zip(axes.T, experiments.items()):
        for runs in (runs for folder in folders for runs in _seeds(folder)):
            for name, color in COLORS.items():
                if name in runs:
                    tokens, losses = runs[name].series("loss")
                    column[0].plot(tokens, smoothed(losses), color=color, linewidth=1.1)
                    column[1].plot(*gap(runs[name], runs[BASELINE]), color=color, marker=".", linewidth=1.1)
        column[0].set_title(title, fontsize=10)
        column[1].set_xlabel("tokens")
        column[1].xaxis.set_major_formatter(EngFormatter(sep=""))
        for axis in column:
            axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("training loss, nats")
    axes[1][0].set_ylabel("gap in held-out loss, nats")
    lines = [plt.Line2D([], [], color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False)
    save(figure, picture)


def _seeds(folder: Path) -> Iterator[dict[str, Run]]:
    """The runs of each seed by variant, those left out that do not count."""
    path = folder / COMPARISON
    rows = json.loads(path.read_text(encoding="utf-8"))["outcomes"] if path.exists() else []
    out = {name_of(row) for row in rows if objection(row["recipe"], row.get("commit"))}
    for group in by_seed(read(folder)):
        named = {run["run"].rpartition("/")[2]: run for run in group}
        if BASELINE not in named:
            raise ValueError(f"{folder} has no run named {BASELINE!r}; it has {', '.join(named)}")
        yield {
            name: Run(name, {}, "", run["metrics"], run["result"] or {})
            for name, run in named.items()
            if run["run"] not in out
        }


def main(arguments: Sequence[str]) -> None:
    """Draw what ``arguments`` name; exits with the module's text where they name no experiment."""
    if len(arguments) < 2 or not all("=" in text for text in arguments[1:]):
        sys.exit(__doc__)
    pairs = (text.split("=", 1) for text in arguments[1:])
    draw({title: [Path(folder) for folder in folders.split(",")] for title, folders in pairs}, Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
