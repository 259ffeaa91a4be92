"""python -m lab bench-training: what is timed, compiled too, and its tables."""

import json
import sys
from dataclasses import asdict
from functools import partial, partialmethod

import pytest
import torch
import torch._inductor.compile_fx
from functorch.compile import nop
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch.profiler import ProfilerActivity, profile

from benchmarks import breakdown, plot
from lab import __main__ as cli
from lab.steps import tables as tables
from lab.steps import timing as bench
from lab.steps.runner import Layer
from lab.steps.timing import Step
from lab.training.config import FULL_PRECISION, Config
from lab.training.model import build
from sagebwd.cli.results import save
from sagebwd.integrations import transformers_fusion as fusion
from sagebwd.planning.plan import Plan
from tests.lab.training.runs import command, finish

TINY = Config("tiny").replace(
    {"model.layers": 2, "model.width": 64, "model.mlp_width": 96, "data.context": 32, "model.kv_heads": 1}
)
PARTS = {"attention": 5.0, "passes": 1.0, "copies": 2.0, "other": 9.0, "idle": 0.5}


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
def test_without_a_mask_pairs_and_flops_are_all_of_them():
    causal, whole = (measure("sdpa", "token", is_causal=is_causal) for is_causal in (True, False))
    pairs = 32 * 32 - 32 * 33 // 2
    assert whole[0].flops_per_step - causal[0].flops_per_step == 3 * 4 * 2 * 2 * 32 * pairs * 2
    assert [row.gate for row in whole] == ["ok", "ok"]
    assert 0.99 < whole[1].gradient_cosine < 1
    model = build(TINY, 40)
    model.config.is_causal = False
    ids, losses = torch.arange(32)[None], {}
    for name in ("sdpa", "token"):
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
        with bench.Choice.parse(name, "cpu").applied(model), torch.no_grad():
            losses[name] = model(input_ids=ids).logits
    changed = ids.clone()
    changed[0, -1] = 7
    with bench.Choice.parse("token", "cpu").applied(model), torch.no_grad():
        assert not torch.equal(model(input_ids=changed).logits[0, 0], losses["token"][0, 0])
    assert (losses["token"] - losses["sdpa"]).norm() < 0.05 * losses["sdpa"].norm()


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


def test_what_stands_behind_a_recipe_is_known():
    chosen = bench.Choice.parse("token(dq=16bit)+fused", "cpu")
    assert (chosen.name, chosen.fuse) == ("token(dq=16bit)+fused@reference", True)
    with pytest.raises(ValueError, match="fuse"):
        bench.Choice.parse("token+fuse", "cpu")


def test_a_step_that_compiles_is_no_steps_time(monkeypatch):
    counts = iter((1, 2))
    monkeypatch.setattr(bench, "_compilations", lambda: next(counts))
    with pytest.raises(RuntimeError, match="raise warmup=1"):
        measure("sdpa")


@pytest.mark.rounding
def test_without_full_precision_nothing_is_checked_or_compared():
    (row,) = measure("token")
    assert row.gate == "not checked"
    assert row.peer is row.speedup is row.gradient_cosine is None
    assert row.step_ms > 0


@pytest.mark.rounding
def test_the_attention_that_is_asked_for_runs():
    model = build(TINY, 40)
    ids = torch.arange(32)[None]
    losses = {}
    for name in ("sdpa", "flash", "token", "paper"):
        with bench.Choice.parse(name, "cpu").applied(model), torch.no_grad():
            losses[name] = model(input_ids=ids, labels=ids).loss.item()
    assert losses["sdpa"] == losses["flash"]
    assert len(set(losses.values())) == 3


