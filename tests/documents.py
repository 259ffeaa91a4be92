"""Where pages are, and their text."""

from pathlib import Path

ROOT = Path(__file__).parent.parent


def text_of(path: Path) -> str:
    """A page's text."""
    return path.read_text(encoding="utf-8")
