"""Recorded launches, done again with memory at other addresses.

A launch by Triton's own interface asks for the device, the stream and hooks, and encodes every TMA descriptor in
Python: 12 of them take three times as long as the rest. What is encoded follows from the address alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
from triton.compiler import CompiledKernel

from sagebwd.kernels.host.ffi import Packed

# Encoded descriptors kept of each argument: a training step has some memory after memory, the next the same again.
MOST_DESCRIPTORS = 256


class Location(NamedTuple):
    """Where a tensor lies: whose memory it is, and how far into it."""

    owner: int
    offset: int


class FunctionRelaunch(NamedTuple):
    """Whose memory each tensor of a function is, and how far into it."""

    packed: Packed
    locations: list[tuple[int, int]]

    def start(self, owners: list[int], stream: int) -> None:
        """Launch on a stream, with memory at these addresses."""
        self.packed.start([owners[owner] + offset for owner, offset in self.locations], stream)


class TritonRelaunch:
    """A compiled kernel, its grid and two ones, and what to launch it with.

    arguments: a `Location` for each tensor, a `Descriptor` for each TMA descriptor, tuples of the former as Triton
    takes them, which encodes no descriptor there, and whatever else as it is.
    """

    def __init__(self, compiled: Any, grid: tuple[int, ...], arguments: list) -> None:
        self.compiled, self.grid = compiled, grid
        self.run = compiled.run if isinstance(compiled, CompiledKernel) else None
        self.encoded = _Encoded.of(self.run, arguments) if self.run else None
        self.filled = _filler(arguments)

    def start(self, owners: list[int], stream: int) -> None:
        """Launch on a stream, with memory at these addresses."""
        if self.run is None or _is_hooked():
            self.compiled[self.grid](*self.filled(owners))
            return
        # what indexing with a grid does, but for its questions
        compiled, known = self.compiled, self.encoded or self
        known.run(
            *self.grid[:3], stream, compiled.function, compiled.packed_metadata, None, None, None,
            *known.filled(owners),
        )  # fmt: skip


def _filler(arguments: list) -> Callable[[list[int]], list]:
    """A function of the owners' addresses that gives the arguments, written out: a loop takes three times as long."""
    others: dict[str, Any] = {}

    def named(x: Any) -> str:
        others[f"x{len(others)}"] = x
        return f"x{len(others) - 1}"

    def written(x: Any) -> str:
        if isinstance(x, Location):
            return f"owners[{x.owner}] + {x.offset}"
        if isinstance(x, Descriptor):
            return f"{named(x.at)}({written(x.location)})"
        if type(x) is tuple:
            return f"({''.join(f'{written(field)}, ' for field in x)})"
        return named(x)

    return eval(f"lambda owners: [{', '.join(map(written, arguments))}]", others)


class Descriptor:
    """A TMA descriptor without its tensor, and where that lies."""

    def __init__(self, described: Any, location: Location) -> None:
        self.kind, self.fields, self.location = type(described), {**vars(described), "base": None}, location
        self.address = described.base.data_ptr()  # of the launch that was recorded

    def at(self, address: int) -> Any:
        """The descriptor of memory at an address."""
        made = self.kind.__new__(self.kind)
        made.__dict__ = {**self.fields, "base": _Address(address)}
        return made


class _EncodedDescriptor(Descriptor):
    """The same as Triton's launcher hands it on: of each address what is encoded there."""

    def __init__(self, descriptor: Descriptor, encode: Callable, metadata: Any) -> None:
        self.described, self.location, self.known = descriptor, descriptor.location, {}
        self.encode, self.metadata = encode, metadata

    def at(self, address: int) -> Any:
        encoded = self.known.get(address)
        if encoded is None:
            if len(self.known) >= MOST_DESCRIPTORS:
                self.known.clear()
            encoded = self.known[address] = self.encode(self.described.at(address), self.metadata)[0]
        return encoded


class _Encoded:
    """The arguments of a launch as Triton's launcher hands them on, of each descriptor what is encoded, and sizes."""

    def __init__(self, run: Any, arguments: list, launcher: Any, metadata: list) -> None:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        self.run = copy.copy(run)
        self.run.launch = launcher
        handed_on, kinds = [], iter(metadata)
        for x in arguments:
            handed_on.append(x)
            if isinstance(x, Descriptor):
                kind = next(kinds)
                handed_on[-1] = _EncodedDescriptor(x, make_tensordesc_arg, kind)
                handed_on += make_tensordesc_arg(x.at(x.address), kind)[1:]
        self.filled = _filler(handed_on)

    @classmethod
    def of(cls, run: Any, arguments: list) -> _Encoded | None:
        """None without a descriptor, and where this Triton keeps what it hands arguments to elsewhere."""
        if not any(isinstance(x, Descriptor) for x in arguments) or not inspect.isfunction(run.launch):
            return None
        known = inspect.getclosurevars(run.launch).nonlocals
        if not {"launcher", "tensordesc_meta"} <= set(known):
            return None
        return cls(run, arguments, known["launcher"], known["tensordesc_meta"])


Relaunch = FunctionRelaunch | TritonRelaunch


class _Address(int):
    """Stands for a tensor in a descriptor."""

    data_ptr = int.__int__


def _is_hooked() -> bool:
    """Whether somebody, a profiler for one, asked Triton to be told of launches."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
