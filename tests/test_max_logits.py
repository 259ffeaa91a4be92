"""The largest logit of each head (`return_max_logits`), by the reference: what it is, and how calls give it."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from sagebwd import explain, qk_norm_rope, qk_norm_rope_attention, sage_attention, sage_attention_varlen
from sagebwd.masks.band import Band
from sagebwd.recipe import RECIPES, Recipe
from sagebwd.reference.emulator import Emulator
from tests.attention_case import leaves
from tests.inputs import draw
from tests.masks import dense as dense_mask
from tests.masks import draw as draw_mask

TOKENS, SHAPE = 70, (2, 4, 70, 70)


def inputs(dtype=torch.float64) -> list[Tensor]:
    return list(draw(batch=2, heads=4, kv_heads=2, tokens=TOKENS, head_dim=16, dtype=dtype)[:3])


def attend(q, k, v, **options):
    return sage_attention(q, k, v, enable_gqa=True, return_max_logits=True, **options)


def largest(q, k, visible=None, bias=None, scale=0.25):
    """As the formula has it."""
    s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    s = s if bias is None else s + bias
    return (s if visible is None else s.masked_fill(~visible, -math.inf)).amax((-1, -2))


def band(left: int, right: int) -> Tensor:
    distance = torch.arange(TOKENS) - torch.arange(TOKENS)[:, None]
    return (distance >= -left) & (distance <= right)


BOOLEAN, BIAS = (draw_mask(kind, SHAPE, torch.float64, 0) for kind in ("bool-heads", "bias-all"))
PADDING = torch.arange(TOKENS) < torch.tensor([70, 50])[:, None, None, None]
FORMS = {
    "full": ({}, None),
    "causal": ({"is_causal": True}, band(TOKENS, 0)),
    "window": ({"window": (7, 3)}, band(7, 3)),
    "padding": ({"attn_mask": PADDING}, PADDING),
    "mask": ({"attn_mask": BOOLEAN}, BOOLEAN),
    "bias": ({"attn_mask": BIAS}, BIAS > -1e38),
    "block-mask": ({"block_mask": draw_mask("sinks", SHAPE, torch.float64, 0)}, dense_mask("sinks", SHAPE)),
    "sinks": ({"sinks": torch.tensor([90.0, 0, -5, 7]), "is_causal": True}, band(TOKENS, 0)),
    "scale": ({"scale": -0.7}, None),
}


@pytest.mark.parametrize("name", FORMS)
def test_it_is_the_largest_score_that_a_query_sees(name):
    """Of the formula where nothing is quantised, smoothed or not; sinks are no keys."""
    options, visible = FORMS[name]
    q, k, v = inputs()
    bias = torch.where(BIAS > -1e38, BIAS, 0) if name == "bias" else None
    wanted = largest(q, k, visible, bias, options.get("scale", 0.25))
    for recipe in ("full", "full(smooth_k=True)"):
        _, found = attend(q, k, v, recipe=recipe, **options)
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_of_the_recipes_scores(recipe):
    """To the digit: the emulator's scores of codes, K's mean beside them."""
    q, k, v = inputs()
    emulator = Emulator(q, k, v, Recipe.named(recipe), 0.25, Band.of(True, -1, -1))
    scores = torch.cat([emulator._scores(rows, slice(0, 128)) for rows, _ in emulator._chunks()], -2)
    means = emulator.q @ emulator.operands.k_mean.mT * 0.25
    wanted = (scores[..., :TOKENS, :] + means).amax((-1, -2)).flatten(1)
    _, found = attend(q, k, v, recipe=recipe, is_causal=True)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    assert recipe == "full" or (found - largest(q, k, band(TOKENS, 0))).abs().max() > 1e-6


@pytest.mark.parametrize("recipe", ["full", "token"])
def test_packed_sequences_count_together(recipe):
    """Empty ones, and queries without a key, count for nothing."""
    q, k, v = (x[0].transpose(0, 1) for x in inputs())
    ends_q, ends_k = [0, 20, 20, 65, 70], [0, 33, 50, 70, 70]
    offsets = (torch.tensor(x, dtype=torch.int32) for x in (ends_q, ends_k))
    options = {"is_causal": True, "recipe": recipe, "return_max_logits": True}
    o, lse, found = sage_attention_varlen(q, k, v, *offsets, 45, 33, return_lse=True, **options)
    assert (o.shape, lse.shape, found.shape) == (q.shape, (4, TOKENS), (4,))
    parts = []
    for (first, end), (first_k, end_k) in zip(pairwise(ends_q), pairwise(ends_k)):
        if first == end:
            continue
        offsets = (torch.tensor([0, x], dtype=torch.int32) for x in (end - first, end_k - first_k))
        rows = q[first:end], k[first_k:end_k], v[first_k:end_k]
        parts.append(sage_attention_varlen(*rows, *offsets, end - first, end_k - first_k, **options)[1])
    assert torch.equal(found, torch.stack(parts).amax(0))
    assert (parts[-1] == -math.inf).all()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("recipe", ["token", "auto"])
def test_outputs_and_gradients_stay_what_they_are(recipe, training):
    """It comes last, has no gradient, and lse and O keep theirs."""
    q, k, v = leaves(*inputs(torch.bfloat16)) if training else inputs(torch.bfloat16)
    options = {"enable_gqa": True, "is_causal": True, "recipe": recipe, "impl": "reference"}
    plain = sage_attention(q, k, v, return_lse=True, **options)
    o, lse, found = sage_attention(q, k, v, return_lse=True, return_max_logits=True, **options)
    assert torch.equal(o, plain[0])
    assert torch.equal(lse, plain[1])
    assert (found.dtype, found.shape, found.requires_grad) == (torch.float32, (2, 4), False)
    alone = sage_attention(q, k, v, return_max_logits=True, **options)
    assert len(alone) == 2
    assert torch.equal(alone[1], found)
    if training:
        wanted = torch.autograd.grad(plain[0].sum() + plain[1].sum(), (q, k, v))
        for a, e in zip(torch.autograd.grad(o.sum() + lse.sum() + found.sum(), (q, k, v)), wanted):
            assert torch.equal(a, e)


def test_auto_keeps_such_a_call():
    """Torch's own attention gives none."""
    q = torch.randn(1, 4, 8, 16)
    assert explain(q, q, q).forward == "torch"
    assert explain(q, q, q, return_max_logits=True).forward == "reference"
    _, found = sage_attention(q, q, q, return_max_logits=True)
    torch.testing.assert_close(found, largest(q, q))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_without_queries_or_keys(shape):
    q, k = torch.randn(2, 4, shape[0], 16), torch.randn(2, 4, shape[1], 16)
    for x in (q, q.clone().requires_grad_()):
        _, found = sage_attention(x, k, k, recipe="token", return_max_logits=True)
        assert torch.equal(found, torch.full((2, 4), -math.inf))
    offsets = (torch.tensor([0, tokens, tokens], dtype=torch.int32) for tokens in shape)
    rows = (x[0].transpose(0, 1) for x in (q, k, k))
    _, found = sage_attention_varlen(*rows, *offsets, *shape, recipe="token", return_max_logits=True)
    assert torch.equal(found, torch.full((4,), -math.inf))


