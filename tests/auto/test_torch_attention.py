"""What torch's own attention is given of a call that "auto" hands over: the same call, whoever runs it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import sagebwd
from sagebwd import arguments, counts, replace_sdpa, sage_attention, sage_attention_varlen, switches
from sagebwd.auto import choice as auto_choice
from sagebwd.auto import torch_attention
from sagebwd.auto.contenders import TORCH
from sagebwd.cache import PLANS
from sagebwd.call import Ask
from sagebwd.masks.band import Band
from sagebwd.masks.kinds import CAUSAL, FULL, MASK, PACKED, PADDING, WINDOW
from sagebwd.planning.specification import kind_of, laid_out
from sagebwd.reference.metrics import relative_l2
from sagebwd.tracing import assume_constant
from tools.house import called

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
    "window of all but one": (WINDOW, (30, 30), {"window": (28, 28)}),
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
    monkeypatch.setattr(auto_choice, "contender_of", lambda ask, of, *_: "torch" if of and of.by_torch else None)
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
    assert arguments.choice_of(sage_attention, *tensors, enable_gqa=True, **options)[1].ask.kind == kind
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


def test_keys_that_no_query_sees_by_its_position_count_nowhere_in_a_mode(monkeypatch):
    """Regression: whom a plan hands the call to was asked, and a mode's calls, which have none, kept all keys."""
    q, k, v = (x.detach() for x in draw(30, 44))
    exact = sage_attention(q, k[:, :, :30], v[:, :, :30], is_causal=True, enable_gqa=True, recipe="full")
    monkeypatch.setattr(auto_choice, "contender_of", lambda *given: None if given[3:] == (False,) else TORCH)
    k[:, :, 30:] = v[:, :, 30:] = torch.nan
    with FlopCounterMode(display=False):
        found = sage_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize(("options", "most"), [({}, 5), ({"is_causal": True}, 5), ({"window": (5, 0)}, 6)])
def test_a_later_call_is_few_calls_above_torchs_function(options, most, monkeypatch):
    """Of the package's own: to its kind and its plan, and to ask torch's order, which begins with who is to run it."""
    exact = sage_attention(*draw(30, 30), enable_gqa=True, recipe="full", **options)
    names = {int(backend): name for name, backend in torch_attention.BACKENDS.items()}
    monkeypatch.setattr(auto_choice, "contender_of", lambda *_: names[torch._C._get_sdp_priority_order()[0]])
    first = [x.detach() for x in draw(30, 30)]
    sage_attention(*(x.clone() for x in first), enable_gqa=True, **options)
    q, k, v = (x.clone() for x in first)
    outs = []
    made = called(lambda: outs.append(sage_attention(q, k, v, enable_gqa=True, **options)))
    (out,) = outs
    assert 0 < len(made) - 1 <= most, " ".join(made)
    torch.testing.assert_close(out, exact.detach())


def test_torch_is_told_of_grouped_heads_alone(handed, monkeypatch):
    """Others may run on backends that take no groups."""
    told, sdpa = [], torch_attention._sdpa

    def noted(*given, **options):
        told.append("enable_gqa" in options)
        return sdpa(*given, **options)

    monkeypatch.setattr(torch_attention, "_sdpa", noted)
    q, k, v = draw(30, 30)
    for key, value in ((k, v), (q, q)):
        sage_attention(q, key, value, enable_gqa=True)
    assert told == [True, False]


def side_by_side(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def test_what_torch_runs_has_one_plan_however_its_inputs_lie(handed):
    """Also where torch keeps a sign apart."""
    tensors = [x.detach() for x in draw(30, 30)]
    given = {
        "as they are": tensors,
        "heads of a token side by side": list(map(side_by_side, tensors)),
        "not at 16 bytes": [torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x) for x in tensors],
        "a sign": [torch._neg_view(-x) for x in tensors],
    }
    for name, (q, k, v) in given.items():
        exact = F.scaled_dot_product_attention(q.clone(), k.clone(), v.clone(), enable_gqa=True)
        torch.testing.assert_close(sage_attention(q, k, v, enable_gqa=True), exact, msg=name)
    assert len(PLANS) == 1
    assert counts.counts == {counts.TORCH: len(given)}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_inputs_that_do_not_go_together_are_refused_whatever_was_planned(handed):
    """Of the shapes of a call that has a plan."""
    q, k, v = (x.detach() for x in draw(30, 30))
    nested = torch.nested.as_nested_tensor(list(q), layout=torch.strided)
    for _ in range(2):
        for given, error in (
            ((q, k.double(), v), TypeError), ((q, k, v.to("meta")), ValueError),
            ((q, k, v.to_sparse()), NotImplementedError), ((nested, k, v), NotImplementedError),
            ((q, k, v.tolist()), TypeError),
        ):  # fmt: skip
            with pytest.raises(error):
                sage_attention(*given, enable_gqa=True)
        for wrong in ({"is_causal": 0}, {"scale": True}, {"return_lse": 0}, {"enable_gqa": 1}, {"dropout_p": False}):
            with pytest.raises(TypeError):
                sage_attention(q, k, v, **({"enable_gqa": True, "scale": 1.0} | wrong))
        sage_attention(q, k, v, enable_gqa=True)
        sage_attention(q, k, v, enable_gqa=True, scale=1.0)


