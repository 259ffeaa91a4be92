"""What `tools.matrix` covers and what it finds; most of its rows need a GPU."""

import json
import math
from dataclasses import replace

import pytest
import torch

from sagebwd.kernels.table import MAX_HEAD_DIM
from tools import fuzz
from tools.matrix import __main__ as matrix
from tools.matrix import check, exact, forms, large, workers
from tools.matrix.forms import FORMS, cell_of

TINY = ["--device", "cpu", "--processes", "1", "--head-dim", "8", "--form", "packed-causal", "--recipe", "auto"]


def cell(form: str, head_dim: int = 8, recipe: str = "token") -> forms.Cell:
    return cell_of(FORMS, head_dim, head_dim, form, recipe, "bfloat16")


def test_every_width_has_every_form():
    rows = list(forms.cells())
    assert len({matrix.name_of(row.key()) for row in rows}) == len(rows)
    automatic = {(row.head_dim, row.form) for row in rows if row.recipe == "auto" and row.head_dim == row.value_dim}
    widths = {*range(8, MAX_HEAD_DIM + 1, 8), 1, 3, 17, 33, 65, 100, 250}
    assert {(width, form) for width in widths for form in FORMS} <= automatic
    pairs = {(row.head_dim, row.value_dim) for row in rows if row.head_dim != row.value_dim}
    assert {(192, 128), (64, 128), (128, 64), (72, 80), (96, 64), (40, 24), (256, 128), (576, 512)} <= pairs
    for width in (8, 17, 64, 72, 80, 128, 256):
        for recipe, dtype in (("paper", torch.bfloat16), ("full", torch.bfloat16), ("auto", torch.float16)):
            here = {x.form for x in rows if (x.head_dim, x.recipe, x.dtype) == (width, recipe, dtype)}
            assert here == set(FORMS), (width, recipe)
    assert {(x.form, x.head_dim) for x in rows if x.recipe == "token"} == {(x, n) for x in FORMS for n in (64, 128)}
    short = list(forms.cells(short=True))
    assert {x.form for x in short} == set(FORMS)
    assert {x.recipe for x in short} == {"auto"}
    assert len(short) == 8 * len(FORMS)


