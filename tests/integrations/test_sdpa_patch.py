"""replace_sdpa: what the patch takes and gives back, and SDPA's own samples through it."""

import collections
import copy
import itertools
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F

from sagebwd import install_sdpa, replace_sdpa, uninstall_sdpa
from sagebwd.integrations import sdpa as sdpa_integration
from tests.integrations.test_sdpa import ORIGINAL, in_int8, is_original_or_int8, qkv
from tests.threads import at_once


@pytest.fixture(autouse=True)
def left_as_found(monkeypatch):
    monkeypatch.setattr(sdpa_integration, "_is_traced", False)
    yield
    uninstall_sdpa()
    assert F.scaled_dot_product_attention is ORIGINAL


def test_the_innermost_decides_alone_and_the_outer_returns():
    arguments = qkv()
    with replace_sdpa(impl="reference") as outer:
        with replace_sdpa(impl="reference", min_tokens=1000) as inner:
            assert torch.equal(F.scaled_dot_product_attention(*arguments), ORIGINAL(*arguments))
        assert torch.equal(F.scaled_dot_product_attention(*arguments), in_int8(*arguments))
    assert inner.counts == {"replaced": 0, "kept": {"fewer keys than min_tokens": 1}}
    assert outer.counts == {"replaced": 1, "kept": {}}


def test_leaving_in_any_order_restores_the_original():
    for order in itertools.permutations(range(3)):
        replacements = [replace_sdpa(impl="reference") for _ in range(3)]
        for replacement in replacements:
            replacement.__enter__()
        left = set()
        for index in order:
            replacements[index].__exit__(None, None, None)
            left.add(index)
            inside = [replacements[i]._function for i in range(3) if i not in left]
            assert F.scaled_dot_product_attention is (inside[-1] if inside else ORIGINAL)


def test_a_patch_by_others_stays_and_reaches_the_original(monkeypatch):
    arguments = qkv()
    sdpa = replace_sdpa(impl="reference")
    with monkeypatch.context() as patch:
        with sdpa:
            ours = F.scaled_dot_product_attention
            patch.setattr(F, "scaled_dot_product_attention", lambda *x, **y: ours(*x, **y))
            assert torch.equal(F.scaled_dot_product_attention(*arguments), in_int8(*arguments))
        assert torch.equal(F.scaled_dot_product_attention(*arguments), ORIGINAL(*arguments))
    assert F.scaled_dot_product_attention is ours  # what the other patch put back
    F.scaled_dot_product_attention = ORIGINAL
    assert sdpa.counts == {"replaced": 1, "kept": {"after the context was left": 1}}


def test_one_object_is_entered_once():
    with replace_sdpa(impl="reference") as sdpa:
        with pytest.raises(ValueError, match="in use"), sdpa:
            pass
        assert F.scaled_dot_product_attention is not ORIGINAL
    with sdpa:  # and again afterwards
        F.scaled_dot_product_attention(*qkv())
    assert sdpa.counts["replaced"] == 1
    with pytest.raises(ValueError, match="this object is not in use"):
        sdpa.__exit__(None, None, None)


def test_counts_hold_across_threads():
    x = torch.zeros(1, 1, 2, 8)
    with replace_sdpa(impl="reference", min_tokens=1000) as sdpa:

        def calls(_):
            for _ in range(200):
                F.scaled_dot_product_attention(x, x, x)

        at_once(calls, range(8))
    assert sdpa.counts == {"replaced": 0, "kept": {"fewer keys than min_tokens": 1600}}


def test_threads_that_enter_and_leave_restore_the_original():
    def enter_and_leave(_):
        for _ in range(200):
            with replace_sdpa(impl="reference"):
                pass

    at_once(enter_and_leave, range(8))
    assert F.scaled_dot_product_attention is ORIGINAL


