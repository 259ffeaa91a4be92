"""Tables of training steps: for a terminal, and from result files for a page.

    python -m lab.steps.tables benchmarks/results/FILE.json [FILE.json ...]

The second prints Markdown of files of `python -m lab bench-training`: steps, where their time goes, and memory, a
table each for every model and way of running it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.breakdown import PARTS
from lab.steps.timing import Step

COMPILED = {
    "model": "compiled", "layers": "layers compiled", "no": "not compiled",
    "reduce-overhead": 'compiled, `mode="reduce-overhead"`',
}  # fmt: skip
CHECKPOINTING = {"no": "", "layers": ", checkpointed", "but attention": ", checkpointed but for attention"}


def table(rows: Sequence[Step]) -> Table:
    """The rows for a terminal."""
    first = rows[0]
    how = (COMPILED[first.compiled] + CHECKPOINTING[first.checkpointing]).replace("`", "")
    how += "" if first.causal else ", no mask"
    several = "" if first.processes == 1 else f" on each of {first.processes} processes"
    batch = f"batch {first.batch}{several}"
    title = f"{first.parameters / 1e6:.0f}M weights, context {first.context}, {batch}, {how}, BF16, AdamW"
    drawn = Table(title=title, title_justify="left", box=None)
    peak = "" if first.peak_tflops is None else f" of {first.peak_tflops:.0f} TFLOP/s BF16"
    headings = (
        "attention", "step ms", "host ms", "tokens/s", "over best", "peak GiB", "kept GiB", "in attention",
        f"model FLOPs{peak}",
    )  # fmt: skip
    for heading in headings:
        drawn.add_column(heading, justify="left" if heading == "attention" else "right")
    for row in rows:
        if row.step_ms is None:
            drawn.add_row(row.attention, "[red]FAILED[/red]")
            continue
        share = "" if row.attention_ms is None else f"{row.attention_share:.0%}, {row.attention_ms:.1f} ms"
        drawn.add_row(
            row.attention,
            f"{row.step_ms:.1f}",
            f"{row.host_ms:.1f}",
            f"{row.tokens_per_s:,.0f}",
            "" if row.speedup is None else f"{row.speedup:.3f}x {row.peer}",
            "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f}",
            "" if row.kept_bytes is None else f"{row.kept_bytes / 2**30:.1f}",
            share,
            "" if row.utilisation is None else f"{row.utilisation:.1%}",
        )
    return drawn


def parts_table(rows: Sequence[Step]) -> Table:
    """Where the time of the rows goes, for a terminal."""
    drawn = Table(title="where a step's time goes, ms", title_justify="left", box=None)
    for heading in ("of it", *PARTS):
        drawn.add_column(heading, justify="left" if heading == "of it" else "right")
    for row in rows:
        if row.parts:
            drawn.add_row(row.attention, *(f"{row.parts[part]:.1f}" for part in PARTS))
    return drawn


def markdown(files: Sequence[Path]) -> str:
    """Tables of result files, of one model and way of running it together; of those from 2026-11-23 on.

    Raises ValueError for a file of another benchmark.
    """
    groups: dict[str, list[dict]] = {}
    for path in files:
        content = json.loads(path.read_text(encoding="utf-8"))
        for row in content["rows"]:
            if "checkpointing" not in row or "step_ms" not in row:
                raise ValueError(f"{path}: expected rows of `python -m lab bench-training`, from 2026-11-23 on")
            groups.setdefault(_title(row), []).append(row | {"model": content["model"]})
    lines = []
    for title, rows in groups.items():
        rows.sort(key=lambda row: row["context"])
        timed = [row for row in rows if row["step_ms"]]
        lines += [f"{title}.", "", *_steps(timed), "", *_parts(timed), ""]
        if any(row["kept_bytes"] for row in timed):
            lines += [*_kept(timed), ""]
        lines += [f"FAILED: {row['attention']} at {row['context']} tokens\n" for row in rows if not row["step_ms"]]
    return "\n".join(lines)


def _title(row: dict) -> str:
    several = f", {row['processes']} processes" if row.get("processes", 1) > 1 else ""
    mask = "" if row["causal"] else ", no mask"
    how = COMPILED[row["compiled"]] + CHECKPOINTING[row["checkpointing"]]
    return f"{row['parameters'] / 1e6:.0f}M weights, {how}{mask}{several}"


def _grid(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> Iterator[str]:
    """A Markdown table whose first ``texts`` columns are texts and the others numbers."""
    yield f"| {' | '.join(headings)} |"
    yield f"|{'|'.join(' --- ' if index < texts else ' ---: ' for index in range(len(headings)))}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _steps(rows: Sequence[dict]) -> Iterator[str]:
    headings = (
        "tokens a sequence", "batch", "attention", "step ms", "fastest to slowest", "host ms", "tokens/s",
        "over the best BF16",
    )  # fmt: skip
    yield from _grid(
        headings,
        [
            (
                str(row["context"]), str(row["batch"]), _name(row), f"{row['step_ms']:.1f}",
                f"{min(row['all_ms']):.1f} to {max(row['all_ms']):.1f}", f"{row['host_ms']:.1f}",
                f"{row['tokens_per_s']:,.0f}",
                "" if row["speedup"] is None else f"{row['speedup']:.3f} ({row['peer']})",
            )
            for row in rows
        ],
        3,
    )  # fmt: skip


def _parts(rows: Sequence[dict]) -> Iterator[str]:
    headings = ("tokens a sequence", "attention", *(f"{part} ms" for part in PARTS))
    cells = [
        (str(row["context"]), _name(row), *(f"{row['parts'][part]:.1f}" for part in PARTS))
        for row in rows
        if row["parts"]
    ]
    yield from _grid(headings, cells, 2)


def _kept(rows: Sequence[dict]) -> Iterator[str]:
    """What is kept, of all layers and the loss; what differs from the peer is attention's alone.

    Attention in full precision keeps Q, K, V and O in 16 bit and lse: 8 head_dim + 4 bytes a token and head.
    """
    # layers computed again keep their inputs alone
    whole = rows[0]["checkpointing"] != "layers"
    own_headings = ("a layer's attention MiB", "of its peer's") if whole else ()
    headings = ("tokens a sequence", "attention", "kept GiB", *own_headings, "peak GiB")
    cells = []
    for row in rows:
        peer = next((x for x in rows if x["attention"] == row["peer"] and x["context"] == row["context"]), None)
        texts = [""] * len(own_headings)
        if whole and peer is not None:
            model = row["model"]
            head_dim = model["head_dim"] or model["width"] // model["heads"]
            full = row["batch"] * row["context"] * model["heads"] * (8 * head_dim + 4)
            own = full - (peer["kept_bytes"] - row["kept_bytes"]) / model["layers"]
            texts = [f"{own / 2**20:.0f}", f"{own / full:.3f}"]
        sizes = [f"{row[name] / 2**30:.2f}" for name in ("kept_bytes", "peak_bytes")]
        cells.append((str(row["context"]), _name(row), sizes[0], *texts, sizes[1]))
    yield from _grid(headings, cells, 2)


def _name(row: dict) -> str:
    return row["attention"] if row["recipe"] is None else f"`{row['attention'].partition('@')[0]}`"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="result files, JSON")
    given = parser.parse_args()
    try:
        print(markdown(given.files))
    except OSError as error:
        parser.error(str(error))
