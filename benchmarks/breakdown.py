"""Where a step's time goes, by PyTorch's profiler: attention's kernels, its passes, copies, all else, and nothing.

Kernels are told by their names, this project's by the folder that they lie in: what a plan launches
(`sagebwd.planning`) has no operator that it belongs to. What an operator of attention runs beside them, such as memory
that is cleared, counts as a pass. Copies and casts are those of the whole step, weights' casts under autocast too:
what attention adds to them is the difference between two attentions. A fused choice has norm and rotary embedding in
attention's passes, or where they are composed among its kernels; of others they are the model's own. On a CPU, where
nothing has kernels, operators are counted by their own time.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import sagebwd
from benchmarks.timer import wait

PACKAGE = Path(sagebwd.__file__).parent
# Folders and files whose kernels are passes; those of all others are attention itself.
OF_PASSES = {
    "common", "operands", "operands.py", "masks", "sinks.py", "max_logits.py", "quantize.cu", "row_values.cu",
    "finish.cu",
}  # fmt: skip
CUDA_KERNEL = re.compile(r"^KERNEL (\w+)\(", re.MULTILINE)
PARTS = ("attention", "passes", "copies", "other", "idle")
OPERATOR = re.compile(
    r"SageAttention(Backward)?|sagebwd::(attention|flash_attention_4)(_backward)?"
    r"|aten::_scaled_dot_product_\w+"
)
ATTENTION = re.compile(
    r".*(sagebwdkernels"  # CuTe DSL's of this project, named after their module
    r"|FlashAttention(Forward|Backward)Sm\d+"  # FlashAttention-4
    r"|FlashAttn(Fwd|Bwd)Sm\d+"  # FlashAttention-3
    r"|triton_tem_fused_\w*flex_attention"  # FlexAttention, as inductor names its templates
    r"|sdpa_sm\d+_flash_[bf]prop"  # cuDNN
    r"|fmha_cutlass[FB]_"  # torch's memory-efficient attention
    r"|pytorch_flash::flash_(fwd|bwd_dq_dk_dv_loop_seqk_parallel|fwd_splitkv)_kernel).*",
    re.DOTALL,
)
PASSES = re.compile(
    r".*(FlashAttentionBackward(Preprocess|Postprocess)"
    r"|FlashAttnBwd(Preprocess|PostprocessConvertdQ)"
    r"|cudnn::fusion::(compute_dot_do_o|convert_dq)"
    r"|pytorch_flash::flash_bwd_(dot_do_o|convert_dq|convert_dkv|clear_dkvaccum)).*",
    re.DOTALL,
)
COPY = re.compile(
    r".*copy_kernel.*|Memcpy DtoD.*|"
    r"triton_[a-z]+_fused_((_to_copy|_unsafe_view|clone|copy|expand|permute|select|slice|split|squeeze|t|transpose"
    r"|unsqueeze|view)_)+\d+",
    re.DOTALL,
)


def breakdown(run: Callable[[], object], device: torch.device) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Microseconds of ``run`` in each of `PARTS` but idle, in each kernel of attention, its passes, and in others."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    wait(device)
    with profile(activities=activities) as profiled:
        run()
        wait(device)
    events = profiled.events()
    return _of_kernels(events) if cuda else _of_operators(events)


@cache
def own_kernels() -> dict[str, str]:
    """Triton's, Gluon's and CUDA C++'s kernels of this project by name, and which of `PARTS` each is.

    Read from the sources, so that a kernel that is renamed or new is counted.
    """
    found = {}
    for path in sorted(PACKAGE.rglob("*.cu")):  # of a folder cuda/ in the one that launches them
        for name in CUDA_KERNEL.findall(path.read_text(encoding="utf-8")):
            found[name] = _part_in(path.parent.parent.name, path.name)
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "_kernel(" in source else ():
            decorators = [ast.unparse(x) for x in getattr(node, "decorator_list", [])]
            if any(".jit" in x for x in decorators) and node.name.endswith("_kernel"):
                found[node.name] = _part_in(path.parent.name, path.name)
    return found


def _part_in(folder: str, file: str) -> str:
    return "attention" if OF_PASSES.isdisjoint((folder, file)) else "passes"


def part_of(kernel: str) -> str:
    """Which of `PARTS` a kernel's time belongs to, by its name alone."""
    if kernel in own_kernels():
        return own_kernels()[kernel]
    named = (("attention", ATTENTION), ("passes", PASSES), ("copies", COPY))
    return next((part for part, names in named if names.fullmatch(kernel)), "other")


def _of_kernels(events: list) -> tuple[Counter[str], Counter[str], Counter[str]]:
    spent, within = Counter(), Counter()
    for event in events:
        if event.device_type == DeviceType.CUDA:
            if not getattr(event, "is_user_annotation", False):
                spent[event.name] += event.self_device_time_total
        elif OPERATOR.fullmatch(event.name) and not _inside(event):
            for name, duration in _kernels(event):
                within[name] += duration
    parts, kernels, others = Counter(), Counter(), Counter()
    for name, total in spent.items():
        part = part_of(name)
        if part in ("attention", "passes"):
            kernels[name] = total
        else:
            if within[name]:
                kernels[name] = within[name]
                parts["passes"] += within[name]
                total -= within[name]
            others[name] = total
        parts[part] += total
    return parts, kernels, others


def _of_operators(events: list) -> tuple[Counter[str], Counter[str], Counter[str]]:
    parts, kernels, others = Counter(), Counter(), Counter()
    for event in events:
        if _inside(event):
            continue
        if OPERATOR.fullmatch(event.name):
            kernels[event.name] += event.cpu_time_total
        else:
            parts["copies" if event.name == "aten::copy_" else "other"] += event.self_cpu_time_total
            others[event.name] += event.self_cpu_time_total
    parts["attention"] = sum(kernels.values())
    return parts, kernels, others


def _inside(event: torch.autograd.profiler_util.FunctionEvent) -> bool:
    """Whether an operator of attention called this one."""
    parent = event.cpu_parent
    while parent is not None:
        if OPERATOR.fullmatch(parent.name):
            return True
        parent = parent.cpu_parent
    return False


def _kernels(event: torch.autograd.profiler_util.FunctionEvent) -> Iterator[tuple[str, float]]:
    """Name and microseconds of what an operator and those that it called ran on the device."""
    for kernel in event.kernels:
        yield kernel.name, kernel.duration
    for child in event.cpu_children:
        yield from _kernels(child)
