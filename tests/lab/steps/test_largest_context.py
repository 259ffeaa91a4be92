"""The search for the longest sequence, with memory that ends where the test says."""

import itertools
import sys

import pytest
import torch

from lab import __main__ as cli
from lab.steps import largest_context as longest
from lab.steps import tables as tables
from lab.steps.largest_context import Trial, search
from lab.steps.registry import Choice
from lab.steps.runner import Runner
from tests.lab.steps.test_timing import TINY


def tried(limit, start, multiple, **memory):
    """Contexts, where ``limit`` tokens fit and a token takes 3 bytes."""
    found = search(lambda n: Trial(n, n <= limit, 100 + 3 * n if n <= limit else None), start, multiple, **memory)
    return [trial.context for trial in found]


def test_the_search_ends_beside_the_limit():
    limits = 0, 1, 4095, 4096, 4097, 33000, 98304, 131071, 500000
    memories = {}, {"before": 100, "capacity": 700000}, {"before": 100, "capacity": 50000}
    for limit, start, memory in itertools.product(limits, (4096, 30000, 131072), memories):
        contexts = tried(limit, start, 4096, **memory)
        low = max((n for n in contexts if n <= limit), default=0)
        high = min(n for n in contexts if n > limit)
        assert 0 < high - low <= 4096, (limit, start, memory)
        assert len(set(contexts)) == len(contexts) <= 128, (limit, start, memory)
        assert all(n % 4096 == 0 for n in contexts[1:]), (limit, start, memory)


def test_what_memory_says_takes_three_trials():
    assert tried(100000, 32768, 4096, before=100, capacity=100 + 3 * 100000) == [32768, 98304, 102400]
    assert tried(100000, 32768, 4096) == [32768, 65536, 131072, 98304, 114688, 106496, 102400]


def test_every_attention_trains_what_it_can(monkeypatch):
    step, limits = Runner.step, {"sdpa": 64, "sagebwd": 96}

    def limited(runner, ids):
        name = runner.model.config._attn_implementation.removeprefix("full-precision-")
        if ids.shape[1] > limits[name]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        step(runner, ids)

    monkeypatch.setattr(Runner, "step", limited)
    choices = [Choice.parse(name, "cpu") for name in ("sdpa", "token")]
    told = []
    rows = list(
        longest.measure(TINY, choices, vocabulary=40, device="cpu", compiled="no", multiple=16, progress=told.append)
    )
    assert [(row.attention, row.context, row.too_large) for row in rows] == [
        ("sdpa", 64, 80), ("token@reference", 96, 112),
    ]  # fmt: skip
    assert told[:2] == ["sdpa: 32 tokens", "sdpa: 32 tokens fit"]
    assert rows[0].trials[0] == Trial(32, True, None)
    text = "".join(str(list(column.cells)) for column in longest.table(rows).columns)
    assert "112" in text


def test_the_command_needs_a_gpu(monkeypatch, capsys, tmp_path):
    config = tmp_path / "tiny.yaml"
    config.write_text("model: {layers: 1, width: 32, heads: 1, mlp_width: 32}\n", encoding="utf-8")
    for arguments, message in (
        ("--largest-context", "needs one process, a GPU"),
        ("--by-layer --reduce-overhead", "expected one of --no-compile, --by-layer and --reduce-overhead"),
    ):
        monkeypatch.setattr(
            sys, "argv", ["sagebwd", "bench-training", "--config", str(config), "--device", "cpu", *arguments.split()]
        )
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split())
