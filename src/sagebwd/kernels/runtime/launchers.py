"""Launchers: compiled kernels with the places of their tensors, started with memory at any addresses.

A launch by Triton's own interface asks for the device, the stream and hooks, and encodes every TMA descriptor in
Python, which takes three times as long as the rest. What is encoded follows from the address alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from sagebwd.kernels.runtime.cuda import CudaKernel, CudaLaunch
from sagebwd.kernels.runtime.ffi import Function, Packed

# Encoded descriptors kept of each argument: a training step has some memory after memory, the next the same again.
MOST_DESCRIPTORS = 256


class Place(NamedTuple):
    """A tensor: the number of its memory's owner, how many bytes into it, and how it lies there."""

    owner: int
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, tensors: list[Tensor]) -> Tensor:
        """The tensor, of the owners'."""
        owner = tensors[self.owner]
        start = owner.storage_offset() * owner.itemsize + self.offset
        made = torch.empty(0, dtype=self.dtype, device=owner.device)
        return made.set_(owner.untyped_storage(), start // self.dtype.itemsize, self.shape, self.stride)


class Descriptor:
    """A TMA descriptor without its tensor, and where that lies."""

    def __init__(self, described: Any, place: Place) -> None:
        self.kind, self.fields, self.place = type(described), {**vars(described), "base": None}, place

    def at(self, base: Any) -> Any:
        """The descriptor of a tensor, or of memory at an address."""
        made = self.kind.__new__(self.kind)
        made.__dict__ = {**self.fields, "base": _Address(base) if isinstance(base, int) else base}
        return made


class Interpreted:
    """A kernel that Triton interprets, which takes tensors."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: list, options: dict[str, Any]) -> None:
        self.kernel, self.grid, self.arguments, self.options = kernel, grid, arguments, options

    def start(self, addresses: list[int], tensors: list[Tensor], stream: int) -> None:
        """Run it."""
        self.kernel[self.grid](*(_filled_in(x, tensors) for x in self.arguments), **self.options)


def _filled_in(x: Any, tensors: list[Tensor]) -> Any:
    """An argument with tensors at its places."""
    if isinstance(x, Place):
        return x.of(tensors)
    if isinstance(x, Descriptor):
        return x.at(x.place.of(tensors))
    if isinstance(x, tuple):
        fields = [_filled_in(field, tensors) for field in x]
        return type(x)(*fields) if hasattr(x, "_fields") else tuple(fields)
    return x


class PackedLauncher:
    """Arguments laid out for a function of TVM-FFI's interface or of CUDA's driver, and the place of each tensor."""

    def __init__(self, packed: Packed | CudaLaunch, places: list[Place | Tensor]) -> None:
        self.packed = packed
        self.places = [x[:2] if isinstance(x, Place) else (0, 0) for x in places]  # a tensor of no elements

    def start(self, addresses: list[int], tensors: list[Tensor], stream: int) -> None:
        """Launch on a stream."""
        self.packed.start([addresses[owner] + offset for owner, offset in self.places], stream)


class TritonLauncher:
    """A kernel that Triton compiled, its grid and two ones, and what to launch it with.

    arguments: a `Place` for each tensor, a `Descriptor` for each TMA descriptor, tuples of the former as Triton
    takes them, which encodes no descriptor there, and whatever else as it is.
    """

    def __init__(self, compiled: Any, grid: tuple[int, ...], arguments: list) -> None:
        self.compiled, self.grid, self.arguments = compiled, grid, arguments
        self.run, self.lock = compiled.run if isinstance(compiled, CompiledKernel) else None, Lock()
        self.filled = _filler(arguments)
        described = any(isinstance(x, Descriptor) for x in arguments)
        self.encodes = described and _launcher_below(self.run) is not None

    def start(self, addresses: list[int], tensors: list[Tensor], stream: int) -> None:
        """Launch on a stream."""
        if self.run is None or _is_hooked():
            self.compiled[self.grid](*self.filled(addresses))
            return
        if self.encodes:
            with self.lock:  # of two threads one encodes
                if self.encodes:
                    self.run, self.filled, self.encodes = *self._encoding(addresses), False
        # what indexing with a grid does, but for its questions
        compiled = self.compiled
        self.run(
            *self.grid[:3], stream, compiled.function, compiled.packed_metadata, None, None, None,
            *self.filled(addresses),
        )  # fmt: skip

    def _encoding(self, addresses: list[int]) -> tuple[Any, Callable[[list[int]], list]]:
        """The same with descriptors as Triton's launcher hands them on: encoded, and sizes."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        launcher, metadata = _launcher_below(self.run)
        run = copy.copy(self.run)
        run.launch = launcher
        handed_on, kinds = [], iter(metadata)
        for x in self.arguments:
            handed_on.append(x)
            if isinstance(x, Descriptor):
                kind = next(kinds)
                handed_on[-1] = _EncodedDescriptor(x, make_tensordesc_arg, kind)
                handed_on += make_tensordesc_arg(x.at(addresses[x.place.owner] + x.place.offset), kind)[1:]
        return run, _filler(handed_on)


Launcher = Interpreted | PackedLauncher | TritonLauncher


def launcher_of(
    compiled: Any, kernel: Any, grid: tuple[int, ...], arguments: tuple, placed: list, options: dict[str, Any],
    device: torch.device,
) -> Launcher:  # fmt: skip
    """The launcher of a kernel, compiled or None for one that is interpreted; placed: the arguments with places."""
    if compiled is None:
        return Interpreted(kernel, grid, placed, options)
    if isinstance(compiled, (Function, CudaKernel)):
        places = [place for x, place in zip(arguments, placed) if isinstance(x, Tensor)]
        is_cuda = isinstance(compiled, CudaKernel)
        packed = CudaLaunch(compiled, grid, arguments, device) if is_cuda else Packed(compiled, arguments, device)
        return PackedLauncher(packed, places)
    constants = [options[x] for x in kernel.arg_names[len(arguments) :]]
    return TritonLauncher(compiled, (*grid, 1, 1), [*placed, *constants])


def _filler(arguments: list) -> Callable[[list[int]], list]:
    """A function of addresses that gives the arguments, written out: a loop takes three times as long."""
    others: dict[str, Any] = {}

    def named(x: Any) -> str:
        others[f"x{len(others)}"] = x
        return f"x{len(others) - 1}"

    def written(x: Any) -> str:
        if isinstance(x, Place):
            return f"addresses[{x.owner}] + {x.offset}"
        if isinstance(x, Descriptor):
            return f"{named(x.at)}({written(x.place)})"
        if isinstance(x, tuple) and any(isinstance(field, (Place, tuple)) for field in x):
            return f"({''.join(f'{written(field)}, ' for field in x)})"
        return named(x)

    return eval(f"lambda addresses: [{', '.join(map(written, arguments))}]", others)


class _EncodedDescriptor(Descriptor):
    """A descriptor as Triton's launcher hands it on: of each address what is encoded there."""

    def __init__(self, descriptor: Descriptor, encode: Callable, metadata: Any) -> None:
        self.described, self.place, self.known = descriptor, descriptor.place, {}
        self.encode, self.metadata = encode, metadata

    def at(self, address: int) -> Any:
        encoded = self.known.get(address)
        if encoded is None:
            if len(self.known) >= MOST_DESCRIPTORS:
                self.known.clear()
            encoded = self.known[address] = self.encode(self.described.at(address), self.metadata)[0]
        return encoded


def _launcher_below(run: Any) -> tuple[Any, list] | None:
    """Triton's launcher of encoded descriptors, and their metadata; None where this Triton keeps them elsewhere."""
    if not inspect.isfunction(getattr(run, "launch", None)):
        return None
    known = inspect.getclosurevars(run.launch).nonlocals
    return (known["launcher"], known["tensordesc_meta"]) if {"launcher", "tensordesc_meta"} <= set(known) else None


class _Address(int):
    """Stands for a tensor in a descriptor."""

    data_ptr = int.__int__


def _is_hooked() -> bool:
    """Whether somebody, a profiler for one, asked Triton to be told of launches."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
