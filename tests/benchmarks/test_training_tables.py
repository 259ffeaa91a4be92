"""The page's tables of training steps, of rows that are made up."""

import json
from dataclasses import asdict

import pytest

from sagebwd.benchmarks import plot
from sagebwd.benchmarks import training_tables as tables
from sagebwd.benchmarks.results import save
from sagebwd.benchmarks.training import Step
from tests.benchmarks.test_training import PARTS, TINY

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
    ]  # fmt: skip
    path = save(rows, FACTS | {"model": asdict(TINY.model)}, tmp_path, "training")
    lines = tables.markdown([path]).splitlines()
    assert "1M weights, layers compiled." in lines
    assert "1M weights, layers compiled, checkpointed but for attention." in lines
    assert "| 32 | 2 | `mixed` | 16.0 | 15.0 to 18.0 | 8.0 | 4,000 | 1.250 (cudnn) |" in lines
    assert "| 32 | `mixed` | 5.0 | 1.0 | 2.0 | 9.0 | 0.5 |" in lines
    assert (
        f"| 32 | `mixed` | 1.00 | {0.75 * STATE / 2**20:.0f} | 0.750 | 3.00 |" in lines
    )  # a quarter less in 2 layers
    assert "| 32 | `mixed` | 1.00 | 3.00 |" in lines  # of layers computed again, whose attention keeps nothing
    assert "FAILED: fa4 at 32 tokens" in lines
    steps = [line for line in lines if line.startswith(("| 32 | 2 |", "| 64 | 2 |"))]
    assert [line.split("|")[1] for line in steps] == [" 32 ", " 32 ", " 64 ", " 32 ", " 32 "]
    pytest.importorskip("matplotlib")
    assert plot.plot_steps([path], tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_another_benchmarks_file_is_refused(tmp_path):
    path = tmp_path / "attention.json"
    path.write_text(json.dumps(FACTS | {"rows": [{"ms": 1.0}]}), encoding="utf-8")
    with pytest.raises(ValueError, match="expected rows of `sagebwd bench-training`"):
        tables.markdown([path])
