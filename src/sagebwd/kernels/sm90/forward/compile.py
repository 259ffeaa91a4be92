"""Compiles the sm_90a kernels and keeps what was compiled on disk, by source, compiler and variant.

Compiling takes seconds and NVIDIA's CuTe DSL. What is kept is a shared object of some 80 kB, host code included: a
later process loads it by TVM-FFI without importing the compiler. Where it cannot be kept, every process compiles for
itself. Where anything of that is missing or broken, `unavailable` says what, and other kernels run.
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
from collections.abc import Callable
from functools import cache
from pathlib import Path

from sagebwd.environment import cache_folder, writable
from sagebwd.kernels.runtime.ffi import Function, runtime
from sagebwd.kernels.runtime.program import say_what_takes_long
from sagebwd.kernels.sm90.forward.variant import Variant

ARCHITECTURE = "sm_90a"
COMPILER, LOADER = "nvidia-cutlass-dsl", "apache-tvm-ffi"
# Wheels that the compiler comes in, all of one version.
PARTS = tuple(f"{COMPILER}-libs-{part}" for part in ("base", "core", "cu12", "cu13"))
# Of the extra ``hopper``. The compiler's interfaces move from release to release, so no other is tried.
VERSIONS = {COMPILER: "4.8.1", LOADER: "0.1.15.post2"}
EXTRA = "in a clone: pip install '.[hopper]'"
ENTRY = "forward"
# Of this package, and its folders that the kernel's modules import from.
ROOT = Path(__file__).parents[3]
FOLDERS = "kernels/sm90", "masks"


@cache
def unavailable() -> str | None:
    """Why these kernels cannot run here and what mends it, or None; the GPU is asked for elsewhere.

    What a launch needs is loaded. The compiler, a second's import, is asked only where it has never compiled here.
    """
    for package in (COMPILER, LOADER):
        if _version(package) is None:
            return f"{package} is not installed ({EXTRA})"
    for package in (COMPILER, *PARTS):
        if _version(package) not in (None, VERSIONS[COMPILER]):
            return f"{package} is {_version(package)}, and these kernels are for {VERSIONS[COMPILER]} ({EXTRA})"
    if _linker() is None:
        return "no C compiler is found, which links what was compiled (CC, gcc or clang)"
    fault = _fault(COMPILER, _load_runtime) or _fault(LOADER, runtime)
    return fault or (None if _has_compiled() else broken_compiler())


def _has_compiled() -> bool:
    """Whether a variant is on disk; not where its folder cannot be read."""
    try:
        return any(name.endswith(".so") for name in os.listdir(_objects()))
    except OSError:
        return False


@cache
def broken_compiler() -> str | None:
    """Why the compiler cannot be imported and what mends it, or None."""
    os.environ.setdefault("CUTE_DSL_ARCH", ARCHITECTURE)
    return _fault(COMPILER, lambda: importlib.import_module("sagebwd.kernels.sm90.forward.kernel"))


def _fault(package: str, load: Callable[[], object]) -> str | None:
    """What is wrong with a package of which something cannot be loaded, or None."""
    try:
        load()
    except Exception as error:  # a wheel of several is missing, or a library: anything may come of that
        return (
            f"{package} is installed but broken: {type(error).__name__}: {error} "
            f"(pip install --force-reinstall {package}=={VERSIONS[package]})"
        )
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def forward_kernel(variant: Variant) -> Function:
    """A variant of the forward, from disk or compiled now, which takes seconds and is announced.

    Raises NotImplementedError where the compiler is broken, and RuntimeError where what it made cannot be linked.
    """
    path = object_path(variant)
    if not os.access(path, os.R_OK):
        if broken_compiler() is not None:  # since it compiled what is on disk
            raise NotImplementedError(f"a kernel cannot be compiled: {broken_compiler()}; recipe='token' needs none")
        folder = writable(path.parent)
        if folder == path.parent:
            say_what_takes_long("CuTe DSL's", f"{folder} (SAGEBWD_CACHE_DIR)")
        path = folder / path.name
        build(variant, path)
    _load_runtime()
    return Function(path, ENTRY)


def object_path(variant: Variant) -> Path:
    """Where a variant's shared object is kept."""
    return _objects() / f"{ENTRY}-{variant.head_dim}-{variant.value_dim}-{_hash(repr(variant))}.so"


def _objects() -> Path:
    """Where is kept what these sources and versions made."""
    versions = [importlib.metadata.version(x) for x in (COMPILER, LOADER)]
    return cache_folder() / "sm90" / _hash("\0".join((_source(), *versions, ARCHITECTURE)))


@cache
def _source() -> str:
    """The text of all that is compiled in."""
    return "\0".join(path.read_text(encoding="utf-8") for path in sources())


def sources() -> list[Path]:
    """The files that what is compiled depends on, and others of their folders: none is imported to find out."""
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def build(variant: Variant, path: Path) -> None:
    """Compile a variant and write its shared object; needs no GPU.

    Raises RuntimeError with what the linker says where it fails, and OSError where the object cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, linked = Path(folder) / "forward.o", Path(folder) / "forward.so"
        compiled(variant, "--enable-tvm-ffi").export_to_c(str(made), ENTRY)
        _link(made, linked)
        os.replace(linked, path)


def _link(made: Path, linked: Path) -> None:
    """What CUDA's and TVM-FFI's runtimes define stays open until the object is loaded."""
    command = [str(_linker()), "-shared", "-o", str(linked), str(made)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise RuntimeError(
            f"a kernel cannot be linked: {' '.join(command)} ended with {done.returncode}: "
            f"{(done.stderr or done.stdout).strip()}. CC names another C compiler; recipe='token' needs none"
        )


def compiled(variant: Variant, options: str):
    """A variant as the compiler returns it."""
    os.environ.setdefault("CUTE_DSL_ARCH", ARCHITECTURE)
    import cutlass.cute as cute

    from sagebwd.kernels.sm90.forward.kernel import Forward

    forward = Forward(variant)
    return cute.compile(forward, *forward.placeholders(), options=f"--gpu-arch {ARCHITECTURE} {options}")


def _linker() -> str | None:
    found = (shutil.which(name) for name in (os.environ.get("CC"), "gcc", "clang") if name)
    return next((path for path in found if path), None)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@cache
def _load_runtime() -> None:
    """Make the compiler's small runtime known to what is loaded after it."""
    package = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [] if package is None else package.submodule_search_locations
    found = sorted(path for root in roots for path in Path(root).glob("cu*/lib/libcute_dsl_runtime.so"))
    if not found:
        raise FileNotFoundError("there is no nvidia_cutlass_dsl/cu*/lib/libcute_dsl_runtime.so")
    ctypes.CDLL(str(found[-1]), ctypes.RTLD_GLOBAL)
