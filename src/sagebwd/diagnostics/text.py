"""Text files, compressed or not."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

SAMPLE_TEXT = Path(__file__).with_name("sample.txt")


def open_text(path: Path) -> TextIO:
    """A text file for reading; .xz is unpacked."""
    return lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8")


def read_text(path: str | Path | None) -> str:
    """The content of a text file; of `SAMPLE_TEXT` for None.

    Raises ValueError, which names it, for one that is damaged or empty.
    """
    path = Path(path or SAMPLE_TEXT)
    with readable(f"text={str(path)!r}"), open_text(path) as file:
        text = file.read()
    if not text:
        raise ValueError(f"text={str(path)!r}: it is empty")
    return text


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Where a text file is read: no UTF-8, or what cannot be unpacked, is a ValueError that begins with a name."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name}: not UTF-8 (byte {error.object[error.start]:#04x}); convert it with: iconv -t utf-8"
        ) from None
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{name}: broken or cut-off archive ({error})") from None
