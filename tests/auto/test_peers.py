"""FlashAttention-4 and -3 by stand-ins: when "auto" chooses them, what they are given, and what becomes of faults."""

from __future__ import annotations

import importlib.machinery
import sys
import threading
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import sagebwd
from sagebwd import arguments, counts, sage_attention, sage_attention_varlen
from sagebwd.auto import choice as auto_choice
from sagebwd.auto import model, peers, torch_attention
from sagebwd.auto.contenders import FA3, FA4, TORCH
from sagebwd.auto.model import TRAINING, Size
from sagebwd.cache import PLANS
from sagebwd.masks.kinds import CAUSAL, FULL, MASK, PACKED, PADDING, WINDOW
from sagebwd.reference.metrics import relative_l2
from tests.auto.calls import ASK, FASTER, SLOWER, times

MODULES = {FA4: ("flash_attn", "flash_attn.cute"), FA3: ("flash_attn_interface",)}
# Of torch in `times` the pairs of a causal call take 2 ps each.
BETTER, BEST, WORSE = (0, 0, 0.5, 1.5), (0, 0, 0.1, 0.1), (0, 0, 2, 3)


class Flash(torch.autograd.Function):
    """A peer's function by torch's, on (batch, tokens, heads, head_dim)."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        ctx.settings = {"is_causal": causal, "scale": scale, "enable_gqa": True}
        ctx.save_for_backward(q, k, v)
        with torch.no_grad():
            return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **ctx.settings).transpose(
                1, 2
            )

    @staticmethod
    def backward(ctx, do):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), **ctx.settings)
            return *torch.autograd.grad(out, leaves, do.detach().transpose(1, 2)), None, None


@pytest.fixture
def install(monkeypatch):
    """Put a stand-in of a peer into sys.modules; what it was called with is what it returns.

    fails: an error of all calls, or a list with one, or None, for each of the first.
    """
    peers.module_of.cache_clear()
    PLANS.clear()
    counts.counts.clear()

    def install(peer, fails=None, backward=True):
        calls = []

        def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=None):
            calls.append({"shape": tuple(q.shape), "causal": causal, "window": window_size, "scale": softmax_scale})
            error = (fails.pop(0) if fails else None) if isinstance(fails, list) else fails
            if error is not None:
                raise error
            out = Flash.apply(q, k, v, causal, softmax_scale)
            return (out, None) if peer == FA4 else out

        def flash_attn_varlen_func(q, k, v, **options):
            calls.append(options)
            return q.clone()

        for name in MODULES[peer]:
            module = types.ModuleType(name)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
        module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
        if peer == FA3:
            config = types.ModuleType("flash_attn_config")
            config.CONFIG = {"build_flags": {"FLASHATTENTION_DISABLE_BACKWARD": not backward}}
            monkeypatch.setitem(sys.modules, "flash_attn_config", config)
        peers.module_of.cache_clear()
        return calls

    yield install
    peers.module_of.cache_clear()
    PLANS.clear()


@pytest.fixture
def on_cpu(monkeypatch):
    """Tensors of a CPU are asked of as if they were a GPU's."""
    contender_of = auto_choice.contender_of

    def asked(ask, *rest):
        return contender_of(ask._replace(device=ASK.device), *rest)

    monkeypatch.setattr(auto_choice, "contender_of", asked)


def runs(ask=ASK, of=None, planned=True):
    auto_choice.times_of.cache_clear()
    return auto_choice.choose(ask, of or Size(2048, 2048, 16, 16), None, planned).contender


def draw(tokens=30, keys=None, dim=128, heads=4, kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, tokens), (kv_heads, keys or tokens), (kv_heads, keys or tokens)
    return [torch.randn(2, *shape, dim, generator=generator).bfloat16().requires_grad_() for shape in shapes]


def test_the_fastest_that_is_installed_runs(measured, install, monkeypatch):
    measured += [times(FASTER, **{FA4: BETTER, FA3: BEST})]
    assert runs() is None, "neither is installed"
    install(FA4)
    assert runs() is None, "low precision is faster"
    install(FA3)
    assert runs() == FA3
    monkeypatch.setattr(model, "of_this_project", lambda: {"a card": tuple(measured)})
    answer = auto_choice.choose(ASK, Size(2048, 2048, 16, 16), "a card")
    assert answer.contender is None, "what is installed here says nothing of a card that is elsewhere"
    measured[:] = [times(SLOWER, **{FA4: BETTER, FA3: WORSE})]
    assert runs() == FA4
    measured[:] = [times(SLOWER, **{FA4: WORSE, FA3: WORSE})]
    assert runs() == TORCH
    measured[:] = [times(SLOWER)]
    assert runs() == TORCH, "who was not timed is not chosen"


