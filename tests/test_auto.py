"""Where recipe "auto" hands a call to torch's own attention: what decides it, what torch is given, what is said.

A GPU is stood in for: `hands_over` is asked of devices that are not there, and what it hands over runs on a CPU.
"""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import sagebwd
from sagebwd import dispatch, eager, replace_sdpa, sage_attention, switches
from sagebwd.auto import asked, counts, crossings, torch_attention
from sagebwd.auto.crossings import CAUSAL, FORWARD, FULL, KINDS, MASK, PACKED, PADDING, TRAINING, WINDOW, Crossing
from sagebwd.call import Ask, Size

CARD, CPU = torch.device("cuda", 0), torch.device("cpu")
ASK = Ask("auto", 128, 128, torch.bfloat16, CARD, CAUSAL)
LARGE = 1 << 25


def crossing(tokens, dims=(128, 128), direction=FORWARD, kind=CAUSAL, elements=LARGE, impl="hopper/hopper"):
    recipe = "mixed" if "hopper" in impl else "token"
    return Crossing(*dims, direction, kind, elements, tokens, recipe, impl, "a file")


@pytest.fixture
def measured(monkeypatch):
    """Every CUDA device is an H100 with all of the extra, of which this was measured."""
    rows: list[Crossing] = []
    monkeypatch.setattr(dispatch, "arch_of", lambda device: 90 if device.type == "cuda" else 0)
    monkeypatch.setattr(dispatch, "_missing", lambda: None)
    monkeypatch.setattr(dispatch, "card_of", lambda device: "a card")
    monkeypatch.setattr(crossings, "of_card", lambda card, version: tuple(rows))
    for known in (dispatch._choose, dispatch.crossings_of):
        known.cache_clear()
    yield rows
    for known in (dispatch._choose, dispatch.crossings_of):
        known.cache_clear()


def size(tokens, keys=None, elements=LARGE):
    return Size(tokens, tokens if keys is None else keys, elements)


def runs(ask=ASK, of=None):
    return dispatch.choose(ask, of or size(2048)).name


def test_calls_shorter_than_the_crossing_are_torchs(measured):
    measured += [crossing(2048), crossing(1024, direction=TRAINING)]
    assert [runs(of=size(n)) for n in (2047, 2048)] == ["torch/torch", "hopper/hopper"]
    assert [runs(ASK._replace(training=True), size(n)) for n in (1023, 1024)] == ["torch/torch", "hopper/hopper"]
    assert dispatch.choose(ASK, size(1)) is dispatch.IN_TORCH
    assert str(dispatch.IN_TORCH.recipe) == "full"
    assert dispatch.IN_TORCH.impl == "torch"


def test_sequences_that_differ_in_length_count_as_their_harmonic_mean(measured):
    measured.append(crossing(1000))
    assert [runs(of=size(32760, keys)) for keys in (507, 508)] == ["torch/torch", "hopper/hopper"]
    assert runs(of=size(1, 10**6)) == "torch/torch"


