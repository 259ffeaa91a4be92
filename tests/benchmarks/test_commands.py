"""`python -m benchmarks` as a person runs it: what it prints and writes, and what it says where something is wrong."""

import json
import statistics

import pytest

from benchmarks import __main__ as cli
from tests.commands import runner


@pytest.fixture
def command(monkeypatch, capsys):
    return runner(cli.main, monkeypatch, capsys)


def test_bench_on_a_cpu(command, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.shapes.TOTAL_TOKENS", 32)
    code, out, _ = command(
        "attention", "--device", "cpu", "--impl", "reference", "--head-dim", 64, "--tokens", 32, "--recipe", "token",
        "--recipe", "mixed", "--deterministic", "--no-special", "--rounds", 1, "--output", tmp_path,
        "--commit", "abc",
    )  # fmt: skip
    assert code == 0
    assert "reference token" in out
    assert "over the best baseline" in out
    assert "mixed (reference), time of the deterministic mode: fwd" in out
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".csv", ".png"}
    (path,) = tmp_path.glob("*.json")
    rows = [row for row in json.loads(path.read_text())["rows"] if row["recipe"] == "token"]
    means = {
        way: statistics.geometric_mean(row["speedup"] for row in rows if row["direction"] == way)
        for way in ("fwd", "bwd", "fwd+bwd")
    }
    line = ", ".join(f"{way} {mean:.2f}x" + (" (slower)" if mean < 1 else "") for way, mean in means.items())
    assert f"over the best baseline: {line}" in out


def test_bursts_of_nvidias_shapes_have_a_file_of_their_own(command, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.timer.BURSTS", 1)
    code, out, _ = command(
        "attention", "--device", "cpu", "--nvidia", "--bursts", "--tokens", 16, "--recipe", "token", "--rounds", 1,
        "--output", tmp_path, "--commit", "abc",
    )  # fmt: skip
    assert code == 0
    assert "D128 H64/8 B2 N16 causal" in out
    (path,) = tmp_path.glob("*.json")
    assert path.name.startswith("attention-bursts_cpu_")


def test_runs_of_other_documents_write_one_file(command, tmp_path, monkeypatch):
    """By `mixed` and `auto` unless recipes are named."""
    monkeypatch.setattr("benchmarks.packed.MODEL_WIDTH", 64)
    call = "attention", "--packed", "--device", "cpu", "--rounds", 1, "--head-dim", 64, "--output", tmp_path
    for documents in ("8x2k", "sft", "8x2k"):
        code, out, _ = command(*call, "--documents", documents, "--commit", "abc")
        assert code == 0
        assert "reference auto" in out
    (path,) = tmp_path.glob("packed_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [len(rows), len({str(row["lengths"]) for row in rows})] == [18, 2]
    assert {row["recipe"] for row in rows} == {"mixed", "auto", "bf16"}
    assert len(path.with_suffix(".csv").read_text().splitlines()) == 19


def test_peaks_of_skewed_documents(command, tmp_path):
    for case in ("3000 of 8", "sft"):
        code, out, _ = command(
            "packed-skew", "--device", "cpu", "--case", case, "--output", tmp_path, "--commit", "abc"
        )
        assert code == 0
        assert case in out
    (path,) = tmp_path.glob("packed-skew_*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["case"], row["gate"], row["fa4_peak_mib"]) for row in rows] == [
        ("3000 of 8", "ok", None), ("sft", "ok", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("attention", "--device", "cpu", "--tokens", 0), "tokens=0 must be at least 1"),
        (("masks", "--device", "cpu", "--output", __file__), "test_commands.py is no folder; give another"),
        (("block", "--device", "cpu", "--head-dim", 7), "head_dim=7 is not of this benchmark; accepted: even numbers"),
        (("masks", "--device", "cpu", "--mask", "none"), "mask='none' is not known; accepted: teacher-forcing"),
        (("attention", "--device", "tpu"), "device='tpu' is not known"),
        (("attention", "--device", "cpu", "--documents", "sft"), "--documents names lengths of --packed"),
        (("packed-skew", "--device", "cpu", "--case", "long"), "case='long' is not known; accepted: one of 32768"),
        (("attention", "--device", "cpu", "--packed", "--special"), "none of --tokens, --special, --peer and"),
        (("attention", "--device", "cpu", "--nvidia", "--special"), "neither --head-dim nor --special"),
        (("attention", "--device", "cpu", "--head-dim", "100"), "head_dim=100 is not of the grid; accepted: 64, 72,"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, arguments, message):
    code, _, err = command(*arguments)
    assert code == 2
    assert message in err
