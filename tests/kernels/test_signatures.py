"""No function of the portable kernels or the passes is long, or takes many parameters."""

import ast
from pathlib import Path

import pytest

import sagebwd

KERNELS = Path(sagebwd.__file__).parent / "kernels"
LINES, PARAMETERS = 200, 40
FUNCTIONS = {
    f"{folder}/{path.name}:{node.name}": node
    for folder in ("portable", "operands")
    for path in sorted((KERNELS / folder).glob("*.py"))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.FunctionDef)
}


def test_the_kernels_are_among_them():
    assert {"portable/forward.py:forward_kernel", "operands/codes.py:quantize_kernel"} <= FUNCTIONS.keys()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_is_neither_long_nor_of_many_parameters(name):
    function, arguments = FUNCTIONS[name], FUNCTIONS[name].args
    assert function.end_lineno - function.lineno < LINES
    assert len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]) <= PARAMETERS
