"""Machine code of every kernel on every architecture: INT8 tensor cores, shared memory, no spills. Needs no GPU."""

import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from tools import machine_code  # noqa: E402 (triton may be missing)

# shared memory that one program may use
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
INT8_OPCODE = {90: "IGMMA"}
# instructions in a thousand that may move registers to local memory inside the loops; a register saved once beside
# a loop costs nothing
SPILLS = 20
# capped at 168 registers so that three programs share an SM: faster than two without spills (dev/log)
SPILLS_ON_PURPOSE = {(90, 64, "dkdv_kernel"): 100}
# each product appears twice: in the loop over whole blocks and in the loop over masked ones
PRODUCTS = {"forward_kernel": (4, 0), "dkdv_kernel": (6, 2), "dq_kernel": (4, 2)}

# the installed triton, and folders of others
TRITONS = [pytest.param(None, id="installed")] + [
    pytest.param(str(folder), id=folder.name, marks=pytest.mark.slow) for folder in Path(sys.prefix).glob("triton-*")
]


def slow(*values):
    """A row that `make test-all` alone compiles."""
    return pytest.param(*values, marks=pytest.mark.slow)


# Of dP in INT8: triton 3.6 refused what 3.7 took where dO is not rotated, so that `make test` has that one.
INT8_DP = ["token(dp=int8, rotate=False)", *map(slow, ("token(dp=int8)", "paper(dp=int8)", "full(dp=int8)"))]
INT8_DP_TRITONS = [slow(None), *map(str, Path(sys.prefix).glob("triton-*"))]

# of Hopper's backward where dK and dV have no room beside one another
IN_TWO = "value_kernel", "key_query_kernel"
# of Hopper's backward under a causal mask: blocks that it cuts and whole ones, apart where heads are not grouped
LOOPS = {"causal": 1, "ungrouped": 2}


def products(kernel, head_dim):
    """INT8 and 16-bit products of a kernel of `token`: first keys are apart; gradients are turned back, in two parts.

    A part is of 32 channels.
    """
    int8, floating = PRODUCTS[kernel]
    return (int8 + 1, floating + 1) if kernel == "forward_kernel" else (int8, floating + head_dim // 16)


def launches(arch, head_dim, recipe, mask="causal"):
    return machine_code.launches((arch, head_dim, recipe, mask))


def forward_of(arch, head_dim, recipe, mask="causal"):
    rows = machine_code.launches((arch, head_dim, recipe, mask, "256", "forward"))
    (row,) = (row for row in rows if row["kernel"] == "forward_kernel")
    return row


@pytest.mark.parametrize(
    ("arch", "head_dim"),
    [
        *((89, 128), (90, 128)),
        # of (80, 64) `make test` has a mask of elements; 120 has 89's products and its shared memory
        *(slow(*row) for row in ((80, 64), (80, 128), (89, 64), (90, 64), (120, 64), (120, 128))),
        *(slow(arch, head_dim) for arch in (86, 100) for head_dim in (64, 128)),
    ],
)
def test_token_on(arch, head_dim):
    rows = launches(arch, head_dim, "token")
    attention = {row["kernel"]: row for row in rows if row["kernel"] in PRODUCTS}
    assert attention.keys() == PRODUCTS.keys()
    for row in rows:
        assert row["shared_bytes"] <= SHARED_BYTES[arch], row
    for name, row in attention.items():
        assert (row["int8_products"], row["float_products"]) == products(name, head_dim), row
        assert INT8_OPCODE.get(arch, "IMMA") in row["opcodes"], row
        allowed = SPILLS_ON_PURPOSE.get((arch, head_dim, name), SPILLS)
        assert 1000 * row["spills_in_loops"] <= allowed * row["instructions_in_loops"], row


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["token", "paper", "full"])
@pytest.mark.parametrize("arch", [80, 90, 120])
def test_wide_heads_on(arch, recipe):
    """99 KB hold every kernel, whose sums of pieces keep their registers; on 9.0 timings chose launches that spill."""
    rows = launches(arch, 512, recipe)
    assert [row["kernel"] for row in rows if row["kernel"] in PRODUCTS] == [
        "forward_kernel", "forward_kernel", "dq_kernel", "dkdv_kernel",
    ]  # fmt: skip
    for row in rows:
        assert row["shared_bytes"] <= 99 << 10, row
        if row["kernel"] in PRODUCTS and arch != 90:
            assert 1000 * row["spills_in_loops"] <= SPILLS * row["instructions_in_loops"], row


