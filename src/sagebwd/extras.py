"""Imports of what an optional extra of sagebwd brings. Imports nothing itself, so that it is there whatever is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Around imports: where a package is missing, or too old for what is imported, the error says whose extra it is.

    Args: name, of ``[project.optional-dependencies]`` in pyproject.toml.
    """
    try:
        yield
    except ImportError as error:
        raise type(error)(
            f"{error} (sagebwd's extra {name!r} brings it; in a clone of sagebwd: pip install '.[{name}]')",
            name=error.name,
            path=error.path,
        ) from error
