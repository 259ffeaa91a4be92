"""SageAttention's signatures: the same numbers as sage_attention, with gradients, and no keyword swallowed."""

import inspect

import pytest
import torch

from sagebwd import sage_attention, sage_attention_varlen
from sagebwd.integrations.sageattention import sageattn, sageattn_varlen
from tests.inputs import draw

pytestmark = pytest.mark.rounding

OPTIONS = {"recipe": "token", "impl": "reference"}


def inputs(**changes):
    *tensors, do = draw(**{"batch": 2, "heads": 4, "tokens": 40, "head_dim": 16, **changes})
    return [x.requires_grad_() for x in tensors], do


def swapped(tensors):
    """(batch, tokens, heads, head_dim) leaves of the same numbers."""
    return [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in tensors]


@pytest.mark.parametrize(
    ("layout", "kv_heads", "is_causal"), [("HND", 1, True), ("HND", 4, False), ("NHD", 4, True), ("NHD", 2, False)]
)
def test_is_sage_attention_in_either_layout(layout, kv_heads, is_causal):
    tensors, do = inputs(kv_heads=kv_heads, kv_tokens=31)
    options = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": True, "return_lse": True, **OPTIONS}
    expected, expected_lse = sage_attention(*tensors, **options)
    gradients = torch.autograd.grad(expected, tensors, do)
    given = tensors if layout == "HND" else swapped(tensors)
    out, lse = sageattn(*given, layout, is_causal, 0.3, True, impl="reference")
    assert torch.equal(lse, expected_lse)
    assert out.is_contiguous()
    assert out.shape == given[0].shape
    if layout == "HND":
        actual = [out, *torch.autograd.grad(out, given, do)]
    else:
        actual = [x.transpose(1, 2) for x in (out, *torch.autograd.grad(out, given, do.transpose(1, 2)))]
    for a, e in zip(actual, (expected, *gradients)):
        assert torch.equal(a, e)


def test_recipe_and_smoothing_reach_the_call():
    tensors, _ = inputs(kind="mean-and-outliers")
    for given, recipe in (
        ({}, "token"),
        ({"recipe": "paper"}, "paper"),
        ({"smooth_k": True}, "token"),
        ({"smooth_k": False}, "token(smooth_k=False)"),
        ({"recipe": "paper", "smooth_k": False}, "paper(smooth_k=False)"),
        ({"recipe": "token(smooth_k=False)"}, "token(smooth_k=False)"),
    ):
        expected = sage_attention(*tensors, recipe=recipe, impl="reference")
        assert torch.equal(sageattn(*tensors, impl="reference", **given), expected), given


def packed_inputs(**changes):
    offsets = torch.tensor([0, 17, 40, 48], dtype=torch.int32)
    tensors = inputs(batch=1, kv_heads=2, tokens=48, **changes)[0]
    tensors = [x[0].detach().transpose(0, 1).contiguous() for x in tensors]
    return [x.requires_grad_() for x in tensors], (offsets, offsets, 23, 23)


@pytest.mark.parametrize(
    ("given", "recipe"),
    [
        ({}, "token"),
        ({"smooth_k": False}, "token(smooth_k=False)"),
        ({"recipe": "token(smooth_k=False)"}, "token(smooth_k=False)"),
        ({"recipe": "paper", "smooth_k": True}, "paper"),
    ],
)
def test_varlen_is_sage_attention_varlen(given, recipe):
    tensors, packing = packed_inputs()
    expected = sage_attention_varlen(*tensors, *packing, is_causal=True, scale=0.3, recipe=recipe, impl="reference")
    out = sageattn_varlen(*tensors, *packing, True, 0.3, impl="reference", **given)
    assert torch.equal(out, expected)
    do = torch.ones_like(out)
    for a, e in zip(torch.autograd.grad(out, tensors, do), torch.autograd.grad(expected, tensors, do)):
        assert torch.equal(a, e)


def test_unknown_keywords_are_named():
    tensors, _ = inputs()
    packed, packing = packed_inputs()
    for keyword in ("attn_mask", "smoothk"):
        with pytest.raises(TypeError, match=f"sageattn: keyword '{keyword}'"):
            sageattn(*tensors, impl="reference", **{keyword: None})
        with pytest.raises(TypeError, match=f"sageattn_varlen: keyword '{keyword}'"):
            sageattn_varlen(*packed, *packing, impl="reference", **{keyword: None})


def test_tuning_keywords_have_no_effect():
    tensors, _ = inputs()
    tuning = {"qk_quant_gran": "per_warp", "pv_accum_dtype": "fp32", "quantization_backend": "cuda"}
    assert torch.equal(sageattn(*tensors, impl="reference", **tuning), sageattn(*tensors, impl="reference"))


def test_wrong_arguments_are_refused():
    (q, k, v), _ = inputs()
    with pytest.raises(ValueError, match=r"tensor_layout: got 'HDN'.*'HND', 'NHD'"):
        sageattn(q, k, v, "HDN", impl="reference")
    with pytest.raises(ValueError, match=r"tensor_layout: got a Tensor.*replace_sdpa"):  # SDPA's fourth is a mask
        sageattn(q, k, v, torch.ones(40, 40, dtype=torch.bool), impl="reference")
    with pytest.raises(ValueError, match=r"k: expected 4 dimensions, got shape \(4, 40, 16\)"):
        sageattn(q, k[0], v, "NHD", impl="reference")
    with pytest.raises(TypeError, match="v: expected a tensor, got NoneType"):
        sageattn(q, k, None, "NHD", impl="reference")
    with pytest.raises(TypeError, match=r"^sm_scale='x' must be a number"):
        sageattn(*(torch.randn(1, 2, 40, 16) for _ in range(3)), sm_scale="x")
    with pytest.raises(ValueError, match=r"^k: head_dim 8 differs from q's 16"):
        sageattn(torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 16))
    with pytest.raises(ValueError, match="3 heads do not divide"):
        sageattn(q, k[:, :3], v[:, :3], impl="reference")


def test_positional_parameters_are_those_of_sageattention():
    """Names and order of thu-ml/SageAttention d1a57a5."""

    def positional(function):
        parameters = inspect.signature(function).parameters.values()
        return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]

    assert positional(sageattn) == ["q", "k", "v", "tensor_layout", "is_causal", "sm_scale", "return_lse"]
    assert positional(sageattn_varlen) == [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "is_causal", "sm_scale",
        "smooth_k",
    ]  # fmt: skip


def test_compile_fullgraph():
    tensors, _ = inputs()

    def attend(q, k, v):
        return sageattn(q, k, v, "NHD", smooth_k=False, impl="reference", pv_accum_dtype="fp32")

    given = swapped(tensors)
    assert torch.equal(torch.compile(attend, fullgraph=True, backend="aot_eager")(*given), attend(*given))