def test_small_calls_cross_where_small_ones_were_timed(measured):
    measured += [crossing(1024), crossing(4096, elements=LARGE // 8)]
    assert runs(of=size(2048)) == "hopper/hopper"
    assert runs(of=size(2048, elements=LARGE - 1)) == "torch/torch"
    assert runs(of=size(4096, elements=LARGE - 1)) == "hopper/hopper"
    assert runs(of=size(8192, elements=LARGE // 8 - 1)) == "torch/torch"  # smaller than any that was timed


def test_what_was_never_faster_and_what_was_not_timed_is_torchs(measured):
    assert runs(of=size(1 << 20)) == "torch/torch"
    measured += [crossing(None), crossing(256, kind=WINDOW), crossing(256, dims=(256, 256))]
    assert runs(of=size(1 << 20)) == "torch/torch"
    assert runs(ASK._replace(kind=FULL)) == "torch/torch"
    assert runs(ASK._replace(kind=WINDOW)) == "hopper/hopper"


def test_a_width_counts_as_the_next_smaller_of_the_same_kernels(measured):
    measured += [crossing(2048, dims=(80, 80)), crossing(512, dims=(96, 96)), crossing(256, dims=(64, 64))]
    found = {d: runs(ASK._replace(head_dim=d, value_dim=d), size(1024)) for d in (64, 72, 80, 88, 96)}
    assert found == {
        64: "hopper/hopper", 72: "torch/torch", 80: "torch/torch", 88: "torch/torch", 96: "hopper/hopper",
    }  # fmt: skip
    assert runs(ASK._replace(head_dim=88, value_dim=88), size(2048)) == "hopper/hopper"
    assert runs(ASK._replace(head_dim=72, value_dim=72), size(1 << 20)) == "torch/torch"


def test_what_was_timed_on_other_kernels_does_not_count(measured, monkeypatch):
    measured += [crossing(256), crossing(512, kind=MASK, impl="triton/triton")]
    assert runs(ASK._replace(kind=MASK)) == "triton/triton"
    monkeypatch.setattr(dispatch, "_missing", lambda: "nvidia-cutlass-dsl is not installed")
    dispatch._choose.cache_clear()
    dispatch.crossings_of.cache_clear()
    assert runs() == "torch/torch"


def test_what_was_named_is_never_handed_over(measured):
    for change in ({"recipe": sagebwd.Recipe.named("mixed")}, {"impl": "hopper"}, {"impl": dispatch.FASTEST}):
        assert runs(ASK._replace(**change), size(16)) == "hopper/hopper"
    assert dispatch.choose(ASK, None).name == "hopper/hopper"
    with pytest.raises(TypeError, match="dtype float32"):
        runs(ASK._replace(dtype=torch.float32), size(16))
    assert runs(ASK._replace(device=CPU), size(16)) == "reference/reference"
    assert runs(ASK._replace(only_torch="dropout_p", device=CPU), size(16)) == "torch/torch"


def test_the_table_of_this_project():
    table = crossings._of_this_project()
    assert {"NVIDIA H200", "NVIDIA H100 80GB HBM3"} <= set(table)
    for rows in table.values():
        for row in (Crossing(**row) for row in rows):
            assert row.kind in KINDS
            assert row.direction in (FORWARD, TRAINING)
    assert crossings.of_card("NVIDIA A100-SXM4-80GB", "0") == ()
    assert len(crossings.of_card("NVIDIA H200", "0")) == len(table["NVIDIA H200"])


# what torch is given

HEADS, KV_HEADS, DIM = 4, 2, 16
CALLS = {
    "full": (FULL, (30, 30), {}),
    "lengths": (FULL, (30, 44), {}),
    "causal": (CAUSAL, (30, 30), {"is_causal": True}),
    "causal by a window": (CAUSAL, (30, 30), {"window": (-1, 0)}),
    "causal, more keys": (CAUSAL, (30, 44), {"is_causal": True}),
    "causal, more queries": (CAUSAL, (44, 30), {"is_causal": True}),
    "window": (WINDOW, (30, 30), {"window": (5, 3)}),
    "window, causal": (WINDOW, (30, 30), {"window": (5, 9), "is_causal": True}),
    "window of all": (FULL, (30, 30), {"window": (29, 29)}),
    "window of all, causal": (CAUSAL, (30, 30), {"window": (29, 29), "is_causal": True}),
    "window, more keys": (WINDOW, (30, 44), {"window": (5, 3)}),
    "padding": (PADDING, (30, 44), {"attn_mask": (torch.arange(44) < 40).expand(2, 1, 1, 44)}),
    "padding, causal": (
        PADDING, (30, 30), {"attn_mask": (torch.arange(30) < 25).expand(2, 1, 1, 30), "is_causal": True},
    ),
    "mask": (MASK, (30, 30), {"attn_mask": torch.ones(30, 30, dtype=torch.bool).tril(3)}),
    "bias": (MASK, (30, 30), {"attn_mask": torch.linspace(-2, 2, 900).view(30, 30)}),
    "bias in another dtype": (MASK, (30, 30), {"attn_mask": torch.linspace(-2, 2, 900).view(30, 30).double()}),
    "bias, window": (MASK, (30, 30), {"attn_mask": torch.linspace(-2, 2, 900).view(30, 30), "window": (4, 0)}),
    "scale": (CAUSAL, (30, 30), {"is_causal": True, "scale": 0.7}),
}  # fmt: skip


@pytest.fixture
def handed(monkeypatch):
    """What torch computes too is handed over, wherever it is."""
    monkeypatch.setattr(dispatch, "hands_over", lambda ask, of: of is not None)
    counts.counts.clear()


def draw(tokens_q, tokens_k):
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, tokens_q), (KV_HEADS, tokens_k), (KV_HEADS, tokens_k)
    return [torch.randn(2, *shape, DIM, generator=generator, requires_grad=True) for shape in shapes]


def outcome(tensors, **options):
    out = sage_attention(*tensors, enable_gqa=True, **options)
    return out, *torch.autograd.grad(out.sin().sum(), tensors)


@pytest.mark.parametrize("name", CALLS)
def test_torch_computes_the_same_call(name, handed):
    """As recipe "full", forward and backward, in the first call, in later ones that ask nothing, and compiled."""
    kind, lengths, options = CALLS[name]
    tensors = draw(*lengths)
    expected = outcome(tensors, **options, recipe="full")
    counts.counts.clear()
    assert asked.choice_of(*tensors, enable_gqa=True, **options)[1].ask.kind == kind
    torch._dynamo.reset()
    compiled = torch.compile(partial(sage_attention, enable_gqa=True, **options), fullgraph=True, backend="aot_eager")
    out = compiled(*tensors)
    assert not counts.counts
    for found in (
        outcome(tensors, **options),
        outcome(tensors, **options),
        (out, *torch.autograd.grad(out.sin().sum(), tensors)),
    ):
        for actual, exact in zip(found, expected):
            torch.testing.assert_close(actual, exact, rtol=1e-4, atol=1e-5)
    assert counts.counts == {counts.TORCH: 2}


def test_what_torch_has_nothing_for_stays(handed, monkeypatch):
    q, k, v = draw(30, 30)
    block_mask = sagebwd.read_block_mask(
        torch.nn.attention.flex_attention.create_block_mask(
            lambda b, h, i, j: j <= i, None, None, 30, 30, device="cpu"
        )
    )
    monkeypatch.setattr(torch_attention, "MOST_ELEMENTS", 899)
    for options in (
        {"return_lse": True}, {"block_mask": block_mask}, {"recipe": "token"}, {"impl": "reference"},
        {"window": (5, 0)}, {"window": (5, -1), "attn_mask": torch.zeros(30, 30)},
    ):  # fmt: skip
        choice, _ = asked.choice_of(q, k, v, enable_gqa=True, **options)
        assert choice is not dispatch.IN_TORCH, options
    k, v = k[:, :, :20], v[:, :, :20]
    assert asked.choice_of(q, k, v, enable_gqa=True, window=(5, 0))[0] is not dispatch.IN_TORCH  # 25 sees no key
    for x in (q[:, :, :0], q[:0]):
        assert asked.choice_of(x, x, x)[0] is not dispatch.IN_TORCH
    with switches(deterministic=True):
        assert asked.choice_of(q, q, q)[0] is not dispatch.IN_TORCH
    for name in ("disabled", "backward_16bit"):
        with switches(**{name: True}):
            assert not isinstance(asked.choice_of(q, q, q)[1].ask.recipe, str)


def test_what_torch_alone_takes_runs_on_any_device():
    q = torch.randn(1, 2, 20, 512, requires_grad=True)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.equal(sage_attention(q, q, q, is_causal=True), expected)
    x = torch.randn(1, 2, 20, 16)
    bias = torch.randn(20, 20, requires_grad=True)
    (gradient,) = torch.autograd.grad(sage_attention(x, x, x, bias).sum(), bias)
    (exact,) = torch.autograd.grad(F.scaled_dot_product_attention(x, x, x, bias).sum(), bias)
    torch.testing.assert_close(gradient, exact)
    outcomes = []
    for attention in (sage_attention, F.scaled_dot_product_attention):
        torch.manual_seed(0)
        outcomes.append(attention(x, x, x, dropout_p=0.5))
    assert torch.equal(*outcomes)
    for options in ({"return_lse": True}, {"recipe": "full"}):
        with pytest.raises(NotImplementedError, match=r"dropout_p=0\.5"):
            sage_attention(x, x, x, dropout_p=0.5, **options)


def test_a_bias_gets_its_gradient_in_later_calls_too():
    x, bias = torch.randn(1, 2, 20, 16), torch.zeros(20, 20)
    kernels = sage_attention(x, x, x, bias)
    for _ in range(3):
        assert torch.equal(sage_attention(x, x, x, bias), kernels)
        out = sage_attention(x, x, x, bias.clone().requires_grad_())
        assert out.requires_grad
    with torch.no_grad():
        assert torch.equal(sage_attention(x, x, x, bias.clone().requires_grad_()), kernels)


def test_the_patch_of_torchs_function_does_not_come_back(handed):
    q, k, v = draw(30, 30)
    with replace_sdpa() as sdpa:
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        again = sage_attention(q, k, v, enable_gqa=True)
    assert sdpa.counts == {"replaced": 0, "kept": {"faster in full precision": 1}}
    assert torch.equal(out, again)
    with replace_sdpa(unsupported="raise"):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, enable_gqa=True), out)


def test_whether_a_call_trains_makes_another_kind(monkeypatch):
    """Of a call of "auto" alone."""
    asks = []
    monkeypatch.setattr(dispatch, "hands_over", lambda ask, of: asks.append(ask.training) or True)
    q, k, v = draw(30, 30)
    for _ in range(2):
        sage_attention(q, k, v, enable_gqa=True)
        with torch.no_grad():
            sage_attention(q, k, v, enable_gqa=True)
    assert asks == [True, False]
    kinds = {eager.kind_of((q, k, v, *(None,) * 3), recipe, None) for recipe in ("auto", "token")}
    with torch.no_grad():
        kinds |= {eager.kind_of((q, k, v, *(None,) * 3), recipe, None) for recipe in ("auto", "token")}
    assert len(kinds) == 3


def test_autocast_casts_what_is_handed_over(handed):
    q, k, v = draw(30, 30)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert sage_attention(q, k, v, enable_gqa=True).dtype == torch.bfloat16
        assert sage_attention(q, k, v, enable_gqa=True).dtype == torch.float32


def test_a_trace_compiles_once_a_side_of_the_crossing(monkeypatch):
    """And branches on lengths alone."""
    monkeypatch.setattr(dispatch, "_thresholds", crossing_of_100)
    monkeypatch.setattr(dispatch, "hands_over", partial(_on_a_gpu, dispatch.hands_over))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x: sage_attention(x, x, x, is_causal=True), fullgraph=True, backend=counter, dynamic=True
    )
    for tokens, graphs in ((40, 1), (50, 1), (120, 2), (150, 2), (60, 2)):
        x = torch.randn(1, 2, tokens, 16, requires_grad=True)
        recipe = "full" if tokens < 100 else "token"
        torch.testing.assert_close(compiled(x), sage_attention(x, x, x, is_causal=True, recipe=recipe))
        assert counter.frame_count == graphs


