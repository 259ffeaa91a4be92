"""The file of `sagebwd doctor --measure --report FILE`, for docs/support.md: it has no name of a host or a user."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from sagebwd.cli import doctor
from sagebwd.cli.measure import pair_of
from sagebwd.environment import write_whole
from sagebwd.recipe import Recipe
from sagebwd.version import __version__

TESTED = tuple((recipe, width) for recipe in ("token", "token(dp=int8)", "paper", "mixed") for width in ("64", "128"))
"""Recipes and head_dims of the self-tests."""


def self_tests(device: str, tell: Callable[..., object] = lambda *_: None) -> list[dict[str, object]]:
    """A row a recipe and head_dim: the largest relative L2 distance to the reference, or why it does not run."""
    rows = []
    for recipe, width in TESTED:
        tell(f"self-test of {recipe}, head_dim {width}")
        call = device, torch.bfloat16, pair_of(width)
        row: dict[str, object] = {"recipe": recipe, "head_dim": width, "impl": None, "error": None, "refused": None}
        parsed = Recipe.parse(recipe)
        found = [answer.impl for answer in doctor.answers(*call, parsed) if answer.chosen]
        try:
            row |= {"error": doctor.self_test(*call, parsed), "impl": next(iter(found), None)}
        except Exception as error:  # what a card that was not tried does is what the row is for
            row["refused"] = f"{type(error).__name__}: {error}"
        rows.append(row)
    return rows


def write(path: Path, facts: dict[str, object], device: str, tests: list[dict], rows: list[dict]) -> None:
    """Write the report whole: facts, of `sagebwd.cli.results.environment`; rows, of the timings."""
    numbers = torch.cuda.get_device_capability(device) if device.startswith("cuda") else None
    capability = numbers and ".".join(map(str, numbers))  # as NVIDIA writes it
    content = {**facts, "sagebwd": __version__, "capability": capability, "self_tests": tests, "rows": rows}
    write_whole(path, json.dumps(content, indent=1) + "\n")
