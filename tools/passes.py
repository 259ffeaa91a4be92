"""A budget by bytes: every launch of forward and backward, what it moves, and the time between launches; on a GPU.

`python -m tools.passes --recipe mixed` prints a table a case: a launch's megabytes, of each tensor that it is given
once; the microseconds that these take at 4.3 TB/s; the measured ones, by the profiler; and those since the launch
before ended. The sums say what fewer or fuller passes could gain. `--json FILE` writes the rows. Attention kernels
compute more than they move, and take longer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagebwd import sage_attention, sage_attention_varlen
from sagebwd.benchmarks.results import environment
from sagebwd.kernels.host import replay

# What an H200's memory gave a pass that reads and writes once, of 4.8 on paper.
BYTES_A_MICROSECOND = 4.3e6
RUNS = 10


class Case(NamedTuple):
    """A call; lengths: of packed sequences, or none of ``batch`` dense ones."""

    batch: int
    heads: int
    tokens: int
    head_dim: int
    is_causal: bool = True
    packed: bool = False


CASES = {
    "1K, 128": Case(16, 16, 1024, 128),
    "2K, 128": Case(8, 16, 2048, 128),
    "4K, 128": Case(4, 16, 4096, 128),
    "1K, 64": Case(16, 32, 1024, 64),
    "2K, 64": Case(8, 32, 2048, 64),
    "4K, 64": Case(4, 32, 4096, 64),
    "GPT-2, 1K": Case(16, 12, 1024, 64),
    "ViT, 576": Case(28, 16, 576, 64, is_causal=False),
    "packed 16 x 2K": Case(16, 16, 2048, 128, packed=True),
}


class Launch(NamedTuple):
    """A kernel, and the bytes of the tensors that it is given."""

    kernel: str
    moved: int


class Row(NamedTuple):
    """A launch as it was measured, in microseconds; moved is None of what is not this project's launch."""

    kernel: str
    moved: int | None
    took: float
    waited: float


def bytes_of(arguments: tuple) -> int:
    """Bytes of the tensors among a launch's arguments, in tuples and TMA descriptors too, each memory once."""
    sizes: dict[int, int] = {}

    def count(x: Any) -> None:
        x = getattr(x, "base", x) if not isinstance(x, Tensor) else x
        if isinstance(x, Tensor) and x.numel():
            sizes[x.data_ptr()] = max(sizes.get(x.data_ptr(), 0), x.numel() * x.itemsize)
        elif isinstance(x, tuple):
            for field in x:
                count(field)

    count(arguments)
    return sum(sizes.values())


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """The launches of a call that is not replayed."""
    launches: list[Launch] = []
    start = replay._start

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
        launches.append(Launch(name_of(kernel), bytes_of(arguments)))
        return start(kernel, grid, *arguments, **options)

    replay._start = note
    try:
        yield launches
    finally:
        replay._start = start


def name_of(kernel: Any) -> str:
    """As the profiler has it, in a part: CuTe DSL's kernels have one name."""
    return getattr(kernel, "__name__", "kernel_cutlass")


def rows_of(launches: list[Launch], events: list[tuple[str, float, float]], runs: int) -> list[Row]:
    """The launches of one run, medians of ``runs``; events: name, start and end of what a GPU did, in order.

    Raises ValueError where runs did not do the same.
    """
    count = len(events) // runs
    if count * runs != len(events) or any(event[0] != events[i % count][0] for i, event in enumerate(events)):
        raise ValueError(f"{runs} runs had {len(events)} kernels, and not the same each")
    found, left = [], iter(launches)
    waiting = next(left, None)
    for place in range(count):
        name, moved = events[place][0], None
        if waiting is not None and waiting.kernel in name:
            name, moved, waiting = waiting.kernel, waiting.moved, next(left, None)
        these = range(place, len(events), count)
        took = median(events[i][2] - events[i][1] for i in these)
        gaps = [events[i][1] - events[i - 1][2] for i in these if i > 0]
        found.append(Row(name, moved, took, median(gaps) if gaps else 0.0))
    return found


def table(name: str, rows: list[Row]) -> str:
    """A case in Markdown, sums last."""
    lines = [
        f"**{name}**",
        "",
        "| launch | MB | us at 4.3 TB/s | us | us since the last |",
        "| --- | --- | --- | --- | --- |",
    ]
    total = Row("sum", sum(row.moved or 0 for row in rows), sum(r.took for r in rows), sum(r.waited for r in rows))
    for row in (*rows, total):
        moved = "" if row.moved is None else f"{row.moved / 1e6:.1f}"
        at_best = "" if row.moved is None else f"{row.moved / BYTES_A_MICROSECOND:.1f}"
        lines.append(f"| {row.kernel} | {moved} | {at_best} | {row.took:.1f} | {row.waited:.1f} |")
    return "\n".join(lines)


def step_of(case: Case, recipe: str, device: str) -> Callable[[], object]:
    """Forward and backward of a case."""
    shape = case.batch, case.heads, case.tokens, case.head_dim
    if case.packed:
        shape = case.batch * case.tokens, case.heads, case.head_dim
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    *leaves, do = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in leaves]
    offsets = torch.arange(case.batch + 1, device=device, dtype=torch.int32) * case.tokens

    def step() -> object:
        if case.packed:
            o = sage_attention_varlen(
                *leaves, offsets, offsets, case.tokens, case.tokens, is_causal=case.is_causal, recipe=recipe
            )
        else:
            o = sage_attention(*leaves, is_causal=case.is_causal, recipe=recipe)
        return torch.autograd.grad(o, leaves, do)

    return step


def measure(case: Case, recipe: str) -> list[Row]:
    """A case's launches on the GPU that is here."""
    from torch.profiler import ProfilerActivity, profile

    step = step_of(case, recipe, "cuda")
    replay._calls.clear()
    with noted() as launches:
        step()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(RUNS):
            step()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    events = sorted(
        (x.time_range.start, x.time_range.end, x.name) for x in profiled.events() if x.device_type == device
    )
    return rows_of(launches, [(name, start, end) for start, end, name in events], RUNS)


def main() -> None:
    """Parse the command line and print a table for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mixed")
    parser.add_argument("--case", action="append", choices=tuple(CASES))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--commit", help="what the results are of; of this checkout by default")
    arguments = parser.parse_args()
    found = {}
    for name in arguments.case or CASES:
        rows = measure(CASES[name], arguments.recipe)
        found[name] = [row._asdict() for row in rows]
        print(table(f"{name}, {arguments.recipe}", rows), end="\n\n", flush=True)
        if arguments.json:  # after each case: what was measured is kept
            facts = environment("cuda", arguments.commit) | {"recipe": arguments.recipe}
            arguments.json.write_text(json.dumps({"environment": facts, "cases": found}, indent=1))


if __name__ == "__main__":
    main()
