"""Loss curves of packed runs in one figure: a column for each experiment, with the curves of all its seeds.

    python -m sagebwd.training.loss_curves PICTURE.png "TITLE=FOLDER[,FOLDER...]"...

The folders of one experiment hold a seed each, as `sagebwd.training.packed` writes them. Above is the training loss,
below the held-out loss minus that of `BASELINE` with the same seed. Variants that `COLORS` lacks are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sagebwd.commands.figure import save
from sagebwd.training.packed import read
from sagebwd.training.report import Run, gap, smoothed

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
        for folder in folders:
            packed = {run["run"]: run for run in read(folder)}
            if BASELINE not in packed:
                raise ValueError(f"{folder} has no run named {BASELINE!r}; it has {', '.join(packed)}")
            runs = {name: Run(name, {}, "", run["metrics"], run["result"] or {}) for name, run in packed.items()}
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


def main(arguments: Sequence[str]) -> None:
    """Draw what ``arguments`` name; exits with the module's text where they name no experiment."""
    if len(arguments) < 2 or not all("=" in text for text in arguments[1:]):
        sys.exit(__doc__)
    pairs = (text.split("=", 1) for text in arguments[1:])
    draw({title: [Path(folder) for folder in folders.split(",")] for title, folders in pairs}, Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
