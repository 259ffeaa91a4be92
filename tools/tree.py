"""Which code runs here, by its files: what a result of earlier must have been of, to count as one of now."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def digest(*folders: str, root: Path = ROOT) -> str:
    """Of all Python files under some folders of the repository; their names and what is in them, committed or not."""
    total = hashlib.sha1()
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        total.update(f"{path.relative_to(root)}\n".encode() + hashlib.sha1(path.read_bytes()).digest())
    return total.hexdigest()[:12]
