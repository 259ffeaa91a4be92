"""What attention draws from a GPU: `python -m tools.power` (an NVIDIA GPU of compute capability 9.0; about a minute).

A line for each attention, head_dim, mask and length: TFLOPS in a burst after a rest, and in a loop of SECONDS with the
clock, the power and the energy of a useful TFLOP. "kernel" is `mixed`'s forward without its passes, "forward" is all
of it; their means over the best in full precision follow. Then how long an attention feels what ran before it:
microseconds of calls one after another.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.baselines import available
from benchmarks.shapes import Shape
from sagebwd import sage_attention
from sagebwd.call import Call
from sagebwd.kernels.sm90.forward.launch import launch_forward
from sagebwd.kernels.sm90.forward.variant import SCALE_BLOCK
from sagebwd.kernels.sm90.operands.quantize_k import launch_quantize_k
from sagebwd.kernels.sm90.widths import HEAD_DIMS
from sagebwd.recipe import Recipe

REST_SECONDS = 0.15
BURST_CALLS = 4
# Calls of the second table, about 300 ms of them.
FOLLOWING = 100
SM_CLOCK = 1  # NVML_CLOCK_SM


class Meter:
    """NVML's readings of the first GPU."""

    def __init__(self) -> None:
        self.nvml, self.device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        self.nvml.nvmlInit_v2()
        self.nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.device))

    def _read(self, function: str, kind: type, *arguments: int) -> int:
        value = kind()
        status = getattr(self.nvml, function)(self.device, *arguments, ctypes.byref(value))
        if status != 0:
            raise RuntimeError(f"{function} of NVML fails with status {status}")
        return value.value

    def clock(self) -> int:
        """Clock of the multiprocessors now, MHz."""
        return self._read("nvmlDeviceGetClockInfo", ctypes.c_uint, SM_CLOCK)

    def energy(self) -> float:
        """Joules since the driver was loaded."""
        return self._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong) / 1e3


def forwards(shape: Shape) -> dict[str, Callable[[], object]]:
    """Forwards of one shape: `mixed` with and without its passes, and the full-precision ones."""
    q, k, v, _ = shape.inputs("cuda", torch.bfloat16)
    recipe = Recipe.named("mixed")
    call = Call.of(
        q, k, None, None, None, shape.tokens, shape.tokens, shape.is_causal, -1, -1, shape.head_dim**-0.5, recipe
    )
    codes = launch_quantize_k(k, call.keys, None, SCALE_BLOCK, k_sampled=True)

    def bound(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
        return lambda: attention(q, k, v)

    return {
        "mixed kernel": lambda: launch_forward(call, q, codes, v, torch.empty_like(q), with_row_max=True),
        "mixed forward": lambda: sage_attention(q, k, v, is_causal=shape.is_causal, recipe=recipe),
        **{name: bound(attention) for name, attention in available(shape, "cuda").items() if name != "fa2"},
    }


def milliseconds(run: Callable[[], object], calls: int) -> list[float]:
    """Of each of some calls one after another."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def loop(run: Callable[[], object], ms: float, seconds: float, meter: Meter) -> tuple[float, int, float]:
    """Seconds and joules of a call in a loop, and the clock then; a first loop of that length is not counted."""
    calls = math.ceil(seconds * 1e3 / ms)
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    joules, began = meter.energy(), time.perf_counter()
    for _ in range(calls):
        run()
    time.sleep(max(0.0, began + 0.7 * seconds - time.perf_counter()))  # the host is ahead of the GPU
    clock = meter.clock()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls, clock, (meter.energy() - joules) / calls


def measure(shape: Shape, seconds: float, meter: Meter) -> dict[str, tuple[float, float]]:
    """Print the lines of one shape; TFLOPS of each forward in a burst and in a loop."""
    tera, found = shape.flops("fwd") / 1e12, {}
    for name, run in forwards(shape).items():
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        time.sleep(REST_SECONDS)
        ms = min(milliseconds(run, BURST_CALLS))
        taken, clock, joules = loop(run, ms, seconds, meter)
        found[name] = tera / ms * 1e3, tera / taken
        print(
            f"{shape} {name}: burst {tera / ms * 1e3:.0f} TFLOPS; in a loop {tera / taken:.0f} TFLOPS, {clock} MHz, "
            f"{joules / taken:.0f} W, {joules / tera:.3f} J a TFLOP",
            flush=True,
        )
    return found


def speedups(figures: Sequence[dict[str, tuple[float, float]]], name: str) -> tuple[float, float]:
    """Geometric means of one forward's TFLOPS over the best in full precision, in bursts and in loops."""
    ratios = [
        [
            found[name][how] / max(x[how] for other, x in found.items() if not other.startswith("mixed"))
            for how in (0, 1)
        ]
        for found in figures
    ]
    burst, steady = (statistics.geometric_mean(column) for column in zip(*ratios))
    return burst, steady


def follow(shape: Shape) -> None:
    """Print what calls take after others."""
    runs = forwards(shape)
    for name in ("mixed kernel", "fa4" if "fa4" in runs else "cudnn"):
        for before in (None, *runs):
            if before is None:
                time.sleep(REST_SECONDS * 2)
            else:
                milliseconds(runs[before], FOLLOWING)
            times = milliseconds(runs[name], FOLLOWING)
            few = " ".join(f"{sum(times[at : at + 5]) / 5 * 1e3:.0f}" for at in range(0, FOLLOWING, 10))
            print(f"{shape} {name} after {before or 'a rest'}, us of calls 1, 11, 21, ...: {few}", flush=True)


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a loop")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--head-dim", type=int, nargs="+", default=HEAD_DIMS, choices=HEAD_DIMS)
    arguments = parser.parse_args()
    meter = Meter()
    for head_dim in arguments.head_dim:
        heads, figures = 2048 // head_dim, []
        for tokens, is_causal in itertools.product(arguments.tokens, (False, True)):
            shape = Shape(head_dim, heads, heads, max(1, 16384 // tokens), tokens, is_causal)
            figures.append(measure(shape, arguments.seconds, meter))
        for name in ("mixed kernel", "mixed forward"):
            burst, steady = speedups(figures, name)
            print(
                f"head_dim {head_dim}, {name} over the best in BF16: bursts {burst:.3f}x, loops {steady:.3f}x",
                flush=True,
            )
    follow(Shape(128, 16, 16, 1, 16384, False))


if __name__ == "__main__":
    main()
