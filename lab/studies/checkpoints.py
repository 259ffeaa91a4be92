"""Several files of `sagebwd trace --output`, of models at several steps of their training, side by side.

``python -m lab.studies.checkpoints "MODEL:STEP=FILE" ...`` prints Markdown tables by layer: errors,
each recipe's error over the first one's, magnitudes with the bound on RMS(dS), and, of files that have it, the
attribution. ``--plot`` draws dS, dQ and dK and the bound against steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.studies.study_tables import table
from sagebwd.diagnostics.plots import save
from sagebwd.diagnostics.tables import LABELS
from sagebwd.diagnostics.trace import OUTPUTS

COMPARED = ("ds", "dq", "dk", "dv", "o")


@dataclass(frozen=True)
class Checkpoint:
    """A traced model: rows by recipe, layer and head, and layers, of all their heads, as they are in the file."""

    model: str
    step: int
    rows: list[dict]
    layers: list[dict]

    @classmethod
    def read(cls, text: str, recipes: Sequence[str] | None = None) -> Checkpoint:
        """From MODEL:STEP=FILE, these recipes alone, all for None.

        Raises ValueError for other text, a file that is not one of ``sagebwd trace`` and a recipe that is not in it.
        """
        name, equals, path = text.partition("=")
        model, colon, step = name.rpartition(":")
        if not (equals and colon and step.isdecimal()):
            raise ValueError(f"{text!r}: expected MODEL:STEP=FILE")
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            rows, layers = content["rows"], content["layers"]
        except FileNotFoundError:
            raise ValueError(f"{path}: there is no such file") from None
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: not a file of sagebwd trace --output") from None
        known = list(dict.fromkeys(row["recipe"] for row in layers))
        for recipe in recipes or ():
            if recipe not in known:
                raise ValueError(f"--recipe {recipe!r} is not in {path}; accepted: {'; '.join(known)}")
        kept = recipes or known
        return cls(model, int(step), *([row for row in part if row["recipe"] in kept] for part in (rows, layers)))

    def heads(self, recipe: str, layer: int) -> list[dict]:
        """A layer's rows under a recipe."""
        return [row for row in self.rows if (row["recipe"], row["layer"]) == (recipe, layer)]

    def cells(self, layer: int) -> list[str]:
        """The first cells of a line: model, step and layer."""
        return [self.model, str(self.step), str(layer)]


def markdown(checkpoints: Sequence[Checkpoint]) -> str:
    """The tables, and a line that says whether the bound holds."""
    tables = [_errors(checkpoints), _ratios(checkpoints), _magnitudes(checkpoints), _bound(checkpoints)]
    if any(row["attribution"] for one in checkpoints for row in one.layers):
        tables.append(_attribution(checkpoints))
    return "\n\n".join(tables)


def looseness(checkpoint: Checkpoint) -> list[float]:
    """The bound over RMS(dS) of each head; at least 1 where the bound holds."""
    first = checkpoint.rows[0]["recipe"]
    return [row["ds_bound"] / row["rms"]["ds"] for row in checkpoint.rows if row["recipe"] == first]


def _errors(checkpoints: Sequence[Checkpoint]) -> str:
    lines = [
        [*one.cells(row["layer"]), f"`{row['recipe']}`", *(f"{row['relative_l2'][name]:.4f}" for name in LABELS),
         _order(row["relative_l2"])]
        for one in checkpoints for row in one.layers
    ]  # fmt: skip
    return table(["model", "step", "layer", "recipe", *LABELS.values(), "worst first"], lines)


def _order(errors: dict[str, float]) -> str:
    return " ".join(LABELS[name] for name in sorted(LABELS, key=errors.get, reverse=True))


