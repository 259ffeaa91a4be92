"""e4m3: the emulator against the formulas of `sagebwd.reference.float8` row by row, and what follows from them."""

import math

import pytest
import torch
from torch.testing import assert_close

from sagebwd import sage_attention
from sagebwd.masks.band import Band
from sagebwd.numerics import E4M3_MAX, RESTORED
from sagebwd.recipe import Recipe
from sagebwd.reference.emulator import Emulator
from sagebwd.reference.float8 import _normalised, e4m3, queries_a_scale
from sagebwd.reference.rotation import rotation
from tests.inputs import draw

pytestmark = pytest.mark.rounding

# e4m3 gradients beside an INT8 forward
E4M3 = "token(v_scale=sequence, dv=fp8, dq=fp8, dk=fp8)"
# The magnitudes of e4m3 in the order of their codes: subnormal, then eight an octave; the last, 480, is NaN instead.
GRID = [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0**octave for octave in range(-9, 6) for m in range(8)][:-1]


def to_grid(x):
    """The nearest of GRID, and of two as near the one of an even code. FP64 goes through FP32, where ties are ties."""
    grid = torch.tensor(GRID, dtype=torch.float64)
    distance = (x.float().double().abs().clamp(max=GRID[-1])[..., None] - grid).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    even = 2 - torch.arange(len(GRID)) % 2
    return grid[(nearest * even).argmax(-1)] * x.sign()


def normalised(x):
    """x times the largest power of two that leaves it at most 448, on the grid; and what undoes the power.

    Times what rounding both operands of a product takes from it on average.
    """
    largest = x.abs().max().item()
    power = 2.0 ** math.floor(math.log2(448 / largest)) if largest > 0 else 1.0
    return to_grid(x * power), 1 / power / 0.9993**2


def psi(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / torch.where(scale == 0, 1, scale)) * scale


def transcription(q, k, v, do, o, lse, dlse, visible, scale, smooth_v, r):
    """dQ, dK and dV of one key head and of the queries (G, N, D) that share it, row by row in FP64. r: rotation."""
    q, k = psi(q @ r), psi((k - k.mean(0)) @ r)
    norm_v = (v - v.mean(0) if smooth_v else v).abs().amax(0).norm()  # R
    pairs = (*q.shape[:2], len(k))
    p_codes, ds_codes = torch.zeros(pairs, dtype=q.dtype), torch.zeros(pairs, dtype=q.dtype)
    do_weighted, q_weighted, spread = torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(q[..., :1])
    for row in [(g, i) for g in range(len(q)) for i in range(q.shape[1]) if visible[i].any()]:
        seen = visible[row[1]]
        s = k[seen] @ q[row] * scale
        p = torch.exp(s - lse[row])
        dp = v[seen] @ do[row]
        delta = do[row] @ o[row] - dlse[row]
        rest = min(max(math.expm1(lse[row] - s.max()), 2.0**-10), 1)
        u = (rest * norm_v * do[row].norm() + dlse[row].abs()).item()
        e = math.floor(math.log2(448 * math.exp(lse[row] - s.max())))
        p_codes[row][seen] = to_grid(2.0**e * p)
        do_weighted[row] = do[row] * 2.0**-e
        if u > 0:  # dS is 0 otherwise
            b = math.ceil(math.log2(u))
            ds_codes[row][seen] = to_grid(2.0**e * p * (dp - delta) * 2.0**-b)
            q_weighted[row] = r @ q[row] * 2.0 ** (b - e)
            spread[row] = 2.0 ** (b - e)
    k_codes, dq_scale = normalised(k)
    dv, dk = torch.zeros_like(v), torch.zeros_like(k)
    for block in [(g, rows) for g in range(len(q)) for rows in torch.arange(q.shape[1]).split(queries_a_scale(16))]:
        (do_codes, dv_scale), (q_codes, dk_scale) = normalised(do_weighted[block]), normalised(q_weighted[block])
        dv += p_codes[block].mT @ do_codes * dv_scale
        dk += ds_codes[block].mT @ q_codes * dk_scale * scale
    dq = ds_codes @ k_codes * dq_scale * spread * scale
    return dq @ r, dk, dv


def case(name):
    """Inputs in FP64: q, k, v, do, and whether it is causal, dlse, which keys count, and V-smoothing."""
    group = 3 if name == "group" else 1
    tokens_q, tokens_k = (150, 200) if name == "blocks" else (40, 40)
    q, k, v, do = draw(
        heads=2 * group, kv_heads=2, tokens=tokens_q, kv_tokens=tokens_k, head_dim=16, dtype=torch.float64
    )
    dlse, valid = torch.zeros(q.shape[:3], dtype=torch.float64), torch.ones(1, tokens_k, dtype=torch.bool)
    smooth_v = True
    if name == "group":
        do[:, 1] *= 100
        q[:, 5] *= 3
    elif name == "dlse":
        dlse = 30 * draw(tokens=tokens_q, head_dim=1, seed=1, dtype=torch.float64)[0][..., 0]
    elif name == "rows-without-keys":
        valid[:, :3] = False
    elif name == "channel-without-range":
        v = 0.01 * v
        v[..., 2] = 7
    elif name == "zeros":
        do *= 1e-6
        for x in (q, k, v, do):
            x[:, :, 10:13] = 0
        do[:, :, 20] = 0
        k[:, 1] = 1
    elif name == "saturated":  # equal P, one key against all others: 2^e P (dP - delta) 2^-b is 737 at that key
        smooth_v = False
        q, v = 0 * q, -torch.ones_like(v)
        q, k, v, do = (x[:, :, :10] for x in (q, k, v, torch.ones_like(do)))
        v[:, :, 4] = 1
        dlse, valid = dlse[..., :10], valid[:, :10]
    return (q, k, v, do), name not in ("full", "saturated"), dlse, valid, smooth_v


