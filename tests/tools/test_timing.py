"""The command that times kernels: what it puts in place, without a GPU."""

import pytest

pytest.importorskip("sagebwd.kernels.gluon")
from sagebwd.kernels.sm90.backward import launch as gradients
from sagebwd.kernels.sm90.backward import turns as config
from tools import timing


def test_a_kernel_of_another_file_takes_the_place(tmp_path, monkeypatch):
    monkeypatch.setattr(gradients, "dq_kernel", gradients.dq_kernel)
    variant = tmp_path / "variant.py"
    variant.write_text("dq_kernel = 'another'\n", encoding="utf-8")
    timing.replace_kernel(f"dq_kernel={variant}")
    assert gradients.dq_kernel == "another"
    variant.write_text("unknown_kernel = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="launches no unknown_kernel"):
        timing.replace_kernel(f"unknown_kernel={variant}")


def test_launch_options_change_by_name(monkeypatch):
    monkeypatch.setitem(config.BACKWARD, 64, dict(config.BACKWARD[64]))
    timing.change_launch("BACKWARD.64.STAGES=2")
    assert config.BACKWARD[64]["STAGES"] == 2
    with pytest.raises(ValueError, match="BACKWARD has STAGES"):
        timing.change_launch("BACKWARD.64.STEPS=2")
