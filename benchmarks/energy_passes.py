"""Energy of what one of our calls launches: each launch repeated by itself, on the memory that the call gives it.

Before a launch is measured, those before it in the call run once, so that it finds what it finds in the call. Repeated
by itself it finds that its own outputs are there already: sums of dQ in memory grow, and caches are warm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.attention import BASELINE, checked
from benchmarks.energy import BOTH, OfCall, Repeated, by_turns, call_fields, cost, directions, of_one
from benchmarks.meter import Meter, at_rest
from benchmarks.shapes import Shape
from benchmarks.timer import captured, from_rest
from sagebwd.kernels.runtime.device import current_stream
from sagebwd.kernels.runtime.launchers import Clear, Copy, Interpreted, Launcher, PackedLauncher
from sagebwd.kernels.runtime.program import Program

GRAPH_MS, MOST = 1.0, 100
"""A launch is repeated by graphs of about so long, of so many launches at most."""
WHOLE = "the call"


class Note(NamedTuple):
    """A launch of a call, with its memory."""

    launcher: Launcher
    addresses: list[int]
    tensors: list[Tensor]
    device: torch.device

    def start(self) -> None:
        """Launch on the current stream."""
        self.launcher.start(self.addresses, self.tensors, current_stream(self.device))

    @property
    def name(self) -> str:
        """The kernel's."""
        launcher = self.launcher
        if isinstance(launcher, (Clear, Copy)):
            return type(launcher).__name__.lower()
        if isinstance(launcher, Interpreted):
            return launcher.kernel.__name__
        if isinstance(launcher, PackedLauncher):
            kernel = getattr(launcher.packed, "kernel", None)
            return kernel.name if kernel else launcher.packed.function.__name__.removeprefix("__tvm_ffi_")
        return launcher.compiled.name


class _Noting:
    """In a launcher's place: notes what it is given, and launches."""

    def __init__(self, launcher: Launcher, notes: list[Note], device: torch.device) -> None:
        self.launcher, self.notes, self.device = launcher, notes, device

    def start(self, addresses: list[int], tensors: list[Tensor], stream: int) -> None:
        self.notes.append(Note(self.launcher, addresses, tensors, self.device))
        self.launcher.start(addresses, tensors, stream)


@contextmanager
def launches() -> Iterator[list[Note]]:
    """Inside, what programs launch is noted, and its memory stays."""
    notes: list[Note] = []
    run = Program.run

    def noting(self: Program, *given: Any) -> tuple[Tensor | None, ...]:
        own = self.launches
        self.launches = [_Noting(one, notes, self.device) for one in own]
        try:
            return run(self, *given)
        finally:
            self.launches = own

    with patch.object(Program, "run", noting):
        yield notes


@dataclass(frozen=True, kw_only=True)
class Measurement(OfCall):
    """One row of the result file: a launch, by its number in the call and its kernel, or `WHOLE`, which has none."""

    number: int | None = None
    kernel: str = WHOLE


def measure_shape(
    shape: Shape, recipe: str, impls: Iterable[str] | None, meter: Meter, device: str, rounds: int, lead: float,
    window: float, tell: Callable[[str, float], object] = lambda *_: None,
) -> list[Measurement]:  # fmt: skip
    """Rows of the call of one recipe: each launch of forward, then of backward, and the call as a whole.

    Raises as `energy.measure_shape` does, and ValueError for a call that no kernels of this project run.
    """
    inputs = shape.inputs(device, torch.bfloat16)
    found = checked(shape, inputs, [recipe], impls, device, tell=lambda text, done: tell(text, 0.1 * done))
    key = next(key for key in found.attentions if key[1] != BASELINE)
    facts = call_fields(shape, key) | {"direction": BOTH, "gate": found.gates[key][BOTH]}
    if facts["gate"] != "ok":
        return [Measurement(**facts)]
    *tensors, do = inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    with launches() as forward:
        out = found.attentions[key](*leaves)
    with launches() as backward:
        torch.autograd.grad(out, leaves, do)
    notes = [*forward, *backward]
    if not notes:
        raise ValueError(f"recipe={recipe!r} is run here by {key[0]}, which launches no kernels of this project")
    rest_before = at_rest(meter, window)
    loads: list[tuple[dict[str, object], Repeated]] = []
    for number, note in enumerate(notes):
        tell(f"launch {number + 1} of {len(notes)}, {note.name}", 0.1 + 0.8 * number / len(notes))
        for before in notes[:number]:
            before.start()
        ms = from_rest(lambda note=note: [note.start() for _ in range(10)], device)[1] / 10
        times = min(MOST, max(1, round(GRAPH_MS / max(ms, 1e-3))))
        run = {note.name: captured(note.start, times, device)}
        (load,) = by_turns(run, meter, device, rounds, lead, window).values()
        way = "fwd" if number < len(forward) else "bwd"
        loads.append(({"direction": way, "number": number, "kernel": note.name}, of_one(load, times)))
    tell(WHOLE, 0.9)
    whole = {WHOLE: directions(found.attentions[key], inputs)[BOTH]}
    (load,) = by_turns(whole, meter, device, rounds, lead, window).values()
    rest = [rest_before, at_rest(meter, window)]
    return [Measurement(**facts | which | cost(load, rest, meter.source)) for which, load in [*loads, ({}, load)]]