@sagebwd.auto.traced.asked_once
def crossing_of_100(ask):
    return ((0, 100),)


def _on_a_gpu(hands_over, ask, of):
    return hands_over(ask._replace(device=CARD), of)


# what is said


def test_explain_says_why_torch(measured, monkeypatch):
    monkeypatch.setattr(asked, "ask_of", lambda *x: ASK._replace(kind=x[4]))
    q = torch.empty(2, 4, 512, 128)
    why = lambda **options: sagebwd.explain(q, q, q, **options)  # noqa: E731
    assert "nobody has timed low precision on a card with torch" in why(is_causal=True).why
    measured.append(crossing(2048, elements=1))
    dispatch.crossings_of.cache_clear()
    found = why(is_causal=True)
    assert found[:4] == ("full", "torch", "torch", ((128, 128), (128, 128)))
    assert found.why == (
        "512 tokens, mask causal at head_dim 128, forward: full precision is faster up to 2048 tokens, a file"
    )
    assert str(found) == f"full on torch at head_dim 128: {found.why}"
    assert "was not timed on a card for mask full at head_dim 128" in why().why
    measured[0] = crossing(256, elements=1)
    dispatch.crossings_of.cache_clear()
    assert str(why(is_causal=True)) == (
        "mixed on hopper at head_dim 128: 512 tokens, mask causal at head_dim 128, forward: mixed is faster from 256 "
        "tokens on, a file"
    )
    assert "torch has nothing that computes the same" in why(is_causal=True, return_lse=True).why
    measured[0] = crossing(None, elements=1 << 30)
    dispatch.crossings_of.cache_clear()
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


