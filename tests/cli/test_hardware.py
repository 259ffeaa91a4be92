import pytest
import torch

from sagebwd.cli.hardware import check_device, command_output, peak_rates


def test_peak_rates_by_device_name():
    assert peak_rates("NVIDIA H200").memory_tb_per_s == 4.8
    assert peak_rates("NVIDIA A100-SXM4-80GB").int8_tops == 624
    assert peak_rates("Some other card") is None


def test_a_command_that_is_missing_or_fails_is_none():
    """Regression: a machine without git lost the result of a finished training run."""
    assert command_output("echo", "here") == "here"
    assert command_output("no-such-command-at-all") is None
    assert command_output("false") is None


def test_devices(monkeypatch):
    for count, refused in (
        (0, "'cuda': torch sees no GPU"),
        (2, "'cuda:2': torch sees 2 of them; .* cuda:0 to cuda:1"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        for device in ("cpu", "cuda", "cuda:1")[: 1 + count]:
            check_device(device)
        with pytest.raises(ValueError, match=f"device={refused}"):
            check_device("cuda:2" if count else "cuda")
        for device in ("tpu", "cuda:", "cuda:x", "CPU", "cpu:1", ""):
            with pytest.raises(ValueError, match=f"device='{device}' is not known; accepted: cpu, cuda, cuda:N"):
                check_device(device)