def test_backends_of_torch_are_held_apart(measured):
    measured += [times(SLOWER, cudnn=(0, 0, 0.1, 1), flash=(0, 0, 1, 0.5))]
    assert runs(of=Size(256, 256, 16, 16)) == "cudnn"
    assert runs(of=Size(1 << 15, 1 << 15, 16, 16)) == "flash"
    assert runs(of=Size(1 << 15, 1 << 15, 16, 16), planned=False) == TORCH, "torch picks where there is no plan"


def test_peers_run_what_is_theirs(measured, install):
    install(FA4), install(FA3)
    best = {FA4: BETTER, FA3: BEST}
    for kind in (FULL, CAUSAL, WINDOW, PACKED, PADDING, MASK):
        measured.append(times(SLOWER, kind=kind, **best))
        assert runs(ASK._replace(kind=kind)) == (TORCH if kind in (PADDING, MASK) else FA3)
    assert runs(of=Size(128, 64, 16, 16)) == TORCH, "aligned bottom right, where ours is top left"
    assert runs(of=Size(64, 128, 16, 16)) == FA3
    assert runs(ASK._replace(kind=WINDOW), Size(64, 128, 16, 16)) == TORCH
    found = [runs(of=Size(64, 64, heads, 1)) for heads in (65535, 65536)]
    assert found == [FA3, TORCH], "more programs than a grid has beside its first dimension"
    assert runs(ASK._replace(head_dim=120, value_dim=120)) == TORCH, "of a width that was not timed"
    assert runs(planned=False) == TORCH


@pytest.mark.parametrize("dim", [72, 80, 112])
def test_gradients_that_are_known_to_be_wrong_are_not_asked_for(dim, measured, install):
    install(FA4)
    for direction in (TRAINING, "forward"):
        measured.append(times(SLOWER, (dim, dim), direction, **{FA4: BEST}))
    ask = ASK._replace(head_dim=dim, value_dim=dim)
    assert runs(ask) == FA4
    assert runs(ask._replace(training=True)) == TORCH


def test_a_build_without_its_backward_does_not_train(measured, install, on_cpu, monkeypatch):
    """Regression: of `tokenspeed-fa3`, built so, a gradient raised."""
    install(FA3, backward=False)
    measured += [times(SLOWER, direction=way, **{FA3: BEST}) for way in ("forward", TRAINING)]
    assert runs() == FA3
    assert runs(ASK._replace(training=True)) == TORCH
    assert auto_choice.facts_of(ASK.device)["peers"] == "fa3 without backward"
    tensors = draw()
    sage_attention(*tensors, is_causal=True, enable_gqa=True).sum().backward()
    assert counts.counts == {"full precision on torch": 1}
    monkeypatch.setattr(arguments, "ask_of", lambda *_: ASK)
    q = torch.empty(2, 8, 4096, 128, requires_grad=True)
    auto_choice.times_of.cache_clear()
    assert sagebwd.explain(q, q, q, is_causal=True).why.endswith("; FlashAttention-3 was built without its backward")
    install(FA3)
    assert runs(ASK._replace(training=True)) == FA3


def test_a_build_that_does_not_say_counts_as_without(install, monkeypatch):
    install(FA3)
    assert not peers.lacks_backward(FA3)
    monkeypatch.delattr(sys.modules["flash_attn_config"], "CONFIG")
    assert peers.lacks_backward(FA3)
    assert not peers.lacks_backward(FA4)


CALLS = {
    "full": (FULL, {}, {"causal": False, "window": (-1, -1)}),
    "causal": (CAUSAL, {"is_causal": True}, {"causal": True, "window": (-1, -1)}),
    "causal, more keys": (CAUSAL, {"is_causal": True}, {"causal": True, "window": (-1, -1)}),
    "scale": (FULL, {"scale": 0.3}, {"causal": False, "window": (-1, -1), "scale": 0.3}),
}


