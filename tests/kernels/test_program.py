"""Programs: described once, the same launches on the same pieces of memory whatever addresses tensors have."""

import ctypes
import logging
import os
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

program = pytest.importorskip("sagebwd.kernels.runtime.program")
launchers = pytest.importorskip("sagebwd.kernels.runtime.launchers")
from triton.runtime.errors import OutOfResources  # noqa: E402

from sagebwd import environment  # noqa: E402
from sagebwd.cache import PLANS, Cache  # noqa: E402
from sagebwd.kernels.runtime.numbers import Numbers  # noqa: E402
from tests.threads import at_once  # noqa: E402

compiled_by_triton = program.compiled  # which a fixture stands in for


class Kernel:
    """A stand-in for out = x + scale * y + 1 on float32, which counts what it was compiled for."""

    arg_names = ("x", "y", "out", "tokens", "scale", "BLOCK")

    def __init__(self, interpreted: bool = False) -> None:
        self.bound, self.interpreted, self.blocks = 0, interpreted, []

    def __getitem__(self, grid):
        def start(*arguments, num_warps, **options):
            self.run(*arguments, *(options[name] for name in self.arg_names[len(arguments) :]))

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


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """What compiles the stand-ins."""

    def compiled(kernel, grid, arguments, options):
        kernel.bound += 1
        return None if kernel.interpreted else Compiled(kernel)

    monkeypatch.setattr(program, "compiled", compiled)


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
        zeros, _ = program.zeros((2 * tokens,), torch.float32, x.device).split((tokens, tokens))
        both = torch.empty(2, tokens)
        out = torch.empty_like(x)
        program.launch(kernel, (3,), x, y, between, tokens, BLOCK=16, scale=scale, num_warps=4)
        program.launch(
            kernel, (3, 2), Descriptor(between, (tokens,)), zeros, both[1], tokens, BLOCK=32, scale=1.0, num_warps=4
        )
        program.launch(kernel, (1,), both[1], y.view(-1), out, tokens, BLOCK=64, scale=0.0, num_warps=4)
        return out, both[1], x.new_empty(0)

    return call


def expected(x: Tensor, y: Tensor, negative: bool) -> tuple[Tensor, Tensor]:
    between = x - y + 2 if negative else x + y + 2
    return between + 1, between


def check(call, x: Tensor, y: Tensor, negative: bool = False) -> None:
    out, middle, nothing = program.run(call, x, y, negative)
    for actual, wanted in zip((out, middle), expected(x, y, negative)):
        torch.testing.assert_close(actual, wanted)
    assert nothing.shape == (0,)


@pytest.mark.parametrize("interpreted", [False, True])
def test_a_call_alike_repeats_its_launches(interpreted):
    """What is interpreted is handed tensors."""
    kernel = Kernel(interpreted)
    call = call_of(kernel)
    for _ in range(4):
        check(call, torch.randn(64), torch.randn(64))
    assert kernel.bound == 3
    assert kernel.blocks == [16, 32, 64] * 4
    assert len(PLANS) == 1


class Scaled(NamedTuple):
    at: Tensor | None
    factor: float


class OfTuples(Kernel):
    """As `Kernel`, with y and its factor in one argument, and nothing in another."""

    arg_names = ("x", "y", "nothing", "out", "tokens", "BLOCK")

    def run(self, x, y, nothing, out, tokens: int, block: int) -> None:
        assert tuple(nothing) == (None, 1.0)
        super().run(x, y[0], out, tokens, y[1], block)


