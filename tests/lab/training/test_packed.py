"""Runs in one file, and their evaluations as a table."""

import json
import lzma

import pytest

from lab.training import packed
from lab.training.packed import PACKED
from lab.training.run_dir import COMPARISON, DIVERGED, METRICS, RESULT


@pytest.fixture
def runs(tmp_path):
    """Three runs of a comparison: one has ended, one has diverged, one has not come to an end."""
    lines = [{"step": 1, "tokens": 64, "loss": 2.5}, {"step": 2, "tokens": 128, "held_out_loss": 0.1 + 0.2}]
    ends = {"token": (RESULT, {"seconds": 1 / 3}), "a long name": (DIVERGED, {"diverged": "at step 3"}), "late": None}
    for name, end in ends.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        if end:
            (tmp_path / "runs" / name / end[0]).write_text(json.dumps(end[1]))
    outcomes = [{"variant": "token"}, {"variant": "a long name"}]
    (tmp_path / "runs" / COMPARISON).write_text(json.dumps({"outcomes": outcomes}))
    return tmp_path / "runs"


def test_what_was_packed_comes_back(runs, tmp_path):
    packed.pack(runs, tmp_path / "packed")
    assert [run["run"] for run in packed.read(tmp_path / "packed")] == ["token", "a long name", "late"]
    assert (tmp_path / "packed" / COMPARISON).read_text() == (runs / COMPARISON).read_text()
    packed.unpack(tmp_path / "packed", tmp_path / "again")
    for path in runs.glob("*/*.json*"):
        again = (tmp_path / "again" / path.relative_to(runs)).read_text()
        assert [json.loads(line) for line in again.splitlines()] == [
            json.loads(line) for line in path.read_text().splitlines()
        ]
    assert len(list((tmp_path / "again").glob("*/*"))) == len(list(runs.glob("*/*")))


def test_curves_are_drawn_from_the_file(runs, tmp_path):
    pytest.importorskip("matplotlib")
    packed.main(["pack", str(runs), str(tmp_path / "packed")])
    packed.main(["curves", str(tmp_path / "packed")])
    assert (tmp_path / "packed" / "curves.png").stat().st_size > 0


def test_a_folder_without_runs_and_a_wrong_command_say_so(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        packed.pack(tmp_path, tmp_path)
    with pytest.raises(SystemExit, match="python -m lab"):
        packed.main(["pack"])


def test_runs_of_one_seed_are_found():
    names = ["seed-3/full precision", "seed-3/mixed", "seed-4/full precision"]
    runs = [{"run": name} for name in names]
    assert packed.by_seed(runs) == [runs[:2], runs[2:]]
    assert packed.by_seed([{"run": "a"}, {"run": "b"}]) == [[{"run": "a"}, {"run": "b"}]]
    assert packed.name_of({"seed": 3, "variant": "mixed"}) == names[1]
    assert packed.name_of({"variant": "mixed"}) == "mixed"


def a_run(name, norm, losses, checks=()):
    steps = [
        {"step": n, "tokens": 64 * n, "loss": 9 - n, "grad_norm": norm * n, "tokens_per_s": 100.0 * n}
        for n in range(1, 7)
    ]
    ends = [{"step": n, "tokens": 64 * n, "held_out_loss": loss, "largest_logit": 4.25} for n, loss in losses.items()]
    return {"run": name, "ended": None, "result": None, "metrics": [*steps, *ends, *checks]}


@pytest.fixture
def folder(tmp_path):
    errors = {f"monitor/layer_{n}/{key}": 0.1 * n for n in range(3) for key in ("ds", "dq", "dk", "dv", "o")}
    check = {"step": 6, **errors, "monitor/layer_1/dk": 0.3, "monitor/seconds": 1.0, "monitor/share": 0.02}
    baseline = a_run("full precision", 1.0, {2: 5.0, 4: 4.0, 6: 3.0})
    with lzma.open(tmp_path / PACKED, "wt", encoding="utf-8") as file:
        for run in (baseline, a_run("mixed", 2.0, {2: 5.5, 4: 3.9, 6: 3.1, 8: 3.0}, [check])):
            file.write(json.dumps(run) + "\n")
    return tmp_path


def test_a_line_an_evaluation_and_what_the_monitor_found(folder, capsys):
    packed.main(["evaluations", str(folder)])
    first, second = capsys.readouterr().out.split("## ")[1:]
    assert first.startswith("full precision\n")
    assert "| 4 | 256 | 4.0000 | +0.0000 | 4.2 | 3.500 | 350 |" in first
    assert "deviation" not in first, "the baseline has no gap to itself"
    assert "| 2 | 128 | 5.5000 | +0.5000 | 4.2 | 3.000 | 150 |" in second
    assert "| 8 | 512 | 3.0000 |  | 4.2 |  |  |" in second, "the baseline has no such step"
    assert "step 1: training loss 8.0000, gradient norm 2.0000" in second
    # -.1 and +.1, of the three gaps
    assert "gap, last 2 evaluations: mean +0.0000, deviation 0.1414" in second
    assert "step 6 (1.00 s, 2.00% of the time so far)" in second
    assert "largest error of dS 0.200, dQ 0.200, dK 0.300, dV 0.200, O 0.200" in second


def test_a_wrong_command_says_so():
    with pytest.raises(SystemExit, match="python -m lab"):
        packed.main(["evaluations"])
