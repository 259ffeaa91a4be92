"""How the library is laid out, in numbers: lines, who imports whom, names of implementations, calls of a call.

A *room* is a folder of the library or a module at its root. An *arrow* is a room that imports another, in a function
or by a module's name in a string too. `FLOORS` has the rooms from the top down: an arrow that does not go down is
*upward*. A *circle* is modules, or rooms, that import each other. `tests/test_house.py` refuses circles and more than
two upward arrows. Lines are printed, and nothing is held to them.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("src/sagebwd", "benchmarks", "lab")
LIBRARY = "sagebwd"
MODULES = {
    ".".join(path.relative_to((ROOT / package).parent).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
# Rooms of the library, from the top down; those of a floor do not know each other.
FLOORS = (
    ("__main__", "cli"),
    ("diagnostics",),
    ("integrations",),
    ("norm_rope",),
    ("explain", "norm_rope_plan"),
    ("attention", "norm_rope_ops", "norm_rope_attention_ops"),
    ("arguments", "ops"),
    ("planning",),
    ("auto",),
    ("checks", "dispatch"),
    ("kernels",),
    ("reference",),
    ("call", "switches"),
    ("masks", "recipe", "sinks", "norm_rope_composed", "block_masks", "checkpointing"),
    ("cache", "counts", "derivatives", "environment", "extras", "numerics", "tracing", "version"),
)
FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}
# Calls of `sage_attention` that are like one before, by what they have beside q, k and v.
CALLS = ("dense", "mask", "packed", "auto")


def statements(body: list[ast.stmt], late: bool = True) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported and, if ``late``, any; those of TYPE_CHECKING left out."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) and not late:
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            continue
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from statements(getattr(statement, name, []), late)
        for handler in getattr(statement, "handlers", []):
            yield from statements(handler.body, late)


@cache
def tree_of(module: str) -> ast.Module:
    """A module's syntax."""
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@cache
def imports(module: str, late: bool = True) -> frozenset[str]:
    """What a module imports, if ``late`` in functions and by strings too: modules of `PACKAGES`, or others' names."""
    found = set()
    for statement in statements(tree_of(module).body, late):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                whole = f"{statement.module}.{alias.name}"
                found.add(whole if whole in MODULES else statement.module)
    if late:
        for text in strings(module):
            found |= {name for name in (text, f"{LIBRARY}.{text}") if name in MODULES and "." in text}
    return frozenset(found)


@cache
def strings(module: str) -> tuple[str, ...]:
    """All strings of a module."""
    nodes = ast.walk(tree_of(module))
    return tuple(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def room_of(module: str) -> str:
    """The room of a module of the library."""
    return module.removeprefix(f"{LIBRARY}.").partition(".")[0]


def graph_of(modules: list[str], late: bool = True) -> dict[str, set[str]]:
    """Which of some modules each of them imports; a package's face, which hands names on, is left out."""
    return {name: {x for x in imports(name, late) if x in modules} - {name, LIBRARY} for name in modules}


def rooms_of(graph: dict[str, set[str]]) -> dict[str, dict[str, list[str]]]:
    """Rooms that each room imports, and by which modules."""
    rooms = defaultdict(lambda: defaultdict(list))
    for name, found in graph.items():
        for other in sorted(found):
            if room_of(name) != room_of(other) and name != LIBRARY:
                rooms[room_of(name)][room_of(other)].append(f"{name} -> {other}")
    return rooms


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other."""
    reach = {}
    for node in graph:
        met, left = set(), list(graph[node])
        while left:
            other = left.pop()
            if other not in met:
                met.add(other)
                left += graph.get(other, ())
        reach[node] = met
    groups = {frozenset(x for x in reach[node] if node in reach.get(x, ())) for node in graph if node in reach[node]}
    return sorted(map(sorted, groups))


def upward(rooms: dict[str, dict[str, list[str]]]) -> list[str]:
    """Imports between rooms that do not go down."""
    wrong = [(room, other) for room, found in rooms.items() for other in found if FLOOR_OF[room] >= FLOOR_OF[other]]
    return [f"{room} -> {other}: {', '.join(rooms[room][other])}" for room, other in wrong]


def names_of_implementations(modules: list[str]) -> list[str]:
    """Where a string is what ``impl`` may name, outside of the folders of kernels and of `families`."""
    from sagebwd.kernels.families import FAMILIES

    found = []
    for name in modules:
        if not name.startswith((f"{LIBRARY}.kernels.", f"{LIBRARY}.reference.")):
            found += [f"{name}: {text!r}" for text in strings(name) if text in FAMILIES]
    return found


def lines_of(folder: Path) -> int:
    """Lines of Python and CUDA."""
    files = [path for path in folder.rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".h")]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def called(run: Callable[[], object]) -> list[str]:
    """The package's functions that are called, but for comprehensions, which later Pythons do not call."""
    names: list[str] = []
    folder = f"{ROOT / 'src' / LIBRARY}{os.sep}"

    def profile(frame: object, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder) and not code.co_name.startswith("<"):
            names.append(code.co_name)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names


def calls_of_a_repeated_call(name: str) -> int:
    """How many functions of the package a later call of `CALLS` takes, forward, on a CPU whose kernels do nothing."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from sagebwd import sage_attention, sage_attention_varlen
    from sagebwd.kernels.runtime import launchers

    launchers.Interpreted.start = lambda *_: None
    by = {} if name == "auto" else {"recipe": "token", "impl": "triton"}
    q, k, v = (torch.zeros(1, 2, 16, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = torch.ones(16, 16, dtype=torch.bool).tril() if name == "mask" else None
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    offsets = torch.tensor([0, 8, 16], dtype=torch.int32)

    def run() -> None:
        if name == "packed":
            sage_attention_varlen(*rows, offsets, offsets, 8, 8, **by)
        else:
            sage_attention(q, k, v, mask, **by)

    run()
    return len(called(run))


def main() -> None:
    """Print all counts."""
    argparse.ArgumentParser("python -m tools.house", description=__doc__.partition("\n")[0]).parse_args()
    library = [name for name in MODULES if name.split(".")[0] == LIBRARY]
    graph = graph_of(library)
    rooms = rooms_of(graph)
    found = circles(graph) + circles({room: set(others) for room, others in rooms.items()})
    wrong, named = upward(rooms), names_of_implementations(library)
    print(f"lines: library {lines_of(ROOT / 'src')}, tests {lines_of(ROOT / 'tests')}")
    print(f"rooms {len(FLOOR_OF)}, arrows {sum(map(len, rooms.values()))}, upward {len(wrong)}, circles {len(found)}")
    for line in (*wrong, *map(" <-> ".join, found)):
        print(f"  {line}")
    print(f"names of implementations in strings, outside their folders: {len(named)}")
    for line in named:
        print(f"  {line}")
    counts = ", ".join(f"{name} {calls_of_a_repeated_call(name)}" for name in CALLS)
    print(f"functions of a repeated call: {counts}")


if __name__ == "__main__":
    main()
