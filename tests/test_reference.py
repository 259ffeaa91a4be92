"""The emulator: exact where nothing is quantised, and equal to a direct transcription of the algorithm where it is."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from sagebwd.masks.band import Band
from sagebwd.recipe import Recipe
from sagebwd.reference import emulator
from sagebwd.reference.emulator import Emulator
from sagebwd.reference.metrics import relative_l2
from tests.inputs import draw
from tests.traced import trace

pytestmark = pytest.mark.rounding

FULL = Recipe.named("full")


def psi(x):
    scale = x.abs().max() / 127
    return torch.round(x / scale) * scale if scale > 0 else torch.zeros_like(x)


def hadamard(size):
    """Over the root of its size; its own inverse."""
    odd = torch.tensor([[(i & j).bit_count() % 2 for j in range(size)] for i in range(size)])
    return (1 - 2 * odd).double() / size**0.5


def transcription(q, k, v, do, recipe, scale, is_causal):
    """One head, token by token and tile by tile, straight from the paper's algorithms; all in FP64."""
    tokens_q, tokens_k = len(q), len(k)
    visible = torch.ones(tokens_q, tokens_k, dtype=torch.bool)
    visible = visible.tril() if is_causal else visible
    k = k - k.mean(0) if recipe.smooth_k else k
    v_mean = v.mean(0) if recipe.smooth_v else torch.zeros_like(v[0])
    rows = [range(start, min(start + recipe.block_q, tokens_q)) for start in range(0, tokens_q, recipe.block_q)]
    columns = [range(start, min(start + recipe.block_k, tokens_k)) for start in range(0, tokens_k, recipe.block_k)]

    def operand(x, blocks, by_token):
        out, scales = x.clone(), torch.ones(len(x), dtype=x.dtype)
        for block in blocks:
            for group in [[t] for t in block] if by_token else [list(block)]:
                scales[group] = x[group].abs().max() / 127
                out[group] = psi(x[group])
        return out, torch.where(scales == 0, 1.0, scales)

    r = hadamard(q.shape[1]) if recipe.rotate else torch.eye(q.shape[1], dtype=q.dtype)
    q_hat, q_scale = operand(q @ r, rows, recipe.q_scale == "token")
    k_hat, k_scale = operand(k @ r, columns, recipe.k_scale == "token")
    v_hat, do_hat = operand(v - v_mean, columns, False)[0], operand(do, rows, False)[0]
    if recipe.v_scale == "sequence":
        v_hat = torch.stack([psi(channel) for channel in (v - v_mean).T], 1)
    elif recipe.v_scale == "channel":
        v_hat = torch.cat([torch.stack([psi(x) for x in (v - v_mean)[list(block)].T], 1) for block in columns])
    s = (q_hat @ k_hat.T * scale).masked_fill(~visible, -math.inf)
    lse = s.logsumexp(-1)
    o = torch.zeros_like(q)
    apart = recipe.first_keys
    for i in range(tokens_q):
        o[i] = torch.exp(s[i, :apart] - lse[i]) @ (v[:apart] - v_mean)
        for block in columns:
            block = [j for j in block if j >= apart]
            if block and s[i, block].max() > -math.inf:
                top = s[i, block].max()
                steps = recipe.p_levels
                p_hat = torch.round(steps * torch.exp(s[i, block] - top)) / steps
                o[i] += p_hat * torch.exp(top - lse[i]) @ v_hat[block]
    o = o + v_mean
    p = torch.exp(s - lse[:, None])
    dp, delta = do @ v.T, (do * o).sum(-1, keepdim=True)
    if recipe.dp == "int8":
        center = o.mean(0)
        do_dp, v_dp = (torch.stack([psi(x) for x in y @ r]) for y in (do, v - center))
        dp, delta = do_dp @ v_dp.T, (do_dp * ((o - center) @ r)).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for a in map(list, rows):
        for c in map(list, columns):
            tile_p, tile_ds = p[a][:, c], ds[a][:, c]
            for_dq, for_dk = tile_ds * k_scale[c], tile_ds * q_scale[a][:, None]
            if recipe.p_scale_dv == "key":
                p_hat = torch.stack([psi(tile_p[:, j]) for j in range(len(c))], 1)
                for_dq = torch.stack([psi(for_dq[i]) for i in range(len(a))])
                for_dk = torch.stack([psi(for_dk[:, j]) for j in range(len(c))], 1)
            else:
                p_hat, for_dq, for_dk = psi(tile_p), psi(for_dq), psi(for_dk)
            dv[c] += p_hat.T @ do_hat[a]
            dq[a] += for_dq @ (k_hat[c] / k_scale[c][:, None]) * scale
            dk[c] += for_dk.T @ (q_hat[a] / q_scale[a][:, None]) * scale
    return o, lse, dq @ r, dk @ r, dv


