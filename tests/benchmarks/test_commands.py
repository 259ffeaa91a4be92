"""`python -m benchmarks` as a person runs it: what it prints and writes, and what it says where something is wrong."""

import json
import re
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as cli
from benchmarks import attention, baselines, low_bit
from benchmarks.shapes import Shape, standard_grid
from sagebwd.cli.terminal import Progress
from tests.commands import runner, started
from tests.scaled import scaled


@pytest.fixture
def command(monkeypatch, capsys):
    return runner(cli.main, monkeypatch, capsys)


def test_help_lists_the_commands():
    outcome = started("benchmarks", "--help")
    assert outcome.returncode == 0
    assert all(name in outcome.stdout for name in ("attention", "masks"))


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


def test_bench_says_which_peer_is_wrong_and_what_it_does_not_claim(command, tmp_path, monkeypatch):
    (sdpa,) = baselines.available(Shape(64, 1, 1, 1, 32, False), "cpu").values()
    found = {"cudnn": scaled(sdpa, dq=2.06), "fa2": sdpa}
    monkeypatch.setattr(attention, "candidates", lambda shape, device: found)
    monkeypatch.setattr(baselines, "is_hopper", lambda device: True)
    monkeypatch.setattr("benchmarks.shapes.TOTAL_TOKENS", 32)
    code, out, _ = command(
        "attention", "--device", "cpu", "--head-dim", "192/128", "--tokens", 32, "--recipe", "token", "--no-special",
        "--rounds", 1, "--output", tmp_path, "--commit", "abc",
    )  # fmt: skip
    assert code == 0
    assert "D192/128 H16 B1 N32 causal" in out
    assert "cudnn does not count here, wrong: dq 1.0" in out
    assert "no claim over the best baseline: FlashAttention-4 is not installed" in out
    assert "over the best baseline: fwd" not in out
    assert "token (reference) over FlashAttention-2: fwd" in out
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".csv", ".png"}


def test_bench_beside_a_low_bit_peer(command, tmp_path, monkeypatch):
    def attention(*x, is_causal, gradients):
        sdpa = baselines.candidates(Shape(128, 1, 1, 1, 32, is_causal), "cpu")["sdpa"]
        return scaled(sdpa, o=1.03)(*x)

    package = SimpleNamespace(backend_version_string=lambda: "9.99.0", __version__="1.0")
    monkeypatch.setattr(low_bit.cudnn_fp8, "frontend", lambda: package)
    monkeypatch.setattr(low_bit.cudnn_fp8, "attention", attention)
    monkeypatch.setattr("benchmarks.shapes.TOTAL_TOKENS", 32)
    code, out, _ = command(
        "attention", "--device", "cpu", "--head-dim", 128, "--tokens", 32, "--recipe", "mixed", "--no-special",
        "--peer", "cudnn-fp8", "--rounds", 1, "--output", tmp_path, "--commit", "abc",
    )  # fmt: skip
    assert code == 0
    assert "cudnn-fp8 fp8" in out
    assert "mixed (reference) over cudnn-fp8: fwd" in out
    assert "cudnn-fp8's: o 0.0" in out
    assert "all shapes: mixed (reference) over cudnn-fp8" in out
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    assert (found["cudnn"], found["cudnn_frontend"]) == ("9.99.0", "1.0")
    assert {row["peer"] for row in found["rows"]} == {"sdpa"}
    assert {bool(row["errors"]) for row in found["rows"] if row["recipe"] == "fp8"} == {True}


def test_bench_of_packed_documents(command, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.packed.EQUAL", ((8, 8), (8,)))
    monkeypatch.setattr("benchmarks.packed.MIXED", (13, 5))
    code, out, _ = command(
        "attention", "--packed", "--device", "cpu", "--impl", "reference", "--head-dim", 128, "--recipe", "token",
        "--rounds", 1, "--output", tmp_path, "--commit", "abc",
    )  # fmt: skip
    assert code == 0
    assert "D128 H16/4 packed 2 of 5 to 13 causal" in out
    assert "token (reference) over the best baseline: fwd" in out
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".csv"}  # no grid, no plot
    (path,) = tmp_path.glob("packed_cpu_*_abc.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["lengths"] for row in rows[::6]] == [[8, 8], [8], [13, 5], [13, 5]]
    assert [row["kv_heads"] for row in rows[::6]] == [16, 16, 16, 4]


def test_a_bench_that_is_cut_off_has_what_it_measured(command, tmp_path, monkeypatch):
    measure, shapes = attention.measure_shape, []

    def cut_off(shape, *arguments, **options):
        shapes.append(shape)
        if len(shapes) == 2:
            raise ValueError("no more time")
        return measure(shape, *arguments, **options)

    monkeypatch.setattr("benchmarks.shapes.TOTAL_TOKENS", 32)
    monkeypatch.setattr(attention, "measure_shape", cut_off)
    code, _, err = command(
        "attention", "--device", "cpu", "--impl", "reference", "--head-dim", 64, "--tokens", 32, "--no-special",
        "--rounds", 1, "--output", tmp_path, "--commit", "abc",
    )  # fmt: skip
    assert (code, "no more time" in err) == (2, True)
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text())["rows"]
    assert {row["causal"] for row in rows} == {shapes[0].is_causal}


