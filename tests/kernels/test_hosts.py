"""Both families without their kernels: what a program launches is what the family launches on tensors at once."""

import ctypes
import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests import torch_lists
from tests.attention_case import AttentionCase, tensors_in
from tests.gpus import as_if_on_hopper
from tests.kernels.test_masks import CALLS as MASKED
from tests.kernels.test_portable import CALLS as PORTABLE
from tests.kernels.test_sm90_backward import CALLS as OF_HOPPER
from tests.kernels.test_sm90_backward import VARIED

pytest.importorskip("triton")
from sagebwd import dispatch
from sagebwd.cache import PLANS
from sagebwd.kernels.runtime import program

# a forward in CuTe DSL is no kernel of Triton's, whose launches are watched here
HOPPER = "triton/hopper"
ALL = [(HOPPER, change + name) for change in ("", "deterministic-") for name in VARIED]
ALL += [("triton", name) for name in PORTABLE]
UNDER_A_MASK = ("bias-float32-window", "bias-fp16", "document", "paper-document")
CALLS = {HOPPER: OF_HOPPER, "triton": PORTABLE | {name: MASKED[name] for name in UNDER_A_MASK}}

# no size or stride is so large, no address so small: at a fixed address, Python's heap begins at some 10 MiB
SMALLEST_ADDRESS = 1 << 23
ZEROS = bytes(4)


class Notes(list):
    """Launches: kernel, grid, arguments, and which of them are addresses of zeros."""

    def launch(self, kernel, grid, *arguments, **options):
        """In the place of `program._start`."""
        self.note(kernel, grid, *arguments, *(options[name] for name in kernel.arg_names[len(arguments) :]))

    def compiled(self, kernel, grid, arguments, options):
        """In the place of `program.compiled`."""
        return Compiled(self, kernel)

    def note(self, kernel, grid, *arguments):
        arguments = tuple(leaves(arguments))
        zeros = [ctypes.string_at(address_of(x), len(ZEROS)) == ZEROS for x in arguments if is_address(x)]
        self.append((kernel.__name__, grid, arguments, zeros))


def leaves(arguments) -> Iterator:
    """What is in tuples, and the rest as it is."""
    for x in arguments:
        if isinstance(x, tuple):
            yield from x
        else:
            yield x


class Compiled:
    """A compiled kernel that is noted instead of run."""

    def __init__(self, notes: Notes, kernel) -> None:
        self.notes, self.kernel = notes, kernel

    def __getitem__(self, grid):
        assert grid[-2:] == (1, 1)
        return lambda *arguments: self.notes.note(self.kernel, grid[:-2], *arguments)


def is_address(x) -> bool:
    if isinstance(x, Tensor):
        return x.numel() > 0
    return hasattr(x, "base") or (isinstance(x, int) and x > SMALLEST_ADDRESS)


def address_of(x) -> int:
    x = getattr(x, "base", x)
    return x if isinstance(x, int) else x.data_ptr()


def assert_same(first: list, again: list, given: list[tuple[Tensor, Tensor]]) -> dict[int, int]:
    """That ``again`` launches what ``first`` did; returns where each piece of memory lies now, by where it lay.

    Two pieces share bytes where no launch that has one is between those that have the other.
    """
    moved = {a.data_ptr(): b.data_ptr() for a, b in given}
    made, sizes, lives = {}, {}, {}
    assert len(first) == len(again)
    for number, (launched, launched_again) in enumerate(zip(first, again)):
        (name, grid, arguments, zeros), (name_again, grid_again, others, zeros_again) = launched, launched_again
        assert (name, grid, zeros) == (name_again, grid_again, zeros_again)
        assert len(arguments) == len(others)
        for x, y in zip(arguments, others):
            if isinstance(x, Tensor) and x.numel() == 0:
                assert y == 0
                continue
            if not is_address(x):
                assert type(x) is type(y)
                assert x == y
                continue
            if hasattr(x, "base"):
                assert type(x) is type(y)
                assert {**vars(x), "base": None} == {**vars(y), "base": None}
                x = x.base
            if x.data_ptr() in moved:
                assert address_of(y) == moved[x.data_ptr()]
                continue
            storage = x.untyped_storage()
            start = address_of(y) - (x.data_ptr() - storage.data_ptr())
            assert made.setdefault(storage.data_ptr(), start) == start
            sizes[storage.data_ptr()] = storage.nbytes()
            begun, _ = lives.get(storage.data_ptr(), (number, number))
            lives[storage.data_ptr()] = begun, number
    taken = [(start, start + sizes[root], *lives[root]) for root, start in made.items()]
    for one, other in itertools.combinations(taken, 2):
        apart = one[1] <= other[0] or other[1] <= one[0]
        assert apart or one[3] < other[2] or other[3] < one[2]
    for address in moved.values():
        assert not any(start <= address < end for start, end, *_ in taken)
    return made


