"""How the library, the benchmarks and the laboratory are laid out: who may import whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("src/sagebwd", "benchmarks", "lab")
MODULES = {
    ".".join(path.relative_to((ROOT / package).parent).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
KERNELS = "sagebwd.kernels"
# A part, and parts that it does not know, in its functions neither.
STRANGERS = [
    ("sagebwd", ["benchmarks", "lab"]),
    ("benchmarks", ["lab"]),
    *((part, ["tools", "tests"]) for part in ("sagebwd", "benchmarks", "lab")),
    *((f"sagebwd.{part}", ["sagebwd.cli"]) for part in ("integrations", "diagnostics", "auto", "attention")),
    ("sagebwd.integrations", ["sagebwd.diagnostics"]),
    ("sagebwd.reference", [KERNELS]),
    ("sagebwd.masks", [KERNELS]),
    (f"{KERNELS}.runtime", [f"{KERNELS}.portable", f"{KERNELS}.sm90", f"{KERNELS}.common"]),
    (f"{KERNELS}.common", [f"{KERNELS}.portable", f"{KERNELS}.sm90"]),
    (f"{KERNELS}.portable", [f"{KERNELS}.sm90"]),
    (f"{KERNELS}.sm90", [f"{KERNELS}.portable"]),
]
# Read where neither is to be imported: by the command line and by tools.
ROWS = (f"{KERNELS}.capabilities", f"{KERNELS}.sm90.widths", "sagebwd.auto.model")
# Parts in which no import goes round where those in functions count too.
LATE_TOO = ("benchmarks", "lab", "sagebwd.cli", "sagebwd.diagnostics")


def _statements(body: list[ast.stmt], late: bool) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported or, if ``late``, any; those of TYPE_CHECKING left out."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) and not late:
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            continue
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, name, []), late)
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body, late)


@cache
def imports(module: str, late: bool = False) -> frozenset[str]:
    """What a module imports, if ``late`` in its functions too: modules of `PACKAGES`, or the first names of others."""
    found = set()
    for statement in _statements(ast.parse(MODULES[module].read_text(encoding="utf-8")).body, late):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                whole = f"{statement.module}.{alias.name}"
                found.add(whole if whole in MODULES else statement.module)
    return frozenset(found)


def within(module: str, part: str) -> bool:
    """Whether a module is a part or in it."""
    return module == part or module.startswith(f"{part}.")


def is_known(part: str) -> bool:
    return part in ("tools", "tests") or any(within(module, part) for module in MODULES)


def test_a_part_does_not_know_its_strangers():
    for part, strangers in STRANGERS:
        assert all(map(is_known, [part, *strangers]))
    met = [
        (module, name)
        for part, strangers in STRANGERS
        for module in MODULES
        if within(module, part)
        for name in imports(module, late=True)
        if any(within(name, stranger) for stranger in strangers)
    ]
    assert not met


def test_rows_import_neither_torch_nor_triton():
    for module in ROWS:
        assert module in MODULES
        met, left = set(), [module]
        while left:
            name = left.pop()
            if name in met or name == "sagebwd":
                continue
            met.add(name)
            left += imports(name) if name in MODULES else []
        assert not {name.split(".")[0] for name in met} & {"torch", "triton"}, module


def check_no_import_goes_round(modules: list[str], late: bool) -> None:
    """Raises CycleError."""
    graph = {name: {x for x in imports(name, late) if x in modules} - {name, "sagebwd"} for name in modules}
    TopologicalSorter(graph).prepare()


def test_no_import_goes_round():
    check_no_import_goes_round(list(MODULES), late=False)


def test_no_import_in_a_function_goes_round():
    for part in LATE_TOO:
        modules = [name for name in MODULES if within(name, part)]
        assert len(modules) > 5, part
        check_no_import_goes_round(modules, late=True)


def test_late_imports_are_seen():
    assert within("sagebwd.cli.doctor", "sagebwd.cli")
    assert "lab.training.pretrain" in imports("lab.__main__", late=True)
    assert "lab.training.pretrain" not in imports("lab.__main__")


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
