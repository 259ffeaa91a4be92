"""A budget by bytes: every launch of forward and backward, what it moves, and the time between launches; on a GPU.

`python -m tools.passes --recipe mixed` prints a table a case: a launch's megabytes, of each tensor that it is given
once; the microseconds that these take at 4.3 TB/s; the measured ones, by the profiler; and those since the launch
before ended. The sums say what fewer or fuller passes could gain. Attention kernels compute more than they move, and
take longer. Behind a table stand the gradients' errors against recipe `full`. `--json FILE` writes the rows.

For work on a kernel, `--replace backward_kernel=variant.py` runs another file's kernel of that name in place of
Hopper's, and `--set backward.64.stages=2` changes a row of `sagebwd.kernels.sm90.widths`; both may be repeated. Claims
come from `python -m benchmarks attention`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagebwd.cache import PLANS
from sagebwd.cli.results import environment
from sagebwd.kernels.runtime import program
from sagebwd.kernels.sm90 import widths
from sagebwd.kernels.sm90.backward import launch
from sagebwd.reference.metrics import relative_l2
from tools.beside import Case, runs_of

# What an H200's memory gave a pass that reads and writes once, of 4.8 on paper.
BYTES_A_MICROSECOND = 4.3e6
RUNS = 10

CASES = {
    "1K, 128": Case(128, 16, tokens=1024),
    "2K, 128": Case(128, 8, tokens=2048),
    "4K, 128": Case(128, 4),
    "1K, 64": Case(64, 16, 32, 32, 1024),
    "2K, 64": Case(64, 8, 32, 32, 2048),
    "4K, 64": Case(64, 4, 32, 32),
    "GPT-2, 1K": Case(64, 16, 12, 12, 1024),
    "ViT, 576": Case(64, 28, tokens=576, is_causal=False),
    "packed 16 x 2K": Case(128, lengths=(2048,) * 16),
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


def replace_kernel(text: str) -> None:
    """Put NAME=FILE's kernel where Hopper's is launched."""
    name, path = text.split("=", 1)
    spec = importlib.util.spec_from_file_location(f"replaced_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(launch, name):
        raise ValueError(f"--replace {text}: {launch.__name__} launches no {name}")
    setattr(launch, name, getattr(module, name))


def change_launch(text: str) -> None:
    """DIRECTION.HEAD_DIM.OPTION=VALUE of a row of `sagebwd.kernels.sm90.widths`."""
    path, value = text.split("=", 1)
    direction, head_dim, option = path.split(".")
    row = widths.width(int(head_dim), int(head_dim))
    tile = getattr(row, direction)
    if option not in tile._fields:
        raise ValueError(f"--set {text}: {direction} has {', '.join(tile._fields)}")
    widths._OF[row[:2]] = row._replace(**{direction: tile._replace(**{option: int(value)})})


def bytes_of(arguments: tuple) -> int:
    """Bytes of the tensors among a launch's arguments, in tuples and TMA descriptors too, each memory once."""
    sizes: dict[tuple[int, int], int] = {}

    def count(x: Any) -> None:
        x = getattr(x, "base", x) if not isinstance(x, Tensor) else x
        if isinstance(x, Tensor) and x.numel():
            place = x.untyped_storage()._cdata, x.storage_offset() * x.itemsize
            sizes[place] = max(sizes.get(place, 0), x.numel() * x.itemsize)
        elif isinstance(x, tuple):
            for field in x:
                count(field)

    count(arguments)
    return sum(sizes.values())


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """The launches of a call as they are described; nothing else may be planned already."""
    launches: list[Launch] = []
    compiled = program.compiled

    def note(kernel: Any, grid: tuple[int, ...], arguments: tuple, options: dict[str, Any]) -> Any:
        found = compiled(kernel, grid, arguments, options)
        launches.append(Launch(name_of(kernel), bytes_of(arguments)))
        return found

    program.compiled = note
    try:
        yield launches
    finally:
        program.compiled = compiled


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


def measure(case: Case, recipe: str) -> list[Row]:
    """A case's launches on the GPU that is here."""
    from torch.profiler import ProfilerActivity, profile

    step = runs_of(case, recipe, "cuda")["both"]
    PLANS.clear()
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


def errors(case: Case, recipe: str, device: str) -> list[float]:
    """Relative L2 of dQ, dK and dV against those of recipe `full`."""
    found, exact = (runs_of(case, name, device)["both"]() for name in (recipe, "full"))
    return [relative_l2(a, e) for a, e in zip(found, exact)]


def main() -> None:
    """Parse the command line and print a table for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mixed")
    parser.add_argument("--case", action="append", choices=tuple(CASES))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--commit", help="what the results are of; of this checkout by default")
    parser.add_argument("--replace", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--set", action="append", default=[], metavar="DIRECTION.HEAD_DIM.OPTION=VALUE")
    arguments = parser.parse_args()
    for text in arguments.replace:
        replace_kernel(text)
    for text in arguments.set:
        change_launch(text)
    found = {}
    for name in arguments.case or CASES:
        rows = measure(CASES[name], arguments.recipe)
        found[name] = [row._asdict() for row in rows]
        print(table(f"{name}, {arguments.recipe}", rows))
        off = errors(CASES[name], arguments.recipe, "cuda")
        print("\nerrors of dQ, dK and dV: " + ", ".join(f"{error:.4f}" for error in off), end="\n\n", flush=True)
        if arguments.json:  # after each case: what was measured is kept
            facts = environment("cuda", arguments.commit) | {"recipe": arguments.recipe}
            arguments.json.write_text(json.dumps({"environment": facts, "cases": found}, indent=1))


if __name__ == "__main__":
    main()
