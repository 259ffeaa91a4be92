"""python -m lab bench-training: what is timed, compiled too, and its tables."""

import json
from functools import partial, partialmethod

import pytest
import torch
import torch._inductor.compile_fx
from torch import nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition

from benchmarks import breakdown, plot
from lab.steps import tables as tables
from lab.steps import timing as bench
from lab.steps.runner import Layer
from lab.training.config import Config
from sagebwd.integrations import transformers_fusion as fusion
from sagebwd.planning.plan import Plan
from tests.lab.training.runs import command, finish

TINY = Config("tiny").replace(
    {"model.layers": 2, "model.width": 64, "model.mlp_width": 96, "data.context": 32, "model.kv_heads": 1}
)


def measure(*names, **arguments):
    parsed = [bench.Choice.parse(name, "cpu") for name in names]
    return bench.measure(TINY, parsed, batch=2, vocabulary=40, device="cpu", steps=3, warmup=1, **arguments)


@pytest.mark.rounding
def test_rows_of_full_precision_and_recipes():
    full, token, paper = measure("sdpa", "token", "paper@reference")
    assert [row.attention for row in (full, token, paper)] == ["sdpa", "token@reference", "paper@reference"]
    for row in (full, token, paper):
        assert row.gate == "ok"
        assert len(row.all_ms) == row.steps == 3
        assert row.tokens_per_s == pytest.approx(2 * 32 / row.step_ms * 1e3)
        assert row.peer == "sdpa"
        assert row.speedup == pytest.approx(full.step_ms / row.step_ms)
        assert 0 < row.attention_share < 1
        assert row.attention_ms == pytest.approx(row.attention_share * row.busy_ms)
        assert tuple(row.parts) == breakdown.PARTS == tuple(plot.STEP_PARTS)
        assert row.parts["attention"] + row.parts["passes"] == pytest.approx(row.attention_ms, abs=1e-3)
        assert sum(row.parts.values()) == pytest.approx(max(row.step_ms, row.busy_ms), abs=1e-3)
        assert row.utilisation is None
        assert row.peak_bytes is row.kept_bytes is None
        assert 0 < row.host_ms <= max(row.all_ms)
        assert (row.compiled, row.checkpointing) == ("no", "no")
    assert full.gradient_cosine == pytest.approx(1, abs=1e-12)  # its own gradients, in FP64
    assert 0.99 < paper.gradient_cosine < token.gradient_cosine < 1
    assert all(name.startswith("aten::_scaled_dot_product") for name in full.attention_kernels)
    assert set(token.attention_kernels) == {"SageAttention", "SageAttentionBackward"}
    assert "aten::mm" in token.other_kernels
    assert not set(token.other_kernels) & set(token.attention_kernels)


def test_model_flops_are_those_counted_by_hand():
    (row,) = measure("sdpa")
    a_layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96
    weights = 2 * a_layer + 40 * 64
    pairs = 32 * 33 // 2
    assert row.flops_per_step == 6 * weights * 2 * 32 + 3 * 4 * 2 * 2 * 32 * pairs * 2


@pytest.mark.rounding
def test_a_wrong_attention_prints_no_figure(monkeypatch):
    monkeypatch.setattr(bench, "FLOOR", 0.999999)
    full, wrong = measure("sdpa", "paper")
    assert (full.gate, wrong.gate) == ("ok", "FAILED")
    assert wrong.step_ms is wrong.speedup is wrong.attention_ms is None
    assert wrong.all_ms == []


