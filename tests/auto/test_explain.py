"""What is said of a call, and of all calls of a process."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import sagebwd
from sagebwd import arguments, counts, dispatch, sage_attention, switches
from sagebwd.auto import agreement, model
from sagebwd.auto import choice as auto_choice
from sagebwd.auto.choice import choose
from sagebwd.auto.model import Cost
from tests.auto.calls import ASK, FASTER, FROM_4000, SLOWER, times


def test_explain_says_who_runs_and_what_the_other_would_take(measured, monkeypatch):
    monkeypatch.setattr(arguments, "ask_of", lambda *_: ASK)
    q = torch.empty(2, 8, 4096, 128)

    def why(known=None, **options):
        measured[:] = () if known is None else (known,)
        auto_choice.times_of.cache_clear()
        return sagebwd.explain(q, q, q, **options)

    assert "nobody has timed low precision on a card with torch" in why(is_causal=True).why
    found = why(times(SLOWER), is_causal=True)
    assert found[:4] == ("full", "torch", "torch", ((128, 128), (128, 128)))
    assert found.why == (
        "4096 tokens, causal at head_dim 128, forward: mixed takes about 0.824 ms, torch 0.412, by some timings"
    )
    assert str(found).splitlines()[0] == f"full on torch at head_dim 128: {found.why}"
    assert "was not timed on a card for no mask at head_dim 128" in why(times(SLOWER)).why
    assert str(why(times(FASTER), is_causal=True)).splitlines()[0] == (
        "mixed on hopper at head_dim 128: 4096 tokens, causal at head_dim 128, forward: mixed takes about 0.206 ms, "
        "torch 0.412, by some timings"
    )
    assert "torch has nothing that computes the same" in why(times(FASTER), is_causal=True, return_lse=True).why
    close = why(times(FROM_4000), is_causal=True)
    assert close.recipe == "full"
    assert "mixed takes about 0.403 ms, torch 0.412: less than 3% apart" in close.why
    assert "mixed takes about 0.206 ms and torch does not run it" in why(times(FASTER, full=None), is_causal=True).why
    old = times(FASTER)._replace(torch="1.13.1+cu117")
    assert why(old, is_causal=True).why.endswith(
        f"by some timings; they are of torch 1.13.1+cu117, and torch {torch.__version__} may differ"
    )


def test_on_a_card_of_mma_sync_the_recipe_follows_from_the_width(measured, monkeypatch):
    """With dP in INT8 where the backward is mma.sync's own, and only timings of that recipe count there."""
    monkeypatch.setattr(dispatch, "arch_of", lambda device: 89)
    monkeypatch.setattr(
        arguments, "ask_of", lambda *x: ASK._replace(head_dim=x[0].shape[-1], value_dim=x[1].shape[-1])
    )
    own, portable = (torch.empty(2, 8, 4096, width) for width in (128, 64))
    own_timed = times(FASTER, impl="mma_sync/mma_sync")
    measured[:] = own_timed._replace(recipe="token(dp=int8)"), times(FASTER, (64, 64), impl="mma_sync/triton")
    found = sagebwd.explain(own, own, own, is_causal=True)
    assert found[:3] == ("token(dp=int8)", "mma_sync", "mma_sync")
    assert "token(dp=int8) takes about 0.2" in found.why
    assert sagebwd.explain(portable, portable, portable, is_causal=True)[:3] == ("token", "mma_sync", "triton")
    measured[:] = [own_timed]
    auto_choice.times_of.cache_clear()
    found = sagebwd.explain(own, own, own, is_causal=True)
    assert found[:2] == ("full", "torch")
    assert "token was not timed on these kernels" in found.why


