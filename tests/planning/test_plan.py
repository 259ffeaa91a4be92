"""Plans: equal specifications share one, and a call's results are of its own tensors, the first's as any later's.

Most kernels here are stand-ins of a few lines: o = q k m + v and lse = sum(q) of rows, where m is the key mask. q and
k are multiples of `STEP`, so that codes hold them.
"""

import gc
import math
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, noop_mask
from torch.utils._python_dispatch import TorchDispatchMode

from sagebwd import attention, counts, dispatch, ops, sage_attention, sage_attention_varlen, switches
from sagebwd.auto import choice as auto_choice
from sagebwd.cache import PLANS
from sagebwd.call import Call, Saved, empty_gradients, empty_like_rows
from sagebwd.recipe import Recipe
from sagebwd.reference.metrics import relative_l2

pytest.importorskip("triton")
from sagebwd.kernels.runtime import launchers, program
from tests import torch_lists
from tests.attention_case import after_an_element
from tests.attention_case import leaves as leaves_of
from tests.gpus import DEVICE
from tests.threads import at_once

TESTS = f"{Path(__file__).parents[1]}{os.sep}"
SHAPE = 2, 3, 8, 4
STEP = 0.5
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is for machines without a GPU")


class Kernel:
    """A function of tensors that is launched as kernels are."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.run

    def run(self, *given) -> None:
        check_addresses([x.data_ptr() for x in given if isinstance(x, Tensor)])
        self.function(*given)


def check_addresses(addresses: list[int]) -> None:
    """Raises for a tensor without memory; apart, since pytest would print it."""
    assert all(addresses)


def forward_kernel(q, k, v, mask, offsets, o, lse, q_int8, q_scale, k_int8, k_scale, k_mean):
    o.copy_(q * k * seen(mask) + v + (0 if offsets is None else offsets[1]))
    lse.copy_(q.sum(-1) if offsets is None else q.sum(-1).T)
    for x, codes, scale in ((q, q_int8, q_scale), (k, k_int8, k_scale)):
        codes.copy_(x / STEP)
        scale.fill_(STEP)
    k_mean.zero_()


def backward_kernel(do, dlse, mask, offsets, q_int8, q_scale, k_int8, k_scale, counter, dq, dk, dv):
    assert not counter.any()
    counter.fill_(7)
    q, k = (codes * scale.flatten()[0] for codes, scale in ((q_int8, q_scale), (k_int8, k_scale)))
    rows = 0 if dlse is None else (dlse if offsets is None else dlse.T)[..., None]
    dq.copy_(do * k * seen(mask) + rows)
    dk.copy_(do * q * seen(mask))
    dv.copy_(do)


def seen(mask: Tensor | None) -> Tensor | int:
    return 1 if mask is None else mask[:, None, :, None].float()


class Family:
    """A module of kernels."""

    def __init__(self) -> None:
        self.asked: list[int] = []  # a call of `choose` each

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
        tokens = [x.shape[:-1] if not call.packed else x.shape[:-1][::-1] for x in (q, k)]
        lse, q_scale, k_scale = (q.new_empty(shape, dtype=torch.float32) for shape in (tokens[0], *tokens))
        q_int8, k_int8 = (x.new_empty(x.shape, dtype=torch.int8) for x in (q, k))
        mean = q.new_empty((call.keys.batch, call.keys.heads, call.head_dim), dtype=torch.float32)
        o, codes = empty_like_rows(q), (q_int8, q_scale, k_int8, k_scale)
        given = q, k, v, call.key_mask, call.queries.cu_seqlens
        program.launch(Kernel(forward_kernel), (1,), *given, o, lse, *codes, mean)
        return Saved(o, lse, *codes, None, mean)

    def backward(self, call, saved, do, dlse, q, k, v):
        gradients = empty_gradients(call.head_dim, saved.o, v)
        counter = program.zeros((4,), torch.float32, v.device)
        given = do, dlse, call.key_mask, call.queries.cu_seqlens, *saved[2:6], counter
        program.launch(Kernel(backward_kernel), (1,), *given, *gradients)
        return tuple(gradients)


@pytest.fixture
def stand_ins(monkeypatch):
    """The kernels of all calls."""
    made = Family()
    monkeypatch.setattr(dispatch, "module_of", lambda name: made)
    chosen = dispatch.named(Recipe.named("token"), "triton/triton")
    monkeypatch.setattr(auto_choice, "choose", lambda *_: made.asked.append(1) or chosen)
    return made


@pytest.fixture
def described(monkeypatch):
    """How often a direction of a call was described."""
    made, of = [], program.Program.of
    monkeypatch.setattr(program.Program, "of", lambda *given: made.append(1) or of(*given))
    return made


@pytest.fixture
def operators(monkeypatch):
    """How often a call took the operator."""
    made = []
    counted = SimpleNamespace(attention=lambda *given: made.append(1) or ops.attention(*given))
    monkeypatch.setattr(attention, "ops", counted)
    return made


def draw(count: int = 4, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    """q, k, v and do."""
    generator = torch.Generator().manual_seed(seed)
    codes = [STEP * torch.randint(-9, 10, shape, generator=generator) for _ in range(2)]
    return [*codes, *(torch.randn(shape, generator=generator) for _ in range(2))][:count]


def attend(q, k, v, **arguments):
    return sage_attention(q, k, v, **{"recipe": "token"} | arguments)


def check(mask: Tensor | None = None, seed: int = 0, with_lse: bool = False) -> None:
    """Results and gradients of one call."""
    *inputs, do = draw(seed=seed)
    q, k, v = leaves = leaves_of(*inputs)
    outcome = attend(q, k, v, attn_mask=mask, return_lse=with_lse)
    expected = q * k * seen(None if mask is None else mask[:, 0, 0]) + v
    o, loss, wanted = outcome, 0, 0
    if with_lse:
        o, lse = outcome
        torch.testing.assert_close(lse, q.sum(-1))
        weight = torch.randn(lse.shape, generator=torch.Generator().manual_seed(seed + 1))
        loss, wanted = (lse * weight).sum(), (q.sum(-1) * weight).sum()
    torch.testing.assert_close(o, expected)
    actual = torch.autograd.grad((o * do).sum() + loss, leaves)
    torch.testing.assert_close(actual, torch.autograd.grad((expected * do).sum() + wanted, leaves))


# a specification and its plan


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_calls_of_a_specification_share_a_plan(masked, with_lse, stand_ins, described):
    for seed in range(6):
        padding = (torch.arange(SHAPE[2]) < torch.tensor([8, seed + 1])[:, None])[:, None, None]
        check(padding if masked else None, seed, with_lse)
    assert len(PLANS) == len(stand_ins.asked) == 1
    assert len(described) == 2


def test_packed_calls_share_a_plan_whatever_their_offsets_say(stand_ins, described):
    for seed in range(4):
        q, k, v, do = (x.reshape(-1, 1, 4) for x in draw(seed=seed))
        offsets = torch.tensor([0, seed, len(q)], dtype=torch.int32)
        q.requires_grad_()
        o = sage_attention_varlen(q, k, v, offsets, offsets, len(q), len(q), recipe="token")
        torch.testing.assert_close(o, q * k + v + seed)
        torch.testing.assert_close(torch.autograd.grad(o, q, do)[0], do * k)
    assert len(PLANS) == len(stand_ins.asked) == 1
    assert len(described) == 2


def side_by_side(x: Tensor) -> Tensor:
    """The same with the heads of a token side by side."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        (lambda x: x[:, :, :7].clone(), {}),
        (side_by_side, {}),
        (after_an_element, {}),
        (torch.Tensor.bfloat16, {}),
        (torch.clone, {"scale": 0.3}),
        (torch.clone, {"is_causal": True}),
        (torch.clone, {"window": (3, 1)}),
        (torch.clone, {"return_lse": True}),
        (torch.clone, {"recipe": "token(block_k=64)"}),
        (torch.clone, {"recipe": Recipe.named("token")}),
        (torch.clone, {"attn_mask": torch.ones(2, 1, 1, 8, dtype=torch.bool)}),
    ],
    ids=["shape", "stride", "alignment", "dtype", "scale", "causal", "window", "lse", "recipe", "object", "mask"],
)
def test_another_specification_has_a_plan_of_its_own(change, arguments, stand_ins):
    for _ in range(3):
        for function, options in ((torch.clone, {}), (change, arguments)):
            q, k, v = map(function, draw(3))
            o = attend(q, k, v, **options)
            o = o[0] if options.get("return_lse") else o
            torch.testing.assert_close(o, (q.float() * k.float() + v.float()).to(o.dtype))
            assert o.stride() == torch.empty_like(q).stride()
    assert len(PLANS) == len(stand_ins.asked) == 2


