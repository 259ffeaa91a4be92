"""The laboratory's command line: `python -m lab pretrain | compare | seeds | gaps | tokenize | continue | token-file |
finetune | task | gaussian | trace | bench-training | figure`.

Errors that a person can mend are one line and exit code 2; Ctrl-C is exit code 130. Commands import what they need
when they run, so that `python -m lab --help` is quick and a missing extra is named.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated

try:
    import typer

    from lab.commands import continued, figures, finetune, seeds, steps
    from lab.commands import gaussian as random_inputs
    from lab.commands.terminal import interruptible
    from sagebwd.cli import trace as cli_trace
    from sagebwd.cli.terminal import command_line, console, quiet
    from sagebwd.cli.terminal import run as run_app
except ImportError as error:  # pragma: no cover - exercised in a subprocess
    sys.exit(f"lab: the command line needs {error.name}; in a clone of sagebwd: pip install '.[lab]'")

app = command_line("Training runs under low-bit attention, their comparisons, and studies of errors.")


@app.command()
def pretrain(
    config: Annotated[Path, typer.Option(help="YAML file; those in configs/ are examples.")],
    output: Annotated[Path | None, typer.Option(help="Folder of the run [default: runs/NAME].")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeat for several.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest whole checkpoint.")] = False,
) -> None:
    """Pre-train a Llama (with QK-norm: a Qwen3) under one attention."""
    from lab.commands.configs import load

    chosen = load(config, setting)
    quiet()
    from lab.training.pretrain import run
    from lab.training.processes import is_first
    from lab.training.run_dir import RESULT

    run_dir = output or Path("runs") / chosen.name
    with interruptible("go on with --resume"):
        run(chosen, run_dir, resume)
    if is_first():
        console.print(f"finished: {run_dir / RESULT}")


@app.command()
def compare(
    config: Annotated[Path, typer.Option(help="YAML file with variants.")],
    output: Annotated[Path | None, typer.Option(help="Folder of the comparison [default: runs/NAME].")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeat for several.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run these variants alone; repeat for several.")] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Variants at once, in processes of their own, on the GPUs in turn.")
    ] = None,
) -> None:
    """Train a config's variants on the same data from the same weights, and report their losses side by side.

    Variants that have finished are kept, one that was interrupted goes on where it stopped.
    """
    from lab.commands.configs import load

    chosen = load(config, setting)
    quiet()
    from lab.training import compare as comparison
    from lab.training.processes import is_first

    folder = output or Path("runs") / chosen.name
    with interruptible("the same command goes on from there"):
        outcomes = comparison.compare(chosen, folder, only, jobs)
    if is_first():
        console.print(comparison.table(outcomes))
        console.print(f"report: {folder / 'report.html'}")


app.command()(seeds.seeds)
app.command()(seeds.gaps)


@app.command()
def tokenize(
    config: Annotated[Path, typer.Option(help="YAML file of a training run.")],
    setting: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeat for several.")] = None,
) -> None:
    """Make the token files of a config's data, which its runs share; they are kept if they are there."""
    from lab.commands.configs import load

    chosen = load(config, setting)
    from lab.training import data

    tokens = data.load(chosen)
    counts = f"{len(tokens.train):,} training and {len(tokens.held_out):,} held-out tokens"
    console.print(f"{counts}, vocabulary {tokens.vocabulary:,}: {data.token_folder(chosen)}", soft_wrap=True)


app.command("continue")(continued.continued)
app.command()(continued.token_file)
app.command()(finetune.finetune)
app.command()(finetune.task)
app.command()(random_inputs.gaussian)
app.command()(figures.figure)
app.command("bench-training")(steps.bench_training)


@app.command()
@functools.wraps(cli_trace.trace)
def trace(**options: object) -> None:
    """`sagebwd trace`, which then knows the tokenisers of runs too."""
    from lab.training.data import know_runs

    know_runs()
    cli_trace.trace(**options)


def main() -> None:
    """Entry point of `python -m lab`."""
    run_app(app, "lab")


if __name__ == "__main__":  # processes that it starts import this too
    main()
