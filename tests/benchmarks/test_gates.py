"""What a benchmark refuses to time, or to compare with."""

import math

import pytest
import torch

from sagebwd import Recipe, sage_attention
from sagebwd.benchmarks.gates import emulated, gate, wrong_tensors
from sagebwd.benchmarks.peers import baselines
from sagebwd.benchmarks.shapes import Shape
from tests.scaled import scaled

pytestmark = pytest.mark.rounding

SHAPE = Shape(head_dim=16, heads=4, kv_heads=2, batch=2, tokens=100, is_causal=True)
TOKEN = Recipe.named("token")


def token(*x):
    return sage_attention(*x, is_causal=True, enable_gqa=True, recipe=TOKEN)


@pytest.mark.parametrize("wrong", ["dq", "dk", "dv"])
def test_gate_sees_a_wrong_gradient(wrong):
    inputs = SHAPE.inputs("cpu", torch.bfloat16)
    assert gate(SHAPE, token, TOKEN, inputs) == "ok"
    assert gate(SHAPE, scaled(token, **{wrong: 1.1}), TOKEN, inputs) == "FAILED"


def test_gate_is_red_on_nan():
    inputs = SHAPE.inputs("cpu", torch.bfloat16)
    assert gate(SHAPE, lambda q, k, v: token(q * math.nan, k, v), TOKEN, inputs) == "FAILED"


@pytest.mark.parametrize(
    "shape",
    [SHAPE, Shape(24, 2, 2, 1, 300, False, value_dim=16), Shape(16, 2, 1, 1, 300, True, value_dim=24)],
    ids=str,
)
def test_peers_are_right_or_named_by_what_is_wrong(shape):
    inputs = shape.inputs("cpu", torch.bfloat16)
    exact = emulated(shape, Recipe.named("full"), inputs, torch.float64)
    assert [x.shape[-1] for x in exact] == [shape.value_dim, shape.head_dim, shape.head_dim, shape.value_dim]
    (sdpa,) = baselines(shape, "cpu").values()
    assert wrong_tensors(shape, sdpa, exact, inputs) == {}
    for name in ("dq", "dk", "dv"):
        found = wrong_tensors(shape, scaled(sdpa, **{name: -0.06}), exact, inputs)
        assert set(found) == {name}
        assert found[name] == pytest.approx(1.06, abs=0.02)
    assert set(wrong_tensors(shape, scaled(sdpa, o=1.1), exact, inputs)) == {"o", "dq", "dk", "dv"}
    assert set(wrong_tensors(shape, lambda q, k, v: sdpa(q * math.nan, k, v), exact, inputs)) == {
        "o",
        "dq",
        "dk",
        "dv",
    }


def test_a_peer_that_is_wrong_in_a_few_tokens_is_wrong():
    shape = Shape(16, 1, 1, 1, 4000, False)
    inputs = shape.inputs("cpu", torch.bfloat16)
    exact = emulated(shape, Recipe.named("full"), inputs, torch.float64)
    (sdpa,) = baselines(shape, "cpu").values()

    def cut_short(*x):
        o = sdpa(*x)
        return torch.cat([o[..., :-1, :], torch.zeros_like(o[..., -1:, :])], dim=-2)

    assert "o" in wrong_tensors(shape, cut_short, exact, inputs)
