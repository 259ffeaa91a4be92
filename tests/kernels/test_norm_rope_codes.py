"""Codes of Q and K made of the projections' outputs, against those of rows that were normalised and rotated before."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from sagebwd import dispatch, qk_norm_rope_attention
from sagebwd.auto import choice as auto_choice
from sagebwd.cache import PLANS
from sagebwd.call import Call, Prologue, Saved, empty_gradients, empty_like_rows
from sagebwd.norm_rope import plan
from sagebwd.norm_rope.composed import HALF, INTERLEAVED, norm_rope
from sagebwd.recipe import Recipe
from sagebwd.reference.quantize import quantize_tokens
from sagebwd.reference.rotation import rotated

pytest.importorskip("triton")
from sagebwd.kernels import norm_rope as kernels
from sagebwd.kernels.runtime import launchers, nvrtc, program
from sagebwd.kernels.sm90.forward.variant import SCALE_BLOCK
from sagebwd.kernels.sm90.operands import norm_rope_codes
from sagebwd.kernels.sm90.operands.norm_rope_codes import launch_norm_rope_codes
from sagebwd.kernels.sm90.operands.quantize_k import launch_quantize_k
from tests.gpus import DEVICE, HAS_HOPPER, on_gpu
from tests.kernels import emulated_cuda
from tests.kernels.cubins import stack_bytes
from tests.norm_rope.test_functions import drawn
from tools.house import called

pytestmark = on_gpu
EPS = 1e-6
# Registers that do not fit, in bytes of a thread's local memory: those beside the loop.
STACK_BYTES = 64


@dataclass(frozen=True)
class Case:
    """A call with a prologue."""

    head_dim: int = 64
    tokens: int = 21
    lengths: tuple[int, ...] = ()
    heads: tuple[int, int] = (4, 2)
    interleaved: bool = False
    normed: bool = True
    weighted: bool = True
    turned: bool = True
    recipe: str = "mixed"
    dtype: torch.dtype = torch.bfloat16
    tables: torch.dtype = torch.bfloat16

    def draw(self, heads: int, seed: int) -> torch.Tensor:
        """Heads of a token side by side."""
        if self.lengths:
            return (drawn(sum(self.lengths), heads, self.head_dim, seed=seed) + 1).to(DEVICE, self.dtype)
        x = drawn(2, self.tokens, heads, self.head_dim, seed=seed) + 1
        return x.to(DEVICE, self.dtype).transpose(1, 2)

    def prologue(self) -> Prologue:
        """Tables are any numbers: no identity of cosines is used."""
        tables, weights = [None, None], [None, None]
        if self.turned:
            rows = sum(self.lengths) or self.tokens
            tables = [drawn(1, rows, self.head_dim, seed=seed).to(DEVICE, self.tables) for seed in (5, 6)]
        if self.normed and self.weighted:
            weights = [(1 + 0.3 * drawn(self.head_dim, seed=seed)).float().to(DEVICE) for seed in (7, 8)]
        return Prologue(EPS if self.normed else None, self.interleaved, *weights, *tables, *tables)

    def call(self, q: torch.Tensor, k: torch.Tensor) -> Call:
        ends = None
        if self.lengths:
            ends = torch.tensor([0, *self.lengths], device=DEVICE).cumsum(0, dtype=torch.int32)
        longest = max(self.lengths, default=self.tokens)
        dims = self.head_dim, self.head_dim
        settings = longest, longest, True, -1, -1, 0.3, Recipe.parse(self.recipe)
        return Call.of(q, k, dims, None, ends, ends, *settings)._replace(prologue=self.prologue())

    def composed(self, q: torch.Tensor, k: torch.Tensor, prologue: Prologue) -> tuple:
        """Rows of the pass by itself, and 1 / rms, in four dimensions."""
        eps, interleaved, *tensors = prologue
        return kernels.forward(*map(in_four, (q, k)), *tensors, eps, interleaved, None)


def in_four(x):
    return x if x is None or x.dim() == 4 else x.transpose(0, 1)[None]


CASES = [
    Case(),
    Case(128, 130, interleaved=True, heads=(3, 3)),
    Case(128, 70, weighted=False),
    Case(64, 600, heads=(2, 1)),
    Case(64, 40, normed=False, heads=(9, 9)),
    Case(128, 33, turned=False),
    Case(64, lengths=(5, 0, 150)),
    Case(128, lengths=(40, 1), interleaved=True, heads=(10, 5)),
    Case(64, 50, recipe="mixed(rotate=False)"),
    Case(64, 600, heads=(2, 1), recipe="mixed(k_mean=all)"),
    Case(128, 40, dtype=torch.float16),
    Case(64, 30, tables=torch.float32, interleaved=True),
    Case(128, 30, heads=(1, 1), tables=torch.float32, recipe="mixed(rotate=False)"),
]


@pytest.fixture
def emulated(monkeypatch):
    """Kernels of CUDA C++ on a CPU, where there is no GPU."""
    emulated_cuda.stand_in(monkeypatch, norm_rope_codes)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_codes_are_those_of_rotated_rows(case):
    q, k = case.draw(case.heads[0], 1), case.draw(case.heads[1], 2)
    call = case.call(q, k)
    found = launch_norm_rope_codes(call, q, k)
    *rows, q_rms, k_rms = case.composed(q, k, call.prologue)
    for a, e in ((found.q_inverse_rms, q_rms), (found.k_inverse_rms, k_rms)):
        assert (a is None) == (e is None)
        assert a is None or torch.allclose(in_four_rms(a), e, rtol=1e-6)
    if case.lengths:
        rows = [x[0].transpose(0, 1) for x in rows]
    sampled = call.recipe.k_mean == "sample"
    wanted = launch_quantize_k(rows[1], call.keys, None, SCALE_BLOCK, k_sampled=sampled, turned=call.turned)
    for name in ("k_scale", "k_mean", "largest_norm"):
        assert_close(getattr(found.k, name), getattr(wanted, name))
    assert found.k.tiles_taken.item() == 0
    # FP32 sums in another order: a tie may be rounded the other way
    assert_codes(found.k.k_int8, wanted.k_int8)
    q_rows = rows[0].double().cpu()
    codes, scale = quantize_tokens(rotated(q_rows) if call.turned else q_rows, "token", 64)
    assert_codes(found.q_int8.cpu(), codes)
    scale = scale[..., 0].T if case.lengths else scale[..., 0]
    assert_close(found.q_scale.cpu(), scale.float())
    if not case.lengths:
        blocks = call.keys.blocks(SCALE_BLOCK)
        lanes = found.k.lane_scale.view(*k.shape[:2], blocks, 1, 4, 1).expand(-1, -1, -1, SCALE_BLOCK // 8, 4, 2)
        assert torch.equal(lanes.flatten(2)[..., : case.tokens], found.k.k_scale)


@pytest.mark.usefixtures("emulated")
def test_what_is_not_finite_makes_nan_of_its_scale():
    case = Case(64, 140, heads=(1, 1), weighted=False, normed=False)
    q, k = case.draw(1, 1), case.draw(1, 2)
    q[0, 0, 4, 7] = k[1, 0, 133, 7] = torch.nan  # of few keys all make the mean
    found = launch_norm_rope_codes(case.call(q, k), q, k)
    assert found.q_scale.isnan().nonzero().tolist() == [[0, 0, 4]]
    assert found.k.k_scale.isnan().flatten(1).all(1).tolist() == [False, True]
    assert found.k.k_scale[0].isfinite().all()
    assert found.k.largest_norm.isnan().tolist() == [False, True]


@pytest.mark.usefixtures("emulated")
def test_a_weight_of_one_side_alone():
    case = Case(64, 20)
    q, k = case.draw(4, 1), case.draw(2, 2)
    call = case.call(q, k)
    one = torch.ones_like(call.prologue.k_weight)
    sides = [call.prologue._replace(k_weight=weight) for weight in (None, one)]
    absent, ones = (launch_norm_rope_codes(call._replace(prologue=x), q, k) for x in sides)
    assert torch.equal(absent.q_int8, ones.q_int8)
    assert torch.equal(absent.k.k_int8, ones.k.k_int8)


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_compiled_they_spill_nothing_of_their_loops(head_dim, tmp_path):
    case = Case(head_dim)
    made = norm_rope_codes.sources(head_dim, head_dim, case.dtype, case.prologue())
    for source in made:
        assert stack_bytes(source, 90, tmp_path) <= STACK_BYTES


def in_four_rms(x):
    return x if x.dim() == 3 else x[None]


def assert_close(found, wanted):
    """But for rows of which a number of 16 bits is the next one, where FP32 before it was rounded otherwise."""
    error = (found - wanted).abs() / wanted.abs().clamp_min(1e-1 * wanted.abs().max())
    assert error.max() <= 2**-8
    assert (error > 1e-5).double().mean() <= 2e-2


def assert_codes(found, wanted):
    difference = (found.double() - wanted.double()).abs()
    assert difference.max() <= 1
    assert difference.mean() <= 5e-3


class Kernel:
    """A function of tensors that is launched as kernels are."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        return self.function


