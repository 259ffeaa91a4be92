"""Attention with a prologue as an operator: what runs under torch.compile and modes is what runs outside of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from sagebwd import qk_norm_rope, qk_norm_rope_attention, sage_attention
from sagebwd.checkpointing import keep_attention
from sagebwd.norm_rope.composed import HALF, INTERLEAVED
from tests.gpus import HAS_HOPPER, OF_PROJECTIONS, OF_ROWS, kernels_of
from tests.norm_rope.test_functions import drawn

pytest.importorskip("triton")
from tests.kernels.test_norm_rope_codes import DEVICE, EPS, Case, Family, compose, stand_in  # noqa: F401, a fixture

pytestmark = pytest.mark.gpu if DEVICE == "cuda" else []
ATTENTION, ATTENTION_BACKWARD = torch.ops.sagebwd.attention.default, torch.ops.sagebwd.attention_backward.default
# Those of a call with a prologue, as `Seen` tells them apart.
OPERATOR, BACKWARD = [f"{operator} of a prologue" for operator in (ATTENTION, ATTENTION_BACKWARD)]
COPIES = torch.ops.aten.clone.default, torch.ops.aten._to_copy.default
NAMES = "o", "dq", "dk", "dv", "dq_weight", "dk_weight"


class Given:
    """A case's tensors, and a call of them."""

    def __init__(self, case: Case, dtype: torch.dtype | None = None, **settings: object) -> None:
        heads = case.heads
        self.leaves = [case.draw(heads[min(n, 1)], n).requires_grad_() for n in range(3)]
        if dtype is not None:
            self.leaves = [x.detach().to(dtype).requires_grad_() for x in self.leaves]
        p = case.prologue()
        self.leaves += [x.detach().requires_grad_() for x in p[2:4] if x is not None]
        self.settings = {"recipe": "mixed", "rope": INTERLEAVED if case.interleaved else HALF, "eps": p.eps} | settings
        if p.q_cos is not None:
            self.settings |= {"cos": p.q_cos, "sin": p.q_sin}
        if case.lengths:
            ends, longest = case.call(*self.leaves[:2]).queries.cu_seqlens, max(case.lengths)
            self.settings |= {
                "cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest
            }  # fmt: skip
        else:
            self.settings |= {"enable_gqa": True}

    def attend(self, q, k, v, *weights):
        return qk_norm_rope_attention(q, k, v, **dict(zip(("q_weight", "k_weight"), weights)), **self.settings)

    def outcome(self, attend=None):
        """Output and gradients."""
        o = (attend or self.attend)(*self.leaves)
        do = drawn(*o.shape, seed=3).to(o)
        return o, *torch.autograd.grad(o, self.leaves, do)


CASES = [
    Case(heads=(2, 2)),
    Case(heads=(2, 2), interleaved=True, tables=torch.float32),
    Case(heads=(2, 2), normed=False),
    Case(heads=(2, 2), weighted=False, turned=False),
    Case(heads=(2, 2), lengths=(5, 16)),
]


class Seen:
    """A backend that keeps the operators of the graphs which it is given; attention's of a prologue by such a name.

    copies: shapes of what copies of four dimensions make.
    """

    def __init__(self) -> None:
        self.operators: list[object] = []
        self.copies: list[tuple[int, ...]] = []

    def __call__(self, module, inputs):
        from torch._dynamo.backends.common import aot_autograd

        def keep(graph, _):
            for node in graph.graph.nodes:
                names = [x.name for x in getattr(getattr(node.target, "_schema", None), "arguments", ())]
                has_prologue = dict(zip(names, node.args)).get("interleaved") is not None and "scale" in names
                self.operators.append(f"{node.target} of a prologue" if has_prologue else node.target)
                if node.target in COPIES and node.meta["val"].dim() == 4:
                    self.copies.append(tuple(node.meta["val"].shape))
            return graph

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(module, inputs)


@pytest.fixture
def traces_of_2_11(monkeypatch):
    """torch.compiler.is_exporting says yes in every trace, as torch 2.11's does, of torch.compile too."""
    from torch._dynamo.trace_rules import lookup

    is_exporting = torch.compiler.is_exporting
    lookup(is_exporting)  # dynamo notes torch's functions when it first looks: not what replaces this one
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: torch.compiler.is_dynamo_compiling() or is_exporting())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_it_is_the_operator_in_one_graph(stand_in, traces_of_2_11, case, dynamic):  # noqa: F811
    torch._dynamo.reset()
    given, seen = Given(case), Seen()
    found = given.outcome(torch.compile(given.attend, fullgraph=True, dynamic=dynamic, backend=seen))
    assert [seen.operators.count(x) for x in (OPERATOR, BACKWARD)] == [1, 1]
    assert ATTENTION not in seen.operators
    for name, a, e in zip(NAMES, found, given.outcome()):
        assert a.dtype == e.dtype
        assert a.stride() == e.stride()
        assert torch.equal(a, e), name


