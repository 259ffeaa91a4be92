"""GPUs that kernels run on where they are here, and Hopper where it is made up."""

import sys
from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

# Of compute capability 8.0 and more, which all kernels need.
HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
DEVICE = "cuda" if HAS_GPU else "cpu"
on_gpu = pytest.mark.gpu if HAS_GPU else []
HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
# for `pytestmark` and `marks`
needs_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0")]


def hide_peers(put: Callable[[dict, str, object], object] = dict.__setitem__) -> None:
    """FlashAttention-3 and -4 are not there, whatever is installed. Args: put, of an item into a dictionary."""
    for name in ("flash_attn.cute", "flash_attn_interface"):
        put(sys.modules, name, None)
    if "sagebwd.auto.peers" in sys.modules:
        sys.modules["sagebwd.auto.peers"].module_of.cache_clear()


def as_if_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen as on an H200."""
    from sagebwd.kernels.runtime import device

    monkeypatch.setattr(device, "capability", lambda device: 90)
    monkeypatch.setattr(device, "num_sms", lambda device: 132)


# Kernels of attention that makes its codes of what projections give, and of one that is given rows.
OF_PROJECTIONS = {"query_codes", "key_codes", "finish_gradients"}
OF_ROWS = {"key_codes_kernel", "finish_dq_kernel"}


def kernels_of(run: Callable[[], object]) -> set[str]:
    """The names of the kernels that ran on the GPU."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    events = profiled.events()
    return {x.name.partition("(")[0] for x in events if x.device_type == torch.autograd.DeviceType.CUDA}
