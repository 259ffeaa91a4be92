"""Plots of a benchmark's result file.

    python -m benchmarks.plot attention benchmarks/results/FILE.json speed.png
    python -m benchmarks.plot steps benchmarks/results/FILE.json [FILE.json ...] docs/figures/steps.png

The first draws a file of `python -m benchmarks attention`, the second files of `python -m lab bench-training`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pictures import save
from benchmarks.shapes import on_grid, value_dim_of
from sagebwd.auto.model import widths_text

STEP_PARTS = {
    "attention": ("attention", "C0"),
    "passes": ("its passes", "C1"),
    "copies": ("copies and casts", "C3"),
    "other": ("other kernels", "#bbbbbb"),
    "idle": ("no kernel", "#eeeeee"),
}
"""Parts of a step (`benchmarks.breakdown.PARTS`), as they are called and coloured."""
NAMES = {
    "cudnn": "cuDNN, BF16",
    "flash": "FlashAttention-2, BF16",
    "fa2": "FlashAttention-2, BF16",
    "fa4": "FlashAttention-4, BF16",
    "fa3": "FlashAttention-3, BF16",
}


def plot_attention(results: Path, picture: Path | None = None, direction: str = "fwd+bwd") -> Path:
    """Draw TFLOPS over tokens of a file of `python -m benchmarks attention`, a panel for each head_dim and mask.

    Args: picture, a PNG next to the file unless given. Returns the picture's path.
    Raises ValueError where the file holds nothing to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    content = json.loads(results.read_text(encoding="utf-8"))
    rows = [row for row in content["rows"] if row["direction"] == direction and row["gate"] == "ok" and on_grid(row)]
    panels = sorted({(row["head_dim"], value_dim_of(row), row["causal"]) for row in rows})
    if not panels:
        raise ValueError(f"{results}: no measurement of the standard grid in direction {direction!r} to draw")
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4 * len(panels), 3.9), sharey=True, squeeze=False, layout="constrained"
    )
    lines = sorted({(row["recipe"] == "bf16", row["impl"], row["recipe"]) for row in rows})
    for axis, panel in zip(axes[0], panels):
        head_dim, value_dim, causal = panel
        for is_baseline, impl, recipe in lines:
            points = sorted(
                (row["tokens"], row["tflops"])
                for row in rows
                if (row["head_dim"], value_dim_of(row), row["causal"]) == panel
                and (row["impl"], row["recipe"]) == (impl, recipe)
            )
            style = "--" if is_baseline else "-"
            axis.plot(
                [tokens for tokens, _ in points],  # none where this one does not run: its colour is kept
                [tflops for _, tflops in points],
                style,
                marker="o",
                markersize=3,
                label=NAMES.get(impl, impl) if is_baseline else f"{recipe}, {impl}",
            )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K")
        axis.set_title(f"head_dim {widths_text(head_dim, value_dim)}, {'causal' if causal else 'no mask'}")
        axis.set_xlabel("tokens")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(f"TFLOPS, {direction}, end to end")
    axes[0][0].set_ylim(bottom=0)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(lines), frameon=False)
    figure.suptitle(f"{content['gpu']}, torch {content['torch']}, triton {content['triton']}, {content['date']}")
    picture = picture or results.with_suffix(".png")
    save(figure, picture, dpi=130)
    return picture


def plot_steps(results: Sequence[Path], picture: Path) -> Path:
    """Draw where a training step's time goes, of result files of `python -m lab bench-training`: a bar an attention.

    A panel for each file's model, context and mask, where all ran on one kind of GPU. Returns the picture's path.
    Raises ValueError where no step was profiled.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    contents = [json.loads(path.read_text(encoding="utf-8")) for path in results]
    panels: dict[tuple, list[dict]] = {}
    for content in contents:
        for row in content["rows"]:
            if row["step_ms"] and row["attention_ms"]:
                key = not row.get("causal", True), row["parameters"], row.get("checkpointing", "no"), row["context"]
                panels.setdefault(key, []).append(row)
    if not panels:
        raise ValueError(f"{', '.join(map(str, results))}: no step with a profile to draw")
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(
        down, across, figsize=(4.5 * across, 0.6 + 2.6 * down), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (key, rows) in zip(axes.flat, sorted(panels.items())):
        no_mask, parameters, checkpointing, context = key
        names = [NAMES.get(row["attention"], row["attention"].replace("@", ", ")) for row in rows[::-1]]
        left = [0.0] * len(rows)
        for part, (label, color) in STEP_PARTS.items():
            widths = [_parts(row).get(part, 0.0) for row in rows[::-1]]
            axis.barh(names, widths, left=left, color=color, label=label)
            left = [start + width for start, width in zip(left, widths)]
        how = {"no": "", "layers": ", checkpointed", "but attention": ", checkpointed but attention"}[checkpointing]
        how += ", no mask" if no_mask else ""
        axis.set_title(f"{context} tokens, {parameters / 1e6:.0f}M weights{how}", fontsize="medium")
        axis.set_xlabel("ms a step")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    processes = sorted({row["processes"] for rows in panels.values() for row in rows})
    gpus = "" if processes == [1] else f", {'/'.join(map(str, processes))} processes"
    known = contents[0]
    figure.suptitle(f"{known['gpu']}{gpus}, torch {known['torch']}, triton {known['triton']}, {known['date']}")
    save(figure, picture, dpi=130)
    return picture


def _parts(row: dict) -> dict[str, float]:
    """A row's parts; of files from before 2026-11-23, where passes are in attention and copies in the rest."""
    other, idle = row["busy_ms"] - row["attention_ms"], max(0.0, row["step_ms"] - row["busy_ms"])
    return row.get("parts") or {"attention": row["attention_ms"], "other": other, "idle": idle}


def main(arguments: list[str]) -> None:
    """Draw as ``arguments`` say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("attention", "steps"))
    parser.add_argument("files", nargs="+", type=Path, help="result files, JSON; one of attention")
    parser.add_argument("picture", type=Path)
    given = parser.parse_args(arguments)
    if given.kind == "attention" and len(given.files) > 1:
        parser.error(f"files: attention is drawn of one, got {len(given.files)}")
    try:
        print(
            plot_steps(given.files, given.picture)
            if given.kind == "steps"
            else plot_attention(*given.files, given.picture)
        )
    except OSError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