@pytest.mark.parametrize("name", ["disabled", "backward_16bit", "deterministic"])
def test_switches_have_plans_of_their_own(name, stand_ins):
    for _ in range(3):
        check()
        with switches(**{name: True}):
            check()
    assert len(PLANS) == len(stand_ins.asked) == 2


def test_autocast_has_a_plan_of_its_own(stand_ins):
    for _ in range(3):
        assert attend(*draw(3)).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert attend(*draw(3)).dtype == torch.bfloat16
    assert len(PLANS) == len(stand_ins.asked) == 2


def test_whether_a_named_recipe_trains_makes_no_other_plan(stand_ins, described):
    """Nothing is kept where it does not."""
    leaves = leaves_of(*draw(3))
    for _ in range(3):
        check()
        with torch.no_grad():
            assert attend(*leaves).grad_fn is None
        with torch.inference_mode():
            assert attend(*draw(3)).is_inference()
        assert attend(*draw(3)).grad_fn is None
    assert len(PLANS) == 1
    assert len(described) == 2


def test_tensors_that_are_one_are_no_other_specification(stand_ins, described):
    for seed in range(2):
        x, y, v, do = draw(seed=seed)
        for k in (x, x.view(SHAPE), y):
            leaf = v.detach().requires_grad_()
            o = attend(x, k, leaf)
            torch.testing.assert_close(o, x * k + v)
            for gradient in (do, leaf.detach(), x):
                (dv,) = torch.autograd.grad(o, leaf, gradient, retain_graph=True)
                assert torch.equal(dv, gradient)
    assert len(PLANS) == 1
    assert len(described) == 2


