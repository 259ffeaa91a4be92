"""dev/launches.md lists the launches that the families make."""

import pytest

pytest.importorskip("triton")
from sagebwd.kernels.portable import launch as portable
from tools import launches


def test_the_page_is_what_the_families_launch():
    page = launches.PAGE.read_text(encoding="utf-8")
    assert launches.written(page) == page
    assert not [name for name in launches.PURPOSE if f"| `{name}` |" not in page]


def test_a_launch_that_the_page_lacks_is_seen(monkeypatch):
    page = launches.PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(portable, "launch_dq", lambda *_: None)
    monkeypatch.setattr(launches, "FAMILIES", {"portable": launches.FAMILIES["portable"]})
    found = launches.written(page)
    assert found != page
    assert "| `dq_kernel` |" in page
    assert "| `dq_kernel` |" not in found
