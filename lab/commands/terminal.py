"""How the commands that train begin and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.commands import loading


@contextmanager
def training(kept: str | Callable[[], str]) -> Iterator[None]:
    """Says that libraries are loaded, which takes seconds; Ctrl-C is one line that says what is kept, and exit code
    130; processes of one run end together."""
    from sagebwd.cli.terminal import interruptible, quiet

    quiet()
    with interruptible(kept):
        with loading("transformers"):
            from lab.training import pretrain, processes  # noqa: F401
        yield
        processes.leave()