def test_install_and_uninstall():
    arguments = qkv()
    first = install_sdpa(impl="reference")
    second = install_sdpa("paper", impl="reference")
    assert torch.equal(F.scaled_dot_product_attention(*arguments), in_int8(*arguments, recipe="paper"))
    assert (first.counts["replaced"], second.counts["replaced"]) == (0, 1)
    uninstall_sdpa()
    assert F.scaled_dot_product_attention is ORIGINAL
    uninstall_sdpa()  # nothing left to take back
    install_sdpa("token").__exit__(None, None, None)
    assert F.scaled_dot_product_attention is ORIGINAL
    install_sdpa("full", impl="reference")  # after what was left by hand
    assert torch.equal(F.scaled_dot_product_attention(*arguments), in_int8(*arguments, recipe="full"))
    uninstall_sdpa()
    assert F.scaled_dot_product_attention is ORIGINAL


def test_a_decorated_function_runs_inside():
    arguments, sdpa = qkv(), replace_sdpa("token", impl="reference")

    @sdpa
    def attend(calls):
        """What functools.wraps keeps."""
        inner = attend(calls - 1) if calls else in_int8(*arguments)
        assert torch.equal(inner, in_int8(*arguments))
        return F.scaled_dot_product_attention(*arguments)

    assert attend.__doc__ == "What functools.wraps keeps."
    for calls in (2, 0):  # of which the first makes two inside itself
        attend(calls)
        assert F.scaled_dot_product_attention is ORIGINAL
    assert sdpa.counts == {"replaced": 4, "kept": {}}
    with sdpa:  # in use: a call has another object, which counts in the same place
        attend(0)
        assert F.scaled_dot_product_attention is sdpa._function
    assert sdpa.counts == {"replaced": 5, "kept": {}}
    at_once(attend, range(4))
    assert sdpa.counts == {"replaced": 15, "kept": {}}

    @replace_sdpa("token", impl="reference")
    def fails():
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert F.scaled_dot_product_attention is ORIGINAL
    with pytest.warns(UserWarning, match="replaced nothing") as warned:
        replace_sdpa("token")(lambda: None)()
    assert warned[0].filename == __file__


def test_what_would_run_after_a_call_is_not_decorated():
    def later():
        yield

    async def at_some_time():
        pass

    for given in (later, at_some_time, torch.nn.Linear, "text"):
        with pytest.raises(TypeError, match="cannot be decorated; accepted: functions that run when they are called"):
            replace_sdpa("token")(given)
    with pytest.raises(TypeError, match=r"got the function test_.*; to decorate it write @replace_sdpa\(\)"):
        replace_sdpa(test_what_would_run_after_a_call_is_not_decorated)


def test_what_process_pools_pickle():
    """The function is found by its name there, as torch's; a replacement is not in use there."""
    with replace_sdpa("token(smooth_v=False)", impl="reference", min_tokens=3, unsupported="raise") as sdpa:
        function = F.scaled_dot_product_attention
        assert pickle.loads(pickle.dumps(function)) is function
        sent = pickle.dumps((sdpa, function))
        function(*qkv())
    there, found = pickle.loads(sent)
    assert found is ORIGINAL
    for other in (there, copy.deepcopy(sdpa)):
        assert repr(other) == repr(replace_sdpa("token(smooth_v=False)", "reference", 3, "raise"))
        with other:
            F.scaled_dot_product_attention(*qkv())
        assert other.counts == sdpa.counts == {"replaced": 1, "kept": {}}


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"recipe": "nothing"}, ValueError, "nothing"),
        ({"impl": "cuda"}, ValueError, "impl='cuda'.*reference"),
        ({"min_tokens": -1}, ValueError, "min_tokens=-1"),
        ({"min_tokens": 1.5}, TypeError, "min_tokens=1.5"),
        ({"impl": ["triton"]}, ValueError, "impl=\\['triton'\\] is not known"),
        ({"unsupported": "sdpa"}, ValueError, "unsupported='sdpa' is not known; accepted: 'original', 'raise'"),
    ],
)
def test_wrong_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        replace_sdpa(**arguments)
    with pytest.raises(error, match=match):
        install_sdpa(**arguments)


