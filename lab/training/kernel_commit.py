"""Which commit a run had its kernels from, and whether those computed the gradients of its recipe.

Before `MENDED` Hopper's kernel made dV and dK of e4m3 products up to 29% too small, so its runs say nothing of a
recipe that has such products (dev/log/2026-11-23-fp32-sums.md). Until 2026-11-28 that kernel's pass for an INT8 dP
lost dK of the queries beside one without a gradient, as is the last of a sequence
(dev/log/2026-11-28-int8-dp-portable.md).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import sagebwd
from lab.training.config import FULL_PRECISION
from sagebwd.recipe import FP8, Recipe

MENDED = "2534d87"
FAULTY = ("a6a23aa", "fb3aeff", "2330368", "8d81373", "a9c0339")
"""The commits before `MENDED` that a run with e4m3 gradients names, or has by the documents."""
LOST_DK = ("2451bcf", "614c2a6")
"""The commits that a run with e4m3 gradients and an INT8 dP names, and whose kernels lost part of dK."""


def tree(folder: Path | None = None) -> str:
    """The hash that git gives a folder as it lies here, of the kernels unless named: ``git rev-parse HEAD:FOLDER``
    where nothing in it has changed, and it needs no git."""
    folder = folder or Path(sagebwd.__file__).parent / "kernels"
    entries = []
    for path in folder.iterdir():
        if path.is_dir() and path.name != "__pycache__":
            entries.append((f"{path.name}/", f"40000 {path.name}", tree(path)))
        elif path.is_file():
            content = path.read_bytes()
            digest = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            entries.append((path.name, f"100644 {path.name}", digest))
    content = b"".join(f"{entry}\0".encode() + bytes.fromhex(digest) for _, entry, digest in sorted(entries))
    return hashlib.sha1(f"tree {len(content)}\0".encode() + content).hexdigest()


def objection(recipe: str, named: str | None) -> str | None:
    """Why a run of a config's ``attention.recipe`` does not count for it, given the commit that it names.

    None where it counts. Gradients in INT8 and 16 bit were right in all commits, so their runs need no commit.
    Raises ValueError where ``recipe`` is none.
    """
    if recipe in FULL_PRECISION:
        return None
    name, _, changes = recipe.partition("(")  # whose fields this version need not have: runs stay, fields may go
    named_recipe = Recipe.named(name)
    if FP8 not in (named_recipe.dv, named_recipe.dk) and FP8 not in changes:
        return None
    if named is None:
        return "it names no commit of its kernels"
    commit = named.removesuffix("-dirty")
    if commit in FAULTY:
        return f"the kernels of {named} made its dV and dK too small"
    if commit in LOST_DK and "dp=int8" in changes:
        return f"the kernels of {named} lost dK of each sequence's last queries"
    return None
