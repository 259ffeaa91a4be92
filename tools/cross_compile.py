"""Compile the kernels that a call would launch on another GPU, and read their machine code: no GPU needed.

`python -m tools.cross_compile ARCH HEAD_DIM RECIPE [FORM] [TOKENS] [UNTIL]` prints one JSON line a kernel; ARCH
"hopper" means the Gluon kernels on sm_90; HEAD_DIM may be a pair with value's, "192/128"; FORM "causal" (grouped heads
too), "by-token" (the same, the heads of a token side by side), "ungrouped" (causal alone), "full", "packed" (two
sequences), "padded" (keys hidden by a mask of keys) or of `tests.masks.KINDS`; TOKENS are of all sequences together;
with UNTIL "ttgir" or "ptx" no machine code is made, and a line has that text alone; with "forward" backward is left
out. "loops" has instructions, `stall_cycles` and registers stored and loaded of each loop with products. It runs in a
process of its own, as kernels of a process with TRITON_INTERPRET=1 cannot be compiled; `serve` in place of arguments
answers several.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDAOptions
from triton.compiler.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.cache import get_cache_manager, triton_key
from triton.runtime.jit import JITFunction, create_function_from_signature

from sagebwd.call import Call, Saved
from sagebwd.kernels.runtime import device
from sagebwd.kernels.sm90.operands.quantize_k import launch_quantize_k
from sagebwd.recipe import Recipe
from tests import torch_lists
from tests.attention_case import AttentionCase

# What a call may be beside one with a mask of `tests.masks.KINDS`.
FORMS = (
    "causal",
    "ungrouped",
    "full",
    "packed",
    "packed-causal",
    "packed-grouped",
    "window",
    "padded",
    "padded-causal",
    "by-token",
)
BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
ENCODING = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
MATRIX = re.compile(r"\b(IMMA|IGMMA|HMMA|HGMMA|QGMMA|UTC\w*MMA)\b")


@cache
def binder(fn: JITFunction, arch: int) -> Callable:
    """As `JITFunction.create_binder`, for a GPU that is not here."""
    return create_function_from_signature(fn.signature, fn.params, make_backend(GPUTarget("cuda", arch, 32)))


class Launch(NamedTuple):
    """What a compiler is given of ``fn[grid](*args, **kwargs)``."""

    source: ASTSource
    target: GPUTarget
    options: CUDAOptions

    @classmethod
    def of(cls, fn: JITFunction, arch: int, *args, **kwargs) -> Launch:
        """As it would be on an sm_``arch`` GPU."""
        target = GPUTarget("cuda", arch, 32)
        bound, specialization, options = binder(fn, arch)(*args, **kwargs)
        options, signature, constants, attributes = fn._pack_args(
            make_backend(target), kwargs, bound, specialization, options
        )
        source_type = GluonASTSource if isinstance(fn, GluonJITFunction) else ASTSource
        return cls(source_type(fn, signature, constants, attributes), target, options)

    def compiled(self) -> triton.compiler.CompiledKernel:
        """Its machine code, and every form before it."""
        return triton.compile(self.source, target=self.target, options=self.options.__dict__)

    def text(self, last: str) -> str:
        """What a stage makes of it: "ttgir", where layouts are chosen, a tenth of the work; or "ptx"."""
        backend, context, stages = make_backend(self.target), ir.context(), {}
        backend.add_stages(stages, self.options, self.source.language)
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions, modules = backend.get_codegen_implementation(self.options), backend.get_module_map()
        module, metadata = self.source.make_ir(self.target, self.options, functions, modules, context), {}
        for name, stage in stages.items():
            module = stage(module, metadata)
            if name == last:
                return str(module)
        raise ValueError(f"the stages {list(stages)} have no {last}")


def _read_cubin(kernel: triton.compiler.CompiledKernel, program: str, *options: str) -> str:
    """What a program of this triton prints of a kernel, kept beside the kernel in triton's cache.

    Most of what nvdisasm takes is its start, a quarter of a second.
    """
    cubin, name = kernel.asm["cubin"], f"{program}.txt"
    asked = f"{triton.__version__} {program} {options}".encode()
    kept = get_cache_manager(hashlib.sha256(asked + cubin).hexdigest())
    if (path := kept.get_file(name)) is None:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [BINARIES / program, *options, file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        path = kept.put(text, name, binary=False)
    return Path(path).read_text(encoding="utf-8")


def sass(kernel: triton.compiler.CompiledKernel) -> list[str]:
    """Lines of disassembly; the second half of an instruction's encoding is a line of its own."""
    return _read_cubin(kernel, "nvdisasm", "-c", "-hex", "-ndf").splitlines()


