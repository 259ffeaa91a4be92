"""What torch's counter of operations counts of a call: as much as of torch's own attention."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from sagebwd import sage_attention, sage_attention_varlen

OPERATORS = torch.ops.sagebwd.attention, torch.ops.sagebwd.attention_backward


@pytest.fixture(autouse=True)
def nothing_was_counted_before(monkeypatch):
    for operator in OPERATORS:
        monkeypatch.delitem(flop_counter.flop_registry, operator, raising=False)


def counted(call, mode=None):
    """What one forward and backward counts of each operator."""
    with mode or FlopCounterMode(display=False) as found:
        call().sum().backward()
    return tuple(found.get_flop_counts()["Global"].get(operator, 0) for operator in OPERATORS)


def expected(q, k, v):
    return sdpa_flop_count(q, k, v), sdpa_backward_flop_count((*q[:-1], v[-1]), q, k, v)


def leaves(*shapes):
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("recipe", ["full", "token", "auto"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (1, 0)}, {"sinks": torch.zeros(4)}], ids=str)
def test_a_call_counts_as_torchs_own_attention(recipe, options):
    """Regression: 0."""
    impl = {"impl": "reference"} if recipe == "auto" else {}  # nobody hands that over
    shapes = (2, 4, 7, 8), (2, 2, 5, 8), (2, 2, 5, 16)
    q, k, v = leaves(*shapes)
    call = lambda: sage_attention(q, k, v, enable_gqa=True, recipe=recipe, **impl, **options)  # noqa: E731
    for _ in range(2):
        assert counted(call) == expected(*shapes)


def test_a_counter_that_was_made_before_counts_too():
    shape = 1, 2, 4, 8
    (x,) = leaves(shape)
    mode = FlopCounterMode(display=False)
    assert not set(OPERATORS) & set(mode.flop_registry)
    assert counted(lambda: sage_attention(x, x, x, recipe="token"), mode) == expected(shape, shape, shape)


def test_a_formula_of_the_users_own_counts():
    (x,) = leaves((1, 2, 4, 8))
    mapping = {OPERATORS[0]: lambda *given, out_shape=None, **options: 7}
    mode = FlopCounterMode(display=False, custom_mapping=mapping)
    assert counted(lambda: sage_attention(x, x, x, recipe="token"), mode)[0] == 7


def test_packed_sequences_count_each_its_own():
    lengths, kv_lengths = (3, 0, 5), (4, 2, 5)
    offsets, kv_offsets = (torch.tensor([0, *x]).cumsum(0).int() for x in (lengths, kv_lengths))
    q, k, v = leaves((8, 4, 8), (11, 2, 8), (11, 2, 16))
    found = counted(lambda: sage_attention_varlen(q, k, v, offsets, kv_offsets, 5, 5, is_causal=True))
    each = [expected((1, 4, n, 8), (1, 2, m, 8), (1, 2, m, 16)) for n, m in zip(lengths, kv_lengths)]
    assert found == tuple(map(sum, zip(*each)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("way", ["compiled", "recomputed", "recomputed reentrant"])
def test_compiled_and_checkpointed_calls_count_what_runs(way, packed):
    """Checkpointing runs forward twice."""
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    tensors = leaves(*[(8, 2, 8) if packed else (1, 2, 8, 8)] * 3)

    def attend(*tensors):
        if packed:
            return sage_attention_varlen(*tensors, offsets, offsets, 5, 5, is_causal=True, recipe="token")
        return sage_attention(*tensors, is_causal=True, recipe="token")

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager")

    def call():
        if way == "compiled":
            return compiled(*tensors)
        return checkpoint(attend, *tensors, use_reentrant=way.endswith("reentrant"))

    shapes = [(1, 2, n, 8) for n in ((3, 5) if packed else (8,))]
    forward, backward = map(sum, zip(*(expected(x, x, x) for x in shapes)))
    for _ in range(2):
        assert counted(call) == (forward * (1 if way == "compiled" else 2), backward)


def test_tensors_without_values_count_their_longest():
    with FakeTensorMode():
        q = torch.randn(8, 4, 8, requires_grad=True)
        offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
        found = counted(lambda: sage_attention_varlen(q, q, q, offsets, offsets, 5, 5))
    each = expected(*((1, 4, 5, 8),) * 3)
    assert found == tuple(2 * x for x in each)
