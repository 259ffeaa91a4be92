"""Energy of a product and of a byte, by loads that do little else: torch's matrix products and copies.

The products stand for those of attention's kernels: cuBLAS chooses the kernel, whose name is in the row, and moves its
operands too. Energy depends on the numbers: these are normal ones, those of codes scaled to use all of INT8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from benchmarks.breakdown import breakdown
from benchmarks.energy import Cost, by_turns, cost, of_one
from benchmarks.meter import Meter, at_rest
from benchmarks.timer import captured

SIZE = 8192
"""Rows and columns of each matrix."""
FAR, NEAR = 1 << 30, 8 << 20
"""Bytes of copies beyond the second-level cache and inside it."""


class Microload(NamedTuple):
    """A run, and how many multiply-adds or bytes, read and written, it is of."""

    run: Callable[[], object]
    of: str
    count: float


@dataclass(frozen=True, kw_only=True)
class Measurement(Cost):
    """One row of the result file. count: multiply-adds or bytes of a run, as ``of`` says; picojoules: of one of them;
    rate: 10^12 of them a second. kernel: what ran longest."""

    name: str
    of: str
    count: float
    kernel: str
    picojoules: float
    picojoules_above_rest: float
    rate: float


def microloads(device: str, size: int = SIZE, far: int = FAR, near: int = NEAR) -> dict[str, Microload]:
    """Products of two matrices of each type, and copies."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator, device=device) for _ in range(2))
    codes, e4m3, bf16 = (
        [made(x) for x in (a, b)]
        for made in (
            lambda x: (x * 40).clamp(-127, 127).to(torch.int8), lambda x: x.to(torch.float8_e4m3fn),
            lambda x: x.bfloat16(),
        )
    )  # fmt: skip
    one = torch.ones((), device=device)
    products = {
        "INT8": lambda: torch._int_mm(codes[0], codes[1].t()),
        "e4m3": lambda: torch._scaled_mm(
            e4m3[0], e4m3[1].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        ),
        "BF16": lambda: bf16[0] @ bf16[1].t(),
    }
    found = {name: Microload(run, "multiply-add", float(size) ** 3) for name, run in products.items()}
    for name, size in (("copy", far), ("copy in cache", near)):
        x = torch.randn(size // 2, generator=generator, device=device, dtype=torch.bfloat16)
        to = torch.empty_like(x)
        found[name] = Microload(lambda to=to, x=x: to.copy_(x), "byte", 2.0 * size)
    return found


def measure(
    loads: dict[str, Microload], meter: Meter, device: str, rounds: int, lead: float, window: float,
    tell: Callable[[str, float], object] = lambda *_: None,
) -> list[Measurement]:  # fmt: skip
    """A row of each. Raises RuntimeError where the window is too short for the counter."""
    kernels = {name: _longest(load.run, device) for name, load in loads.items()}
    times = {name: 100 if load.count < NEAR * 4 else 1 for name, load in loads.items()}
    runs = {name: captured(load.run, times[name], device) for name, load in loads.items()}
    rest_before = at_rest(meter, window)
    found = by_turns(runs, meter, device, rounds, lead, window, tell)
    rest = [rest_before, at_rest(meter, window)]
    rows = []
    for name, repeated in found.items():
        own, load = loads[name], of_one(repeated, times[name])
        costs = cost(load, rest, meter.source)
        each = {"picojoules": load.joules, "picojoules_above_rest": costs["above_rest"]}
        rows.append(
            Measurement(
                name=name, of=own.of, count=own.count, kernel=kernels[name], rate=own.count / load.ms * 1e-9,
                **{field: joules / own.count * 1e12 for field, joules in each.items()}, **costs,
            )
        )  # fmt: skip
    return rows


def _longest(run: Callable[[], object], device: str) -> str:
    """The kernel that a run spends most time in."""
    run()
    _, kernels, others = breakdown(run, torch.device(device))
    names = kernels + others
    return max(names, key=names.get, default="")
