"""The command line: `sagebwd doctor | trace | estimate | --version`.

Commands import what they need when they run, so that `sagebwd --help` is quick and a missing extra is named.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from sagebwd.extras import extra

try:
    with extra("cli"):
        import typer
        from rich.markup import escape

    from sagebwd.cli import trace as cli_trace
    from sagebwd.cli.terminal import console, progress
except ImportError as error:  # pragma: no cover - exercised in a subprocess
    sys.exit(f"sagebwd: the command line: {error}")

from sagebwd.version import __version__
from sagebwd_command import command_line, run

app = command_line("Trainable low-bit attention.")


def _version(wanted: bool) -> None:
    if wanted:
        console.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Trainable low-bit attention."""


app.command()(cli_trace.trace)


@app.command()
def doctor(
    head_dim: Annotated[
        list[str] | None,
        typer.Option(help="Of the call; 192/128 where value's is 128 [default: 128]. With --measure repeat."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    recipe: Annotated[str, typer.Option(help="Recipe name or text; auto is what a call without one takes.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cuda or cpu [default: cuda where there is one].")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time this GPU, for a few minutes, for auto to go by.")
    ] = False,
    kind: Annotated[
        list[str] | None, typer.Option(help="With --measure: causal, full, packed, window, padding or mask; repeat.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="With --measure: also write JSON to this folder.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="With --measure: also write this JSON, of a card that was not tried, to send.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record outside a git checkout.")] = None,
) -> None:
    """What runs here and why, and a self-test. Exit code 1 where no kernel runs what one could."""
    import torch

    from sagebwd.call import Ask
    from sagebwd.cli import doctor as examination
    from sagebwd.cli import measure as benchmark
    from sagebwd.cli import timings
    from sagebwd.cli.hardware import check_device
    from sagebwd.kernels.capabilities import MAX_HEAD_DIM
    from sagebwd.kernels.families import REFERENCE
    from sagebwd.recipe import AUTO

    parsed_dtype = cli_trace.dtype_of(dtype)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    if measure:
        cases = benchmark.cases(kind or benchmark.KINDS, head_dim or benchmark.MEASURED_WIDTHS)
        if not device.startswith("cuda"):
            raise ValueError(
                f"--measure times a GPU, got device {device}; without a GPU recipe 'auto' runs torch's attention"
            )
        timings.measure(device, cases, output, commit, report)
        return
    if kind or output or report or commit or len(head_dim or ()) > 1:
        raise ValueError("--kind, --output, --report, --commit and several --head-dim belong to --measure; add it")
    width = (head_dim or ["128"])[0]
    call = device, parsed_dtype, benchmark.pair_of(width)
    for name, value in examination.facts().items():
        console.print(f"{name:20} {value}", highlight=False, markup=False)
    if recipe == AUTO and max(call[2]) > MAX_HEAD_DIM:
        console.print("Recipe auto runs torch's own attention at this head_dim, in full precision.")
        return
    parsed = examination.recipe_of(*call, recipe)
    named = f"{recipe}, which is {parsed} here," if recipe == AUTO else f"{parsed},"
    console.print(f"\nA call with head_dim {width}, {dtype}, recipe {named} on {device}:")
    found = examination.answers(*call, parsed)
    if recipe == AUTO and not device.startswith("cuda"):
        console.print("  torch        [green]runs it[/green]: recipe auto hands it every call without a GPU")
        named = "takes the call where a recipe is named"
        found = [replace(answer, chosen=False, reason=named) if answer.chosen else answer for answer in found]
    for answer in found:
        mark = "[green]runs it[/green]" if answer.chosen else "[dim]could[/dim]" if answer.takes else "[red]no[/red]"
        console.print(f"  {answer.impl:12} {mark}: {escape(answer.reason)}", highlight=False)
    if device.startswith("cuda") and recipe == AUTO:
        timings.show(Ask(AUTO, *call[2], parsed_dtype, torch.device(device)))
    if not any(answer.takes for answer in found):
        console.print("No implementation takes this call: it is refused.")
        raise typer.Exit(1)
    with progress() as tell:
        tell("self-test")
        error = examination.self_test(*call, parsed)
    passed = error < 0.03
    console.print(f"self-test {'PASS' if passed else 'FAIL'}: relative L2 to the reference at most {error:.4f}")
    if not passed:
        raise typer.Exit(1)
    if not any(answer.chosen and answer.impl != REFERENCE.name for answer in found):
        who = "recipe auto runs torch's own attention, and a named one" if recipe == AUTO else "calls run"
        console.print(f"No kernel runs here: {who} the reference, which is right and slow.")
        raise typer.Exit(1)


@app.command()
def estimate(
    hidden: Annotated[int, typer.Option(help="Width of the model.")],
    layers: Annotated[int, typer.Option(help="Of the model.")],
    heads: Annotated[int, typer.Option(help="Of queries.")],
    head_dim: Annotated[int, typer.Option(help="Of queries, keys and values.")],
    tokens: Annotated[int, typer.Option(help="Of a sequence, causal.")],
    kv_heads: Annotated[int | None, typer.Option(help="Of keys and values [default: as of queries].")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences of a step [default: 32768 tokens].")] = None,
    intermediate: Annotated[int | None, typer.Option(help="The MLP's inside [default: 3.5 times the width].")] = None,
    vocabulary: Annotated[int, typer.Option(help="Token ids.")] = 128256,
    gpu: Annotated[str, typer.Option(help="A card that this project has timed.")] = "H200",
) -> None:
    """About what a training step of a decoder gains on a GPU that need not be here; nothing runs."""
    from sagebwd.cli import estimate as of_steps

    found = of_steps.estimate(
        gpu, hidden=hidden, layers=layers, heads=heads, kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim, tokens=tokens, batch=batch, intermediate=intermediate, vocabulary=vocabulary,
    )  # fmt: skip
    console.print("\n".join(of_steps.lines(found)), highlight=False)


def main() -> None:
    """Run the command line in a process that has imported it; `sagebwd_command.main` is the entry point."""
    run(app, "sagebwd")


if __name__ == "__main__":
    main()
