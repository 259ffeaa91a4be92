"""What torch and peers are given of a call: scales over 0, and operands that their kernels read right."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagebwd import sage_attention, sage_attention_varlen
from sagebwd.auto import choice as auto_choice
from sagebwd.auto import operands, peers, torch_attention
from sagebwd.auto.contenders import CUDNN, EFFICIENT, FLASH, PEERS, TORCH
from sagebwd.cache import PLANS
from sagebwd.masks.kinds import PACKED
from sagebwd.reference.metrics import relative_l2

HEADS, KV_HEADS, DIM = 4, 2, 16
SCALES = 0.0, -0.1, -4.0, 1e-44
FORMS = {
    "full": {}, "causal": {"is_causal": True}, "window": {"window": (3, 2)},
    "bias": {"attn_mask": torch.ones(12, 12).tril()}, "mask": {"attn_mask": torch.ones(12, 12).tril(2) > 0},
}  # fmt: skip


def draw(tokens=12, dim=DIM, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, tokens), (KV_HEADS, tokens), (KV_HEADS, tokens), (HEADS, tokens)
    return [torch.randn(2, *shape, dim, generator=generator).to(device, dtype) for shape in shapes]


def outcome(tensors, do, attention=sage_attention, **options):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attention(*leaves, enable_gqa=True, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("scale", SCALES)
def test_a_scale_of_no_more_than_0(scale, name):
    """Regression: NaN on a GPU, and under a causal mask wrong on a CPU, whose kernels mask before they scale."""
    *tensors, do = draw(dtype=torch.float64)
    exact = outcome(tensors, do, recipe="full", scale=scale, **FORMS[name])
    torch._dynamo.reset()
    compiled = torch.compile(sage_attention, fullgraph=True, backend="aot_eager")
    # the second by the plan of the first
    for attention in (sage_attention, sage_attention, *([compiled] if name == "causal" else [])):
        for found, expected in zip(outcome(tensors, do, attention, scale=scale, **FORMS[name]), exact):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def off(x, begin=1):
    """At ``begin`` elements behind a multiple of 16 bytes."""
    return x.new_empty(x.numel() + begin)[begin:].view(x.shape).copy_(x)


def pitched(x, more):
    return x.new_empty(*x.shape[:-1], x.shape[-1] + more)[..., : x.shape[-1]].copy_(x)


def apart(x, step=2):
    return x.new_empty(*x.shape[:-1], step * x.shape[-1])[..., ::step].copy_(x)


def turned(x):
    return x.new_empty(*x.shape[:-2], x.shape[-1], x.shape[-2]).mT.copy_(x)


def side_by_side(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


IN_PLACE = {"as they are": lambda x: x, "side by side": side_by_side, "pitch of 8 more": partial(pitched, more=8)}
ELSEWHERE = {
    "off": off, "pitch of 1 more": partial(pitched, more=1), "pitch of 2 more": partial(pitched, more=2),
    "apart": apart, "turned": turned, "side by side, off": lambda x: off(x.transpose(1, 2), 3).transpose(1, 2),
}  # fmt: skip


class Strict(torch.autograd.Function):
    """Torch's function where operands and dO are in place."""

    @staticmethod
    def forward(ctx, q, k, v, mask, options):
        for x in (q, k, v):
            assert operands.is_in_place(x, x.data_ptr())
        if mask is not None:
            assert mask.shape[-1] == k.shape[-2]
            assert not mask.is_floating_point() or operands.is_in_place(mask, mask.data_ptr(), rows=False)
        ctx.save_for_backward(q, k, v, mask)
        ctx.options = options
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    @staticmethod
    def backward(ctx, do):
        assert operands.is_in_place(do, do.data_ptr())
        *leaves, mask = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in leaves]
            out = F.scaled_dot_product_attention(*leaves, mask, **ctx.options)
        return *torch.autograd.grad(out, leaves, do), None, None


@pytest.fixture
def strict(monkeypatch):
    """A CPU is a device whose kernels read operands in place alone."""
    monkeypatch.setattr(operands, "ANYWHERE", ())
    monkeypatch.setattr(
        torch_attention, "_sdpa", lambda q, k, v, mask, dropout_p, **options: Strict.apply(q, k, v, mask, options)
    )
    PLANS.clear()
    yield
    PLANS.clear()


@pytest.mark.parametrize("name", [*IN_PLACE, *ELSEWHERE])
@pytest.mark.parametrize("which", range(4))
def test_torch_is_given_operands_in_place(which, name, strict):
    """Regression: cuDNN gave NaN and 1e17, and FlashAttention-2 raised, at 2 bytes more or rows of 129."""
    given = draw()
    *tensors, do = given
    exact = outcome(tensors, do, recipe="full")
    outcome(tensors, do)  # whose plan all of its kind have
    given[which] = (IN_PLACE | ELSEWHERE)[name](given[which])
    *tensors, do = given
    for found, expected in zip(outcome(tensors, do), exact):
        torch.testing.assert_close(found, expected)
    assert len(PLANS) == 2


