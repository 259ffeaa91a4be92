"""What a call costs its host, without a GPU: Triton's own compiler and launchers over a libcuda that does nothing.

`python -m tools.host_time mixed` prints microseconds of `sage_attention` as calls of a training step do, without
gradients, and of its backward through autograd. CUDA's own part is not in it.
Needs a C compiler and Python's headers, as Triton does, and for `mixed` the extra `hopper`. `masks` as a recipe prints
what `sage_attention` costs by `token` on the portable kernels under masks of each kind, and without; `mixed-masks` by
`mixed` on Hopper's kernels, and `new-masks` how
long calls take, the device's part included, under masks of each kind, beside torch's `create_block_mask`. `auto`
prints what calls by it cost beside torch's own of the same: on a CPU, where `auto` hands them over, the package's part
of that. `fused` prints what `qk_norm_rope_attention` costs by `mixed`.

With ``--cuda`` it runs on the GPU that is there, an H100 or H200, CUDA's part included, and times torch's
attention beside; `new-masks` then is of `mixed` on Hopper's kernels, and of 16384 tokens too. Without, the
kernels that read a mask are launched on the same libcuda, but for what is made of a BlockMask.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention.flex_attention import create_block_mask
from triton.backends.compiler import GPUTarget

from benchmarks.mask_cases import DOCUMENTS, WINDOW, Case
from benchmarks.timer import from_rest
from sagebwd import dispatch, qk_norm_rope_attention, read_block_mask, sage_attention
from sagebwd.auto import choice as auto_choice
from sagebwd.cli.timer import time_interleaved
from sagebwd.kernels.masks import blocks
from sagebwd.recipe import Recipe

HOPPER = dispatch.named(Recipe.named("mixed"), "hopper/hopper")
# What Triton's driver and launchers are told by libcuda; whatever else they call succeeds.
LIBCUDA = r"""
#include <stdint.h>
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuDriverGetVersion(int *version) { *version = 12090; return 0; }
int cuDeviceGet(int *device, int number) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int name, int device) {
  *value = name == 97 ? 232448 : name == 8 ? 49152 : 1024; return 0;
}
int cuFuncGetAttribute(int *value, int name, void *function) { *value = name == 0 ? 1024 : 0; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "none"; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)1; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuPointerGetAttribute(void *value, int name, uint64_t pointer) { *(uint64_t *)value = pointer; return 0; }
"""
# What compiled CuTe kernels call of their compiler's runtime.
RUNTIME = (
    "cuda_dialect_init_library_once",
    "cuda_dialect_unload_library_once",
    "_cudaGetDevice",
    "_cudaSetDevice",
    "_cudaDeviceGetAttribute",
    "_cudaFuncSetAttribute",
    "_cudaKernelSetAttributeForDevice",
    "_cudaLaunchKernelEx",
    "_cudaLibraryGetKernel",
    "_cudaLibraryLoadData",
    "_cuKernelGetAttribute",
    "CuteDSLRT_TVMFFISetRaisedCudaError",
)
BATCH, HEADS, TOKENS, HEAD_DIM = 1, 2, 256, 128
ROUNDS, ROUND_MS = 12, 8.0
T = TypeVar("T")


def take_driver(folder: Path) -> None:
    """Make Triton believe in an sm_90 GPU whose driver does nothing."""
    import triton.backends.nvidia as nvidia

    source = (Path(nvidia.__path__[0]) / "driver.c").read_text(encoding="utf-8")
    own = "MemsetD8Async", "DevicePrimaryCtxRetain", "CtxSetCurrent", "FuncSetAttribute"  # which the package calls
    called = {"cuLaunchKernel", "cuLaunchKernelEx", *(f"cu{name}" for name in own)}
    called.update(re.findall(r"\bcu[A-Z][A-Za-z0-9]*\b(?=\s*[(),;])", source))
    rest = "".join(f"int {name}() {{ return 0; }}\n" for name in sorted(called) if f"int {name}(" not in LIBCUDA)
    library = folder / "libcuda.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", "-x", "c", "-", "-o", library],
        input=LIBCUDA + rest, text=True, check=True,
    )  # fmt: skip
    (folder / "libcuda.so").symlink_to(library.name)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    driver = CudaDriver.__new__(CudaDriver)
    driver.utils, driver.launcher_cls = CudaUtils(), CudaLauncher
    driver.get_current_device = lambda: 0
    driver.set_current_device = lambda device: None
    driver.get_current_stream = lambda device: 0
    driver.get_device_capability = lambda device: (9, 0)
    driver.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(driver)


def take_runtime(folder: Path) -> None:
    """Let CuTe's kernels be launched on a CPU's tensors by a runtime that does nothing."""
    from sagebwd.kernels.runtime import ffi
    from sagebwd.kernels.sm90.forward import compile as sm90

    library = folder / "libruntime.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", library],
        input="".join(f"int {name}() {{ return 0; }}\n" for name in RUNTIME), text=True, check=True,
    )  # fmt: skip
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # before the compiler loads its own
    sm90._load_runtime = lambda: None
    ffi.DEVICE_TYPES["cpu"] = ffi.DEVICE_TYPES["cuda"]


def microseconds(calls: dict[str, Callable[[], object]], device: str, rounds: int, ms: float) -> dict[str, float]:
    """What each call costs the host, the median of rounds of so many ms."""
    return {name: 1e3 * host_ms for name, (_, host_ms) in time_interleaved(calls, device, rounds, ms).items()}


def pretend() -> None:
    """Take a CPU for an H200; a driver is taken already."""
    from sagebwd.kernels.runtime import device

    device.capability = lambda device: 90
    device.num_sms = lambda device: 132
    blocks.by_kernels = lambda x: True
    auto_choice.choose = lambda ask, size, *_: HOPPER


def inputs(device: str) -> list[torch.Tensor]:
    """q, k, v and do."""
    return [torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM, dtype=torch.bfloat16, device=device) for _ in range(4)]


def measure_torch() -> dict[str, float]:
    """Microseconds of torch's attention on a GPU."""
    *leaves, do = inputs("cuda")
    leaves = [x.requires_grad_() for x in leaves]

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(*leaves, is_causal=True)

    out = attend()
    backward = partial(torch.autograd.grad, out, leaves, do, retain_graph=True)
    return microseconds({"scaled_dot_product_attention": attend, "autograd": backward}, "cuda", ROUNDS, ROUND_MS)