class Launches(TorchDispatchMode):
    """Counts the operators that write memory."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


SIDES = (None, 0, 1, 3, 15, 16, 17, 40, 1 << 30)


@pytest.mark.parametrize("queries", [1, 2, 16, 17, 33])
def test_a_bands_bias_hides_what_the_band_hides(queries, monkeypatch):
    """In two launches, at places that torch's kernels read as they are, and in little more memory than it shows."""
    monkeypatch.setattr(torch_attention, "_MOST_ROOM", 64)
    for keys in (1, 15, 16, 17, 33, 50):
        key_places, query = torch.arange(keys), torch.zeros(1, 2, queries, 4, dtype=torch.bfloat16)
        for left in SIDES:
            for right in SIDES:
                band = Band(None if left is None else -left, right)
                with Launches() as launches:
                    bias = torch_attention.BandBias.of(band, queries, keys).made(query)
                assert launches.count == 2
                seen = band.mask(torch.arange(queries), key_places)
                exact = torch.zeros(queries, keys, dtype=torch.bfloat16)
                assert torch.equal(bias, exact if seen is None else exact.masked_fill(~seen, float("-inf")))
                assert bias.stride(0) % 16 == bias.storage_offset() % 16 == 0
                assert bias.untyped_storage().nbytes() <= 2 * queries * (queries + keys + 2 * 16)


def test_a_bias_of_many_queries_and_few_keys_is_not_made():
    """It takes as many elements as queries by queries."""
    assert torch_attention.BandBias.of(Band(-1999, 0), 2000, 2000).stride <= 4000
    assert torch_attention.BandBias.of(Band(-65500, 0), 65536, 64) is None
    q, k = torch.randn(1, 2, 200, 16), torch.randn(1, 2, 8, 16)
    exact = sage_attention(q, k, k, window=(195, 2), recipe="full")
    assert arguments.choice_of(sage_attention, q, k, k, window=(195, 2))[0].contender == "torch"
    for _ in range(2):
        torch.testing.assert_close(sage_attention(q, k, k, window=(195, 2)), exact)


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


@pytest.mark.parametrize("backend", [pytest.param(x, marks=on_a_gpu) for x in ("cudnn", "efficient")])
@pytest.mark.parametrize("tokens", [(352, 352), (77, 333)])
@pytest.mark.parametrize("window", [(70, 0), (9, 4), (-1, 5), (30, -1)])
@pytest.mark.parametrize("width", [64, 72])
def test_windows_by_each_backend_on_a_gpu(backend, tokens, window, width, monkeypatch):
    """As recipe "full" of Triton's kernels, forward and backward: each reads the bias as it lies."""
    tensors, options = on_gpu(draw(*tokens, dim=width), {"window": window})
    expected = outcome(tensors, **options, recipe="full")
    monkeypatch.setattr(auto_choice, "contender_of", lambda *_: backend)
    for _ in range(2):
        for actual, exact in zip(outcome(tensors, **options), expected):
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
        create_block_mask(lambda b, h, i, j: j <= i, None, None, 30, 30, device="cpu")
    )
    monkeypatch.setattr(torch_attention, "MOST_ELEMENTS", 899)
    for options in (
        {"return_lse": True}, {"block_mask": block_mask}, {"recipe": "token"}, {"impl": "reference"},
        {"window": (5, 0)}, {"window": (5, -1), "attn_mask": torch.zeros(30, 30)},
    ):  # fmt: skip
        choice, _ = arguments.choice_of(sage_attention, q, k, v, enable_gqa=True, **options)
        assert choice.contender is None, options
    k, v = k[:, :, :20], v[:, :, :20]
    choice, _ = arguments.choice_of(sage_attention, q, k, v, enable_gqa=True, window=(5, 0))
    assert choice.contender is None, "query 25 sees no key"
    for x in (q[:, :, :0], q[:0]):
        assert arguments.choice_of(sage_attention, x, x, x)[0].contender is None
    with switches(deterministic=True):
        assert arguments.choice_of(sage_attention, q, q, q)[0].contender is None
    for name in ("disabled", "backward_16bit"):
        with switches(**{name: True}):
            assert not isinstance(arguments.choice_of(sage_attention, q, q, q)[1].ask.recipe, str)