def run(impl: str, call: AttentionCase, notes: Notes) -> list[tuple[list, list, tuple]]:
    """What each direction launched, was given and gave back."""
    q, k, v, do, dlse = inputs = call.inputs()
    asked = call.call(q, k)
    notes.clear()
    saved = call.forward(impl, asked, inputs)
    forward = notes.copy()
    notes.clear()
    gradients = call.backward(impl, asked, saved, inputs)
    masks = asked.key_mask, asked.queries.cu_seqlens, asked.keys.cu_seqlens
    return [
        (forward, [q, k, v, *masks, *notes.read[0]], saved),
        (notes.copy(), [do, dlse, q, k, v, *saved, *masks, *notes.read[1]], gradients),
    ]


@pytest.fixture
def notes(monkeypatch):
    """What is launched as if there were an H200."""
    as_if_on_hopper(monkeypatch)
    torch_lists.stand_in(monkeypatch.setattr)
    noted, prepared = Notes(), dispatch.prepared
    monkeypatch.setattr(program, "_start", noted.launch)
    monkeypatch.setattr(program, "compiled", noted.compiled)

    def read(direction, *arguments):
        found = prepared(direction, *arguments)
        noted.read[direction == "backward"] = tensors_in(found.lists)
        return found

    noted.read = [[], []]
    monkeypatch.setattr(dispatch, "prepared", read)
    return noted


@contextmanager
def at_once() -> Iterator[None]:
    """Inside, families run on the tensors themselves."""
    run, program.run = program.run, lambda function, *given: function(*given)
    try:
        yield
    finally:
        program.run = run


def identifiers(calls: list[tuple]) -> list[str]:
    return [f"{impl}-{name}" for impl, name in calls]


AGAIN = ALL + [("triton", name) for name in UNDER_A_MASK]
# results of other widths are copies, and no kernel is run here
AGAIN = [(impl, name) for impl, name in AGAIN if CALLS[impl][name].head_dim % 8 == 0]


@pytest.mark.parametrize(("impl", "name"), AGAIN, ids=identifiers(AGAIN))
def test_programs_launch_what_families_do(impl, name, notes):
    calls = [dataclasses.replace(CALLS[impl][name], seed=seed) for seed in (3, 4, 5)]
    with at_once():
        first = run(impl, calls[0], notes)
    _, again = [run(impl, call, notes) for call in calls[1:]]
    assert len(PLANS) == 2
    for (launched, given, outputs), (launched_again, given_again, outputs_again) in zip(first, again):
        pairs = [(a, b) for a, b in zip(given, given_again) if a is not None and a.numel() > 0]
        made = assert_same(launched, launched_again, pairs)
        assert launched
        for a, b in zip(outputs, outputs_again, strict=True):
            if a is None:
                assert b is None
                continue
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
            if a.untyped_storage().data_ptr() in made:
                root = a.untyped_storage().data_ptr()
                assert b.data_ptr() == made[root] + a.data_ptr() - root
            else:  # no kernel writes it
                assert torch.equal(a, b)


# beside each family's own: one head, whose packed tokens are contiguous as they lie
ELSEWHERE = [(f, n) for f, n in ALL if n.endswith(("gqa-ragged", "key-mask", "packed", "packed-causal-window"))]
ELSEWHERE += [("triton", name) for name in ("paper", "full")]


@pytest.mark.parametrize("heads", [None, 1])
@pytest.mark.parametrize(("impl", "name"), ELSEWHERE, ids=identifiers(ELSEWHERE))
def test_tensors_that_begin_at_an_odd_element_are_copied(impl, name, heads, notes):
    """TMA would refuse them; their copies are alike what is aligned, whichever came first."""
    call = CALLS[impl][name]
    call = call if heads is None else dataclasses.replace(call, heads=1, kv_heads=1)
    odd = dataclasses.replace(call, unaligned=("q", "k", "v", "do", "saved"))
    aligned = run(impl, call, notes)
    for one in (odd, odd, call):
        for (launched, *_), (expected, *_) in zip(run(impl, one, notes), aligned, strict=True):
            assert kinds(launched) == kinds(expected)
            described = [x for _, _, arguments, _ in launched for x in arguments if hasattr(x, "base")]
            assert all(address_of(x) % 16 == 0 for x in described)
    assert len(PLANS) == 4


def kinds(launched: list) -> list[tuple]:
    """Kernels, grids, and which arguments are descriptors."""
    return [(name, grid, [hasattr(x, "base") for x in arguments]) for name, grid, arguments, _ in launched]
