"""Launches of a call, recorded once and replayed by later calls of its kind.

Shapes, strides, types, alignment and settings determine which kernels a call launches, on which memory and with which
numbers. Working that out takes longer than many a call runs (docs/log/2026-11-22-host.md). So the second call of a
kind, equal in all but addresses, is watched; later ones allocate memory and launch. The first is not watched, since
watching takes longer still and lengths that never repeat have no second call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sagebwd.kernels.host.device import clear, current_stream
from sagebwd.kernels.host.ffi import Function, Packed
from sagebwd.kernels.host.relaunch import Descriptor, FunctionRelaunch, Location, Relaunch, TritonRelaunch

# Calls remembered; beyond that, as lengths that never repeat would have it, all are forgotten.
MOST_CALLS = 1024
# A launch that takes longer than this on the host is one that compiles.
COMPILING_SECONDS = 0.5
# Pieces of memory begin where PyTorch's own do.
ALIGNMENT = 512
# By what is alike: how to do it again; True after the first call, False where it cannot be done so.
_calls: dict[Hashable, Recording | bool] = {}
# Compilers that were announced.
_told: set[str] = set()
# Where `launch` notes launches: in the thread whose call is watched alone.
_watched_here = threading.local()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """``kernel[grid](*arguments, **options)``, noted where this thread's call is watched."""
    began = time.perf_counter()
    compiled = _start(kernel, grid, *arguments, **options)
    if compiled is not None and not isinstance(compiled, Function) and time.perf_counter() - began > COMPILING_SECONDS:
        say_what_takes_long("Triton's", "~/.triton/cache (TRITON_CACHE_DIR)")
    noted = getattr(_watched_here, "launches", None)
    if noted is not None:
        noted.append((compiled, grid, arguments, [options[x] for x in kernel.arg_names[len(arguments) :]]))


def _start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
    """As Triton launches; what it compiled, or None if it interprets."""
    return kernel[grid](*arguments, **options)


def repeat(function: Callable[..., tuple[Tensor | None, ...]], *given: Any) -> tuple[Tensor | None, ...]:
    """``function(*given)``, which launches kernels by `launch` and returns new tensors, or None in their place.

    Args:
        function: what it launches, and on what, follows from ``given`` but for addresses, beside alignment to 16
            bytes. It writes to no tensor but by its kernels; one that does, or that copies, is run anew every time.
        given: tensors, named tuples of such, and whatever else can be hashed.
    """
    leaves = list(_leaves(given))
    key = function, *map(_alike, leaves), _shared(leaves)
    known = _calls.get(key)
    if isinstance(known, Recording):
        return known.again(leaves)
    if known:
        return _watched(function, given, leaves, key)
    if known is None:
        if len(_calls) >= MOST_CALLS:
            _calls.clear()
        _calls[key] = True
    return function(*given)


def recorded(function: Callable[..., tuple[Tensor | None, ...]], *given: Any) -> Recording | None:
    """What `repeat` replays for a call, if it does."""
    leaves = list(_leaves(given))
    found = _calls.get((function, *map(_alike, leaves), _shared(leaves)))
    return found if isinstance(found, Recording) else None


def _leaves(given: tuple) -> Iterator[Any]:
    """What is in named tuples, and the rest as it is."""
    for x in given:
        if hasattr(x, "_fields"):
            yield from _leaves(x)
        else:
            yield x


def say_what_takes_long(whose: str, folder: str) -> None:
    """Warn, once for each compiler, that kernels are compiled, and where later processes find them."""
    if whose not in _told:
        _told.add(whose)
        logging.getLogger("sagebwd").warning(
            f"sagebwd: {whose} compiler runs; the first call of each kind takes seconds, later processes find its "
            f"kernels in {folder}"
        )


def _alike(x: Any) -> Hashable:
    """What Triton looks at in a tensor: where it lies but for its address, beside alignment."""
    if isinstance(x, Tensor):
        return x.dtype, x.shape, x.stride(), x.data_ptr() % 16, x.device.index
    return x


def _shared(given: list) -> tuple[int, ...] | None:
    """Which tensors begin at the same address, as offsets of sequences given twice do; None where none do."""
    addresses = [x.data_ptr() for x in given if isinstance(x, Tensor)]
    return None if len(set(addresses)) == len(addresses) else tuple(map(addresses.index, addresses))


def _watched(function: Callable, given: tuple, leaves: list, key: Hashable) -> tuple[Tensor | None, ...]:
    """The result of a call, watched and remembered."""
    _watched_here.launches = launched = []
    try:
        with _Watch() as watch:
            outputs = function(*given)
    finally:
        _watched_here.launches = None
    try:
        _calls[key] = Recording.of(leaves, watch, launched, outputs)
    except _NotRepeatableError:
        _calls[key] = False
    return outputs


class _NotRepeatableError(Exception):
    """A call did what a recording cannot do again."""