def test_two_hosts_compare_a_digest_by_hand(measured, monkeypatch):
    """Of what `agreement` compares, wherever "auto" decides on this machine's GPU."""
    decided = arguments.ask_of
    monkeypatch.setattr(arguments, "ask_of", lambda *_: ASK)
    q = torch.empty(2, 8, 4096, 128, dtype=torch.bfloat16)
    measured[:] = [times(FASTER)]
    found = sagebwd.explain(q, q, q, is_causal=True)
    assert found.digest == agreement.digest(auto_choice.facts_of(ASK.device))
    assert (
        str(found).splitlines()[1] == f"auto: digest {found.digest}, the same on two machines where it chooses alike"
    )
    assert sagebwd.explain(q, q, q).digest == found.digest, "not of the call"
    measured[:] = [times(SLOWER)]
    auto_choice.times_of.cache_clear()
    assert sagebwd.explain(q, q, q, is_causal=True).digest != found.digest, "another coefficient"
    assert sagebwd.explain(q, q, q, recipe="full").digest is None
    monkeypatch.setattr(arguments, "ask_of", decided)
    for elsewhere in ({}, {"device": "NVIDIA H200"}):
        found = sagebwd.explain(q, q, q, **elsewhere)
        assert found.digest is None
        assert len(str(found).splitlines()) == 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_card_answers_where_it_is_not(device):
    """By this project's timings, of tensors that are anywhere."""
    q, k = (torch.empty(4, heads, 4096, 80, device=device, dtype=torch.bfloat16) for heads in (16, 4))
    for card in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        found = sagebwd.explain(q.requires_grad_(), k, k, is_causal=True, enable_gqa=True, device=card)
        assert found[:4] == ("mixed", "hopper", "hopper", ((96, 96), (96, 96)))
        assert re.search(
            r"80, training: mixed takes about [\d.]+ ms, torch's cuDNN [\d.]+, .*, by this project's", found.why
        )
        assert sagebwd.explain(q[:, :, :64], k, k, enable_gqa=True, device=card)[:2] == ("full", "torch")
        assert sagebwd.explain(q, q, q, recipe="token", device=card)[:2] == ("token", "triton")
        mask = torch.ones(4, 1, 1, 4096, dtype=torch.bool, device=device)
        assert "key padding" in sagebwd.explain(q.detach(), k, k, mask, enable_gqa=True, device=card).why
    packed = torch.empty(1 << 14, 16, 128, device=device, dtype=torch.bfloat16)
    offsets = torch.arange(5, dtype=torch.int32, device=device) * 4096
    given = packed, packed, packed, offsets, offsets, 4096, 4096
    found = sagebwd.explain_varlen(*given, is_causal=True, device="NVIDIA H200")
    assert found[:3] == ("mixed", "hopper", "hopper")
    assert "4096 tokens, packed at head_dim 128, forward" in found.why or "torch has nothing" in found.why
    with pytest.raises(ValueError, match=r"GTX 970. was not timed; accepted: .NVIDIA H100 80GB HBM3., .NVIDIA H"):
        sagebwd.explain(q, q, q, device="GTX 970")
    with pytest.raises(ValueError, match=r"device=\['NVIDIA H200'\] was not timed"):
        sagebwd.explain(q, q, q, device=["NVIDIA H200"])


def test_on_a_card_that_is_not_here_autocast_counts(monkeypatch):
    """Regression: of tensors on meta none did, and of a CPU's not CUDA's, so that FP32 was refused."""
    asked = []
    monkeypatch.setattr(auto_choice, "choose", lambda ask, *rest: asked.append(ask) or choose(ask, *rest))
    x, packed = torch.empty(1, 2, 64, 64), torch.empty(64, 2, 64)
    offsets = torch.tensor([0, 64], dtype=torch.int32)

    def dtypes(device):
        asked.clear()
        sagebwd.explain(*(x.to(device),) * 3, device="NVIDIA H200")
        lengths = (offsets.to(device),) * 2
        sagebwd.explain_varlen(*(packed.to(device),) * 3, *lengths, 64, 64, device="NVIDIA H200")
        return {ask.dtype for ask in asked}

    with torch.autocast("cpu", torch.bfloat16):
        assert dtypes("meta") == dtypes("cpu") == {torch.bfloat16}
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: device_type == "cuda")
    assert dtypes("meta") == dtypes("cpu") == {torch.get_autocast_dtype("cuda")}


def test_a_card_that_is_not_here_may_have_peers(monkeypatch):
    """Regression: `mixed` ran, beside a FlashAttention-4 that took less, without a word."""
    known = {"a card": ()}
    monkeypatch.setattr(model, "of_this_project", lambda: known)
    q = torch.empty(2, 8, 4096, 128, dtype=torch.bfloat16, device="meta")

    def why(**more):
        known["a card"] = (times(FASTER, **more),)
        auto_choice.times_of.cache_clear()
        found = sagebwd.explain(q, q, q, is_causal=True, device="a card")
        assert found[:2] == ("mixed", "hopper")
        return found.why

    both = why(fa4=(0, 0, 0.1, 0.2), fa3=(0, 0, 0.1, 0.1))
    assert "; FlashAttention-4 runs it where it is installed; FlashAttention-3 runs it where it is installed" in both
    assert why(fa4=(0, 0, 0.1, 0.1), fa3=(0, 0, 0.1, 0.2)).endswith("; FlashAttention-4 runs it where it is installed")
    assert why(fa4=(0, 0, 4, 4)).endswith("FlashAttention-4 1.08, by some timings")
    auto_choice.times_of.cache_clear()


