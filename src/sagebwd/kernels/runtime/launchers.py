"""Launchers: compiled kernels with the places of their tensors, started with memory at any addresses.

A launch by Triton's own interface asks for the device, the stream and hooks, and encodes every TMA descriptor in
Python, which takes three times as long as the rest. What is encoded follows from the address alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from sagebwd.kernels.runtime.cuda import CudaLaunch
from sagebwd.kernels.runtime.device import clear
from sagebwd.kernels.runtime.ffi import Packed
from sagebwd.kernels.runtime.numbers import Number

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
        self.kernel, self.grid, self.options = kernel, grid, options
        self.filled = _filler(arguments, of_tensors=True)

    def start(self, addresses: list[int], tensors: list[Tensor], stream: int) -> None:
        """Run it."""
        self.kernel[self.grid](*self.filled(tensors), **self.options)


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
        self.compiled, self.grid, self.filled = compiled, grid, _filler(arguments)
        self.run = None  # of Triton's compiler, whose own launcher needs no questions
        if isinstance(compiled, CompiledKernel):
            self.run, handed_on = _below(compiled.run, arguments)
            self.handed_on = _filler(handed_on)

    def start(self, addresses: list[int], tensors: list[Tensor], stream: int) -> None:
        """Launch on a stream."""
        compiled = self.compiled
        if self.run is None or _is_hooked():
            compiled[self.grid](*self.filled(addresses))
            return
        # what indexing with a grid does, but for its questions
        self.run(
            *self.grid[:3], stream, compiled.function, compiled.packed_metadata, None, None, None,
            *self.handed_on(addresses),
        )  # fmt: skip


class Copy:
    """A copy between tensors of given places."""

    def __init__(self, to: Place, x: Place) -> None:
        self.to, self.x = to, x

    def start(self, addresses: list[int], tensors: list[Tensor], stream: int) -> None:
        """Copy on the current stream."""
        self.to.of(tensors).copy_(self.x.of(tensors))


class Clear(NamedTuple):
    """Zeros in an owner's memory."""

    owner: int
    offset: int
    size: int
    device: torch.device

    def start(self, addresses: list[int], tensors: list[Tensor], stream: int) -> None:
        """Clear in a stream's turn."""
        clear(addresses[self.owner] + self.offset, self.size, self.device, stream)


Launcher = Interpreted | PackedLauncher | TritonLauncher | Copy | Clear


def _filler(arguments: list, of_tensors: bool = False) -> Callable[[list], list]:
    """A function of addresses, or of tensors, that gives the arguments, written out: a loop takes three times as long.

    Of addresses a named tuple becomes a plain one.
    """
    others: dict[str, Any] = {}

    def named(x: Any) -> str:
        others[f"x{len(others)}"] = x
        return f"x{len(others) - 1}"

    def written(x: Any) -> str:
        if isinstance(x, Place):
            return f"{named(x.of)}(given)" if of_tensors else f"given[{x.owner}] + {x.offset}"
        if isinstance(x, Descriptor):
            return f"{named(x.at)}({written(x.place)})"
        if isinstance(x, Number):
            return f"given[{x.place}]"
        if isinstance(x, tuple) and any(isinstance(field, (Place, Number, tuple)) for field in x):
            fields = f"({''.join(f'{written(field)}, ' for field in x)})"
            return f"{named(x._make)}({fields})" if of_tensors and hasattr(x, "_make") else fields
        return named(x)

    return eval(f"lambda given: [{', '.join(map(written, arguments))}]", others)


class _EncodedDescriptor(Descriptor):
    """A descriptor as Triton's launcher hands it on: of each address what is encoded there."""

    def __init__(self, place: Place, encode: Callable[[int], Any]) -> None:
        self.place, self.encode, self.known = place, encode, {}

    def at(self, address: int) -> Any:
        encoded = self.known.get(address)
        if encoded is None:
            if len(self.known) >= MOST_DESCRIPTORS:
                self.known.clear()
            encoded = self.known[address] = self.encode(address)
        return encoded


def _below(run: Any, arguments: list) -> tuple[Any, list]:
    """Triton's launcher below the one that encodes descriptors, and the arguments that it takes, encoded and sizes.

    Both as they are where nothing is to be encoded, or where this Triton keeps that launcher elsewhere.
    """
    launch = getattr(run, "launch", None)
    known = inspect.getclosurevars(launch).nonlocals if inspect.isfunction(launch) else {}
    if not (any(isinstance(x, Descriptor) for x in arguments) and {"launcher", "tensordesc_meta"} <= set(known)):
        return run, arguments
    below = copy.copy(run)
    below.launch = known["launcher"]
    handed_on, kinds = [], iter(known["tensordesc_meta"])
    for x in arguments:
        if isinstance(x, Descriptor):
            handed_on += _handed_on(x, next(kinds))
        else:
            handed_on.append(x)
    return below, handed_on


def _handed_on(x: Descriptor, kind: Any) -> list:
    """A descriptor and its sizes; kind: Triton's metadata, None where the GPU has no TMA."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    encoded = _EncodedDescriptor(x.place, lambda address: make_tensordesc_arg(x.at(address), kind)[0])
    sizes = [*x.fields["shape"], *x.fields["strides"]] if kind else make_tensordesc_arg(x.at(0), None)[1:]
    return [encoded, *sizes]


class _Address(int):
    """Stands for a tensor in a descriptor."""

    data_ptr = int.__int__


def _is_hooked() -> bool:
    """Whether somebody, a profiler for one, asked Triton to be told of launches."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
