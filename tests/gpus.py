"""GPUs that kernels run on where they are here, and Hopper where it is made up."""

import pytest
import torch

# Of compute capability 8.0 and more, which all kernels need.
HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
DEVICE = "cuda" if HAS_GPU else "cpu"
on_gpu = pytest.mark.gpu if HAS_GPU else []
HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
# for `pytestmark` and `marks`
needs_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")]


def as_if_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen as on an H200."""
    from sagebwd.kernels.runtime import device

    monkeypatch.setattr(device, "capability", lambda device: 90)
    monkeypatch.setattr(device, "num_sms", lambda device: 132)
