"""Calls that are replayed without operators: same results and gradients, and none that a check would have stopped.

The kernels are stand-ins that a CPU runs: o = q k m + v and lse = sum(q) of rows, where m is the key mask.
"""

import ctypes

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sagebwd import dispatch, eager, sage_attention, sage_attention_varlen
from sagebwd.call import Call, Saved, empty_gradients, empty_like_rows
from sagebwd.recipe import Recipe
from sagebwd.switches import switches

numpy = pytest.importorskip("numpy")
pytest.importorskip("triton")
from sagebwd.kernels.host import replay  # noqa: E402

SHAPE = 2, 3, 8, 4
ROWS = SHAPE[0] * SHAPE[1] * SHAPE[2]
SIZE = ROWS * SHAPE[3]


def floats(pointer, count: int = SIZE):
    address = pointer if isinstance(pointer, int) else pointer.data_ptr()
    return numpy.frombuffer((ctypes.c_float * count).from_address(address), dtype=numpy.float32)


def mask_of(pointer):
    if pointer is None:
        return 1.0
    address = pointer if isinstance(pointer, int) else pointer.data_ptr()
    kept = numpy.frombuffer((ctypes.c_uint8 * (SHAPE[0] * SHAPE[2])).from_address(address), dtype=numpy.uint8)
    return numpy.broadcast_to(kept.reshape(SHAPE[0], 1, SHAPE[2], 1), SHAPE).reshape(-1)


class Kernel:
    """Runs a function of addresses, or of tensors the first times, as Triton's kernels are launched."""

    arg_names = ()

    def __init__(self, function) -> None:
        self.function, self.launched = function, 0

    def __getitem__(self, grid):
        def start(*arguments):
            self.launched += 1
            self.function(*arguments)
            return Compiled(self)

        return start


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.kernel.function


def forward_kernel(q, k, v, mask, o, lse, kept_q, kept_k, mean, count, offsets):
    shift = 0 if offsets is None else numpy.frombuffer((ctypes.c_int32 * 2).from_address(address_of(offsets)), "i4")[1]
    floats(kept_q)[:], floats(kept_k)[:] = floats(q) * mask_of(mask), floats(k) * mask_of(mask)
    floats(o)[:] = floats(q) * floats(k) * mask_of(mask) + floats(v) + shift
    floats(lse, ROWS)[:] = floats(q).reshape(ROWS, -1).sum(1)
    floats(mean, count)[:] = 0


def backward_kernel(do, dlse, kept_q, kept_k, counter, dq, dk, dv):
    assert (floats(counter, 4) == 0).all()
    floats(counter, 4)[:] = 7
    rows = 0 if dlse is None else floats(dlse, ROWS).repeat(SHAPE[3])
    floats(dq)[:], floats(dk)[:] = floats(do) * floats(kept_k) + rows, floats(do) * floats(kept_q)
    floats(dv)[:] = floats(do)


def address_of(x) -> int:
    return x if isinstance(x, int) else x.data_ptr()


