"""Energy of attention calls under a steady load, with time, power, clock and temperature, beside the BF16 kernels'.

At its power limit a GPU's clock follows the energy that a call takes (dev/log/2026-11-23-power.md), so joules say what
milliseconds of a short run do not. A call repeats until the clock has settled, then its power is read from the GPU's
counter between two of its updates, and the energy of a call is this power times the milliseconds of one. A thread of
its own reads, and how much longer a call takes meanwhile than just before is part of the result. Power at rest is read
before and after a shape. Contenders take turns in rounds, whose spread stands beside the median.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.attention import BASELINE, CALL, Key, call_of, checked
from benchmarks.baselines import DOES_NOT_RUN, Attention
from benchmarks.meter import Meter, at_rest, power_of, watched
from benchmarks.shapes import Shape
from benchmarks.timer import Fence, from_rest, wait

BOTH = "fwd+bwd"
DIRECTIONS = ("fwd", BOTH)
"""Forward by itself, and a forward with its backward, one after the other as in training."""
CHUNK_MS, IN_FLIGHT_MS = 10.0, 40.0
"""Calls are issued in chunks of about so long, while so much is in flight: a GPU is not to wait for its host."""
UNWATCHED = 0.2
"""Of the window's seconds: how long a load runs before it without readings."""
SLOWED = 0.05
"""A call that takes so much longer under the meter is not the call that was meant."""
SLOWEST = "fa2"
"""The baseline that is measured where it is named alone."""


class Load(NamedTuple):
    """A run that repeats: ms of one, and power, clock and temperature meanwhile; `meter.Power` has updates and
    resolution. slower: how much longer a run takes while the meter is read than without, as a share."""

    ms: float
    watts: float
    mhz: float
    celsius: float
    updates: int
    resolution: float
    slower: float

    @property
    def joules(self) -> float:
        """Of one run."""
        return self.watts * self.ms * 1e-3


class Repeated(NamedTuple):
    """Medians of the rounds' loads. joules: of one run, in every round."""

    ms: float
    joules: float
    all_joules: list[float]
    watts: float
    mhz: float
    celsius: float
    updates: int
    resolution: float
    slower: float

    @property
    def spread(self) -> float:
        """From the least joules of a round to the most, over the median."""
        return (max(self.all_joules) - min(self.all_joules)) / self.joules


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a row of the result files says of a load; None of one that was not measured.

    joules: of one run, the median of ``all_joules``, those of the rounds, whose range over it is ``spread``.
    above_rest: joules without what the GPU takes in this time at rest, by the mean of ``rest_watts``, before and after
    all. source: `meter.COUNTER` or `meter.SAMPLED`. updates: of the counter in a round; resolution: the share of the
    joules by which readings may be late; slower: of `Load`, the median.
    """

    ms: float | None = None
    joules: float | None = None
    all_joules: list[float] | None = None
    spread: float | None = None
    above_rest: float | None = None
    watts: float | None = None
    rest_watts: list[float] | None = None
    mhz: float | None = None
    celsius: float | None = None
    source: str | None = None
    updates: int | None = None
    resolution: float | None = None
    slower: float | None = None


@dataclass(frozen=True, kw_only=True)
class OfCall(Cost):
    """Which call a row is of, and its gate, as of `attention.Measurement`; of one that FAILED nothing is measured."""

    impl: str
    recipe: str
    head_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    batch: int
    tokens: int
    lengths: None
    causal: bool
    window: int | None
    direction: str
    gate: str


@dataclass(frozen=True, kw_only=True)
class Measurement(OfCall):
    """One row of the result file: a call of one attention in a direction.

    peer: the baseline that is right and takes the least energy; energy_over and time_over are its joules and ms over
    this one's.
    """

    joules_per_tflop: float | None = None
    peer: str | None = None
    energy_over: float | None = None
    time_over: float | None = None


def measure_shape(
    shape: Shape, recipes: Iterable[str], impls: Iterable[str] | None, peers: Iterable[str] | None, meter: Meter,
    device: str, rounds: int, lead: float, window: float, tell: Callable[[str, float], object] = lambda *_: None,
) -> list[Measurement]:  # fmt: skip
    """Rows of one shape: of each recipe in each implementation that runs it and of each baseline, forward and both.

    Args: impls, None for each recipe's fastest; peers, names of baselines, all but `SLOWEST` unless given; lead,
    seconds of each load before those of ``window`` in which it is measured. Raises NotImplementedError where nothing
    runs a recipe, and RuntimeError where the window is too short for the counter.
    """
    inputs = shape.inputs(device, torch.bfloat16)
    found = checked(shape, inputs, recipes, impls, device, tell=lambda text, done: tell(text, 0.2 * done))
    names = (
        [name for name, kind in found.attentions if kind == BASELINE and name != SLOWEST] if peers is None else peers
    )
    wanted = [key for key in found.attentions if key[1] != BASELINE or key[0] in names]
    gates = {(key, way): found.gates[key][way] for key in wanted for way in DIRECTIONS}
    runs = {
        (key, way): run
        for key in wanted
        for way, run in directions(found.attentions[key], inputs).items()
        if gates[key, way] != "FAILED" and not gates[key, way].startswith(DOES_NOT_RUN)
    }
    rest_before = at_rest(meter, window)
    loads = by_turns(runs, meter, device, rounds, lead, window, lambda text, done: tell(text, 0.2 + 0.8 * done))
    rest = [rest_before, at_rest(meter, window)]
    return [_row(shape, key, way, loads, gates, rest, meter.source) for way in DIRECTIONS for key in wanted]


def directions(attention: Attention, inputs: tuple[Tensor, ...]) -> dict[str, Callable[[], object]]:
    """A call of each of `DIRECTIONS`, as a training step makes it."""
    *tensors, do = inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    return {
        "fwd": lambda: attention(*leaves),
        BOTH: lambda: torch.autograd.grad(attention(*leaves), leaves, do),
    }


def by_turns(
    runs: dict, meter: Meter, device: str, rounds: int, lead: float, window: float,
    tell: Callable[[str, float], object] = lambda *_: None,
) -> dict[object, Repeated]:  # fmt: skip
    """Each run's load in every round, whose order each round draws, the same in every call."""
    loads: dict[object, list[Load]] = {name: [] for name in runs}
    order, draw = list(runs.items()), random.Random(0)
    for turn in range(rounds):
        draw.shuffle(order)
        for number, (name, run) in enumerate(order):
            tell(f"round {turn + 1} of {rounds}", (turn + number / len(runs)) / rounds)
            loads[name].append(steady(run, meter, device, lead, window))
    return {name: _median(found) for name, found in loads.items()}


