"""docs/support.json says what dispatch does, and docs/support.md what the file says (test_tables)."""

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