NOTHING = Prologue(None, False, *(None,) * 6)


def family_forward(call, q, k, v):
    """Q's and K's rows are kept as codes of multiples of a step: none is read in backward."""
    o, lse = empty_like_rows(q), call.queries.per_token(v.device)
    codes = [torch.empty(x.shape, dtype=torch.int8, device=v.device) for x in (q, k)]
    scales = [x.per_token(v.device) for x in (call.queries, call.keys)]
    prologue = call.prologue or NOTHING
    norms = [x.per_token(v.device) if prologue.eps is not None else None for x in (call.queries, call.keys)]
    row_max = call.queries.per_token(v.device)
    mean = torch.empty(call.keys.batch, call.keys.heads, call.head_dim, device=v.device)
    written = (*codes, *scales, row_max, mean)

    def run(q, k, v, o, lse, tensors, norms, *written):
        y = [rows_of(x, prologue, side, tensors) for side, x in enumerate((q, k))]
        o.copy_(y[0] - 2 * y[1] + v)
        for x in (lse, *written, *(x for x in norms if x is not None)):
            x.fill_(1)

    program.launch(Kernel(run), (1,), q, k, v, o, lse, tuple(prologue[2:]), tuple(norms), *written)
    return Saved(o, lse, codes[0], scales[0], codes[1], scales[1], row_max, mean, *norms)


