"""Distances of tensors, and the rule that kernels are held to."""

import math
import re

import pytest
import torch

from benchmarks.conformance import emulator_error, rms, violation
from lab.training.logits import largest_logit
from sagebwd.reference.metrics import Comparison, cosine, relative_l2

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


@pytest.mark.rounding
def test_by_hand():
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])
    assert cosine(a, b) == pytest.approx(0.6)
    assert relative_l2(a, b) == pytest.approx(4 / 3)
    assert rms(a) == pytest.approx(math.sqrt(12.5))


@pytest.mark.rounding
def test_zeros():
    zero, one = torch.zeros(3), torch.ones(3)
    assert relative_l2(zero, zero) == 0
    assert relative_l2(one, zero) == math.inf
    assert cosine(zero, zero) == 1
    assert cosine(one, zero) == 0
    assert rms(torch.zeros(0)) == 0


@pytest.mark.rounding
def test_accumulates_in_fp64():
    x = torch.full((1 << 20,), 1.0) + torch.linspace(0, 1e-6, 1 << 20)
    assert relative_l2(x, x.double() * (1 + 1e-9)) == pytest.approx(1e-9, rel=0.01)


@pytest.mark.rounding
def test_nan_is_not_hidden():
    assert math.isnan(relative_l2(torch.tensor([math.nan]), torch.tensor([1.0])))


@pytest.mark.rounding
def test_largest_logit_is_that_of_the_scores():
    q, k = torch.randn(1, 4, 10, 8), torch.randn(1, 2, 10, 8)
    scores = q @ k.repeat_interleave(2, 1).mT * 0.5
    assert largest_logit(q, k, scale=0.5) == pytest.approx(scores.abs().max().item())
    assert largest_logit(q, k, scale=0.5, is_causal=True) == pytest.approx(scores.tril().abs().max().item())


@pytest.mark.rounding
def test_pieces_give_the_figures_of_the_whole():
    torch.manual_seed(0)
    expected = torch.randn(100, 7)
    actual = expected + 0.1 * torch.randn(100, 7)
    comparison = Comparison()
    for rows in (slice(0, 33), slice(33, 33), slice(33, 100)):
        comparison.add(actual[rows], expected[rows])
    assert comparison.cosine() == pytest.approx(cosine(actual, expected), rel=1e-12)
    assert comparison.relative_l2() == pytest.approx(relative_l2(actual, expected), rel=1e-12)
    assert comparison.rms(700) == pytest.approx(rms(expected), rel=1e-12)
    assert comparison.rms(1400) == pytest.approx(rms(expected) / math.sqrt(2), rel=1e-12)
    assert comparison.peak == expected.abs().max().item()


@pytest.mark.rounding
def test_pieces_of_zeros():
    zero, one = Comparison(), Comparison()
    zero.add(torch.zeros(3), torch.zeros(3))
    one.add(torch.ones(3), torch.zeros(3))
    assert (zero.cosine(), zero.relative_l2(), zero.rms(3)) == (1, 0, 0)
    assert (one.cosine(), one.relative_l2()) == (0, math.inf)