@pytest.mark.parametrize(
    "name",
    ["full", "causal", "blocks", "group", "dlse", "rows-without-keys", "channel-without-range", "zeros", "saturated"],
)
@pytest.mark.parametrize("rotate", [False, True])
def test_emulator_is_the_formulas(name, rotate):
    (q, k, v, do), is_causal, dlse, valid, smooth_v = case(name)
    recipe = Recipe.parse(E4M3).replace(smooth_v=smooth_v, rotate=rotate)
    r = rotation(16) if rotate else torch.eye(16, dtype=torch.float64)
    emulator = Emulator(q, k, v, recipe, 0.2, Band.of(is_causal), valid)
    o, lse, _ = emulator.forward()
    actual = emulator.backward(do, o, lse, dlse if name == "dlse" else None)
    group = q.shape[1] // k.shape[1]
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    visible = (visible.tril() if is_causal else visible)[:, valid[0]]
    for head in range(k.shape[1]):
        queries = slice(head * group, (head + 1) * group)
        expected = transcription(
            q[0, queries], k[0, head, valid[0]], v[0, head, valid[0]],
            *(x[0, queries] for x in (do, o, lse, dlse)), visible, 0.2, smooth_v, r,
        )  # fmt: skip
        shares = (actual[0][0, queries], *(x[0, head, valid[0]] for x in actual[1:]))
        for gradient, target in zip(shares, expected):
            assert_close(gradient, target, rtol=1e-9, atol=1e-9 * target.abs().max().item())
    assert all((x[0, :, ~valid[0]] == 0).all() for x in actual[1:])


def _gradients(q, k, v, do, recipe):
    emulator = Emulator(q, k, v, Recipe.parse(recipe), 0.125, Band.of(True))
    o, lse, _ = emulator.forward()
    return emulator.backward(do, o, lse)


def test_each_product_is_chosen_by_itself():
    q, k, v, do = draw(tokens=100)
    sides = [_gradients(q, k, v, do, recipe) for recipe in ("token(v_scale=sequence)", E4M3)]
    for index, name in enumerate(("dq", "dk", "dv")):
        actual = _gradients(q, k, v, do, f"token({name}=fp8, v_scale=sequence)")
        for other, gradient in enumerate(actual):
            assert torch.equal(gradient, sides[other == index][other])
            assert not torch.equal(gradient, sides[other != index][other])


def test_forward_is_that_of_token():
    inputs = draw(tokens=200)[:3]
    recipes = ("token(v_scale=sequence)", E4M3)
    assert torch.equal(*(sage_attention(*inputs, recipe=recipe) for recipe in recipes))


def test_e4m3_rounds_to_the_nearest():
    grid = torch.tensor(GRID)
    middles = (grid[1:] + grid[:-1]) / 2
    x = torch.cat([grid, middles, middles.nextafter(grid[1:]), middles.nextafter(grid[:-1]), 500 * torch.rand(1000)])
    x = torch.cat([x, -x])
    assert torch.equal(e4m3(x), to_grid(x).float())
    assert torch.equal(e4m3(grid), grid)
    ties = [(1.0625, 1.0), (1.1875, 1.25), (17.0, 16.0), (432.0, 448.0), (2.0**-10, 0.0), (3 * 2.0**-10, 2.0**-8)]
    assert e4m3(torch.tensor([tie for tie, _ in ties])).tolist() == [even for _, even in ties]


def test_e4m3_saturates_and_keeps_nan_and_dtype():
    x = torch.tensor([448, 464, 465, 1e30, math.inf, -500, -math.inf, math.nan])
    assert_close(e4m3(x), torch.tensor([448.0] * 5 + [-448.0] * 2 + [math.nan]), equal_nan=True)
    assert E4M3_MAX == torch.finfo(torch.float8_e4m3fn).max == GRID[-1]
    for dtype in (torch.float32, torch.float64):
        assert e4m3(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize("largest", [1.0, 1.75, 1.7500001, 1.99, 448.0, 449.0, 2.0**-60, 3e30, 1e-30])
def test_the_largest_power_of_two_that_fits(largest):
    x = torch.tensor([largest, -largest / 3, 0.0], dtype=torch.float64).reshape(1, 1, 3)
    codes, scale = _normalised(x)
    power = math.ldexp(1.0, round(math.log2(scale.item() / RESTORED)))
    assert scale.item() == power * RESTORED
    assert_close(codes, to_grid(x / power), rtol=0, atol=0)
    assert 224 < largest / power <= 448


@pytest.mark.parametrize("draw_one", [torch.randn, lambda n: torch.randn(n).exp(), lambda n: torch.rand(n).log()])
def test_what_rounding_takes_is_given_back(draw_one):
    """Of both operands of a product, whatever they are drawn from and wherever in an octave they lie."""
    torch.manual_seed(0)
    taken = []
    for phase in torch.linspace(0, 1, 9)[:-1]:
        x = draw_one(1 << 18).nan_to_num(neginf=0)
        x = x.abs() / x.abs().max() * 448 * 2**-phase
        taken.append(((x.double() * e4m3(x)).sum() / x.double().square().sum()).item())
    # each is within .0004 of the mean, and the mean of what is given back
    assert abs(sum(taken) / len(taken) - RESTORED**-0.5) < 2e-4
