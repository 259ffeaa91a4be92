"""What `tools.matrix` covers and what it finds; most of its rows need a GPU."""

import itertools
import json
from collections import defaultdict

import pytest
import torch

from sagebwd.kernels.capabilities import WIDE
from sagebwd.kernels.sm90.widths import FORMS as HOPPER
from tools import fuzz
from tools.matrix import __main__ as matrix
from tools.matrix import check, forms, sizes
from tools.matrix.forms import FORMS, cell_of

TINY = ["--device", "cpu", "--processes", "1", "--head-dim", "8", "--form", "packed-causal", "--recipe", "token"]
TINY += ["--every"]


def cell(form: str, head_dim: int = 8, recipe: str = "token") -> forms.Cell:
    return cell_of(FORMS, head_dim, head_dim, form, recipe, "bfloat16")


WIDTHS = {*range(8, WIDE + 1, 8), 1, 3, 17, 33, 65, 100, 250}
PAIRS = {(192, 128), (64, 128), (128, 64), (72, 80), (96, 64), (100, 192), (256, 128), (576, 512)}
WIDE_DIMS = {(width, width) for width in (257, 288, 320, 384, 512)}
VARIANTS = [("paper", torch.bfloat16), ("full", torch.bfloat16), ("token", torch.float16)]
APART = [("token(dp=int8)", torch.bfloat16)]


def rows_of(size: str) -> list[forms.Cell]:
    rows = list(sizes.cells(size))
    assert len({matrix.name_of(row.key()) for row in rows}) == len(rows)
    return rows


def met(rows: list[forms.Cell], recipe: str, dtype: torch.dtype) -> dict[tuple[int, int], set[str]]:
    """The forms of each width but the wide ones."""
    found = defaultdict(set)
    for row in rows:
        if (row.recipe, row.dtype) == (recipe, dtype) and (row.head_dim, row.value_dim) not in WIDE_DIMS:
            found[row.head_dim, row.value_dim].add(row.form)
    return found


def test_every_width_has_every_form_in_full():
    rows = rows_of("every")
    automatic = met(rows, "auto", torch.bfloat16)
    assert {(width, width) for width in WIDTHS} | PAIRS == set(automatic)
    assert all(found == set(FORMS) for found in automatic.values())
    for width in (8, 17, 64, 72, 80, 128, 256):
        for variant in (*VARIANTS, *APART):
            assert met(rows, *variant)[width, width] == set(FORMS), (width, variant)
    portable = met(rows, "token", torch.bfloat16)
    assert {dims: found == set(FORMS) for dims, found in portable.items()} == dict.fromkeys(automatic, True)
    assert {dims for dims, found in met(rows, "auto", torch.float16).items() if found == set(FORMS)} == set(HOPPER)


def test_the_cover_meets_every_form_wherever_widths_compile_alike():
    rows = rows_of("cover")
    assert {str(row.key()) for row in rows} < {str(row.key()) for row in rows_of("every")}
    automatic, portable = (met(rows, recipe, torch.bfloat16) for recipe in ("auto", "token"))
    assert {(width, width) for width in WIDTHS} | PAIRS == set(automatic) == set(portable)
    assert all({"causal", "packed-causal", "padding"} <= found for found in automatic.values())
    assert all(automatic[dims] == set(FORMS) for dims in HOPPER)
    half = [met(rows, "auto", torch.float16)[dims] for dims in HOPPER]
    assert all(half)
    assert set().union(*half) == {"causal", "packed-causal", "padding"}
    classes, turns = defaultdict(list), defaultdict(list)
    for dims, found in portable.items():
        assert {"causal", "packed-causal", "padding"} <= found, dims
        assert len(found) >= 8, dims
        alike = sizes.alike(max(dims))
        classes[alike].append(found)
        if dims in sizes.rotated():
            turns[alike].append(found)
        elif max(dims) <= WIDE:
            assert found == set(FORMS), dims
    for alike, found in classes.items():
        assert len(found) < 3 or set().union(*found) == set(FORMS), alike
    # where no width of the class has all forms, turns alone do it: of 136, 152, ..., 248
    assert set().union(*turns[256, 8]) == set(FORMS)
    assert all(found != set(FORMS) for found in turns[256, 8])
    assert len(classes[256, 8]) == 8
    for dims, variant in itertools.product(sizes.MOST_USED, APART):
        assert met(rows, *variant)[dims] == {"causal", "packed-causal", "padding"}
    once = {
        dims
        for recipe in ("paper", "full")
        for dims, found in met(rows, recipe, torch.bfloat16).items()
        if len(found & {"causal", "packed-causal", "padding"}) == len(found) == 1
    }
    assert set(sizes.rotated()) <= once


def test_wide_heads_meet_every_form():
    found = defaultdict(set)
    for row in rows_of("every"):
        if (row.head_dim, row.value_dim) in WIDE_DIMS:
            found[row.recipe, row.dtype].add((row.head_dim, row.form))
    for variant in (("token", torch.bfloat16), *VARIANTS):  # torch runs those of "auto"
        assert found.pop(variant) == {(width, form) for width, _ in WIDE_DIMS for form in FORMS}
    assert not found


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
    assert (written["size"], written["resumed"]) == ("every", 0)
    assert 0 < written["seconds"] < 600
    assert not any("seconds" in row for row in written["rows"])
    assert [row["dtype"] for row in written["rows"]] == ["bfloat16", "float16"]
    assert matrix.main([*TINY, *paths, "--commit", "abc", "--resume", "--seconds", "0"]) == 0
    assert "2 rows, 2 of them there" in capfd.readouterr().out
    monkeypatch.setattr(matrix, "code", lambda: "of another commit")
    assert matrix.main([*TINY, *paths, "--commit", "abc", "--resume", "--seconds", "0"]) == 0
    assert "2 rows, 0 of them there" in capfd.readouterr().out
    assert matrix.main([*TINY, *paths, "--commit", "abc", "--part", "3/3"]) == 0
    assert "0 rows, 0 of them there" in capfd.readouterr().out


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
