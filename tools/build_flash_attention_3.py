"""Build FlashAttention-3 with its backward, which no registry has, from sources that were fetched; none is kept here.

    python -m tools.build_flash_attention_3 pack --source flash-attention/.git --cutlass cutlass/.git --to fa3.tar.xz
    python -m tools.build_flash_attention_3 build --source fa3.tar.xz --to ../fa3
    PYTHONPATH=../fa3 python -m benchmarks attention

The first needs git and both repositories, bare or not, and takes CUTLASS at the commit that FlashAttention names; the
archive, of a megabyte, goes to a machine without a network. The second, of an archive or of a checkout with its
submodule, needs nvcc (CUDA_HOME) and a C++ compiler beside torch 2.9 or later. It builds what the benchmarks time:
BF16 on sm_90a, causal and not, with grouped heads, at head_dim 64 and 128 unless told. Packed sequences double the
time (--varlen). What is left out raises an error, but a width that is not built runs by the next one's kernels, which
is no fair time of it. Its version names the commit.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

WIDTHS = (64, 96, 128, 192, 256)
DEFAULT = (64, 128)
# What is left out, by the names of its macros; clusters and packed heads stay, by which it is fast.
LEFT_OUT = (
    "SPLIT", "PAGEDKV", "APPENDKV", "LOCAL", "SOFTCAP", "FP16", "FP8", "SM8x", "HDIMDIFF64", "HDIMDIFF192", "VARLEN",
)  # fmt: skip
ALL = (*LEFT_OUT, "BACKWARD", "PACKGQA", "CLUSTER", *(f"HDIM{width}" for width in WIDTHS))
API, SCHEDULER = "flash_api_stable.cpp", "flash_prepare_scheduler.cu"
INTERFACE = "flash_attn_interface.py"
INCLUDE = Path("csrc", "cutlass", "include")
COMMIT = "COMMIT"
NVCC = (
    "-O3", "-std=c++17", "--use_fast_math", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-Xcompiler=-fPIC",
    "-gencode=arch=compute_90a,code=sm_90a", "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
    "-DCUTLASS_ENABLE_GDC_FOR_SM90", "-DCUTLASS_DEBUG_TRACE_LEVEL=0", "-DNDEBUG",
)  # fmt: skip
CXX = ("-O3", "-std=c++17", "-fPIC", "-w", "-DPy_LIMITED_API=0x03090000", "-DTORCH_TARGET_VERSION=0x0209000000000000")


def pack(source: Path, cutlass: Path, to: Path) -> str:
    """Write an archive of what a build reads; returns the commit."""
    commit = _git(source, "rev-parse", "--short=9", "HEAD").decode().strip()
    pinned = _git(source, "rev-parse", "HEAD:csrc/cutlass").decode().strip()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for repository, tree, place in ((source, "HEAD:hopper", "hopper"), (cutlass, f"{pinned}:include", INCLUDE)):
            tar = root / "own.tar"
            tar.write_bytes(_git(repository, "archive", tree))
            with tarfile.open(tar) as members:
                members.extractall(root / place, filter="data")
            tar.unlink()
        (root / COMMIT).write_text(f"{commit}\n", encoding="utf-8")
        with tarfile.open(to, "w:xz") as members:
            for path in sorted(root.iterdir()):
                members.add(path, path.name)
    return commit


def build(
    source: Path, to: Path, jobs: int, widths: Sequence[int] = DEFAULT, *, varlen: bool = False
) -> list[tuple[str, float]]:  # fmt: skip
    """Build into a folder that is then imported from; returns each source's seconds.

    Raises ValueError where something that it needs is missing, RuntimeError where a compiler fails.
    """
    cuda = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    if not (cuda / "bin" / "nvcc").exists():
        raise ValueError(f"no nvcc in {cuda}/bin; set CUDA_HOME")
    left_out = [name for name in LEFT_OUT if not (varlen and name == "VARLEN")]
    left_out += [f"HDIM{width}" for width in WIDTHS if width not in widths]
    macros = [f"-DFLASHATTENTION_DISABLE_{name}" for name in left_out]
    with _unpacked(source) as root, tempfile.TemporaryDirectory() as scratch:
        hopper = root / "hopper"
        for needed in (hopper / API, root / INCLUDE / "cute"):
            if not needed.exists():
                raise ValueError(f"{source} has no {needed.relative_to(root)}; `pack` makes an archive that has")
        kernels = [f"flash_bwd_hdim{width}_bf16_sm90.cu" for width in sorted(widths, reverse=True)]
        kernels += [
            f"flash_fwd_hdim{width}_bf16{heads}_sm90.cu"
            for width, heads in itertools.product(sorted(widths, reverse=True), ("", "_packgqa"))
        ]
        includes = [f"-I{hopper}", f"-I{root / INCLUDE}", f"-I{cuda / 'include' / 'cccl'}"]
        nvcc = [str(cuda / "bin" / "nvcc"), *NVCC, *macros, *includes]
        compiler = os.environ.get("CXX") or "c++"
        cxx = [compiler, *CXX, *macros, *includes, f"-I{cuda / 'include'}", *_torch_includes()]
        # the longest first
        commands = {f"instantiations/{name}": nvcc for name in kernels} | {SCHEDULER: nvcc, API: cxx}
        objects = {name: Path(scratch, f"{number}.o") for number, name in enumerate(commands)}

        def compiled(name: str) -> tuple[str, float]:
            began = time.perf_counter()
            _run([*commands[name], "-c", str(hopper / name), "-o", str(objects[name])], name)
            seconds = time.perf_counter() - began
            print(f"{seconds:6.0f} s  {name}", flush=True)
            return name, seconds

        with ThreadPoolExecutor(jobs) as pool:
            took = list(pool.map(compiled, commands))
        shutil.rmtree(to, ignore_errors=True)
        package = to / "flash_attn_3"
        package.mkdir(parents=True)
        library = ["-shared", *map(str, objects.values()), "-o", str(package / "_C.abi3.so"), *_libraries(cuda)]
        _run([compiler, *library], "the library")
        (package / "__init__.py").touch()
        shutil.copy(hopper / INTERFACE, to)
        flags = {f"FLASHATTENTION_DISABLE_{name}": name in left_out for name in ALL}
        config = f"CONFIG = {{'build_flags': {flags}}}\n"
        (to / "flash_attn_config.py").write_text(config, encoding="utf-8")
        commit = (root / COMMIT).read_text(encoding="utf-8").strip() if (root / COMMIT).exists() else "unknown"
        info = to / f"flash_attn_3-3.0.0+{commit}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: flash_attn_3\nVersion: 3.0.0+{commit}\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
    return took


@contextmanager
def _unpacked(source: Path) -> Iterator[Path]:
    """The folder of an archive, or a folder as it is."""
    if source.is_dir():
        yield source
        return
    with tempfile.TemporaryDirectory() as folder, tarfile.open(source) as members:
        members.extractall(folder, filter="data")
        yield Path(folder)


def _torch_includes() -> list[str]:
    from torch.utils.cpp_extension import include_paths

    return [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]


def _libraries(cuda: Path) -> list[str]:
    """What the library is linked with: torch's, found when it is imported behind torch, and CUDA's runtime."""
    import torch

    libraries = Path(torch.__file__).parent / "lib"
    found = [
        f"-l{name}" for name in ("c10", "torch", "torch_cpu", "torch_cuda") if any(libraries.glob(f"lib{name}.*"))
    ]
    return [f"-L{libraries}", *found, f"-L{cuda / 'lib64'}", "-lcudart"]


def _git(repository: Path, *command: str) -> bytes:
    done = subprocess.run(["git", "-C", str(repository), *command], capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"git {' '.join(command)} in {repository}: {done.stderr.decode().strip()}")
    return done.stdout


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {command[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def main() -> None:
    """Parse, and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True)
    packing, building = ways.add_parser("pack"), ways.add_parser("build")
    packing.add_argument("--source", type=Path, required=True, help="repository of FlashAttention")
    packing.add_argument("--cutlass", type=Path, required=True, help="repository of CUTLASS")
    packing.add_argument("--to", type=Path, required=True, help="archive, .tar.xz")
    building.add_argument("--source", type=Path, required=True, help="archive of `pack`, or a checkout")
    building.add_argument("--to", type=Path, required=True, help="folder, made anew, to import from")
    building.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time")
    building.add_argument("--head-dim", type=int, action="append", choices=WIDTHS, help="repeat [default: 64, 128]")
    building.add_argument("--varlen", action="store_true", help="packed sequences too")
    given = parser.parse_args()
    try:
        if given.way == "pack":
            commit = pack(given.source, given.cutlass, given.to)
            print(f"{given.to}, {given.to.stat().st_size / 2**20:.1f} MB: FlashAttention at {commit}")
            return
        began = time.perf_counter()
        took = build(given.source, given.to, given.jobs, given.head_dim or DEFAULT, varlen=given.varlen)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"build_flash_attention_3: {error}")
    total = sum(seconds for _, seconds in took)
    print(
        f"built in {time.perf_counter() - began:.0f} s ({total:.0f} s of compilers); PYTHONPATH={given.to.resolve()}"
    )


if __name__ == "__main__":
    main()
