"""Facts of the machine code of every shipped kernel, and the committed table of them that CI compares.

A kernel's speed on a GPU cannot be seen in CI; what the compiler made of it can. `tests/kernels/machine_code.json`
holds, for each version of triton that is tested, each family and each call of `CALLS`, what every kernel compiled to.
A change to it is a change to what a GPU runs, and is committed with the benchmark of a commit that has the new table
(`test_machine_code.py` beside it asks for both); `untimed` names kernels that no benchmark has yet. The same sources
and triton compile to an instruction more or less on another machine. So CI lets instruction counts differ by 1%, and
spills, registers and shared memory fall.

    python -m tools.machine_code            prints what differs from the table; 1 where it is more than CI allows
    python -m tools.machine_code --exact    the same; 1 where anything differs: for a commit that claims the same code
    python -m tools.machine_code --write    writes the table of this triton (PYTHONPATH chooses another)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import triton

from sagebwd.environment import write_whole
from sagebwd.kernels.sm90.widths import FORMS

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests/kernels/machine_code.json"
# A benchmark of a Hopper GPU times what triton 3.6 compiles: the version there.
TIMED_VERSION = "3.6.0"

# How far a count of instructions may be from the table's.
INSTRUCTIONS_WITHIN = 0.01

# Forms that are compiled under every mask.
MOST_USED = ((64, 64), (128, 128))
# Architecture, head_dim (with value's where it is another), recipe and mask; "hopper" is the Gluon kernels on sm_90,
# and a portable forward for them.
CALLS = {
    "hopper": [
        ("hopper", head_dim if head_dim == value_dim else f"{head_dim}/{value_dim}", "mixed", mask)
        for head_dim, value_dim in FORMS
        for mask in ("full", "causal", "ungrouped")
        if mask == "ungrouped" or (head_dim, value_dim) in MOST_USED
    ]
    + [("hopper", 64, "mixed(rotate=False)", "causal")]
    + [
        ("hopper", head_dim, "mixed", mask)
        for head_dim, _ in MOST_USED
        for mask in ("document", "packed-causal", "by-token")
    ],
    "portable": [(arch, head_dim, "token", "causal") for arch in (80, 86, 89, 90, 100, 120) for head_dim in (64, 128)]
    + [(89, 128, "paper", "causal"), (90, 64, "paper", "causal"), (80, 64, "full", "causal")],
}  # fmt: skip


# Of other tritons than the one that GPUs were timed with.
OTHER_MASKS = ("ungrouped",)


def calls_of(version: str) -> dict[str, list[tuple]]:
    """The calls of a triton that the table has, by family.

    Of Hopper's kernels all where GPUs were timed with it, else those of `OTHER_MASKS`. The portable kernels were timed
    on no card that has nothing else, so that one triton is enough for them.
    """
    if version == TIMED_VERSION:
        return {"hopper": CALLS["hopper"]}
    return {"hopper": [call for call in CALLS["hopper"] if call[3] in OTHER_MASKS], "portable": CALLS["portable"]}


def name_of(call: tuple) -> str:
    """A call's key in the table."""
    return " ".join(map(str, call))


@cache
def launches(call: tuple, triton_folder: str | None = None) -> list[dict]:
    """What `tools.cross_compile` prints of a call; triton_folder, where another triton is installed."""
    shared = _shared_answer(call, triton_folder)
    if shared is not None and shared.exists():
        return json.loads(shared.read_text(encoding="utf-8"))
    server = _server(triton_folder)
    server.stdin.write(json.dumps(call) + "\n")
    server.stdin.flush()
    rows = json.loads(server.stdout.readline() or '"the process ended"')
    if isinstance(rows, str):
        raise RuntimeError(f"tools.cross_compile {name_of(call)}:\n{rows[-3000:]}")
    if shared is not None:
        write_whole(shared, json.dumps(rows))
    return rows