@pytest.mark.parametrize(
    ("arch", "head_dim", "mask"),
    [
        (80, 64, "padded-causal"),
        *(slow(arch, 64, mask) for arch in (80, 90) for mask in ("packed-causal", "bias-matrix", "document")),
    ],
)
def test_several_first_keys_on(arch, head_dim, mask):
    """One more INT8 product and one in 16 bit, before the loops."""
    row = forward_of(arch, head_dim, "token", mask)
    assert (row["int8_products"], row["float_products"]) == products("forward_kernel", head_dim), row
    assert row["shared_bytes"] <= SHARED_BYTES[arch], row
    whole = row["loops"][0]
    assert 1000 * (whole["stored"] + whole["loaded"]) <= SPILLS * whole["instructions"], row


def test_no_first_keys_need_no_product():
    row = forward_of(80, 64, "token(first_keys=0)")
    assert (row["int8_products"], row["float_products"]) == PRODUCTS["forward_kernel"], row


@pytest.mark.parametrize(("arch", "head_dim", "mask"), [(80, 64, "document"), slow(90, 64, "bias-matrix")])
def test_masks_on(arch, head_dim, mask):
    rows = launches(arch, head_dim, "token", mask)
    attention = [row for row in rows if row["kernel"] in PRODUCTS]
    assert [row["kernel"] for row in attention] == ["forward_kernel", "dq_kernel", "dkdv_kernel"]
    for row in attention:
        assert (row["int8_products"], row["float_products"]) == products(row["kernel"], head_dim), row
        assert INT8_OPCODE.get(arch, "IMMA") in row["opcodes"], row
        assert row["shared_bytes"] <= SHARED_BYTES[arch], row
        whole = row["loops"][0]
        assert 1000 * (whole["stored"] + whole["loaded"]) <= SPILLS * whole["instructions"], row


@pytest.mark.parametrize(("arch", "head_dim"), [(89, 128), slow(90, 64)])
def test_paper_on(arch, head_dim):
    rows = launches(arch, head_dim, "paper")
    for row in rows:
        assert row["shared_bytes"] <= SHARED_BYTES[arch], row
        if row["kernel"] in PRODUCTS:
            assert (row["int8_products"], row["float_products"]) == PRODUCTS[row["kernel"]], row
            assert INT8_OPCODE.get(arch, "IMMA") in row["opcodes"], row


@pytest.mark.parametrize(("arch", "head_dim"), [(89, 256), slow(86, 192), slow(120, 192), slow(120, 256)])
def test_full_precision_of_wide_heads_fits_small_cards(arch, head_dim):
    """Regression: at 192 and 256 channels dQ took 106,496 bytes, the forward 114,688 and 193 spills."""
    rows = {row["kernel"]: row for row in launches(arch, head_dim, "full")}
    assert PRODUCTS.keys() <= rows.keys()
    for name, row in rows.items():
        assert row["shared_bytes"] <= SHARED_BYTES[arch], row
        if name in PRODUCTS:
            assert (row["int8_products"], row["float_products"]) == (0, sum(PRODUCTS[name])), row
            assert 1000 * row["spills_in_loops"] <= SPILLS * row["instructions_in_loops"], row


@pytest.mark.slow
def test_p_by_tile_and_ds_by_key():
    kernels = {row["kernel"] for row in launches(80, 64, "paper(ds_scale_dk=key)")}
    assert PRODUCTS.keys() <= kernels


@pytest.mark.slow  # in every run 256 channels are compiled, of other products none in INT8
def test_full_uses_no_int8():
    for row in launches(80, 64, "full"):
        assert row["int8_products"] == 0, row


