import math

import pytest
import torch

from sagebwd.metrics import cosine, relative_l2, rms, sqnr_db


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