@cache
def _server(triton_folder: str | None) -> subprocess.Popen:
    """`tools.cross_compile serve` with that triton; it ends with this process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in [triton_folder, *sys.path] if path)
    command = [sys.executable, "-m", "tools.cross_compile", "serve"]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )


def _shared_answer(call: tuple, triton_folder: str | None) -> Path | None:
    """Where the processes of one pytest run leave each other what a call compiled to; None in any other process."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return None
    folder = Path(tempfile.gettempdir()) / f"sagebwd-machine-code-{run}"
    folder.mkdir(exist_ok=True)
    version = Path(triton_folder).name if triton_folder else triton.__version__
    return folder / f"{version} {name_of(call).replace('/', '-')}.json"


def facts(call: tuple, triton_folder: str | None = None) -> dict[str, dict]:
    """By kernel in order of launch: registers, spills and instructions, whole and of each loop with products."""
    kernels: dict[str, dict] = {}
    for row in launches(call, triton_folder):
        name = row["kernel"] + (" deterministic" if row["deterministic"] else "")
        while name in kernels:
            name += "'"
        kernels[name] = {
            "registers": row["registers"],
            "shared_bytes": row["shared_bytes"],
            "instructions": row["instructions"],
            "spills": row["spills"],
            "loops": [loop["instructions"] for loop in row["loops"]],
            "stored": [loop["stored"] for loop in row["loops"]],
            "loaded": [loop["loaded"] for loop in row["loops"]],
        }
    return kernels


class Difference(NamedTuple):
    """What a kernel compiles to where the table has something else."""

    text: str
    allowed: bool  # may come of another machine, or is better


def differences(found: dict[str, dict], committed: dict[str, dict]) -> list[Difference]:
    """Every fact of a call's kernels that is not the table's."""
    differ = []
    for name in dict.fromkeys([*committed, *found]):
        old, new = committed.get(name), found.get(name)
        if old is None or new is None:
            text = "not in the table" if old is None else "no longer launched"
            differ.append(Difference(f"{name}: {text}", allowed=False))
            continue
        differ += [
            Difference(f"{name}: {fact} {old[fact]} -> {new[fact]}", _allowed(fact, new[fact], old[fact]))
            for fact in new
            if new[fact] != old[fact]
        ]
    return differ


def _allowed(fact: str, new: int | list[int], old: int | list[int]) -> bool:
    """Whether CI lets it pass: counts of instructions close to the table's, and of all else no rise."""
    pairs = [(new, old)] if isinstance(new, int) else list(zip(new, old))
    if isinstance(new, list) and len(new) != len(old):
        return False
    if fact in ("instructions", "loops"):
        return all(abs(n - o) <= INSTRUCTIONS_WITHIN * o for n, o in pairs)
    return all(n <= o for n, o in pairs)


def read() -> dict:
    """The committed table: timed, and by version of triton, family and call."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def _text(value: object, depth: int = 0) -> str:
    """JSON with one kernel a line, so that a change shows as the kernels that changed."""
    if depth == 4 or not isinstance(value, dict):
        return json.dumps(value)
    inside = " " * (depth + 1)
    lines = [f"{inside}{json.dumps(key)}: {_text(item, depth + 1)}" for key, item in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"


def main(arguments: list[str]) -> int:
    """Compare or write; 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--exact", action="store_true", help="1 where anything differs")
    one.add_argument("--write", action="store_true", help="write the table of this triton")
    given = parser.parse_args(arguments)
    table = read() if TABLE.exists() else {"timed": {}, "untimed": {}}
    mine = table.setdefault(triton.__version__, {})
    failed = False
    for family, calls in calls_of(triton.__version__).items():
        known, mine[family] = mine.get(family, {}), {}
        for call in calls:
            mine[family][name_of(call)] = found = facts(call)
            differ = differences(found, known.get(name_of(call), {}))
            failed |= any(given.exact or given.write or not difference.allowed for difference in differ)
            print(f"triton {triton.__version__}, {name_of(call)}: {len(differ)} differences", flush=True)
            print("".join(f"    {x.text}{' (allowed)' * x.allowed}\n" for x in differ), end="")
    if given.write:
        write_whole(TABLE, _text(table) + "\n")
        print(f"wrote {TABLE}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