def measure(recipe: str, rounds: int = ROUNDS, ms: float = ROUND_MS, device: str = "cpu") -> dict[str, float]:
    """Microseconds by what is called; on a CPU a driver is taken already."""
    if device == "cpu":
        pretend()
    q, k, v, do = inputs(device)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        return sage_attention(*inputs, is_causal=True, recipe=recipe)

    out = attend(*leaves)
    calls = {
        "sage_attention": lambda: attend(*leaves),
        "without gradients": lambda: attend(q, k, v),
        "autograd": lambda: torch.autograd.grad(out, leaves, do, retain_graph=True),
    }
    return microseconds(calls, device, rounds, ms)


def measure_masks(
    rounds: int = ROUNDS, ms: float = ROUND_MS, device: str = "cpu", recipe: str = "token", impl: str = "triton"
) -> dict[str, float]:
    """Microseconds of `sage_attention` and of its backward by what masks it; without gradients too."""
    if device == "cpu":
        pretend()
        auto_choice.choose = lambda ask, size, *_: dispatch.named(Recipe.named(recipe), f"{impl}/{impl}")
    *leaves, do = inputs(device)
    leaves = [x.requires_grad_() for x in leaves]
    tokens = torch.arange(TOKENS, device=device)
    document = tokens // 100
    blocks = create_block_mask(
        lambda b, h, q, k: document[q] == document[k], None, None, TOKENS, TOKENS, device=device
    )
    masks = {
        "none": {},
        "padding": {"attn_mask": (tokens < 200)[None, None, None]},
        "boolean": {"attn_mask": document[:, None] == document},
        "bias": {"attn_mask": torch.zeros(1, HEADS, TOKENS, TOKENS, device=device)},
        "BlockMask": {"block_mask": blocks},
        "BlockMask, read": {"block_mask": read_block_mask(blocks)},
    }
    calls = {}
    for name, mask in masks.items():
        attend = partial(sage_attention, *leaves, is_causal=True, recipe=recipe, impl=impl, **mask)
        calls |= {name: attend, f"{name}, both": partial(_both, attend, leaves, do)}
        calls[f"{name}, without gradients"] = torch.no_grad()(attend)
    return microseconds(calls, device, rounds, ms)


def measure_fused(rounds: int = ROUNDS, ms: float = ROUND_MS, device: str = "cpu") -> dict[str, float]:
    """Microseconds of `qk_norm_rope_attention` by one plan, and of its backward through autograd."""
    if device == "cpu":
        pretend()
    *leaves, do = inputs(device)
    leaves += [torch.ones(HEAD_DIM, device=device) for _ in range(2)]
    leaves = [x.requires_grad_() for x in leaves]
    table = torch.ones(TOKENS, HEAD_DIM, dtype=torch.bfloat16, device=device)

    def attend() -> torch.Tensor:
        q, k, v, *weights = leaves
        tables = {"q_weight": weights[0], "k_weight": weights[1], "eps": 1e-6, "cos": table, "sin": table}
        return qk_norm_rope_attention(q, k, v, **tables, is_causal=True, recipe="mixed")

    out = attend()
    backward = partial(torch.autograd.grad, out, leaves, do, retain_graph=True)
    calls = {"qk_norm_rope_attention": attend, "without gradients": torch.no_grad()(attend), "autograd": backward}
    return microseconds(calls, device, rounds, ms)


