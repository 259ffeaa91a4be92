"""Options that commands of the benchmarks and of the laboratory share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Recipes = Annotated[list[str] | None, typer.Option("--recipe", help="Recipe name or text; repeat for several.")]
Device = Annotated[str, typer.Option(help="cuda, or cpu to try the command out.")]
Rounds = Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")]
Commit = Annotated[str | None, typer.Option(help="Commit to record outside a git checkout.")]
Results = Annotated[Path, typer.Option("--output", help="Folder for the results file, JSON.")]
RESULTS = Path("benchmarks/results")


def check_at_least(least: int, **values: int | None) -> None:
    """Raises ValueError for an option that was given below the least."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