@pytest.mark.parametrize("peer", [FA4, FA3])
@pytest.mark.parametrize("name", CALLS)
def test_a_peer_computes_the_same_call(name, peer, measured, install, on_cpu):
    """Forward and backward, in the first call and in later ones; `explain` and `summary` say so."""
    kind, options, expected = CALLS[name]
    calls = install(peer)
    measured += [times(SLOWER, kind=kind, direction=way, **{peer: BEST}) for way in ("forward", TRAINING)]
    tensors = draw(30, 44 if "more keys" in name else None)
    exact = F.scaled_dot_product_attention(*tensors, enable_gqa=True, **options)
    for _ in range(2):
        out = sage_attention(*tensors, enable_gqa=True, **options)
        assert relative_l2(out, exact) < 0.02
        for found, wanted in zip(
            *(torch.autograd.grad(x.float().sin().sum(), tensors, retain_graph=True) for x in (out, exact))
        ):
            assert relative_l2(found, wanted) < 0.02
    assert counts.counts == {f"full precision on FlashAttention-{4 if peer == FA4 else 3}": 2}
    assert len(calls) == 2
    unlimited = None if peer == FA4 else -1
    window = tuple(unlimited if side < 0 else side for side in expected["window"])
    assert calls[0] == {"shape": (2, 30, 4, 128), "scale": 128**-0.5} | expected | {"window": window}


def test_a_peer_has_one_plan_of_a_kind_and_no_tensor_whose_memory_is_not_its_numbers(measured, install, on_cpu):
    """Peers read memory: a sign that torch keeps beside it is torch's to know."""
    calls = install(FA4)
    measured += [times(SLOWER, **{FA4: BEST})]
    q, k, v = (x.detach() for x in draw())
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    laid_out = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for tensors in ((q, k, v), laid_out):
        assert relative_l2(sage_attention(*tensors, is_causal=True, enable_gqa=True), exact) < 0.02
    assert len(calls) == 2
    assert len(PLANS) == 1
    assert torch.equal(sage_attention(torch._neg_view(-q), k, v, is_causal=True, enable_gqa=True), exact)
    assert len(calls) == 2


def test_windows_and_packed_sequences_are_handed_on(measured, install, on_cpu, monkeypatch):
    calls = install(FA4)
    measured += [times(SLOWER, kind=kind, **{FA4: BEST}) for kind in (WINDOW, PACKED)]
    q, k, v = (x.detach() for x in draw())
    sage_attention(q, k, v, enable_gqa=True, window=(5, 3))
    sage_attention(q, k, v, enable_gqa=True, window=(5, 3), is_causal=True)
    assert [(call["causal"], call["window"]) for call in calls] == [(False, (5, 3)), (True, (5, 0))]
    packed, offsets = torch.randn(20, 4, 128).bfloat16(), torch.tensor([0, 8, 20], dtype=torch.int32)
    way, kv = torch_attention.Way(PACKED, is_causal=True, longest=(12, 12)), packed[:, :2]
    run = torch_attention.settled(FA4, way, packed, kv, kv, None, 0.3, None)
    assert torch.equal(run(packed, kv, kv, None, offsets, offsets), packed)
    assert calls[-1].pop("cu_seqlens_q") is calls[-1].pop("cu_seqlens_k")
    assert calls[-1] == {
        "softmax_scale": 0.3, "causal": True, "window_size": (None, None), "max_seqlen_q": 12, "max_seqlen_k": 12,
    }  # fmt: skip


def test_a_packed_call_that_is_handed_over_has_a_plan(monkeypatch):
    """Regression: each one asked all again."""
    asked = []
    monkeypatch.setattr(auto_choice, "contender_of", lambda *given: asked.append(given) or TORCH)
    monkeypatch.setattr(torch_attention, "_packed", lambda *_: lambda query, *rest: query)
    x, offsets = torch.randn(20, 2, 16), torch.tensor([0, 8, 20], dtype=torch.int32)
    PLANS.clear()
    for _ in range(3):
        assert torch.equal(sage_attention_varlen(x, x, x, offsets, offsets, 12, 12), x)
    assert len(asked) == 1
    PLANS.clear()


def refusal_beside_another():
    """Raised "from None" where a file, such as one of a cache, was not there: that is no cause of it."""
    refused = AssertionError("head_dim")
    refused.__context__, refused.__suppress_context__ = FileNotFoundError("cache"), True
    return refused


