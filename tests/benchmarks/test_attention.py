"""python -m benchmarks attention: shapes, peers, gates, and what is timed."""

import csv
import io
import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from benchmarks import attention as bench
from benchmarks import baselines
from benchmarks.__main__ import _attention_table
from benchmarks.baselines import available
from benchmarks.correctness import emulated, gate, wrong_tensors
from benchmarks.plot import plot_attention
from benchmarks.shapes import Shape, flops, special_shapes, standard_grid
from sagebwd import Recipe, sage_attention
from sagebwd.cli import results, timer
from sagebwd.switches import current
from tests.forward_alone import ERROR, forward_alone
from tests.scaled import scaled

SHAPE = Shape(head_dim=16, heads=4, kv_heads=2, batch=2, tokens=100, is_causal=True)
GRID_SHAPE = Shape(head_dim=64, heads=32, kv_heads=32, batch=1, tokens=64, is_causal=False)


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
def test_the_deterministic_mode_itself_is_deterministic(monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "sage_attention", lambda *_, **__: seen.append(current.deterministic))
    monkeypatch.setattr(bench, "gate", lambda shape, attention, recipe, inputs: attention(*inputs[:3]) or "FAILED")
    monkeypatch.setattr(bench, "candidates", lambda shape, device: {})
    monkeypatch.setattr(bench, "memory", lambda attention, inputs: (None, None))
    bench.measure_shape(SHAPE, ["mixed"], ["reference"], "cpu", deterministic=True)
    assert seen == [False, True]
    assert not current.deterministic


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


@pytest.mark.rounding
def test_a_shape_whose_peers_are_all_wrong_has_no_best(monkeypatch):
    sdpa = bench.candidates(SHAPE, "cpu")["sdpa"]
    monkeypatch.setattr(bench, "candidates", lambda shape, device: {"sdpa": scaled(sdpa, dq=2.0)})
    rows = bench.measure_shape(SHAPE, ["token"], ["reference"], device="cpu", rounds=1)
    best = {row.direction: (row.peer, row.speedup) for row in rows if row.recipe == "token"}
    assert best["fwd"][0] == "sdpa"
    assert best["bwd"] == best["fwd+bwd"] == (None, None)
    assert bench.geometric_mean_speedup(rows, "reference", "token", "fwd+bwd", "peer") is None


@pytest.mark.rounding
def test_a_peer_that_does_not_run_is_named(monkeypatch):
    def refuses(*_):
        raise AssertionError("head_dim must be 64\nand more")

    sdpa = bench.candidates(SHAPE, "cpu")["sdpa"]
    monkeypatch.setattr(bench, "candidates", lambda shape, device: {"fa4": refuses, "sdpa": sdpa})
    rows = bench.measure_shape(SHAPE, ["token"], ["reference"], device="cpu", rounds=1)
    assert {row.impl for row in rows} == {"reference", "sdpa"}
    reason = "does not run: AssertionError: head_dim must be 64"
    assert all(row.peer_gates == {"fa4": reason} for row in rows)


@pytest.mark.rounding
def test_a_peer_without_backward_is_compared_with_in_forward(monkeypatch):
    sdpa = bench.candidates(SHAPE, "cpu")["sdpa"]
    monkeypatch.setattr(bench, "candidates", lambda shape, device: {"fa3": forward_alone, "sdpa": sdpa})
    timed(monkeypatch, sdpa=10, fa3=1)
    rows = bench.measure_shape(SHAPE, ["token"], ["reference"], device="cpu", rounds=1)
    reason = f"does not run: RuntimeError: {ERROR}"
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


@pytest.mark.rounding
def test_a_forward_that_is_wrong_is_not_compared_with(monkeypatch):
    """Of a peer without backward too."""
    sdpa = bench.candidates(SHAPE, "cpu")["sdpa"]
    wrong = {"fa3": lambda *x: 1.2 * forward_alone(*x), "sdpa": sdpa}
    monkeypatch.setattr(bench, "candidates", lambda shape, device: wrong)
    rows = bench.measure_shape(SHAPE, ["token"], ["reference"], device="cpu", rounds=1)
    assert {row.peer for row in rows} == {"sdpa"}
    assert rows[0].peer_gates["fa3"].startswith("wrong: o ")


@pytest.mark.rounding
def test_a_value_of_another_width():
    shape = Shape(24, 2, 2, 1, 64, True, value_dim=16)
    for recipe in ("token", "mixed", "full"):
        rows = bench.measure_shape(shape, [recipe], None, device="cpu", rounds=1)
        assert {row.gate for row in rows} == {"ok"}
        assert {(row.head_dim, row.value_dim) for row in rows} == {(24, 16)}


