"""What packed runs say as they train, against numbers worked out by hand."""

import json
import lzma

import pytest

from sagebwd.training import evaluations
from sagebwd.training.packed import PACKED


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
    evaluations.main([str(folder)])
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
    with pytest.raises(SystemExit, match="python -m sagebwd"):
        evaluations.main([])