def registers(kernel: triton.compiler.CompiledKernel) -> int:
    """Registers of a thread at launch."""
    return int(re.search(r"\bREG:(\d+)", _read_cubin(kernel, "cuobjdump", "--dump-resource-usage")).group(1))


def count(lines: list[str]) -> Counter:
    """Instructions by opcode."""
    return Counter(match.group(1) for match in map(INSTRUCTION.match, lines) if match)


def stall_cycles(lines: list[str]) -> int:
    """Cycles that one warp would take if nothing else were waited for: what ptxas wrote beside each instruction.

    Since sm_70 these are bits 105 to 108 of an instruction's 128.
    """
    upper_halves = [int(match.group(1), 16) for match in map(ENCODING.match, lines) if match]
    return sum(half >> 41 & 15 for half in upper_halves)


def matrix_loops(lines: list[str]) -> list[list[str]]:
    """Bodies of the innermost loops that hold tensor-core instructions."""
    labels, loops = {}, []
    for number, line in enumerate(lines):
        if label := re.match(r"^(\.L_\w+):", line):
            labels[label.group(1)] = number
        branch = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
        if branch and branch.group(1) in labels:
            loops.append((labels[branch.group(1)], number))
    inner = [
        a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] and _matrix(lines, b) for b in loops)
    ]
    return [lines[start:stop] for start, stop in inner if _matrix(lines, (start, stop))]


def _matrix(lines: list[str], loop: tuple[int, int]) -> bool:
    return any(MATRIX.search(line) for line in lines[loop[0] : loop[1]])


def describe(fn: JITFunction, kernel: triton.compiler.CompiledKernel) -> dict:
    """Tensor-core products by operand type, shared memory, and local-memory traffic of a compiled kernel."""
    lines = sass(kernel)
    total, bodies = count(lines), matrix_loops(lines)
    loops = [count(body) for body in bodies]
    products = re.findall(r"= (?:tt\.dot|ttng\.warp_group_dot) .*->.*x([if])32", kernel.asm["ttgir"])
    return {
        "kernel": fn.__name__,
        "int8_products": products.count("i"),
        "float_products": products.count("f") + len(re.findall(r"ttng\.tc_gen5_mma\b", kernel.asm["ttgir"])),
        "opcodes": {name: n for name, n in total.items() if MATRIX.fullmatch(name)},
        "shared_bytes": kernel.metadata.shared,
        "instructions": total.total(),
        "spills": total["STL"] + total["LDL"],
        "spills_in_loops": sum(loop["STL"] + loop["LDL"] for loop in loops),
        "instructions_in_loops": sum(loop.total() for loop in loops),
        "registers": registers(kernel),
        "ptx": kernel.asm["ptx"],
        "loops": [
            {
                "instructions": loop.total(),
                "stall_cycles": stall_cycles(body),
                "stored": loop["STL"],
                "loaded": loop["LDL"],
            }
            for loop, body in zip(loops, bodies)
        ],
    }


def left_of(call: Call, inputs: tuple[Tensor, ...]) -> Saved:
    """In the place of what a forward leaves, of FP8 gradients."""
    q, k, _, do, _ = inputs
    of_queries, of_keys = (side.per_token(call.device) for side in (call.queries, call.keys))
    k_mean = torch.empty(call.keys.batch, call.keys.heads, call.head_dim, device=call.device)
    return Saved(
        torch.empty_like(do), of_queries, q.to(torch.int8), of_queries, k.to(torch.int8), of_keys, of_queries, k_mean
    )


class Unstarted:
    """In the place of a compiled kernel: to start it does nothing."""

    run = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        return lambda *args: None


