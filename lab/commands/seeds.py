"""`python -m lab seeds` and `python -m lab gaps`: pairs of runs of one seed, and what their differences show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from lab.commands.terminal import interruptible
from sagebwd.cli.terminal import console, errors, quiet

MARGIN_BY_DEFAULT = 0.02  # `lab.training.gaps.MARGIN`, which takes torch to import
MARGIN = typer.Option(help="Nats a token within which two attentions count as equivalent.")
# Of commands that train many runs.
JOBS = typer.Option(help="Runs at once, in processes of their own, on the GPUs in turn.")
SECONDS = typer.Option(help="Stop after so long; what has ended counts.")
RESULTS = typer.Option(help="Folder for comparison.json and runs.jsonl.xz, written after each run.")


def seeds(
    config: Annotated[Path, typer.Option(help="YAML file with variants.")],
    seeds: Annotated[str, typer.Option(help="Seeds, as 3-12 or 0,5,7.")],
    output: Annotated[Path | None, typer.Option(help="Folder of all runs [default: runs/NAME-seeds].")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="section.key=value; repeat for several.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="These variants alone; repeat for several.")] = None,
    jobs: Annotated[int, JOBS] = 1,
    seconds: Annotated[float | None, SECONDS] = None,
    results: Annotated[Path | None, RESULTS] = None,
    margin: Annotated[float, MARGIN] = MARGIN_BY_DEFAULT,
) -> None:
    """Train a config's variants with several seeds, side by side, and print the paired gaps to the first.

    Runs that have finished are kept; the same command goes on with those that were stopped.
    """
    from lab.commands.configs import load

    chosen = load(config, setting)
    quiet()
    from lab.training import gaps as measured
    from lab.training import seeds as training
    from lab.training.run_dir import COMPARISON

    folder = output or Path("runs") / f"{chosen.name}-seeds"
    with interruptible("the same command goes on from there"):
        left = training.train(chosen, _seeds(seeds), folder, only, jobs, seconds, results)
    if left:
        errors.print(f"lab: {len(left)} runs have not ended: {', '.join(left)}; the same command goes on")
    if (folder / COMPARISON).exists():
        console.print(measured.table(measured.gaps([folder], margin=margin), margin))


def gaps(
    folders: Annotated[list[Path], typer.Argument(help="Outputs of `python -m lab compare`, one a seed, or `seeds`.")],
    noise_of: Annotated[
        list[Path] | None, typer.Option(help="More outputs, whose repeated baselines count for the noise; repeat.")
    ] = None,
    margin: Annotated[float, MARGIN] = MARGIN_BY_DEFAULT,
    in_full_precision: Annotated[
        bool, typer.Option("--in-full-precision", help="Of losses of all runs in full precision; `continue` has them.")
    ] = False,
    by_step: Annotated[
        bool, typer.Option("--by-step", help="At each evaluation, with the change since the one before.")
    ] = False,
    since: Annotated[
        int | None, typer.Option(help="Take off each pair's gap at this step, and print later evaluations.")
    ] = None,
) -> None:
    """Paired gaps to full precision over seeds: mean, 95% interval, and a test of equivalence within a margin.

    Runs whose kernels had faulty gradients do not count for their recipe.
    """
    from lab.training import gaps as measured

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
        first = int(match[1])
        found += range(first, int(match[2] or first) + 1)
    return found
