"""Read the committed results files."""

import json
from functools import cache
from pathlib import Path

from sagebwd.diagnostics.text import open_text

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "docs" / "results"
BENCHMARKS = ROOT / "benchmarks" / "results"
TENSORS = ("o", "dq", "dk", "dv")
RECIPES = ("mixed", "token", "paper")
PEERS = {"fa4": "FlashAttention-4", "fa3": "FlashAttention-3", "cudnn": "cuDNN"}
"""Kernels in BF16, by their names in rows."""


def load(path: Path) -> dict | list:
    """The content of a JSON file, compressed by xz or not."""
    with open_text(path) as file:
        return json.load(file)


@cache
def rows_of(name: str) -> list[dict]:
    """Rows of a file of benchmarks/results."""
    return load(BENCHMARKS / f"{name}.json")["rows"]
