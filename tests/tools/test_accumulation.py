"""The emulated accumulator of Hopper's FP8 tensor cores."""

import torch

from tools.accumulation import FP32, HOPPER, line, summed


def draw(*shape):
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(0)).double()


def test_small_integers_are_summed_exactly():
    a, b = draw(4, 128), draw(128, 8)
    assert torch.equal(summed(a, b, FP32), a @ b)
    assert torch.equal(summed(a, b, FP32, promote=64), a @ b)


def test_terms_far_below_the_sum_are_lost():
    a, b = torch.zeros(1, 64, dtype=torch.float64), torch.ones(64, 1, dtype=torch.float64)
    a[0, 0], a[0, 32:] = 2.0**HOPPER, 0.5
    assert summed(a, b, HOPPER).item() == 2.0**HOPPER
    assert summed(a, b, HOPPER + 1).item() == 2.0**HOPPER + 16


def test_a_sum_of_one_sign_comes_out_too_small():
    slopes = [float(cell) for cell in line(1024, 0, 2.0, 0.0).split("|")[5:8:2]]
    assert slopes[0] < 0.985 < 0.995 < slopes[1]
    promoted = float(line(1024, 0, 2.0, 0.0, promote=128).split("|")[5])
    assert slopes[0] + 0.01 < promoted
