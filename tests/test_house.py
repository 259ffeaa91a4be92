"""How the package is laid out: who may import whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
KERNELS = "sagebwd.kernels"
# A part of the package, and parts that it does not know.
STRANGERS = [
    ("sagebwd.meaning", [KERNELS]),
    ("sagebwd.masks", [KERNELS]),
    (f"{KERNELS}.host", [f"{KERNELS}.portable", f"{KERNELS}.sm90", f"{KERNELS}.operands"]),
    (f"{KERNELS}.operands", [f"{KERNELS}.portable", f"{KERNELS}.sm90"]),
    (f"{KERNELS}.portable", [f"{KERNELS}.sm90"]),
    (f"{KERNELS}.sm90", [f"{KERNELS}.portable"]),
    *((f"sagebwd.{part}", ["sagebwd.commands"]) for part in ("analysis", "benchmarks", "integrations", "training")),
]
ROWS = (f"{KERNELS}.table", f"{KERNELS}.sm90.widths", "sagebwd.auto.crossings")


def _at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported, those of TYPE_CHECKING left out."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            continue
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from _at_import(getattr(statement, name, []))


@cache
def imports(module: str) -> frozenset[str]:
    """What a module imports: this package's modules, or the first names of others."""
    found = set()
    for statement in _at_import(ast.parse(MODULES[module].read_text(encoding="utf-8")).body):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                whole = f"{statement.module}.{alias.name}"
                found.add(whole if whole in MODULES else statement.module)
    return frozenset(found)


def within(module: str, part: str) -> bool:
    """Whether a module is a part of the package or in it."""
    return module == part or module.startswith(f"{part}.")


@pytest.mark.parametrize(("part", "strangers"), STRANGERS, ids=[part for part, _ in STRANGERS])
def test_a_part_does_not_know(part, strangers):
    met = [
        (module, name)
        for module in MODULES
        if within(module, part)
        for name in imports(module)
        if any(within(name, stranger) for stranger in strangers)
    ]
    assert not met


@pytest.mark.parametrize("module", ROWS)
def test_rows_import_neither_torch_nor_triton(module):
    met, left = set(), [module]
    while left:
        name = left.pop()
        if name in met or name == "sagebwd":
            continue
        met.add(name)
        left += imports(name) if name in MODULES else []
    assert not {name.split(".")[0] for name in met} & {"torch", "triton"}


def test_no_import_goes_round():
    graph = {name: {x for x in imports(name) if x in MODULES} - {name, "sagebwd"} for name in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_no_kernel_of_hoppers_branches_on_a_width():
    """But on what its row says."""
    widths = {"BLOCK_D", "head_dim", "value_dim"}
    for name, path in MODULES.items():
        if not within(name, f"{KERNELS}.sm90") or name in ROWS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                compared = {x.id if isinstance(x, ast.Name) else getattr(x, "attr", None) for x in sides}
                numbers = [x for x in sides if isinstance(x, ast.Constant) and isinstance(x.value, int)]
                assert not (compared & widths and numbers), f"{name}:{node.lineno}"
