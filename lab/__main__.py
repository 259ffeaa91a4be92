"""The laboratory's command line: `python -m lab pretrain | compare | seeds | gaps | tokenize | continue | token-file |
assay | gaussian | trace | bench-training | figure`.

Errors that a person can mend are one line and exit code 2; Ctrl-C is exit code 130. Commands import what they need
when they run, so that `python -m lab --help` and a mistake in a config take no import of torch, and a missing extra is
named.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from sagebwd_command import command_line, stop_by_ctrl_c
from sagebwd_command import run as run_app

if __name__ == "__main__":
    stop_by_ctrl_c("lab")

try:
    import typer

    from lab.commands import assay, continued, figures, gaussian, seeds, steps
    from lab.commands.configs import ConfigFile, Folder, Only, Setting, load
    from lab.commands.terminal import training
except ImportError as error:  # pragma: no cover - exercised in a subprocess
    sys.exit(f"lab: the command line needs {error.name}; in a clone of sagebwd: pip install '.[lab]'")

app = command_line("Training runs under low-bit attention, their comparisons, and studies of errors.")


@app.command()
def pretrain(
    config: ConfigFile,
    output: Folder = None,
    setting: Setting = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest whole checkpoint.")] = False,
) -> None:
    """Pre-train a Llama (with QK-norm: a Qwen3) under one attention."""
    chosen = load(config, setting)
    run_dir = output or Path("runs") / chosen.name

    def kept() -> str:
        from lab.training.run_dir import checkpoints

        whole = checkpoints(run_dir)
        return f"{whole[-1]} is whole, go on with --resume" if whole else "no checkpoint was written yet"

    with training(kept):
        from lab.training import processes
        from lab.training.pretrain import run
        from lab.training.run_dir import RESULT
        from sagebwd.cli.terminal import console

        run(chosen, run_dir, resume)
    if processes.is_first():
        console.print(f"finished: {run_dir / RESULT}", markup=False)


@app.command()
def compare(
    config: ConfigFile,
    output: Folder = None,
    setting: Setting = None,
    only: Only = None,
    jobs: Annotated[
        int | None, typer.Option(help="Variants at once, in processes of their own, on the GPUs in turn.")
    ] = None,
) -> None:
    """Train a config's variants on the same data from the same weights, and report their losses side by side.

    Variants that have finished are kept, one that was interrupted goes on where it stopped.
    """
    chosen = load(config, setting)
    chosen.chosen(only)  # a name that is wrong is said before the imports
    folder = output or Path("runs") / chosen.name
    with training(f"what was trained is kept in {folder}, the same command goes on from there"):
        from lab.training import compare as comparison
        from lab.training import processes
        from sagebwd.cli.terminal import console

        outcomes = comparison.compare(chosen, folder, only, jobs)
    if processes.is_first():
        console.print(comparison.table(outcomes))
        console.print(f"report: {folder / 'report.html'}", markup=False)


app.command()(seeds.seeds)
app.command()(seeds.gaps)


@app.command()
def tokenize(config: ConfigFile, setting: Setting = None) -> None:
    """Make the token files of a config's data, which its runs share; they are kept if they are there."""
    chosen = load(config, setting)
    from lab.training import data
    from sagebwd.cli.terminal import console, interruptible

    with interruptible("nothing was written, token files are made whole"):
        tokens = data.load(chosen)
    counts = f"{len(tokens.train):,} training and {len(tokens.held_out):,} held-out tokens"
    console.print(
        f"{counts}, vocabulary {tokens.vocabulary:,}: {data.token_folder(chosen)}", soft_wrap=True, markup=False
    )


app.command("continue")(continued.continued)
app.command()(continued.token_file)
app.command()(assay.assay)
app.command()(gaussian.gaussian)
app.command()(figures.figure)
app.command("bench-training")(steps.bench_training)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    help="`sagebwd trace`, which then knows the tokenisers of runs too.",
)
def trace(context: typer.Context) -> None:
    """Hand the options over as they are: importing those of `sagebwd trace` takes an import of torch."""
    from lab.training.data import know_runs
    from sagebwd.cli.main import app as library

    know_runs()
    typer.main.get_command(library).main(["trace", *context.args], context.info_name, standalone_mode=False)


def main() -> None:
    """Entry point of `python -m lab`."""
    run_app(app, "lab")


if __name__ == "__main__":  # processes that it starts import this too
    main()
