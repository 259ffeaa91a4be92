"""How many calls of attention ran by which recipe and on whose kernels, in this process."""

from __future__ import annotations

import atexit
import logging
from collections import Counter
from functools import cache

# Calls by answer, such as "mixed on hopper" and `TORCH`. What torch.compile traced is not counted: a graph cannot hold
# the side effect.
counts: Counter[str] = Counter()
TORCH = "full precision on torch"


def answer(recipe: str, impl: str) -> str:
    """What a call that ran by a recipe on a choice's kernels is counted as."""
    forward, _, backward = impl.partition("/")
    return f"{recipe} on {forward if forward == backward else impl}"


def summary() -> str:
    """How many calls of this process ran where, those outside of torch.compile.

    Returns: one line, which the integrations write at the end of the process to the logger ``sagebwd``, at level INFO.
    """
    found = +counts  # without zeros
    if not found:
        return "sagebwd: no calls of attention outside of torch.compile"
    told = ", ".join(f"{count} {name}" for name, count in found.most_common())
    return f"sagebwd: calls of attention outside of torch.compile: {told}"


@cache
def log_at_exit() -> None:
    """Have `summary` logged once, when the process ends."""
    atexit.register(lambda: logging.getLogger("sagebwd").info(summary()))
