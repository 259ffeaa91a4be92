"""Kernels of CUDA C++ compiled for a CPU, with fibers for threads (emulated_cuda.h)."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

from sagebwd.kernels.runtime.nvrtc import Source
from tests.gpus import DEVICE
from tests.shared import made_once

COMPILER = shutil.which("g++") or shutil.which("c++")
HEADER = Path(__file__).with_name("emulated_cuda.h")


def stand_in(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """A module's ``kernel_of`` gives emulated kernels where there is no GPU; skips a test without a compiler."""
    if DEVICE == "cuda":
        return
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(module, "kernel_of", lambda source, arch: EmulatedKernel(source))


def parameters(source: Source) -> list[str]:
    """A kernel's parameters by its source: types and names."""
    text = re.sub(
        r"#if INT8_DP\n(\s+, .*\n)#endif\n", r"\1" if dict(source.macros).get("INT8_DP") else "", source.text
    )
    given = re.search(rf"KERNEL {source.name}\((.*?)\) \{{", text, re.DOTALL)[1]
    return [" ".join(x.split()) for x in given.split(",")]


@cache
def _library(source: Source) -> ctypes.CDLL:
    """A kernel as a shared object, loaded."""
    types = [x.rsplit(" ", 1)[0] for x in parameters(source)]
    given = ", ".join(f"*({x}*)arguments[{n}]" for n, x in enumerate(types))
    text = "#define EMULATED\n" + HEADER.read_text(encoding="utf-8") + source.text
    text += f"static void call_kernel(void** arguments) {{ {source.name}({given}); }}\n"
    macros = [f"-D{name}={value}" for name, value in source.macros]
    # Optimised further they take longer to compile than they save; C++'s headers take longer to read than C's. Where
    # the compiler fortifies by default, a jump to another stack is an error.
    options = ["-std=c++17", "-nostdinc++", "-O1", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
    command = [COMPILER, *options, "-shared", "-fPIC", *macros]

    with tempfile.TemporaryDirectory(prefix="sagebwd-emulated-") as folder:

        def compile_to(path: Path) -> None:
            written = Path(folder) / "kernel.cpp"
            written.write_text(text, encoding="utf-8")
            done = subprocess.run([*command, "-o", path, written], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[:4000]

        what = " ".join([*command, text])
        return ctypes.CDLL(str(made_once(what, compile_to, Path(folder) / "kernel.so")))


class EmulatedKernel:
    """A kernel launched as the compiled one is, on tensors of a CPU."""

    def __init__(self, source: Source) -> None:
        self.source, self.launches = source, 0

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*arguments: object) -> None:
            values = [
                ctypes.c_uint64(0 if x is None else x.data_ptr())
                if x is None or isinstance(x, Tensor)
                else (ctypes.c_float if isinstance(x, float) else ctypes.c_int64)(x)
                for x in arguments
            ]
            pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
            _library(self.source).run(grid[0], 32 * self.source.warps, pointers)
            self.launches += 1

        return run