@pytest.mark.parametrize(
    ("dims", "mask", "pieces", "value_pieces", "of_dq", "spills"),
    # those that the table compiles with this triton too, and with grouped heads two that it has with no triton
    [
        (64, "ungrouped", 1, 1, 1, 40),
        (128, "ungrouped", 2, 2, 1, 40),
        slow(96, "causal", 3, 3, 2, 0),
        slow("192/128", "causal", 3, 2, 2, 100),
    ],
)
def test_hopper_backward(dims, mask, pieces, value_pieces, of_dq, spills):
    rows = [row for row in launches("hopper", dims, "mixed", mask) if row["kernel"] == "backward_kernel"]
    assert [row["deterministic"] for row in rows] == [False, True]
    parts = LOOPS[mask]
    for row in rows:
        # two warpgroups: the first S and each loop's; delta's part of dP and V's; dV and dK in pieces, and dQ from the
        # keys of both, in a loop and after the last. S and V's part of dP are whole at 128
        of_s, of_dp = (pieces, value_pieces) if of_dq == 2 else (1, 1)
        in_a_loop = 1 + of_dp + value_pieces + pieces + 2 * of_dq
        products = 2 * of_s * (1 + parts), 2 * (in_a_loop * parts + 2 * of_dq)
        assert (row["int8_products"], row["float_products"]) == products, row
        assert row["opcodes"].keys() == {"IGMMA", "HGMMA", "QGMMA"}, row
        assert row["shared_bytes"] <= SHARED_BYTES[90]
        # sums of dV and dK and what a step computes are all of a thread's 240 registers; in order, a count is held too
        assert row["spills"] <= (60 if row["deterministic"] else spills), row


# without a mask they need no more than under one with grouped heads
@pytest.mark.slow  # in every run test_bounded_wait.py compiles 256 to PTX, and the next test 192 to its layouts
@pytest.mark.parametrize("mask", ["causal", "ungrouped"])
@pytest.mark.parametrize(("head_dim", "pieces", "parts_of_k"), [(192, 3, 3), (256, 1, 2)])
def test_hopper_backward_in_two(head_dim, pieces, parts_of_k, mask):
    of_v, *of_kq = (row for row in launches("hopper", head_dim, "mixed", mask) if row["kernel"] in IN_TWO)
    assert [row["kernel"] for row in (of_v, *of_kq)] == [IN_TWO[0], IN_TWO[1], IN_TWO[1]]
    assert [row["deterministic"] for row in of_kq] == [False, True]
    parts = LOOPS[mask]
    sums = head_dim // 64
    # two warpgroups: S by halves of K or by pieces, before the loop and in it; dV in pieces of 64 channels
    assert (of_v["int8_products"], of_v["float_products"]) == (2 * parts_of_k * (1 + parts), 2 * sums * parts), of_v
    assert of_v["opcodes"].keys() == {"IGMMA", "QGMMA"}, of_v
    for row in of_kq:
        # S; dP, dK, and dQ's two parts from the keys of both, these after the loop too
        products = 2 * pieces * (1 + parts), 2 * ((pieces + sums + 4) * parts + 4)
        assert (row["int8_products"], row["float_products"]) == products, row
        assert row["opcodes"].keys() == {"IGMMA", "HGMMA", "QGMMA"}, row
    for row in (of_v, *of_kq):
        assert row["shared_bytes"] <= SHARED_BYTES[90]
        # what else `loops` has are waits that jump back from behind the program's end
        for loop in row["loops"][: 2 * parts]:
            assert (loop["stored"], loop["loaded"]) == (0, 0), row
        # at 192 a part of V is in registers where blocks add in any order
        assert row["spills"] <= (25 if row["deterministic"] else 16 if head_dim == 192 else 0), row


@pytest.mark.parametrize("folder", TRITONS)
@pytest.mark.parametrize("head_dim", [64, 192])
def test_hopper_backward_under_a_bias_with_a_stride_of_1(head_dim, folder):
    """With one key the stride of queries or of heads is 1, which triton makes a constant."""
    rows = machine_code.launches(("hopper", head_dim, "mixed", "bias-all", "1", "ttgir"), folder)
    kernels = IN_TWO if head_dim == 192 else ("backward_kernel",)
    assert [row["kernel"] for row in rows if row["kernel"] in kernels] == [*kernels, *kernels]


@pytest.mark.parametrize("folder", INT8_DP_TRITONS, ids=lambda folder: Path(folder).name if folder else "installed")
@pytest.mark.parametrize("recipe", INT8_DP)
@pytest.mark.parametrize("arch", [slow(80), 90])
def test_int8_dp_is_compiled_on(arch, recipe, folder):
    rows = machine_code.launches((arch, 64, recipe, "causal", "256", "ttgir"), folder)
    passes = {"sum_outputs_kernel", "value_codes_kernel", "grad_out_kernel"}
    assert passes | PRODUCTS.keys() <= {row["kernel"] for row in rows}