# what takes the operators


class Mode(TorchDispatchMode):
    """Sees every operator, as selective activation checkpointing does."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Subclass(Tensor):
    """A tensor that is more."""


def in_a_mode(function, *tensors):
    with Mode():
        return function(*tensors)


def compiled(function, *tensors):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="eager")(*tensors)


WAYS = {
    "mode": in_a_mode,
    "subclass": lambda function, *x: function(*(t.as_subclass(Subclass) for t in x)).as_subclass(Tensor),
    "vmap": lambda function, *x: torch.vmap(function)(*(t[None] for t in x))[0],
    "make_fx": lambda function, *x: make_fx(lambda q, k, v: function(q, k, v))(*x)(*x),
    "compile": compiled,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap of what has no rule of its own
@pytest.mark.parametrize("way", WAYS)
def test_the_operators_are_taken_where_somebody_may_look(way, stand_ins, operators):
    for _ in range(2):
        check()
        q, k, v = draw(3)
        assert not operators
        torch.testing.assert_close(WAYS[way](attend, q, k, v), q * k + v)
        assert len(operators) == 1
        operators.clear()


@pytest.mark.parametrize("kind", ["negative", "zero"])
def test_inputs_that_torch_holds_as_a_sign_or_as_zeros(kind, stand_ins):
    """Their memory is not what they are."""
    for seed in range(2):
        q, k, v = draw(3, seed)
        given = torch._efficientzerotensor(SHAPE) if kind == "zero" else torch._neg_view(k)
        torch.testing.assert_close(attend(q, given, v), v if kind == "zero" else v - q * k)


# results and gradients


def test_a_graph_used_twice_and_kept_beside_later_calls(stand_ins):
    *inputs, do = draw(seed=1)
    leaves = leaves_of(*inputs)
    o = attend(*leaves)
    check(seed=2)
    for _ in range(2):
        gradients = torch.autograd.grad(o, leaves, do, retain_graph=True)
        torch.testing.assert_close(gradients, (do * leaves[1], do * leaves[0], do))


LAYOUTS = {
    "expanded": lambda x: x[..., :1].expand(SHAPE),
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "odd": after_an_element,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_any_layout(layout, stand_ins, described):
    for seed in range(3):
        check(seed=seed)
        *inputs, do = draw(seed=seed)
        q, k, v = leaves = leaves_of(*inputs)
        do = LAYOUTS[layout](do)
        torch.testing.assert_close(torch.autograd.grad(attend(q, k, v), leaves, do), (do * k, do * q, do.contiguous()))
    assert len(PLANS) == 1
    assert len(described) == 3, "forward, and backward of each layout"


@pytest.mark.parametrize("of", ["o", "lse"])
@pytest.mark.parametrize("kind", ["negative", "zero"])
def test_gradients_that_torch_holds_as_a_sign_or_as_zeros(kind, of, stand_ins):
    """A ZeroTensor has no memory, and memory of a tensor with the negative bit has the other sign."""
    for seed in range(2):
        *inputs, do = draw(seed=seed)
        leaves = leaves_of(*inputs)
        o, lse = attend(*leaves, return_lse=True)
        output, dense = (o, do) if of == "o" else (lse, do.sum(-1))
        dense = torch.zeros_like(dense) if kind == "zero" else dense
        given = torch._efficientzerotensor(dense.shape) if kind == "zero" else torch._neg_view(-dense)
        expected = torch.autograd.grad(output, leaves, dense, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(output, leaves, given), expected)


def test_some_inputs_without_gradients(stand_ins):
    for seed in range(2):
        q, k, v, do = draw(seed=seed)
        attend(q.requires_grad_(), k, v).backward(do)
        torch.testing.assert_close(q.grad, do * k)
        assert k.grad is None


def test_saved_tensors_that_hooks_move(stand_ins):
    """To other memory that lies otherwise, as offloading does."""
    for seed in range(2):
        *inputs, do = draw(seed=seed)
        q, k, v = leaves = leaves_of(*inputs)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: torch.cat([x, x]).chunk(2)[1]):
            o = attend(q, k, v)
        torch.testing.assert_close(torch.autograd.grad(o, leaves, do), (do * k, do * q, do))


@pytest.mark.parametrize("first", [True, False])
def test_a_mask_that_hooks_move_lies_otherwise(first, stand_ins):
    """Equal calls share a plan, whether a hook packed their mask or not."""
    batch, _, tokens, _ = SHAPE
    keep = torch.arange(tokens) < torch.tensor([tokens - 3, 2])[:batch, None]
    mask = keep[:, None, None].repeat(1, 1, tokens, 1)[:, :, :1].expand(batch, 1, tokens, tokens)  # of wide rows
    for moved in (first, not first):
        *inputs, do = draw(seed=int(moved))
        q, k, v = leaves = leaves_of(*inputs)
        pack = torch.clone if moved else torch.Tensor.detach  # a clone of rows that lie apart has them side by side
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            o = attend(q, k, v, attn_mask=mask)
        wanted = do * k * seen(keep), do * q * seen(keep), do
        torch.testing.assert_close(torch.autograd.grad(o, leaves, do), wanted)


GIVEN = {
    "causal": {"is_causal": True},
    "padding": {"attn_mask": (torch.arange(40) < torch.tensor([40, 23])[:, None])[:, None, None]},
    "bias": {"attn_mask": torch.linspace(-2, 2, 1600).view(40, 40)},
    "sinks": {"sinks": torch.tensor([0.5, -1.0])},
}


@pytest.mark.parametrize("name", [*GIVEN, "packed"])
def test_kernels_give_what_the_operators_give_and_the_reference(name):
    """The first call, the second, and the operators have the same bits."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, 40, 16, generator=generator).bfloat16().to(DEVICE) for _ in range(4)]
    given = {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in GIVEN.get(name, {}).items()}

    def run(impl: str) -> tuple[Tensor, ...]:
        q, k, v, do = (x.transpose(1, 2).flatten(0, 1) if name == "packed" else x for x in inputs)
        leaves, options = leaves_of(q, k, v), {"recipe": "full", "impl": impl, "return_lse": True}
        sinks = [given["sinks"].detach().requires_grad_()] if "sinks" in given else []
        if name == "packed":
            offsets = torch.tensor([0, 31, 80], dtype=torch.int32, device=DEVICE)
            o, lse = sage_attention_varlen(*leaves, offsets, offsets, 49, 49, **options)
        else:
            o, lse = sage_attention(*leaves, **options | given | ({"sinks": sinks[0]} if sinks else {}))
        return o, lse, *torch.autograd.grad((o * do).sum() + lse.square().sum(), leaves + sinks)

    first, again, through = run("triton"), run("triton"), in_a_mode(run, "triton")
    for x, second, of_operators, reference in zip(first, again, through, run("reference"), strict=True):
        assert torch.equal(x, second)
        assert torch.equal(x, of_operators)
        assert relative_l2(x, reference) < 0.02


