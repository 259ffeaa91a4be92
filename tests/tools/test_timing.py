"""The command that times kernels: what it puts in place, without a GPU."""

import pytest

pytest.importorskip("triton")
from sagebwd.kernels.sm90 import widths
from sagebwd.kernels.sm90.backward import launch
from tools import timing


def test_a_kernel_of_another_file_takes_the_place(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "backward_kernel", launch.backward_kernel)
    variant = tmp_path / "variant.py"
    variant.write_text("backward_kernel = 'another'\n", encoding="utf-8")
    timing.replace_kernel(f"backward_kernel={variant}")
    assert launch.backward_kernel == "another"
    variant.write_text("unknown_kernel = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="launches no unknown_kernel"):
        timing.replace_kernel(f"unknown_kernel={variant}")


def test_rows_of_widths_change_by_name(monkeypatch):
    monkeypatch.setitem(widths._OF, (64, 64), widths._OF[64, 64])
    timing.change_launch("backward.64.stages=2")
    assert widths.width(64, 64).backward.stages == 2
    with pytest.raises(ValueError, match="backward has queries, stages"):
        timing.change_launch("backward.64.steps=2")