def test_an_integer_of_numpy_is_one():
    """Regression: as min_tokens it was refused."""
    assert replace_sdpa(min_tokens=pytest.importorskip("numpy").int64(4)).min_tokens == 4


def test_compile_follows_the_context():
    """One compiled function, before, inside and after: traced through without a break, and traced again on change."""
    arguments = qkv()

    def attend(q, k, v):
        return F.scaled_dot_product_attention(2 * q, k, v, is_causal=True) + 1

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    exact = attend(*arguments)
    assert torch.equal(compiled(*arguments), exact)
    with replace_sdpa(impl="reference") as sdpa:
        leaves = [x.requires_grad_() for x in qkv()]
        out = compiled(*leaves)
        assert sdpa.counts == {"replaced": 0, "kept": {}}  # compiled calls are not counted
        assert torch.equal(out, attend(*leaves))
        for a, e in zip(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(attend(*leaves).sum(), leaves)):
            assert torch.equal(a, e)
        assert not torch.equal(out, exact)
    with replace_sdpa("paper", impl="reference"):
        assert torch.equal(compiled(*arguments), attend(*arguments))
        assert not torch.equal(compiled(*arguments), out)
    assert torch.equal(compiled(*arguments), exact)


def op_samples(dtype):
    pytest.importorskip("expecttest", reason="torch.testing's OpInfo needs it")
    from torch.testing._internal.common_methods_invocations import op_db

    (op,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=True))
    assert len(samples) >= 20
    return [((sample.input, *sample.args), sample.kwargs) for sample in samples]


def listed(seen):
    """Counts for the summary that pytest prints."""
    return f"{seen.total()} samples: " + "; ".join(f"{count} {what}" for what, count in seen.most_common())


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opinfo_samples_through_the_patch(dtype, record_property):
    seen = collections.Counter(is_original_or_int8(*sample) for sample in op_samples(dtype))
    record_property("counted", listed(seen))
    assert seen["replaced"] >= 4
    assert seen["kept"] >= 4


# what leaving says


def unwarned(run, *arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with replace_sdpa(*arguments, **options) as sdpa:
            run()
    return sdpa


def test_leaving_warns_where_no_call_was_reached():
    """nn.MultiheadAttention with need_weights=True, its default, computes attention itself."""
    layer, x = torch.nn.MultiheadAttention(32, 2, batch_first=True), torch.zeros(1, 8, 32)
    with pytest.warns(UserWarning, match=r"replaced nothing: no call .* need_weights=True") as seen, replace_sdpa():
        layer(x, x, x)
    assert seen[0].filename == __file__
    unwarned(lambda: layer(x, x, x, need_weights=False), impl="reference")


def test_leaving_warns_where_every_call_was_kept():
    with pytest.warns(UserWarning, match=r"replaced nothing: all calls were kept: \{'dropout': 1\}"), replace_sdpa():
        F.scaled_dot_product_attention(*qkv(), dropout_p=0.5)
    unwarned(lambda: F.scaled_dot_product_attention(*qkv()), min_tokens=1000)


def test_leaving_does_not_warn_of_what_is_not_counted():
    def refused():
        with pytest.raises(NotImplementedError):
            F.scaled_dot_product_attention(*qkv(), dropout_p=0.5)

    def inside():
        with replace_sdpa(impl="reference"):
            F.scaled_dot_product_attention(*qkv())

    unwarned(refused, unsupported="raise")
    unwarned(inside)
    with pytest.raises(StopIteration):
        unwarned(iter(()).__next__)


def test_leaving_does_not_warn_of_compiled_calls():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: F.scaled_dot_product_attention(*x), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert unwarned(lambda: compiled(*qkv()), impl="reference").counts == {"replaced": 0, "kept": {}}
