import pytest
import torch

from sagebwd import sage_attention
from sagebwd.meaning.metrics import relative_l2
from sagebwd.meaning.rotation import hadamard, rotated, rotation, sizes
from sagebwd.recipe import Recipe


@pytest.mark.parametrize(
    ("head_dim", "expected"),
    [(64, (64,)), (128, (128,)), (80, (64, 16)), (96, (64, 32)), (192, (128, 64)), (112, (64, 32, 16)), (33, (32, 1))],
)
def test_blocks_are_powers_of_two(head_dim, expected):
    assert sizes(head_dim) == expected


@pytest.mark.parametrize("head_dim", [1, 3, 16, 64, 80, 100, 128, 192, 250, 256])
def test_it_is_orthogonal_and_its_own_inverse(head_dim):
    r = rotation(head_dim)
    torch.testing.assert_close(r @ r, torch.eye(head_dim, dtype=torch.float64))
    torch.testing.assert_close(r, r.mT)


def test_signs_by_common_bits():
    index = torch.arange(64)
    ones = torch.tensor([[(int(i) & int(j)).bit_count() for j in index] for i in index])
    assert torch.equal(hadamard(64), (1 - 2 * (ones % 2)).double())


def test_rows_keep_their_norms():
    x = torch.randn(3, 7, 96, dtype=torch.float64)
    torch.testing.assert_close(rotated(x).norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotated(rotated(x)), x)


def _errors(recipe, q, k, v, do):
    found = []
    for text, dtype in ((recipe, torch.float32), ("full", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        o = sage_attention(*leaves, is_causal=True, recipe=text, impl="reference")
        found.append([o, *torch.autograd.grad(o, leaves, do.to(dtype))])
    return [float(relative_l2(low, exact)) for low, exact in zip(*found)]


@pytest.mark.parametrize("name", ["mixed", "token", "paper", "token(smooth_q=True)", "token(s=16bit)"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_every_recipe_is_as_right_rotated_on_gaussian_data(name, head_dim):
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 4, 300, head_dim, generator=generator) for _ in range(4))
    recipe = Recipe.parse(name)
    found = (_errors(str(recipe.replace(rotate=rotate)), q, k, v, do) for rotate in (False, True))
    for plain, turned in zip(*found):
        assert turned < 1.25 * plain + 1e-3


@pytest.mark.parametrize("name", ["mixed", "token"])
def test_outlier_channels_of_queries_cost_less(name):
    generator = torch.Generator().manual_seed(1)
    q, k, v, do = (torch.randn(1, 2, 400, 64, generator=generator) for _ in range(4))
    q[..., 5] = 16 + 2 * q[..., 5]
    q[..., 40] = 12 + 2 * q[..., 40]
    plain, turned = _errors(f"{name}(rotate=False)", q, k, v, do), _errors(name, q, k, v, do)
    assert turned[0] < 0.75 * plain[0]
    # Q's e4m3 copy has the outliers whatever S does: dK of `mixed` gains nothing
    assert all(b < 1.05 * a for name, a, b in zip(("o", "dq", "dk", "dv"), plain, turned) if name != "dk")
