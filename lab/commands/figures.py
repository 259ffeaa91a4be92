"""`python -m lab figure`: the pictures of the documents, from committed results alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.commands import loading

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {
    "mixed": "C2", "token": "C0", "paper": "C3", "full": "0.5", "fa4": "C1", "cudnn": "C4", "fa2": "C5", "fa3": "C6",
}  # fmt: skip
NAMES = {
    "fa4": "FlashAttention-4, BF16", "cudnn": "cuDNN, BF16", "fa2": "FlashAttention-2, BF16",
    "fa3": "FlashAttention-3, BF16",
}  # fmt: skip


def contexts(files: Sequence[Path]) -> Figure:
    """Time of a training step and of its attention by context, of a file of `python -m lab bench-training`."""
    content = json.loads(_one(files).read_text(encoding="utf-8"))
    rows = [row for row in content["rows"] if row.get("step_ms") and row.get("parts")]
    if not rows:
        raise ValueError(f"{files[0]}: no step with a profile to draw")
    figure, (whole, attention) = _panels(2, (4.8, 3.7), share=False)
    for name in dict.fromkeys(row["attention"] for row in rows):
        found = sorted((row for row in rows if row["attention"] == name), key=lambda row: row["context"])
        short = found[0]["recipe"] or name
        tokens, steps = [row["context"] for row in found], [row["step_ms"] for row in found]
        spread = [
            [row["step_ms"] - min(row["all_ms"]) for row in found],
            [max(row["all_ms"]) - row["step_ms"] for row in found],
        ]
        style = {"color": COLORS[short], "marker": "o", "markersize": 4, "label": NAMES.get(short, short)}
        if "+fused" in name:
            style |= {"linestyle": "--", "label": f"{style['label']}, fused"}
        whole.errorbar(tokens, steps, spread, capsize=3, **style)
        own = [row["parts"]["attention"] + row["parts"]["passes"] for row in found]
        attention.plot(tokens, own, **style)
    for axis, title in ((whole, "a whole step, fastest to slowest"), (attention, "attention and its passes")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({row["context"] for row in rows}))
        axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K")
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("tokens a sequence")
        axis.set_ylabel("ms a step")
    _legend(figure, whole)
    size = f"{rows[0]['parameters'] / 1e6:.0f}M weights, {rows[0]['batch'] * rows[0]['context']:,} tokens a step"
    figure.suptitle(f"{size}: {_where(content)}", fontsize=10)
    return figure


def gaps(files: Sequence[Path]) -> Figure:
    """Gaps in held-out loss with their 95% intervals: folders of comparisons, those of one cell's seeds together.

    A cell's name is its folder's without what follows ``-seed``; the text of the gap's variant stands beside it. Gaps
    of `python -m lab continue`, whose folders are lr-RATE and whose margin is less, have axes of their own.
    """
    from lab.training.gaps import CONTINUED_MARGIN, MARGIN
    from lab.training.gaps import gaps as measured

    cells: dict[str, list[Path]] = {}
    for folder in files:
        cells.setdefault(folder.name.partition("-seed")[0], []).append(folder)
    found = [
        (cell, row)
        for cell, folders in cells.items()
        for row in measured(folders)
        if row.interval and row.variant.split()[0] in ("mixed", "token", "paper")
    ]
    if not found:
        raise ValueError("no variant with two pairs of runs or more, so no interval to draw")
    found.sort(key=lambda one: (tuple(COLORS).index(one[1].variant.split()[0]), one[1].variant, "large" in one[0]))
    parts = [[one for one in found if one[0].startswith("lr-") == continued] for continued in (False, True)]
    parts = [part for part in parts if part]
    figure, axes = _panels(1, (8.2, 0.4 * max(map(len, parts)) + 0.8), rows=len(parts), share=False)
    for axis, part in zip(axes, parts):
        margin = CONTINUED_MARGIN if part[0][0].startswith("lr-") else MARGIN
        axis.axvspan(-margin, margin, color="0.9", label=f"within {margin:g} nats")
        axis.axvline(0, color="black", linewidth=0.8)
        for place, (_, row) in enumerate(part):
            color = COLORS[row.variant.split()[0]]
            axis.plot(row.interval, [place, place], color=color, linewidth=2.5, solid_capstyle="butt")
            axis.plot(row.gaps, [place] * len(row.gaps), "|", color=color, markersize=12)
            axis.plot(row.mean, place, "o", color=color, markersize=6)
        axis.set_yticks(range(len(part)), [f"{row.variant}, {_cell(name)}" for name, row in part])
        axis.invert_yaxis()
        axis.legend(loc="upper right", frameon=False, fontsize=9)
    axes[-1].set_xlabel("held-out loss minus full precision's, nats: mean, seeds (ticks), 95% interval")
    return figure


def _cell(name: str) -> str:
    """What a folder of comparisons is of, in words."""
    if name.startswith("lr-"):
        return f"trained on at {name.removeprefix('lr-')}"
    tokens = {"small": "16K", "large": "131K"}
    return f"{tokens.get(name.rpartition('-')[2], name)} tokens a step"


def layers(files: Sequence[Path]) -> Figure:
    """Where the layers of a model put their weight, and each recipe's errors there: a file of `sagebwd trace`."""
    from lab.studies import traces
    from sagebwd.diagnostics.layers import idle, means

    rows = traces.read(_one(files))
    recipes = [name for name in COLORS if any(row.recipe == name for row in rows)]
    whole = [row for row in rows if row.recipe == recipes[0]]
    figure, axes = _panels(2, (4.8, 3.3), rows=2, share=False)
    weight = axes[0]
    weight.plot([row.layer for row in whole], [row.first_weight for row in whole], ".", color="0.75", markersize=3)
    average = means(whole)
    weight.plot([row.layer for row in average], [row.first_weight for row in average], color="black")
    weight.set_title("weight of the first key: heads (dots) and their mean", fontsize=10)
    weight.set_ylim(0, 1)
    for axis, tensor in zip(axes[1:3], ("o", "dq")):
        for recipe in recipes:
            own = means([row for row in rows if row.recipe == recipe])
            values = [row.relative_l2[tensor] for row in own]
            axis.plot([row.layer for row in own], values, color=COLORS[recipe], label=recipe)
        axis.set_title(f"error of {'O' if tensor == 'o' else 'dQ'} by layer, relative L2 to FP64", fontsize=10)
    for axis in axes[:3]:
        axis.set_xlabel("layer")
    apart = idle(rows)
    for recipe in recipes:
        own = [row for row in rows if row.recipe == recipe and (row.layer, row.head) not in apart]
        errors = [row.relative_l2["dq"] for row in own]
        axes[3].plot([row.first_weight for row in own], errors, ".", color=COLORS[recipe], markersize=2.5)
    axes[3].set_xlabel("weight of the first key")
    axes[3].set_title("error of dQ by head and window, relative L2 to FP64", fontsize=10)
    for axis in axes[1:]:
        axis.set_yscale("log")
        axis.set_ylim(1e-3, 1)
    _legend(figure, axes[1])
    return figure


