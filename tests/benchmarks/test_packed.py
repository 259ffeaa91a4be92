"""Packed documents of the benchmark, on a CPU at small shapes: what is timed, counted, gated and written."""

import json
import sys
import types

import pytest
import torch

from benchmarks import attention as bench
from benchmarks import baselines
from benchmarks.correctness import emulated, gate, wrong_tensors
from benchmarks.packed import Packed
from benchmarks.shapes import flops
from sagebwd import Recipe, sage_attention_varlen
from sagebwd.cli import results
from tests.scaled import scaled

pytestmark = pytest.mark.rounding

SHAPE = Packed.of(16, 4, 2, (37, 100, 5, 64))
TOKEN = Recipe.named("token")


def token(q, k, v, shape=SHAPE):
    return bench._ours(shape, TOKEN, "reference", "cpu")(q, k, v)


def wrong_in(sequence, attention, shape=SHAPE, **factors):
    """An attention that is wrong by such factors in one sequence alone."""
    tokens = shape.sequences()[sequence]

    def wrong(*tensors):
        right, other = attention(*tensors), scaled(attention, **factors)(*tensors)
        inside = torch.zeros(shape.tokens, 1, 1, dtype=torch.bool)
        inside[tokens] = True
        return torch.where(inside, other, right)  # what is wrong of a gradient comes through these rows alone

    return wrong


def test_tensors_and_operations():
    shape = Packed.of(24, 4, 2, (3, 8), value_dim=16)
    q, k, v, do = shape.inputs("cpu", torch.bfloat16)
    assert [tuple(x.shape) for x in (q, k, v, do)] == [(11, 4, 24), (11, 2, 24), (11, 2, 16), (11, 4, 16)]
    assert all(x.is_contiguous() for x in (q, k, v, do))
    assert shape.offsets("cpu").tolist() == [0, 3, 11]
    assert shape.longest == 8
    assert shape.last_key_head(q).equal(q[:, 2:].transpose(0, 1)[None])
    assert shape.last_key_head(v).equal(v[:, 1:].transpose(0, 1)[None])
    for direction in bench.DIRECTIONS:
        each = [flops(1, 4, n, n, 24, value_dim=16, is_causal=True, direction=direction) for n in (3, 8)]
        assert shape.flops(direction) == sum(each)


@pytest.mark.parametrize("sequence", range(len(SHAPE.lengths)))
@pytest.mark.parametrize("factors", [{"o": 1.2}, {"dq": 1.3}, {"dk": 1.3}, {"dv": 1.3}], ids=lambda x: next(iter(x)))
def test_the_gate_sees_what_is_wrong_in_any_sequence(sequence, factors):
    inputs = SHAPE.inputs("cpu", torch.bfloat16)
    assert gate(SHAPE, wrong_in(sequence, token, **factors), TOKEN, inputs) == "FAILED"


def test_the_gate_passes_what_is_right_and_no_attention_across_sequences():
    inputs = SHAPE.inputs("cpu", torch.bfloat16)
    assert gate(SHAPE, token, TOKEN, inputs) == "ok"
    across = Packed.of(16, 4, 2, (SHAPE.tokens,))
    assert gate(SHAPE, lambda q, k, v: token(q, k, v, across), TOKEN, inputs) == "FAILED"
    shifted = Packed.of(16, 4, 2, (37, 99, 6, 64))
    assert gate(SHAPE, lambda q, k, v: token(q, k, v, shifted), TOKEN, inputs) == "FAILED"


@pytest.mark.parametrize("sequence", range(len(SHAPE.lengths)))
def test_a_peer_that_is_wrong_in_one_sequence_is_wrong(sequence):
    inputs = SHAPE.inputs("cpu", torch.bfloat16)
    exact = emulated(SHAPE, Recipe.named("full"), inputs, torch.float64)
    (sdpa,) = baselines.available(SHAPE, "cpu").values()
    assert wrong_tensors(SHAPE, sdpa, exact, inputs) == {}
    for name in ("dq", "dk", "dv"):
        assert set(wrong_tensors(SHAPE, wrong_in(sequence, sdpa, **{name: 4.0}), exact, inputs)) == {name}
    assert "o" in wrong_tensors(SHAPE, wrong_in(sequence, sdpa, o=4.0), exact, inputs)