@pytest.mark.parametrize(
    "name",
    [f"{name}({field})" for name in ("token", "paper") for field in ("first_keys=0", "first_keys=1", "first_keys=16")]
    + ["token(rotate=False)", "paper(rotate=True)"]
    + ["token(dp=int8)", "token(dp=int8, rotate=False, first_keys=16)", "paper(dp=int8)"],
)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("tokens_q", "tokens_k"), [(150, 150), (40, 130), (130, 40), (5, 1)])
def test_emulator_is_the_algorithm(name, is_causal, tokens_q, tokens_k):
    recipe = Recipe.parse(name)
    q, k, v, do = draw("mean-and-outliers", heads=1, tokens=tokens_q, kv_tokens=tokens_k, head_dim=16)
    q, k, v, do = (x.double() for x in (q, k, v, do))
    emulator = Emulator(q, k, v, recipe, 0.2, Band.of(is_causal))
    o, lse, k_mean = emulator.forward()
    actual = (o, lse, *emulator.backward(do, o, lse))
    expected = transcription(*(x[0, 0] for x in (q, k, v, do)), recipe, 0.2, is_causal)
    for value, target in zip(actual, expected):
        assert_close(value[0, 0], target, rtol=1e-9, atol=1e-9)
    assert_close(k_mean[0, 0], k[0, 0].mean(0))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("tokens", [(1, 1), (17, 17), (65, 130), (130, 65)])
def test_full_recipe_is_attention(is_causal, heads, tokens):
    q, k, v, do = draw(
        batch=2, heads=heads[0], kv_heads=heads[1], tokens=tokens[0], kv_tokens=tokens[1], head_dim=24,
        dtype=torch.float64,
    )  # fmt: skip
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=True, scale=0.3)
    gradients = torch.autograd.grad(expected, leaves, do)
    emulator = Emulator(*(x.detach() for x in leaves), FULL, 0.3, Band.of(is_causal))
    o, lse, _ = emulator.forward()
    assert_close(o, expected.detach())
    for actual, target in zip(emulator.backward(do, o, lse), gradients):
        assert_close(actual, target)


