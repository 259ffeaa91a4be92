"""Sums of weights' gradients, of programs' shares."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from sagebwd.kernels.sm90.operands.finish_gradients import ROWS, launch_sum_shares
from tests.gpus import DEVICE, on_gpu

pytestmark = on_gpu


@pytest.mark.parametrize("programs", [(3, 1), (ROWS, 1), (7, ROWS + 5), (None, 9), (4, None)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sums_are_those_of_all_shares(programs, head_dim):
    shares = [None if n is None else torch.randn(n, head_dim, device=DEVICE) for n in programs]
    found, again = (launch_sum_shares(*shares) for _ in range(2))
    for x, a, b in zip(shares, found, again):
        assert (x is None) == (a is None)
        if x is not None:
            wanted = x.double().sum(0)
            assert ((a - wanted).abs() <= 1e-6 * x.double().abs().sum(0)).all()
            assert torch.equal(a, b)


def test_no_weights_have_no_sums():
    assert launch_sum_shares(None, None) == (None, None)
