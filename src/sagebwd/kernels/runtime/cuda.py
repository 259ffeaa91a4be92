"""Kernels of machine code, loaded and launched by CUDA's driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from sagebwd.kernels.runtime.device import NO_CONTEXT, enter_context, libcuda

# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_BYTES = 8


class CudaKernel:
    """A function of a cubin. Arguments: tensors or None for pointers, int for 64-bit integers, float for FP32."""

    def __init__(self, machine_code: bytes, name: str, threads: int, shared_bytes: int) -> None:
        self.machine_code, self.name, self.threads, self.shared_bytes = machine_code, name, threads, shared_bytes
        self._functions: dict[int, ctypes.c_void_p] = {}
        self._lock = Lock()

    def laid_out(self, grid: tuple[int, ...], arguments: Sequence[Any], device: torch.device) -> CudaLaunch:
        """A launch with arguments like these, whatever the tensors' addresses."""
        return CudaLaunch(self, grid, arguments, device)

    def function(self, device: torch.device) -> ctypes.c_void_p:
        """The function in a GPU's context, loaded once."""
        index = device.index or 0
        with self._lock:
            if index not in self._functions:
                module, function = ctypes.c_void_p(), ctypes.c_void_p()
                enter_context(device)
                check(
                    libcuda().cuModuleLoadData(ctypes.byref(module), self.machine_code),
                    f"{self.name} cannot be loaded",
                )
                found = libcuda().cuModuleGetFunction(ctypes.byref(function), module, self.name.encode())
                check(found, f"{self.name} is not found")
                room = libcuda().cuFuncSetAttribute(function, _SHARED_BYTES, self.shared_bytes)
                check(room, f"{self.name} needs {self.shared_bytes} bytes of shared memory")
                self._functions[index] = function
            return self._functions[index]


class CudaLaunch:
    """Arguments of a launch, laid out once; `start` fills in the tensors' addresses, in order, and launches."""

    def __init__(
        self, kernel: CudaKernel, grid: tuple[int, ...], arguments: Sequence[Any], device: torch.device
    ) -> None:
        self.kernel, self.device, self.lock = kernel, device, Lock()
        self.sizes = (*grid, 1, 1)[:3], (kernel.threads, 1, 1), kernel.shared_bytes
        self.function = kernel.function(device)
        values = [_value(x) for x in arguments]
        self.pointers = [value for value, x in zip(values, arguments) if isinstance(x, Tensor)]
        self.values = values
        self.parameters = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))

    def start(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on a stream. Raises RuntimeError with CUDA's error."""
        (grid, block, shared), launch = self.sizes, libcuda().cuLaunchKernel
        with self.lock:
            for pointer, address in zip(self.pointers, addresses):
                pointer.value = address
            failed = launch(self.function, *grid, *block, shared, stream, self.parameters, None)
            if failed == NO_CONTEXT:
                enter_context(self.device)
                failed = launch(self.function, *grid, *block, shared, stream, self.parameters, None)
        check(failed, f"{self.kernel.name} cannot be launched")


def check(failed: int, what: str) -> None:
    """Raises RuntimeError where a call of the driver failed."""
    if failed:
        raise RuntimeError(f"{what}: CUDA's error {failed}")


def _value(x: Any) -> Any:
    if x is None or isinstance(x, Tensor):
        return ctypes.c_uint64(0)
    return ctypes.c_float(x) if isinstance(x, float) else ctypes.c_int64(x)