@pytest.mark.rounding
def test_interleaving_takes_turns():
    order = []
    timer.time_interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, "cpu", rounds=3)
    switches = sum(x != y for x, y in itertools.pairwise(order))
    assert switches >= 2 * 3 - 1
    assert set(order) == {"a", "b"}


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


@pytest.mark.rounding
def test_each_runs_untimed_before_it_is_timed_on_a_gpu(monkeypatch):
    runs = []
    monkeypatch.setattr(timer, "_stopwatch", lambda device: lambda run, n: (runs.append(n), (2.0, 1.0))[1])
    times = timer.time_interleaved({"a": lambda: None}, "cuda", rounds=2)
    timed = timer.ROUND_MS / 2.0
    assert runs == [2, 2, *[timed * timer.LEAD_MS / timer.ROUND_MS, timed] * 2]
    assert times == {"a": (2.0, 1.0)}


def test_of_contenders_who_is_slow_runs_once(monkeypatch):
    """But not for a host's hiccup in a small call."""
    once = {"a": 2.0, "b": 7.0, "c": 5.0}
    monkeypatch.setattr(timer, "_once", lambda run, device: once[run()])
    monkeypatch.setattr(timer, "time_interleaved", lambda runs, *_: dict.fromkeys(runs, (1.0, 0.5)))
    runs = {name: lambda name=name: name for name in once}
    assert timer.time_contenders(runs, "cpu", 1, 1.0, 1.0) == {"a": (1.0, 0.5), "c": (1.0, 0.5), "b": (7.0, None)}
    assert timer.time_contenders(runs, "cpu", 1, 1.0, 1.0, always="b") == dict.fromkeys(runs, (1.0, 0.5))
    once |= {"a": 0.02, "b": 0.9, "c": 0.03}
    assert timer.time_contenders(runs, "cpu", 1, 1.0, 1.0) == dict.fromkeys(runs, (1.0, 0.5))


@pytest.mark.rounding
def test_results_are_saved_drawn_and_summarised(tmp_path):
    rows = bench.measure_shape(GRID_SHAPE, ["token"], ["reference"], device="cpu", rounds=1)
    path = results.save(rows, results.environment("cpu", commit="abc1234"), tmp_path)
    assert path.name.startswith("attention_cpu_")
    assert path.stem.endswith("abc1234")
    content = json.loads(path.read_text())
    assert {"gpu", "driver", "torch", "triton", "flash_attn_4", "commit", "dirty", "date", "rows"} == set(content)
    assert len(content["rows"]) == len(rows)
    with bench.save_csv(rows, path).open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    as_text = [{key: "" if x is None else str(x) for key, x in row.items()} for row in content["rows"]]
    assert lines == as_text
    assert path.with_suffix(".csv").exists()
    assert plot_attention(path).read_bytes().startswith(b"\x89PNG")
    expected = rows[2].peer_ms / rows[2].ms
    assert bench.geometric_mean_speedup(rows, "reference", "token", "fwd+bwd", "peer") == pytest.approx(expected)
    assert bench.geometric_mean_speedup(rows, "reference", "token", "fwd+bwd", "fa2") is None


def test_standard_grid():
    grid = standard_grid()
    assert len(grid) == 2 * 2 * 6
    assert {(s.head_dim, s.heads) for s in grid} == {(64, 32), (128, 16)}
    assert {s.batch * s.tokens for s in grid if s.tokens <= 16384} == {16384}
    assert all(s.batch == 1 for s in grid if s.tokens > 16384)
    grouped, _, video = special_shapes()
    assert (grouped.heads, grouped.kv_heads) == (32, 8)
    assert (video.batch, video.heads, video.tokens, video.is_causal) == (1, 24, 32760, False)


def test_value_has_a_width_of_its_own():
    shape = Shape(192, 4, 2, 2, 32, True, value_dim=128)
    assert str(shape) == "D192/128 H4/2 B2 N32 causal"
    assert str(replace(shape, value_dim=None)) == "D192 H4/2 B2 N32 causal"
    shapes = [tuple(x.shape) for x in shape.inputs("cpu", torch.bfloat16)]
    assert shapes == [(2, 4, 32, 192), (2, 2, 32, 192), (2, 2, 32, 128), (2, 4, 32, 128)]
    pairs = 2 * 4 * 32 * 33 // 2
    assert shape.flops("fwd") == 2 * pairs * (192 + 128)
    assert shape.flops("bwd") == 2 * pairs * (3 * 192 + 2 * 128)


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
