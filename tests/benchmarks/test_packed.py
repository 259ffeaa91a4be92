"""Packed documents of the benchmark, on a CPU at small shapes: what is timed, counted, gated and written."""

import pytest
import torch

from benchmarks import attention as bench
from benchmarks import baselines, packed_skew
from benchmarks.correctness import emulated, gate, wrong_tensors
from benchmarks.packed import Packed
from benchmarks.shapes import Shape, flops
from sagebwd import Recipe
from tests.scaled import scaled

pytestmark = pytest.mark.rounding

SHAPE = Packed.of(16, 4, 2, (37, 100, 5, 64))
TOKEN = Recipe.named("token")


def token(q, k, v, shape=SHAPE):
    return bench.attention_of(shape, TOKEN, "reference", "cpu")(q, k, v)


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


def test_auto_is_held_to_what_it_runs(monkeypatch):
    """On a CPU the reference runs packed calls, torch dense ones, both in full precision."""
    dense = Shape(16, 2, 2, 1, 40, True)
    for shape, impl in ((SHAPE, "reference"), (dense, "torch")):
        rows = bench.measure_shape(shape, ["auto"], None, "cpu", rounds=1)
        assert {(row.impl, row.gate) for row in rows if row.recipe == "auto"} == {(impl, "ok")}
    right = bench.sage_attention
    monkeypatch.setattr(
        bench, "sage_attention",
        lambda *call, **settings: scaled(lambda *x: right(*x, **settings), dk=1.3)(*call),
    )  # fmt: skip
    rows = bench.measure_shape(dense, ["auto"], None, "cpu", rounds=1)
    assert {(row.impl, row.gate) for row in rows if row.recipe == "auto"} == {("torch", "FAILED")}


def test_peaks_of_skewed_documents_are_beside_flash_attention_4_s(monkeypatch):
    peaks = iter((2.5 * 2**20, 2 * 2**20))
    monkeypatch.setattr(packed_skew, "memory", lambda *_: (next(peaks), 0))
    monkeypatch.setattr(packed_skew, "candidates", lambda *_: {"fa4": baselines.candidates(SHAPE, "cpu")["sdpa"]})
    monkeypatch.setattr(packed_skew, "cases", lambda device: {"one": SHAPE})
    (row,) = packed_skew.measure(TOKEN, "reference", "cpu", ["one"])
    assert (row.peak_mib, row.fa4_peak_mib, row.over, row.gate) == (2.5, 2.0, 1.25, "ok")
    assert (row.tokens, row.documents, row.longest, row.bound) == (206, 4, 100, 100)


def test_of_many_sequences_a_code_that_rounds_the_other_way_is_no_fault():
    """Its error is held to the largest of sequences of about its length; a whole one that is wrong is a fault."""
    shape = Packed.of(16, 1, 1, [40] * 24)
    inputs, recipe = shape.inputs("cpu", torch.bfloat16), Recipe.named("token")
    low, high = (emulated(shape, recipe, inputs, dtype) for dtype in (torch.bfloat16, torch.float64))
    errors = [(low[2] - high[2])[..., one, :].abs().max().item() for one in shape.sequences()]
    least = errors.index(min(errors))
    assert max(errors) > 1.5 * min(errors)

    def attention(by):
        o, *gradients = (x[0].transpose(0, 1).to(torch.bfloat16) for x in high)
        row, value = shape.sequences()[least].start, gradients[1].abs().max()
        gradients[1][row, 0, 0] += by(value)

        class Given(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *tensors):
                return o.clone()

            @staticmethod
            def backward(ctx, do):
                return tuple(gradients)

        return Given.apply

    eps = torch.finfo(torch.bfloat16).eps
    own = 2 * (min(errors) + eps * high[2][..., shape.sequences()[least], :].abs().max().item())
    assert gate(shape, attention(lambda value: 0 * value), recipe, inputs) == "ok"
    assert gate(shape, attention(lambda value: 0 * value + (own + 2 * max(errors)) / 2), recipe, inputs) == "ok"
    assert gate(shape, attention(lambda value: value), recipe, inputs) == "FAILED"