def _ratios(checkpoints: Sequence[Checkpoint]) -> str:
    lines = []
    for one in checkpoints:
        first = one.rows[0]["recipe"]
        for row in one.layers:
            if row["recipe"] == first:
                continue
            cells = [f"`{row['recipe']}` / `{first}`"]
            pairs = list(zip(one.heads(row["recipe"], row["layer"]), one.heads(first, row["layer"])))
            for name in COMPARED:
                ratios = [a["relative_l2"][name] / b["relative_l2"][name] for a, b in pairs]
                cells.append(f"{statistics.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
            lines.append([*one.cells(row["layer"]), *cells])
    return table(["model", "step", "layer", "error of", *(LABELS[name] for name in COMPARED)], lines)


def _magnitudes(checkpoints: Sequence[Checkpoint]) -> str:
    lines = []
    for one in checkpoints:
        for row in one.layers:
            if row["recipe"] == one.rows[0]["recipe"]:
                sizes = [f"{row['rms'][name]:.2e}" for name in ("p", "dp", "ds")]
                loose = [f"{row['ds_bound']:.2e}", f"{row['ds_bound'] / row['rms']['ds']:.1f}"]
                last = [f"{row['ds_peak_to_rms']:.0f}", f"{row['largest_logit']:.1f}"]
                lines.append([*one.cells(row["layer"]), *sizes, *loose, *last])
    sizes = ["RMS P", "RMS dP", "RMS dS", "bound on RMS dS", "bound / RMS dS", "peak / RMS dS", "largest logit"]
    return table(["model", "step", "layer", *sizes], lines)


def _bound(checkpoints: Sequence[Checkpoint]) -> str:
    factors = [factor for one in checkpoints for factor in looseness(one)]
    held = sum(factor >= 1 for factor in factors)
    low, middle, high = min(factors), statistics.median(factors), max(factors)
    return (
        f"Bound over RMS(dS), {len(factors)} heads: {low:.1f} to {high:.1f}, median {middle:.1f}; it holds on {held}."
    )


def _attribution(checkpoints: Sequence[Checkpoint]) -> str:
    lines = []
    for one in checkpoints:
        for row in one.layers:
            for source, parts in row["attribution"].items():
                cells = [f"{parts[t]['share']:.0%} ({parts[t]['alone']:.4f})" if parts[t]["share"] >= 0.005 else "0"
                         for t in OUTPUTS]  # fmt: skip
                lines.append(
                    [*one.cells(row["layer"]), f"`{row['recipe']}`", LABELS.get(source, source.upper()), *cells]
                )
    outputs = [LABELS[name] for name in OUTPUTS]
    return table(["model", "step", "layer", "recipe", "product in INT8 alone", *outputs], lines)


def plot(checkpoints: Sequence[Checkpoint], path: Path) -> None:
    """Draw dS, dQ and dK, means over layers, and each layer's bound over RMS(dS), against steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(one.model for one in checkpoints))
    recipes = list(dict.fromkeys(row["recipe"] for one in checkpoints for row in one.layers))
    figure, axes = plt.subplots(1, 4, figsize=(16, 4.4), layout="constrained")
    for model, style in zip(models, ("-", "--", ":", "-.")):
        ours = [one for one in checkpoints if one.model == model]
        steps = [one.step for one in ours]
        for axis, name in zip(axes, ("ds", "dq", "dk")):
            axis.set_title(f"{LABELS[name]}, relative L2 to FP64", fontsize=10)
            for index, recipe in enumerate(recipes):
                errors = [statistics.mean(row["relative_l2"][name] for row in one.layers if row["recipe"] == recipe)
                          for one in ours]  # fmt: skip
                axis.plot(steps, errors, style, color=f"C{index}", marker=".", label=f"{recipe}, {model}")
        for index, layer in enumerate(dict.fromkeys(row["layer"] for row in ours[0].layers)):
            rows = [next(row for row in one.layers if row["layer"] == layer) for one in ours]
            loose = [row["ds_bound"] / row["rms"]["ds"] for row in rows]
            axes[3].plot(steps, loose, style, color=f"C{index}", marker=".", label=f"layer {layer}, {model}")
    axes[3].axhline(1, color="0.4", linewidth=1)
    axes[3].set_title("bound on RMS(dS) / RMS(dS)", fontsize=10)
    axes[3].legend(fontsize=8)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("training step")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, ncol=len(recipes), loc="outside lower center")
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    description = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m lab.studies.checkpoints", description=description)
    parser.add_argument("file", nargs="+", help="MODEL:STEP=FILE of `sagebwd trace --output`")
    parser.add_argument("--recipe", action="append", help="show these alone, by name; repeat [default: all]")
    parser.add_argument("--plot", type=Path, help="also draw a .png file")
    given = parser.parse_args(arguments)
    try:
        checkpoints = [Checkpoint.read(text, given.recipe) for text in given.file]
    except ValueError as error:
        parser.error(str(error))
    print(markdown(checkpoints))
    if given.plot is not None:
        plot(checkpoints, given.plot)


if __name__ == "__main__":
    main()