def measure_auto(rounds: int = ROUNDS, ms: float = ROUND_MS, device: str = "cpu") -> dict[str, float]:
    """Microseconds of small calls by `auto`, and of torch's function, which is given a window's mask as it is."""
    batch, tokens, head_dim = (2, 256, 64) if device == "cuda" else (1, 8, 16)
    q, *grouped = (torch.randn(batch, heads, tokens, head_dim, device=device) for heads in (8, 2, 2))
    if device == "cuda":
        q, *grouped = (x.bfloat16() for x in (q, *grouped))
    window, visible = (tokens // 2, 0), torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    banded = visible.tril().triu(-window[0])
    kinds: dict[str, tuple[list[torch.Tensor], dict, dict]] = {
        "dense": ([q, q, q], {}, {}),
        "grouped, causal": ([q, *grouped], *({"is_causal": True, "enable_gqa": True},) * 2),
        "window": ([q, q, q], {"window": window}, {"attn_mask": banded}),
    }
    calls = {}
    for name, (tensors, ours, theirs) in kinds.items():
        calls[name] = partial(sage_attention, *tensors, **ours)
        calls[f"{name}, torch"] = partial(F.scaled_dot_product_attention, *tensors, **theirs)
    return microseconds(calls, device, rounds, ms)


def _both(attend: Callable[[], torch.Tensor], leaves: list[torch.Tensor], do: torch.Tensor) -> None:
    """Forward and backward of a call, whose mask backward reads then."""
    torch.autograd.grad(attend(), leaves, do)


def measure_new_masks(rounds: int = 9, device: str = "cpu") -> dict[str, float]:
    """Microseconds of calls under a new mask and under the same again, to the device's end; the median of rounds."""
    if device == "cpu":
        pretend()
        auto_choice.choose = lambda ask, size, *_: dispatch.named(Recipe.named("token"), "triton/triton")
    recipe, impl = ("token", "triton") if device == "cpu" else ("mixed", "hopper")
    found = {}
    for tokens in (2048,) if device == "cpu" else (2048, 16384):
        for kind in (DOCUMENTS, WINDOW):
            case = Case.of(kind, HEAD_DIM, tokens)
            *leaves, do = case.shape.inputs(device, torch.bfloat16)
            leaves, mask_mod = [x.requires_grad_() for x in leaves], case.mask_mod(device)
            block_mask, dense = case.block_mask(mask_mod, device), case.dense(mask_mod, device)
            attend = partial(sage_attention, *leaves, enable_gqa=True, recipe=recipe, impl=impl)
            times = defaultdict(list)

            def run(name: str, call: Callable[[], T], times: dict[str, list[float]] = times) -> T:
                outcome, ms, _ = from_rest(call, device)
                times[name].append(ms)
                return outcome

            for _ in range(3 + rounds):  # the first three compile, record and warm up
                run("create_block_mask", partial(case.block_mask, mask_mod, device))
                # other objects that show the same
                for name, mask in (
                    ("BlockMask", {"block_mask": block_mask.to(device)}),
                    ("boolean", {"attn_mask": dense.clone()}),
                ):
                    for turn in ("new", "again"):
                        out = run(f"{name} {turn}", partial(attend, **mask))
                        run(f"{name} {turn}, autograd", partial(torch.autograd.grad, out, leaves, do))
            found |= {f"{kind} {tokens} {name}": 1e3 * statistics.median(x[3:]) for name, x in times.items()}
    return found


def main(arguments: list[str]) -> None:
    """Measure the recipes that are named, on a GPU with ``--cuda``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="run on the GPU that is there, an H100 or H200")
    parser.add_argument("recipes", nargs="*", default=["mixed"], help="recipes, or kinds of call [default: mixed]")
    given = parser.parse_args(arguments)
    on_hopper = partial(measure_masks, recipe="mixed", impl="hopper")
    of_calls = {
        "masks": measure_masks, "mixed-masks": on_hopper, "new-masks": measure_new_masks, "auto": measure_auto,
        "fused": measure_fused,
    }  # fmt: skip
    for text in given.recipes:
        if text not in of_calls:
            try:
                Recipe.parse(text)
            except ValueError as error:
                parser.error(str(error))
    device = "cuda" if given.cuda else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        if device == "cpu":
            take_driver(Path(folder))
            take_runtime(Path(folder))
        found = {text: of_calls.get(text, partial(measure, text))(device=device) for text in given.recipes}
        if device == "cuda":
            found["torch"] = measure_torch()
        for text, times in found.items():
            print(text, ", ".join(f"{name} {us:.0f}" for name, us in times.items()), "us", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