def family_backward(call, saved, do, dlse, q, k, v):
    dq, dk, dv = empty_gradients(call.head_dim, saved.o, v)
    out = dq, empty_like_rows(dk if k is None else k), dv
    prologue = call.prologue or NOTHING
    sums = [None if x is None else torch.empty(call.head_dim) for x in prologue[2:4]]
    eps, interleaved, *_ = prologue

    def run(do, q, k, norm, tensors, out, sums):
        if call.prologue is None:
            for x, factor in zip(out, (1, -2, 1)):
                x.copy_(factor * do)
            return
        assert norm is None or (norm == 1).all()
        norms = [None if x is None else (in_four(x).float().square().mean(-1) + eps).rsqrt() for x in (q, k)]
        given = *map(in_four, (do, -2 * do, q, k)), *norms, *tensors, None, None, interleaved, (do.dtype, do.dtype)
        dq, dk, *found = kernels.backward(*given)
        for x, gradient in zip(out, (dq, dk, do)):
            in_four(x).copy_(in_four(gradient))
        for x, gradient in zip(sums, found):
            if x is not None:
                x.copy_(gradient.sum(0))

    given = do, q, k, saved.q_inverse_rms, tuple(prologue[2:]), out, tuple(sums)
    program.launch(Kernel(run), (1,), *given)
    return out if call.prologue is None else (*out, *sums)


def rows_of(x, prologue, side, tensors):
    weight, cos, sin = tensors[side], *tensors[2 + 2 * side : 4 + 2 * side]
    y = norm_rope(in_four(x), weight, prologue.eps, cos, sin, INTERLEAVED if prologue.interleaved else HALF)
    return y if x.dim() == 4 else y[0].transpose(0, 1)


class Family:
    """A module of both directions."""

    forward, backward = staticmethod(family_forward), staticmethod(family_backward)


MIXED = dispatch.named(Recipe.named("mixed"), "hopper/hopper")


@pytest.fixture
def stand_in(monkeypatch):
    """Every call is `mixed`'s on Hopper, which the stand-in runs."""
    if DEVICE == "cuda":
        pytest.skip("stands in for a GPU")
    monkeypatch.setattr(auto_choice, "choose", lambda *_: MIXED)
    monkeypatch.setattr(dispatch, "module_of", lambda name: Family)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    PLANS.clear()


def test_without_nvrtc_no_pass_takes_the_prologue(monkeypatch):
    for missing in (None, "libnvrtc.so is not found"):
        monkeypatch.setattr(nvrtc, "unavailable", lambda missing=missing: missing)
        assert plan.takes_prologue(MIXED, 64) is (missing is None)