@interpreted
@pytest.mark.parametrize("packed", [False, True])
def test_sinks(packed, stand_ins, described):
    """Beside kernels that know nothing of them."""
    for seed in range(3):
        *inputs, do = (x.reshape(-1, 1, 4) if packed else x for x in draw(seed=seed))
        q, k, v = leaves = leaves_of(*inputs)
        sinks = torch.tensor([seed / 4] if packed else [1.0, -1, 0.5], dtype=torch.bfloat16, requires_grad=True)
        if packed:
            offsets = torch.tensor([0, seed, len(q)], dtype=torch.int32)
            o = sage_attention_varlen(*leaves, offsets, offsets, len(q), len(q), sinks=sinks, recipe="token")
            lse, by_head = q.sum(-1), sinks.float()
        else:
            o, by_head = attend(*leaves, sinks=sinks), sinks.float()[:, None]
            lse = q.sum(-1)
        expected = (q * k + v + (seed if packed else 0)) * torch.sigmoid(lse - by_head)[..., None]
        torch.testing.assert_close(o, expected)
        (dsinks,) = torch.autograd.grad(o, sinks, do)
        torch.testing.assert_close(dsinks, torch.autograd.grad(expected, sinks, do)[0])
    assert len(PLANS) == 1
    assert len(described) == 2