class Kernels:
    """A module of kernels."""

    def __init__(self) -> None:
        self.first, self.second = Kernel(forward_kernel), Kernel(backward_kernel)
        self.asked: list[int] = []  # a call of `choose` each

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
        o, lse = empty_like_rows(q), torch.empty(q.shape[:-1] if q.dim() == 4 else (q.shape[1], q.shape[0]))
        kept, mean = torch.empty(2, *q.shape), torch.empty(call.keys.batch, call.keys.heads, call.head_dim)
        offsets = call.queries.cu_seqlens
        replay.launch(self.first, (1,), q, k, v, call.key_mask, o, lse, *kept.unbind(), mean, mean.numel(), offsets)
        return Saved(o, lse, None, kept[0], None, kept[1], None, mean)

    def backward(self, call, saved, do, dlse, q, k, v):
        gradients = empty_gradients(call.recipe, call.head_dim, saved.o, v)
        zeros = torch.zeros(4)
        replay.launch(self.second, (1,), do, dlse, saved.q_scale, saved.k_scale, zeros, *gradients)
        return tuple(gradients)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The kernels of ``impl="triton"``."""
    made = Kernels()
    monkeypatch.setattr(dispatch, "_module", lambda name: made)
    chosen = dispatch.named(Recipe.named("token"), "triton/triton")
    monkeypatch.setattr(dispatch, "choose", lambda *_: made.asked.append(1) or chosen)
    return made


@pytest.fixture
def operators(monkeypatch):
    """How often the operator ran a forward."""
    calls, real = [], dispatch.forward
    monkeypatch.setattr(dispatch, "forward", lambda *arguments: calls.append(1) or real(*arguments))
    return calls


def draw(count: int = 4, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=generator) for _ in range(count)]


def attend(q, k, v, **arguments):
    return sage_attention(q, k, v, recipe="token", **arguments)


def check(mask: Tensor | None = None, seed: int = 0, with_lse: bool = False, leaves=None) -> None:
    """Results and gradients of one call."""
    *inputs, do = draw(seed=seed)
    q, k, v = leaves or [x.requires_grad_() for x in inputs]
    kept = 1.0 if mask is None else mask[:, :, 0, :, None].float()
    outcome = attend(q, k, v, attn_mask=mask, return_lse=with_lse)
    expected = q * k * kept + v
    o, loss, wanted = outcome, 0, 0
    if with_lse:
        o, lse = outcome
        torch.testing.assert_close(lse, q.sum(-1))
        weight = torch.randn(lse.shape, generator=torch.Generator().manual_seed(seed + 1))
        loss, wanted = (lse * weight).sum(), (q.sum(-1) * weight).sum()
    torch.testing.assert_close(o, expected)
    actual = torch.autograd.grad((o * do).sum() + loss, (q, k, v))
    torch.testing.assert_close(actual, torch.autograd.grad((expected * do).sum() + wanted, (q, k, v)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_later_calls_are_replayed(masked, with_lse, kernels, operators):
    mask = (torch.arange(SHAPE[2]) < torch.tensor([8, 5])[:, None])[:, None, None] if masked else None
    for seed in range(8):
        check(mask, seed, with_lse)
    assert len(operators) == len(kernels.asked) == 2, "a call that is replayed asks nobody"
    assert len(eager._plans) == 1
    # the backwards of two calls by the operators and of one by the plan are not recorded or watched
    assert kernels.first.launched == 2
    assert kernels.second.launched <= 3


def test_packed_calls(operators):
    *_, do = draw()
    for seed in range(6):
        q, k, v = (x.reshape(-1, 1, 4).requires_grad_() for x in draw(3, seed))
        offsets = torch.tensor([0, seed, len(q)], dtype=torch.int32)
        o = sage_attention_varlen(q, k, v, offsets, offsets, len(q), len(q), recipe="token")
        torch.testing.assert_close(o, q * k + v + seed)
        (dq,) = torch.autograd.grad((o * do.view_as(o)).sum(), q)
        torch.testing.assert_close(dq, do.view_as(o) * k)
    assert len(operators) == 2


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_sinks_are_replayed(with_lse, packed, operators):
    """What a replayed call gives is what the operators give, of tensors of the same numbers."""
    found = []
    for seed in (0, 1, 2, 3, 0, 1, 2, 3):
        *inputs, do = draw(seed=seed)
        sinks = torch.tensor([1.0, -1, 0.5] if not packed else [seed / 4], dtype=torch.bfloat16, requires_grad=True)
        leaves = [x.requires_grad_() for x in inputs]
        if packed:
            leaves = [x.detach().view(-1, 1, SHAPE[3]).requires_grad_() for x in inputs]
            offsets = torch.tensor([0, seed, len(leaves[0])], dtype=torch.int32)
            arguments = offsets, offsets, len(leaves[0]), len(leaves[0])
            outcome = sage_attention_varlen(*leaves, *arguments, sinks=sinks, recipe="token", return_lse=with_lse)
        else:
            outcome = attend(*leaves, sinks=sinks, return_lse=with_lse)
        o, lse = outcome if with_lse else (outcome, None)
        loss = (o * do.view_as(o)).sum() + (lse.square().sum() if with_lse else 0)
        found.append((o, *([lse] if with_lse else []), *torch.autograd.grad(loss, (*leaves, sinks))))
        scores = leaves[0].sum(-1).T if packed else leaves[0].sum(-1)
        if with_lse:
            torch.testing.assert_close(lse, torch.logaddexp(scores, sinks.float()[:, None]))
        assert found[-1][-1].dtype == torch.bfloat16
    assert len(operators) == 2
    for first, again in zip(found[:2], found[4:6]):
        torch.testing.assert_close(first, again)


def test_replayed_calls_write_as_they_read(operators):
    """Views of tensors with the heads of a token side by side; the stand-ins go through memory in its order."""
    for seed in range(8):
        q, k, v, do = (x.view(2, 8, 3, 4).transpose(1, 2).detach().requires_grad_() for x in draw(seed=seed))
        o = attend(q, k, v)
        gradients = torch.autograd.grad(o, (q, k, v), do)
        for x, e in zip((o, *gradients), (q * k + v, do * k, do * q, do)):
            torch.testing.assert_close(x, e)
            assert x.stride() == q.stride()
    assert len(operators) == 2


def test_outputs_are_tensors_of_their_own():
    results = []
    for seed in range(6):
        q, k, v, _ = draw(seed=seed)
        results.append((attend(q, k, v), q * k + v))
    for actual, expected in results:
        torch.testing.assert_close(actual, expected)


def test_a_graph_used_twice_and_kept_beside_later_calls():
    for _ in range(3):
        check()
    *inputs, do = draw(seed=1)
    leaves = [x.requires_grad_() for x in inputs]
    o = attend(*leaves)
    check(seed=2)
    for _ in range(2):
        dq, dk, dv = torch.autograd.grad(o, leaves, do, retain_graph=True)
        torch.testing.assert_close((dq, dk, dv), (do * leaves[1], do * leaves[0], do))


@pytest.mark.parametrize("layout", ["expanded", "transposed", "odd"])
def test_gradients_of_any_layout(layout):
    for _ in range(3):
        check()
    for seed in range(4):
        *inputs, do = draw(seed=seed)
        leaves = [x.requires_grad_() for x in inputs]
        if layout == "expanded":
            do = do[..., :1].expand(SHAPE)
        elif layout == "transposed":
            do = do.transpose(-1, -2).contiguous().transpose(-1, -2)
        else:
            do = torch.cat([do.flatten()[:1], do.flatten()])[1:].view(SHAPE)
        dq, _, dv = torch.autograd.grad(attend(*leaves), leaves, do)
        torch.testing.assert_close((dq, dv), (do * leaves[1], do.contiguous()))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_gradient_that_is_an_input(first):
    """Which recorded launches could not tell from it: the first gradients are v itself, later ones are not."""
    for seed in range(7):
        *inputs, do = draw(seed=seed)
        leaves = [x.requires_grad_() for x in inputs]
        do = leaves[2].detach() if first <= seed < first + 3 else do
        gradients = torch.autograd.grad(attend(*leaves), leaves, do)
        torch.testing.assert_close(gradients, (do * leaves[1], do * leaves[0], do))


def test_without_gradients_nothing_is_kept():
    for _ in range(4):
        q, k, v, _ = draw()
        with torch.no_grad():
            assert attend(q.requires_grad_(), k, v).grad_fn is None
        assert attend(*draw(3)).grad_fn is None


def test_some_inputs_without_gradients():
    for _ in range(4):
        q, k, v, do = draw()
        attend(q.requires_grad_(), k, v).backward(do)
        torch.testing.assert_close(q.grad, do * k)
        assert k.grad is None


def test_second_derivatives_raise():
    for _ in range(4):
        *inputs, do = draw()
        leaves = [x.requires_grad_() for x in inputs]
        (dq,) = torch.autograd.grad(attend(*leaves), leaves[:1], do, create_graph=True)
        with pytest.raises(NotImplementedError, match="create_graph=True"):
            torch.autograd.grad(dq.sum(), leaves)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    """What saves tensors by hooks compares those of forward with those made again."""
    for seed in range(4):
        *inputs, do = draw(seed=seed)
        leaves = [x.requires_grad_() for x in inputs]
        o = checkpoint(attend, *leaves, use_reentrant=use_reentrant)
        o.backward(do)
        torch.testing.assert_close(leaves[0].grad, do * leaves[1])


def replayed() -> None:
    for _ in range(3):
        check()
    assert all(isinstance(plan, eager.Plan) for plan in eager._plans.values())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"is_causal": 0}, TypeError),
        ({"scale": False}, TypeError),
        ({"scale": [1.0]}, TypeError),
        ({"enable_gqa": [True], "is_causal": 1}, TypeError),
        ({"dropout_p": 0.5}, NotImplementedError),
        ({"window": [1, 2, 3]}, ValueError),
        ({"recipe": ["token"]}, TypeError),
    ],
    ids=str,
)
def test_what_checks_refuse_is_refused_still(arguments, error):
    for _ in range(3):
        attend_with = {"is_causal": False, "scale": 0.0, "recipe": "token"}
        sage_attention(*draw(3), **attend_with)
    with pytest.raises(error):
        sage_attention(*draw(3), **{**attend_with, **arguments})


def test_windows_of_bools_are_refused_still():
    for _ in range(3):
        attend(*draw(3), window=(1, 0))
    with pytest.raises(ValueError, match="window"):
        attend(*draw(3), window=(True, False))


def test_modes_see_the_operators():
    """As selective activation checkpointing does."""
    replayed()
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        attend(*draw(3))
    assert "sagebwd.attention.default" in seen


def test_autocast_casts(operators):
    replayed()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kind = eager.kind_of((*draw(3), None, None, None), "token", None)
    assert kind != eager.kind_of((*draw(3), None, None, None), "token", None)


def test_switches_make_another_kind(operators):
    replayed()
    count = len(operators)
    with switches(backward_16bit=True):
        attend(*draw(3))
    assert len(operators) == count + 1


@pytest.mark.parametrize("recipe", [Recipe.named("token"), "token(block_k=64)"])
def test_recipes_of_both_forms(recipe, operators):
    for _ in range(5):
        sage_attention(*draw(3), recipe=recipe)
    assert len(operators) == 2


def test_tensors_that_are_one():
    """q that is k too is a kind of its own."""
    for _ in range(4):
        x, y, v = draw(3)
        torch.testing.assert_close(attend(x, x, v), x * x + v)
        torch.testing.assert_close(attend(x, y, v), x * y + v)
    for _ in range(4):  # views of one memory that are two tensors
        x, y, v = draw(3)
        torch.testing.assert_close(attend(x, x.view(SHAPE), v), x * x + v)
        torch.testing.assert_close(attend(x, y, v), x * y + v)


def test_dead_tensors_are_not_kept():
    replayed()
    (plan,) = eager._plans.values()
    assert not any(isinstance(x, Tensor) for x in (*vars(plan).values(), *plan.call, *plan.call.queries))


def test_kinds_that_never_come_again_are_forgotten(monkeypatch):
    monkeypatch.setattr(eager, "MOST_KINDS", 10)
    for count in range(1, 30):
        attend(*draw(3), scale=1.0 * count)
        assert len(eager._plans) <= 10