def test_of_wide_heads_on_a_card_timings_decide_and_explain_says_so(monkeypatch):
    """Of those that torch takes: packed ones, and what it lacks, run on kernels."""
    known = {"a card": (times(FASTER, dims=(256, 256)),)}
    monkeypatch.setattr(model, "of_this_project", lambda: known)

    def found(width, *timed, **options):
        known["a card"] = timed or known["a card"]
        auto_choice.times_of.cache_clear()
        q = torch.empty(2, 8, 4096, width, dtype=torch.bfloat16, device="meta")
        return sagebwd.explain(q, q, q, is_causal=True, device="a card", **options)

    for width in (300, 512):
        assert found(width)[:2] == ("full", "torch")
        assert found(width).why == (
            f"low precision was not timed on a card for causal at head_dim {width}, forward; `sagebwd doctor "
            "--measure` may time it, head_dims over 256 where `--head-dim` names them"
        )
        assert found(width, return_lse=True)[:3] == ("token", "triton", "triton")
        assert "torch has nothing that computes the same" in found(width, return_lse=True).why
    timed = times(FASTER, dims=(512, 512), impl="triton/triton", full=None, efficient=(0, 0, 1, 2))
    assert found(300, timed)[:2] == ("full", "torch")
    assert str(found(512)) == (
        "token on triton at head_dim 512: 4096 tokens, causal at head_dim 512, forward: token takes about 0.206 ms, "
        "torch's memory-efficient 0.412, by some timings"
    )
    slower = timed._replace(low=Cost.of(*SLOWER))
    assert found(512, slower)[:2] == ("full", "torch")
    assert found(520)[:2] == ("full", "torch")
    assert found(520).why == "torch's own attention alone takes head_dim 520, over 512"
    packed, offsets = torch.empty(4096, 8, 512, dtype=torch.bfloat16), torch.tensor([0, 96, 4096], dtype=torch.int32)
    of_packed = sagebwd.explain_varlen(*(packed,) * 3, offsets, offsets, 4000, 4000, device="a card")
    assert of_packed[:3] == ("token", "triton", "triton")
    assert "torch has nothing that computes the same" in of_packed.why
    auto_choice.times_of.cache_clear()


def test_explain_on_a_cpu_runs_nothing(monkeypatch):
    monkeypatch.setattr(dispatch, "module_of", None)
    wide = torch.randn(3, 20, 520)
    narrow = (wide[..., :16],) * 3
    for given, width in ((narrow, 16), ((wide[..., :300],) * 3, 300), ((wide[..., :512],) * 3, 512)):
        assert str(sagebwd.explain(*given)) == (
            f"full on torch at head_dim {width}: kernels need a CUDA GPU; on cpu torch's own attention is faster than "
            "the reference"
        )
    assert sagebwd.explain(wide, wide, wide).why == "torch's own attention alone takes head_dim 520, over 512"
    assert str(sagebwd.explain(*narrow, return_lse=True)) == (
        "full on reference at head_dim 16: torch has nothing that computes the same, or the switch deterministic is "
        "on, so the reference runs it in full precision on cpu"
    )
    assert sagebwd.explain(*narrow, recipe="mixed").why == "recipe='mixed' was asked for"
    assert "impl='reference'" in sagebwd.explain(*narrow, impl="reference").why
    with switches(disabled=True):
        assert "a switch is on" in sagebwd.explain(*narrow).why
    with pytest.raises(ValueError, match="head_dim 520 is not supported"):
        sagebwd.explain(wide, wide, wide, recipe="token")
    offsets = torch.tensor([0, 8, 20], dtype=torch.int32)
    for width in (16, 300):
        packed = torch.randn(20, 2, width)
        found = sagebwd.explain_varlen(packed, packed, packed, offsets, offsets, 12, 12, is_causal=True)
        assert found[:3] == ("full", "reference", "reference")


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
        (sagebwd.explain, sage_attention, arguments.arguments_of),
        (sagebwd.explain_varlen, sagebwd.sage_attention_varlen, arguments.packed_arguments_of),
    ],
)
def test_arguments_are_those_of_the_function_that_is_explained(explain, attention, internal):
    of_function, of_internal = (inspect.signature(function).parameters for function in (attention, internal))
    assert list(of_function) == [name for name in of_internal if name != "card"]
    *shown, device = inspect.signature(explain).parameters.values()
    assert shown == list(of_function.values())
    assert (device.name, device.default) == ("device", None)


def test_the_summary_counts_calls_by_what_ran(monkeypatch):
    counts.counts.clear()
    assert sagebwd.summary() == "sagebwd: no calls of attention outside of torch.compile"
    x = torch.randn(1, 2, 20, 16)
    for _ in range(3):
        sage_attention(x, x, x)
        sage_attention(x, x, x, recipe="token")
    sage_attention(x, x, x, recipe="full")
    assert sagebwd.summary() == (
        "sagebwd: calls of attention outside of torch.compile: 3 full precision on torch, 3 token on reference, "
        "1 full on reference"
    )
    assert counts.answer("mixed", "triton/hopper") == "mixed on triton/hopper"
