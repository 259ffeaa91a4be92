"""The command `sagebwd bench-masks`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sagebwd.commands.terminal import console, progress, quiet

KERNELS = "src/sagebwd/kernels"


def bench_masks(
    mask: Annotated[
        list[str] | None,
        typer.Option(
            help="documents, chunks, prefix, window or random; gpt-oss or gpt-oss-window, layers with sinks; repeat "
            "[default: all but gpt-oss's]."
        ),
    ] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Repeat for several [default: 128, 64].")] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="A recipe, 'packed RECIPE', flex, flex-flash, fa4 or sdpa; repeat [default: mixed and token, both "
            "packed too, and all others but sdpa]."
        ),
    ] = None,
    impl: Annotated[str | None, typer.Option(help="Kernel family of ours [default: the fastest].")] = None,
    tokens: Annotated[int, typer.Option(help="Queries and keys.")] = 16384,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")] = 4,
    processes: Annotated[
        int | None,
        typer.Option(help="That compile before anything is timed [default: one a case on a GPU, at most 8]."),
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Begin no mask that would end later.")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the command out.")] = "cuda",
    output: Annotated[Path, typer.Option(help="Folder for the JSON.")] = Path("benchmarks/results"),
    commit: Annotated[str | None, typer.Option(help="Commit to record outside a git checkout.")] = None,
    kernels_hash: Annotated[str | None, typer.Option(help="Of the tree of kernels, outside a git checkout.")] = None,
) -> None:
    """Speed of block masks, and of layers with sinks, end to end, against FlexAttention and FlashAttention-4."""
    quiet()
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # or what other processes compile is lost
    from sagebwd.benchmarks import mask_cases
    from sagebwd.benchmarks import masks as benchmark
    from sagebwd.benchmarks.results import environment, save
    from sagebwd.dispatch import check_known
    from sagebwd.hardware import check_device, command_output

    check_device(device)
    check_known(impl)
    names = attention or list(mask_cases.DEFAULT)
    for name in names:
        mask_cases.check_name(name)
    cases = [
        mask_cases.Case.of(kind, width, tokens) for width in head_dim or (128, 64) for kind in mask or mask_cases.MASKS
    ]
    if processes is None:
        processes = min(len(cases), 8, (os.cpu_count() or 1) - 1) if device.startswith("cuda") else 0
    facts = environment(device, commit)
    facts["kernels"] = kernels_hash or command_output("git", "rev-parse", f"HEAD:{KERNELS}")
    rows: list[benchmark.Measurement] = []
    with progress() as tell:
        for measured in benchmark.measure(
            cases, names, device, impl=impl, rounds=rounds, processes=processes, seconds=seconds, tell=tell
        ):
            rows += measured
            path = save(rows, facts, output, "masks")  # anew with every mask: one that is cut off has what it measured
            console.print(_table(measured))
            for row in measured:
                if row.gate != "ok" and row.direction == benchmark.BOTH:
                    console.print(f"{row.attention}: {row.gate}", markup=False, highlight=False, soft_wrap=True)
    if not rows:
        raise ValueError(f"--seconds {seconds:g}: no mask was timed; give more")
    console.print(f"wrote {path}", soft_wrap=True)
    if any(row.gate.startswith("FAILED") for row in rows):
        raise ValueError("some masks FAILED the correctness gate: their results are wrong, do not use them")


def _table(rows: list) -> Table:
    """A line an attention: each direction's ms and TFLOPS, what a new mask costs, and the peers' time over it."""
    one, ways = rows[0], list(dict.fromkeys(row.direction for row in rows))
    shape = f"D{one.head_dim} H{one.heads}/{one.kv_heads} B{one.batch} N{one.tokens}"
    title = f"{one.mask} {shape}, {one.shown:.1%} of pairs, BlockMask made in {one.block_mask_ms:.1f} ms"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("attention")
    for way in ways:
        for heading in (f"{way} ms / TFLOPS", "mask ms", "over"):
            table.add_column(heading, justify="left" if heading == "over" else "right")
    for name in dict.fromkeys(row.attention for row in rows):
        cells = []
        for row in (row for row in rows if row.attention == name):
            if row.ms is None:
                cells += ["FAILED" if row.gate.startswith("FAILED") else "does not run", "", ""]
                continue
            over = ", ".join(f"{peer} {ratio:.2f}x" for peer, ratio in row.over.items())
            wrong = "" if row.gate == "ok" else " wrong"
            cells += [
                f"{row.ms:.3f} / {row.tflops:.0f}{wrong}",
                "" if row.mask_ms is None else f"{row.mask_ms:.2f}",
                over,
            ]
        table.add_row(name, *cells)
    return table
