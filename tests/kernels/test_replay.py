"""Calls made again: the same launches, on the same pieces of memory, whatever addresses tensors have by then."""

import ctypes
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

replay = pytest.importorskip("sagebwd.kernels.host.replay")
relaunch = pytest.importorskip("sagebwd.kernels.host.relaunch")


class Kernel:
    """A stand-in for out = x + scale * y + 1 on float32, which counts what Triton itself launched."""

    arg_names = ("x", "y", "out", "tokens", "scale", "BLOCK")

    def __init__(self, interpreted: bool = False) -> None:
        self.bound, self.interpreted, self.blocks = 0, interpreted, []

    def __getitem__(self, grid):
        def start(*arguments, num_warps, **options):
            self.bound += 1
            self.run(*arguments, *(options[name] for name in self.arg_names[len(arguments) :]))
            return None if self.interpreted else Compiled(self)

        return start

    def run(self, x, y, out, tokens: int, scale: float, block: int) -> None:
        x, y, out = (floats(p, tokens) for p in (x, y, out))
        self.blocks.append(block)
        for i in range(tokens):
            out[i] = x[i] + scale * y[i] + 1


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        assert len(grid) >= 3
        return self.kernel.run


class Descriptor:
    def __init__(self, base: Tensor, shape: tuple[int, ...]) -> None:
        self.base, self.shape = base, shape


def floats(pointer, count: int):
    """What a kernel sees at an address, a tensor or a descriptor."""
    pointer = getattr(pointer, "base", pointer)
    address = pointer if isinstance(pointer, int) else pointer.data_ptr()
    return (ctypes.c_float * count).from_address(address)


def call_of(kernel: Kernel):
    """A call of two kernels: sums through memory of its own, partly zeros, into two outputs, one a view."""

    def call(x: Tensor, y: Tensor, negative: bool) -> tuple[Tensor, Tensor, Tensor]:
        tokens, scale = len(x), -1.0 if negative else 1.0
        _, between = torch.empty(2, tokens).unbind()
        zeros, _ = torch.zeros(2 * tokens).split((tokens, tokens))
        both = torch.empty(2, tokens)
        out = torch.empty_like(x)
        replay.launch(kernel, (3,), x, y, between, tokens, BLOCK=16, scale=scale, num_warps=4)
        replay.launch(
            kernel, (3, 2), Descriptor(between, (tokens,)), zeros, both[1], tokens, BLOCK=32, scale=1.0, num_warps=4
        )
        replay.launch(kernel, (1,), both[1], y.view(-1), out, tokens, BLOCK=64, scale=0.0, num_warps=4)
        return out, both[1], x.new_empty(0)

    return call


def expected(x: Tensor, y: Tensor, negative: bool) -> tuple[Tensor, Tensor]:
    between = x - y + 2 if negative else x + y + 2
    return between + 1, between


def check(call, x: Tensor, y: Tensor, negative: bool = False) -> None:
    out, middle, nothing = replay.repeat(call, x, y, negative)
    for actual, wanted in zip((out, middle), expected(x, y, negative)):
        torch.testing.assert_close(actual, wanted)
    assert nothing.shape == (0,)


def test_a_call_alike_repeats_its_launches():
    kernel = Kernel()
    call = call_of(kernel)
    for _ in range(4):
        check(call, torch.randn(64), torch.randn(64))
    assert kernel.bound == 2 * 3
    assert kernel.blocks == [16, 32, 64] * 4
    assert isinstance(*replay._calls.values(), replay.Recording)


class Scaled(NamedTuple):
    at: Tensor | None
    factor: float


class OfTuples(Kernel):
    """As `Kernel`, with y and its factor in one argument, and nothing in another."""

    arg_names = ("x", "y", "nothing", "out", "tokens", "BLOCK")

    def run(self, x, y, nothing, out, tokens: int, block: int) -> None:
        assert tuple(nothing) == (None, 1.0)
        super().run(x, y[0], out, tokens, y[1], block)


def test_tensors_in_tuples_are_found():
    def call(x: Tensor, y: Tensor) -> tuple[Tensor]:
        between, out = torch.empty(2, 64).unbind()
        nothing = Scaled(None, 1.0)
        replay.launch(kernel, (1,), x, Scaled(y, 2.0), nothing, between, 64, BLOCK=16, num_warps=4)
        described = Descriptor(between, (64,))
        replay.launch(kernel, (1,), described, Scaled(y.view(-1), -1.0), nothing, out, 64, BLOCK=32, num_warps=4)
        return (out,)

    kernel = OfTuples()
    for _ in range(4):
        x, y = torch.randn(64), torch.randn(64)
        kept = weakref.ref(y)
        torch.testing.assert_close(replay.repeat(call, x, y)[0], x + y + 2)
        del y
        assert kept() is None
    assert kernel.bound == 2 * 2
    assert kernel.blocks == [16, 32] * 4


def test_what_is_no_tensor_in_a_tuple_stands_as_it_is():
    given = [(relaunch.Location(0, 8), None, (3, 4), 0.5), Scaled(None, 1.0), 7]
    assert relaunch._filler(given)([100]) == [(108, None, (3, 4), 0.5), Scaled(None, 1.0), 7]


@pytest.mark.parametrize("interpreted", [False, True])
def test_the_first_call_that_compiles_says_so_once(interpreted, monkeypatch, caplog):
    monkeypatch.setattr(replay, "_told", set())
    monkeypatch.setattr(replay, "COMPILING_SECONDS", 0)
    call = call_of(Kernel(interpreted))
    for tokens in (64, 64, 65):
        check(call, torch.randn(tokens), torch.randn(tokens))
    told = [record.getMessage() for record in caplog.records if record.name == "sagebwd"]
    assert len(told) == (0 if interpreted else 1)
    assert all("Triton's compiler runs" in message for message in told)


