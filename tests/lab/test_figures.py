"""A figure shows the gaps and intervals of committed results."""

from pathlib import Path

import pytest

from lab.commands import figures

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

GRID = Path(__file__).parents[2] / "docs" / "results" / "grid"


def test_gaps_with_their_intervals():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from lab.training.gaps import gaps

    folders = sorted(GRID.glob("fp32-sums-small-seed?"))
    (row,) = [row for row in gaps(folders) if row.variant == "mixed"]
    (axis,) = figures.gaps(folders).axes
    assert any(tuple(line.get_xdata()) == row.interval for line in axis.lines)
    assert any(tuple(line.get_xdata()) == row.gaps for line in axis.lines)
    assert [text.get_text() for text in axis.get_yticklabels()] == ["mixed, 16K tokens a step"]
    plt.close("all")