@pytest.mark.parametrize("lengths", [(), (5, 16)], ids=["dense", "packed"])
def test_a_plan_hands_the_prologue_to_both_directions(stand_in, lengths):
    """Of two calls by one plan each has its own tensors' results."""
    for seed in (10, 20):
        case = Case(lengths=lengths, heads=(2, 2))
        q, k, v = (case.draw(2, seed + n).requires_grad_() for n in range(3))
        p = case.prologue()
        weights = [x.detach().requires_grad_() for x in (p.q_weight * seed, p.k_weight)]
        ends = case.call(q, k).queries.cu_seqlens
        packed = {} if ends is None else {
            "cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 16, "max_seqlen_k": 16
        }  # fmt: skip
        o = qk_norm_rope_attention(
            q, k, v, q_weight=weights[0], k_weight=weights[1], eps=EPS, cos=p.q_cos[0], sin=p.q_sin[0], **packed
        )
        assert o.grad_fn.name() == "SageAttentionBackward"
        y = [rows_of(x, p, side, (*weights, *p[4:])) for side, x in enumerate((q, k))]
        wanted = y[0] - 2 * y[1] + v
        assert torch.equal(o, wanted)
        do = drawn(*o.shape, seed=3).bfloat16()
        pairs = zip(*(torch.autograd.grad(x, (q, k, v, *weights), do) for x in (o, wanted)))
        for a, e in pairs:
            assert a.dtype == e.dtype
            assert (a.double() - e.double()).norm() <= 2e-2 * e.double().norm()
    assert len(PLANS) == 1
    with torch.no_grad():
        o = qk_norm_rope_attention(q, k, v, eps=EPS, **packed)
        y = [rows_of(x, p, side, (None,) * 6) for side, x in enumerate((q, k))]
        assert torch.equal(o, y[0] - 2 * y[1] + v)


@pytest.mark.parametrize("first", [True, False])
def test_tables_that_hooks_move_lie_otherwise(stand_in, first):
    """Equal calls share a plan, whether a hook packed their cos and sin or not."""
    case = Case(heads=(2, 2))
    p = case.prologue()
    cos, sin = torch.cat(p[4:6], -1)[0].chunk(2, -1)  # halves of one table
    for moved in (first, not first):
        q, k, v = (case.draw(2, moved + n).requires_grad_() for n in range(3))
        pack = torch.clone if moved else torch.Tensor.detach  # a clone of rows that lie apart has them side by side
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            o = qk_norm_rope_attention(q, k, v, q_weight=p.q_weight, k_weight=p.k_weight, eps=EPS, cos=cos, sin=sin)
        y = [rows_of(x, p, side, p[2:]) for side, x in enumerate((q, k))]
        do = drawn(*o.shape, seed=3).bfloat16()
        for a, e in zip(*(torch.autograd.grad(x, (q, k, v), do) for x in (o, y[0] - 2 * y[1] + v))):
            assert (a.double() - e.double()).norm() <= 2e-2 * e.double().norm()
    assert len(PLANS) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_arguments_of_the_other_layout_are_refused_in_every_call(stand_in, packed):
    case = Case(lengths=(5, 16) if packed else (), heads=(2, 2))
    q, k, v = (case.draw(2, n) for n in range(3))
    ends, offsets = torch.tensor([0, 5, 21], dtype=torch.int32), {}
    if packed:
        offsets = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 16, "max_seqlen_k": 16}
        others = {"enable_gqa": False}, {"attn_mask": None}, {"dropout_p": 0.0}, {"block_mask": None}
    else:
        others = {"cu_seqlens_k": ends}, {"max_seqlen_q": 16}, {"max_seqlen_k": 16}
    qk_norm_rope_attention(q, k, v, eps=EPS, **offsets)
    for other in (*others, {"is_causal": None}):
        with pytest.raises(TypeError, match=next(iter(other))):
            qk_norm_rope_attention(q, k, v, eps=EPS, **offsets, **other)
    assert sum(x is not plan.COMPOSED for x in PLANS.values()) == 1


def test_tables_that_need_a_gradient_are_refused_beside_a_plan(stand_in):
    """Of the same call without gradients."""
    case = Case(heads=(2, 2))
    q, k, v = (case.draw(2, n) for n in range(3))
    p = case.prologue()
    for name in ("cos", "sin"):
        tables = {"cos": p.q_cos, "sin": p.q_sin}
        tables[name] = tables[name].detach().requires_grad_()
        for _ in range(2):
            with torch.no_grad():
                qk_norm_rope_attention(q, k, v, eps=EPS, **tables)
            with pytest.raises(NotImplementedError, match=f"{name}: its gradient is not computed"):
                qk_norm_rope_attention(q, k, v, eps=EPS, **tables)


