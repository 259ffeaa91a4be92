"""What a saturated softmax does, at a size that tests have time for."""

import pytest

from tools import saturation

pytestmark = pytest.mark.rounding


def test_low_precision_does_not_resolve_a_saturated_softmax():
    share, found = saturation.errors(30.0, 3.0, tokens=128)
    assert share > 0.9
    assert min(found[recipe][1] for recipe in saturation.RECIPES) > 0.5
    assert max(found["16 bit"]) < 0.1
    share, found = saturation.errors(0.125, 0.5, tokens=128)
    assert share == 0
    assert max(max(of) for of in found.values()) < 0.1
