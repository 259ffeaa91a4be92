"""Sinks as parameters: attention beside one more key of its own score a head, and no value."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from sagebwd import explain, sage_attention, sage_attention_varlen
from sagebwd.reference.metrics import relative_l2
from tests.attention_case import outcome, softmax_attention
from tests.inputs import draw

BATCH, HEADS, KV_HEADS, TOKENS, HEAD_DIM = 2, 4, 2, 45, 16
SINKS = (0.5, -2.0, 3.0, 0.0)
# what hides nothing, bands, masks, and a query without keys
FORMS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (7, 0)},
    "padding": {"attn_mask": (torch.arange(TOKENS) < torch.tensor([TOKENS, 20])[:, None])[:, None, None]},
    "mask": {"attn_mask": torch.ones(TOKENS, TOKENS).tril(-3).bool()},
    "bias": {"attn_mask": torch.linspace(-2, 2, TOKENS)[None, :].expand(TOKENS, -1).contiguous(), "is_causal": True},
}


def inputs(dtype=torch.float64, sinks_dtype=None, kind="mean-and-outliers") -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v and sinks, all of which need a gradient, and gradients of o and lse."""
    q, k, v, do = draw(
        kind, batch=BATCH, heads=HEADS, kv_heads=KV_HEADS, tokens=TOKENS, head_dim=HEAD_DIM, dtype=dtype
    )
    sinks = torch.tensor(SINKS, dtype=sinks_dtype or dtype)
    dlse = torch.randn(BATCH, HEADS, TOKENS, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [x.requires_grad_() for x in (q, k, v, sinks)], do, dlse


def exact(q, k, v, sinks, attn_mask=None, **band) -> tuple[Tensor, Tensor]:
    """o and lse by a softmax over the scores with one more column."""
    return softmax_attention(q, k, v, attn_mask, sinks=sinks, **band)


def attend(q, k, v, sinks, recipe="full", **options):
    return sage_attention(q, k, v, sinks=sinks, recipe=recipe, enable_gqa=True, return_lse=True, **options)


@pytest.mark.parametrize("recipe", ["full", "full(smooth_k=True)"])
@pytest.mark.parametrize("form", FORMS)
def test_is_attention_beside_one_more_key(form, recipe):
    leaves, *given = inputs()
    found = outcome(lambda *x: attend(*x, recipe, **FORMS[form]), leaves, *given)
    wanted = outcome(lambda *x: exact(*x, **FORMS[form]), leaves, *given)
    for a, e in zip(found, wanted):
        torch.testing.assert_close(a, e, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("recipe", ["token", "paper", "mixed"])
def test_recipes_are_as_accurate_beside_sinks(recipe):
    """As without, that is: a sink quantises nothing, and its gradient is no worse than the others."""
    leaves, *given = inputs(kind="normal")
    found = outcome(lambda *x: attend(*x, recipe, is_causal=True), leaves, *given)
    wanted = outcome(lambda *x: exact(*x, is_causal=True), leaves, *given)
    without = [torch.full_like(leaves[3], -math.inf).requires_grad_()]
    plain = outcome(lambda *x: attend(*x, recipe, is_causal=True), leaves[:3] + without, *given)
    exact_plain = outcome(lambda *x: exact(*x, is_causal=True), leaves[:3] + without, *given)
    errors = [relative_l2(a, e) for a, e in zip(found, wanted)]
    usual = [relative_l2(a, e) for a, e in zip(plain[:5], exact_plain)]
    assert all(error < 1.5 * by for error, by in zip(errors, usual)), (errors, usual)
    assert errors[5] < max(usual[2:])


def test_a_sink_of_minus_infinity_is_none():
    leaves, do, dlse = inputs(torch.float32)
    with torch.no_grad():
        leaves[3].fill_(-math.inf)
    with_sinks = outcome(lambda *x: attend(*x, "token"), leaves, do, dlse)
    without = outcome(lambda *x: attend(*x, None, "token"), leaves[:3], do, dlse)
    for a, e in zip(with_sinks, without):
        assert torch.equal(a, e)
    assert torch.equal(with_sinks[-1], torch.zeros(HEADS))


@pytest.mark.parametrize("recipe", ["token", "mixed", "full"])
@pytest.mark.parametrize("sink", [-200.0, 70.0, 3e4])
def test_sinks_far_from_all_scores(sink, recipe):
    leaves, do, dlse = inputs(torch.float32, kind="normal")
    with torch.no_grad():
        leaves[3].fill_(sink)
    o, lse, *gradients = outcome(lambda *x: attend(*x, recipe, is_causal=True), leaves, do, dlse)
    assert all(x.isfinite().all() for x in gradients)
    if sink > 0:
        assert o.abs().max() < 1e-20
        assert (lse == sink).all()
        assert max(x.abs().max() for x in gradients[:3]) < 1e-15
        torch.testing.assert_close(gradients[3], dlse.sum((0, 2)))


def test_queries_that_see_no_key_give_all_weight_to_the_sink():
    leaves, do, dlse = inputs()
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    hidden[:5] = False
    o, lse, *gradients = outcome(lambda *x: attend(*x, "token", attn_mask=hidden), leaves, do, dlse)
    assert (o[:, :, :5] == 0).all()
    torch.testing.assert_close(lse[:, :, :5], leaves[3].detach()[:, None].expand_as(lse[:, :, :5]))
    assert all(x.isfinite().all() for x in gradients)
    assert (gradients[0][:, :, :5] == 0).all()
    alone = outcome(lambda *x: attend(*x, "token", attn_mask=hidden), leaves, torch.zeros_like(do), dlse * (lse < -9))
    assert all((x == 0).all() for x in alone[2:])


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_without_queries_or_keys(shape):
    q, k = torch.randn(1, 4, shape[0], 16), torch.randn(1, 4, shape[1], 16)
    sinks = torch.tensor(SINKS, requires_grad=True)
    o, lse = sage_attention(q, k, k, sinks=sinks, return_lse=True)
    assert (o == 0).all()
    torch.testing.assert_close(lse, sinks.detach()[:, None].expand_as(lse[0])[None])
    (gradient,) = torch.autograd.grad(lse.sum() + o.sum(), sinks)
    torch.testing.assert_close(gradient, torch.full((4,), float(shape[0])))


@pytest.mark.parametrize("recipe", ["full(smooth_k=True)", "token"])
def test_packed_sequences_are_dense_ones(recipe):
    leaves, do, dlse = inputs()
    offsets = torch.arange(BATCH + 1, dtype=torch.int32) * TOKENS

    def packed(q, k, v, sinks):
        rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        o, lse = sage_attention_varlen(
            *rows, offsets, offsets, TOKENS, TOKENS, is_causal=True, sinks=sinks, recipe=recipe, return_lse=True
        )
        return o.unflatten(0, (BATCH, TOKENS)).transpose(1, 2), lse.unflatten(1, (BATCH, TOKENS)).transpose(0, 1)

    found = outcome(packed, leaves, do, dlse)
    for a, e in zip(found, outcome(lambda *x: attend(*x, recipe, is_causal=True), leaves, do, dlse)):
        torch.testing.assert_close(a, e, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("sinks_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_of_sinks_are_their_own(dtype, sinks_dtype):
    leaves, do, dlse = inputs(dtype, sinks_dtype, "normal")
    found = outcome(lambda *x: attend(*x, is_causal=True), leaves, do, dlse)
    assert [x.dtype for x in found] == [dtype, torch.float32, dtype, dtype, dtype, sinks_dtype]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    for a, e in zip(found, outcome(lambda *x: exact(*x, is_causal=True), doubles, do.double(), dlse.double())):
        assert relative_l2(a, e) < 0.01


def test_three_dimensions_and_autocast():
    leaves, *_ = inputs(torch.float32)
    whole = attend(*leaves, "token")[0]
    one = attend(*(x[0] for x in leaves[:3]), leaves[3], "token")[0]
    assert one.shape == whole.shape[1:]
    torch.testing.assert_close(one, attend(*(x[:1] for x in leaves[:3]), leaves[3], "token")[0][0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, lse = attend(*leaves, "token")
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    (gradient,) = torch.autograd.grad(o.sum(), leaves[3])
    assert gradient.dtype == torch.float32


def test_o_is_saved_once():
    """And is what the caller is given; the sinks' weight lies in the workspace."""
    leaves, *_ = inputs(torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = sage_attention(*leaves[:3], sinks=leaves[3], recipe="token", enable_gqa=True)
    shaped = [x for x in saved if x.shape == o.shape and x.data_ptr() != leaves[0].data_ptr()]
    assert [x.data_ptr() for x in shaped] == [o.data_ptr()]
    assert len([x for x in saved if x.shape == o.shape[:3]]) == 1


def test_sinks_alone_may_need_a_gradient():
    leaves, do, dlse = inputs()
    frozen = [x.detach() for x in leaves[:3]]
    o, lse = attend(*frozen, leaves[3])
    (alone,) = torch.autograd.grad((o * do).sum() + (lse * dlse).sum(), leaves[3])
    torch.testing.assert_close(alone, outcome(lambda *x: attend(*x), leaves, do, dlse)[-1])
    leaves[3] = leaves[3].detach()  # and need none, beside the others
    o, _ = attend(*leaves)
    torch.autograd.grad(o.sum(), leaves[:3])


def test_auto_never_hands_sinks_to_torch():
    q = torch.randn(1, 4, 8, 16)
    with pytest.raises(NotImplementedError, match="sinks: not supported beside dropout_p"):
        sage_attention(q, q, q, dropout_p=0.5, sinks=torch.zeros(4))
    assert explain(q, q, q, sinks=torch.zeros(4)).forward == "reference"


@pytest.mark.parametrize(
    ("sinks", "error", "message"),
    [
        (torch.zeros(2), ValueError, r"sinks: expected shape \(4,\), one logit a query head, got \(2,\)"),
        (torch.zeros(1, 4, 1, 1), ValueError, r"sinks: expected shape \(4,\)"),
        (torch.zeros(4, dtype=torch.int32), TypeError, "sinks: dtype torch.int32"),
        (torch.zeros(4, device="meta"), ValueError, "sinks: device meta differs"),
        ([0.0] * 4, TypeError, "sinks: expected a tensor, got list"),
    ],
)
def test_what_is_no_sinks_is_refused(sinks, error, message):
    q = torch.randn(1, 4, 8, 16)
    with pytest.raises(error, match=message):
        sage_attention(q, q, q, enable_gqa=True, sinks=sinks)
    rows, offsets = q[0].transpose(0, 1), torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(error, match=message):
        sage_attention_varlen(rows, rows, rows, offsets, offsets, 8, 8, sinks=sinks)


def test_a_checkpoint_is_computed_again_outside_of_the_mode_that_forward_ran_in():
    """Regression: another number of saved tensors, which torch refuses, as where FLOPs of forward are counted."""
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    sinks = torch.zeros(2, requires_grad=True)
    with FlopCounterMode(display=False):
        o = checkpoint(sage_attention, q, q, q, sinks=sinks, recipe="token", use_reentrant=False)
    o.sum().backward()
    assert sinks.grad.any()