# packed sequences


def test_packed_calls_go_to_an_attention_that_takes_them(monkeypatch):
    """A GPU's: here a stand-in says what it is given."""
    given = {}

    def varlen_attn(query, key, value, *packing, scale, window_size, enable_gqa=False):
        given.update(packing=packing, scale=scale, window=window_size, grouped=enable_gqa)
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    torch_attention._packed_arguments.cache_clear()
    assert torch_attention.takes_packed(64, 64, True)
    for dims in ((64, 128), (60, 60), (264, 264)):
        assert not torch_attention.takes_packed(*dims, False)
    q, k, offsets = torch.randn(20, 4, 16), torch.randn(20, 2, 16), torch.tensor([0, 8, 20], dtype=torch.int32)
    packing = (offsets, offsets), (12, 12)
    torch_attention.packed(q, k, k, *packing, True, (-1, -1), 0.3)
    assert (given["packing"], given["scale"]) == ((offsets, offsets, 12, 12), 0.3)
    assert (given["window"], given["grouped"]) == ((-1, 0), True)
    torch_attention.packed(q, q, q, *packing, False, (5, 2), 0.3)
    assert (given["window"], given["grouped"]) == ((5, 2), False)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, is_causal=False: None)
    torch_attention._packed_arguments.cache_clear()
    assert not torch_attention.takes_packed(64, 64, False)
    torch_attention._packed_arguments.cache_clear()


def test_packed_calls_are_as_long_as_their_mean(measured):
    measured.append(crossing(1000, kind=PACKED))
    ask = ASK._replace(kind=PACKED)
    assert [runs(ask, size(n)) for n in (999, 1000)] == ["torch/torch", "hopper/hopper"]


def test_the_table_is_what_its_files_say():
    from tools.crossings import ROOT, TABLE, of_file, text_of

    table = {}
    for rows in json.loads(TABLE.read_text(encoding="utf-8")).values():
        for source in {row["source"] for row in rows}:
            card, found = of_file(ROOT / source)
            table[card] = [row._asdict() for row in found]
    assert TABLE.read_text(encoding="utf-8") == text_of(table)