@pytest.mark.rounding
@pytest.mark.parametrize("compiled", ["no", "layers"])
def test_a_fused_choice_is_named_and_runs(monkeypatch, compiled):
    seen, real = [], fusion.attend
    monkeypatch.setattr(Layer, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    if compiled == "no":  # a list that grows would be compiled anew
        monkeypatch.setattr(fusion, "attend", lambda *given: seen.append(1) or real(*given))
    full, token, fused = measure("sdpa", "token", "token+fused@reference", compiled=compiled)
    assert (fused.attention, fused.recipe, fused.impl) == ("token+fused@reference", "token", "reference")
    assert full.gate == token.gate == fused.gate == "ok"
    assert fused.gradient_cosine == pytest.approx(token.gradient_cosine, abs=1e-2)
    assert bool(seen) == (compiled == "no")


def test_a_step_that_compiles_is_no_steps_time(monkeypatch):
    counts = iter((1, 2))
    monkeypatch.setattr(bench, "_compilations", lambda: next(counts))
    with pytest.raises(RuntimeError, match="raise warmup=1"):
        measure("sdpa")


def test_two_processes_count_the_tokens_of_both(tmp_path):
    config = tmp_path / "tiny.yaml"
    config.write_text("model: {layers: 1, width: 32, heads: 1, mlp_width: 32}\n", encoding="utf-8")
    arguments = (
        f"bench-training --config {config} --device cpu --no-compile --batch 2 --context 16 --steps 3 --warmup 1 "
        f"--vocabulary 20 --output {tmp_path} --commit abc"
    )
    finish(command(arguments.split(), 2, tmp_path / "printed"))
    printed = (tmp_path / "printed").read_text(encoding="utf-8")
    assert printed.count("wrote ") == 1
    assert "on each of 2 processes" in printed
    (path,) = tmp_path.glob("training_2-processes_cpu_*_abc.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["attention"], row["processes"], row["gate"]) for row in rows] == [
        ("sdpa", 2, "ok"), ("token@reference", 2, "ok"),
    ]  # fmt: skip
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(2 * 2 * 16 / row["step_ms"] * 1e3)


@pytest.fixture
def graphs(monkeypatch):
    """What Inductor is asked for of each graph, which it divides and then runs as it is.

    Its C++ takes half a minute a test: in `make test-all` `test_a_layer_is_compiled_once_for_all` has it.
    """
    asked = []

    def run(graph, inputs, config_patches=None, **_):
        asked.append(config_patches or {})
        return aot_eager_decomp_partition(graph, inputs)

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", run)
    return asked


@pytest.mark.parametrize("code", ["graphs", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_layer_is_compiled_once_for_all(code, request):
    if code == "graphs":
        request.getfixturevalue("graphs")
    torch._dynamo.utils.counters.clear()
    rows = measure("sdpa", "token", compiled="layers")
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2 + 1  # a layer's with each attention, the loss
    assert not counters["graph_break"]
    assert [(row.gate, row.compiled) for row in rows] == [("ok", "layers"), ("ok", "layers")]
    with pytest.raises(ValueError, match="accepted: model, layers, reduce-overhead, no"):
        measure("sdpa", compiled="all")


def test_a_whole_model_for_cuda_graphs_is_one_graph(graphs):
    torch._dynamo.utils.counters.clear()
    (row,) = measure("token", compiled="reduce-overhead")
    (asked,) = graphs
    assert asked["triton.cudagraphs"]
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert row.compiled == "reduce-overhead"
    assert 0 < row.host_ms <= max(row.all_ms)


@pytest.mark.parametrize("compiled", ["layers", "no"])
def test_checkpointing_with_and_without_attention(compiled, monkeypatch, graphs):
    torch._dynamo.utils.counters.clear()
    seen, real = [], Plan.forward
    monkeypatch.setattr(Plan, "forward", lambda *arguments: (seen.append(1), real(*arguments))[1])
    forwards = {}
    for kept in (False, True):
        seen.clear()
        config = TINY.replace({"optimisation.gradient_checkpointing": True, "optimisation.keep_attention": kept})
        (row,) = bench.measure(
            config, [bench.Choice.parse("token", "cpu")], batch=2, vocabulary=40, device="cpu", steps=1, warmup=1,
            compiled=compiled,
        )  # fmt: skip
        assert row.step_ms > 0
        assert row.checkpointing == ("but attention" if kept else "layers")
        forwards[kept] = len(seen)
    assert forwards[False] == 2 * forwards[True] == 2 * 2 * (1 + 1 + 1 + bench.PROFILED_STEPS)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 * 2 if compiled == "layers" else 0)
    assert len(graphs) == (2 * 2 if compiled == "layers" else 0)