def test_the_reference_rounds_nothing_of_its_own_under_autocast():
    """Its products in FP32 are no layer's that autocast casts."""
    leaves = leaves_of(*(x.bfloat16() for x in draw(3)))

    def run() -> tuple[Tensor, ...]:
        o = sage_attention(*leaves, recipe="full", impl="reference")
        return o, *torch.autograd.grad(o.float().square().sum(), leaves)

    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        found = run()
    assert all(torch.equal(x, e) for x, e in zip(found, expected))


# arguments


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"is_causal": 0}, TypeError),
        ({"scale": False}, TypeError),
        ({"scale": [1.0]}, TypeError),
        ({"scale": torch.tensor(0.0)}, TypeError),
        ({"scale": math.nan}, ValueError),
        ({"enable_gqa": [True]}, TypeError),
        ({"return_lse": [True]}, TypeError),
        ({"impl": ["triton"]}, TypeError),
        ({"dropout_p": False}, TypeError),
        ({"dropout_p": 0.5}, NotImplementedError),
        ({"window": (True, False)}, ValueError),
        ({"window": [1, 2, 3]}, ValueError),
        ({"recipe": ["token"]}, TypeError),
        ({"attn_mask": torch.ones(3, 8, dtype=torch.bool)}, ValueError),
        ({"attn_mask": "causal"}, TypeError),
        ({"sinks": torch.zeros(2)}, ValueError),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_what_is_refused_is_refused_in_every_call(arguments, error, stand_ins):
    """By name, also beside plans of arguments that equal it."""
    (name,), said = arguments, []
    for _ in range(3):
        with pytest.raises(error, match=name) as refused:
            attend(*draw(3), **{"scale": 0.0} | arguments)
        said.append(str(refused.value))
        attend(*draw(3), scale=0.0)
        attend(*draw(3), scale=0.0, window=(1, 0))
    assert len(set(said)) == 1
    assert len(PLANS) == 2


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's offsets are not read")
@pytest.mark.parametrize("offsets", [[0, 20, 47], [1, 20, 48], [0, 30, 20], [0, 2, 48]])
def test_offsets_are_looked_at_in_every_call(offsets, stand_ins):
    q, k, v = (x.reshape(-1, 1, 4) for x in draw(3))
    for values in ([0, 20, 48], offsets) * 2:
        given = torch.tensor(values, dtype=torch.int32)
        if values != offsets:
            sage_attention_varlen(q, k, v, given, given, 40, 40, recipe="token")
            continue
        with pytest.raises(ValueError, match=r"cu_seqlens_q must rise from 0 to|max_seqlen_q=40 is less than"):
            sage_attention_varlen(q, k, v, given, given, 40, 40, recipe="token")