@pytest.mark.parametrize("refused", [AssertionError("head_dim"), refusal_beside_another()], ids=["alone", "from None"])
def test_a_peer_that_refuses_leaves_the_call_to_torch(refused, measured, install, on_cpu):
    calls = install(FA4, refused)
    measured += [times(SLOWER, **{FA4: BEST})]
    q, k, v = (x.detach() for x in draw())
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    with pytest.warns(UserWarning, match=r"FlashAttention-4 does not take .* others run .*: AssertionError: head_dim"):
        out = sage_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(out, exact)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(sage_attention(q, k, v, is_causal=True, enable_gqa=True), exact)
    assert len(calls) == 1
    other = [x[:, :, :20] for x in (q, k, v)]
    with pytest.warns(UserWarning, match="does not take"):  # of another specification it is asked
        sage_attention(*other, is_causal=True, enable_gqa=True)
    assert len(calls) == 2
    assert sagebwd.summary().endswith("outside of torch.compile: 3 full precision on torch")


def wrapped():
    try:
        raise OSError("no space left on device")
    except OSError as error:
        failed = ValueError("does not compile")
        failed.__cause__ = error
        return failed


DSLCudaRuntimeError = type("DSLCudaRuntimeError", (Exception,), {})
OF_THE_MACHINE = [
    torch.AcceleratorError("an illegal memory access"), RuntimeError("CUDA error: no kernel image is available"),
    RuntimeError("CUDA out of memory. Tried to allocate"), OSError("no space left on device"), MemoryError(),
    DSLCudaRuntimeError("cudaErrorMemoryAllocation"), wrapped(),
]  # fmt: skip


@pytest.mark.parametrize("error", OF_THE_MACHINE, ids=lambda error: type(error).__name__)
def test_an_error_of_the_machine_is_forgotten_with_its_call(error, measured, install, on_cpu):
    """Regression: the peer was asked no more. Each call's values are its own, whoever ran the one before."""
    fails = [None, error, None, error, None]
    calls = install(FA4, fails)
    measured += [times(SLOWER, direction=way, **{FA4: BEST}) for way in ("forward", TRAINING)]
    tensors = draw()
    for i, fault in enumerate(fails.copy()):
        with torch.no_grad():
            for x in tensors:
                x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(i)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = sage_attention(*tensors, is_causal=True, enable_gqa=True)
        said = [str(x.message) for x in caught if "the next one asks it again" in str(x.message)]
        assert len(said) == (fault is not None)
        exact = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
        for found, wanted in zip(*(torch.autograd.grad(x.float().sin().sum(), tensors) for x in (out, exact))):
            assert relative_l2(found, wanted) < 0.02
        assert len(calls) == i + 1
    assert counts.counts == {"full precision on FlashAttention-4": 3, "full precision on torch": 2}


def test_too_little_memory_is_raised_and_forgotten(measured, install, on_cpu):
    """As torch's own attention would: who catches it makes room and calls again."""
    calls = install(FA4, [torch.OutOfMemoryError("full"), None])
    measured += [times(SLOWER, **{FA4: BEST})]
    q, k, v = (x.detach() for x in draw())
    with pytest.raises(torch.OutOfMemoryError):
        sage_attention(q, k, v, is_causal=True, enable_gqa=True)
    sage_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert len(calls) == 2


def test_checkpointing_ends_its_recomputation_within_a_peer(measured, install, on_cpu):
    """Regression: the exception by which it does was taken for a refusal, and remembered."""
    calls = install(FA4)
    measured += [times(SLOWER, direction=TRAINING, **{FA4: BEST})]
    tensors = draw()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        out = checkpoint(lambda *x: sage_attention(*x, is_causal=True, enable_gqa=True), *tensors, use_reentrant=False)
        found = torch.autograd.grad(out.float().sin().sum(), tensors)
    exact = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    for x, wanted in zip(found, torch.autograd.grad(exact.float().sin().sum(), tensors)):
        assert relative_l2(x, wanted) < 0.02
    assert len(calls) == 2
    sage_attention(*tensors, is_causal=True, enable_gqa=True)
    assert len(calls) == 3


def test_second_derivatives_raise(measured, install, on_cpu):
    install(FA4)
    measured += [times(SLOWER, direction=TRAINING, **{FA4: BEST})]
    q, k, v = draw()
    weight = torch.ones((), requires_grad=True)  # of what is behind
    out = sage_attention(q, k, v, is_causal=True, enable_gqa=True)
    (gradient,) = torch.autograd.grad((out * weight).sum(), q, create_graph=True)
    for x in (q, v, weight):
        with pytest.raises(NotImplementedError, match="second derivatives"):
            torch.autograd.grad(gradient.sum(), x, retain_graph=True)


