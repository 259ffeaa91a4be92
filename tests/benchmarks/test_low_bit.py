"""Low-bit peers of the benchmarks: who they are, what their rows say, and what is compared with them."""

import json

import pytest
import torch

from benchmarks import attention as bench
from benchmarks import cudnn_fp8, low_bit
from benchmarks.shapes import Shape
from tests.scaled import scaled

SHAPE = Shape(head_dim=128, heads=2, kv_heads=1, batch=1, tokens=64, is_causal=True)


def sdpa(q, k, v, *, is_causal, gradients, **wrong):
    """In cuDNN's place, with an error of a few hundredths."""

    def attention(*x):
        return torch.nn.functional.scaled_dot_product_attention(*x, is_causal=is_causal, enable_gqa=True)

    return scaled(attention, **({"o": 1.03} | wrong))(q, k, v)


@pytest.fixture
def rows(monkeypatch):
    """Of SHAPE with a low-bit peer in whose place something else is; what is wrong of it, and how long all take."""

    def measured(names=("cudnn-fp8",), ms=1.0, shape=SHAPE, recipes=("mixed",), **wrong):
        def attention(*x, **settings):
            return sdpa(*x, **settings, **wrong)

        def time_interleaved(runs, device, rounds, tell=None):
            return {key: (ms if key[1] == low_bit.RECIPE else 2.0, 0.0) for key in runs}

        monkeypatch.setattr(cudnn_fp8, "attention", attention)
        monkeypatch.setattr(bench, "time_interleaved", time_interleaved)
        return bench.measure_shape(shape, recipes, ["reference"], "cpu", rounds=1, low_bit_peers=names)

    return measured


@pytest.mark.rounding
def test_its_rows_are_no_baseline_s(rows):
    found = rows()
    assert {(row.impl, row.recipe) for row in found} == {
        ("reference", "mixed"), ("cudnn-fp8", "fp8"), ("sdpa", "bf16"),
    }  # fmt: skip
    for row in found:
        assert (row.gate, row.peer) == ("ok", "sdpa")  # the fastest of all is not the peer
        assert row.peer_gates == {}
        both = 2 if row.direction == "fwd+bwd" else 1
        assert row.peer_ms == 2.0 * both
        if row.recipe == "fp8":
            assert row.ms == both
            assert row.speedup == 2.0
            assert row.errors["o"] == pytest.approx(0.03, abs=0.003)
        elif row.recipe == "bf16":
            assert row.errors is None
        else:
            assert {name: 0.001 < error < 0.2 for name, error in row.errors.items()} == dict.fromkeys(
                ("o", "dq", "dk", "dv"), True
            )
    json.dumps([row.errors for row in found])


@pytest.mark.rounding
def test_nothing_is_compared_with_one_that_is_wrong(rows):
    found = rows(dk=2.0)
    wrong = next(row for row in found if row.recipe == "fp8")
    assert wrong.gate == "wrong: dk 1.06"
    assert wrong.ms == 1.0  # timed all the same
    assert wrong.speedup is None
    assert low_bit.comparisons(found) == []


@pytest.mark.rounding
def test_a_shape_that_it_refuses_is_named(monkeypatch):
    def timed(runs, device, rounds, tell=None):
        return dict.fromkeys(runs, (1.0, 0.0))

    monkeypatch.setattr(bench, "time_interleaved", timed)
    shape = Shape(64, 1, 1, 1, 32, True)
    found = bench.measure_shape(shape, ["mixed"], ["reference"], "cpu", rounds=1, low_bit_peers=["cudnn-fp8"])
    assert {row.recipe for row in found} == {"mixed", "bf16"}
    reason = "does not run: NotImplementedError: head_dim=64: cuDNN's FP8 backward on Hopper takes 128"
    assert all(row.peer_gates == {"cudnn-fp8": reason} for row in found)