def test_a_head_of_queries_that_see_no_key():
    """Has -inf; in other heads such queries count for nothing."""
    q, k, v = inputs()
    shown = torch.ones(SHAPE, dtype=torch.bool)
    shown[0, 1], shown[1, 2, 5:] = False, False
    q[1, 2, 5:] = 1e3
    _, found = attend(q, k, v, attn_mask=shown, recipe="full")
    wanted = largest(q, k, shown)
    assert found[0, 1] == -math.inf
    torch.testing.assert_close(found, wanted)


def test_nan_that_comes_in_goes_out():
    q, k, v = inputs(torch.float32)
    q[0, 1, 3] = math.nan
    for recipe in ("full", "token"):
        _, found = attend(q, k, v, recipe=recipe)
        assert found.isnan().nonzero().tolist() == [[0, 1]]


def test_fewer_dimensions():
    q, k, v = inputs()
    _, wanted = attend(q, k, v, recipe="token")
    _, lse, found = attend(q[0], k[0], v[0], recipe="token", return_lse=True)
    assert (lse.shape, found.shape) == ((4, TOKENS), (4,))
    torch.testing.assert_close(found, wanted[0])
    _, alone = sage_attention(q[0, 0], k[0, 0], v[0, 0], recipe="token", return_max_logits=True)
    torch.testing.assert_close(alone, wanted[0, 0])


def test_compiles_whole():
    """By the operator, whose outputs have it; gradients stay what they are."""
    inputs_of = leaves(*inputs(torch.float32))

    def attention(q, k, v):
        return attend(q, k, v, recipe="token", is_causal=True, return_lse=True, sinks=torch.tensor([0.5, -1, 2, 9]))

    def outcome(function):
        found = function(*inputs_of)
        return *found, *torch.autograd.grad(found[0].sum() + found[1].sum(), inputs_of)

    found = outcome(torch.compile(attention, fullgraph=True, backend="aot_eager"))
    assert not found[2].requires_grad
    for a, e in zip(found, outcome(attention), strict=True):
        torch.testing.assert_close(a, e)


def test_behind_a_norm_and_rotary_embedding():
    q, k, v = inputs(torch.float32)
    norm = {"eps": 1e-6, "q_weight": torch.rand(16), "k_weight": torch.rand(16)}
    _, found = qk_norm_rope_attention(q, k, v, **norm, enable_gqa=True, recipe="token", return_max_logits=True)
    _, wanted = attend(*qk_norm_rope(q, k, **norm), v, recipe="token")
    assert torch.equal(found, wanted)


def test_what_is_no_flag_is_refused():
    q = torch.randn(1, 4, 8, 16)
    with pytest.raises(TypeError, match="return_max_logits=1 must be True or False"):
        sage_attention(q, q, q, return_max_logits=1)
    rows, offsets = q[0].transpose(0, 1), torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(TypeError, match="return_max_logits='yes' must be True or False"):
        sage_attention_varlen(rows, rows, rows, offsets, offsets, 8, 8, return_max_logits="yes")