@pytest.mark.parametrize("recipe", ["full", "token", "paper", "mixed"])
@pytest.mark.parametrize("window", [(-1, -1), (20, 0), (5, 40)])
def test_small_chunks_change_nothing(monkeypatch, recipe, window):
    """Chunks bound memory; the numbers do not depend on them."""
    q, k, v, do = draw(batch=2, tokens=300, head_dim=16, dtype=torch.float64)

    def run():
        emulator = Emulator(q, k, v, Recipe.parse(recipe), 0.25, Band.of(False, *window))
        o, lse, _ = emulator.forward()
        return o, lse, *emulator.backward(do, o, lse)

    whole = run()
    monkeypatch.setattr(emulator, "CHUNK_SCORES", 1)
    for chunked, expected in zip(run(), whole):
        assert_close(chunked, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("recipe", ["token", "paper(first_keys=1)"])
def test_keys_that_a_mask_leaves_out_change_nothing(recipe):
    """The first keys are the first that the mask leaves: what is left alone gives the same numbers."""
    q, k, v, _ = draw(batch=2, tokens=40, kv_tokens=150, head_dim=16, dtype=torch.float64)
    k[:, :, 7] *= 30  # takes most of many rows
    k[:, :, :7], v[:, :, :7] = 100, math.nan
    key_mask = torch.arange(150)[None].repeat(2, 1) >= 7
    key_mask[1, 8:90:3] = False
    v[1, :, 8:90:3] = math.nan
    recipe = Recipe.parse(recipe).replace(block_k=256)
    o, lse, _ = Emulator(q, k, v, recipe, 0.25, Band(), key_mask).forward()
    for item, kept in enumerate(key_mask):
        one = slice(item, item + 1)
        alone = Emulator(q[one], k[one][:, :, kept], v[one][:, :, kept], recipe, 0.25, Band()).forward()
        for actual, expected in zip((o, lse), alone):
            assert_close(actual[one], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("count", [16, 40])
def test_several_first_keys_are_a_sixteen_bit_product(count):
    """Of no more keys than are apart O has no INT8 in it, and operands are rounded to the input's dtype."""
    q, k, v, _ = draw(tokens=30, kv_tokens=16, head_dim=16, dtype=torch.bfloat16)
    recipe = Recipe.parse(f"token(s=16bit, first_keys={count}, smooth_k=False)")
    o, lse, _ = Emulator(q, k, v, recipe, 0.25, Band()).forward()
    s = q.float() @ k.float().mT * 0.25
    p, mean = torch.exp(s - s.amax(-1, keepdim=True)), v.float().mean(2, keepdim=True)
    product = p.bfloat16().float() @ (v.float() - mean).bfloat16().float()
    assert_close(lse, s.logsumexp(-1))
    expected = (product / p.sum(-1, keepdim=True) + mean).bfloat16()
    assert (o == expected).float().mean() > 0.98  # of a product in FP32 half


def test_trace_is_consistent():
    q, k, v, do = draw(heads=4, kv_heads=2, tokens=100, kv_tokens=90, head_dim=32)
    sides = trace(q, k, v, do, "token", is_causal=True, window=(30, -1))
    full = sides["full"]
    of_int8 = trace(q, k, v, do, "token(dp=int8)", is_causal=True, window=(30, -1))["recipe"]
    assert_close(of_int8["ds"], of_int8["p"] * (of_int8["dp"] - of_int8["delta"][..., None]), atol=1e-5, rtol=1e-4)
    assert all(0.001 < relative_l2(of_int8[name], full[name]) < 0.02 for name in ("dp", "delta"))
    assert set(sides["recipe"]) == set(full) == {"o", "lse", "delta", "p", "dp", "ds", "dq", "dk", "dv"}
    k_full, v_full = (x.double().repeat_interleave(2, 1) for x in (k, v))
    assert_close(full["p"] @ v_full, full["o"])
    assert_close(full["ds"], full["p"] * (full["dp"] - full["delta"][..., None]))
    assert_close(full["ds"] @ k_full * 32**-0.5, full["dq"])
    dv = (full["p"].mT @ do.double()).unflatten(1, (2, 2)).sum(2)
    assert_close(dv, full["dv"])
    assert sides["recipe"]["p"].dtype == torch.float32
    assert 0 < relative_l2(sides["recipe"]["dq"], full["dq"]) < 0.05


def test_sixteen_bit_products_round_to_the_input_dtype():
    q, k, v, _ = draw(tokens=64)
    for dtype, low, high in ((torch.bfloat16, 1e-3, 1e-2), (torch.float16, 1e-4, 1e-3)):
        inputs = [x.to(dtype) for x in (q, k, v)]
        o = Emulator(*inputs, FULL, 0.125, Band.of(True)).forward()[0]
        exact = Emulator(*(x.double() for x in inputs), FULL, 0.125, Band.of(True)).forward()[0]
        assert o.dtype == dtype
        assert low < relative_l2(o, exact) < high


@pytest.mark.parametrize("recipe", ["full", "token", "paper", "mixed"])
@pytest.mark.parametrize("position", ["q", "k", "v", "do"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite_in_is_not_finite_out(recipe, position, bad):
    inputs = dict(zip(("q", "k", "v", "do"), draw(heads=1, tokens=70, head_dim=16)))
    inputs[position][0, 0, 33, 3] = bad
    q, k, v, do = inputs.values()
    emulator = Emulator(q, k, v, Recipe.named(recipe), 0.25, Band.of(True))
    o, lse, _ = emulator.forward()
    dq, dk, dv = emulator.backward(do, o, lse)
    finite = [bool(torch.isfinite(x).all()) for x in (dq, dk, dv)]
    if position == "do":
        assert not any(finite[:2])
        assert not finite[2]
    else:
        assert not torch.isfinite(o).all()
        assert not any(finite[:2])