def test_the_backend_that_is_asked_for_is_compiled(monkeypatch):
    """And without a mask in full, which FlashAttention would refuse on a GPU."""
    monkeypatch.setitem(FULL_PRECISION, "cudnn", "MATH")  # two backends that CPUs have
    model = build(TINY, 40)
    ids = torch.arange(32)[None]
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_autograd(fw_compiler=nop, bw_compiler=nop)(graph, inputs)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        for name, runs in (("flash", True), ("cudnn", False)):
            with bench.Choice.parse(name, "cpu").applied(model), profile(activities=[ProfilerActivity.CPU]) as seen:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = compiled(input_ids=ids, labels=ids).loss
                loss.backward()
            names = {event.name for event in seen.events()}
            assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in names) == runs
            assert ("aten::_scaled_dot_product_flash_attention_for_cpu_backward" in names) == runs
    assert len(graphs) == 2  # one each: nothing is compiled again in the second round
    calls = [node for graph in graphs for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert len(calls) == 2 * TINY.model.layers
    assert all(node.kwargs["is_causal"] is True and node.kwargs.get("attn_mask") is None for node in calls)


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


def test_the_command_writes_what_it_measured(monkeypatch, capsys, tmp_path):
    config = tmp_path / "tiny.yaml"
    config.write_text("model: {layers: 1, width: 32, heads: 1, mlp_width: 32}\n", encoding="utf-8")
    arguments = (
        f"bench-training --config {config} --device cpu --no-compile --batch 1 --context 16 --context 32 --steps 1 "
        f"--warmup 1 --vocabulary 20 --output {tmp_path} --commit abc"
    )
    monkeypatch.setattr(sys, "argv", ["sagebwd", *arguments.split()])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    printed = capsys.readouterr()
    assert "token@reference" in printed.out
    assert "where a step's time goes, ms" in printed.out
    assert "context 16, sdpa: first step\n" in printed.err  # no terminal: lines, at least a second apart
    (path,) = tmp_path.glob("training_cpu_*_abc.json")
    content = json.loads(path.read_text())
    assert [(row["attention"], row["context"]) for row in content["rows"]] == [
        ("sdpa", 16), ("token@reference", 16), ("sdpa", 32), ("token@reference", 32),
    ]  # fmt: skip
    assert content["model"]["layers"] == 1
    assert content["commit"] == "abc"


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


FACTS = {"gpu": "NVIDIA H200", "torch": "2", "triton": "3", "date": "2026-01-01", "commit": "abc"}


STATE = 2 * 32 * 2 * (8 * 32 + 4)
"""Bytes of Q, K, V, O and lse of one of `TINY`'s layers, of two sequences of 32 tokens."""


def step(attention, recipe, step_ms, kept_bytes, context=32, checkpointing="no", gate="ok", parts=PARTS):
    return Step(
        attention, recipe, recipe and "hopper", context, 2, 1, "layers", checkpointing, True, 1_000_000, 4, gate, 1.0,
        step_ms, step_ms and [step_ms, step_ms - 1, step_ms + 2], step_ms and step_ms / 2,
        step_ms and 2 * context / step_ms * 1e3, "cudnn",
        step_ms and 20.0 / step_ms, 3 << 30, kept_bytes, 6.0, 17.0, 0.35, parts, {}, {}, 1e12, 989.0, 0.4, 1.0,
    )  # fmt: skip


def test_a_page_from_a_result_file(tmp_path):
    rows = [
        step("cudnn", None, 20.0, 1 << 30, 64), step("mixed@hopper", "mixed", 16.0, (1 << 30) - STATE // 2),
        step("cudnn", None, 20.0, 1 << 30), step("fa4", None, None, None, gate="FAILED", parts={}),
        step("mixed@hopper", "mixed", 10.0, None, checkpointing="but attention"),
        step("mixed@hopper", "mixed", 12.0, 1 << 30, checkpointing="layers"),
        step("mixed+fused@hopper", "mixed", 15.0, 1 << 30),
    ]  # fmt: skip
    path = save(rows, FACTS | {"model": asdict(TINY.model)}, tmp_path, "training")
    lines = tables.markdown([path]).splitlines()
    assert "1M weights, layers compiled." in lines
    assert "1M weights, layers compiled, checkpointed but for attention." in lines
    assert "| 32 | 2 | `mixed` | 16.0 | 15.0 to 18.0 | 8.0 | 4,000 | 1.250 (cudnn) |" in lines
    assert "| 32 | 2 | `mixed+fused` | 15.0 | 14.0 to 17.0 | 7.5 | 4,267 | 1.333 (cudnn) |" in lines
    assert "| 32 | `mixed` | 5.0 | 1.0 | 2.0 | 9.0 | 0.5 |" in lines
    assert (
        f"| 32 | `mixed` | 1.00 | {0.75 * STATE / 2**20:.0f} | 0.750 | 3.00 |" in lines
    )  # a quarter less in 2 layers
    assert "| 32 | `mixed` | 1.00 | 3.00 |" in lines  # of layers computed again, whose attention keeps nothing
    assert "FAILED: fa4 at 32 tokens" in lines
    steps = [line for line in lines if line.startswith(("| 32 | 2 |", "| 64 | 2 |"))]
    assert [line.split("|")[1] for line in steps] == [" 32 ", " 32 ", " 32 ", " 64 ", " 32 ", " 32 "]
    pytest.importorskip("matplotlib")
    assert plot.plot_steps([path], tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
