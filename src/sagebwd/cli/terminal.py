"""The terminal that commands print to, and how their errors end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

WIDTH = None if sys.stdout.isatty() else 140
console = Console(width=WIDTH)
errors = Console(stderr=True, width=WIDTH)


@contextmanager
def progress() -> Iterator[Callable[[str], object]]:
    """Says what runs: one line that changes on a terminal; elsewhere, as in a log, lines on standard error."""
    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update
    else:
        yield lambda text: None if console.quiet else errors.print(text, markup=False, highlight=False)


def quiet() -> None:
    """Libraries' advice to programmers is noise to a person who trains."""
    import logging
    import warnings

    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


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
            errors.print(f"{name}: {error}", style="red", highlight=False, markup=False)
        sys.exit(2)