def test_no_peer_runs_where_gradients_are_to_repeat_or_without_a_plan(measured, install, on_cpu):
    calls = install(FA4)
    measured += [times(SLOWER, direction=way, **{FA4: BEST}) for way in ("forward", TRAINING)]
    tensors = draw()
    torch._dynamo.reset()

    def attend(*tensors):
        return sage_attention(*tensors, is_causal=True, enable_gqa=True)

    torch.compile(attend, fullgraph=True, backend="aot_eager")(*tensors)
    torch.use_deterministic_algorithms(True)
    try:
        attend(*tensors)
        assert arguments.choice_of(sage_attention, *tensors, is_causal=True, enable_gqa=True)[0].contender == TORCH
    finally:
        torch.use_deterministic_algorithms(False)
    assert not calls
    attend(*tensors)
    assert len(calls) == 1


def test_explain_names_who_runs_and_why_others_do_not(measured, install, on_cpu, monkeypatch):
    monkeypatch.setattr(arguments, "ask_of", lambda *_: ASK)
    install(FA4)
    measured += [times(SLOWER, **{FA4: BETTER, FA3: BEST})]
    q = torch.empty(2, 8, 4096, 128)
    auto_choice.times_of.cache_clear()
    found = sagebwd.explain(q, q, q, is_causal=True)
    assert found[:3] == ("full", FA4, FA4)
    assert "mixed takes about 0.824 ms, torch 0.412, FlashAttention-4 0.273, FlashAttention-3 0.0269" in found.why
    assert "forward, by FlashAttention-4: " in found.why
    assert found.why.endswith("; FlashAttention-3 is not installed")
    measured[:] = [times(FASTER)]
    auto_choice.times_of.cache_clear()
    assert sagebwd.explain(q, q, q, is_causal=True).why.endswith("; FlashAttention-4 was not timed")


def test_a_peer_that_does_not_import_is_absent_with_one_warning(monkeypatch, tmp_path, measured):
    (tmp_path / "flash_attn_interface.py").write_text("raise OSError('libcudart')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn_interface")  # where the conftest hides it
    peers.module_of.cache_clear()
    with pytest.warns(UserWarning, match=r"FlashAttention-3 is installed and does not import.*: OSError: libcudart"):
        assert peers.installed() == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peers.installed() == ()
    assert auto_choice.facts_of(ASK.device)["peers"] == "none"
    peers.module_of.cache_clear()


