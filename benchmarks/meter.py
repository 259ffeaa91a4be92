"""What a GPU says of itself by NVML: joules, watts, clock and temperature."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

import torch

PACKAGE = "nvidia-ml-py"
COUNTER, SAMPLED = "counter", "sampled power"
"""Where joules come from: the GPU's total, or watts that were read times the seconds between readings."""
PAUSE_S = 0.003
"""Between two readings of a meter."""


class State(NamedTuple):
    """Power, the clock of the multiprocessors and the temperature of the chip, at one moment."""

    watts: float
    mhz: float
    celsius: float


class Reading(NamedTuple):
    """Seconds of a clock, and the joules of a meter then."""

    seconds: float
    joules: float


class Power(NamedTuple):
    """Mean watts between the first and the last change of a meter; how often it changed, and the share of the joules
    in between by which they may be wrong, since a change is seen only when the meter is read."""

    watts: float
    updates: int
    resolution: float


class Meter:
    """Joules that a GPU has taken since some moment, and its state. source: `COUNTER`, or `SAMPLED` without one."""

    def __init__(self, device: str) -> None:
        """Raises ValueError for a device that has no NVML, and where nvidia-ml-py is not installed."""
        if not device.startswith("cuda"):
            raise ValueError(f"device={device!r} has no meter of energy; accepted: cuda")
        self._nvml = _nvml()
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(_uuid(device))
        self._sum, self._last = 0.0, None
        try:
            self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
            self.source = COUNTER
        except self._nvml.NVMLError:  # of a card, a driver or a sandbox without it
            self.source = SAMPLED

    def joules(self) -> float:
        """Up to now."""
        if self.source == COUNTER:
            return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) * 1e-3
        now = Reading(time.perf_counter(), self._watts())
        if self._last is not None:
            self._sum += (now.seconds - self._last.seconds) * (now.joules + self._last.joules) / 2
        self._last = now
        return self._sum

    def state(self) -> State:
        """As it is now."""
        nvml, handle = self._nvml, self._handle
        return State(
            self._watts(),
            float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        )

    def _watts(self) -> float:
        return self._nvml.nvmlDeviceGetPowerUsage(self._handle) * 1e-3


class Seen(NamedTuple):
    """Readings of a meter, in order, and the states in which its joules changed."""

    readings: list[Reading]
    states: list[State]


@contextmanager
def watched(meter: Meter) -> Iterator[Seen]:
    """Inside, a thread of its own reads the meter over and over.

    A driver may take ten milliseconds for a reading, in which who issues calls is not to stand still; pynvml's
    functions leave the interpreter to others meanwhile. What the meter raises is raised at the end.
    """
    seen, errors, ends = Seen([], []), [], threading.Event()

    def read() -> None:
        try:
            while not ends.is_set():
                seen.readings.append(Reading(time.perf_counter(), meter.joules()))
                if len(seen.readings) == 1 or seen.readings[-1].joules != seen.readings[-2].joules:
                    seen.states.append(meter.state())
                ends.wait(PAUSE_S)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=read, name="meter", daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ends.set()
        thread.join()
    if errors:
        raise errors[0]


def power_of(readings: list[Reading]) -> Power:
    """From readings of a meter, in order, that were made often. Raises RuntimeError where it changed too rarely.

    A counter stands still between its updates: from one of them to another its joules and the seconds belong together.
    """
    changes = [number for number in range(1, len(readings)) if readings[number].joules != readings[number - 1].joules]
    if len(changes) < 3:
        seconds = readings[-1].seconds - readings[0].seconds if readings else 0.0
        raise RuntimeError(
            f"the meter of energy changed {len(changes)} times in {seconds:.2f} s of {len(readings)} readings, and 3 "
            "are needed: give more seconds to a load (--window)"
        )
    first, last = readings[changes[0]], readings[changes[-1]]
    seconds = last.seconds - first.seconds
    late = max(readings[number].seconds - readings[number - 1].seconds for number in (changes[0], changes[-1]))
    return Power((last.joules - first.joules) / seconds, len(changes), late / seconds)


def at_rest(meter: Meter, seconds: float) -> float:
    """Watts of a GPU that does nothing, from the moment on that it has done so for a third of a second."""
    time.sleep(0.3)
    with watched(meter) as seen:
        time.sleep(seconds)
    return power_of(seen.readings).watts


def _nvml() -> ModuleType:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise ValueError(f"energy is read by NVML: pip install {PACKAGE}") from error
    nvml.nvmlInit()
    return nvml


def _uuid(device: str) -> str:
    """The GPU's name among all of the machine, of which CUDA_VISIBLE_DEVICES may hide some."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
