"""The examples run, and learn."""

import math
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.rounding

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_plain_pytorch(capsys):
    example = runpy.run_path(str(EXAMPLES / "plain_pytorch.py"))
    losses, expected = example["train"](40), example["train"](40, use_sdpa=True)
    assert losses != expected
    assert abs(losses[-1] - expected[-1]) < 0.02
    # what is left without attention
    assert losses[-1] < math.log(example["VOCABULARY"]) / 10
    assert capsys.readouterr().out.startswith("step   0  loss 3.")