def test_forms_have_the_lengths_and_strides_that_kernels_may_fail_at():
    assert {0, 1, 2, 17, 300} <= set(FORMS["packed-causal"].lengths_q)
    assert 0 in FORMS["packed"].lengths_k
    assert {form.contiguous for form in FORMS.values()} == {False, True}
    assert {form.heads // form.kv_heads for form in FORMS.values()} == {1, 2, 4}
    assert {form.layout for form in FORMS.values()} == {"dense", "packed", "padded", "masked"}
    assert any(length % 2 for length in FORMS["causal"].lengths_q)
    batch = large.BATCH * large.FORMS["many-heads"].heads
    assert min(batch, large.SEQUENCES) > 65535
    assert large.LONG * large.FORMS["over-2^31"].heads * 128 > 2**31
    for form in FORMS:
        inputs = cell(form).inputs("cpu")
        spoilt = cell(form).with_spoilt(inputs)
        assert [x.stride() for x in spoilt] == [x.stride() for x in inputs]
        same = all(map(torch.equal, inputs, spoilt))
        assert same == (not FORMS[form].spoilt), form


@pytest.mark.parametrize("group", [1, 3])
def test_groups_hold_each_row_once_and_parts_divide_them(group):
    rows = list(forms.cells())
    groups = matrix.groups_of(rows)
    parts = [row for part in range(group) for rows in groups[part::group] for row in rows]
    assert sorted(map(str, parts)) == sorted(map(str, rows))


def test_fp32_is_sdpa():
    row = cell("grouped-causal")
    inputs = row.inputs("cpu")
    leaves = [x.float().requires_grad_() for x in inputs[:3]]
    o = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    expected = o.detach(), *torch.autograd.grad(o, leaves, inputs[3].float())
    o, lse, *gradients = exact.outcome(row, inputs, *exact.visible_and_bias(row, "cpu"))
    for x, y in zip((o, *gradients), expected):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    assert lse.shape == o.shape[:3]


@pytest.mark.parametrize("form", ["packed", "padding-nan", "sinks", "head-nan", "packed-nan"])
def test_the_reference_is_right(form):
    assert check.check(cell(form), "reference", "cpu")["status"] == "ok"


def spoil(monkeypatch, change):
    """Let calls of the public functions give other results."""
    attended = fuzz.attended

    def changed(row, leaves, impl):
        o, lse = attended(row, leaves, impl)
        return (change(row, o, leaves), lse) if impl is None else (o, lse)

    monkeypatch.setattr(fuzz, "attended", changed)


def test_what_is_wrong_by_a_tenth_is_found(monkeypatch):
    spoil(monkeypatch, lambda row, o, leaves: 1.1 * o)
    row = check.check(cell("causal", recipe="paper"), None, "cpu")
    assert row["status"] == "wrong"
    assert row["errors"][0] == pytest.approx(0.1, rel=0.3)
    assert "o: relative L2" in row["message"]


def test_what_only_the_emulator_knows_is_found(monkeypatch):
    """Far within the bound on errors against FP32, and no value of the recipe."""

    def change(row, o, leaves):
        moved = o.clone()
        with torch.no_grad():
            moved[0, 0, 5, 0] += 0.1
        return moved

    spoil(monkeypatch, change)
    row = check.check(cell("full"), None, "cpu")
    assert row["status"] == "wrong"
    assert row["message"].startswith("call 1: emulator: o: error")


def test_only_the_last_call_wrong_is_found(monkeypatch):
    last = (check.CALLS - 1) * 1_000_000
    spoil(monkeypatch, lambda row, o, leaves: o * (1.1 if row.seed == last else 1))
    assert check.check(cell("17-tokens"), None, "cpu")["message"].startswith(f"call {check.CALLS}: ")


@pytest.mark.parametrize("form", ["packed-nan", "head-nan"])
def test_a_nan_that_crosses_is_found(monkeypatch, form):
    def leaking(row, o, leaves):
        return o + leaves[1].sum() * 0

    spoil(monkeypatch, leaking)
    row = check.check(cell(form), None, "cpu")
    assert row["status"] == "wrong"
    assert row["errors"][0] is None


def test_values_in_rows_that_see_no_key_are_found(monkeypatch):
    spoil(monkeypatch, lambda row, o, leaves: torch.where((o == 0).all(-1, keepdim=True), 1e-30, o))
    row = check.check(cell("padding-nan"), None, "cpu")
    assert row["message"].endswith("rows that see no key are not zeros")


def refused(monkeypatch, error):
    def raises(*_):
        raise error

    monkeypatch.setattr(fuzz, "attended", raises)


def test_a_refusal_names_the_argument_and_is_in_place(monkeypatch):
    wide = cell("causal", 576)
    assert check.check(wide, None, "cpu")["status"] == "refused"
    refused(monkeypatch, ValueError("recipe: cannot"))
    assert check.check(cell("causal", 72, "mixed"), "triton", "cpu")["status"] == "refused"
    assert check.check(cell("causal", 72, "auto"), "triton", "cpu")["message"].startswith("refused: ")
    refused(monkeypatch, ValueError("no"))
    assert "names no argument" in check.check(wide, None, "cpu")["message"]
    refused(monkeypatch, RuntimeError("Triton Error [CUDA]: invalid argument"))
    with pytest.raises(RuntimeError):  # which a worker tells as a crash
        check.check(wide, None, "cpu")


def test_the_command_runs_records_and_resumes(tmp_path, capfd, monkeypatch):
    paths = ["--output", str(tmp_path / "rows.jsonl"), "--results", str(tmp_path / "results")]
    assert matrix.main([*TINY, *paths, "--commit", "abc", "--resume"]) == 0
    assert "2 rows, 0 of them there" in capfd.readouterr().out
    (path,) = (tmp_path / "results").glob("matrix_cpu_*_abc.json")
    written = json.loads(path.read_text())
    assert written["counts"] == {"ok": 2}
    assert [row["dtype"] for row in written["rows"]] == ["bfloat16", "float16"]
    assert matrix.main([*TINY, *paths, "--commit", "abc", "--resume", "--seconds", "0"]) == 0
    assert "2 rows, 2 of them there" in capfd.readouterr().out
    monkeypatch.setattr(matrix, "code", lambda: "of another commit")
    assert matrix.main([*TINY, *paths, "--commit", "abc", "--resume", "--seconds", "0"]) == 0
    assert "2 rows, 0 of them there" in capfd.readouterr().out
    assert matrix.main([*TINY, *paths, "--commit", "abc", "--part", "3/3"]) == 0
    assert "0 rows, 0 of them there" in capfd.readouterr().out


def test_a_process_that_dies_loses_one_row():
    row = cell("17-tokens")
    bad = replace(row, form="dies", shape=None)  # which has no shape to draw
    groups = [[row, bad, replace(row, recipe="full")]]
    found = [row for rows in workers.run(groups, 1, "reference", "cpu", math.inf) for row in rows]
    assert [row["status"] for row in found] == ["ok", "crashed", "ok"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_is_poisoned():
    check.reserve("cuda")
    held = torch.zeros(1000, device="cuda")
    check.poison("cuda")
    for size in (100, 2**19, 2**22):
        assert torch.empty(size, device="cuda").isnan().all()
    assert not held.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_width_of_each_kind_in_every_form(tmp_path, capfd):
    code = matrix.main(["--short", "--no-results", "--output", str(tmp_path / "rows.jsonl")])
    assert code == 0, capfd.readouterr().out
