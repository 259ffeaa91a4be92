"""What torch's own attention is given of a call that "auto" hands over: the same call, whoever runs it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import sagebwd
from sagebwd import arguments, dispatch, replace_sdpa, sage_attention, sage_attention_varlen, switches
from sagebwd.auto import counts, torch_attention
from sagebwd.auto.assume_constant import assume_constant
from sagebwd.auto.model import CAUSAL, FULL, MASK, PADDING, WINDOW
from sagebwd.call import Ask
from sagebwd.plan import spec_of
from sagebwd.reference.metrics import relative_l2

CARD = torch.device("cuda", 0)
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
    monkeypatch.setattr(dispatch, "contender_of", lambda ask, of, *_: "torch" if of and of.by_torch else None)
    counts.counts.clear()


def draw(tokens_q, tokens_k, dim=DIM):
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, tokens_q), (KV_HEADS, tokens_k), (KV_HEADS, tokens_k)
    return [torch.randn(2, *shape, dim, generator=generator, requires_grad=True) for shape in shapes]


def outcome(tensors, **options):
    leaves = [x.detach().requires_grad_() for x in tensors]  # of this stream: a graph cannot wait for another
    out = sage_attention(*leaves, enable_gqa=True, **options)
    return out, *torch.autograd.grad(out.sin().sum(), leaves)


@pytest.mark.parametrize("name", CALLS)
def test_torch_computes_the_same_call(name, handed):
    """As recipe "full", forward and backward, in the first call, in later ones that ask nothing, and compiled."""
    kind, lengths, options = CALLS[name]
    tensors = draw(*lengths)
    expected = outcome(tensors, **options, recipe="full")
    counts.counts.clear()
    assert arguments.choice_of(*tensors, enable_gqa=True, **options)[1].ask.kind == kind
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


on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def on_gpu(tensors, options):
    """Tensors and masks on the GPU, in BF16."""
    moved = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    return [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in tensors], moved


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_a_gpu) for name in CALLS])
def test_torch_computes_the_same_call_on_a_gpu(name, handed):
    """As recipe "full" of Triton's kernels; in later calls, and in a CUDA graph of one."""
    _, lengths, options = CALLS[name]
    tensors, options = on_gpu(draw(*lengths, dim=64), options)
    expected = outcome(tensors, **options, recipe="full")
    first, later = (outcome(tensors, **options) for _ in range(2))
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what cuBLAS makes for a stream's first product cannot be captured
        outcome(tensors, **options)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, stream=side):
        captured = outcome(tensors, **options)
    graph.replay()
    for found in (first, later, captured):
        for actual, exact in zip(found, expected):
            assert relative_l2(actual, exact) < 0.02


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        pytest.param(heads, options, marks=on_a_gpu)
        for heads in (4, 2)
        for options in ({}, {"is_causal": True}, {"is_causal": True, "window": (9, 0)}, {"window": (9, 4)})
    ],
)
def test_torch_computes_packed_calls_on_a_gpu(heads, options, handed):
    if not torch_attention.takes_packed(64, 64, heads < 4):
        pytest.skip("this torch has no attention over packed sequences that takes the call")
    drawn = [torch.randn(100, count, 64, device="cuda", dtype=torch.bfloat16) for count in (4, heads, heads)]
    tensors = [x.requires_grad_() for x in drawn]
    offsets = torch.tensor([0, 17, 70, 100], dtype=torch.int32, device="cuda")
    torch._dynamo.reset()
    compiled, outcomes = torch.compile(sage_attention_varlen, fullgraph=True, backend="aot_eager"), []
    for attention, recipe in ((sage_attention_varlen, "full"), (sage_attention_varlen, "auto"), (compiled, "auto")):
        counts.counts.clear()
        out = attention(*tensors, offsets, offsets, 53, 53, recipe=recipe, **options)
        outcomes.append((out, *torch.autograd.grad(out.sin().sum(), tensors)))
        assert counts.counts[counts.TORCH] == (attention is not compiled and recipe == "auto")
    for exact, *found in zip(*outcomes):
        assert max(relative_l2(actual, exact) for actual in found) < 0.02


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
        choice, _ = arguments.choice_of(q, k, v, enable_gqa=True, **options)
        assert choice.contender is None, options
    k, v = k[:, :, :20], v[:, :, :20]
    assert arguments.choice_of(q, k, v, enable_gqa=True, window=(5, 0))[0].contender is None  # 25 sees no key
    for x in (q[:, :, :0], q[:0]):
        assert arguments.choice_of(x, x, x)[0].contender is None
    with switches(deterministic=True):
        assert arguments.choice_of(q, q, q)[0].contender is None
    for name in ("disabled", "backward_16bit"):
        with switches(**{name: True}):
            assert not isinstance(arguments.choice_of(q, q, q)[1].ask.recipe, str)


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
    for name in ("disabled", "backward_16bit", "deterministic"):
        with switches(**{name: True}), pytest.raises(NotImplementedError, match=r"dropout_p=0\.5"):
            sage_attention(x, x, x, dropout_p=0.5)


