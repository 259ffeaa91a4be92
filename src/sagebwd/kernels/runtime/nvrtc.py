"""Compile kernels of CUDA C++ by NVRTC, which torch brings along, and keep machine code on disk."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from sagebwd.environment import cache_folder, warn_of_unwritable, writable, write_whole
from sagebwd.kernels.runtime.cuda import CudaKernel

COMMON = Path(__file__).parents[1] / "common/cuda/common.cuh"
# Bytes in front of what is kept.
_DIGEST = hashlib.sha256().digest_size
_INSTALL = "pip install nvidia-cuda-nvrtc, or a torch with CUDA"


@cache
def unavailable() -> str | None:
    """Why nothing can be compiled here and what mends it, or None."""
    try:
        _library()
    except OSError as error:
        return f"NVRTC is not found, which compiles the kernels ({error}; {_INSTALL})"
    return None


class Source(NamedTuple):
    """A kernel of CUDA C++: common/cuda/common.cuh, then some files, of which one has the function ``name``.

    macros: pairs of a name and a number; common.cuh says which it wants.
    """

    name: str
    files: tuple[Path, ...]
    macros: tuple[tuple[str, int], ...]
    warps: int
    shared_bytes: int

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(path.read_text(encoding="utf-8") for path in (COMMON, *self.files))


@cache
def kernel_of(source: Source, capability: int) -> CudaKernel:
    """A kernel for a GPU's compute capability (80, 89, ...), from disk or compiled now, in about a second.

    Raises RuntimeError where NVRTC refuses the source.
    """
    return CudaKernel(machine_code(source, capability), source.name, 32 * source.warps, source.shared_bytes)


def machine_code(source: Source, capability: int) -> bytes:
    """The cubin of a kernel."""
    text, options = source.text, [f"--gpu-architecture=sm_{capability}", "-std=c++17"]
    options += [f"-D{name}={value}" for name, value in source.macros]
    key = hashlib.sha256("\0".join((text, *options, str(_version()))).encode()).hexdigest()[:24]
    path = cache_folder() / "cuda" / f"{source.name}-sm{capability}-{key}.cubin"
    kept = _read(path)
    if kept is not None:
        return kept
    made = compile_source(text, options)
    try:
        _keep(path, made)
    except OSError as error:
        warn_of_unwritable(path.parent, error)
    return made


def compile_source(source: str, options: list[str]) -> bytes:
    """The machine code of CUDA C++. Raises RuntimeError with NVRTC's words."""
    rtc, program = _library(), ctypes.c_void_p()
    _check(rtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"sagebwd.cu", 0, None, None))
    try:
        given = (ctypes.c_char_p * len(options))(*[x.encode() for x in options])
        if rtc.nvrtcCompileProgram(program, len(options), given):
            log = _text(program, rtc.nvrtcGetProgramLogSize, rtc.nvrtcGetProgramLog)
            raise RuntimeError(f"NVRTC cannot compile for {options[0]}: {log.decode(errors='replace')[:2000]}")
        return _text(program, rtc.nvrtcGetCUBINSize, rtc.nvrtcGetCUBIN)
    finally:
        rtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program: ctypes.c_void_p, size_of: object, get: object) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    found = ctypes.create_string_buffer(size.value)
    _check(get(program, found))
    return found.raw


def _check(failed: int) -> None:
    if failed:
        raise RuntimeError(f"NVRTC failed with error {failed}")


def _read(path: Path) -> bytes | None:
    """Machine code that was kept, or None where it is not there or not whole."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    digest, made = kept[:_DIGEST], kept[_DIGEST:]
    return made if hashlib.sha256(made).digest() == digest else None


def _keep(path: Path, made: bytes) -> None:
    """Write machine code and its digest. Raises OSError where the disk is full."""
    write_whole(writable(path.parent) / path.name, hashlib.sha256(made).digest() + made)


@cache
def _library() -> ctypes.CDLL:
    """NVRTC: of the wheels that torch needs, else of the system's CUDA. Raises OSError where there is none."""
    wanted = "." + str(torch.version.cuda).partition(".")[0]
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(x) for x in spec.submodule_search_locations] if spec is not None else []
    for folder in folders:
        found = [path for path in folder.glob("*/lib/libnvrtc.so.*") if ".alt." not in path.name]
        # of two CUDAs torch's own, whose code the driver takes
        for path in sorted(found, key=lambda path: (path.suffix != wanted, path)):
            for part in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(part))
            return ctypes.CDLL(str(path))
    names = ("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12")
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError(f"none of {', '.join(names)} can be loaded")


@cache
def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value
