"""The CUDA kernels of mma.sync compiled for a CPU, with fibers for threads (emulated_cuda.h)."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from torch import Tensor

from sagebwd.kernels.mma_sync import compile as nvrtc
from sagebwd.kernels.mma_sync.variant import Variant

COMPILER = shutil.which("g++") or shutil.which("c++")
HEADER = Path(__file__).with_name("emulated_cuda.h")


def parameters(direction: str, *, int8_dp: bool = False) -> list[str]:
    """A kernel's parameters by its source: types and names."""
    source = (nvrtc.SOURCES / f"{direction}.cu").read_text(encoding="utf-8")
    source = re.sub(r"#if INT8_DP\n(\s+, .*\n)#endif\n", r"\1" if int8_dp else "", source)
    given = re.search(rf"KERNEL {direction}\((.*?)\) \{{", source, re.DOTALL)[1]
    return [" ".join(x.split()) for x in given.split(",")]


@cache
def _library(variant: Variant) -> ctypes.CDLL:
    """A variant as a shared object, loaded."""
    types = [x.rsplit(" ", 1)[0] for x in parameters(variant.direction, int8_dp=variant.int8_dp)]
    given = ", ".join(f"*({x}*)arguments[{n}]" for n, x in enumerate(types))
    sources = [HEADER, *(nvrtc.SOURCES / name for name in ("common.cuh", f"{variant.direction}.cu"))]
    text = "#define EMULATED\n" + "".join(path.read_text(encoding="utf-8") for path in sources)
    text += f"static void call_kernel(void** arguments) {{ {variant.direction}({given}); }}\n"
    folder = Path(tempfile.mkdtemp(prefix="sagebwd-emulated-"))
    (folder / "kernel.cpp").write_text(text, encoding="utf-8")
    macros = [f"-D{name}={value}" for name, value in variant.macros.items()]
    command = [COMPILER, "-std=c++17", "-O2", "-w", "-fno-strict-aliasing", "-shared", "-fPIC", *macros]
    command += ["-o", str(folder / "kernel.so"), str(folder / "kernel.cpp")]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[:4000]
    library = ctypes.CDLL(str(folder / "kernel.so"))
    shutil.rmtree(folder)
    return library


class EmulatedKernel:
    """A variant launched as the compiled one is, on tensors of a CPU."""

    def __init__(self, variant: Variant) -> None:
        self.variant, self.launches = variant, 0

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*arguments: object) -> None:
            values = [
                ctypes.c_uint64(0 if x is None else x.data_ptr())
                if x is None or isinstance(x, Tensor)
                else (ctypes.c_float if isinstance(x, float) else ctypes.c_int64)(x)
                for x in arguments
            ]
            pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
            _library(self.variant).run(grid[0], 32 * self.variant.warps, pointers)
            self.launches += 1

        return run
