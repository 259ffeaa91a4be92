"""`python -m lab continue` and `python -m lab token-file`: a trained model, trained on under several attentions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands import check_at_least, loading
from lab.commands.configs import MARGIN, ConfigFile, Folder, Jobs, Kept, Margin, Seconds, Setting, load
from lab.commands.terminal import training
from lab.training.continued.config import Continued


def continued(
    config: ConfigFile,
    output: Folder = None,
    setting: Setting = None,
    jobs: Jobs = 1,
    seconds: Seconds = None,
    results: Kept = None,
    margin: Margin = MARGIN,
) -> None:
    """Train a model on, in pairs of one seed under several attentions and learning rates, and print the paired gaps.

    Runs that have finished are kept; the same command trains the others, from their beginning.
    """
    chosen = load(config, setting, Continued)
    folder = output or Path("runs") / chosen.name
    with training(f"runs that have ended are kept in {folder}, the same command goes on with the others"):
        from lab.training import gaps as measured
        from lab.training.continued import comparison
        from lab.training.run_dir import COMPARISON
        from sagebwd.cli.terminal import console, errors

        left = comparison.train(chosen, folder, jobs, seconds, results)
    if left:
        errors.print(f"lab: {len(left)} runs have not ended: {', '.join(left)}; the same command goes on")
    for compared in sorted(folder.glob(f"lr-*/{COMPARISON}")):
        for exact in (False, True):
            where = "in full precision" if exact else "by each run's own attention"
            console.print(f"\n{compared.parent.name}, evaluated {where}", markup=False)
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
    check_at_least(1, tokens=most)
    from sagebwd.cli.outputs import check_files
    from sagebwd.cli.terminal import console, progress, quiet

    quiet()
    check_files({"OUTPUT": output}, {"MODEL": model, "TEXT": Path(text)})
    with loading("transformers"):
        from lab.training.continued import tokens
    with progress() as tell:
        count = tokens.write(model, text, output, most, tell)
    console.print(f"{output}: {count:,} tokens", markup=False)
