"""`python -m lab continue` and `python -m lab token-file`: a trained model, trained on under several attentions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lab.commands.seeds import JOBS, MARGIN, MARGIN_BY_DEFAULT, RESULTS, SECONDS
from lab.commands.terminal import interruptible
from sagebwd.cli.terminal import console, errors, quiet


def continued(
    config: Annotated[Path, typer.Option(help="YAML file; those in configs/continued/ are examples.")],
    output: Annotated[Path | None, typer.Option(help="Folder of all runs [default: runs/NAME].")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeat for several.")] = None,
    jobs: Annotated[int, JOBS] = 1,
    seconds: Annotated[float | None, SECONDS] = None,
    results: Annotated[Path | None, RESULTS] = None,
    margin: Annotated[float, MARGIN] = MARGIN_BY_DEFAULT,
) -> None:
    """Train a model on, in pairs of one seed under several attentions and learning rates, and print the paired gaps.

    Runs that have finished are kept; the same command trains the others, from their beginning.
    """
    from lab.commands.configs import load
    from lab.training.continued.config import Continued

    chosen = load(config, setting, Continued)
    quiet()
    from lab.training import gaps as measured
    from lab.training.continued import comparison
    from lab.training.run_dir import COMPARISON

    folder = output or Path("runs") / chosen.name
    with interruptible("the same command goes on with the others"):
        left = comparison.train(chosen, folder, jobs, seconds, results)
    if left:
        errors.print(f"lab: {len(left)} runs have not ended: {', '.join(left)}; the same command goes on")
    for compared in sorted(folder.glob(f"lr-*/{COMPARISON}")):
        for exact in (False, True):
            where = "in full precision" if exact else "by each run's own attention"
            console.print(f"\n{compared.parent.name}, evaluated {where}")
            try:
                console.print(measured.table(measured.gaps([compared.parent], None, margin, exact), margin))
            except ValueError as error:  # no baseline has ended, so far or at this learning rate
                errors.print(f"lab: {error}")


def token_file(
    model: Annotated[Path, typer.Argument(help="Folder or GGUF file of a model with its tokeniser.")],
    text: Annotated[str, typer.Argument(help="Text, as a training config's data.source.")],
    output: Annotated[Path, typer.Argument(help="File of the token ids, .npy.")],
    most: Annotated[int | None, typer.Option("--tokens", help="Leave out what comes after so many.")] = None,
) -> None:
    """Write the token ids of a text by a trained model's own tokeniser, for `python -m lab continue`."""
    quiet()
    from lab.training.continued import tokens

    with console.status("tokenising"):
        count = tokens.write(model, text, output, most)
    console.print(f"{output}: {count:,} tokens")
