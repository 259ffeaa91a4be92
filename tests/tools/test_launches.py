"""dev/launches.md lists the launches that the families make."""

import pytest

pytest.importorskip("triton")
from tools import launches


def test_the_page_is_what_the_families_launch():
    page = launches.PAGE.read_text(encoding="utf-8")
    assert launches.written(page) == page
    assert not [name for name in launches.PURPOSE if f"| `{name}` |" not in page]
