"""Compiled functions with TVM-FFI's C interface, called with addresses in place of tensors.

By its Python interface a call takes a tensor for every argument; to make views of a piece of memory, only to read
their addresses again, takes longer than the launch. The structures are those of DLPack and of tvm/ffi/c_api.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

# DLPack's device types, and type codes with bits.
DEVICE_TYPES = {"cpu": 1, "cuda": 2}
DTYPES = {
    torch.int8: (0, 8), torch.uint8: (1, 8), torch.int32: (0, 32), torch.float16: (2, 16), torch.float32: (2, 32),
    torch.bfloat16: (4, 16),
}  # fmt: skip
# TVM-FFI's types of an argument.
NONE, INT, FLOAT, TENSOR = 0, 1, 3, 7


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Value(ctypes.Union):
    _fields_ = (("integer", ctypes.c_int64), ("number", ctypes.c_double), ("address", ctypes.c_void_p))


class _Any(ctypes.Structure):
    """TVMFFIAny."""

    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", _Value))


class _Error(ctypes.Structure):
    """The head of TVM-FFI's error object: a count, a type, what deletes it, then its kind and message."""

    _fields_ = (
        ("header", ctypes.c_uint8 * 24), ("kind", ctypes.c_void_p), ("kind_size", ctypes.c_size_t),
        ("message", ctypes.c_void_p), ("message_size", ctypes.c_size_t),
    )  # fmt: skip


class Function:
    """A function of tensors and numbers, and the stream last; its grid is its own affair, and () in a launch."""

    def __init__(self, path: Path, entry: str) -> None:
        runtime()
        # PyDLL holds the interpreter, which a launch is too short to let go
        self.library = ctypes.PyDLL(str(path))
        self.function = getattr(self.library, f"__tvm_ffi_{entry}")
        self.function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)

    def laid_out(self, grid: tuple[int, ...], arguments: Sequence[Any], device: torch.device) -> Packed:
        """A launch with arguments like these, whatever the tensors' addresses."""
        return Packed(self, arguments, device)


class Packed:
    """Arguments of a call, laid out once; `start` fills in the tensors' addresses, in order, and calls."""

    def __init__(self, function: Function, arguments: Sequence[Any], device: torch.device) -> None:
        self.function, self.lock, self.device = function.function, Lock(), device
        self.values, self.result = (_Any * (len(arguments) + 1))(), _Any()
        self.tensors, self.sizes = [], []
        for value, x in zip(self.values, (*arguments, 0)):
            if isinstance(x, Tensor):
                value.type_index, value.value.address = TENSOR, ctypes.addressof(self._tensor(x))
            elif isinstance(x, float):
                value.type_index, value.value.number = FLOAT, x
            elif x is not None:
                value.type_index, value.value.integer = INT, x
        self.stream, self.count = self.values[len(arguments)].value, len(self.values)
        self.arguments = ctypes.addressof(self.values), self.count, ctypes.addressof(self.result)

    def _tensor(self, x: Tensor) -> _Tensor:
        sizes = (ctypes.c_int64 * (2 * x.dim()))(*x.shape, *x.stride())
        shape = ctypes.addressof(sizes)
        made = _Tensor(
            None, DEVICE_TYPES[self.device.type], self.device.index or 0, x.dim(), *DTYPES[x.dtype], 1, shape,
            shape + 8 * x.dim(), 0,
        )  # fmt: skip
        self.tensors.append(made)
        self.sizes.append(sizes)
        return made

    def start(self, addresses: Sequence[int], stream: int) -> None:
        """Call the function. Raises what it raises, TypeError for one, where it fails."""
        with self.lock:
            for tensor, address in zip(self.tensors, addresses):
                tensor.data = address
            self.stream.integer = stream
            failed = self.function(None, *self.arguments)
        if failed:
            raise _raised()


@cache
def runtime() -> ctypes.CDLL:
    """TVM-FFI's library, which compiled functions look for."""
    import tvm_ffi

    return ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi(), ctypes.RTLD_GLOBAL)


def _raised() -> Exception:
    """What a function that failed said."""
    error = ctypes.POINTER(_Error)()
    runtime().TVMFFIErrorMoveFromRaised(ctypes.byref(error))
    if not error:
        return RuntimeError("a kernel could not be launched")
    said = error.contents
    kind, message = ctypes.string_at(said.kind, said.kind_size), ctypes.string_at(said.message, said.message_size)
    runtime().TVMFFIObjectDecRef(error)
    return {b"TypeError": TypeError, b"ValueError": ValueError}.get(kind, RuntimeError)(message.decode())
