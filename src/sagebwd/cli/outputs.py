"""What a command is to write, looked at before it computes: a path that cannot be written costs nothing then."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from sagebwd.environment import make


def check_files(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | None] | None = None) -> None:
    """Raises ValueError for a file that cannot be written, or that would take the place of an input or another output,
    or be a part of an input that is a folder.

    Args: outputs and inputs, by option; None for one that is not given. The folder of an output is made.
    """
    given = {name: path for name, path in outputs.items() if path is not None}
    others = {name: path for name, path in (inputs or {}).items() if path is not None}
    for name, path in given.items():
        for other, its in others.items():
            if _is_same(path, its):
                raise ValueError(f"{name} {path} would be written over {other} {its}; give another file")
            if its.is_dir() and _is_inside(path, its):  # a model is all files of its folder
                raise ValueError(f"{name} {path} would be written into {other} {its}; give a file elsewhere")
        others[name] = path
        if path.is_dir():
            raise ValueError(f"{name} {path} is a folder; give a file")
        if path.exists() and not os.access(path, os.W_OK):
            raise ValueError(f"{name} {path} cannot be written: it is write-protected; give another file")
        if path.is_file() or not path.exists():  # what is no file, as a pipe, is written to as it is
            check_folder(name, Path(os.path.realpath(path)).parent)


def check_folder(name: str, folder: Path | None) -> None:
    """Make a folder that files are to be written into. Raises ValueError where it cannot be made or written."""
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{name}: {folder} is no folder; give another")
    try:
        make(folder)
    except OSError as error:
        raise ValueError(
            f"{name}: {folder} cannot be written ({type(error).__name__}: {error.strerror}); give another"
        ) from None


def _is_same(path: Path, other: Path) -> bool:
    if path.exists() and other.exists():
        return path.samefile(other)
    return os.path.realpath(path) == os.path.realpath(other)


def _is_inside(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents
