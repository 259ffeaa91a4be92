import math

import pytest
import torch

from sagebwd.meaning.metrics import Comparison, cosine, largest_logit, relative_l2, rms, sqnr_db

pytestmark = pytest.mark.rounding


def test_by_hand():
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])
    assert cosine(a, b) == pytest.approx(0.6)
    assert relative_l2(a, b) == pytest.approx(4 / 3)
    assert rms(a) == pytest.approx(math.sqrt(12.5))
    assert sqnr_db(torch.tensor([1.1]), torch.tensor([1.0])) == pytest.approx(20, abs=1e-4)


def test_zeros():
    zero, one = torch.zeros(3), torch.ones(3)
    assert relative_l2(zero, zero) == 0
    assert relative_l2(one, zero) == math.inf
    assert cosine(zero, zero) == 1
    assert cosine(one, zero) == 0
    assert sqnr_db(one, one) == math.inf
    assert rms(torch.zeros(0)) == 0


def test_accumulates_in_fp64():
    x = torch.full((1 << 20,), 1.0) + torch.linspace(0, 1e-6, 1 << 20)
    assert relative_l2(x, x.double() * (1 + 1e-9)) == pytest.approx(1e-9, rel=0.01)


def test_nan_is_not_hidden():
    assert math.isnan(relative_l2(torch.tensor([math.nan]), torch.tensor([1.0])))


def test_largest_logit_is_that_of_the_scores():
    q, k = torch.randn(1, 4, 10, 8), torch.randn(1, 2, 10, 8)
    scores = q @ k.repeat_interleave(2, 1).mT * 0.5
    assert largest_logit(q, k, scale=0.5) == pytest.approx(scores.abs().max().item())
    assert largest_logit(q, k, scale=0.5, is_causal=True) == pytest.approx(scores.tril().abs().max().item())


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


def test_pieces_of_zeros():
    zero, one = Comparison(), Comparison()
    zero.add(torch.zeros(3), torch.zeros(3))
    one.add(torch.ones(3), torch.zeros(3))
    assert (zero.cosine(), zero.relative_l2(), zero.rms(3)) == (1, 0, 0)
    assert (one.cosine(), one.relative_l2()) == (0, math.inf)
