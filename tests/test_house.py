"""How the library, the benchmarks and the laboratory are laid out: who may import whom (`tools.house`)."""

from __future__ import annotations

import ast

import pytest

from tools import house
from tools.house import LIBRARY, MODULES, ROOT, imports

KERNELS = "sagebwd.kernels"
FAMILIES = ("portable", "mma_sync", "sm90")
# A part, and parts that it does not know, in its functions neither; rooms of the library have `house.FLOORS`.
STRANGERS = [
    ("sagebwd", ["benchmarks", "lab"]),
    ("benchmarks", ["lab"]),
    *((part, ["tools", "tests"]) for part in ("sagebwd", "benchmarks", "lab")),
    ("sagebwd.reference", [KERNELS]),
    (f"{KERNELS}.runtime", [f"{KERNELS}.{other}" for other in ("common", "masks", *FAMILIES)]),
    (f"{KERNELS}.masks", [f"{KERNELS}.{other}" for other in ("common", *FAMILIES)]),
    (f"{KERNELS}.common", [f"{KERNELS}.{family}" for family in FAMILIES]),
    (f"{KERNELS}.portable", [f"{KERNELS}.sm90", f"{KERNELS}.mma_sync"]),
    (f"{KERNELS}.mma_sync", [f"{KERNELS}.sm90"]),  # the portable kernels are its own for masks and in fixed order
    (f"{KERNELS}.sm90", [f"{KERNELS}.portable", f"{KERNELS}.mma_sync"]),
]
# Read where neither is to be imported: by the command line and by tools.
ROWS = (f"{KERNELS}.families", f"{KERNELS}.sm90.widths", "sagebwd.auto.model", "sagebwd.auto.timings")
MOST_UPWARD = 2


def within(module: str, part: str) -> bool:
    """Whether a module is a part or in it."""
    return module == part or module.startswith(f"{part}.")


def check_is_there(part: str) -> None:
    """Raises for a part that is gone: what is said of it holds of nothing."""
    assert (ROOT / part).is_dir() if part in ("tools", "tests") else any(within(x, part) for x in MODULES), part


def library() -> list[str]:
    return [name for name in MODULES if within(name, LIBRARY)]


def test_every_part_that_is_named_is_there():
    for part, strangers in STRANGERS:
        for name in (part, *strangers):
            check_is_there(name)
    for module in ROWS:
        assert module in MODULES
    rooms = {house.room_of(name) for name in library()} - {LIBRARY}
    assert rooms == set(house.FLOOR_OF), "rooms that are gone, or that no floor has"


def test_a_part_that_is_gone_is_told():
    with pytest.raises(AssertionError, match="gone"):
        check_is_there("sagebwd.gone")


def test_a_part_does_not_know_its_strangers():
    met = [
        (module, name)
        for part, strangers in STRANGERS
        for module in MODULES
        if within(module, part)
        for name in imports(module)
        if any(within(name, stranger) for stranger in strangers)
    ]
    assert not met


def test_rows_import_neither_torch_nor_triton():
    for module in ROWS:
        met, left = set(), [module]
        while left:
            name = left.pop()
            if name in met or name == "sagebwd":
                continue
            met.add(name)
            left += imports(name, late=False) if name in MODULES else []
        assert not {name.split(".")[0] for name in met} & {"torch", "triton"}, module


def test_no_import_goes_round():
    """In functions and by strings neither."""
    assert not house.circles(house.graph_of(library()))
    for package in ("benchmarks", "lab"):
        modules = [name for name in MODULES if within(name, package)]
        assert len(modules) > 5
        assert not house.circles(house.graph_of(modules))


def test_rooms_know_those_below_them():
    rooms = house.rooms_of(house.graph_of(library()))
    assert not house.circles({room: set(found) for room, found in rooms.items()})
    assert len(house.upward(rooms)) <= MOST_UPWARD, house.upward(rooms)


def test_implementations_are_named_in_their_folders_and_in_one_list():
    assert house.names_of_implementations(library()) == []


def test_imports_in_functions_and_by_strings_are_seen():
    assert "lab.training.pretrain" in imports("lab.__main__")
    assert "lab.training.pretrain" not in imports("lab.__main__", late=False)
    assert "sagebwd.kernels.portable.launch" in imports("sagebwd.kernels.portable.family")
    assert "sagebwd.kernels.portable.launch" not in imports("sagebwd.kernels.portable.family", late=False)


def test_a_circle_and_an_arrow_upward_are_told():
    assert house.circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [["b", "c"]]
    assert house.upward({"masks": {"kernels": ["x -> y"]}, "kernels": {"masks": ["y -> x"]}}) == [
        "masks -> kernels: x -> y"
    ]


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
