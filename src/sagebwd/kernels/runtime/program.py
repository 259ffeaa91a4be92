"""Programs: the launches of one direction of a call, described once on tensors without memory and run on any others.

A family's ``forward`` or ``backward`` is called once for each specification of its tensors (dtypes, shapes, strides,
alignment) and settings, with tensors of the device meta. `launch` then compiles the kernel and notes it with the
places of its tensors, and `copy` and `zeros` note their work; nothing runs. `Program.run` allocates and launches. So
the first call takes the way of the thousandth, and nothing in a program depends on a tensor's values or on its
identity. Programs keep no memory of a GPU. Outside of a description the same functions run at once.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from sagebwd.cache import PLANS, TAKEN, layout_of, rounded
from sagebwd.environment import writable
from sagebwd.kernels.runtime.cuda import CudaKernel
from sagebwd.kernels.runtime.describing import is_described, local
from sagebwd.kernels.runtime.device import current_stream
from sagebwd.kernels.runtime.ffi import Function
from sagebwd.kernels.runtime.launchers import (
    Clear,
    Copy,
    Descriptor,
    Interpreted,
    Launcher,
    PackedLauncher,
    Place,
    TritonLauncher,
)
from sagebwd.kernels.runtime.numbers import Numbers, sampled

# By which a user names Triton's folder of compiled kernels.
TRITON_CACHE_DIR, TRITONS = "TRITON_CACHE_DIR", "Triton's"
T = TypeVar("T")
# A launch that takes longer than this on the host is one that compiles.
COMPILING_SECONDS = 0.5
# Of a program's scratch, all zeros of a part.
ZEROS = "zeros"
# Compilers that were announced.
_told: set[str] = set()
# Of kernels that have another form at other lengths, the lengths that each was compiled for first: kept from call to
# call, as it decides when a kernel is compiled, and no result.
_first_lengths: dict[Any, Hashable] = {}
# Held while Triton loads a kernel, whose launcher it publishes before its function: another thread would launch None.
_loading = threading.RLock()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """``kernel[grid](*arguments, **options)``: compiled and noted in a description, else started at once.

    Raises what compiling raises, `OutOfResources` for one.
    """
    builder = getattr(local, "builder", None)
    if builder is None:
        _start(kernel, grid, *arguments, **options)
    else:
        builder.steps.append((compiled(kernel, grid, arguments, options), kernel, grid, arguments, options))


def launch_by_length(
    lengths: Hashable, other: dict[str, Any], kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any
) -> None:
    """`launch` of a kernel of which other lengths have another form: with ``other`` in place of parameters.

    Who calls with one length pays for one form. The call of a second length compiles both, so that no later one waits
    for a compiler; where that one is captured in a graph, the next call of a new length does. lengths: None where all
    have this form.
    """
    launch(kernel, grid, *arguments, **options)
    builder = getattr(local, "builder", None)
    if builder is None or _first_lengths.setdefault(builder.steps[-1][0], lengths) == lengths:
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    given = tuple([other.get(name, x) for name, x in zip(kernel.arg_names, arguments)])
    with suppress(OutOfResources):  # which lengths that launch it will raise
        compiled(kernel, grid, given, {name: other.get(name, x) for name, x in options.items()})


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that is zero when the first of the launches begins, of the part that it is made in."""
    builder = getattr(local, "builder", None)
    if builder is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    x = torch.empty(shape, dtype=dtype, device="meta")
    builder.zeroed[_storage(x)] = x, builder.parts[-1]
    return x


def begin_part() -> None:
    """What `zeros` makes from here on is zero when the next of the launches begins, in memory that others had before.

    Without parts all zeros of a description are cleared at once.
    """
    builder = getattr(local, "builder", None)
    if builder is not None:
        builder.parts.append(len(builder.steps))


def copy(to: Tensor, x: Tensor) -> Tensor:
    """``to.copy_(x)``, in its turn among the launches."""
    builder = getattr(local, "builder", None)
    if builder is None:
        return to.copy_(x)
    if x.numel():  # of no elements there is no place
        builder.steps.append((to, x))
    return to


