"""Fixtures of every test: few threads, and memory that sagebwd allocates is poisoned before it is written."""

import contextlib
import gc
import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # chosen once, before anything imports triton
    with contextlib.suppress(ImportError):
        from tests import interpreter

        interpreter.hasten()

from tests import gpus

POISON_INT8 = -128  # never a code: psi gives -127 to 127


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    # what watches a call must not see it; what traces one must
    unseen = torch._C._DisableTorchDispatch if type(tensor) is torch.Tensor else contextlib.nullcontext
    with unseen():
        if tensor.dtype == torch.int8:
            return tensor.fill_(POISON_INT8)
        if tensor.dtype == torch.bool:
            return tensor
        if tensor.element_size() == 1:
            tensor.view(torch.uint8).fill_(255)  # NaN in every type of floating point
            return tensor
        return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


@pytest.fixture(autouse=True)
def poisoned_allocations(monkeypatch):
    """torch.empty and its kin return NaN to the package's own code, so that an unwritten output shows."""

    def poisoned(function):
        def allocate(*args, **kwargs):
            tensor = function(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return _poison(tensor) if caller.startswith(("sagebwd", "lab.", "benchmarks.")) else tensor

        return allocate

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch, "empty_strided", poisoned(torch.empty_strided))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    monkeypatch.setattr(torch.Tensor, "new_empty_strided", poisoned(torch.Tensor.new_empty_strided))


@pytest.fixture(autouse=True)
def no_plans():
    """Tests patch what plans launch."""
    if "sagebwd.cache" in sys.modules:
        sys.modules["sagebwd.cache"].PLANS.clear()


@pytest.fixture(autouse=True)
def no_peers(request, monkeypatch):
    """Tests that need no GPU go by no build of FlashAttention that a machine may have."""
    if "gpu" not in request.keywords:
        gpus.hide_peers(monkeypatch.setitem)


@pytest.fixture(autouse=True)
def products_of_fp32():
    """Transformers' Trainer turns TF32 on with torch_compile, for the process: later tests compare with FP32."""
    before = torch.backends.fp32_precision
    yield
    if torch.backends.fp32_precision != before:  # torch's test utilities have such flags read alone
        torch.backends.fp32_precision = before


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Two test processes share two cores."""
    torch.set_num_threads(1)


def pytest_collection_finish():
    """What was imported lives as long as the tests: garbage, for which Trainer looks often, is not among it."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """What tests counted, by `record_property("counted", text)`: captured output is not shown, under xdist never."""
    lines = [
        f"{report.nodeid.rpartition('::')[2]}: {text}"
        for report in terminalreporter.stats.get("passed", [])
        for name, text in report.user_properties
        if name == "counted"
    ]
    if lines:
        terminalreporter.section("counted")
        for line in lines:
            terminalreporter.write_line(line)