class OfNumbers(Kernel):
    """As `Kernel`, of a factor as `Numbers` give it."""

    arg_names = ("x", "given", "out", "tokens", "BLOCK")

    def run(self, x, given, out, tokens: int, block: int) -> None:
        y, (factor, fraction) = given
        super().run(x, y, out, tokens, (factor - 3) // 4 + fraction, block)


@pytest.mark.parametrize("interpreted", [False, True])
def test_numbers_of_a_kind_have_one_program(interpreted):
    kernel = OfNumbers(interpreted)

    def call(x: Tensor, y: Tensor, numbers) -> tuple[Tensor]:
        out = torch.empty_like(x)
        program.launch(kernel, (1,), x, Scaled(y, numbers), out, len(x), BLOCK=16, num_warps=4)
        return (out,)

    for factor, fraction in ((2, 0.5), (0, -1.0), (-1, 0.0), (16, 0.25)):
        x, y = torch.randn(8), torch.randn(8)
        (out,) = program.run(call, x, y, Numbers((factor, fraction)))
        torch.testing.assert_close(out, x + (factor + fraction) * y + 1)
    assert kernel.bound == len(PLANS) == 1
    assert Numbers((1,)) == Numbers((2**28,)) != Numbers((2**29,)) != Numbers((1.0,))
    assert Numbers((2**29,)) == Numbers((-(2**61),))


def test_tensors_in_tuples_are_found():
    def call(x: Tensor, y: Tensor) -> tuple[Tensor]:
        between, out = torch.empty(2, 64).unbind()
        nothing = Scaled(None, 1.0)
        program.launch(kernel, (1,), x, Scaled(y, 2.0), nothing, between, 64, BLOCK=16, num_warps=4)
        described = Descriptor(between, (64,))
        program.launch(kernel, (1,), described, Scaled(y.view(-1), -1.0), nothing, out, 64, BLOCK=32, num_warps=4)
        return (out,)

    kernel = OfTuples()
    for _ in range(4):
        x, y = torch.randn(64), torch.randn(64)
        kept = weakref.ref(y)
        torch.testing.assert_close(program.run(call, x, y)[0], x + y + 2)
        del y
        assert kept() is None
    assert kernel.bound == 2
    assert kernel.blocks == [16, 32] * 4


def test_another_compiler_is_announced_too(monkeypatch, caplog):
    monkeypatch.setattr(program, "_told", {"Triton's"})
    for whose in ("Triton's", "CuTe DSL's", "CuTe DSL's"):
        program.say_what_takes_long(whose, "a folder")
    (record,) = caplog.records
    assert "CuTe DSL's compiler runs" in record.getMessage()
    assert record.getMessage().endswith("a folder")


class HalfLoaded(program.JITFunction):
    """A kernel that loads as Triton's do: its launcher is there before its function."""

    def __init__(self) -> None:
        self._run = self.function = None

    def run(self, *_, grid, warmup):
        """The compiled kernel."""
        return Loaded(self)


class Loaded:
    def __init__(self, kernel: HalfLoaded) -> None:
        self.kernel = kernel

    @property
    def run(self) -> object:
        if self.kernel._run is None:
            self.kernel._run = object()
            time.sleep(0.05)
            self.kernel.function = 1
        return self.kernel._run


def test_of_two_threads_one_loads_a_kernel_before_the_other_has_it():
    """Regression: the other launched a function that was None."""
    kernel = HalfLoaded()

    def first_call(_: int) -> object:
        compiled_by_triton(kernel, (1,), (), {})
        return kernel.function

    assert at_once(first_call, range(4)) == [1] * 4


def test_launches_are_noted_in_the_thread_that_describes_alone():
    """What another launches meanwhile is not this call's."""
    other = Kernel()

    def call(x: Tensor) -> tuple[Tensor]:
        out = torch.empty(8)
        program.launch(kernel, (1,), x, x, out, 8, BLOCK=16, scale=0.0, num_warps=4)
        at_once(lambda y: program.launch(other, (1,), y, y, y, 8, BLOCK=16, scale=0.0, num_warps=4), [torch.zeros(8)])
        return (out,)

    kernel = Kernel()
    for _ in range(4):
        program.run(call, torch.zeros(8))
    assert len(kernel.blocks) == 4
    assert len(other.blocks) == 1, "once, when the call was described"


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
        program.launch(kernel, (1,), x, x, out, 8, BLOCK=16, scale=0.0, num_warps=4)
        return (out,)

    kernel = Kernel()
    for x in [torch.ones(64)] * 3 + [other] * 3:
        program.run(call, x)
    assert kernel.bound == 2


def test_another_setting_is_another_call():
    kernel = Kernel()
    call = call_of(kernel)
    x, y = torch.randn(64), torch.randn(64)
    for negative in (False, True) * 3:
        check(call, x, y, negative)
    assert kernel.bound == 6


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("fits", [False, True])
def test_a_second_length_compiles_what_other_lengths_launch(fits, captured, monkeypatch):
    """Of which a call asks nothing: where it does not fit, or a graph is captured, the call goes on without it."""
    kernel, made, asked = Kernel(), {}, []

    def compiled(kernel, grid, arguments, options):
        asked.append(options["BLOCK"])
        if options["BLOCK"] == 32 and not fits:
            raise OutOfResources(2, 1, "shared memory")
        return made.setdefault(options["BLOCK"], Compiled(kernel))

    def call(x: Tensor, has_other: bool) -> tuple[Tensor]:
        out = torch.empty_like(x)
        program.launch_by_length(
            len(x) if has_other else None, {"BLOCK": 32}, kernel, (1,), x, x, out, len(x), BLOCK=16, scale=0.0,
            num_warps=4,
        )  # fmt: skip
        return (out,)

    monkeypatch.setattr(program, "compiled", compiled)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: captured)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    lengths = 8, 8, 9, 8, 10
    for tokens in lengths:
        program.run(call, torch.zeros(tokens), True)
    other = [] if captured else [32]
    assert asked == [16, 16, *other, 16, *other]
    made.clear()
    for tokens in lengths:
        program.run(call, torch.zeros(tokens), False)
    assert asked[-3:] == [16] * 3
    assert kernel.blocks == [16] * 2 * len(lengths)


