"""Figures as files: few colours, and what was drawn of committed results."""

import json
from pathlib import Path

import pytest
import torch

from lab.commands import figures
from sagebwd.diagnostics.plots import COLORS, save

pytest.importorskip("matplotlib")
pytest.importorskip("typer")


def test_a_figure_of_few_colours_shows_what_was_drawn(tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    figure, axis = plt.subplots()
    noise = torch.rand(10, 200, generator=torch.Generator().manual_seed(0))
    for n, losses in enumerate(noise + torch.arange(10)[:, None] / 10):
        axis.plot(losses, color=f"C{n}", alpha=0.25, linewidth=0.8)
        axis.plot(losses.cumsum(0) / torch.arange(1, 201), color=f"C{n}", label=f"line {n}", linewidth=1.1)
    axis.legend()
    figure.savefig(tmp_path / "whole.png", dpi=110)
    save(figure, tmp_path / "folder" / "few.png")
    assert not plt.fignum_exists(figure.number)
    whole, few = Image.open(tmp_path / "whole.png").convert("RGB"), Image.open(tmp_path / "folder" / "few.png")
    assert few.size == whole.size
    assert len(few.getcolors()) <= COLORS
    pixels = [torch.frombuffer(bytearray(x.convert("RGB").tobytes()), dtype=torch.uint8).float() for x in (whole, few)]
    assert (pixels[0] - pixels[1]).abs().max() < 32  # of 255: no line takes the hue of another
    assert (tmp_path / "folder" / "few.png").stat().st_size < (tmp_path / "whole.png").stat().st_size / 2


ROOT = Path(__file__).parents[2]


RESULTS = ROOT / "benchmarks" / "results"


GRID = ROOT / "docs" / "results" / "grid"


@pytest.fixture(autouse=True)
def closed():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


def test_speed_by_width():
    path = RESULTS / "attention_h200_2026-11-25_7133de8.json"
    rows = [
        row
        for row in json.loads(path.read_text())["rows"]
        if (row["recipe"], row["direction"]) == ("mixed", "fwd+bwd")
    ]
    axes = figures.widths([path]).axes
    for axis, causal in zip(axes, (True, False), strict=True):
        drawn = sorted(bar.get_height() for bar in axis.patches)
        assert drawn == pytest.approx(sorted(row["peer_ms"] / row["ms"] for row in rows if row["causal"] == causal))
        hatched = [bar.get_height() for bar in axis.patches if bar.get_hatch()]
        assert len(hatched) == sum(row["peer"] == "cudnn" for row in rows if row["causal"] == causal)


def test_steps_by_context():
    path = RESULTS / "training_h200_2026-11-23_0c6affd.json"
    whole, attention = figures.contexts([path]).axes
    rows = json.loads(path.read_text())["rows"]
    mixed = {row["context"]: row for row in rows if row["recipe"] == "mixed"}
    (steps,) = [x for x in whole.containers if x.get_label() == "mixed"]
    assert dict(zip(*steps.lines[0].get_data())) == {tokens: row["step_ms"] for tokens, row in mixed.items()}
    (own,) = [x for x in attention.lines if x.get_label() == "mixed"]
    parts = {tokens: row["parts"]["attention"] + row["parts"]["passes"] for tokens, row in mixed.items()}
    assert dict(zip(*own.get_data())) == parts


def test_gaps_with_their_intervals():
    from lab.training.gaps import gaps

    folders = sorted(GRID.glob("fp32-sums-small-seed?"))
    (row,) = [row for row in gaps(folders) if row.variant == "mixed"]
    (axis,) = figures.gaps(folders).axes
    assert any(tuple(line.get_xdata()) == row.interval for line in axis.lines)
    assert any(tuple(line.get_xdata()) == row.gaps for line in axis.lines)
    assert [text.get_text() for text in axis.get_yticklabels()] == ["mixed, 16K tokens a step"]


def test_layers_of_a_model():
    from sagebwd.diagnostics import layers, summary

    path = ROOT / "docs" / "results" / "trace_smollm2.json.xz"
    rows = [row for row in summary.read(path) if row.recipe == "token"]
    axes = figures.layers([path]).axes
    (line,) = [x for x in axes[2].lines if x.get_label() == "token"]
    assert list(line.get_ydata()) == [row.relative_l2["dq"] for row in layers.means(rows)]


@pytest.mark.parametrize(("kind", "files", "message"), [
    ("pie", ["x.json"], "accepted: widths, contexts, gaps, layers"),
    ("contexts", ["x.json", "y.json"], "expected one results file, got 2"),
    ("gaps", [str(GRID / "no-qknorm-small")], "two pairs of runs or more"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_said(kind, files, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        figures.figure(kind, [Path(file) for file in files], tmp_path / "picture.png")
    assert not (tmp_path / "picture.png").exists()
