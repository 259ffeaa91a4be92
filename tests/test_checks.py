"""What a call is checked for beside its arguments: torch's context_parallel, in threads and in compiled code."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from sagebwd import checks, replace_sdpa, sage_attention
from tests.threads import at_once


@contextmanager
def dividing():
    """As within torch's context_parallel."""
    with pytest.MonkeyPatch.context() as patch:
        function = F.scaled_dot_product_attention
        wrapper = lambda *given, **options: function(*given, **options)  # noqa: E731
        patch.setattr(F, "scaled_dot_product_attention", wrapper)
        patch.setitem(sys.modules, checks._CONTEXT_PARALLEL, SimpleNamespace(_replaced_functions={wrapper: None}))
        yield


@pytest.fixture
def divided():
    with dividing():
        yield


def elsewhere(function):
    """What a function returns in another thread."""
    return at_once(lambda _: function(), [None])[0]


def test_a_ring_lets_its_own_threads_calls_through(divided):
    """Regression: a plain call of another thread meanwhile attended to a part of its tokens, without a word."""
    assert checks.is_divided()
    with checks.in_ring():
        assert not checks.is_divided()
        assert elsewhere(checks.is_divided)
        with checks.in_ring():
            assert not checks.is_divided()
        assert not checks.is_divided()
    assert checks.is_divided()
    with pytest.raises(NotImplementedError, match="context_parallel divides the sequence"):
        checks.refuse_divided()


def test_a_ring_that_fails_ends(divided):
    with pytest.raises(KeyError), checks.in_ring():
        raise KeyError
    assert checks.is_divided()


def test_torchs_function_is_known():
    assert F.scaled_dot_product_attention is checks._ITS_OWN


def test_another_replacement_divides_nothing():
    with replace_sdpa():
        assert not checks.is_divided()
        with dividing():
            assert checks.is_divided()


@pytest.mark.parametrize("options", [{"recipe": "token"}, {"dropout_p": 0.1}], ids=["by sagebwd", "by torch"])
def test_what_was_compiled_before_does_not_run_divided(options):
    """Regression: that nothing was divided was burnt into compiled code, which attended to its own tokens alone."""
    x = torch.randn(1, 1, 4, 8)
    compiled = torch.compile(lambda x: sage_attention(x, x, x, **options), backend="eager")
    before = compiled(x)
    with dividing(), pytest.raises(NotImplementedError, match="context_parallel divides the sequence"):
        compiled(x)
    assert compiled(x).shape == before.shape


def test_an_exported_graph_does_not_run_divided():
    """It has no guards."""
    x = torch.randn(1, 1, 4, 8)

    class Module(torch.nn.Module):
        def forward(self, x):
            return sage_attention(x, x, x, recipe="token")

    exported = torch.export.export(Module(), (x,)).module()
    before = exported(x)
    with dividing(), pytest.raises(NotImplementedError, match="context_parallel divides the sequence"):
        exported(x)
    assert torch.equal(exported(x), before)