def test_rows_of_packed_documents(tmp_path):
    rows = bench.measure_shape(SHAPE, ["token", "mixed"], ["reference"], "cpu", rounds=1, deterministic=True)
    assert {(row.impl, row.recipe) for row in rows} == {
        ("reference", "token"), ("reference", "mixed"), ("reference", "mixed (deterministic)"), ("sdpa", "bf16"),
    }  # fmt: skip
    assert {(row.gate, row.peer, row.fa2_ms, row.cudnn_ms) for row in rows} == {("ok", "sdpa", None, None)}
    for row in rows:
        assert (row.batch, row.tokens, row.lengths, row.causal) == (1, 206, [37, 100, 5, 64], True)
        assert row.tflops == pytest.approx(SHAPE.flops(row.direction) / row.ms * 1e-9)
    path = results.save(rows, results.environment("cpu", commit="abc"), tmp_path, "packed")
    assert path.name.startswith("packed_cpu_")
    read = json.loads(path.read_text())["rows"]
    assert [bench.Measurement(**row) for row in read] == rows
    assert str([37, 100, 5, 64]) in bench.save_csv(rows, path).read_text()


def test_a_wrong_kernel_has_no_figure(monkeypatch):
    def wrong(q, k, v, *call, **settings):
        return wrong_in(1, lambda q, k, v: sage_attention_varlen(q, k, v, *call, **settings), dk=1.3)(q, k, v)

    monkeypatch.setattr(bench, "sage_attention_varlen", wrong)
    rows = bench.measure_shape(SHAPE, ["token"], ["reference"], "cpu", rounds=1)
    assert {(row.gate, row.ms, row.speedup) for row in rows if row.recipe == "token"} == {("FAILED", None, None)}


def test_shapes_of_as_many_tokens_are_told_apart():
    rows = []
    for lengths in ((30, 34), (32, 32)):
        shape = Packed.of(16, 2, 2, lengths)
        rows += bench.measure_shape(shape, ["mixed"], ["reference"], "cpu", rounds=1, deterministic=True)
    ms = {(row.recipe, *row.lengths): row.ms for row in rows if row.direction == "fwd"}
    ratios = [
        ms["mixed (deterministic)", *lengths] / ms["mixed", *lengths] for lengths in ((30, 34), (32, 32))
    ]  # fmt: skip
    cost = bench.deterministic_cost(rows, "reference", "mixed", "fwd")
    assert cost == pytest.approx((ratios[0] * ratios[1]) ** 0.5)


def test_what_the_peers_of_a_gpu_are_called_with(monkeypatch):
    """Of FlashAttention-4 and -3 and of torch the arguments that their own signatures name."""
    seen = {}
    cute, interface = types.ModuleType("flash_attn.cute"), types.ModuleType("flash_attn_interface")
    cute.flash_attn_varlen_func = lambda q, k, v, **settings: (seen.update(settings) or q, None)
    interface.flash_attn_varlen_func = lambda q, k, v, **settings: seen.update(settings) or q
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", interface)
    monkeypatch.setattr(Packed, "offsets", lambda self, device: torch.tensor([0, 37, 137, 142, 206]).int())
    found = baselines.candidates(SHAPE, "cuda")
    assert set(found) == {"varlen", "fa4", "fa3"}
    q, k, v, _ = SHAPE.inputs("cpu", torch.bfloat16)
    for peer in ("fa4", "fa3"):
        assert found[peer](q, k, v) is q
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            assert seen.pop(name).tolist() == [0, 37, 137, 142, 206]
        assert seen == {"max_seqlen_q": 100, "max_seqlen_k": 100, "causal": True}
        seen.clear()

    def varlen_attn(*call, **settings):
        seen.update(call=call, settings=settings)
        return call[0]

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    found["varlen"](q, k, v)
    assert [x.tolist() for x in seen["call"][3:5]] == 2 * [[0, 37, 137, 142, 206]]
    assert seen["call"][5:] == (100, 100)
    assert seen["settings"] == {"scale": 0.25, "window_size": (-1, 0), "enable_gqa": True}
