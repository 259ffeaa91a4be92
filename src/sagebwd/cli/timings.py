"""What `sagebwd doctor --measure` does and prints, and what `sagebwd doctor` says of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from rich.table import Table

from sagebwd.auto import agreement, peers
from sagebwd.auto import choice as auto_choice
from sagebwd.auto.choice import known_of
from sagebwd.auto.contenders import NAMES
from sagebwd.auto.fit import fitted, window_of
from sagebwd.auto.model import DIRECTIONS, Size, Times, widths_text
from sagebwd.auto.timings import kept_at, read
from sagebwd.call import Ask
from sagebwd.cli import measure as benchmark
from sagebwd.cli import report as reports
from sagebwd.cli.outputs import check_files, check_folder
from sagebwd.cli.results import environment, save
from sagebwd.cli.terminal import console, progress
from sagebwd.environment import CACHE_DIR, make, write_whole
from sagebwd.explain import digest_line, newer_torch
from sagebwd.masks.kinds import KINDS

# Of what is shown: a training step of 16384 tokens with 16 heads of 128, at these lengths.
ELEMENTS, LENGTHS = 1 << 25, (1024, 4096, 16384)


def measure(
    device: str, cases: list[benchmark.Case], output: Path | None, commit: str | None, report: Path | None = None
) -> None:
    """Time this machine and keep what was found where "auto" reads it; with ``output`` also as a results file there.

    report: a file for this project, which has self-tests of recipes too (`sagebwd.cli.report`).

    Both are written anew with every case: what is cut off keeps what it measured, and what was kept of kinds of mask
    and widths that it did not come to.

    Raises ValueError, before anything is timed, where nothing can be kept or ``output`` cannot be written.
    """
    check_folder("--output", output)
    check_files({"--report": report})
    facts = environment(device, commit)
    kept, rows = kept_at(str(facts["gpu"]), torch.__version__), []
    try:
        make(kept.parent)
    except OSError as error:
        raise ValueError(
            f"{kept.parent} cannot be written ({type(error).__name__}: {error}); set {CACHE_DIR} to a folder that "
            "can be"
        ) from None
    with progress(lambda: f"what was measured is kept in {kept}" if rows else "nothing was measured yet") as tell:
        tests = reports.self_tests(device, tell) if report else []
        for timed in benchmark.measure(device, cases, tell=tell):
            rows += timed
            anew = {(row.kind, row.head_dim, row.value_dim) for row in rows}
            others, _ = read(kept, torch.__version__)  # another command may have measured since
            others = [row for row in others if (row["kind"], row["head_dim"], row["value_dim"]) not in anew]
            write_whole(kept, json.dumps({**facts, "rows": others + [asdict(row) for row in rows]}) + "\n")
            path = kept if output is None else save(rows, facts, output, "timings")
            if report is not None:
                reports.write(report, facts, device, tests, [asdict(row) for row in rows])
    console.print(table(fitted(map(asdict, rows), "", torch.__version__)))
    written = dict.fromkeys([kept, path, report or kept])
    console.print(f"wrote {' and '.join(map(str, written))}", soft_wrap=True, markup=False)


def show(ask: Ask) -> None:
    """Print what "auto" goes by on a call's GPU, a digest of what that follows from, and whether it has its widths."""
    digest = agreement.digest(auto_choice.facts_of(ask.device))
    console.print(digest_line(digest), highlight=False)
    named = ", ".join(NAMES[peer] for peer in peers.installed()) or "neither FlashAttention-4 nor -3"
    console.print(f"auto: beside torch there is {named}", highlight=False)
    known = known_of(ask.device)
    if not known:
        card = torch.cuda.get_device_properties(ask.device).name
        console.print(
            f"auto: nobody has timed {card} with these versions, so calls of recipe auto run in full precision, by "
            "torch. `sagebwd doctor --measure` times it, in a few minutes.",
            markup=False,
        )
        return
    console.print(table(known))
    sources = {times.source: newer_torch(times) for times in known}
    fitted_from = "; of what these lack from ".join(f"{source}{newer}" for source, newer in sources.items())
    console.print(f"fitted from {fitted_from}", soft_wrap=True, markup=False)
    of_kinds = [ask._replace(kind=kind, training=training) for kind in KINDS for training in (False, True)]
    if not any(times is not None and times.low is not None for times in map(auto_choice.times_of, of_kinds)):
        width = widths_text(ask.head_dim, ask.value_dim)
        console.print(
            f"auto: low precision was not timed for head_dim {width}, so calls of recipe auto run in full precision "
            "where others take them.",
            markup=False,
        )


def table(known: Iterable[Times]) -> Table:
    """How many times as fast as full precision low precision is by the model, a line a kind of mask and widths."""
    found: dict[tuple, dict[str, Times]] = {}
    for times in known:
        found.setdefault((times.kind, times.head_dim, times.value_dim, times.recipe), {})[times.direction] = times
    of = "batch x heads x tokens x value's head_dim"
    title = f"Times as fast as the fastest in full precision, fitted; calls of {ELEMENTS:,} {of}"
    shown = Table(title=title, title_justify="left", box=None)
    for heading in ("mask", "head_dim", "recipe", *(f"{name} {n}" for name in DIRECTIONS for n in LENGTHS)):
        shown.add_column(heading, justify="left" if heading in ("mask", "recipe") else "right")
    for (kind, head_dim, value_dim, recipe), of in found.items():
        cells = [_over_torch(of[name], n) if name in of else "" for name in DIRECTIONS for n in LENGTHS]
        shown.add_row(kind, widths_text(head_dim, value_dim), recipe, *cells)
    return shown


def _over_torch(times: Times, tokens: int) -> str:
    heads = ELEMENTS // (tokens * times.value_dim)
    low, full = times.ms(Size(tokens, tokens, heads, heads, window_of(tokens) + 1))
    return f"{min(full.values()) / low:.2f}" if full else "alone"
