"""Figures are written in few colours that are still those that were drawn."""

import pytest
import torch

from sagebwd.diagnostics.plots import COLORS, save

pytest.importorskip("matplotlib")


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
