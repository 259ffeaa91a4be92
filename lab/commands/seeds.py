"""`python -m lab seeds` and `python -m lab gaps`: pairs of runs of one seed, and what their differences show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from lab.commands.configs import MARGIN, ConfigFile, Jobs, Kept, Margin, Only, Seconds, Setting, load  # fmt: skip
from lab.commands.terminal import training


def seeds(
    config: ConfigFile,
    seeds: Annotated[str, typer.Option(help="Seeds, as 3-12 or 0,5,7.")],
    output: Annotated[Path | None, typer.Option(help="Folder of all runs [default: runs/NAME-seeds].")] = None,
    setting: Setting = None,
    only: Only = None,
    jobs: Jobs = 1,
    seconds: Seconds = None,
    results: Kept = None,
    margin: Margin = MARGIN,
) -> None:
    """Train a config's variants with several seeds, side by side, and print the paired gaps to the first.

    Runs that have finished are kept; the same command goes on with those that were stopped. While some have not ended
    no gap is printed: each look at a comparison counts.
    """
    chosen, numbers = load(config, setting), _seeds(seeds)
    chosen.chosen(only)  # a name that is wrong is said before the imports
    folder = output or Path("runs") / f"{chosen.name}-seeds"
    with training(f"what was trained is kept in {folder}, the same command goes on from there"):
        from lab.training import gaps as measured
        from lab.training import seeds as runs
        from lab.training.run_dir import COMPARISON
        from sagebwd.cli.terminal import console, errors

        left = runs.train(chosen, numbers, folder, only, jobs, seconds, results)
    if left:
        errors.print(f"lab: {len(left)} runs have not ended: {', '.join(left)}; the same command goes on")
    elif (folder / COMPARISON).exists():
        console.print(measured.table(measured.gaps([folder], margin=margin), margin))


def gaps(
    folders: Annotated[list[Path], typer.Argument(help="Outputs of `python -m lab compare`, one a seed, or `seeds`.")],
    noise_of: Annotated[
        list[Path] | None, typer.Option(help="More outputs, whose repeated baselines count for the noise; repeat.")
    ] = None,
    margin: Margin = MARGIN,
    in_full_precision: Annotated[
        bool, typer.Option("--in-full-precision", help="Of losses of all runs in full precision; `continue` has them.")
    ] = False,
    by_step: Annotated[
        bool, typer.Option("--by-step", help="At each evaluation, with the change since the one before.")
    ] = False,
    since: Annotated[
        int | None, typer.Option(help="Take off each pair's gap at this step, and print later evaluations.")
    ] = None,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Also where runs have not ended: a look, which counts.")
    ] = False,
) -> None:
    """Paired gaps to full precision over seeds: mean, 95% interval, and a test of equivalence within a margin.

    Runs whose kernels had faulty gradients do not count for their recipe.
    """
    from lab.training import gaps as measured
    from sagebwd.cli.terminal import console

    if not unfinished and (left := measured.left(folders)):
        raise ValueError(
            f"{len(left)} runs have not ended: {', '.join(left)}. Each look at a comparison counts: let "
            "`python -m lab seeds` go on, or say --unfinished"
        )
    if (by_step or since is not None) and noise_of:
        raise ValueError(
            "--noise-of measures the noise of losses at the end; expected no --by-step and no --since beside it"
        )
    if by_step or since is not None:
        found = measured.by_step(folders, margin, in_full_precision, since)
        console.print(measured.table_by_step(found, margin))
    else:
        console.print(measured.table(measured.gaps(folders, noise_of, margin, in_full_precision), margin))


def _seeds(text: str) -> list[int]:
    """Raises ValueError for what is no list of seeds and ranges."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise ValueError(f"seeds={text!r}: expected seeds and ranges with commas between them, as 3-12 or 0,5,7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"seeds={text!r}: {part.strip()} is empty; expected the lower seed first")
        found += range(first, last + 1)
    return found
