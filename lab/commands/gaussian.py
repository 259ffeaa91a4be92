"""`python -m lab gaussian`: error of recipes on random inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.commands import Device, Recipes


def gaussian(
    recipe: Recipes = None,
    sigma: Annotated[
        list[float] | None, typer.Option(help="Standard deviation of Q and K; repeat for several.")
    ] = None,
    kind: Annotated[
        str, typer.Option(help="Inputs: plain (the paper's Table 1), bias-and-sink or sink (docs/sinks.md).")
    ] = "plain",
    tokens: Annotated[int | None, typer.Option(help="Tokens [default: 4096 for plain, else 2048].")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Head dimension [default: 128 for plain, else 64].")] = None,
    seeds: Annotated[int | None, typer.Option(help="Draws to average [default: 1 for plain, else 8].")] = None,
    causal: Annotated[bool, typer.Option(help="Mask the future.")] = False,
    impl: Annotated[str, typer.Option(help="reference (the emulator) or a kernel family.")] = "reference",
    device: Device = "cpu",
    place: Annotated[int, typer.Option(help="Which key is the sink of kind sink.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Also write the rows as JSON to this file.")] = None,
) -> None:
    """Error of recipes on random inputs, next to the paper's Table 1."""
    from lab.studies import gaussian as study
    from sagebwd.cli.hardware import check_device
    from sagebwd.cli.outputs import check_files
    from sagebwd.cli.terminal import console, progress
    from sagebwd.dispatch import check_known
    from sagebwd.environment import write_whole

    check_device(device)
    check_known(impl)
    check_files({"--output": output})
    plain, biased = kind == "plain", kind == "bias-and-sink"
    recipes = recipe or ([*study.BIAS_AND_SINK, "token"] if biased else ["paper", "token", "mixed"])
    sigmas = sigma or (list(study.PAPER_TABLE_1) if plain else [1.0, 3.0])
    with progress() as tell:
        rows = study.measure(
            recipes, sigmas, kind=kind, tokens=_or(tokens, 4096 if plain else 2048),
            head_dim=_or(head_dim, 128 if plain else 64), seeds=_or(seeds, 1 if plain else 8), is_causal=causal,
            impl=impl, device=device, place=place, progress=tell,
        )  # fmt: skip
    published = "first simulation" if biased else "published"
    table = Table(title=f"{kind} inputs: cosine / relative L2 against FP64; in grey the {published} figures")
    table.add_column("sigma_QK", justify="right")
    table.add_column("recipe")
    for name in study.TENSORS:
        table.add_column(name)
    by_line: dict[tuple[float, str], dict[str, study.Row]] = {}
    for row in rows:
        by_line.setdefault((row.sigma, row.recipe), {})[row.tensor] = row
    for (line_sigma, name), cells in by_line.items():
        ours = [f"{cells[t].cosine:.4f} / {cells[t].relative_l2:.4f}" for t in study.TENSORS]
        table.add_row(f"{line_sigma:g}", name, *ours)
        theirs = [_published(cells[t].expected_cosine, cells[t].expected_l2) for t in study.TENSORS]
        if any(theirs):
            table.add_row("", f"  [dim]{published}[/dim]", *(f"[dim]{cell}[/dim]" for cell in theirs))
    if output is not None:  # before the table: whoever reads it may go away
        write_whole(output, json.dumps([row.as_dict() for row in rows], indent=1) + "\n")
    console.print(table)
    if output is not None:
        console.print(f"wrote {output}", markup=False)


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _published(cosine: float | None, relative_l2: float | None) -> str:
    if relative_l2 is None:
        return ""
    return f"{relative_l2:.4f}" if cosine is None else f"{cosine:.4f} / {relative_l2:.4f}"
