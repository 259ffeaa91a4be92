"""What the command lines of a clone, `python -m benchmarks` and `python -m lab`, share: options, and how errors end.

It imports neither torch nor the package, which imports torch: a mistake in a config is told before that takes seconds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

Recipes = Annotated[list[str] | None, typer.Option("--recipe", help="Recipe name or text; repeat for several.")]
Device = Annotated[str, typer.Option(help="cuda, or cpu to try the command out.")]
Rounds = Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")]
Commit = Annotated[str | None, typer.Option(help="Commit to record outside a git checkout.")]
Results = Annotated[Path, typer.Option("--output", help="Folder for the results file, JSON.")]
RESULTS = Path("benchmarks/results")


def command_line(text: str) -> typer.Typer:
    """A command line without commands yet; text, its help."""
    return typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",  # rich's own drops what is in brackets
        help=text,
    )


def run(app: typer.Typer, name: str) -> None:
    """Run a command line: an error that a person can mend is one line, which begins with ``name``, and exit code 2."""
    try:
        app()
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        # settings are wrong in all processes of a run alike
        if os.environ.get("LOCAL_RANK", "0") == "0" or isinstance(error, OSError):
            typer.secho(f"{name}: {error}", fg="red", err=True)
        sys.exit(2)


def check_at_least(least: int, **values: int | None) -> None:
    """Raises ValueError for an option that was given below the least."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
