"""The sm_90a backward against the Gluon kernel, which has the same operands and products, on a Hopper GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sagebwd.call import Call, Saved
from sagebwd.kernels import driver
from sagebwd.kernels.gluon import gradients as gluon
from sagebwd.kernels.gluon import host
from sagebwd.kernels.sm90 import gradients as sm90
from sagebwd.kernels.sm90 import launch
from sagebwd.kernels.sm90.config import BACKWARD
from sagebwd.recipe import Recipe
from tests.kernels.test_sm90_forward import CASES, Case, _why_not

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))]

# Relative. P and dS are rounded to FP16 before they are to e4m3, and sums of dQ are in FP16 in another order.
LIMIT = 0.012
HERE = [case for case in CASES if case.head_dim in BACKWARD] + [
    replace(case, name=f"{case.name}, {head_dim}", head_dim=head_dim)
    for head_dim in sorted(BACKWARD)
    for case in (
        Case("whole blocks", batch=2, tokens=512, kv_tokens=768, heads=4),
        Case("whole blocks, causal", tokens=1152, kv_tokens=1152, is_causal=True),
        Case("one query, one key", tokens=1, kv_tokens=1),
        Case("grouped, odd", batch=2, heads=6, kv_heads=2, tokens=333, kv_tokens=500, is_causal=True),
        Case("packed, empty", lengths=((0, 40), (40, 0), (65, 129), (130, 200)), heads=4, kv_heads=2),
        Case("packed, grouped, window", lengths=((100, 300), (300, 100)), heads=6, kv_heads=2, window=(64, 16)),
        Case("float16, packed", lengths=((100, 300), (300, 100)), dtype=torch.float16, is_causal=True),
        Case("float16, key mask", batch=2, tokens=200, kv_tokens=300, dtype=torch.float16, masked=True),
    )
]
EACH = pytest.mark.parametrize("head_dim", sorted(BACKWARD))


def saved(case: Case, recipe: str = "mixed", seed: int = 0) -> tuple[Call, Saved, Tensor, Tensor, Tensor]:
    """A call, what its forward leaves, dO, a gradient of lse, and V."""
    q, k, v, key_mask = case.inputs(seed)
    call = Call(
        Recipe.named(recipe), case.softmax_scale(), v.dtype, v.device, case.head_dim, *case.packings(), key_mask,
        case.is_causal, *case.window,
    )  # fmt: skip
    family = launch if recipe == "mixed" else host
    kept = driver.forward(family.forward, call, q, k, v)
    generator = torch.Generator("cuda").manual_seed(seed + 1)
    do = torch.randn(kept.o.shape, generator=generator, device="cuda").to(v.dtype)
    dlse = torch.randn(kept.lse.shape, generator=generator, device="cuda")
    return call, kept, do, torch.where(torch.isneginf(kept.lse), 0, dlse), v


def both(call: Call, kept: Saved, do: Tensor, dlse: Tensor | None, v: Tensor) -> list[tuple[Tensor, ...]]:
    """dq, dk and dv of this kernel and of the Gluon one."""
    return [driver.backward(x.backward, call, kept, do, dlse, None, None, v) for x in (sm90, gluon)]


def check(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], limit: float = LIMIT) -> None:
    for name, x, y in zip(("dq", "dk", "dv"), found, expected):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
        x, y = x.double(), y.double()
        assert torch.isfinite(x).all(), name
        assert (x - y).norm() <= limit * y.norm(), f"{name} is off by {((x - y).norm() / y.norm()).item()}"


@pytest.mark.parametrize("case", HERE, ids=lambda case: case.name)
def test_gradients_are_those_of_the_gluon_kernel(case):
    call, kept, do, dlse, v = saved(case)
    for given in (None, dlse):
        check(*both(call, kept, do, given, v))


@EACH
@pytest.mark.parametrize("recipe", ["mixed", "token_fp8"])
def test_a_scale_for_each_key_too(recipe, head_dim):
    case = Case("", head_dim=head_dim, batch=2, heads=4, kv_heads=2, tokens=700, kv_tokens=900, is_causal=True)
    call, kept, do, dlse, v = saved(case, recipe)
    check(*both(call, kept, do, dlse, v))


@EACH
def test_a_packed_neighbours_nan_stays_there(head_dim):
    call, kept, do, _, v = saved(Case("", head_dim=head_dim, lengths=((70, 70), (90, 90))))
    clean = driver.backward(sm90.backward, call, kept, do, None, None, None, v)
    do, v = do.clone(), v.clone()
    do[70:], v[70:] = math.nan, math.nan
    found = driver.backward(sm90.backward, call, kept, do, None, None, None, v)
    for x, y in zip(found, clean):
        assert torch.isfinite(x[:70].float()).all()
        torch.testing.assert_close(x[:70].float(), y[:70].float(), rtol=2e-2, atol=2e-2)


@EACH
def test_a_masked_keys_nan_does_not_matter(head_dim):
    call, kept, do, _, v = saved(Case("", head_dim=head_dim, batch=2, tokens=200, kv_tokens=300, masked=True))
    v = torch.where(call.key_mask[:, None, :, None], v, math.nan)
    for x in driver.backward(sm90.backward, call, kept, do, None, None, None, v):
        assert torch.isfinite(x.float()).all()


@EACH
def test_nan_in_do_is_nan_in_what_depends_on_it(head_dim):
    call, kept, do, _, v = saved(Case("", head_dim=head_dim, tokens=300, kv_tokens=300))
    do[0, 1, 17, 3] = math.nan
    for x, y in zip(*both(call, kept, do, None, v)):
        assert torch.equal(torch.isnan(x), torch.isnan(y))


@EACH
def test_what_must_repeat_is_the_gluon_kernels(head_dim):
    call, kept, do, _, v = saved(Case("", head_dim=head_dim, tokens=1000, kv_tokens=1000, is_causal=True))
    call = call._replace(deterministic=True)
    for x, y in zip(*both(call, kept, do, None, v)):
        assert torch.equal(x, y)


@EACH
def test_many_calls_agree_and_run_in_a_cuda_graph(head_dim):
    call, kept, do, _, v = saved(Case("", head_dim=head_dim, heads=8, kv_heads=8, tokens=2048, kv_tokens=2048))
    expected = driver.backward(gluon.backward, call, kept, do, None, None, None, v)
    for _ in range(4):  # the third is a replay
        check(driver.backward(sm90.backward, call, kept, do, None, None, None, v), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = driver.backward(sm90.backward, call, kept, do, None, None, None, v)
    for x in found:
        x.zero_()
    graph.replay()
    check(found, expected)
