"""What a saturated softmax does, at a size that tests have time for."""

import pytest

from lab.studies import saturation

pytestmark = pytest.mark.rounding


def test_low_precision_does_not_resolve_a_saturated_softmax():
    (hard,), (easy,) = saturation.measure((30.0,), (3.0,), 128), saturation.measure((0.125,), (0.5,), 128)
    assert hard["saturated"] > 0.9
    assert min(hard["errors"][recipe]["dQ"] for recipe in saturation.RECIPES) > 0.5
    assert max(hard["errors"]["16 bit"].values()) < 0.1
    assert easy["saturated"] == 0
    assert max(max(of.values()) for of in easy["errors"].values()) < 0.1
