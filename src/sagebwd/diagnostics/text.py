"""Text files, compressed or not."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import TextIO

SAMPLE_TEXT = Path(__file__).with_name("sample.txt")


def open_text(path: Path) -> TextIO:
    """A text file for reading; .xz and .zst, which needs zstandard, are unpacked."""
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".zst":
        import zstandard

        return zstandard.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def read_text(path: str | Path | None) -> str:
    """The content of a text file; of `SAMPLE_TEXT` for None."""
    with open_text(Path(path or SAMPLE_TEXT)) as file:
        return file.read()
