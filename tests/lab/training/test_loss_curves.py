"""Loss curves of several seeds, drawn from packed runs."""

import json
import lzma

import pytest

from lab.training import loss_curves
from lab.training.packed import PACKED
from lab.training.run_dir import COMPARISON

pytest.importorskip("matplotlib")


def write_runs(folder, *names):
    folder.mkdir()
    metrics = [{"step": n, "tokens": 64 * n, "loss": 3 - n / 10, "held_out_loss": 3 - n / 9} for n in range(1, 9)]
    with lzma.open(folder / PACKED, "wt", encoding="utf-8") as file:
        for name in names:
            file.write(json.dumps({"run": name, "ended": None, "result": None, "metrics": metrics}) + "\n")
    return folder


def lines_drawn(monkeypatch):
    import matplotlib.axes

    drawn, real = [], matplotlib.axes.Axes.plot

    def plot(self, *data, **style):
        drawn.append((style["color"], list(data[1])))
        return real(self, *data, **style)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", plot)
    return drawn


def test_a_column_an_experiment_and_a_line_a_run(tmp_path, monkeypatch):
    drawn = lines_drawn(monkeypatch)
    first = write_runs(tmp_path / "first", "full precision", "token", "another variant")
    second = write_runs(tmp_path / "second", "full precision", "paper")
    picture = tmp_path / "losses.png"
    loss_curves.main([str(picture), f"two seeds={first},{second}", f"one={first}"])
    assert picture.stat().st_size > 5000
    colors = [color for color, _ in drawn]
    assert (colors.count("black"), colors.count("C0"), colors.count("C3")) == (6, 4, 2)  # a loss and a gap a run
    assert [set(values) for _, values in drawn[1::2]] == [{0.0}] * 6


def test_seeds_of_one_folder_and_runs_that_do_not_count(tmp_path, monkeypatch):
    drawn = lines_drawn(monkeypatch)
    names = [f"seed-{seed}/{name}" for seed in (3, 4) for name in ("full precision", "mixed")]
    folder = write_runs(tmp_path / "first", *names)
    loss_curves.draw({"one": [folder]}, tmp_path / "losses.png")
    colors = [color for color, _ in drawn]
    assert (colors.count("black"), colors.count("C2")) == (4, 4)
    drawn.clear()
    rows = [{"seed": 3, "variant": "mixed", "recipe": "mixed", "commit": "a9c0339"}]
    rows += [{"seed": 4, "variant": "mixed", "recipe": "mixed", "commit": "2534d87"}]
    (folder / COMPARISON).write_text(json.dumps({"outcomes": rows}))
    loss_curves.draw({"one": [folder]}, tmp_path / "losses.png")
    colors = [color for color, _ in drawn]
    assert (colors.count("black"), colors.count("C2")) == (4, 2)


def test_a_folder_without_the_baseline_and_a_wrong_command_say_so(tmp_path):
    with pytest.raises(ValueError, match="has no run named 'full precision'; it has token"):
        loss_curves.draw({"one": [write_runs(tmp_path / "runs", "token")]}, tmp_path / "losses.png")
    with pytest.raises(SystemExit, match="python -m lab"):
        loss_curves.main(["losses.png"])