def _start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Start a kernel at once."""
    if isinstance(kernel, (Function, CudaKernel)):
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        device = tensors[0].device
        kernel.laid_out(grid, arguments, device).start([x.data_ptr() for x in tensors], current_stream(device))
        return
    if not isinstance(kernel, JITFunction):
        kernel[grid](*arguments, **options)
        return
    with _loading:
        _cached(lambda: kernel[grid](*arguments, **options))


def compiled(kernel: Any, grid: tuple[int, ...], arguments: tuple, options: dict[str, Any]) -> Any:
    """The kernel compiled for arguments like these; None where it is interpreted."""
    if isinstance(kernel, (Function, CudaKernel)):
        return kernel
    if not isinstance(kernel, JITFunction):
        return None
    began = time.perf_counter()

    def loaded() -> Any:
        found = kernel.run(*sampled(arguments), grid=grid, warmup=True, **options)
        found.run  # noqa: B018 (loads it, which raises OutOfResources where it does not fit)
        return found

    with _loading:
        found = _cached(loaded)
    if time.perf_counter() - began > COMPILING_SECONDS:
        say_what_takes_long(TRITONS, f"{triton.knobs.cache.dir} ({TRITON_CACHE_DIR})")
    return found


def _cached(run: Callable[[], T]) -> T:
    """What Triton gives; where its folder of compiled kernels cannot be written, with a warning, by another.

    That is asked when it fails: a folder that cannot be written may have all that is needed.
    """
    try:
        return run()
    except OSError:
        folder = Path(triton.knobs.cache.dir)
        other = writable(folder, TRITON_CACHE_DIR)
        if other == folder:
            raise
        triton.knobs.cache.dir = str(other)
        _told.add(TRITONS)  # by that warning: no later process finds anything
        return run()


def collect() -> None:
    """Collect what compilers leave, unless a user turned that off.

    Python would look for it in a later step, which would take .1 to .3 s where a process has many objects.
    """
    is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if gc.isenabled() and not is_capturing:
        gc.collect()


def say_what_takes_long(whose: str, folder: str) -> None:
    """Warn, once for each compiler, that kernels are compiled, and where later processes find them."""
    if whose not in _told:
        _told.add(whose)
        logging.getLogger("sagebwd").warning(
            f"sagebwd: {whose} compiler runs; the first call of each kind takes seconds, later processes find its "
            f"kernels in {folder}"
        )


def run(function: Callable[..., tuple[Tensor | None, ...]], *given: Any) -> tuple[Tensor | None, ...]:
    """``function(*given)`` by its program; in a description a part of that.

    Args:
        function: allocates by torch.empty and its kin, or `zeros`, works by `launch` and `copy` alone, and returns new
            tensors, or None in their place.
        given: tensors, named tuples of such, `Numbers` once at most, and whatever else can be hashed.
    """
    if is_described():
        return function(*given)
    leaves = list(leaves_of(given))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    numbers = [value for x in leaves if isinstance(x, Numbers) for value in x.values]
    key = function, *(layout_of(x) if isinstance(x, Tensor) else x for x in leaves)
    program = PLANS.get(key)
    if program is None:
        program = Program.of(function, given)
        PLANS.put(key, program)
    return program.run(tensors, None, numbers)


def leaves_of(given: tuple) -> Iterator[Any]:
    """Fields of named tuples in named tuples and of tuples of tensors, in their order, and the rest as it is."""
    for x in given:
        if hasattr(x, "_fields") or (x.__class__ is tuple and x and isinstance(x[0], Tensor)):
            yield from leaves_of(x)
        else:
            yield x


class Builder(NamedTuple):
    """A description under way: its steps in their order, tensors that are zero by their storage, each with the first
    step of its part, and these first steps."""

    steps: list[tuple]
    zeroed: dict[int, tuple[Tensor, int]]
    parts: list[int]


@contextmanager
def _describing() -> Iterator[Builder]:
    """Inside, launches are noted."""
    before, local.builder = getattr(local, "builder", None), Builder([], {}, [0])
    try:
        with torch.no_grad():
            yield local.builder
    finally:
        local.builder = before


class _Memory(NamedTuple):
    """An output's allocation."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Room(NamedTuple):
    """Bytes of the scratch, and the steps from the first to the last that they are taken in."""

    begin: int
    end: int
    first: int
    last: int


