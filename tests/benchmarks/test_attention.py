"""The benchmark's own rules, on a CPU at small shapes."""

import csv
import itertools
import json
import math

import pytest
import torch

from sagebwd import Recipe, sage_attention
from sagebwd.benchmarks import attention as bench
from sagebwd.benchmarks import results
from sagebwd.benchmarks.plot import plot_attention
from sagebwd.switches import current

pytestmark = pytest.mark.rounding

SHAPE = bench.Shape(head_dim=16, heads=4, kv_heads=2, batch=2, tokens=100, is_causal=True)
GRID_SHAPE = bench.Shape(head_dim=64, heads=32, kv_heads=32, batch=1, tokens=64, is_causal=False)


def test_standard_grid():
    grid = bench.standard_grid()
    assert len(grid) == 2 * 2 * 6
    assert {(s.head_dim, s.heads) for s in grid} == {(64, 32), (128, 16)}
    assert {s.batch * s.tokens for s in grid if s.tokens <= 16384} == {16384}
    assert all(s.batch == 1 for s in grid if s.tokens > 16384)
    grouped, _, video = bench.special_shapes()
    assert (grouped.heads, grouped.kv_heads) == (32, 8)
    assert (video.batch, video.heads, video.tokens, video.is_causal) == (1, 24, 32760, False)


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


def test_the_deterministic_mode_beside_the_default():
    rows = bench.measure_shape(SHAPE, ["token", "token_fp8"], ["reference"], "cpu", rounds=1, deterministic=True)
    ours = {row.recipe: row for row in rows if row.direction == "bwd" and row.recipe != "bf16"}
    assert set(ours) == {"token", "token_fp8", "token_fp8 (deterministic)"}  # INT8 gradients always repeat
    assert {row.gate for row in ours.values()} == {"ok"}
    cost = bench.deterministic_cost(rows, "reference", "token_fp8", "bwd")
    assert cost == pytest.approx(ours["token_fp8 (deterministic)"].ms / ours["token_fp8"].ms)
    assert bench.deterministic_cost(rows, "reference", "token", "bwd") is None


def test_the_deterministic_mode_itself_is_deterministic(monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "sage_attention", lambda *_, **__: seen.append(current.deterministic))
    monkeypatch.setattr(bench, "gate", lambda shape, attention, recipe, inputs: str(attention(*inputs[:3])))
    monkeypatch.setattr(bench, "baselines", lambda shape, device: {})
    monkeypatch.setattr(bench, "memory", lambda attention, inputs: (None, None))
    bench.measure_shape(SHAPE, ["token_fp8"], ["reference"], "cpu", deterministic=True)
    assert seen == [False, True]
    assert not current.deterministic


def test_a_red_gate_prints_no_figure(monkeypatch):
    real = sage_attention
    monkeypatch.setattr(bench, "sage_attention", lambda *x, **arguments: 1.05 * real(*x, **arguments))
    rows = bench.measure_shape(SHAPE, ["token"], ["reference"], device="cpu", rounds=1)
    ours = [row for row in rows if row.recipe == "token"]
    assert {row.gate for row in ours} == {"FAILED"}
    assert {row.ms for row in ours} == {None}
    assert {row.speedup for row in ours} == {None}


@pytest.mark.parametrize("position", range(3))
def test_gate_sees_a_wrong_gradient(position):
    recipe = Recipe.named("token")
    inputs = SHAPE.inputs("cpu", torch.bfloat16)

    def attention(*x):
        return sage_attention(*x, is_causal=True, enable_gqa=True, recipe=recipe)

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 1.1

    def wrong(*x):
        return attention(*(Wrong.apply(t) if i == position else t for i, t in enumerate(x)))

    assert bench.gate(SHAPE, attention, recipe, inputs) == "ok"
    assert bench.gate(SHAPE, wrong, recipe, inputs) == "FAILED"


def test_gate_is_red_on_nan():
    inputs = SHAPE.inputs("cpu", torch.bfloat16)
    recipe = Recipe.named("token")
    assert bench.gate(SHAPE, lambda q, k, v: sage_attention(q * math.nan, k, v, enable_gqa=True), recipe, inputs) == (
        "FAILED"
    )


def test_interleaving_takes_turns():
    order = []
    bench.time_interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, "cpu", rounds=3)
    switches = sum(x != y for x, y in itertools.pairwise(order))
    assert switches >= 2 * 3 - 1
    assert set(order) == {"a", "b"}


def test_each_runs_untimed_before_it_is_timed_on_a_gpu(monkeypatch):
    runs = []
    monkeypatch.setattr(bench, "_stopwatch", lambda device: lambda run, n: (runs.append(n), (2.0, 1.0))[1])
    times = bench.time_interleaved({"a": lambda: None}, "cuda", rounds=2)
    timed = bench.ROUND_MS / 2.0
    assert runs == [2, 2, *[timed * bench.LEAD_MS / bench.ROUND_MS, timed] * 2]
    assert times == {"a": (2.0, 1.0)}


def test_results_are_saved_drawn_and_summarised(tmp_path):
    rows = bench.measure_shape(GRID_SHAPE, ["token"], ["reference"], device="cpu", rounds=1)
    path = results.save(rows, results.environment("cpu", commit="abc1234"), tmp_path)
    assert path.name.startswith("attention_cpu_")
    assert path.stem.endswith("abc1234")
    content = json.loads(path.read_text())
    assert {"gpu", "driver", "torch", "triton", "commit", "dirty", "date", "rows"} == set(content)
    assert len(content["rows"]) == len(rows)
    with results.save_csv(rows, path).open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    as_text = [{key: "" if x is None else str(x) for key, x in row.items()} for row in content["rows"]]
    assert lines == as_text
    assert path.with_suffix(".csv").exists()
    assert plot_attention(path).read_bytes().startswith(b"\x89PNG")
    expected = rows[2].peer_ms / rows[2].ms
    assert bench.geometric_mean_speedup(rows, "reference", "token", "fwd+bwd", "peer") == pytest.approx(expected)
    assert bench.geometric_mean_speedup(rows, "reference", "token", "fwd+bwd", "fa2") is None


def test_nothing_to_draw(tmp_path):
    path = results.save([], results.environment("cpu", commit="abc"), tmp_path)
    with pytest.raises(ValueError, match="no measurement of the standard grid"):
        plot_attention(path)
