"""What a call is checked for beside its arguments: torch's context_parallel, in threads and in compiled code."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
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


@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not in this build")
def test_a_dtensor_is_told_what_to_write():
    """Regression: torch's error had no way out. What it says works."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.experimental import local_map

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = [torch.randn(1, 2, 6, 8) for _ in range(3)]
        query, key, value = (distribute_tensor(x, mesh, [Shard(2)]) for x in whole)
        attend = partial(sage_attention, recipe="token")
        with pytest.raises(NotImplementedError, match=r"query: a DTensor .*local_map\(.*to_local"):
            attend(query, key, value)
        placements = query.placements, key.placements, value.placements
        found = local_map(attend, list(query.placements), placements)(query, key, value)
        assert torch.equal(found.to_local(), attend(*whole))
    finally:
        dist.destroy_process_group()
