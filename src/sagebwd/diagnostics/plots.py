"""The picture of `sagebwd trace`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from sagebwd.environment import write_whole
from sagebwd.extras import extra

if TYPE_CHECKING:
    from sagebwd.diagnostics.trace import Row

ERRORS = {"o": "O", "delta": "delta", "p": "P", "ds": "dS", "dq": "dQ", "dk": "dK", "dv": "dV"}


def pyplot() -> ModuleType:
    """Matplotlib's, which draws into files; raises ImportError where it is missing."""
    with extra("diagnostics"):
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot
    return matplotlib.pyplot


def plot_trace(layers: Sequence[Row], path: Path) -> None:
    """Draw per-layer curves: the error of each tensor under each recipe, RMS(dS) under its bound, the largest logit.

    Args: layers, of `sagebwd.diagnostics.layers.means`; path, of the picture.
    """
    plt = pyplot()
    from matplotlib.ticker import MaxNLocator

    recipes = list(dict.fromkeys(row.recipe for row in layers))
    figure, axes = plt.subplots(1, len(recipes) + 2, figsize=(4.2 * (len(recipes) + 2), 3.8))
    for axis, recipe in zip(axes, recipes):
        lines = [row for row in layers if row.recipe == recipe]
        for index, (name, label) in enumerate(ERRORS.items()):
            values = [row.relative_l2[name] for row in lines]
            axis.plot([row.layer for row in lines], values, color=f"C{index}", marker=".", label=label)
        axis.set_title(f"{recipe}: relative L2 to FP64", fontsize=10)
        axis.sharey(axes[0])
    axes[0].set_ylim(bottom=0)
    axes[len(recipes) - 1].legend(fontsize=8, ncol=2)
    lines = [row for row in layers if row.recipe == recipes[0]]
    numbers, (sizes, logits) = [row.layer for row in lines], axes[-2:]
    sizes.plot(numbers, [row.ds_bound for row in lines], color="0.4", linestyle="--", marker=".", label="bound")
    for index, name in enumerate(("p", "dp", "ds")):
        values = [row.rms[name] for row in lines]
        sizes.plot(numbers, values, color=f"C{index}", marker=".", label={"p": "P", "dp": "dP", "ds": "dS"}[name])
    sizes.set_yscale("log")
    sizes.set_title("RMS, full precision, and dS's bound", fontsize=10)
    sizes.legend(fontsize=8)
    logits.plot(numbers, [row.largest_logit for row in lines], color="C3", marker=".")
    logits.set_title("largest logit", fontsize=10)
    logits.set_ylim(0, 1.1 * max(row.largest_logit for row in lines) or 1)
    for axis in axes:
        axis.set_xlabel("layer")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    plt.close(figure)
    write_whole(path, drawn.getvalue())