def test_two_tensors_that_are_one():
    """As offsets of sequences are, where queries and keys have the same: whose they are is no part of a program."""
    kernel = Kernel()
    call = call_of(kernel)
    for _ in range(4):
        x = torch.randn(64)
        check(call, x, x)
        check(call, torch.randn(64), torch.randn(64))
    assert kernel.bound == 3


def test_copies_are_made_in_their_turn():
    """Of a tensor that launches have written, to one that they read."""

    def call(x: Tensor) -> tuple[Tensor]:
        first, last = torch.empty(4, 2), torch.empty(8)
        program.launch(kernel, (1,), x, x, first, 8, BLOCK=16, scale=1.0, num_warps=4)
        turned = program.copy(torch.empty(2, 4), first.t())
        program.launch(kernel, (1,), turned, x, last, 8, BLOCK=16, scale=0.0, num_warps=4)
        return (last,)

    kernel = Kernel()
    for _ in range(3):
        x = torch.randn(8)
        (found,) = program.run(call, x)
        torch.testing.assert_close(found, (2 * x + 1).view(4, 2).t().reshape(8) + 1)


def test_scratch_of_one_step_is_another_s_later():
    """A chain of five tensors that are no longer read takes the memory of two."""

    def call(x: Tensor) -> tuple[Tensor]:
        between, out = x, torch.empty(256)
        for _ in range(5):
            y = torch.empty(256)
            program.launch(kernel, (1,), between, x, y, 256, BLOCK=16, scale=1.0, num_warps=4)
            between = y
        program.launch(kernel, (1,), between, x, out, 256, BLOCK=16, scale=1.0, num_warps=4)
        return (out,)

    kernel, x = Kernel(), torch.randn(256)
    assert program.Program.of(call, (x,)).scratch_bytes == 2 * x.nbytes
    torch.testing.assert_close(program.run(call, x)[0], 7 * x + 6)


def test_scratch_lies_in_outputs_until_these_are_written():
    """Where it has room there and is not read by what writes the output; never in one that begins with zeros."""

    def call(x: Tensor) -> tuple[Tensor, ...]:
        first, second = torch.empty(256), torch.empty(256)
        cleared, last, small = program.zeros((256,), torch.float32, x.device), torch.empty(256), torch.empty(16)
        program.launch(kernel, (1,), x, x, first, 256, BLOCK=16, scale=1.0, num_warps=4)
        program.launch(kernel, (1,), first, x, second, 256, BLOCK=16, scale=1.0, num_warps=4)
        program.launch(kernel, (1,), second, x, last, 256, BLOCK=16, scale=1.0, num_warps=4)
        program.launch(kernel, (1,), x, x, small, 16, BLOCK=16, scale=1.0, num_warps=4)
        return cleared, last, small

    kernel, x = Kernel(), torch.randn(256)
    assert program.Program.of(call, (x,)).scratch_bytes == x.nbytes, "the first lies in the last"
    for _ in range(2):
        cleared, last, small = program.run(call, x)
        assert not cleared.any()
        torch.testing.assert_close(last, 4 * x + 3)
        torch.testing.assert_close(small, 2 * x[:16] + 1)


def test_zeros_of_a_part_are_cleared_where_it_begins():
    """In memory that the part before has written."""

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.empty(256), torch.empty(256)
        for out in found:
            program.begin_part()
            sums = program.zeros((256,), torch.float32, x.device)
            program.launch(kernel, (1,), sums, x, sums, 256, BLOCK=16, scale=1.0, num_warps=4)
            program.launch(kernel, (1,), sums, x, out, 256, BLOCK=16, scale=0.0, num_warps=4)
        return found

    kernel, x = Kernel(), torch.randn(256)
    assert program.Program.of(call, (x,)).scratch_bytes == x.nbytes
    for _ in range(2):
        for out in program.run(call, x):
            torch.testing.assert_close(out, x + 2)


