"""What the tool makes of its figures; the figures need a GPU."""

import pytest

from tools.power import speedups


def test_means_are_over_the_best_of_each_shape():
    figures = [
        {"mixed kernel": (800, 700), "mixed forward": (700, 600), "fa4": (400, 350), "cudnn": (200, 100)},
        {"mixed kernel": (100, 100), "mixed forward": (90, 90), "fa4": (50, 400), "cudnn": (200, 100)},
    ]
    assert speedups(figures, "mixed kernel") == pytest.approx((1.0, 0.5**0.5))