def test_a_trace_knows_whether_a_call_trains(monkeypatch):
    TRACED.clear()
    monkeypatch.setattr(dispatch, "_costs", never_faster)
    monkeypatch.setattr(dispatch, "contender_of", partial(_on_a_gpu, dispatch.contender_of))
    weight = torch.randn(16, 16, requires_grad=True)

    def layer(x):
        return sage_attention(x @ weight, x, x, is_causal=True)

    x = torch.randn(1, 2, 20, 16)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), F.scaled_dot_product_attention(x @ weight, x, x, is_causal=True))
    compiled(x).sum().backward()
    with torch.no_grad():
        compiled(x)
    assert TRACED == [True, False]


def test_a_bias_gets_its_gradient_in_later_calls_too(monkeypatch):
    monkeypatch.setattr(dispatch, "_costs", lambda card, planned, *asked: False)  # nothing else is torch's
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


def test_whether_a_call_trains_is_of_its_specification(monkeypatch):
    """Of a call of "auto" alone."""
    asks = []
    monkeypatch.setattr(dispatch, "contender_of", lambda ask, *_: asks.append(ask.training) or "torch")
    q, k, v = draw(30, 30)
    for _ in range(2):
        sage_attention(q, k, v, enable_gqa=True)
        with torch.no_grad():
            sage_attention(q, k, v, enable_gqa=True)
    assert asks == [True, False]
    given = (q, k, v, *(None,) * 4), None
    specs = {spec_of(*given, recipe, None) for recipe in ("auto", "token")}
    with torch.no_grad():
        specs |= {spec_of(*given, recipe, None) for recipe in ("auto", "token")}
    assert len(specs) == 3


def test_autocast_casts_what_is_handed_over(handed):
    q, k, v = draw(30, 30)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert sage_attention(q, k, v, enable_gqa=True).dtype == torch.bfloat16
        assert sage_attention(q, k, v, enable_gqa=True).dtype == torch.float32


def test_a_trace_compiles_once_a_side_of_the_threshold(monkeypatch):
    """And branches on lengths alone."""
    monkeypatch.setattr(dispatch, "_costs", faster_from_three_tiles)
    monkeypatch.setattr(dispatch, "contender_of", partial(_on_a_gpu, dispatch.contender_of))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x: sage_attention(x, x, x, is_causal=True), fullgraph=True, backend=counter, dynamic=True
    )
    for tokens, graphs in ((100, 1), (110, 1), (300, 2), (350, 2), (120, 2)):
        x = torch.randn(1, 140, tokens, 8, requires_grad=True)
        exact = sage_attention(x, x, x, is_causal=True, recipe="full")  # of which the operator runs "auto" on a CPU
        torch.testing.assert_close(compiled(x), exact)
        assert counter.frame_count == graphs
    operator = torch.ops.sagebwd.attention.default
    assert [operator in {node.target for node in graph.graph.nodes} for graph in counter.graphs] == [False, True]


TRACED = []


@assume_constant
def never_faster(card, planned, *asked):
    TRACED.append(Ask(*asked).training)
    return True


@assume_constant
def faster_from_three_tiles(card, planned, *asked):
    """In causal calls: pairs of three tiles take longer than rows, and those of one less."""
    assert Ask(*asked).device == CARD
    assert not planned
    return (0, 0, 200, 0, 0), (("cudnn", (0, 0, 0, 2, 0)),)


def _on_a_gpu(contender_of, ask, of, card=None, planned=True):
    return contender_of(ask._replace(device=CARD), of, card, planned)


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
