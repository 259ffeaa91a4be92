"""The terminal that commands print to: progress, errors, and how Ctrl-C ends them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

# Without a standard output, as under `>&-`, there is nothing to ask.
WIDTH = None if sys.stdout is not None and sys.stdout.isatty() else 140
console = Console(width=WIDTH)
errors = Console(stderr=True, width=WIDTH)


class Progress:
    """Says what runs, how long the whole has run, and about how long what is left takes; every: seconds between two
    lines, at least."""

    def __init__(
        self, show: Callable[[str], object], every: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.show, self.every, self.clock = show, every, clock
        self.began, self.shown = clock(), -float("inf")

    def __call__(self, text: str, done: float = 0.0) -> None:
        """A step begins. done: the share of the whole that is done before it, from 0 to 1; 0 gives no estimate."""
        now = self.clock()
        if now - self.shown < self.every:
            return
        self.shown, spent = now, now - self.began
        left = f", about {duration(spent / done * (1 - done))} left" if done > 0 else ""
        self.show(f"{duration(spent)}{left}: {text}")


def duration(seconds: float) -> str:
    """Seconds as a person reads them: "42 s", "7 min", "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


@contextmanager
def progress(kept: str | Callable[[], str] = "nothing was written") -> Iterator[Progress]:
    """`Progress` on one line that changes on a terminal; elsewhere, as in a log, on lines of standard error.

    kept: as of `interruptible`.
    """
    with interruptible(kept):
        if console.is_terminal:
            with console.status("starting") as status:
                yield Progress(lambda text: status.update(text.replace("[", r"\[")))
        else:
            silent = console.quiet
            yield Progress(
                lambda text: None if silent else errors.print(text, markup=False, highlight=False), every=1.0
            )


@contextmanager
def interruptible(kept: str | Callable[[], str]) -> Iterator[None]:
    """Ctrl-C as one line that says what is kept, and exit code 130; of several processes the first one says it."""
    try:
        yield
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            text = kept if isinstance(kept, str) else kept()
            errors.print(f"\nstopped: {text}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(130) from None


def quiet() -> None:
    """Libraries' advice to programmers is noise to a person who trains."""
    import logging
    import warnings

    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
