"""Recorded launches, done again with memory at other addresses.

A launch by Triton's own interface asks for the device, the stream and hooks, and encodes every TMA descriptor in
Python: 12 of them take three times as long as the rest. What is encoded follows from the address alone.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, NamedTuple

import triton
from triton.compiler import CompiledKernel

from sagebwd.kernels.host.ffi import Packed

# Encoded descriptors kept of each argument: a training step has some memory after memory, the next the same again.
MOST_DESCRIPTORS = 256


class FunctionRelaunch(NamedTuple):
    """Whose memory each tensor of a function is, and how far into it."""

    packed: Packed
    locations: list[tuple[int, int]]

    def start(self, owners: list[int], stream: int) -> None:
        """Launch on a stream, with memory at these addresses."""
        self.packed.start([owners[owner] + offset for owner, offset in self.locations], stream)


class TritonRelaunch:
    """A compiled kernel, its grid and two ones, what to launch it with, and where addresses and descriptors go.

    Args: arguments, and behind them the fields of those that are tuples with tensors; addresses, of what of these is a
    tensor: index, owner and how far into its memory; descriptors, likewise, none of them a field, as Triton encodes
    none there; tuples, index of each and where its fields begin and end.
    """

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        arguments: list,
        addresses: list[tuple[int, int, int]],
        descriptors: list[tuple[int, int, int]],
        tuples: list[tuple[int, int, int]],
    ) -> None:
        self.compiled, self.grid, self.arguments, self.addresses = compiled, grid, arguments, addresses
        self.tuples = tuples
        self.descriptors = [(*found, _Descriptor(arguments[found[0]])) for found in descriptors]
        self.run = compiled.run if isinstance(compiled, CompiledKernel) else None
        self.encoded = _Encoded.of(self) if descriptors and self.run else None
        for index, *_ in descriptors:  # no tensor is kept
            arguments[index] = None

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

    def filled(self, owners: list[int]) -> list:
        """The arguments."""
        arguments = self.arguments.copy()
        for index, owner, offset in self.addresses:
            arguments[index] = owners[owner] + offset
        for index, owner, offset, descriptor in self.descriptors:
            arguments[index] = descriptor.at(owners[owner] + offset)
        return _with_tuples(arguments, self.tuples)


def _with_tuples(arguments: list, tuples: list[tuple[int, int, int]]) -> list:
    """The arguments, each tuple made of its fields behind them; no longer than they are."""
    if tuples:
        for index, start, stop in tuples:
            arguments[index] = tuple(arguments[start:stop])
        del arguments[tuples[0][1] :]
    return arguments


class _Descriptor:
    """A TMA descriptor without its tensor."""

    def __init__(self, described: Any) -> None:
        self.kind, self.fields = type(described), {**vars(described), "base": None}

    def at(self, address: int) -> Any:
        """The descriptor of memory at an address."""
        made = self.kind.__new__(self.kind)
        made.__dict__ = {**self.fields, "base": _Address(address)}
        return made


class _Encoded:
    """The arguments of a launch as Triton's launcher hands them on, of each descriptor what is encoded, and sizes."""

    def __init__(self, launch: TritonRelaunch, launcher: Any, metadata: list) -> None:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        self.run, self.encode = copy.copy(launch.run), make_tensordesc_arg
        self.run.launch = launcher
        self.arguments, self.descriptors = [], []
        descriptors = {index: rest for index, *rest in launch.descriptors}
        moved = {}
        for index, x in enumerate(launch.arguments):
            moved[index] = len(self.arguments)
            if index not in descriptors:
                self.arguments.append(x)
                continue
            owner, offset, descriptor = descriptors[index]
            kind = metadata[len(self.descriptors)]
            self.descriptors.append((len(self.arguments), owner, offset, descriptor, kind, {}))
            self.arguments += [None, *make_tensordesc_arg(x, kind)[1:]]
        self.addresses = [(moved[index], *location) for index, *location in launch.addresses]
        by = len(self.arguments) - len(launch.arguments)  # fields lie behind every descriptor
        self.tuples = [(moved[index], start + by, stop + by) for index, start, stop in launch.tuples]

    @classmethod
    def of(cls, launch: TritonRelaunch) -> _Encoded | None:
        """None where this Triton keeps what it hands arguments to elsewhere: its own launcher then does."""
        if not inspect.isfunction(launch.run.launch):
            return None
        known = inspect.getclosurevars(launch.run.launch).nonlocals
        if not {"launcher", "tensordesc_meta"} <= set(known):
            return None
        return cls(launch, known["launcher"], known["tensordesc_meta"])

    def filled(self, owners: list[int]) -> list:
        """The arguments."""
        arguments = self.arguments.copy()
        for index, owner, offset in self.addresses:
            arguments[index] = owners[owner] + offset
        for index, owner, offset, descriptor, kind, known in self.descriptors:
            address = owners[owner] + offset
            encoded = known.get(address)
            if encoded is None:
                if len(known) >= MOST_DESCRIPTORS:
                    known.clear()
                encoded = known[address] = self.encode(descriptor.at(address), kind)[0]
            arguments[index] = encoded
        return _with_tuples(arguments, self.tuples)


Relaunch = FunctionRelaunch | TritonRelaunch


class _Address(int):
    """Stands for a tensor in a descriptor."""

    data_ptr = int.__int__


def _is_hooked() -> bool:
    """Whether somebody, a profiler for one, asked Triton to be told of launches."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
