"""The terminal that commands print to, and how Ctrl-C ends them."""

from __future__ import annotations

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


@contextmanager
def interruptible(hint: str) -> Iterator[None]:
    """Ctrl-C as one line that says what is left; processes of one run end together."""
    from sagebwd.training import processes

    try:
        yield
        processes.leave()
    except KeyboardInterrupt:
        if processes.is_first():
            errors.print(f"\nsagebwd: stopped; checkpoints written so far are whole, {hint}")
        raise typer.Exit(130) from None


def quiet() -> None:
    """Libraries' advice to programmers is noise to a person who trains."""
    import logging
    import warnings

    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
