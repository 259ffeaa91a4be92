"""What `sagebwd doctor --measure` does and prints, and what `sagebwd doctor` says of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from rich.table import Table

from sagebwd import dispatch
from sagebwd.auto import agreement
from sagebwd.auto.thresholds import DIRECTIONS, Threshold, kept_at, of_card, of_rows, rows_kept, widths_text
from sagebwd.cli import measure as benchmark
from sagebwd.cli.results import environment, save
from sagebwd.cli.terminal import console, progress
from sagebwd.environment import CACHE_DIR, make, write_whole


def measure(device: str, cases: list[benchmark.Case], output: Path | None, commit: str | None) -> None:
    """Time this machine and keep what was found where "auto" reads it; with ``output`` also as a results file there.

    Both are written anew with every case: what is cut off keeps what it measured. What is kept of other kinds of mask
    and of other widths than those of ``cases`` stays.

    Raises ValueError, before anything is timed, where nothing can be kept.
    """
    facts = environment(device, commit)
    kept, rows = kept_at(str(facts["gpu"]), torch.__version__), []
    try:
        make(kept.parent)
    except OSError as error:
        raise ValueError(
            f"{kept.parent} cannot be written ({type(error).__name__}: {error}); set {CACHE_DIR} to a folder that "
            "can be"
        ) from None
    anew = {(case.kind, case.head_dim, case.value_dim) for case in cases}
    before = [row for row in rows_kept(kept) or () if (row["kind"], row["head_dim"], row["value_dim"]) not in anew]
    with progress(lambda: f"what was measured is kept in {kept}" if rows else "nothing was measured yet") as tell:
        for timed in benchmark.measure(device, cases, tell=tell):
            rows += timed
            write_whole(kept, json.dumps({**facts, "rows": before + [asdict(row) for row in rows]}) + "\n")
            path = kept if output is None else save(rows, facts, output, "thresholds")
            for line in _lines(timed):
                console.print(line, highlight=False)
    console.print(table(of_rows(map(asdict, rows), str(path))))
    console.print(f"wrote {path}" if path == kept else f"wrote {kept} and {path}", soft_wrap=True)


def show(device: str) -> None:
    """Print from how many tokens on "auto" runs in low precision on a GPU, and a digest of what that follows from."""
    digest = agreement.digest(dispatch.facts_of(torch.device(device)))
    console.print(f"auto: digest {digest}, the same on two machines where it chooses alike", highlight=False)
    card = torch.cuda.get_device_properties(device).name
    known = of_card(card, torch.__version__)
    if not known:
        console.print(
            f"auto: nobody has timed {card} with these versions, so calls of recipe auto run in full precision, by "
            "torch. `sagebwd doctor --measure` times it, in a few minutes.",
            markup=False,
        )
        return
    console.print(table(known))
    for source in sorted({row.source for row in known}):
        console.print(f"measured: {source}", soft_wrap=True, markup=False)


def _lines(timed: list[benchmark.Timing]) -> Iterable[str]:
    """A line a direction: torch's time over ours at each length."""
    for direction in DIRECTIONS:
        rows = sorted((row for row in timed if row.direction == direction), key=lambda row: row.tokens)
        if rows:
            width = f"{rows[0].head_dim}/{rows[0].value_dim}"
            cells = ", ".join(f"{row.tokens} {_ratio(row)}" for row in rows)
            yield f"{rows[0].kind} {width} {rows[0].elements} {direction}, {rows[0].recipe} over torch: {cells}"


def _ratio(row: benchmark.Timing) -> str:
    if row.ms is None or row.torch_ms is None:
        return "does not run" if row.ms is None else "torch does not run"
    return f"{row.torch_ms / row.ms:.2f}"


def table(thresholds: Iterable[Threshold]) -> Table:
    """From how many tokens low precision is faster, a line a kind of mask and pair of widths."""
    found: dict[tuple, dict[str, Threshold]] = {}
    for threshold in thresholds:
        key = threshold.kind, threshold.head_dim, threshold.value_dim, threshold.elements, threshold.recipe
        found.setdefault(key, {})[threshold.direction] = threshold
    shown = Table(title="Low precision is faster than torch from so many tokens on", title_justify="left", box=None)
    for heading in ("mask", "head_dim", "batch x heads x tokens x width", "recipe", *DIRECTIONS):
        shown.add_column(heading, justify="left" if heading in ("mask", "recipe") else "right")
    for (kind, head_dim, value_dim, elements, recipe), of in found.items():
        cells = [_tokens(of[direction]) if direction in of else "" for direction in DIRECTIONS]
        shown.add_row(kind, widths_text(head_dim, value_dim), f"{elements:,}", recipe, *cells)
    return shown


def _tokens(threshold: Threshold) -> str:
    return "never" if threshold.tokens is None else str(threshold.tokens)
