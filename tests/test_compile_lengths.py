"""One graph of torch.compile for all lengths and batch sizes, whatever runs between its calls."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from sagebwd import dispatch, ops, replace_sdpa, sage_attention, sage_attention_varlen
from sagebwd.auto import operands
from sagebwd.recipe import AUTO

# Batch or sequences, which torch takes for one size with any that they equal in the first call, and tokens.
SIZES = ((2, 33), (3, 64), (5, 65), (4, 100), (9, 128), (6, 57))
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 16


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def dense(batch, tokens):
    return [normal(batch, heads, tokens, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def projected(batch, tokens):
    """As models hand them over, the heads of a token side by side."""
    return [normal(batch, tokens, heads, HEAD_DIM).transpose(1, 2) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def crossed(batch, tokens):
    return [dense(batch, tokens)[0], *dense(batch, 2 * tokens + 7)[1:]]


def padded(batch, tokens):
    lengths = torch.arange(batch) + tokens - batch
    return [*dense(batch, tokens), (torch.arange(tokens) < lengths[:, None])[:, None, None, :]]


def biased(batch, tokens):
    return [*dense(batch, tokens), torch.randn(batch, 1, tokens, tokens, dtype=torch.float64)]


def packed(sequences, tokens):
    lengths = tokens + torch.arange(sequences) - sequences
    offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    qkv = [normal(int(offsets[-1]), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [*qkv, offsets, offsets, tokens, tokens]


def longest_of(offsets):
    return offsets.diff().max().item()


def attend(*tensors, **arguments):
    return sage_attention(*tensors, enable_gqa=True, **arguments)


FORMS = {
    "full": (dense, attend),
    "causal": (dense, lambda *x: attend(*x, is_causal=True)),
    "projected": (projected, lambda *x: attend(*x, is_causal=True)),
    "cross lengths": (crossed, attend),
    "window and lse": (dense, lambda *x: attend(*x, window=(9, 0), return_lse=True)[1]),
    "key padding": (padded, lambda *x: attend(*x, is_causal=True)),
    "additive mask": (biased, attend),
    "packed": (packed, sage_attention_varlen),
    "packed, causal, with lse": (packed, lambda *x: sage_attention_varlen(*x, is_causal=True, return_lse=True)[1]),
    "packed, longest read in the graph": (packed, lambda *x: sage_attention_varlen(*x[:5], *(longest_of(x[3]),) * 2)),
    "packed, that length and the largest logits": (
        packed,
        lambda *x: sage_attention_varlen(*x[:5], *(longest_of(x[3]),) * 2, return_max_logits=True)[0],
    ),
}


def graphs(function, inputs, sizes=SIZES, backend="aot_eager", **options):
    """How often a compiled function, called with inputs of all sizes, was handed to the backend; its results hold."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, backend=counter, **options)
    for size in sizes:
        arguments = inputs(*size)
        outcomes = []
        for attention in (compiled, function):  # eager calls between compiled ones must not count
            out = attention(*arguments)
            outcomes.append((out, *torch.autograd.grad(out.square().sum(), arguments[:3])))
        for actual, expected in zip(*outcomes):
            torch.testing.assert_close(actual, expected)
    return counter.frame_count


@pytest.mark.parametrize("form", FORMS)
def test_one_graph_where_it_is_dynamic(form):
    """Regression: of a length that was read in the graph it is not known that it is not negative."""
    inputs, function = FORMS[form]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert graphs(function, inputs, dynamic=True) == 1


@pytest.mark.parametrize("form", ["causal", "additive mask"])
def test_one_graph_where_it_matters_how_operands_lie(form, monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(operands, "ANYWHERE", ())
    inputs, function = FORMS[form]
    assert graphs(function, inputs, SIZES[:3], dynamic=True) == 1


@pytest.mark.parametrize("form", ["causal", "key padding", "packed"])
def test_two_graphs_where_torch_finds_out(form):
    inputs, function = FORMS[form]
    assert graphs(function, inputs) <= 2


@pytest.mark.parametrize("form", ["causal", "packed"])
def test_one_graph_of_inductor(form):
    inputs, function = FORMS[form]
    assert graphs(function, inputs, SIZES[:3], "inductor", dynamic=True) == 1


@pytest.mark.parametrize("recipe", [AUTO, "token"])
def test_a_batch_that_is_read_in_the_graph(recipe):
    """Regression: "auto" asked whether there are tokens at all, which of such a batch nobody knows."""

    def some(q, k, v, wanted):
        return sage_attention(q[wanted], k[wanted], v[wanted], is_causal=True, enable_gqa=True, recipe=recipe)

    given = *dense(3, 9), torch.tensor([True, False, True])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = torch.compile(some, fullgraph=True, backend="aot_eager")(*given)
    torch.testing.assert_close(found, some(*given))


def test_one_graph_of_replaced_sdpa():
    def block(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with replace_sdpa():
        assert graphs(block, dense, dynamic=True) == 1


@pytest.mark.parametrize("head_dim", [64, 72])
@pytest.mark.parametrize("is_packed", [False, True])
def test_shapes_on_a_gpu_ask_for_no_length(head_dim, is_packed, monkeypatch):
    """What kernels save has more shapes than the reference's; those of `mixed`, at 64, have e4m3 products'."""
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "arch_of", lambda device: 90 if device.type == "cuda" else 0)
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)

    def symbolic(*shape, dynamic):
        sizes = [DimDynamic.DYNAMIC if dim in dynamic else DimDynamic.STATIC for dim in range(len(shape))]
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        return mode.from_tensor(torch.empty(shape, device="meta"), symbolic_context=context).shape

    shape = symbolic(300, 6, head_dim, dynamic=(0,)) if is_packed else symbolic(3, 6, 300, head_dim, dynamic=(0, 2))
    (offsets,) = symbolic(4, dynamic=(0,))
    with mode, torch.no_grad():
        q = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        cu_seqlens = torch.empty(offsets, dtype=torch.int32, device="cuda") if is_packed else None
        longest = shape[0] if is_packed else shape[2]
        masks = *(None,) * 4, cu_seqlens, cu_seqlens
        numbers = longest, longest, True, -1, -1, 0.125, AUTO, dispatch.FASTEST, False
        o, lse, workspace = ops.attention(q, q, q, None, *masks, *numbers)
        saved = o, lse, workspace, None
        *gradients, _ = ops.attention_backward(o, None, q, q, q, *saved, *masks, head_dim, *numbers)
    assert all(x.shape == shape for x in (o, *gradients))
    assert not [guard.expr for guard in environment.guards]


@pytest.mark.parametrize("position", [{"is_causal": True}, {"window": (3, 2)}], ids=["causal", "window"])
def test_an_exported_program_takes_any_lengths_of_queries_and_keys(position):
    """Regression: a guard held it to fewer queries than keys, as in its example, and torch.export refused."""

    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v, recipe="token", **position)

    tensors = [x.detach() for x in crossed(2, 8)]
    queries, keys = (torch.export.Dim(name, min=2, max=64) for name in ("queries", "keys"))
    lengths = {"q": {2: queries}, "k": {2: keys}, "v": {2: keys}}
    program = torch.export.export(Attend(), tuple(tensors), dynamic_shapes=lengths).module()
    for given in (dense(2, 9), [dense(2, 40)[0], *tensors[1:]]):
        assert torch.equal(program(*given), attend(*given, recipe="token", **position))
