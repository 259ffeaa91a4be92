"""What the processes of one pytest run leave each other, such as what one of them has compiled."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def folder() -> Path | None:
    """Where the processes of this run leave each other files; None in a run of one process, which shares nothing."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return None
    made = Path(tempfile.gettempdir()) / f"sagebwd-tests-{run}"
    made.mkdir(exist_ok=True)
    return made


def made_once(what: str, make: Callable[[Path], None], copy: Path) -> Path:
    """A file of which ``what`` says all that it is made of, which ``make`` writes where no process of this run has.

    copy: the file's path in a run of one process, which shares nothing.
    """
    common = folder()
    if common is None:
        make(copy)
        return copy
    path = common / hashlib.sha256(what.encode()).hexdigest()
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        make(unfinished)
        unfinished.rename(path)
    return path
