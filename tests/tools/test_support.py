"""docs/support.json says what dispatch does, and docs/support.md what the file says (test_tables)."""

import json

import pytest

from sagebwd import dispatch
from sagebwd.kernels import families
from tools import support


@pytest.fixture(scope="module")
def asked():
    return support.matrix()


def test_the_matrix_is_what_dispatch_answers(asked):
    committed = support.FILE.read_text(encoding="utf-8")
    assert committed == support.text(asked), "run `python -m tools.support` and `python -m tools.tables`"


def test_the_file_is_json_of_the_same_content(asked):
    assert json.loads(support.text(asked)) == json.loads(json.dumps(asked))


def test_a_change_of_dispatch_is_seen(asked, monkeypatch):
    dispatch._choose.cache_clear()
    monkeypatch.setattr(families, "faster_on", lambda capability: ())
    changed = support.widths_and_recipes()
    dispatch._choose.cache_clear()
    assert changed != asked["recipes"]


@pytest.mark.parametrize(
    ("found", "impl", "card", "expected"),
    [
        (("hopper", "hopper"), "hopper", "9.0", "native"),
        (("mma_sync", "triton"), "mma_sync", "9.0", "served by triton, backward"),
        (("mma_sync", "triton"), "mma_sync", "8.9", "not validated, served by triton, backward"),
        (("triton", "triton"), "triton", "12.0", "not validated"),
        (None, "hopper", "8.0", "declined"),
        (("reference", "reference"), "reference", "no GPU", "native"),
    ],
)
def test_each_status(found, impl, card, expected):
    assert support.status(found, impl, card) == expected


def test_a_row_of_an_owner(monkeypatch, tmp_path):
    tables = pytest.importorskip("tools.tables.support", reason="prints tables by rich, which is in the extra lab")
    monkeypatch.setattr(tables, "BENCHMARKS", tmp_path)
    assert tables.owners() == "No owner has sent a file yet."
    row = {"kind": "causal", "head_dim": 128, "value_dim": 128, "tokens": 8192, "ms": 2.0, "torch_ms": 3.0}
    rows = [row | {"direction": way, "others": {"fa4": [2.5, 0.1]}} for way in ("forward", "training")]
    tests = [{"error": 0.001}, {"error": None}]
    facts = {"gpu": "NVIDIA GeForce RTX 4090", "capability": "8.9", "date": "2027-01-01", "torch": "2.11.0"}
    content = facts | {"triton": "3.6.0", "sagebwd": "0.1.0", "self_tests": tests, "rows": rows}
    (tmp_path / "report_rtx-4090.json").write_text(json.dumps(content))
    assert tables.owners().splitlines()[-1].endswith("| 1 of 2 | not timed | 1.25 / 1.25 |")
