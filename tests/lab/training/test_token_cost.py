"""What a gap costs in tokens, by Hoffmann's fit."""

import math

import pytest

from lab.training.token_cost import EXPONENT, B, cost, worth


def test_as_many_more_tokens_close_the_gap():
    for gap, tokens in ((0.02, 39.3e6), (-0.01, 39.3e6), (0.02, 78e9)):
        more = tokens * (1 + cost(gap, tokens))
        assert B / tokens**EXPONENT - B / more**EXPONENT == pytest.approx(gap)
    assert cost(0, 1e9) == 0
    assert cost(0.02, 2e12) == pytest.approx(0.68, abs=0.01)
    assert math.isinf(cost(B / 1e9**EXPONENT, 1e9)), "more than any number of tokens takes off"


def test_a_gap_that_eats_a_gain_costs_it():
    for speed in (0.99, 1.03, 1.2):
        assert cost(worth(speed, 6.5e9), 6.5e9) == pytest.approx(speed - 1)
    assert worth(1.03, 39.3e6) == pytest.approx(0.025, abs=5e-4)