def _scratch(
    builder: Builder, owned: Container[int], scratch: int, lent: dict[int, tuple[int, int]]
) -> tuple[int, dict[int, tuple[int, int]], dict[int, tuple[int, int, int]]]:
    """Bytes of the scratch, owner and offset of each storage that nobody owns, and these and bytes to clear before a
    step.

    Two share bytes where the last step of one is before the first of the other. Zeros of a part lie side by side.

    scratch: its number among the owners. lent: of outputs, by storage, owner and bytes, which are scratch until the
    first step that takes the output.
    """
    taken: dict[int, int] = {}  # the first step that takes what is owned
    blocks: dict[tuple, dict[int, int]] = {}  # bytes by storage, of what is placed as one
    lives: dict[tuple, tuple[int, int]] = {}
    for number, step in enumerate(builder.steps):
        for x in _tensors_of(step):
            storage = _storage(x)
            if storage in owned:
                taken.setdefault(storage, number)
                continue
            _, part = builder.zeroed.get(storage, (None, None))
            block = (storage,) if part is None else (ZEROS, part)
            first, _ = lives.get(block, (number if part is None else part, 0))
            blocks.setdefault(block, {})[storage] = rounded(x.untyped_storage().nbytes())
            lives[block] = first, number
    whole = len(builder.steps)
    memories = [(owner, size, taken.get(storage, whole)) for storage, (owner, size) in lent.items()]
    memories.append((scratch, float("inf"), whole))
    rooms: dict[int, list[_Room]] = {owner: [] for owner, _, _ in memories}
    places, zeroed = {}, {}
    # the largest first, each in the first gap
    for block in sorted(blocks, key=lambda x: (-sum(blocks[x].values()), lives[x])):
        size, (first, last) = sum(blocks[block].values()), lives[block]
        for owner, bytes_there, until in memories:
            begin = _gap(rooms[owner], size, first, last)
            if last < until and begin + size <= bytes_there:
                break
        rooms[owner].append(_Room(begin, begin + size, first, last))
        if block[0] is ZEROS:
            zeroed[first] = owner, begin, size
        for storage, own in blocks[block].items():
            places[storage] = owner, begin
            begin += own
    return max((room.end for room in rooms[scratch]), default=0), places, zeroed


def _gap(rooms: list[_Room], size: int, first: int, last: int) -> int:
    """Where the first so many bytes begin that no room has in these steps."""
    begin = 0
    for room in sorted(rooms):
        if room.first <= last and first <= room.last:
            if begin + size <= room.begin:
                break
            begin = max(begin, room.end)
    return begin