@pytest.mark.parametrize("way", ["rows", "positions", "packed", "without gradients"])
def test_a_later_call_is_few_calls(stand_in, way, monkeypatch):
    """Of the package's functions, to the first launch and after it; a mask's, a check's or a choice's are none."""
    case = Case(lengths=(5, 16) if way == "packed" else (), heads=(2, 2))
    q, k, v = (case.draw(2, n).requires_grad_(way != "without gradients") for n in range(3))
    p = case.prologue()
    weights = {"q_weight": p.q_weight, "k_weight": p.k_weight, "cos": p.q_cos[0], "sin": p.q_sin[0]}
    ends = torch.tensor([0, 5, 21], dtype=torch.int32)
    more = {
        "packed": {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 16, "max_seqlen_k": 16},
        "positions": {"position_ids": torch.arange(21)},
    }
    monkeypatch.setattr(launchers.Interpreted, "start", lambda *_: None)  # the stand-in's own work
    call = partial(qk_norm_rope_attention, q, k, v, eps=EPS, is_causal=True, **weights, **more.get(way, {}))
    call()
    made = called(call)
    assert 10 < len(made) <= (20 if way == "packed" else 18), "\n".join(made)


def test_weights_alone_make_a_call_one_of_training(stand_in, monkeypatch):
    asked = []
    monkeypatch.setattr(auto_choice, "choose", lambda ask, *_: asked.append(ask.training) or MIXED)
    case = Case(heads=(2, 2))
    q, k, v = (case.draw(2, n) for n in range(3))
    p = case.prologue()
    tables = {"cos": p.q_cos, "sin": p.q_sin}
    weight = p.q_weight
    for trains in (False, True):
        weight.requires_grad_(trains)
        o = qk_norm_rope_attention(q, k, v, q_weight=weight, k_weight=p.k_weight, eps=EPS, **tables)
        assert o.requires_grad == trains
    assert asked == [False, True]
    (gradient,) = torch.autograd.grad(o.float().sum(), weight)
    assert gradient.shape == weight.shape
    assert gradient.isfinite().all()


@pytest.mark.skipif(DEVICE == "cuda", reason="stands in for a GPU")
@pytest.mark.parametrize(
    "given",
    [{"return_lse": True}, {"sinks": torch.zeros(2)}, {"attn_mask": torch.ones(21, 21, dtype=torch.bool)}],
    ids=["lse", "sinks", "mask"],
)
def test_other_calls_are_composed(monkeypatch, given):
    monkeypatch.setattr(plan, "takes_prologue", lambda *_: pytest.fail("may be planned"))
    q, k, v = (Case(heads=(2, 2)).draw(2, n) for n in range(3))
    qk_norm_rope_attention(q, k, v, eps=EPS, recipe="mixed", **given)


def compose(monkeypatch):
    """Have no family take a prologue."""
    monkeypatch.setattr(plan, "takes_prologue", lambda *_: False)
    PLANS.clear()


@pytest.mark.skipif(not HAS_HOPPER, reason="of Hopper's kernels")
@pytest.mark.parametrize(
    ("case", "given"),
    [
        (Case(128, 700, heads=(4, 2)), {"is_causal": True, "enable_gqa": True}),
        (Case(64, 300, heads=(3, 3)), {}),
        (Case(128, 513, heads=(2, 2), interleaved=True), {"window": (100, 0)}),
        (Case(128, lengths=(200, 1, 333)), {"is_causal": True}),
        (Case(64, lengths=(129, 64), normed=False), {}),
        (Case(64, 256, heads=(2, 2), turned=False), {"is_causal": True}),
    ],
    ids=str,
)
def test_fused_and_composed_are_equal(monkeypatch, case, given):
    """But for codes that a tie has the other way."""
    found = fused_and_gradients(case, given)
    compose(monkeypatch)
    for name, a, e in zip(("o", "dq", "dk", "dv", "dq_weight", "dk_weight"), found, fused_and_gradients(case, given)):
        assert (a.double() - e.double()).norm() <= 1e-2 * e.double().norm(), name


def fused_and_gradients(case, given):
    """Output and gradients."""
    q, k, v = (case.draw(case.heads[min(n, 1)], n).requires_grad_() for n in range(3))
    p = case.prologue()
    weights = [x.detach().requires_grad_() for x in p[2:4] if x is not None]
    if case.lengths:
        ends, longest = case.call(q, k).queries.cu_seqlens, max(case.lengths)
        given = given | {
            "cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest
        }  # fmt: skip
    tables = {} if p.q_cos is None else {"cos": p.q_cos[0], "sin": p.q_sin[0]}
    rope = INTERLEAVED if case.interleaved else HALF
    o = qk_norm_rope_attention(
        q,
        k,
        v,
        **dict(zip(("q_weight", "k_weight"), weights)),
        eps=p.eps,
        rope=rope,
        recipe="mixed",
        **tables,
        **given,
    )
    do = drawn(*o.shape, seed=3).bfloat16().to(DEVICE)
    return o, *torch.autograd.grad(o, (q, k, v, *weights), do)
