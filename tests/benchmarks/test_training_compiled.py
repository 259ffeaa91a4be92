"""Steps with compiled layers, apart from what runs without AVX: torch's C++ compiler takes it for granted."""

import pytest
import torch
import torch._inductor.compile_fx
from torch._dynamo.backends.debugging import aot_eager_decomp_partition

from sagebwd import dispatch
from sagebwd.benchmarks import training as bench
from tests.benchmarks.test_training import TINY, measure


def test_a_layer_is_compiled_once_for_all():
    torch._dynamo.utils.counters.clear()
    rows = measure("sdpa", "token", compiled="layers")
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2 + 1  # a layer's with each attention, the loss
    assert not counters["graph_break"]
    assert [(row.gate, row.compiled) for row in rows] == [("ok", "layers"), ("ok", "layers")]
    with pytest.raises(ValueError, match="accepted: model, layers, reduce-overhead, no"):
        measure("sdpa", compiled="all")


@pytest.fixture
def graphs(monkeypatch):
    """What Inductor is asked for of each graph, which it divides and then runs as it is.

    Its C++ takes half a minute a test: `test_a_layer_is_compiled_once_for_all` has it.
    """
    asked = []

    def run(graph, inputs, config_patches=None, **_):
        asked.append(config_patches or {})
        return aot_eager_decomp_partition(graph, inputs)

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", run)
    return asked


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
    seen, real = [], dispatch.forward
    monkeypatch.setattr(dispatch, "forward", lambda *arguments: (seen.append(1), real(*arguments))[1])
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