def launches(arch: str, kernel_call: AttentionCase, until: str = "cubin") -> list[dict]:
    """Every kernel that forward and backward launch, as sm_``arch`` would get it; "hopper": the Gluon ones.

    Then those that the deterministic mode has instead. Where ``until`` is "ttgir" or "ptx", names and texts
    alone; where it is "forward", machine code of that direction.
    """
    gluon, arch = arch == "hopper", 90 if arch == "hopper" else int(arch)
    found, known, deterministic = [], set(), False

    def record(fn: JITFunction, *args, grid, warmup, **kwargs) -> Unstarted:
        launch = Launch.of(fn, arch, *args, **kwargs)
        key = launch.source.hash(), launch.options.hash()
        if deterministic and key in known:
            return Unstarted()
        known.add(key)
        if until in ("ttgir", "ptx"):
            row = {"kernel": fn.__name__, until: launch.text(until)}
        else:
            row = describe(fn, launch.compiled())
        found.append(row | {"deterministic": deterministic})
        return Unstarted()

    device.capability = lambda device: arch
    JITFunction.run = record
    torch_lists.stand_in(setattr)
    impl, inputs = "triton/hopper" if gluon else "triton/triton", kernel_call.inputs()
    call = kernel_call.call(*inputs[:2])
    # a portable forward is in the table of machine code; of two head_dims it would have them filled up to one number
    if gluon and (until in ("ttgir", "ptx") or call.head_dim != call.value_dim):
        impl, saved = "hopper/hopper", left_of(call, inputs)
    else:
        saved = kernel_call.forward(impl, call, inputs)
    if until == "forward":
        return found
    kernel_call.backward(impl, call, saved, inputs)
    if gluon:  # the forward itself, in CuTe DSL, is another compiler's
        launch_quantize_k(
            inputs[1], call.keys, call.key_mask, call.recipe.block_k, k_sampled=call.recipe.k_mean == "sample",
            turned=call.turned,
        )  # fmt: skip
    deterministic = True
    kernel_call.backward(impl, call._replace(deterministic=True), saved, inputs)
    return found


def rows(
    arch: str, head_dim: str, recipe: str, form: str = "causal", tokens: str | int = "256", until: str = "cubin"
) -> list[dict]:
    """`launches` of a call as the command line names it; "ungrouped": causal, with a key head for each query head."""
    causal, count = form not in ("full", "packed", "padded") and form in FORMS, int(tokens)
    lengths = [count - count // 3, count // 3] if form.startswith("packed") else []
    head_dim, _, value_dim = head_dim.partition("/")
    grouped = form in ("causal", "packed-grouped", "by-token")
    shape = AttentionCase(
        recipe=recipe, head_dim=int(head_dim), value_dim=int(value_dim or head_dim), heads=4,
        kv_heads=2 if grouped else 4, tokens_q=count, tokens_k=count, lengths_q=lengths, lengths_k=lengths,
        is_causal=causal, window=(64, 0) if form == "window" else (-1, -1),
        masked=form.startswith("padded"), mask="" if form in FORMS else form, by_token=form == "by-token",
    )  # fmt: skip
    return launches(arch, shape, until)


def serve() -> None:
    """Answer calls, a line of JSON each, with rows or an error; each in a process forked from this one."""
    triton_key()  # a hash of the compiler itself, which is kept, and which every process would else make again
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                answer = rows(*map(str, json.loads(line)))
            except Exception:
                answer = traceback.format_exc()
            print(json.dumps(answer), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps(f"ended with status {status}"), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        from tests.masks import KINDS

        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        for name in ("arch", "head_dim", "recipe"):
            parser.add_argument(name)
        parser.add_argument("form", nargs="?", default="causal", choices=(*FORMS, *KINDS), metavar="form")
        parser.add_argument("tokens", nargs="?", type=int, default=256)
        parser.add_argument("until", nargs="?", default="cubin", choices=("ttgir", "ptx", "cubin", "forward"))
        given = parser.parse_args()
        for name, accepted in (("arch", r"hopper|\d+"), ("head_dim", r"\d+(/\d+)?")):
            if not re.fullmatch(accepted, getattr(given, name)):
                parser.error(f"{name}: got {getattr(given, name)!r}; accepted: {accepted}")
        try:
            Recipe.parse(given.recipe)
        except ValueError as error:
            parser.error(str(error))
        for row in rows(**vars(given)):
            if given.until != "ptx":
                row.pop("ptx", None)
            print(json.dumps(row))
