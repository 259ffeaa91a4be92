"""The benchmark of norm, rotary embedding and attention together, on a CPU at small shapes."""

import json

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import block as bench
from benchmarks.shapes import Shape
from sagebwd import qk_norm_rope_attention
from tests.commands import runner

pytestmark = pytest.mark.rounding
SHAPE = Shape(16, 4, 2, 2, 48, True)


def test_every_block_is_the_composition_and_each_is_timed_in_both_directions():
    rows = bench.measure_shape(SHAPE, "full", "cpu", rounds=1)
    assert {row.gate for row in rows} == {"ok"}
    named = [(row.part, row.name) for row in rows]
    expected = [(bench.BLOCK, name) for name in (bench.FUSED, bench.COMPOSED, "sdpa")]
    expected += [(bench.PASS, name) for name in (bench.FUSED, bench.COMPILED)]
    assert named == expected * 2
    assert [row.direction for row in rows] == [way for way in bench.DIRECTIONS for _ in expected]
    assert all(row.ms > 0 for row in rows)
    assert set(rows[0].over) == {bench.COMPOSED, "sdpa"}
    # BF16 rounds a product to 2^-9 of itself
    assert all(error < 0.02 for row in rows for error in row.errors.values())


def test_what_is_wrong_has_no_time(monkeypatch):
    def unrotated(q, k, v, **given):
        given["cos"], given["sin"] = torch.ones_like(given["cos"]), torch.zeros_like(given["sin"])
        return qk_norm_rope_attention(q, k, v, **given)

    monkeypatch.setattr(bench, "qk_norm_rope_attention", unrotated)
    wrong = bench.measure_shape(SHAPE, "full", "cpu", rounds=1)[0]
    assert (wrong.name, wrong.ms, wrong.over) == (bench.FUSED, None, {})
    assert "dq" in wrong.gate


def test_the_command_prints_and_writes(monkeypatch, capsys, tmp_path):
    run = runner(cli.main, monkeypatch, capsys)
    options = "--device", "cpu", "--recipe", "token", "--rounds", 1, "--tokens", 32, "--head-dim", 64
    code, out, err = run("block", *options, "--no-grouped", "--output", tmp_path, "--commit", "abc")
    assert code == 0, err
    assert "D64 H32 B1 N32 causal" in out
    (path,) = tmp_path.glob("block_cpu_*_abc.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["recipe"] for row in rows[:3]] == ["token", "token", None]
    assert len(rows) == 10
    code, out, err = run("block", *options, "--output", tmp_path, "--seconds", 0, "--commit", "abc")
    assert code == 2
    assert "no time for 2 of 2, from D64 H32 B1 N32 causal on" in out
    assert "--seconds 0: no shape was timed" in err
