"""What kernels ask of the GPU they run on, by a libcuda that notes what it is asked."""

from __future__ import annotations

import ctypes

import pytest
import torch

from sagebwd.kernels.runtime import device
from tests.threads import at_once

GPU = torch.device("cuda", 1)


class Library:
    """libcuda as seen by a thread that has no context until it enters the GPU's."""

    def __init__(self, retained: int = 0) -> None:
        self.retained, self.current, self.asked = retained, None, []

    def cuMemsetD8Async(self, *arguments: int) -> int:
        self.asked.append(arguments)
        return 0 if self.current is not None else device.NO_CONTEXT

    def cuDevicePrimaryCtxRetain(self, context: object, number: int) -> int:
        ctypes.cast(context, ctypes.POINTER(ctypes.c_void_p))[0] = 7000 + number
        return self.retained

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        self.current = context.value
        return 0


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setattr(device, "libcuda", lambda: made)
    return made


def test_a_thread_without_a_context_enters_the_gpus(library):
    device.clear(512, 64, GPU, 3)
    assert library.current == 7001
    assert library.asked == [(512, 0, 64, 3)] * 2
    device.clear(1024, 64, GPU, 3)
    assert library.asked[2:] == [(1024, 0, 64, 3)]


def test_what_cuda_says_is_raised(library):
    library.retained = 100
    with pytest.raises(RuntimeError, match="the context of cuda:1 cannot be entered: CUDA's error 100"):
        device.clear(512, 64, GPU, 3)
    library.cuMemsetD8Async = lambda *_: 1
    with pytest.raises(RuntimeError, match="cuMemsetD8Async of 64 bytes failed with CUDA's error 1"):
        device.clear(512, 64, GPU, 3)


def test_bytes_of_a_cpu_are_cleared():
    x = torch.ones(16, dtype=torch.uint8)
    device.clear(x.data_ptr() + 4, 8, x.device, 0)
    assert x.tolist() == [1] * 4 + [0] * 8 + [1] * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_new_thread_clears():
    x = torch.ones(1024, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream().cuda_stream
    at_once(lambda size: device.clear(x.data_ptr(), size, x.device, stream), [512])
    assert x.sum().item() == 512
