"""Every width, form and recipe on a GPU, right or wrong: `python -m tools.matrix` (make matrix).

A row is a head_dim, value head_dim, form, recipe and dtype. Its calls of the public functions, forward and backward,
come with random inputs of their own, on memory that is filled with NaN before each, the first and several that run
what it described; output, lse and gradients are held to attention in FP32 with an explicit mask
(`tools.matrix.exact`) and to the recipe's emulator (`benchmarks.conformance`). A call that the package does not
take is right if it says which argument is why. `tools.matrix.forms` has forms, `tools.matrix.sizes` what meets what:

- ``--every``: `token` and `auto` in BF16, every width, pair of widths and form; `paper`, `full` and `token` in FP16, a
  width of each kind, every form; `auto` in FP16 at Hopper's own widths; `mixed` where it is refused; `paper` and
  `full` at all other widths, three forms.
- Unless told otherwise, a cover of that, for nine minutes of one machine with 16 cores: `token` in BF16 at a width of
  each kind in every form, at each other width in those forms that matter most and in others by turns, so that widths
  that compile alike meet all of them; each form at each kind of width in `paper`, `full` or FP16, by turns; `auto` at
  Hopper's own widths in every form that its kernels run, and at all that are filled up to them in three.
- ``--short``: `auto` in BF16, a few widths, every form; two minutes.
- `tools.matrix.large`, but for ``--short``: more than 65535 heads times batch or sequences, more than 2^31 elements.

Compiling takes nearly all the time. Rows that share kernels are a group (`tools.matrix.groups`); groups run in
processes side by side. Every finished row is appended to ``--output``; ``--resume`` leaves out what stands there of
the same code, ``--seconds`` ends in time, ``--part 1/3`` takes every third group. Exit code 1 where a row is wrong, 3
where rows are left.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path

from sagebwd.cli.hardware import check_device
from sagebwd.cli.results import environment, save
from tools.matrix import check, forms, large, sizes
from tools.matrix.groups import groups_of
from tools.matrix.workers import Row, run
from tools.tree import digest

SAID_EVERY = 10
NAMES = ("head_dim", "value_dim", "form", "recipe", "dtype")


def name_of(row: Row) -> tuple:
    """What names a row."""
    return tuple(row[name] for name in NAMES)


@cache
def code() -> str:
    """What rows are of."""
    return digest("src", "tools/matrix")


def read(path: Path, of: str) -> dict[tuple, Row]:
    """Rows of some `code` that stand in a file of earlier runs."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {name_of(row): row for row in lines if row.pop("code") == of}


def report(rows: list[Row], left: int, facts: dict[str, object], folder: Path | None) -> None:
    """What is wrong, the counts, and the results file."""
    rows = sorted(rows, key=lambda row: tuple(map(str, (row["recipe"], row["dtype"], row["form"]))))
    rows.sort(key=lambda row: (row["head_dim"], row["value_dim"]))
    for row in rows:
        if row["status"] in ("wrong", "crashed"):
            print(f"{row['status']}: {' '.join(map(str, name_of(row)))}: {row.get('errors', '')} {row['message']}")
    counts = Counter(row["status"] for row in rows)
    print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "no rows", end="")
    print(f", {left} left" if left else "")
    if folder is not None:
        facts = {**facts, "counts": dict(counts), "left": left, "tensors": check.TENSORS}
        rows = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
        print(f"wrote {save(rows, facts, folder, 'matrix')}")


def main(arguments: list[str] | None = None) -> int:
    """Run the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--short", dest="size", action="store_const", const="short", help="few widths, auto, BF16")
    size.add_argument("--every", dest="size", action="store_const", const="every", help="no row left out")
    parser.set_defaults(size="cover")
    parser.add_argument("--part", default="1/1", help="2/3: the second of three parts")
    parser.add_argument("--seconds", type=float, help="begin no row after so long")
    parser.add_argument("--resume", action="store_true", help="leave out rows of this code that --output has")
    parser.add_argument("--output", type=Path, default=Path("runs/matrix.jsonl"), help="rows as they come")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder of the results file")
    parser.add_argument("--no-results", action="store_true", help="write no results file")
    parser.add_argument("--commit", help="to record outside a git checkout")
    parser.add_argument("--head-dim", type=int, action="append")
    parser.add_argument("--form", action="append", choices=[*forms.FORMS, *large.FORMS])
    parser.add_argument("--recipe", action="append")
    parser.add_argument("--impl", help="the fastest for each call, unless named")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args(arguments)
    check_device(given.device)
    facts = environment(given.device, given.commit) | {"size": given.size}
    with_large = given.size != "short" and given.device.startswith("cuda")
    wanted = itertools.chain(sizes.cells(given.size), large.cells() if with_large else [])
    chosen = [
        cell
        for cell in wanted
        if (not given.head_dim or cell.head_dim in given.head_dim)
        and (not given.form or cell.form in given.form)
        and (not given.recipe or cell.recipe in given.recipe)
    ]
    part, parts = map(int, given.part.split("/"))
    groups = groups_of(chosen)[part - 1 :: parts]
    names = {name_of(cell.key()) for group in groups for cell in group}
    done = read(given.output, code()) if given.resume else {}
    rows = [row for name, row in done.items() if name in names]
    resumed = len(rows)
    groups = [[cell for cell in group if name_of(cell.key()) not in done] for group in groups]
    groups = [group for group in groups if group]
    given.output.parent.mkdir(parents=True, exist_ok=True)
    start, said = time.monotonic(), 0.0
    until = start + (given.seconds or float("inf"))
    print(f"{len(names)} rows, {resumed} of them there, {len(groups)} groups, {facts['commit']}", flush=True)
    with given.output.open("a", encoding="utf-8") as file:
        for found in run(groups, given.processes, given.impl, given.device, until):
            for row in found:
                rows.append(row)
                file.write(json.dumps({**row, "code": code()}) + "\n")
                if row["status"] in ("wrong", "crashed"):
                    print(f"{row['status']}: {' '.join(map(str, name_of(row)))}: {row['message']}", flush=True)
            file.flush()
            seconds = time.monotonic() - start
            if seconds - said >= SAID_EVERY:
                said = seconds
                wrong = sum(row["status"] in ("wrong", "crashed") for row in rows)
                print(f"{len(rows)}/{len(names)} rows, {wrong} wrong, {seconds:.0f} s", flush=True)
    left = len(names) - len(rows)
    facts |= {"seconds": round(time.monotonic() - start), "resumed": resumed}
    report(rows, left, facts, None if given.no_results else given.results)
    if any(row["status"] in ("wrong", "crashed") for row in rows):
        return 1
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