def test_a_tensor_that_begins_at_an_odd_element_is_copied():
    kernel, addresses = Kernel(), []
    call, run = call_of(kernel), kernel.run

    def noted(x, *rest):
        addresses.append(x if isinstance(x, int) else getattr(x, "base", x))
        run(x, *rest)

    kernel.run = noted
    for _ in range(3):
        check(call, torch.randn(65)[1:], torch.randn(65)[1:])
    assert all(address % 16 == 0 for address in addresses)


def test_outputs_that_a_workspace_keeps():
    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        out, kept = torch.empty(8), torch.empty(8)
        program.launch(kernel, (1,), x, x, kept, 8, BLOCK=16, scale=1.0, num_warps=4)
        program.launch(kernel, (1,), kept, x, out, 8, BLOCK=16, scale=0.0, num_warps=4)
        return out, kept

    kernel = Kernel()
    made = program.Program.of(call, (torch.ones(8),), {1: (512, 32)})
    for _ in range(2):
        x, workspace = torch.randn(8), torch.empty(1024, dtype=torch.uint8)
        out, kept = made.run([x], workspace)
        assert kept is None
        torch.testing.assert_close(workspace[512:544].view(torch.float32), 2 * x + 1)
        torch.testing.assert_close(out, 2 * x + 2)


def test_a_cache_drops_what_was_used_longest_ago():
    cache = Cache(3)
    for key in "abc":
        cache.put(key, key)
    assert cache.get("a") == "a"
    cache.put("d", "d")
    assert [cache.get(key) for key in "abcd"] == ["a", None, "c", "d"]
    assert len(cache) == 3


def test_a_hit_takes_no_lock_until_another_entry_is_put(monkeypatch):
    """Nor does a miss."""
    cache, taken = Cache(3), []
    for key in "abc":
        cache.put(key, key)

    class Counted:
        def __enter__(self):
            taken.append(1)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(cache, "_lock", Counted())
    for key in "abc" * 3:
        assert cache.get(key) == key
    assert cache.get("d") is None
    assert len(taken) == 2, "c was put last"
    assert cache.values() == ["c", "a", "b"]


def test_threads_share_a_cache():
    cache = Cache(8)

    def work(seed: int) -> None:
        for number in range(2000):
            key = number * seed % 23
            found = cache.get(key)
            assert found in (None, (key,))
            cache.put(key, (key,))
            if number % 97 == 0:
                cache.clear()

    at_once(work, (1, 2, 3, 5))
    assert len(cache) <= 8


@pytest.mark.parametrize("nowhere", ["/proc/1/nowhere", "file/nowhere"])
def test_where_triton_keeps_nothing_a_process_has_its_own(nowhere, monkeypatch, tmp_path, caplog):
    """Regression: of a user whose home cannot be made every call of a kernel raised FileNotFoundError."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    def run(key, grid, warmup):
        return SimpleNamespace(run=FileCacheManager(key).put(b"code", "kernel.cubin"))

    kernel = program.JITFunction.__new__(program.JITFunction)
    kernel.run = run
    (tmp_path / "file").touch()
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path / nowhere)
        monkeypatch.setattr(environment, "_unwritable", set())
        monkeypatch.setattr(program, "_told", set())
        monkeypatch.setattr(program, "COMPILING_SECONDS", 0)
        with caplog.at_level(logging.WARNING, "sagebwd"):
            found = [compiled_by_triton(kernel, (1,), (key,), {}) for key in ("one", "other")]
    for compiled in found:
        assert Path(compiled.run).is_relative_to(environment.folder_of_process(os.getpid()))
        assert Path(compiled.run).read_bytes() == b"code"
    (said,) = caplog.messages
    for part in (f"{tmp_path / nowhere} cannot be written (", "set TRITON_CACHE_DIR to one"):
        assert part in said


def test_an_error_that_is_not_of_tritons_folder_is_raised(tmp_path):
    from triton import knobs

    def run(grid, warmup):
        raise FileNotFoundError("no compiler")

    kernel = program.JITFunction.__new__(program.JITFunction)
    kernel.run = run
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        with pytest.raises(FileNotFoundError, match="no compiler"):
            compiled_by_triton(kernel, (1,), (), {})
