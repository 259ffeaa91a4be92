"""python -m benchmarks attention: shapes, peers, gates, and what is timed."""

import io
import math

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from benchmarks import attention as bench
from benchmarks import baselines, wide_baselines
from benchmarks.__main__ import _attention_table
from benchmarks.baselines import available
from benchmarks.correctness import emulated, gate, wrong_tensors
from benchmarks.shapes import Shape, flops, wide_shapes
from sagebwd import Recipe, sage_attention
from sagebwd.cli import timer
from tests.scaled import scaled

SHAPE = Shape(head_dim=16, heads=4, kv_heads=2, batch=2, tokens=100, is_causal=True)


@pytest.mark.rounding
def test_rows_of_one_shape():
    rows = bench.measure_shape(SHAPE, ["token", "paper"], ["reference"], device="cpu", rounds=2)
    assert {(row.impl, row.recipe) for row in rows} == {
        ("reference", "token"), ("reference", "paper"), ("sdpa", "bf16"),
    }  # fmt: skip
    by_key = {(row.recipe, row.direction): row for row in rows}
    assert len(rows) == 9
    for recipe in ("token", "paper", "bf16"):
        forward, backward, both = (by_key[recipe, direction] for direction in bench.DIRECTIONS)
        assert both.ms == pytest.approx(forward.ms + backward.ms)
        assert both.tflops == pytest.approx(SHAPE.flops("fwd+bwd") / both.ms * 1e-9)
        assert both.peer == "sdpa"
        assert both.speedup == pytest.approx(by_key["bf16", "fwd+bwd"].ms / both.ms)
        assert 0 < both.host_ms <= both.ms  # the host is the device here
        assert both.host_ms == pytest.approx(forward.host_ms + backward.host_ms)
        assert both.gate == "ok"
    assert by_key["bf16", "fwd"].speedup == 1


@pytest.mark.rounding
def test_the_deterministic_mode_beside_the_default():
    rows = bench.measure_shape(SHAPE, ["token", "mixed"], ["reference"], "cpu", rounds=1, deterministic=True)
    ours = {row.recipe: row for row in rows if row.direction == "bwd" and row.recipe != "bf16"}
    assert set(ours) == {"token", "mixed", "mixed (deterministic)"}  # INT8 gradients always repeat
    assert {row.gate for row in ours.values()} == {"ok"}
    cost = bench.deterministic_cost(rows, "reference", "mixed", "bwd")
    assert cost == pytest.approx(ours["mixed (deterministic)"].ms / ours["mixed"].ms)
    assert bench.deterministic_cost(rows, "reference", "token", "bwd") is None


@pytest.mark.rounding
def test_a_red_gate_prints_no_figure(monkeypatch):
    real = sage_attention
    monkeypatch.setattr(bench, "sage_attention", lambda *x, **arguments: 1.05 * real(*x, **arguments))
    rows = bench.measure_shape(SHAPE, ["token"], ["reference"], device="cpu", rounds=1)
    ours = [row for row in rows if row.recipe == "token"]
    assert {row.gate for row in ours} == {"FAILED"}
    assert {row.ms for row in ours} == {None}
    assert {row.speedup for row in ours} == {None}


def with_peers(monkeypatch, **wrong):
    """The baselines are SDPA and, by the names given, SDPA that is wrong by such factors."""
    sdpa = bench.candidates(SHAPE, "cpu")["sdpa"]
    found = {"sdpa": sdpa} | {name: scaled(sdpa, **factors) for name, factors in wrong.items()}
    monkeypatch.setattr(bench, "candidates", lambda shape, device: found)


def timed(monkeypatch, **ms):
    """Forward and backward of a baseline take so long, of all else a second."""

    def time_interleaved(runs, device, rounds, tell):
        return {key: (float(ms.get(key[0], 1000)), 0.0) for key in runs}

    monkeypatch.setattr(bench, "time_interleaved", time_interleaved)


@pytest.mark.rounding
def test_bursts_take_the_place_of_a_steady_load(monkeypatch):
    timed(monkeypatch)
    monkeypatch.setattr(bench, "time_bursts", lambda runs, device, rounds, tell: dict.fromkeys(runs, (7.0, 3.0)))
    for bursts, ms in ((False, 1000.0), (True, 7.0)):
        rows = bench.measure_shape(SHAPE, ["token"], ["reference"], "cpu", rounds=1, bursts=bursts)
        assert {row.ms for row in rows} == {ms, 2 * ms}


