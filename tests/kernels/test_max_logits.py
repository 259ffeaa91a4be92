"""The largest logits by kernels: interpreted on a CPU, compiled where there is a GPU."""

import dataclasses
import math

import pytest
import torch

from tests.attention_case import AttentionCase
from tests.gpus import DEVICE, needs_hopper, on_gpu

pytest.importorskip("triton")
from sagebwd import sage_attention, sage_attention_varlen

PACKED = {"lengths_q": [1, 17, 0, 70, 64, 3], "lengths_k": [40, 17, 5, 65, 64, 0]}
CASES = {
    "grouped": AttentionCase(batch=2, heads=4, kv_heads=2),
    "whole-blocks": AttentionCase(tokens_q=64, tokens_k=64, is_causal=True),
    "first-keys": AttentionCase(sink=12, place=3, tokens_q=70, is_causal=True),
    "window": AttentionCase(tokens_q=130, tokens_k=130, window=(30, 5)),
    "fewer-keys": AttentionCase(tokens_q=90, tokens_k=20, window=(10, 0)),
    "key-mask": AttentionCase(batch=2, masked=True, is_causal=True),
    "mask": AttentionCase(batch=2, mask="bool-rows"),
    "bias": AttentionCase(mask="bias-heads", tokens_q=70, tokens_k=70),
    "block-mask": AttentionCase(mask="document", tokens_q=130, tokens_k=130),
    "packed": AttentionCase(**PACKED, is_causal=True),
    "head-dim-20": AttentionCase(head_dim=20, value_dim=40, kv_heads=2),
    "negative-scale": AttentionCase(scale=-0.3, heads=1),
    "not-smoothed": AttentionCase(recipe="token(smooth_k=False)", heads=1),
    "full": AttentionCase(recipe="full", dtype=torch.float16, heads=1),
    "paper": AttentionCase(recipe="paper", heads=1),
}
HOPPER = {
    "long": AttentionCase(tokens_q=1000, tokens_k=3000),  # most blocks are without a mask
    "long-causal": AttentionCase(tokens_q=3000, tokens_k=3000, is_causal=True, head_dim=128, batch=2, heads=4),
    "long-half": AttentionCase(tokens_q=700, tokens_k=3000, dtype=torch.float16),
    "long-packed": AttentionCase(lengths_q=[1, 900, 0, 300], lengths_k=[700, 900, 5, 1000], window=(300, 0)),
}


def check(case: AttentionCase, impl: str) -> None:
    """The largest logits and all else are the recipe's."""
    case = dataclasses.replace(case, device=DEVICE, max_logits=True)
    assert case.check(impl)["row_max"] is None or "hopper" in impl


@pytest.mark.parametrize("case", [pytest.param(case, id=name, marks=on_gpu) for name, case in CASES.items()])
def test_they_are_the_recipes(case):
    check(case, "triton")


@pytest.mark.parametrize("name", ["first-keys", "packed", "head-dim-20"])
@pytest.mark.parametrize("on", [pytest.param(DEVICE, marks=on_gpu)])
def test_where_mma_sync_runs_backward(name, on, monkeypatch):
    """Its forward keeps no row maxima: the portable one runs, to the same recipe."""
    from sagebwd.kernels.mma_sync import launch

    monkeypatch.setattr(launch, "kernel_of", lambda *_: pytest.fail("a kernel of mma.sync's forward"))
    case = dataclasses.replace(CASES[name], max_logits=True, device=on)
    inputs = case.inputs()
    call = case.call(*inputs[:2])
    found = case.forward("mma_sync/triton", call, inputs).max_logits
    assert torch.equal(found, case.forward("triton", call, inputs).max_logits)


@pytest.mark.parametrize("name", sorted((CASES.keys() - {"full", "paper", "not-smoothed"}) | HOPPER.keys()))
@pytest.mark.parametrize("impl", [pytest.param("hopper", marks=needs_hopper)])
def test_on_hopper(name, impl):
    """Exact where most blocks need no maxima, too (`sagebwd.kernels.sm90.forward.variant.Variant.exact`)."""
    check(dataclasses.replace((CASES | HOPPER)[name], recipe="mixed"), impl)


def test_the_variant_on_hopper_is_exact(monkeypatch):
    """Its loop without maxima knows those of 16-bit P alone; other calls have that loop still."""
    from sagebwd.kernels.sm90.forward import launch
    from tests.gpus import as_if_on_hopper

    as_if_on_hopper(monkeypatch)
    made = []
    monkeypatch.setattr(launch, "forward_kernel", made.append)
    monkeypatch.setattr(launch, "launch", lambda *_: None)
    monkeypatch.setattr(launch, "launch_quantize_k", lambda *_, **__: launch.QuantizedK(*(None,) * 6))
    case = AttentionCase(recipe="mixed")
    q, k, v, *_ = case.inputs()
    for wanted in (False, True):
        launch.forward(case.call(q, k)._replace(max_logits=wanted), q, k, v)
    assert [(x.row_max, x.bounded) for x in made] == [(True, True), (True, False)]


@pytest.mark.parametrize("on", [pytest.param(DEVICE, marks=on_gpu)])
@pytest.mark.parametrize("smooth", [False, True])
def test_nan_of_a_query_and_queries_without_a_key(on, smooth):
    """NaN that comes in goes out, of a head alone; a query that sees no key does not count, however large it is."""
    q = torch.randn(1, 2, 70, 32, generator=torch.Generator().manual_seed(0)).bfloat16().to(on)
    hidden = torch.ones(70, 70, dtype=torch.bool, device=on)
    hidden[3] = False
    options = {"recipe": f"token(smooth_k={smooth})", "impl": "triton", "return_max_logits": True}
    _, usual = sage_attention(q, q, q, hidden, **options)
    blind = q.clone()
    blind[:, :, 3] = 1e4
    assert torch.equal(sage_attention(blind, q, q, hidden, **options)[1], usual)
    nan = q.clone()
    nan[:, 1, 66] = math.nan
    _, found = sage_attention(nan, q, q, hidden, **options)
    assert found[0, 1].isnan()
    assert found[0, 0] == usual[0, 0]
    _, none = sage_attention(q, q, q, torch.zeros_like(hidden), **options)
    assert (none == -math.inf).all()


@pytest.mark.parametrize("on", [pytest.param(DEVICE, marks=on_gpu)])
def test_tokens_behind_the_last_sequence_count_for_nothing(on):
    """Theirs is memory that nobody wrote; on a CPU, where offsets are read, there are none."""
    if on == "cpu":
        pytest.skip("needs a GPU")
    q = torch.randn(300, 2, 64, device=on, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 100, 130], dtype=torch.int32, device=on)
    more = q.clone()
    more[130:] = 1e4
    options = {"recipe": "token", "impl": "triton", "return_max_logits": True}
    for x in (q, more):
        _, found = sage_attention_varlen(x, q, q, offsets, offsets, 100, 100, **options)
        _, expected = sage_attention_varlen(*(x[:130] for _ in "qkv"), offsets, offsets, 100, 100, **options)
        assert torch.equal(found, expected)
