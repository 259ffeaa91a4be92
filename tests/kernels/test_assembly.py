"""Inline assembly that reads several elements at once, in every form of a call: they are neighbours of one row.

Triton gives it registers of a thread, in the order of a layout of its own choice; where addresses are not known to be
multiples of 16 bytes that choice may be four rows of one column. Needs no GPU.
"""

import re

import pytest

triton = pytest.importorskip("triton")

from tools import cross_compile, machine_code  # noqa: E402 (triton may be missing)

RECIPE, TOKENS = "token(first_keys=1)", 301  # of an odd number of keys little is known to be a multiple of 16
# One first key is multiplied by dp4a. Layouts are chosen by TTGIR; in make test-all, forms that are compiled for these
# architectures nowhere else go on to machine code.
CALLS = [
    (80, 72, "packed", "ttgir"), (90, 72, "padded", "ttgir"), (120, 72, "bool-all", "ttgir"),
    (90, 64, "packed", "ttgir"), pytest.param(120, 64, "full", "ttgir", marks=pytest.mark.slow),
    *(
        pytest.param(*call, "cubin", marks=pytest.mark.slow)
        for call in ((80, 64, "packed"), (80, 64, "bool-all"), (120, 20, "padded"))
    ),
]  # fmt: skip


def neighbours(layout: str) -> int:
    """How many elements of a row follow each other in a thread's registers; 1 where the layout does not say it."""
    blocked = re.match(r"#ttg\.blocked<\{sizePerThread = \[(.*?)\],.* order = \[(.*?)\]", layout)
    if blocked is None:
        return 1
    sizes, order = ([int(x) for x in numbers.split(",")] for numbers in blocked.groups())
    return sizes[-1] if order[0] == len(sizes) - 1 else 1


@pytest.mark.parametrize(("arch", "head_dim", "form", "until"), CALLS)
def test_a_row_of(arch, head_dim, form, until):
    rows = machine_code.launches((arch, head_dim, RECIPE, form, TOKENS, until))
    assert {"forward_kernel", "dq_kernel", "dkdv_kernel"} <= {row["kernel"] for row in rows}
    for row in rows:
        for assembly in row["assembly"]:
            assert neighbours(assembly["layout"]) >= assembly["pack"], (row["kernel"], assembly)
    (forward,) = [row for row in rows if row["kernel"] == "forward_kernel"]
    assert any("dp4a" in assembly["text"] for assembly in forward["assembly"]) == (head_dim % 16 == 0)


def test_what_a_layout_says():
    blocked = "#ttg.blocked<{{sizePerThread = {}, threadsPerWarp = [8, 4], warpsPerCTA = [4, 1], order = {}}}>"
    assert neighbours(blocked.format("[1, 16]", "[1, 0]")) == 16
    assert neighbours(blocked.format("[1, 1]", "[1, 0]")) == 1
    assert neighbours(blocked.format("[4, 4]", "[0, 1]")) == 1
    assert neighbours("#ttg.nvidia_mma<{versionMajor = 2, instrShape = [16, 8]}>") == 1


def test_assembly_is_read_with_its_layout():
    ttgir = (
        "#blocked = #ttg.blocked<{sizePerThread = [1, 1], order = [1, 0]}>\n"
        '%x = tt.elementwise_inline_asm "dp4a;" {constraints = "=r,r", packed_element = 4 : i32, pure = true} %q, %k'
        " : tensor<64x64xi8, #blocked>, tensor<64x64xi8, #blocked> -> tensor<64x64xi32, #blocked> loc(#loc1)\n"
        '%y = tt.elementwise_inline_asm "ex2;" {constraints = "=f,f", packed_element = 1 : i32, pure = true} %s : '
        "tensor<64x64xf32, #blocked> -> tensor<64x64xf32, #blocked>\n"
    )
    (found,) = cross_compile.packed_assembly(ttgir)
    assert (found["text"], found["pack"]) == ("dp4a;", 4)
    assert neighbours(found["layout"]) == 1