@pytest.mark.rounding
@pytest.mark.parametrize(
    ("factors", "where"), [({"dq": 2.06}, ("bwd", "fwd+bwd")), ({"o": 2.06}, bench.DIRECTIONS)], ids=("dq", "o")
)
def test_nothing_is_compared_with_a_peer_that_is_wrong(monkeypatch, factors, where):
    with_peers(monkeypatch, fa2=factors)
    timed(monkeypatch, sdpa=10, fa2=1)
    rows = bench.measure_shape(SHAPE, ["token"], ["reference"], device="cpu", rounds=1)
    for row in rows:
        is_wrong = row.direction in where
        assert (row.peer, row.fa2_ms) == (("sdpa", None) if is_wrong else ("fa2", 1.0))
        assert set(row.peer_gates) == ({"fa2"} if is_wrong else set())
        if row.impl == "fa2":
            assert row.ms == (2.0 if row.direction == "fwd+bwd" else 1.0)  # timed all the same
            assert (row.speedup is None) == is_wrong
            assert row.gate == (row.peer_gates["fa2"] if is_wrong else "ok")
        else:
            assert row.gate == "ok"
    backward = rows[1].peer_gates["fa2"]
    assert backward.startswith("wrong: ")
    if "dq" in factors:
        assert float(backward.removeprefix("wrong: dq ")) == pytest.approx(1.06, abs=0.02)