@pytest.mark.parametrize("form", ["dense", "packed", "BlockMask"])
def test_every_call_is_counted_once(form):
    q, k, v = draw(3)
    offsets = torch.tensor([0, 48], dtype=torch.int32)
    mask = create_block_mask(noop_mask, None, None, 8, 8, device="cpu") if form == "BlockMask" else None
    counts.counts.clear()
    for count in range(1, 4):
        if form == "packed":
            rows = (x.reshape(-1, 1, 4) for x in (q, k, v))
            sage_attention_varlen(*rows, offsets, offsets, 48, 48, recipe="token", impl="reference")
        else:
            attend(q, k, v, block_mask=mask, impl="reference")
        assert counts.counts == {"token on reference": count}


# the cache


def test_no_tensor_is_kept(stand_ins):
    for _ in range(2):
        *inputs, do = draw()
        leaves = leaves_of(*inputs)
        mask = torch.ones(2, 1, 1, 8, dtype=torch.bool)
        o, lse = attend(*leaves, attn_mask=mask, return_lse=True)
        gradients = torch.autograd.grad((o * do).sum() + lse.sum(), leaves)
        kept = [weakref.ref(x) for x in (*leaves, do, mask, o, lse, *gradients)]
        del inputs, leaves, do, mask, o, lse, gradients
        gc.collect()
        assert [x() for x in kept] == [None] * len(kept)
    (plan,) = PLANS.values()
    assert not any(isinstance(x, Tensor) for x in (*vars(plan).values(), *plan.call, *plan.call.queries))


@pytest.mark.parametrize(("compiles", "asks"), [(True, True), (False, True), (True, False)])
def test_what_compilers_leave_is_collected_in_their_call(compiles, asks, stand_ins, monkeypatch):
    """Not in a later step; by nobody where a user turned that off."""
    monkeypatch.setattr(program, "COMPILING_SECONDS", 0 if compiles else math.inf)
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    monkeypatch.setattr(gc, "isenabled", lambda: asks)
    for seed in range(2):
        check(seed=seed)
    assert len(collected) == (2 if compiles and asks else 0), "one a direction, of the first call"


