"""What is said of a call, and of all calls of a process."""

from __future__ import annotations

import inspect

import pytest
import torch

import sagebwd
from sagebwd import arguments, dispatch, sage_attention, switches
from sagebwd.auto import counts
from tests.auto.calls import ASK, threshold


def test_explain_says_why_torch(measured, monkeypatch):
    monkeypatch.setattr(arguments, "ask_of", lambda *x: ASK._replace(kind=x[4]))
    q = torch.empty(2, 4, 512, 128)
    why = lambda **options: sagebwd.explain(q, q, q, **options)  # noqa: E731
    assert "nobody has timed low precision on a card with torch" in why(is_causal=True).why
    measured.append(threshold(2048, elements=1))
    dispatch.thresholds_of.cache_clear()
    found = why(is_causal=True)
    assert found[:4] == ("full", "torch", "torch", ((128, 128), (128, 128)))
    assert found.why == (
        "512 tokens, causal at head_dim 128, forward: full precision is faster up to 2048 tokens, a file"
    )
    assert str(found) == f"full on torch at head_dim 128: {found.why}"
    assert "was not timed on a card for no mask at head_dim 128" in why().why
    measured[0] = threshold(256, elements=1)
    dispatch.thresholds_of.cache_clear()
    assert str(why(is_causal=True)) == (
        "mixed on hopper at head_dim 128: 512 tokens, causal at head_dim 128, forward: mixed is faster from 256 "
        "tokens on, a file"
    )
    assert "torch has nothing that computes the same" in why(is_causal=True, return_lse=True).why
    measured[0] = threshold(None, elements=1 << 30)
    dispatch.thresholds_of.cache_clear()
    assert why(is_causal=True).why == (
        "the call is smaller than those that were timed, of 1,073,741,824 batch x heads x tokens x head_dim"
    )


def test_explain_on_a_cpu_runs_nothing(monkeypatch):
    monkeypatch.setattr(dispatch, "forward", None)
    q = torch.randn(3, 20, 300)
    assert str(sagebwd.explain(q[..., :16], q[..., :16], q[..., :16])) == (
        "token on reference at head_dim 16: the reference runs calls on cpu"
    )
    assert sagebwd.explain(q, q, q).why == "torch's own attention alone takes head_dim 300, over 256"
    assert sagebwd.explain(q[..., :16], q[..., :16], q[..., :16], recipe="mixed").why == "recipe='mixed' was asked for"
    assert "impl='reference'" in sagebwd.explain(q[..., :16], q[..., :16], q[..., :16], impl="reference").why
    with switches(disabled=True):
        assert "a switch is on" in sagebwd.explain(q[..., :16], q[..., :16], q[..., :16]).why
    with pytest.raises(ValueError, match="head_dim 300 is not supported"):
        sagebwd.explain(q, q, q, recipe="token")
    packed, offsets = torch.randn(20, 2, 16), torch.tensor([0, 8, 20], dtype=torch.int32)
    found = sagebwd.explain_varlen(packed, packed, packed, offsets, offsets, 12, 12, is_causal=True)
    assert found[:3] == ("token", "reference", "reference")


def test_an_argument_that_there_is_not_is_named():
    """Regression: the error named a function that nobody had called."""
    q = torch.empty(1, 2, 4, 8)
    with pytest.raises(TypeError, match=r"explain: got an unexpected .* 'causal'; accepted: query, key, value, "):
        sagebwd.explain(q, q, q, causal=True)
    with pytest.raises(TypeError, match=r"explain: multiple values for argument 'attn_mask'"):
        sagebwd.explain(q, q, q, None, attn_mask=None)
    with pytest.raises(TypeError, match=r"explain_varlen: missing a required .* 'cu_seqlens_q'; accepted: query"):
        sagebwd.explain_varlen(q, q, q)


@pytest.mark.parametrize(
    ("explain", "attention", "internal"),
    [
        (sagebwd.explain, sage_attention, arguments.choice_of),
        (sagebwd.explain_varlen, sagebwd.sage_attention_varlen, arguments.packed_choice_of),
    ],
)
def test_arguments_are_those_of_the_function_that_is_explained(explain, attention, internal):
    of_function, of_internal = (inspect.signature(function).parameters for function in (attention, internal))
    assert [(x.name, x.kind, x.default) for x in of_function.values()] == [
        (x.name, x.kind, x.default) for x in of_internal.values()
    ]


def test_the_summary_counts_calls_by_what_ran(monkeypatch):
    counts.counts.clear()
    assert sagebwd.summary() == "sagebwd: no calls of attention outside of torch.compile"
    x = torch.randn(1, 2, 20, 16)
    for _ in range(3):
        sage_attention(x, x, x)
        sage_attention(x, x, x, dropout_p=0.1)
    sage_attention(x, x, x, recipe="full")
    assert sagebwd.summary() == (
        "sagebwd: calls of attention outside of torch.compile: 3 token on reference, 3 full precision on torch, "
        "1 full on reference"
    )
    assert counts.answer("mixed", "triton/hopper") == "mixed on triton/hopper"