def test_bench_says_what_runs_and_how_long_it_will_and_what_ctrl_c_keeps(command, tmp_path, monkeypatch):
    """Regression: the command printed nothing for a minute, and was killed."""
    measure, shapes = attention.measure_shape, []

    def interrupted(shape, *arguments, **options):
        shapes.append(shape)
        if len(shapes) == 2:
            options["tell"]("checking token", 0.5)
            raise KeyboardInterrupt
        return measure(shape, *arguments, **options)

    monkeypatch.setattr("benchmarks.shapes.TOTAL_TOKENS", 32)
    monkeypatch.setattr(attention, "measure_shape", interrupted)
    monkeypatch.setattr("sagebwd.cli.terminal.Progress", lambda show, every: Progress(show))
    code, out, err = command(
        "attention", "--device", "cpu", "--impl", "reference", "--head-dim", 64, "--tokens", 32, "--rounds", 1,
        "--output", tmp_path, "--commit", "abc",
    )  # fmt: skip
    (path,) = tmp_path.iterdir()
    assert code == 130
    assert "reference token" in out
    assert "0 s: 1 of 2, D64 H32 B1 N32 no mask: checking token (reference)" in err
    assert re.search(r"about \d+ s left: 1 of 2, .*: timing backward", err)
    assert re.search(r"about \d+ s left: 2 of 2, D64 H32 B1 N32 causal: checking token", err)
    assert f"stopped: what was measured is in {path}" in err


def test_a_cpu_has_a_small_grid():
    assert {shape.batch * shape.tokens for shape in standard_grid(device="cpu")} == {1024}
    assert [shape.batch for shape in standard_grid(["64"], [128], "cpu")] == [8, 8]
    assert len(standard_grid()) == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("attention", "--device", "cpu", "--tokens", 0), "tokens=0 must be at least 1"),
        (("attention", "--device", "cpu", "--tokens", 64, "--tokens", -5), "tokens=-5 must be at least 1"),
        (("attention", "--device", "cpu", "--rounds", 0), "rounds=0 must be at least 1"),
        (("masks", "--device", "cpu", "--rounds", 0), "rounds=0 must be at least 1"),
        (("masks", "--device", "cpu", "--tokens", 0), "tokens=0 must be at least 1"),
        (("masks", "--device", "cpu", "--head-dim", 0), "head_dim=0 must be at least 1"),
        (("masks", "--device", "cpu", "--processes", -1), "processes=-1 must be at least 0"),
        (("masks", "--device", "cpu", "--mask", "none"), "mask='none' is not known; accepted: documents"),
        (("attention", "--device", "tpu"), "device='tpu' is not known"),
        (("attention", "--device", "cpu", "--packed", "--tokens", 32), "none of --tokens, --special and --peer"),
        (("attention", "--device", "cpu", "--packed", "--special"), "none of --tokens, --special and --peer"),
        (
            ("attention", "--device", "cpu", "--peer", "fa5"),
            "peer='fa5' is not known; accepted: cudnn-fp8, cudnn-fp8-e4m3",
        ),
        (("attention", "--device", "cpu", "--impl", "fast"), "impl='fast' is not known; accepted: None, 'reference'"),
        (
            ("attention", "--device", "cpu", "--head-dim", "100"),
            "head_dim=100 is not of the grid; accepted: 64, 72, 80, 96, 112, 128, 192, 192/128, 256",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, arguments, message):
    code, _, err = command(*arguments)
    assert code == 2
    assert message in err


def test_a_mistake_shows_no_traceback():
    outcome = started("benchmarks", "attention")
    assert outcome.returncode == 2
    assert "torch sees no GPU" in outcome.stderr
    assert "Traceback" not in outcome.stderr