def test_other_lengths_take_the_same_graph(stand_in):  # noqa: F811
    torch._dynamo.reset()
    seen = Seen()
    given = [Given(Case(heads=(2, 2), tokens=tokens)) for tokens in (21, 40, 33)]
    compiled = torch.compile(
        lambda q, k, v, q_weight, k_weight, cos, sin: qk_norm_rope_attention(
            q, k, v, q_weight=q_weight, k_weight=k_weight, eps=EPS, cos=cos, sin=sin, recipe="mixed"
        ),
        fullgraph=True, dynamic=True, backend=seen,
    )  # fmt: skip
    for one in given:
        tables = one.settings["cos"], one.settings["sin"]
        for a, e in zip(one.outcome(lambda *x, tables=tables: compiled(*x, *tables)), one.outcome()):
            assert torch.equal(a, e)
    assert seen.operators.count(OPERATOR) == 1


@pytest.mark.parametrize("tables", [torch.bfloat16, torch.float32])
def test_under_autocast_projections_of_its_dtype_take_the_operator(stand_in, tables):  # noqa: F811
    """A norm's FP32 weights and FP32 tables beside them; FP32 projections are composed."""
    for dtype, expected in ((torch.bfloat16, 1), (torch.float32, 0)):
        torch._dynamo.reset()
        given, seen = Given(Case(heads=(2, 2), tables=tables), dtype), Seen()
        with torch.autocast(DEVICE, torch.bfloat16):
            o = torch.compile(given.attend, fullgraph=True, backend=seen)(*given.leaves)
        assert o.dtype == torch.bfloat16
        assert seen.operators.count(OPERATOR) == expected


@pytest.mark.parametrize("part", ["lse", "half of the channels"])
def test_what_is_composed_outside_of_a_trace_is_composed_within(stand_in, part):  # noqa: F811
    torch._dynamo.reset()
    given, seen = Given(Case(heads=(2, 2))), Seen()
    if part == "lse":
        given.settings["return_lse"] = True
    else:
        given.settings |= {name: given.settings[name][..., :32] for name in ("cos", "sin")}
    torch.compile(given.attend, fullgraph=True, backend=seen)(*(x.detach() for x in given.leaves))
    assert OPERATOR not in seen.operators
    assert ATTENTION in seen.operators


def test_errors_within_a_trace_are_the_attentions(stand_in):  # noqa: F811
    for settings in ({"recipe": "int3"}, {"window": (1, -2)}, {"impl": "fast"}):
        torch._dynamo.reset()
        given = Given(Case(heads=(2, 2)), **settings)
        name = next(iter(settings))
        with pytest.raises(ValueError, match=name):
            given.attend(*given.leaves)
        with pytest.raises(Exception, match=name):
            torch.compile(given.attend, fullgraph=True, backend="eager")(*given.leaves)