@pytest.mark.parametrize("name", [*IN_PLACE, "off", "apart", "turned"])
def test_torch_is_given_a_bias_in_place(name, strict):
    q, k, v, do = draw()
    for shape in ((12, 12), (2, 1, 12, 12), (1, 4, 1, 12), (2, 1, 12, 1)):
        bias = torch.randn(shape)
        exact = outcome((q, k, v), do, attn_mask=bias, recipe="full")
        lying = bias if name == "side by side" and bias.dim() < 4 else (IN_PLACE | ELSEWHERE)[name](bias)
        for given in (lying, lying.expand(*lying.shape[:-2], 12, 12)):
            for found, expected in zip(outcome((q, k, v), do, attn_mask=given), exact):
                torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [(2, 1, 12, 1), (1, 4, 1, 1)])
def test_torch_is_given_a_boolean_mask_of_all_keys(shape, strict):
    """Regression: its memory-efficient kernel raised at a mask of one key for all."""
    q, k, v, do = draw()
    mask = torch.ones(shape, dtype=torch.bool)
    for given in (mask, mask.expand(2, 4, 12, 1)):
        for found, expected in zip(outcome((q, k, v), do, attn_mask=given), outcome((q, k, v), do, recipe="full")):
            torch.testing.assert_close(found, expected)


def test_what_is_in_place_is_not_copied(strict, monkeypatch):
    monkeypatch.setattr(operands, "moved", None)
    for form in IN_PLACE.values():
        *tensors, do = map(form, draw())
        outcome(tensors, do)
    q, k, v, do = draw(dim=13)  # which torch fills up, or reads as it is
    monkeypatch.setattr(torch_attention, "_sdpa", torch._C._nn.scaled_dot_product_attention)
    outcome((q, k, v), do)


def graphs_of(function, *tensors):
    """What the parts of a compiled function call, of forward and backward."""
    called = []

    def compiler(graph, _):
        called.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    out = torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))(*tensors)
    out.sum().backward()
    return called


def test_a_trace_copies_what_is_elsewhere(monkeypatch):
    """By an operator: torch.compile drops a clone that differs in its first byte alone."""
    monkeypatch.setattr(operands, "ANYWHERE", ())
    q, k, v, _ = (x.requires_grad_() for x in draw())

    def attention(q, k, v):
        return sage_attention(q, k, v, enable_gqa=True)

    for calls in graphs_of(attention, q, k, v):
        assert not [name for name in calls if "sagebwd" in name]
    forward, backward = graphs_of(
        lambda q, k, v: torch.cat([attention(off_in_graph(q), k, off_in_graph(v)), q[..., :1]], -1), q, k, v
    )
    assert forward.count("sagebwd.moved.default") == 2
    assert backward.count("sagebwd.strided.default") == 1, "of dO, a slice of rows of 17"


@pytest.mark.parametrize("guessed", [False, True])
def test_a_trace_gives_do_the_strides_of_o(guessed, monkeypatch):
    """AOTAutograd has it contiguous, or guessed as the output lies; cuDNN may keep its plan for other strides."""
    monkeypatch.setattr(operands, "ANYWHERE", ())
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 4, 12, DIM))

    def attention(q, k, v):
        return operands.traced(lambda q, k, v: heads_side_by_side(q * k * v), q, k, v, factor=None)

    with torch._functorch.config.patch(guess_tangent_strides_as_outputs=guessed):
        graphs = graphs_of(attention, q, k, v)
    assert [calls.count("sagebwd.strided.default") for calls in graphs] == [0, not guessed]


def test_a_second_derivative_in_a_trace():
    """Regression: the operator that gives dO its strides had none, as make_fx and fake tensors ask."""
    with FakeTensorMode():
        do = torch.ones(2, 3, 4, requires_grad=True)
        operands.as_output(do, heads_side_by_side(do).stride()).sum().backward()
    assert do.grad.shape == do.shape


def test_a_trace_of_vmap(monkeypatch):
    """Regression: no rule for batches of the operator that looks where operands lie, which a CPU does without."""
    monkeypatch.setattr(operands, "ANYWHERE", ())
    given = torch.randn(3, 2, 2, 4, 12, DIM)
    torch._dynamo.reset()
    found = torch.compile(torch.vmap(sage_attention), fullgraph=True, backend="aot_eager")(*given)
    torch.testing.assert_close(found, torch.stack([sage_attention(*x) for x in given.unbind(1)]))


def heads_side_by_side(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def off_in_graph(x):
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_packed_calls_have_a_scale_over_0(scale, monkeypatch):
    given = []
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn", lambda q, *_, scale, **options: given.append((q, scale)) or q
    )
    q, offsets = torch.randn(20, 4, 16), torch.tensor([0, 8, 20], dtype=torch.int32)
    way = torch_attention.Way(PACKED, is_causal=True, longest=(12, 12))
    torch_attention.run(way, scale, q, q, q, None, offsets, offsets)
    torch_attention.settled(TORCH, way, q, q, q, None, scale, None)(q, q, q, None, offsets, offsets)
    for found, positive in given:
        assert positive > 0
        torch.testing.assert_close(found * positive, q * scale)


