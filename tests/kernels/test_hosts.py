"""Both hosts, without their kernels: what a call made again launches is what the first one did."""

import ctypes
import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.conftest import _poison
from tests.kernels.calls import KernelCall
from tests.kernels.test_masks import CALLS as MASKED
from tests.kernels.test_portable import CALLS as PORTABLE
from tests.kernels.test_sm90_backward import CALLS as OF_HOPPER
from tests.kernels.test_sm90_backward import VARIED
from tests.masks import draw

pytest.importorskip("triton")
from sagebwd import dispatch, eager, sage_attention, sage_attention_varlen
from sagebwd.call import Call
from sagebwd.kernels.host import device, replay
from sagebwd.kernels.portable import lists
from sagebwd.masks import lists as masks
from sagebwd.switches import switches

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
        """In the place of `replay._start`."""
        self.note(kernel, grid, *arguments, *(options[name] for name in kernel.arg_names[len(arguments) :]))
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
    """That ``again`` launches what ``first`` did; returns where each piece of memory lies now, by where it lay."""
    moved = {a.data_ptr(): b.data_ptr() for a, b in given}
    made, sizes = {}, {}
    assert len(first) == len(again)
    for (name, grid, arguments, zeros), (name_again, grid_again, others, zeros_again) in zip(first, again):
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
    taken = sorted((start, start + sizes[root]) for root, start in made.items())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
    for address in moved.values():
        assert not any(start <= address < end for start, end in taken)
    return made


def run(impl: str, call: KernelCall, notes: Notes) -> list[tuple[list, list, tuple]]:
    """What each direction launched, was given and gave back."""
    q, k, v, do, dlse = inputs = call.inputs()
    asked = call.call(q, k)
    notes.clear()
    saved = call.forward(impl, asked, inputs)
    forward = notes.copy()
    notes.clear()
    gradients = call.backward(impl, asked, saved, inputs)
    masks = asked.key_mask, asked.queries.cu_seqlens, asked.keys.cu_seqlens
    of_forward, of_backward = of_mask(asked)
    return [
        (forward, [q, k, v, *masks, *of_forward], saved),
        (notes.copy(), [do, dlse, q, k, v, *saved, *masks, *of_backward], gradients),
    ]


def of_mask(asked: Call) -> tuple[list[Tensor], list[Tensor]]:
    """What forward and backward read of a mask that is more than keys."""
    if asked.mask is None:
        return [], []
    by_query, by_key = lists.of_backward(asked)
    listed = lists.of_forward(asked).by_query
    forward = [x for x in (listed.elements, listed.lists, listed.first) if x is not None]
    return forward, [listed.elements, by_query.lists, by_key.lists]


@pytest.fixture
def notes(monkeypatch):
    """What is launched as if there were an H200."""
    monkeypatch.setattr(device, "capability", lambda device: 90)
    monkeypatch.setattr(device, "num_sms", lambda device: 132)
    noted = Notes()
    monkeypatch.setattr(replay, "_start", noted.launch)
    return noted


def identifiers(calls: list[tuple]) -> list[str]:
    return [f"{impl}-{name}" for impl, name in calls]


AGAIN = ALL + [("triton", name) for name in UNDER_A_MASK]


@pytest.mark.parametrize(("impl", "name"), AGAIN, ids=identifiers(AGAIN))
def test_a_call_made_again_launches_the_same(impl, name, notes):
    calls = (dataclasses.replace(CALLS[impl][name], seed=seed) for seed in (3, 4, 5))
    first, _, again = [run(impl, call, notes) for call in calls]
    assert [type(x) for x in replay._calls.values()] == [replay.Recording] * 2
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
ELSEWHERE += [("triton", name) for name in ("paper", "full", "smooth-q", "head-dim-72-packed")]


@pytest.mark.parametrize("heads", [None, 1])
@pytest.mark.parametrize(("impl", "name"), ELSEWHERE, ids=identifiers(ELSEWHERE))
def test_tensors_that_begin_at_an_odd_element_are_copied(impl, name, heads, notes):
    """TMA would refuse them; their copies are alike what is aligned, whichever came first."""
    call = CALLS[impl][name]
    call = call if heads is None else dataclasses.replace(call, heads=1, kv_heads=1)
    odd = dataclasses.replace(call, unaligned=("q", "k", "v", "do", "saved"))
    aligned = run(impl, call, notes)
    for first, second in ((call, odd), (odd, call)):
        replay._calls.clear()
        for one in (first, second, second, second, first, first):
            for (launched, *_), (expected, *_) in zip(run(impl, one, notes), aligned, strict=True):
                assert kinds(launched) == kinds(expected)
                assert all(address % 16 == 0 for address in described(launched))
        # forward's and, as saved scales are read as they lie, two of backward's
        assert [type(x) for x in replay._calls.values()] == [replay.Recording] * 3