def test_threads_share_plans(stand_ins):
    """Each has the results of its own tensors, also where another drops all plans."""

    def work(number: int) -> None:
        for seed in range(20):
            if seed % 7 == number:
                PLANS.clear()
            check(with_lse=seed % 2 == 0, seed=100 * number + seed)

    at_once(work, range(4))


# the way of a call


@interpreted
@pytest.mark.parametrize("way", ["dense", "without gradients", "padding", "mask", "packed"])
def test_a_launch_is_few_calls_below_the_public_function(way, monkeypatch):
    """In the first call as in later ones, but for lists of a new mask, which a program of their own launches."""
    torch_lists.stand_in(monkeypatch.setattr)
    depths, made, start = [], [], launchers.Interpreted.start

    def noted(self, *given):
        frame, names = sys._getframe(), []
        while frame.f_code.co_name not in ("sage_attention", "sage_attention_varlen"):
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        depths.append(len(names))
        sys.setprofile(None)
        return start(self, *given)

    def profile(frame, event, arg):
        """Note what is called before the first launch, but for comprehensions, which later Pythons do not call."""
        code = frame.f_code
        if event == "call" and f"{os.sep}sagebwd{os.sep}" in code.co_filename and not code.co_name.startswith("<"):
            made[-1].append(code.co_name)

    monkeypatch.setattr(launchers.Interpreted, "start", noted)
    q, k, v = (torch.randn(1, 2, 16, 16, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    for _ in range(2):
        made.append([])
        if way == "packed":
            rows = [x.transpose(1, 2).flatten(0, 1).requires_grad_() for x in (q, k, v)]
            offsets = torch.tensor([0, 8, 16], dtype=torch.int32, device=DEVICE)
            sys.setprofile(profile)
            sage_attention_varlen(*rows, offsets, offsets, 8, 8, recipe="token", impl="triton")
            continue
        leaves = [x.clone().requires_grad_(way != "without gradients") for x in (q, k, v)]
        keys = torch.ones(1, 1, 1, 16, dtype=torch.bool, device=DEVICE)
        masks = {"padding": keys, "mask": keys.expand(1, 1, 16, 16).tril()}
        sys.setprofile(profile)
        sage_attention(*leaves, masks.get(way), recipe="token", impl="triton")
    first, second = depths[: len(depths) // 2], depths[len(depths) // 2 :]
    assert first
    assert max(first) <= 12
    assert first == second
    if way in ("dense", "without gradients"):
        assert len(made[1]) - 1 <= 12, f"a later call, whose plan is known, made {made[1]}"


@interpreted
def test_a_first_launch_of_backward_is_few_calls_below_autograd(monkeypatch):
    """Calls of Python functions, torch's too: no mode is entered that holds already, and autograd has one output."""
    made, start = [], launchers.Interpreted.start

    def noted(self, *given):
        sys.setprofile(None)
        return start(self, *given)

    def profile(frame, event, arg):
        code = frame.f_code
        if event == "call" and not code.co_filename.startswith(TESTS) and not code.co_name.startswith("<"):
            made.append(code.co_qualname)

    monkeypatch.setattr(launchers.Interpreted, "start", noted)
    leaves = [torch.randn(1, 2, 16, 16, dtype=torch.bfloat16, device=DEVICE, requires_grad=True) for _ in range(3)]
    o = sage_attention(*leaves, recipe="token", impl="triton")
    for _ in range(2):
        made.clear()
        sys.setprofile(profile)
        torch.autograd.grad(o, leaves, torch.ones_like(o), retain_graph=True)
    calls = made[made.index("SageAttention.backward") :]
    assert len(calls) <= 12, "\n".join(calls)
    assert not any("grad" in name for name in calls), "a mode of gradients is entered"
    assert len(o.grad_fn._input_metadata) == 1, "an output beside o"