KINDS: dict[str, Callable[[Sequence[Path]], Figure]] = {
    "contexts": contexts, "gaps": gaps, "layers": layers
}  # fmt: skip


def figure(
    kind: Annotated[str, typer.Argument(help="contexts, gaps or layers.")],
    files: Annotated[list[Path], typer.Argument(help="Results: a file, or for gaps folders of comparisons.")],
    output: Annotated[Path, typer.Option(help="The PNG.")],
) -> None:
    """Draw a picture of the documents from results: steps by context, gaps, or a model's layers."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not known; accepted: {', '.join(KINDS)}")
    from sagebwd.cli.outputs import check_files
    from sagebwd.cli.terminal import console

    check_files({"--output": output}, {f"FILE {n}": path for n, path in enumerate(files, 1) if path.is_file()})
    with loading("matplotlib"):
        import matplotlib

        from benchmarks.pictures import save

    matplotlib.use("Agg")
    try:
        drawn = KINDS[kind](files)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(f"{error.filename}: there is no such file; expected a file of results") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        named = ", ".join(map(str, files))
        raise ValueError(f"{named}: no results that {kind} draws ({type(error).__name__}: {error})") from None
    save(drawn, output, dpi=130)
    console.print(str(output), highlight=False, markup=False)


def _one(files: Sequence[Path]) -> Path:
    if len(files) != 1:
        raise ValueError(f"expected one results file, got {len(files)}")
    return files[0]


def _where(content: dict) -> str:
    return f"{content['gpu']}, torch {content['torch']}, {content['commit']}, {content['date']}"


def _panels(count: int, size: tuple[float, float], rows: int = 1, share: bool = True) -> tuple[Figure, Sequence[Axes]]:
    """Panels of a size in inches each, ``count`` in each of ``rows``."""
    import matplotlib.pyplot as plt

    width, height = size
    figure, axes = plt.subplots(
        rows, count, figsize=(width * count, height * rows), sharey=share, squeeze=False, layout="constrained"
    )
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    return figure, axes.flat


def _legend(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