on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CONTENDERS = TORCH, CUDNN, FLASH, EFFICIENT, *PEERS


@pytest.fixture
def by(monkeypatch):
    """Have a contender run what torch runs too; skips where it is not installed."""

    def by(contender):
        if contender in PEERS and peers.module_of(contender) is None:
            pytest.skip("not installed")
        monkeypatch.setattr(auto_choice, "contender_of", lambda ask, of, *_: contender if of and of.by_torch else None)
        PLANS.clear()

    yield by
    PLANS.clear()


def compare(found, exact, case):
    errors = [relative_l2(x, y) for x, y in zip(found, exact)]
    assert max(errors) < 0.02, (case, errors)


@pytest.mark.parametrize("contender", [pytest.param(name, marks=on_a_gpu) for name in CONTENDERS])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.filterwarnings("error:sagebwd")  # of a refusal
def test_each_contender_is_right_wherever_operands_lie_on_a_gpu(contender, causal, by):
    by(contender)
    drawn = draw(512, 128, torch.bfloat16, "cuda")
    exact = outcome(drawn[:3], drawn[3], is_causal=causal, recipe="full")
    for name, form in (IN_PLACE | ELSEWHERE).items():
        for which in range(4):
            given = list(drawn)
            given[which] = form(given[which])
            compare(outcome(given[:3], given[3], is_causal=causal), exact, (name, which))
    for scale in (0.0, -0.088, -1.0):
        exact = outcome(drawn[:3], drawn[3], is_causal=causal, recipe="full", scale=scale)
        compare(outcome(drawn[:3], drawn[3], is_causal=causal, scale=scale), exact, scale)


@pytest.mark.parametrize("contender", [pytest.param(name, marks=on_a_gpu) for name in (TORCH, *PEERS)])
@pytest.mark.filterwarnings("error:sagebwd")
def test_packed_calls_are_right_wherever_operands_lie_on_a_gpu(contender, by):
    if not torch_attention.takes_packed(128, 128, True):
        pytest.skip("this torch has no attention over packed sequences that takes the call")
    by(contender)
    drawn = [torch.randn(300, n, 128, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2, 4)]
    offsets = torch.tensor([0, 17, 70, 300], dtype=torch.int32, device="cuda")

    def packed(given, **options):
        leaves = [x.detach().requires_grad_() for x in given[:3]]
        out = sage_attention_varlen(*leaves, offsets, offsets, 230, 230, is_causal=True, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, given[3])]

    for scale in (None, 0.0, -0.088):
        exact = packed(drawn, recipe="full", scale=scale)
        for name in ("as they are", "off", "pitch of 1 more", "apart") if scale is None else ("as they are",):
            for which in range(4):
                given = list(drawn)
                given[which] = (IN_PLACE | ELSEWHERE)[name](given[which])
                compare(packed(given, scale=scale), exact, (name, which, scale))


@pytest.mark.parametrize("backend", [pytest.param(x, marks=on_a_gpu) for x in ("inductor", "aot_eager", "eager")])
def test_compiled_calls_are_right_wherever_operands_lie_on_a_gpu(backend, by):
    """By cuDNN, and of tensors that the graph made."""
    by(TORCH)
    drawn = draw(512, 128, torch.bfloat16, "cuda")
    exact = outcome(drawn[:3], drawn[3], recipe="full")
    forms = {"as they are": lambda x: x, "off": off_in_graph, "pitch of 1 more": lambda x: F.pad(x, (0, 1))[..., :-1]}
    for name, form in forms.items():

        def attention(q, k, v, more, form=form, **options):
            out = sage_attention(form(q), form(k), form(v), **options)
            return torch.cat([out, more], -1)  # whose gradient is a slice

        torch._dynamo.reset()
        compiled = torch.compile(attention, fullgraph=True, backend=backend)
        more = drawn[3][..., :1]
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
            leaves = [x.detach().requires_grad_() for x in drawn[:3]]
            out = compiled(*leaves, more, enable_gqa=True)
            found = torch.autograd.grad(out, leaves, torch.cat([drawn[3], more], -1))
        compare([out[..., :-1], *found], exact, name)


@pytest.mark.parametrize("backend", [pytest.param(x, marks=on_a_gpu) for x in ("inductor", "aot_eager")])
@pytest.mark.parametrize("form", [partial(pitched, more=4), heads_side_by_side, torch.clone])
def test_a_compiled_call_is_right_after_one_by_a_plan_for_other_strides_on_a_gpu(backend, form, by):
    """Regression: by cuDNN, whose plan is of the first call, gradients were 1.4 times their norm off."""
    by(TORCH)
    q, k, v, do = draw(448, 256, torch.bfloat16, "cuda")
    exact = outcome((q, k, v), do, recipe="full")
    q = heads_side_by_side(q)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
        compare(outcome((q, k, v), do), exact, "planned")
        torch._dynamo.reset()
        compiled = torch.compile(sage_attention, fullgraph=True, backend=backend)
        compare(outcome((q, k, v), form(do), compiled), exact, "compiled")
