"""The timer of attention calls: interleaved rounds, whose medians are compared."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch

ROUNDS = 4
ROUND_MS = 8.0
"""How long one attention is timed in one round."""
LEAD_MS = 120.0
"""How long it runs before that on a GPU: its clock follows its power so slowly (dev/log/2026-11-23-power.md)."""
SLOW, SLOW_MS = 3.0, 1.0
"""Times the fastest's ms, and ms, from which on together a run is timed once where contenders are many."""


def _stopwatch(device: str) -> Callable[[Callable[[], object], int], tuple[float, float]]:
    """A function that runs another n times and returns ms a run, and the host's own."""

    def cuda(run: Callable[[], object], n: int) -> tuple[float, float]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # as in training, the GPU is busy with the call before: host time counts where the host is slower, not else
        run()
        start.record()
        host_ms, _ = host(run, n)
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / n, host_ms

    def host(run: Callable[[], object], n: int) -> tuple[float, float]:
        start = time.perf_counter()
        for _ in range(n):
            run()
        ms = (time.perf_counter() - start) * 1e3 / n
        return ms, ms

    return cuda if device.startswith("cuda") else host


def time_interleaved(
    runs: dict[str, Callable[[], object]], device: str, rounds: int = ROUNDS, round_ms: float = ROUND_MS,
    lead_ms: float = LEAD_MS, tell: Callable[[float], object] = lambda done: None,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Median ms of each run, and of its host, taking turns in every round, each at the clock that it brings about.

    The clock also follows the run before, so every round draws their order, the same in every call; two may be alike.

    tell: is told the share of it that is done.
    """
    measure, lead = _stopwatch(device), lead_ms / round_ms if device.startswith("cuda") else 0.0
    repeats = {}
    for number, (name, run) in enumerate(runs.items()):
        tell(number / len(runs) / (rounds + 1))
        measure(run, 2)
        repeats[name] = max(1, round(round_ms / max(measure(run, 2)[0], 1e-3)))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    order, draw = list(runs.items()), random.Random(0)
    for turn in range(rounds):
        draw.shuffle(order)
        for number, (name, run) in enumerate(order):
            tell((turn + 1 + number / len(runs)) / (rounds + 1))
            if lead:
                measure(run, round(lead * repeats[name]))
            times[name].append(measure(run, repeats[name]))
    return {name: tuple(map(statistics.median, zip(*values))) for name, values in times.items()}


def time_contenders(
    runs: dict[str, Callable[[], object]], device: str, rounds: int, round_ms: float, lead_ms: float,
    always: str | None = None,
) -> dict[str, tuple[float, float | None]]:  # fmt: skip
    """As `time_interleaved`. Those that are `SLOW` run twice alone, and have no host's ms.

    always: who is never one of them.
    """
    alone = {name: _alone(run, device) for name, run in runs.items()}
    slow = max(SLOW_MS, SLOW * min(alone.values(), default=0.0))
    fast = {name: run for name, run in runs.items() if name == always or alone[name] <= slow}
    return time_interleaved(fast, device, rounds, round_ms, lead_ms) | {
        name: (ms, None) for name, ms in alone.items() if name not in fast
    }


def _alone(run: Callable[[], object], device: str) -> float:
    """Ms of one run, the shorter of two: the first may plan, or load its kernels."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    found = []
    for _ in range(2):
        wait()
        start = time.perf_counter()
        run()
        wait()
        found.append((time.perf_counter() - start) * 1e3)
    return min(found)