def described(launched: list) -> list[int]:
    """Addresses in descriptors."""
    return [address_of(x) for _, _, arguments, _ in launched for x in arguments if hasattr(x, "base")]


def kinds(launched: list) -> list[tuple]:
    """Kernels, grids, and which arguments are descriptors."""
    return [(name, grid, [hasattr(x, "base") for x in arguments]) for name, grid, arguments, _ in launched]


EAGER = [(i, n) for i, n in ALL if n.endswith(("gqa-ragged", "key-mask", "packed", "fp16", "packed-causal-window"))]


@pytest.mark.parametrize(("impl", "name"), EAGER, ids=identifiers(EAGER))
def test_calls_without_operators_launch_the_same(impl, name, notes, monkeypatch):
    """Forward and backward together: what forward saves lies in one buffer, where its own backward finds it."""
    call, held, empty = CALLS[impl][name], [], torch.empty

    def kept(*args, **kwargs):  # lest memory of forward is backward's
        held.append(_poison(empty(*args, **kwargs)))
        return held[-1]

    monkeypatch.setattr(torch, "empty", kept)
    monkeypatch.setattr(dispatch, "choose", lambda *_: call.choice(impl))
    results = []
    for seed in (3, 4, 5, 6):
        *inputs, do, _ = dataclasses.replace(call, seed=seed).inputs()
        mask, cu_seqlens_q, cu_seqlens_k, *longest = call.settings()[:5]
        mask = None if mask is None else mask[:, None, None]
        leaves = [x.requires_grad_() for x in inputs]
        settings = {"recipe": call.recipe, "is_causal": call.is_causal, "window": call.window}
        notes.clear()
        with switches(deterministic=call.deterministic):
            if call.lengths_q:
                offsets = cu_seqlens_q, cu_seqlens_k
                o = sage_attention_varlen(*leaves, *offsets, *longest, **settings)
            else:
                o = sage_attention(*leaves, mask, enable_gqa=True, **settings)
            gradients = torch.autograd.grad(o, leaves, do)
        masks = mask, cu_seqlens_q, cu_seqlens_k
        given = [x for x in (*inputs, do, *masks, o, *gradients) if x is not None]
        results.append((notes.copy(), given, len(eager._plans) and next(iter(eager._plans.values()))))
    plan = results[-1][-1]
    assert isinstance(plan, eager.Plan)
    assert len(plan.backwards) == 1
    first, again = results[0], results[-1]
    assert_same(first[0], again[0], list(zip(first[1], again[1])))


@pytest.mark.parametrize("name", UNDER_A_MASK)
def test_masked_calls_without_operators_launch_the_same(name, notes, monkeypatch):
    """And read what was made of the mask, which lies where it lay, as long as the mask is the same."""
    call, kept, empty, read = CALLS["triton"][name], [], torch.empty, []

    def kept_alive(*args, **kwargs):
        kept.append(_poison(empty(*args, **kwargs)))
        return kept[-1]

    def listed(mask, key_mask, *arguments):
        found = masks.listed(mask, key_mask, *arguments)
        read.extend(x for x in (*mask, key_mask, found.lists, found.first) if x is not None)
        return found

    monkeypatch.setattr(torch, "empty", kept_alive)
    monkeypatch.setattr(lists, "listed", listed)
    monkeypatch.setattr(dispatch, "choose", lambda *_: call.choice("triton"))
    drawn = draw(call.mask, (call.batch, call.heads, call.tokens_q, call.tokens_k), call.dtype, 1)
    given_as = {"attn_mask" if isinstance(drawn, Tensor) else "block_mask": drawn}
    results = []
    for seed in (3, 4, 5, 6):
        *inputs, do, _ = dataclasses.replace(call, seed=seed).inputs()
        leaves = [x.requires_grad_() for x in inputs]
        settings = {"recipe": call.recipe, "is_causal": call.is_causal, "window": call.window}
        notes.clear()
        o = sage_attention(*leaves, enable_gqa=True, **given_as, **settings)
        gradients = torch.autograd.grad(o, leaves, do)
        results.append((notes.copy(), [*inputs, do, o, *gradients]))
    (plan,) = eager._plans.values()
    assert len(plan.backwards) == 1
    first, again = results[0], results[-1]
    assert first[0]
    assert_same(first[0], again[0], [*zip(first[1], again[1]), *zip(read, read)])
