"""The budget by bytes: what is counted and matched, without a GPU."""

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")
from sagebwd import sage_attention
from sagebwd.kernels.host import replay
from tools import passes
from tools.passes import Case, Launch, Row


class Pair(NamedTuple):
    first: torch.Tensor | None
    second: int


class Descriptor:
    def __init__(self, base: torch.Tensor) -> None:
        self.base = base


def test_each_memory_counts_once():
    x, y = torch.zeros(10, 4), torch.zeros(8, dtype=torch.int8)
    arguments = x, x[:5], Descriptor(x), Pair(y, 3), Pair(None, 4), torch.empty(0), 7, "name"
    assert passes.bytes_of(arguments) == 160 + 8


def test_launches_are_matched_with_what_ran():
    launches = [Launch("mean_kernel", 100), Launch("kernel_cutlass", 300)]
    one = [("mean_kernel_0d1d", 0, 2), ("Memset (Device)", 3, 4), ("void kernel_cutlass_forward", 6, 11)]
    events = [(name, start + 20 * run, end + 20 * run) for run in range(2) for name, start, end in one]
    rows = passes.rows_of(launches, events, 2)
    assert rows == [
        Row("mean_kernel", 100, 2, 9), Row("Memset (Device)", None, 1, 1), Row("kernel_cutlass", 300, 5, 2)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="not the same each"):
        passes.rows_of(launches, events[:-1], 2)
    text = passes.table("a case", rows)
    assert "| kernel_cutlass | 0.0 | 0.0 | 5.0 | 2.0 |" in text
    assert text.splitlines()[-1] == "| sum | 0.0 | 0.0 | 8.0 | 12.0 |"


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")
def test_a_call_is_noted_launch_by_launch():
    replay._calls.clear()
    x = torch.randn(1, 2, 40, 32, dtype=torch.bfloat16)
    with passes.noted() as launches:
        sage_attention(x, x, x, impl="triton", recipe="token")
    names = [launch.kernel for launch in launches]
    assert names[-1] == "forward_kernel"
    assert names.count("quantize_kernel") == 3  # Q, K and V
    assert all(launch.moved >= x.numel() for launch in launches if launch.kernel == "quantize_kernel")
    assert replay._start.__module__ == replay.__name__


def test_a_step_has_every_gradient():
    for lengths in ((), (40, 40)):
        gradients = passes.runs_of(Case(32, 2, 2, 2, 40, lengths=lengths), "token", "cpu")["both"]()
        assert len(gradients) == 3
        assert all(x.isfinite().all() for x in gradients)


def test_every_case_has_a_size_of_its_own():
    assert len(set(passes.CASES.values())) == len(passes.CASES)
