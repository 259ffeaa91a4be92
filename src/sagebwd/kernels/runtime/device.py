"""What kernels ask of the GPU they run on."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

# CUDA_ERROR_INVALID_CONTEXT
NO_CONTEXT = 201
_AS_IT_IS = nullcontext()


@cache
def capability(device: torch.device) -> int:
    """90 for sm_90; 0 where the interpreter runs on a CPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def current_stream(device: torch.device) -> int:
    """The address of the stream that kernels of a GPU are to run on; 0 on a CPU."""
    return torch._C._cuda_getCurrentRawStream(device.index or 0) if device.type == "cuda" else 0


def device_of(x: Tensor) -> AbstractContextManager:
    """Where kernels launch: on x's GPU, whichever is the current one."""
    if not x.is_cuda or x.get_device() == torch._C._cuda_getDevice():
        return _AS_IT_IS
    return torch.cuda.device(x.device)


def clear(address: int, size: int, device: torch.device, stream: int) -> None:
    """Zero bytes of a GPU's memory in a stream's turn, as ``torch.zeros`` does at five times the host's time."""
    if device.type != "cuda":
        ctypes.memset(address, 0, size)
        return
    failed = libcuda().cuMemsetD8Async(address, 0, size, stream)
    if failed == NO_CONTEXT:
        enter_context(device)
        failed = libcuda().cuMemsetD8Async(address, 0, size, stream)
    if failed:
        raise RuntimeError(f"cuMemsetD8Async of {size} bytes failed with CUDA's error {failed}")


def enter_context(device: torch.device) -> None:
    """Make the GPU's context this thread's: autograd's threads have none before their first call of CUDA's runtime.

    A stream may be captured meanwhile, which the runtime's own calls that do so would end.
    """
    context = ctypes.c_void_p()
    failed = libcuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), device.index or 0)
    failed = failed or libcuda().cuCtxSetCurrent(context)
    if failed:
        raise RuntimeError(f"the context of {device} cannot be entered: CUDA's error {failed}")


@cache
def libcuda() -> ctypes.PyDLL:
    """CUDA's driver."""
    # PyDLL holds the interpreter, which these are too short to let go
    library = ctypes.PyDLL("libcuda.so.1")
    library.cuMemsetD8Async.argtypes = (ctypes.c_uint64, ctypes.c_uint8, ctypes.c_size_t, ctypes.c_void_p)
    library.cuDevicePrimaryCtxRetain.argtypes = (ctypes.c_void_p, ctypes.c_int)
    library.cuCtxSetCurrent.argtypes = (ctypes.c_void_p,)
    library.cuModuleLoadData.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    library.cuModuleGetFunction.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    library.cuFuncSetAttribute.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    library.cuLaunchKernel.argtypes = (
        ctypes.c_void_p, *(ctypes.c_uint,) * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    )  # fmt: skip
    return library