def test_opcheck(stand_in):  # noqa: F811
    q, k, v, q_weight, k_weight = Given(Case(heads=(2, 2))).leaves
    tables = Case(heads=(2, 2)).prologue()[4:]
    rest = *(None,) * 7, 21, 21, True, -1, -1, 0.3, "mixed", "hopper/hopper", False, False
    for weights, eps in (((q_weight, k_weight), EPS), ((q_weight, None), EPS), ((None, None), None)):
        arguments = q, k, v, *rest, eps, False, *weights, *tables
        assert set(torch.library.opcheck(ATTENTION, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing_changes_nothing_and_may_keep_it(stand_in, compiled, keep):  # noqa: F811
    torch._dynamo.reset()
    given = Given(Case(heads=(2, 2)))
    context, ran = {"context_fn": keep_attention} if keep else {}, []

    def block(*x):
        return checkpoint(given.attend, *x, use_reentrant=False, **context)

    wanted = given.outcome()
    real = Family.forward
    try:
        Family.forward = staticmethod(lambda *x: ran.append(1) or real(*x))
        seen = Seen()
        found = given.outcome(torch.compile(block, fullgraph=True, backend=seen) if compiled else block)
    finally:
        Family.forward = staticmethod(real)
    for name, a, e in zip(NAMES, found, wanted):
        assert torch.equal(a, e), name
    if compiled:
        assert seen.operators.count(OPERATOR) == (1 if keep else 2)


def test_saved_are_the_tensors_of_a_call_outside_of_a_trace(stand_in):  # noqa: F811
    """What a graph keeps for backward beside its inputs is O, lse and the workspace."""
    case = Case(heads=(2, 2))
    kept = []
    for compiled in (False, True):
        torch._dynamo.reset()
        given, found = Given(case), []
        attend = torch.compile(given.attend, fullgraph=True, backend="aot_eager") if compiled else given.attend
        with torch.autograd.graph.saved_tensors_hooks(lambda x, found=found: found.append(x) or x, lambda x: x):
            attend(*given.leaves)
        addresses = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}
        kept.append(sum(addresses.values()))
    assert kept[1] <= kept[0]


def test_a_counter_counts_attentions_products(stand_in):  # noqa: F811
    for case, pairs in ((Case(heads=(2, 2)), 2 * 2 * 21**2), (Case(heads=(2, 2), lengths=(5, 16)), 2 * (25 + 256))):
        given = Given(case)
        with FlopCounterMode(display=False) as found:
            given.outcome()
        counts = found.get_flop_counts()["Global"]
        assert counts[torch.ops.sagebwd.attention] == 2 * pairs * 128
        assert counts[torch.ops.sagebwd.attention_backward] == 2 * pairs * 5 * 64


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_composed(stand_in, strict):  # noqa: F811
    """Regression: it named Hopper's kernels wherever it ran."""

    class Module(torch.nn.Module):
        def forward(self, *x):
            return given.attend(*x)

    given = Given(Case(heads=(2, 2)))
    program = torch.export.export(Module(), tuple(x.detach() for x in given.leaves), strict=strict)
    (node,) = (node for node in program.graph.nodes if node.target is ATTENTION)
    assert len(node.args) <= 20, "a prologue"


def of_fewer_queries(backend: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """O of 5 causal queries beside 21 keys, of which all but 5 are NaN, and what is composed of these 5."""
    torch._dynamo.reset()
    q, k, v = (Case(heads=(2, 2)).draw(2, n) for n in range(3))
    q, k[:, :, 5:], v[:, :, 5:] = q[:, :, :5], torch.nan, torch.nan
    settings = {"is_causal": True, "recipe": "mixed"}
    attend = partial(qk_norm_rope_attention, eps=EPS, **settings)
    found = (attend if backend is None else torch.compile(attend, fullgraph=True, backend=backend))(q, k, v)
    return found, sage_attention(*qk_norm_rope(q, k[:, :, :5], eps=EPS), v[:, :, :5], **settings)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_keys_that_no_query_sees_by_its_position_count_nowhere(stand_in, backend):  # noqa: F811
    """Regression: where the passes take the prologue they set K's mean and V's scales."""
    assert torch.equal(*of_fewer_queries(backend))


@pytest.mark.skipif(not HAS_HOPPER, reason="of Hopper's kernels")
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_keys_that_no_query_sees_by_its_position_count_nowhere_on_hopper(backend):
    found, expected = of_fewer_queries(backend)
    assert (found - expected).float().norm() <= 1e-2 * expected.float().norm()


def test_forward_mode_is_refused_in_a_trace(stand_in):  # noqa: F811
    """Regression: its tangent was 0 without a word."""
    torch._dynamo.reset()
    given = Given(Case(heads=(2, 2)))
    q, *rest = (x.detach() for x in given.leaves)
    with pytest.raises(Exception, match="q: forward-mode differentiation"):
        torch.compile(
            lambda q: torch.func.jvp(lambda q: given.attend(q, *rest), (q,), (q,)), fullgraph=True, backend="eager"
        )(q)


HOPPER = [
    (Case(128, 700, heads=(4, 2)), {"is_causal": True}),
    (Case(64, 300, heads=(3, 3), tables=torch.float32), {}),
    (Case(128, 513, heads=(2, 2), interleaved=True), {"window": (100, 0)}),
    (Case(128, lengths=(200, 1, 333)), {"is_causal": True}),
    (Case(64, lengths=(129, 64), normed=False, heads=(4, 2)), {}),
    (Case(64, 256, heads=(2, 2), turned=False), {"is_causal": True}),
]


@pytest.mark.skipif(not HAS_HOPPER, reason="of Hopper's kernels")
@pytest.mark.parametrize(("case", "given"), HOPPER, ids=str)
def test_compiled_and_composed_are_equal_on_hopper(monkeypatch, case, given):
    """Bit for bit the call outside of a trace; but for codes that a tie has the other way, the composition.

    Regression: torch 2.11 took every trace for an export's, and compiled calls were composed.
    """
    torch._dynamo.reset()
    call = Given(case, **given)
    compiled = torch.compile(call.attend, fullgraph=True)
    found = call.outcome(compiled)
    for attend in (compiled, call.attend):
        ran = kernels_of(lambda attend=attend: call.outcome(attend))
        assert ran >= OF_PROJECTIONS
        assert ran.isdisjoint(OF_ROWS)
    outside = call.outcome()
    compose(monkeypatch)
    for name, a, same, e in zip(NAMES, found, outside, call.outcome()):
        for x in (a, same):
            assert (x.double() - e.double()).norm() <= 1e-2 * e.double().norm(), name
        assert a.stride() == same.stride(), name
        assert torch.equal(found[0], outside[0])