class Program:
    """Launches and copies on memory by owner: the inputs, the outputs' allocations, a workspace, then scratch."""

    def __init__(
        self, builder: Builder, inputs: list[Tensor], outputs: tuple[Tensor | None, ...], device: torch.device,
        rooms: dict[int, tuple[int, int]],
    ) -> None:  # fmt: skip
        self.device, self.memory = device, []
        self.outputs: list[tuple[int | None, tuple | None]] = []  # number and view of each; None: no tensor here
        self.owners = {_storage(x): (owner, 0) for owner, x in enumerate(inputs)}
        self.launches: list[Launcher] = []
        lent: dict[int, tuple[int, int]] = {}
        workspace = len(inputs) + sum(x is not None and n not in rooms for n, x in enumerate(outputs))
        self.scratch, self.has_workspace = workspace + bool(rooms), bool(rooms)
        for number, x in enumerate(outputs):
            if x is None or number in rooms:
                self.outputs.append((None, None))
            if x is None:
                continue
            storage, size = _storage(x), x.untyped_storage().nbytes()
            assert storage not in self.owners, "an output is a tensor of its own"
            if number in rooms:
                offset, room = rooms[number]
                assert x.is_contiguous(), "a workspace keeps outputs that lie alone"
                assert x.storage_offset() == 0, "a workspace keeps outputs that lie alone"
                assert size <= room, "a workspace has too little room"
                self.owners[storage] = workspace, offset
            else:
                view = None if size == x.nbytes else (x.shape, x.stride(), x.storage_offset())
                self.owners[storage] = len(inputs) + len(self.memory), 0
                self.outputs.append((len(self.memory), view))
                shape, stride = (x.shape, x.stride()) if view is None else ((size // x.itemsize,), (1,))
                self.memory.append(_Memory(shape, stride, x.dtype))
            if storage in builder.zeroed:
                self.launches.append(Clear(*self.owners[storage], size, device))
            elif number not in rooms:
                lent[storage] = self.owners[storage][0], size
        self.scratch_bytes, places, zeroed = _scratch(builder, self.owners, self.scratch, lent)
        self.owners |= places
        for number, step in enumerate(builder.steps):
            cleared = zeroed.get(number)
            if cleared is not None:
                self.launches.append(Clear(*cleared, device))
            self.launches.append(self._launcher(*step))
        self.owners = {}  # of tensors that are gone

    @classmethod
    def of(
        cls, function: Callable[..., tuple[Tensor | None, ...]], given: tuple,
        rooms: dict[int, tuple[int, int]] | None = None,
    ) -> Program:  # fmt: skip
        """Describe ``function(*given)``; rooms: of outputs that a workspace keeps, offset and bytes there."""
        inputs: list[Tensor] = []
        device = next(x.device for x in leaves_of(given) if isinstance(x, Tensor))
        began = time.perf_counter()
        with _describing() as builder:
            outputs = function(*_described(given, inputs))
        if time.perf_counter() - began > COMPILING_SECONDS:
            collect()
        rooms = {n: room for n, room in (rooms or {}).items() if outputs[n] is not None}
        return cls(builder, inputs, outputs, device, rooms)

    @classmethod
    def alone(cls, function: Callable[[], None], device: torch.device) -> Program:
        """Launches of a function on memory that nobody has written, to be timed."""
        with _describing() as builder:
            function()
        return cls(builder, [], (), device, {})

    def run(
        self, tensors: list[Tensor], workspace: Tensor | None = None, numbers: Sequence[int | float] = ()
    ) -> tuple[Tensor | None, ...]:
        """The outputs for inputs, a workspace and values of `Numbers`; None where the workspace has one."""
        device = self.device
        own = [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in self.memory]
        tensors += own
        if self.has_workspace:
            tensors.append(workspace)
        if self.scratch_bytes:
            tensors.append(torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device))
        addresses = [x.data_ptr() for x in tensors]
        if numbers:
            addresses += numbers
            tensors += numbers
        stream = current_stream(device)
        for one in self.launches:
            one.start(addresses, tensors, stream)
        return tuple([
            None if number is None else own[number] if view is None else own[number].as_strided(*view)
            for number, view in self.outputs
        ])  # fmt: skip

    def _launcher(self, *step: Any) -> Launcher:
        if len(step) == 2:
            return Copy(*map(self._placed, step))
        made, kernel, grid, arguments, options = step
        placed = [*map(self._placed, arguments)]
        if made is None:
            return Interpreted(kernel, grid, placed, options)
        if isinstance(made, (Function, CudaKernel)):
            places = [place for x, place in zip(arguments, placed) if isinstance(x, Tensor)]
            return PackedLauncher(made.laid_out(grid, arguments, self.device), places)
        constants = [options[x] for x in kernel.arg_names[len(arguments) :]]
        return TritonLauncher(made, (*grid, 1, 1), [*placed, *constants])

    def _placed(self, x: Any) -> Any:
        """An argument with places for its tensors."""
        if isinstance(x, Tensor):
            if not x.numel():
                return torch.empty(x.shape, dtype=x.dtype, device=self.device)
            owner, offset = self.owners[_storage(x)]
            return Place(owner, offset + x.storage_offset() * x.itemsize, x.dtype, x.shape, x.stride())
        if isinstance(x, tuple) and any(isinstance(field, (Tensor, tuple)) for field in x):
            fields = map(self._placed, x)
            return type(x)(*fields) if hasattr(x, "_fields") else tuple(fields)
        if isinstance(getattr(x, "base", None), Tensor):
            return Descriptor(x, self._placed(x.base))
        return x


def _described(given: Any, inputs: list[Tensor]) -> Any:
    """The same with tensors of the device meta, copied first where an address is no multiple of 16."""
    if isinstance(given, Tensor):
        described = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
        inputs.append(described)
        return described if given.data_ptr() % TAKEN == 0 else dense(described)
    if isinstance(given, Numbers):
        return given.places()
    if isinstance(given, tuple) and (hasattr(given, "_fields") or type(given) is tuple):
        fields = [_described(x, inputs) for x in given]
        return type(given)(*fields) if hasattr(given, "_fields") else tuple(fields)
    return given


def dense(x: Tensor) -> Tensor:
    """A copy in memory of its own, with dimensions that are expanded expanded still."""
    once = x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())]
    return copy(torch.empty_like(once), once).expand(x.shape)


def _tensors_of(x: Any) -> Iterator[Tensor]:
    """Tensors in tuples, in lists and in TMA descriptors."""
    if isinstance(x, Tensor):
        if x.numel():
            yield x
    elif isinstance(x, (tuple, list)):
        for field in x:
            yield from _tensors_of(field)
    elif isinstance(getattr(x, "base", None), Tensor):
        yield from _tensors_of(x.base)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
