import math

import pytest

from sagebwd.training import monitor, report
from sagebwd.training.report import Run, gap, smoothed, write_curves


def run(name, held_out, losses=(3.0, 2.0)):
    metrics = [{"step": i, "tokens": 10 * i, "loss": loss, "grad_norm": 1.0} for i, loss in enumerate(losses)]
    metrics += [
        {"step": i, "tokens": t, "held_out_loss": loss, "largest_logit": 2.0} for i, (t, loss) in enumerate(held_out)
    ]
    return Run(name, {}, "token", metrics, {})


def test_gap_is_taken_where_both_were_measured():
    tokens, gaps = gap(run("b", [(10, 2.5), (20, 2.0), (30, 1.9)]), run("a", [(10, 2.4), (30, 2.0)]))
    assert tokens == [10, 30]
    assert [round(gap, 6) for gap in gaps] == [0.1, -0.1]


def test_series_leave_out_what_is_not_finite():
    assert run("a", [(10, math.nan), (20, 2.0)]).series("held_out_loss") == ([20], [2.0])


def test_no_gap_without_a_baseline():
    assert gap(run("b", [(10, 2.5)]), None) == ([], [])


def test_smoothing_neither_lags_nor_shortens():
    slope = [float(x) for x in range(100)]
    assert smoothed(slope) == pytest.approx(slope)
    noisy = [(-1.0) ** x for x in range(100)]
    assert max(map(abs, smoothed(noisy)[5:-5])) < 0.3
    assert smoothed([]) == []
    assert smoothed([2.0]) == [2.0]


@pytest.mark.parametrize("with_baseline", [True, False])
def test_curves_of_unequal_and_broken_runs(tmp_path, with_baseline):
    runs = [run("a", [(10, 2.0)]), run("b", [(10, 2.1), (20, math.nan)], losses=(3.0, math.nan, 1.0)), run("c", [])]
    write_curves(runs, runs[0] if with_baseline else None, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_report_has_a_row_a_layer_and_the_events():
    errors = dict.fromkeys(monitor.TENSORS, 0.0123)
    summary = {
        "checks": 3, "seconds": 1.0, "share": 0.011,
        "layers": {"0": {"recipe": "token", "errors": errors, "highest": 0.05},
                   "1": {"recipe": "token(s=16bit)", "errors": {}, "highest": 0.5}},
        "events": [{"step": 200, "layer": 1, "message": "layer 1: moved <up>"}],
    }  # fmt: skip
    runs = [Run(name, {}, "token", [], {"monitor": found}) for name, found in (("a", None), ("b", summary))]
    section = report._attention_error(runs)
    assert "<td>b</td><td>token(s=16bit)</td><td>1</td>" in section
    assert "0.0123" in section
    assert "b: 3 checks, 1.10% of the time" in section
    assert "b, step 200: layer 1: moved &lt;up&gt;" in section
    assert report._attention_error(runs[:1]) == ""