class _Watch(TorchDispatchMode):
    """Notes the tensors that PyTorch makes meanwhile, and whether it does more than to make and view tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Tensor, bool]] = []  # and whether of zeros
        self.nothing_else = True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("empty", "empty_like", "new_empty", "new_empty_strided", "zeros"):
            self.made.append((result, name == "zeros"))
        else:
            returns = function._schema.returns
            self.nothing_else &= all(x.alias_info is not None and not x.alias_info.is_write for x in returns)
        return result


class _Owners:
    """Whose memory tensors are: of those given, of those made for outputs, of what need not be zero or of what must.

    Owners are counted in this order. ``memory``: what outputs are made of; ``sizes``: bytes of the other two.
    """

    def __init__(self, given: list, watch: _Watch, outputs: list[Tensor]) -> None:
        tensors = [x for x in given if isinstance(x, Tensor)]
        self._given = {x.data_ptr(): owner for owner, x in enumerate(tensors) if x.numel() > 0}
        if not watch.nothing_else:
            raise _NotRepeatableError
        returned = {_storage(x) for x in outputs}
        scratch = len(tensors) + sum(_storage(x) in returned for x, _ in watch.made)
        self.memory: list[tuple[Callable[..., Tensor], torch.Size, torch.dtype]] = []
        self.sizes = [0, 0]
        self._made: dict[int, tuple[int, int]] = {}  # of each storage: its owner, and where in the owner's memory
        for x, zeros in watch.made:
            if _storage(x) in returned:
                self._made[_storage(x)] = len(tensors) + len(self.memory), 0
                self.memory.append((self._maker(x, zeros), x.shape, x.dtype))
            else:
                self._made[_storage(x)] = scratch + zeros, self.sizes[zeros]
                self.sizes[zeros] += -(-x.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        self._tensors = len(tensors)

    @staticmethod
    def _maker(x: Tensor, zeros: bool) -> Callable[..., Tensor]:
        if x.is_contiguous():
            return torch.zeros if zeros else torch.empty
        if zeros or x.untyped_storage().nbytes() != x.numel() * x.itemsize:
            raise _NotRepeatableError
        return partial(torch.empty_strided, stride=x.stride())

    def locate(self, x: Tensor) -> tuple[int, int]:
        """Whose memory a tensor is, and how far into it."""
        if x.data_ptr() in self._given:
            return self._given[x.data_ptr()], 0
        if _storage(x) not in self._made:
            raise _NotRepeatableError
        owner, offset = self._made[_storage(x)]
        return owner, offset + x.data_ptr() - x.untyped_storage().data_ptr()

    def output(self, x: Tensor) -> tuple[int, tuple | None]:
        """Which of ``memory`` an output is, and as what view if not as it is."""
        if _storage(x) not in self._made:
            raise _NotRepeatableError
        number = self._made[_storage(x)][0] - self._tensors
        make, shape, dtype = self.memory[number]
        if x.dtype != dtype:
            raise _NotRepeatableError
        whole = x.shape == shape and x.stride() == make(shape, dtype=dtype, device="meta").stride()
        return number, None if whole else (x.shape, x.stride(), x.storage_offset())

    def launch(self, compiled: Any, grid: tuple[int, ...], arguments: tuple, constants: list) -> Relaunch:
        """How to do a launch again."""
        if compiled is None:
            raise _NotRepeatableError  # interpreted
        if isinstance(compiled, Function):
            locations = [self.locate(x) for x in arguments if isinstance(x, Tensor)]
            return FunctionRelaunch(Packed(compiled, arguments), locations)
        return TritonRelaunch(compiled, (*grid, 1, 1), [*map(self._placed, arguments), *constants])

    def _placed(self, x: Any) -> Any:
        """An argument without its tensors, which are `Location` then; a tuple with tensors is a plain one."""
        if isinstance(x, Tensor):
            return Location(*self.locate(x)) if x.numel() > 0 else 0
        if isinstance(x, tuple) and any(isinstance(field, Tensor) for field in x):
            return tuple(map(self._placed, x))
        if isinstance(getattr(x, "base", None), Tensor):
            return Descriptor(x, Location(*self.locate(x.base)))
        return x


class Recording(NamedTuple):
    """A call's launches and the memory that it makes, to do again with other tensors; see `_Owners`."""

    device: torch.device
    memory: list[tuple[Callable[..., Tensor], torch.Size, torch.dtype]]
    scratch_bytes: int
    zero_bytes: int
    outputs: list[tuple[int | None, tuple | None]]
    launches: list[Relaunch]

    @classmethod
    def of(cls, given: list, watch: _Watch, launched: list, outputs: tuple[Tensor | None, ...]) -> Recording:
        """What a call that was watched did."""
        owners = _Owners(given, watch, [x for x in outputs if x is not None])
        launches = [owners.launch(*one) for one in launched]
        views = [(None, None) if x is None else owners.output(x) for x in outputs]
        return cls(outputs[0].device, owners.memory, *owners.sizes, views, launches)

    def again(self, given: list) -> tuple[Tensor | None, ...]:
        """The call's outputs for other tensors."""
        return self.again_at([x.data_ptr() for x in given if isinstance(x, Tensor)])

    def again_at(self, addresses: list[int]) -> tuple[Tensor | None, ...]:
        """The call's outputs for tensors that begin at these addresses."""
        memory = [make(shape, dtype=dtype, device=self.device) for make, shape, dtype in self.memory]
        self.launch([*addresses, *[x.data_ptr() for x in memory]])
        return tuple(
            None if x is None else memory[x] if view is None else memory[x].as_strided(*view)
            for x, view in self.outputs
        )

    def launch(self, owners: list[int]) -> None:
        """Launch with the tensors given, then those of ``memory``, at these addresses."""
        stream, size = current_stream(self.device), self.scratch_bytes + self.zero_bytes
        if size:
            scratch = torch.empty(size, dtype=torch.uint8, device=self.device)
            start = scratch.data_ptr()
            owners += start, start + self.scratch_bytes
            if self.zero_bytes:
                clear(start + self.scratch_bytes, self.zero_bytes, self.device, stream)
        for launch in self.launches:
            launch.start(owners, stream)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
