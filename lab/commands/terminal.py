"""How Ctrl-C ends the commands that train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from sagebwd.cli.terminal import errors


@contextmanager
def interruptible(hint: str) -> Iterator[None]:
    """Ctrl-C as one line that says what is left; processes of one run end together."""
    from lab.training import processes

    try:
        yield
        processes.leave()
    except KeyboardInterrupt:
        if processes.is_first():
            errors.print(f"\nlab: stopped; checkpoints written so far are whole, {hint}")
        raise typer.Exit(130) from None
