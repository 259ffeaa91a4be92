"""The picture of README is that of the results files."""

import re

import pytest

pytest.importorskip("rich", reason="tables are printed by rich, which is in the extra lab")

from tools import speed_picture
from tools.tables.speed import CARDS, training_speeds


def test_the_committed_picture_is_current():
    committed = speed_picture.PICTURE.read_text(encoding="utf-8")
    assert committed == speed_picture.drawn(), "run `python -m tools.speed_picture`"


def test_bars_are_the_speeds_of_the_files():
    found = training_speeds(*CARDS[speed_picture.CARD])
    wanted = [f"{found[*dims, causal, speed_picture.TOKENS]:.2f}" for dims in speed_picture.HEAD_DIMS
              for causal in speed_picture.MASKS]  # fmt: skip
    assert re.findall(r">(\d\.\d\d)</text>", speed_picture.drawn()) == wanted