class ForwardAlone(torch.autograd.Function):
    """Attention without a backward, as FlashAttention-3's can be built."""

    @staticmethod
    def forward(ctx, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    @staticmethod
    def backward(ctx, do):
        raise RuntimeError("no backward")


@pytest.mark.rounding
def test_a_peer_without_backward_is_compared_with_in_forward(monkeypatch):
    sdpa = bench.candidates(SHAPE, "cpu")["sdpa"]
    monkeypatch.setattr(bench, "candidates", lambda shape, device: {"fa3": ForwardAlone.apply, "sdpa": sdpa})
    timed(monkeypatch, sdpa=10, fa3=1)
    rows = bench.measure_shape(SHAPE, ["token"], ["reference"], device="cpu", rounds=1)
    reason = "does not run: RuntimeError: no backward"
    for row in rows:
        is_forward = row.direction == "fwd"
        assert row.peer == ("fa3" if is_forward else "sdpa")
        assert row.peer_gates == ({} if is_forward else {"fa3": reason})
        if row.impl == "fa3":
            assert (row.ms, row.gate) == ((1.0, "ok") if is_forward else (None, reason))
    assert bench.timed_both_ways(rows) == {"reference", "sdpa"}
    printed = io.StringIO()
    Console(file=printed, width=200).print(_attention_table("a shape", rows))
    assert printed.getvalue().count("does not run") == 2


def test_rounds_are_in_other_orders_the_same_in_every_call(monkeypatch):
    """Regression: `auto`, behind the same run in each round, took up to a tenth longer than what it hands over to."""
    monkeypatch.setattr(timer, "_stopwatch", lambda device: lambda run, n: (run(), (100.0, 1.0))[1])
    found = []
    for _ in range(2):
        order = []
        runs = {name: lambda name=name, order=order: order.append(name) for name in "abcd"}
        timer.time_interleaved(runs, "cpu", rounds=4)
        found.append(["".join(order[at : at + 4]) for at in range(8, 24, 4)])
    assert found[0] == found[1]
    assert all(sorted(one) == list("abcd") for one in found[0])
    before_d = {one[one.index("d") - 1] for one in found[0] if one.index("d")}
    assert len(set(found[0])) > 2
    assert len(before_d) > 1


def test_of_contenders_who_is_slow_runs_alone(monkeypatch):
    """But not for a host's hiccup in a small call."""
    once = {"a": 2.0, "b": 7.0, "c": 5.0}
    monkeypatch.setattr(timer, "_alone", lambda run, device: once[run()])
    monkeypatch.setattr(timer, "time_interleaved", lambda runs, *_: dict.fromkeys(runs, (1.0, 0.5)))
    runs = {name: lambda name=name: name for name in once}
    assert timer.time_contenders(runs, "cpu", 1, 1.0, 1.0) == {"a": (1.0, 0.5), "c": (1.0, 0.5), "b": (7.0, None)}
    assert timer.time_contenders(runs, "cpu", 1, 1.0, 1.0, always="b") == dict.fromkeys(runs, (1.0, 0.5))
    once |= {"a": 0.02, "b": 0.9, "c": 0.03}
    assert timer.time_contenders(runs, "cpu", 1, 1.0, 1.0) == dict.fromkeys(runs, (1.0, 0.5))


@pytest.mark.parametrize(
    ("hopper", "timed", "may"),
    [
        (True, {"cudnn", "fa2"}, False),
        (True, {"cudnn", "fa4"}, False),
        (True, {"cudnn", "fa4", "fa3"}, True),
        (False, {"cudnn", "fa2"}, True),
    ],
)
def test_on_hopper_there_is_no_best_without_flash_attention_4_and_3(monkeypatch, hopper, timed, may):
    monkeypatch.setattr(baselines, "arch_of", lambda device: 90 if hopper and device == torch.device("cuda") else 80)
    assert baselines.may_claim_best(timed, "cuda") is may


TOKEN = Recipe.named("token")


def token(*x):
    return sage_attention(*x, is_causal=True, enable_gqa=True, recipe=TOKEN)


@pytest.mark.rounding
@pytest.mark.parametrize("wrong", ["dq", "dk", "dv"])
def test_gate_sees_a_wrong_gradient(wrong):
    inputs = SHAPE.inputs("cpu", torch.bfloat16)
    assert gate(SHAPE, token, TOKEN, inputs) == "ok"
    assert gate(SHAPE, scaled(token, **{wrong: 1.1}), TOKEN, inputs) == "FAILED"


@pytest.mark.rounding
@pytest.mark.parametrize(
    "shape",
    [SHAPE, Shape(24, 2, 2, 1, 300, False, value_dim=16), Shape(16, 2, 1, 1, 300, True, value_dim=24)],
    ids=str,
)
def test_peers_are_right_or_named_by_what_is_wrong(shape):
    inputs = shape.inputs("cpu", torch.bfloat16)
    exact = emulated(shape, Recipe.named("full"), inputs, torch.float64)
    assert [x.shape[-1] for x in exact] == [shape.value_dim, shape.head_dim, shape.head_dim, shape.value_dim]
    (sdpa,) = available(shape, "cpu").values()
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


@pytest.mark.rounding
def test_a_peer_that_is_wrong_in_a_few_tokens_is_wrong():
    shape = Shape(16, 1, 1, 1, 4000, False)
    inputs = shape.inputs("cpu", torch.bfloat16)
    exact = emulated(shape, Recipe.named("full"), inputs, torch.float64)
    (sdpa,) = available(shape, "cpu").values()

    def cut_short(*x):
        o = sdpa(*x)
        return torch.cat([o[..., :-1, :], torch.zeros_like(o[..., -1:, :])], dim=-2)

    assert "o" in wrong_tensors(shape, cut_short, exact, inputs)


def test_flops_by_hand():
    assert flops(2, 3, 10, 10, 64) == 4 * 2 * 3 * 64 * 100
    assert flops(1, 1, 4, 4, 64, is_causal=True) == 4 * 64 * 10
    assert flops(1, 1, 4, 4, 64, window=(1, 0)) == 4 * 64 * 7
    assert flops(1, 1, 4, 4, 64, direction="bwd") == 2.5 * 4 * 64 * 16
    assert flops(1, 1, 4, 4, 64, direction="fwd+bwd") == 3.5 * 4 * 64 * 16


@pytest.mark.rounding
def test_a_wide_shape_has_a_window():
    shape = Shape(264, 2, 1, 1, 40, True, window=8)
    rows = bench.measure_shape(shape, ["token"], ["reference"], "cpu", rounds=1)
    assert {(row.impl, row.window, row.gate) for row in rows} == {("reference", 8, "ok"), ("sdpa", 8, "ok")}
    assert shape.flops("fwd") < Shape(264, 2, 1, 1, 40, True).flops("fwd")
    assert len({str(shape) for shape in wide_shapes()}) == 20


def test_a_tile_of_flex_attention_that_does_not_fit_leaves_its_backward_tried(monkeypatch):
    def times(pair, device, inputs):
        if pair[0] == wide_baselines.FORWARD[1]:
            raise RuntimeError("out of resource: shared memory")
        return float(wide_baselines.FORWARD.index(pair[0])), -float(wide_baselines.BACKWARD.index(pair[1]) == 1)

    monkeypatch.setattr(wide_baselines, "TRIED", Shape(16, 1, 1, 1, 16, True))
    monkeypatch.setattr(wide_baselines, "_times", times)
    wide_baselines.tiles.cache_clear()
    assert wide_baselines.tiles("cpu") == (wide_baselines.FORWARD[0], wide_baselines.BACKWARD[1])
    wide_baselines.tiles.cache_clear()
