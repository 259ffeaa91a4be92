"""The picture of README is that of the results files."""

import pytest

pytest.importorskip("rich", reason="tables are printed by rich, which is in the extra lab")

from tools import speed_picture


def test_the_committed_picture_is_current():
    committed = speed_picture.PICTURE.read_text(encoding="utf-8")
    assert committed == speed_picture.drawn(), "run `python -m tools.speed_picture`"
