"""Launches made again: the same compiled kernel, whatever addresses the arguments have by then."""

import pytest
import torch

launches = pytest.importorskip("sagebwd.kernels.launches")


class Kernel:
    """A stand-in that notes how it was launched: by Triton, or as what Triton compiled it to."""

    arg_names = ("x", "tokens", "scale", "BLOCK")

    def __init__(self, interpreted: bool = False) -> None:
        self.calls, self.interpreted = [], interpreted

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.calls.append(("kernel", grid, arguments, options))
            return None if self.interpreted else Compiled(self)

        return launch


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.calls.append(("compiled", grid[:3], arguments))


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(launches, "_calls", {})


def run(kernel: Kernel, x: torch.Tensor, *settings) -> None:
    launch = launches.Repeated(x, *settings)
    for block in (16, 32):
        launch(kernel, (3, 2), x, len(x), BLOCK=block, scale=0.5, num_warps=4)


def test_a_call_alike_launches_what_was_compiled():
    kernel, first, second = Kernel(), torch.zeros(64), torch.ones(64)
    run(kernel, first, True)
    run(kernel, second, True)
    assert [call[0] for call in kernel.calls] == ["kernel"] * 2 + ["compiled"] * 2
    assert kernel.calls[0][3] == {"BLOCK": 16, "scale": 0.5, "num_warps": 4}
    for call, block in zip(kernel.calls[2:], (16, 32)):
        assert call[1] == (3, 2, 1)
        assert call[2][0] is second
        assert call[2][1:] == (64, 0.5, block)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(65)[1:],  # 4 bytes past an aligned address
        torch.zeros(128)[::2],
        torch.zeros(64, 1),
        torch.zeros(64, dtype=torch.int32),
    ],
    ids=["alignment", "stride", "shape", "dtype"],
)
def test_another_tensor_is_another_call(other):
    kernel = Kernel()
    run(kernel, torch.zeros(64))
    run(kernel, other)
    assert [call[0] for call in kernel.calls] == ["kernel"] * 4


def test_another_setting_is_another_call():
    kernel = Kernel()
    run(kernel, torch.zeros(64), True)
    run(kernel, torch.zeros(64), False)
    assert [call[0] for call in kernel.calls] == ["kernel"] * 4


def test_another_kernel_or_option_in_its_place_is_triton_s_to_find():
    kernel, other, x = Kernel(), Kernel(), torch.zeros(64)
    for which, block in ((kernel, 16), (kernel, 32), (other, 32), (other, 32)):
        launches.Repeated(x)(which, (1,), x, 64, BLOCK=block, scale=0.5)
    assert [call[0] for call in kernel.calls] == ["kernel"] * 2
    assert [call[0] for call in other.calls] == ["kernel", "compiled"]


def test_what_is_interpreted_stays_so():
    kernel = Kernel(interpreted=True)
    for _ in range(2):
        run(kernel, torch.zeros(64))
    assert [call[0] for call in kernel.calls] == ["kernel"] * 4


def test_calls_that_never_come_again_are_forgotten(monkeypatch):
    monkeypatch.setattr(launches, "MOST_CALLS", 10)
    kernel = Kernel()
    for length in range(1, 100):
        run(kernel, torch.zeros(length))
        assert len(launches._calls) <= 11