def test_what_is_absent_is_not_imported(monkeypatch, tmp_path, install):
    """Nor is another package's ``flash_attn``, which has no ``cute``; ours in its place is no peer."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise OSError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn.cute")  # where the conftest hides it
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peers.module_of(FA4) is None
    stand_in = types.ModuleType("flash_attn")
    stand_in.__path__, stand_in.__spec__ = [], importlib.machinery.ModuleSpec("flash_attn", None, is_package=True)
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    peers.module_of.cache_clear()
    assert peers.module_of(FA4) is None


def test_a_refusal_counts_for_the_strides_that_were_refused(measured, install, on_cpu):
    """Regression: one call that lay oddly turned the peer off for all of its shapes."""
    calls = install(FA4, [ValueError("these strides")])
    measured += [times(SLOWER, **{FA4: BEST})]
    tensors = [x.detach() for x in draw()]
    laid_out = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    with pytest.warns(UserWarning, match="these strides"):
        exact = sage_attention(*laid_out, is_causal=True, enable_gqa=True)
    calls.clear()
    for given, ran in ((laid_out, 0), (tensors, 1), (laid_out, 1)):
        assert relative_l2(sage_attention(*given, is_causal=True, enable_gqa=True), exact) < 0.02
        assert len(calls) == ran


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("refuses", [False, True])
def test_a_peer_gets_a_scale_over_0(scale, refuses, measured, install, on_cpu):
    """Regression: NaN. Who runs what it refuses gets the call as it was."""
    calls = install(FA4, ValueError("no") if refuses else None)
    measured += [times(SLOWER, direction=TRAINING, **{FA4: BEST})]
    tensors = draw()
    exact = sage_attention(*tensors, is_causal=True, enable_gqa=True, scale=scale, recipe="full")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = sage_attention(*tensors, is_causal=True, enable_gqa=True, scale=scale)
    assert calls[0]["scale"] > 0
    found, wanted = (torch.autograd.grad(x.float().sin().sum(), tensors) for x in (out, exact))
    for one, other in zip((out, *found), (exact, *wanted)):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_torchs_order_of_backends_is_as_it_was(monkeypatch):
    """And is left alone where the backend comes first."""
    before, seen = torch._C._get_sdp_priority_order(), []
    first, second = before[:2]

    def run(x):
        seen.append(torch._C._get_sdp_priority_order())
        if x is None:
            raise RuntimeError("no")
        return x

    assert torch_attention.preferring(second, run, 3) == 3
    with pytest.raises(RuntimeError, match="no"):
        torch_attention.preferring(second, run, None)
    assert torch_attention.preferring(first, run, 3) == 3
    assert [order[0] for order in seen] == [second, second, first]
    assert sorted(seen[0]) == sorted(before)
    assert torch._C._get_sdp_priority_order() == before
    tensors = [x.detach() for x in draw()]
    way = torch_attention.Way(CAUSAL, 0.0, True)
    run = torch_attention.settled("cudnn", way, *tensors, None, 0.1, None)
    exact = F.scaled_dot_product_attention(*tensors, is_causal=True, scale=0.1, enable_gqa=True)
    assert torch.equal(run(*tensors, None), exact), "a CPU has no cuDNN"


def test_a_call_keeps_the_order_of_backends_that_it_found(monkeypatch):
    """Regression: where another thread had put its backend first, a call ran while that was taken back."""
    order, entered = torch._C._get_sdp_priority_order(), threading.Event()

    def meanwhile():
        thread = threading.Thread(target=torch_attention.preferring, args=(order[1], entered.set))
        thread.start()
        return thread, entered.wait(0.1)

    thread, has_run = torch_attention.preferring(order[1], meanwhile)
    thread.join()
    assert not has_run
    assert entered.is_set()


@pytest.mark.parametrize(("tokens", "ran"), [(64, "full on reference"), (62, "full precision on torch")])
def test_a_window_that_a_peer_refuses_is_not_torchs_where_cudnn_gets_gradients_wrong(
    tokens, ran, measured, install, on_cpu
):
    """Torch would run it by cuDNN, whose dQ may be NaN under that mask (torch's issue 196678)."""
    install(FA4, ValueError("a window"))
    measured += [times(SLOWER, kind=WINDOW, direction=TRAINING, **{FA4: BEST})]
    q, k, v = draw(tokens)
    with pytest.warns(UserWarning, match="a window"):
        out = sage_attention(q, k, v, enable_gqa=True, window=(5, 0))
    assert {name for name, count in counts.counts.items() if count} == {ran}
    exact = sage_attention(q, k, v, enable_gqa=True, window=(5, 0), recipe="full")
    assert relative_l2(out, exact) < 0.02


def test_what_torch_has_no_mask_for_may_be_a_peers(measured, install, on_cpu, monkeypatch):
    """Windows of many tokens, of which torch would need a mask of elements, and widths that `varlen_attn` lacks."""
    calls = install(FA4)
    monkeypatch.setattr(torch_attention, "MOST_ELEMENTS", 899)
    measured += [times(SLOWER, kind=WINDOW, **{FA4: BEST})]
    q, k, v = (x.detach() for x in draw())
    sage_attention(q, k, v, enable_gqa=True, window=(5, 0))
    assert len(calls) == 1
    PLANS.clear()
    install(FA4, ValueError("a window"))
    with pytest.warns(UserWarning, match="a window"):
        out = sage_attention(q, k, v, enable_gqa=True, window=(5, 0))
    assert counts.counts["full on reference"] == 1
    assert torch.equal(out, sage_attention(q, k, v, enable_gqa=True, window=(5, 0), recipe="full"))
    of = Size(2048, 2048, 16, 16, by_torch=False)
    measured[:] = [times(SLOWER, kind=kind, full=None, **{FA4: BEST}) for kind in (WINDOW, PACKED)]
    for kind in (WINDOW, PACKED):
        assert runs(ASK._replace(kind=kind), of) == FA4
        assert runs(ASK._replace(kind=kind), of, planned=False) is None
    measured[:] = [times(SLOWER, kind=WINDOW)]
    assert runs(ASK._replace(kind=WINDOW), of) is None
    assert measured[0].ms(of)[1] == {}