def steady(run: Callable[[], object], meter: Meter, device: str, lead: float, window: float) -> Load:
    """A run that repeats for ``lead`` seconds unmeasured, some without readings and ``window`` seconds with them."""
    from_rest(run, device)
    ms = max(from_rest(lambda: [run() for _ in range(3)], device)[1] / 3, 1e-3)
    chunk = max(1, round(CHUNK_MS / ms))
    fences, most = deque([Fence(device)]), max(2, math.ceil(IN_FLIGHT_MS / (chunk * ms)))

    def repeated(seconds: float) -> tuple[Fence, Fence, int]:
        """Where the device begins and ends, and how often it ran between; it may not have done so yet."""
        begin, start, calls = fences[-1], time.perf_counter(), 0
        while not calls or time.perf_counter() - start < seconds:
            for _ in range(chunk):
                run()
            calls += chunk
            fences.append(Fence(device))
            if len(fences) > most:
                fences.popleft().wait()
        return begin, fences[-1], calls

    repeated(lead)
    alone = repeated(UNWATCHED * window)
    with watched(meter) as seen:
        loaded = repeated(window)
        end = time.perf_counter()  # what is in flight lasts longer than a reading that began before
    wait(device)
    ms, alone_ms = (last.ms_since(first) / calls for first, last, calls in (loaded, alone))
    power = power_of([reading for reading in seen.readings if reading.seconds <= end])
    mhz, celsius = (statistics.median(values) for values in list(zip(*seen.states))[1:])
    return Load(ms, power.watts, mhz, celsius, power.updates, power.resolution, ms / alone_ms - 1)


def _median(loads: list[Load]) -> Repeated:
    ms, watts, mhz, celsius, _, _, slower = map(statistics.median, zip(*loads))
    joules = [load.joules for load in loads]
    return Repeated(
        ms, statistics.median(joules), joules, watts, mhz, celsius, min(load.updates for load in loads),
        max(load.resolution for load in loads), slower,
    )  # fmt: skip


def of_one(load: Repeated, times: int) -> Repeated:
    """Of a run that did something so many times, one of these."""
    return load._replace(
        ms=load.ms / times, joules=load.joules / times, all_joules=[joules / times for joules in load.all_joules]
    )


def cost(load: Repeated, rest: list[float], source: str) -> dict[str, object]:
    """Fields of `Cost`."""
    above = load.joules - statistics.mean(rest) * load.ms * 1e-3
    return load._asdict() | {"spread": load.spread, "above_rest": above, "rest_watts": rest, "source": source}


def call_fields(shape: Shape, key: Key) -> dict[str, object]:
    """Fields of `OfCall` that say which call."""
    return {"impl": key[0], "recipe": key[1]} | dict(zip(CALL, call_of(shape)))


def _row(
    shape: Shape, key: Key, way: str, loads: dict[tuple[Key, str], Repeated], gates: dict[tuple[Key, str], str],
    rest: list[float], source: str,
) -> Measurement:  # fmt: skip
    facts = call_fields(shape, key) | {"direction": way, "gate": gates[key, way]}
    load = loads.get((key, way))
    if load is None:
        return Measurement(**facts)
    facts |= cost(load, rest, source) | {"joules_per_tflop": load.joules / (shape.flops(way) * 1e-12)}
    right = {
        other[0]: found
        for (other, its), found in loads.items()
        if its == way and other[1] == BASELINE and gates[other, its] == "ok"
    }
    if right and gates[key, way] == "ok":
        peer, best = min(right.items(), key=lambda item: item[1].joules)
        facts |= {"peer": peer, "energy_over": best.joules / load.joules, "time_over": best.ms / load.ms}
    return Measurement(**facts)