def test_what_torch_alone_takes_runs_on_any_device():
    q = torch.randn(1, 2, 20, 520, requires_grad=True)
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
    for options, message in (
        ({"return_lse": True}, "return_lse: .* dropout_p"),
        ({"recipe": "full"}, r"dropout_p=0\.5"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            sage_attention(x, x, x, dropout_p=0.5, **options)
    for name in ("disabled", "backward_16bit", "deterministic"):
        with switches(**{name: True}), pytest.raises(NotImplementedError, match=r"dropout_p=0\.5"):
            sage_attention(x, x, x, dropout_p=0.5)


@pytest.mark.parametrize(("tokens", "kv_tokens"), [(0, 4), (4, 0)])
def test_calls_of_no_token_that_torch_alone_takes_run_too(tokens, kv_tokens):
    for head_dim, dropout_p, bias in ((520, 0.0, None), (16, 0.5, None), (16, 0.0, torch.zeros(tokens, kv_tokens))):
        q, k = (torch.randn(1, 2, count, head_dim, requires_grad=True) for count in (tokens, kv_tokens))
        out = sage_attention(q, k, k, None if bias is None else bias.requires_grad_(), dropout_p=dropout_p)
        assert torch.equal(out, torch.zeros(1, 2, tokens, head_dim))
        out.sum().backward()


def test_a_trace_knows_whether_a_call_trains(monkeypatch):
    TRACED.clear()
    monkeypatch.setattr(auto_choice, "_costs", never_faster)
    monkeypatch.setattr(auto_choice, "contender_of", partial(_on_a_gpu, auto_choice.contender_of))
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


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_bias_of_more_digits_than_queries_keeps_those_that_count(is_causal):
    """ALiBi by the key's place, in FP32, is far from 0, where BF16 has steps of 1."""
    q, k, v = torch.randn(3, 1, 2, 300, 16, dtype=torch.bfloat16).unbind()
    bias = torch.arange(300.0).div(2).expand(300, 300).clone()
    seen = torch.ones(300, 300, dtype=torch.bool).tril(0 if is_causal else 300)
    doubles = (x.double() for x in (q, k, v))
    exact = F.scaled_dot_product_attention(*doubles, bias.double().masked_fill(~seen, float("-inf")))
    found = sage_attention(q, k, v, bias, is_causal=is_causal)
    assert relative_l2(found, exact) < 0.01
    bias[7] = float("-inf")
    assert torch.equal(sage_attention(q, k, v, bias, is_causal=is_causal)[:, :, 8:], found[:, :, 8:])


def test_a_bias_gets_its_gradient_in_later_calls_too(monkeypatch):
    monkeypatch.setattr(auto_choice, "_costs", lambda card, planned, *asked: False)  # nothing else is torch's
    x, bias = torch.randn(1, 2, 20, 16), torch.zeros(20, 20)
    kernels = sage_attention(x, x, x, bias)
    for _ in range(3):
        assert torch.equal(sage_attention(x, x, x, bias), kernels)
        out = sage_attention(x, x, x, bias.clone().requires_grad_())
        assert out.requires_grad
    with torch.no_grad():
        assert torch.equal(sage_attention(x, x, x, bias.clone().requires_grad_()), kernels)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_bias_alone_gets_its_gradient(compiled, monkeypatch):
    """Torch's memory-efficient forward keeps what backward reads for gradients of q, k and v alone (torch 2.11)."""
    sdpa = torch_attention._sdpa

    def efficient(q, k, v, mask, *rest, **options):
        assert q.requires_grad or k.requires_grad or v.requires_grad or not mask.requires_grad
        return sdpa(q, k, v, mask, *rest, **options)

    monkeypatch.setattr(torch_attention, "_sdpa", efficient)
    x, drawn = torch.randn(1, 2, 20, 16), torch.randn(20, 20)
    torch._dynamo.reset()
    attend = torch.compile(sage_attention, fullgraph=True, backend="aot_eager") if compiled else sage_attention
    gradients = []
    for attention in (attend, F.scaled_dot_product_attention):
        bias = drawn.clone().requires_grad_()
        gradients += torch.autograd.grad(attention(x, x, x, bias).sin().sum(), bias)
    torch.testing.assert_close(*gradients)


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
    """Of a call of "auto" alone, by any of its tensors."""
    asks = []
    monkeypatch.setattr(auto_choice, "contender_of", lambda ask, *_: asks.append(ask.training) or "torch")
    tensors = draw(30, 30)
    for trained in tensors:
        q, k, v = (x if x is trained else x.detach() for x in tensors)
        sage_attention(q, k, v, enable_gqa=True)
        with torch.no_grad():
            sage_attention(q, k, v, enable_gqa=True)
    assert asks == [True, False]
    given = (q, k, v, *(None,) * 4), None
    specs = {laid_out(kind_of(*given, recipe, None, ()), given[0]) for recipe in ("auto", "token")}
    with torch.no_grad():
        specs |= {laid_out(kind_of(*given, recipe, None, ()), given[0]) for recipe in ("auto", "token")}
    assert len(specs) == 3


def test_autocast_casts_what_is_handed_over(handed):
    q, k, v = draw(30, 30)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert sage_attention(q, k, v, enable_gqa=True).dtype == torch.bfloat16
        assert sage_attention(q, k, v, enable_gqa=True).dtype == torch.float32


def test_a_trace_compiles_once_a_side_of_the_threshold(monkeypatch):
    """And branches on lengths alone."""
    monkeypatch.setattr(auto_choice, "_costs", faster_from_three_tiles)
    monkeypatch.setattr(auto_choice, "contender_of", partial(_on_a_gpu, auto_choice.contender_of))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x: sage_attention(x, x, x, is_causal=True), fullgraph=True, backend=counter, dynamic=True
    )
    for tokens, graphs in ((100, 1), (110, 1), (300, 2), (350, 2), (120, 2)):
        x = torch.randn(1, 132, tokens, 8, requires_grad=True)
        exact = sage_attention(x, x, x, is_causal=True, recipe="full")  # of which the operator runs "auto" on a CPU
        torch.testing.assert_close(compiled(x), exact)
        assert counter.frame_count == graphs
    operator = torch.ops.sagebwd.attention.default
    assert [operator in {node.target for node in graph.graph.nodes} for graph in counter.graphs] == [False, True]


def test_a_trace_of_packed_calls_takes_heads_as_symbols():
    """Regression: fullgraph with dynamic=True raised Unsupported, "argument conversion failed ... takes_packed"."""
    options = True, None, None, None, "auto", None, False, False, "NVIDIA H200"

    def tokens(q, k, offsets):
        return q * arguments.packed_arguments_of(q, k, k, offsets, offsets, 9, 9, *options).size.queries

    torch._dynamo.reset()
    compiled = torch.compile(tokens, fullgraph=True, backend="eager", dynamic=True)
    for heads, count in ((4, 2), (8, 3), (6, 4)):
        q, k = torch.ones(20, heads, 16), torch.ones(20, 2, 16)
        offsets = torch.zeros(count + 1, dtype=torch.int32)
        assert torch.equal(compiled(q, k, offsets), tokens(q, k, offsets))


def test_a_trace_of_packed_calls_takes_a_length_that_it_reads(monkeypatch):
    """Regression: whether such a length is more than another stopped the trace, where "auto" compares times."""
    monkeypatch.setattr(auto_choice, "_costs", faster_from_three_tiles)
    options = True, None, None, None, "auto", None, False, False, "NVIDIA H200"

    def chosen(q, offsets):
        longest = offsets.diff().max().item()
        checked = arguments.packed_arguments_of(q, q, q, offsets, offsets, longest, longest, *options)
        contender = auto_choice.contender_of(checked.ask._replace(device=CARD), checked.size, None, False)
        return q * (1 if contender is None else 2)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(chosen, fullgraph=True, backend="eager", dynamic=True)
        for tokens, factor in ((128, 2), (512, 1)):
            offsets = torch.arange(3, dtype=torch.int32) * tokens
            q = torch.ones(2 * tokens, 132, 16)
            assert torch.equal(compiled(q, offsets), factor * q)
            assert torch.equal(chosen(q, offsets), factor * q)


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
    return (0, 0, 200, 0), (("cudnn", (0, 0, 0, 2)),)


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
    way = torch_attention.Way(PACKED, is_causal=True, longest=(12, 12))
    torch_attention.run(way, 0.3, q, k, k, None, offsets, offsets)
    assert (given["packing"], given["scale"]) == ((offsets, offsets, 12, 12), 0.3)
    assert (given["window"], given["grouped"]) == ((-1, 0), True)
    torch_attention.run(way._replace(is_causal=False, window=(5, 2)), 0.3, q, q, q, None, offsets, offsets)
    assert (given["window"], given["grouped"]) == ((5, 2), False)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, is_causal=False: None)
    torch_attention._packed_arguments.cache_clear()
    assert not torch_attention.takes_packed(64, 64, False)
    torch_attention._packed_arguments.cache_clear()
