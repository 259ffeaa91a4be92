"""Compiles the sm_90a kernels and keeps what was compiled on disk, by source, compiler and variant.

Compiling takes seconds and NVIDIA's CuTe DSL. What is kept is a shared object of some 80 kB, host code included: a
later process loads it by TVM-FFI without importing the compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from sagebwd.environment import cache_folder
from sagebwd.kernels.ffi import Function
from sagebwd.kernels.replay import say_what_takes_long
from sagebwd.kernels.sm90.config import Variant

ARCHITECTURE = "sm_90a"
COMPILER, LOADER = "nvidia-cutlass-dsl", "apache-tvm-ffi"
ENTRY = "forward"


@cache
def unavailable() -> str | None:
    """Why these kernels cannot run here, or None; the GPU is asked for elsewhere."""
    for module, package in (("nvidia_cutlass_dsl", COMPILER), ("cutlass", COMPILER), ("tvm_ffi", LOADER)):
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed"
    if _linker() is None:
        return "no C compiler is found, which links what was compiled (CC, gcc or clang)"
    return None


@cache
def forward_kernel(variant: Variant) -> Function:
    """A variant of the forward, from disk or compiled now, which takes seconds and is announced."""
    path = object_path(variant)
    if not path.exists():
        say_what_takes_long("CuTe DSL's", f"{path.parent} (SAGEBWD_CACHE_DIR)")
        build(variant, path)
    _load_runtime()
    return Function(path, ENTRY)


def object_path(variant: Variant) -> Path:
    """Where a variant's shared object is kept."""
    text = [source.read_text() for source in sorted(Path(__file__).parent.glob("*.py"))]
    text += [importlib.metadata.version(x) for x in (COMPILER, LOADER)]
    text += [ARCHITECTURE, repr(variant)]
    key = hashlib.sha256("\0".join(text).encode()).hexdigest()[:24]
    return cache_folder() / "sm90" / f"{ENTRY}-{variant.head_dim}-{key}.so"


def build(variant: Variant, path: Path) -> None:
    """Compile a variant and write its shared object; needs no GPU."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, linked = Path(folder) / "forward.o", Path(folder) / "forward.so"
        compiled(variant, "--enable-tvm-ffi").export_to_c(str(made), ENTRY)
        # what CUDA's and TVM-FFI's runtimes define stays open until it is loaded
        subprocess.run([_linker(), "-shared", "-o", linked, made], check=True, capture_output=True)
        os.replace(linked, path)


def compiled(variant: Variant, options: str):
    """A variant as the compiler returns it."""
    os.environ.setdefault("CUTE_DSL_ARCH", ARCHITECTURE)
    import cutlass.cute as cute

    from sagebwd.kernels.sm90.forward import Forward

    forward = Forward(variant)
    return cute.compile(forward, *forward.placeholders(), options=f"--gpu-arch {ARCHITECTURE} {options}")


def _linker() -> str | None:
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


@cache
def _load_runtime() -> None:
    """Make the compiler's small runtime known to what is loaded after it."""
    roots = importlib.util.find_spec("nvidia_cutlass_dsl").submodule_search_locations
    found = sorted(path for root in roots for path in Path(root).glob("cu*/lib/libcute_dsl_runtime.so"))
    if not found:
        raise RuntimeError(f"{COMPILER} has no libcute_dsl_runtime.so under {', '.join(roots)}")
    ctypes.CDLL(str(found[-1]), ctypes.RTLD_GLOBAL)
