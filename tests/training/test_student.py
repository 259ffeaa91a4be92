"""Student's t against printed tables, and against its own definition."""

import math

import pytest

from sagebwd.training import student


@pytest.mark.parametrize(
    ("confidence", "freedom", "expected"),
    [
        (0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 3, 3.182), (0.95, 9, 2.262), (0.95, 12, 2.179), (0.95, 120, 1.980),
        (0.90, 4, 2.132), (0.90, 9, 1.833), (0.99, 7, 3.499), (0.99, 30, 2.750),
    ],
)  # fmt: skip
def test_critical_values_are_those_of_tables(confidence, freedom, expected):
    assert student.critical(confidence, freedom) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 10, 25])
@pytest.mark.parametrize("t", [0.3, 1.0, 2.5])
def test_probabilities_are_the_integral_of_the_density(freedom, t):
    factor = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    steps = 2000
    middles = [(index + 0.5) * t / steps for index in range(steps)]
    inside = 2 * t / steps * sum(factor * (1 + x * x / freedom) ** (-(freedom + 1) / 2) for x in middles)
    assert student.within(t, freedom) == pytest.approx(inside, abs=1e-6)
    assert student.above(t, freedom) == pytest.approx((1 - inside) / 2, abs=1e-6)
    assert student.above(-t, freedom) == pytest.approx((1 + inside) / 2, abs=1e-6)


def test_the_middle():
    assert student.within(0, 5) == 0
    assert student.above(0, 5) == 0.5
