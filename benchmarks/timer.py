"""One run from a device at rest to one at rest again, and bursts: medians of such runs behind a pause.

`sagebwd.cli.timer` has the medians of steady loads.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
BURSTS = 10
"""How often a run is timed in one round."""
PAUSE_S = 0.03
"""Before each burst: some thirty times its length, in which a GPU cools down and keeps its clock."""


def wait(device: str | torch.device) -> None:
    """Until the device has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class Fence:
    """A place in what the device was given, of which one can tell when it is reached."""

    def __init__(self, device: str | torch.device) -> None:
        self.event = None
        if torch.device(device).type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        self.seconds = time.perf_counter()  # where the host is the device

    def wait(self) -> None:
        """Until it is reached."""
        if self.event is not None:
            self.event.synchronize()

    def ms_since(self, before: Fence) -> float:
        """Between two that are reached, by the device's clock."""
        if self.event is None:
            return (self.seconds - before.seconds) * 1e3
        return before.event.elapsed_time(self.event)


def captured(run: Callable[[], object], times: int, device: str | torch.device) -> Callable[[], object]:
    """What does a run so many times, on a GPU by one CUDA graph, so that the host sets no pace.

    The run is of launches alone, on the current stream, and on memory that stays.
    """
    run()
    wait(device)
    if torch.device(device).type != "cuda":
        return lambda: [run() for _ in range(times)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph.replay


def from_rest(run: Callable[[], T], device: str | torch.device) -> tuple[T, float, float]:
    """What a run gives, ms until the device has done it, and ms until ``run`` returned."""
    wait(device)
    start = time.perf_counter()
    found = run()
    returned = time.perf_counter()
    wait(device)
    return found, (time.perf_counter() - start) * 1e3, (returned - start) * 1e3


def time_bursts(
    runs: dict[str, Callable[[], object]],
    device: str,
    rounds: int,
    tell: Callable[[float], object] = lambda done: None,
) -> dict[str, tuple[float, float]]:
    """Median ms of each run on a GPU that had nothing to do, and of its host; they take turns in every round.

    What the host takes before the first kernel counts. tell: is told the share of it that is done.
    """
    for run in runs.values():
        from_rest(run, device)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    order, draw = list(runs.items()), random.Random(0)
    for turn in range(rounds):
        draw.shuffle(order)
        for number, (name, run) in enumerate(order):
            tell((turn + number / len(runs)) / rounds)
            for _ in range(BURSTS):
                time.sleep(PAUSE_S)
                times[name].append(from_rest(run, device)[1:])
    return {name: tuple(map(statistics.median, zip(*values))) for name, values in times.items()}
