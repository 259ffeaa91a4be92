"""One run from a device at rest to one at rest again; `sagebwd.cli.timer` has medians of runs that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def wait(device: str | torch.device) -> None:
    """Until the device has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def from_rest(run: Callable[[], T], device: str | torch.device) -> tuple[T, float, float]:
    """What a run gives, ms until the device has done it, and ms until ``run`` returned."""
    wait(device)
    start = time.perf_counter()
    found = run()
    returned = time.perf_counter()
    wait(device)
    return found, (time.perf_counter() - start) * 1e3, (returned - start) * 1e3