def test_another_compiler_is_announced_too(monkeypatch, caplog):
    monkeypatch.setattr(replay, "_told", {"Triton's"})
    for whose in ("Triton's", "CuTe DSL's", "CuTe DSL's"):
        replay.say_what_takes_long(whose, "a folder")
    (record,) = caplog.records
    assert "CuTe DSL's compiler runs" in record.getMessage()
    assert record.getMessage().endswith("a folder")


def test_launches_are_noted_in_the_thread_that_is_watched_alone():
    """As backward runs in a thread of its own: what another launches meanwhile is not this call's."""
    other = Kernel()

    def call(x: Tensor) -> tuple[Tensor]:
        out = torch.empty(8)
        replay.launch(kernel, (1,), x, x, out, 8, BLOCK=16, scale=0.0, num_warps=4)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(replay.launch, other, (1,), x, x, x, 8, BLOCK=16, scale=0.0, num_warps=4).result()
        return (out,)

    kernel = Kernel()
    for _ in range(4):
        replay.repeat(call, torch.zeros(8))
    assert len(kernel.blocks) == 4
    assert len(other.blocks) == 2


def test_outputs_are_tensors_of_their_own():
    call = call_of(Kernel())
    results = []
    for _ in range(5):
        x, y = torch.randn(64), torch.randn(64)
        results.append((replay.repeat(call, x, y, True), expected(x, y, True)))
    for (out, middle, _), wanted in results:
        torch.testing.assert_close((out, middle), wanted)


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(65)[1:],  # 4 bytes past an aligned address
        torch.ones(128)[::2],
        torch.ones(64, 1),
        torch.ones(63),
        torch.ones(64, dtype=torch.int32),
    ],
    ids=["alignment", "stride", "dimensions", "shape", "dtype"],
)
def test_another_tensor_is_another_call(other):
    def call(x: Tensor) -> tuple[Tensor]:
        out = torch.empty(8)
        replay.launch(kernel, (1,), x, x, out, 8, BLOCK=16, scale=0.0, num_warps=4)
        return (out,)

    kernel = Kernel()
    for x in [torch.ones(64)] * 3 + [other] * 3:
        replay.repeat(call, x)
    assert kernel.bound == 4


def test_no_tensor_is_kept():
    call = call_of(Kernel())
    for _ in range(3):
        x, y = torch.randn(64), torch.randn(64)
        kept = [weakref.ref(t) for t in (x, y, *replay.repeat(call, x, y, True))]
        del x, y
        assert [t() for t in kept] == [None] * 5


def test_another_setting_is_another_call():
    kernel = Kernel()
    call = call_of(kernel)
    x, y = torch.randn(64), torch.randn(64)
    for negative in (False, True) * 3:
        check(call, x, y, negative)
    assert kernel.bound == 12


def test_two_tensors_that_are_one():
    """As offsets of sequences are, where queries and keys have the same: repeated, but not for two that are two."""
    kernel = Kernel()
    call = call_of(kernel)
    for _ in range(4):
        x = torch.randn(64)
        check(call, x, x)
        check(call, torch.randn(64), torch.randn(64))
    assert kernel.bound == 2 * 2 * 3


def test_what_is_interpreted_stays_so():
    kernel = Kernel(interpreted=True)
    call = call_of(kernel)
    for _ in range(3):
        check(call, torch.randn(64), torch.randn(64))
    assert kernel.bound == 9


@pytest.mark.parametrize(
    "deed",
    [
        lambda x: x.clone(),
        lambda x: x + 1,
        lambda x: x.mul_(2),
        lambda x: torch.empty(8).copy_(x),
        lambda x: x[0].item(),
    ],
    ids=["copy", "arithmetic", "write", "into its own", "read"],
)
def test_a_call_that_does_more_is_run_anew(deed):
    done = []

    def call(x: Tensor) -> tuple[Tensor]:
        done.append(deed(x))
        out = torch.empty(8)
        replay.launch(kernel, (1,), x, x, out, 8, BLOCK=16, scale=0.0, num_warps=4)
        return (out,)

    kernel = Kernel()
    for _ in range(3):
        replay.repeat(call, torch.ones(8))
    assert len(done) == kernel.bound == 3


def test_a_tensor_from_elsewhere_is_not_remembered():
    """It may be gone by the next call."""
    elsewhere = [torch.full((8,), value) for value in (1.0, 2.0, 3.0)]

    def call(x: Tensor) -> tuple[Tensor]:
        out = torch.empty(8)
        replay.launch(Kernel(), (1,), x, elsewhere.pop(), out, 8, BLOCK=16, scale=1.0, num_warps=4)
        return (out,)

    assert [replay.repeat(call, torch.zeros(8))[0][0].item() for _ in range(3)] == [4.0, 3.0, 2.0]


def test_calls_that_never_come_again_are_forgotten(monkeypatch):
    monkeypatch.setattr(replay, "MOST_CALLS", 10)
    call = call_of(Kernel())
    for length in range(1, 40):
        check(call, torch.zeros(length), torch.zeros(length))
        assert len(replay._calls) <= 10


def test_the_first_of_its_kind_is_not_watched(monkeypatch):
    """Lengths may never repeat."""
    monkeypatch.setattr(replay, "_watched", None)
    call = call_of(Kernel())
    for length in range(1, 40):
        check(call, torch.zeros(length), torch.zeros(length))
