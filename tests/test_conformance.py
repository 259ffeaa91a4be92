"""The rule that kernels are held to, on tensors whose distances are known."""

import math
import re

import pytest
import torch

from sagebwd.meaning.conformance import emulator_error, violation

HIGH = torch.tensor([4.0, -1.0, 2.0, 1.0], dtype=torch.float64)
LOW = HIGH + torch.tensor([0.5, 0.0, 0.0, 0.0], dtype=torch.float64)
EPS = 0.125  # the largest budget is 2 * (0.5 + 0.125 * 4) = 2


def moved(*by):
    return HIGH + torch.tensor(by, dtype=torch.float64)


def test_emulator_error_is_the_largest_and_the_root_mean_square():
    assert emulator_error(LOW, HIGH) == (0.5, 0.25)
    assert emulator_error(torch.empty(0), torch.empty(0)) == (0.0, 0.0)


def test_within_budget():
    assert violation(HIGH, LOW, HIGH, EPS) is None
    assert violation(moved(0, 0, 0, -0.9), LOW, HIGH, EPS) is None


@pytest.mark.parametrize(
    ("actual", "says"),
    [
        (moved(0, 2.1, 0, 0), "error 2.100e.* over budget 2.000e.* at .1,., largest value 4.000e"),
        (moved(1.9, 1.9, 1.9, 1.9), "RMS error 1.900e"),
        (moved(0, math.nan, 0, math.inf), "2 values are not finite"),
    ],
    ids=["largest", "RMS", "not finite"],
)
def test_what_breaks_the_rule(actual, says):
    problem = violation(actual, LOW, HIGH, EPS)
    assert problem is not None
    assert re.search(says, problem)


def test_the_largest_error_of_several_draws_counts():
    assert violation(moved(0, 2.1, 0, 0), LOW, HIGH, EPS, [(0.6, 0.3)]) is None
    assert violation(moved(0, 2.1, 0, 0), LOW, HIGH, EPS, [(0.1, 0.1)]) is not None


def test_nothing_is_the_recipe_of_nothing():
    assert violation(torch.empty(0), torch.empty(0), torch.empty(0), EPS) is None
