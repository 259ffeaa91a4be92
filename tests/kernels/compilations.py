"""What Triton would compile, and autotune time, as lengths vary: its own cache keys of every launch. Needs no GPU.

`python -m tests.kernels.compilations ARCH HEAD_DIM RECIPE LAYOUT LENGTH...` prints a JSON line a length: the
kernels that would be compiled there for the first time, and the launches that autotune would time. ARCH "hopper" means
the Gluon kernels on sm_90; LAYOUT is "heads" (B, H, N, D), "tokens" (B, N, H, D) or "packed". It runs in a process of
its own, as kernels of a process with TRITON_INTERPRET=1 have no such keys.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from triton.runtime.jit import JITFunction, compute_cache_key

from sagebwd.kernels.portable import tune
from sagebwd.kernels.runtime import device
from tests.attention_case import AttentionCase
from tools.cross_compile import Unstarted, binder


def first_seen(arch: str, head_dim: int, recipe: str, layout: str, lengths: list[int]) -> list[dict]:
    """Of each length: kernels whose cache key no earlier length had, and how many launches autotune timed."""
    gluon, arch = arch == "hopper", 90 if arch == "hopper" else int(arch)
    seen: dict[tuple[str, str], Unstarted] = {}
    new: list[str] = []
    timed: list[object] = []

    def record(fn: JITFunction, *args, grid, warmup, **kwargs) -> Unstarted:
        _, specialization, options = binder(fn, arch)(*args, **kwargs)
        key = fn.__name__, compute_cache_key({}, specialization, options)
        if key not in seen:
            seen[key] = Unstarted()
            new.append(fn.__name__)
        return seen[key]

    def time(call, run, config) -> float:
        timed.append(config)
        return 1.0

    JITFunction.run = record
    device.capability = lambda device: arch
    tune._time = time
    torch.cuda.get_device_name = lambda: f"sm_{arch}"
    impl, rows = "triton/hopper" if gluon else "triton/triton", []
    for length in lengths:
        new.clear()
        timed.clear()
        packed = [length, 40] if layout == "packed" else []
        call = AttentionCase(
            recipe=recipe, batch=2, heads=4, kv_heads=2, tokens_q=length, tokens_k=length, head_dim=head_dim,
            is_causal=True, lengths_q=packed, lengths_k=packed,
        )  # fmt: skip
        inputs = call.inputs()
        if layout == "tokens":
            inputs = [*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:4]), None]
        call.run(impl, inputs)
        rows.append({"length": length, "compiled": sorted(new), "timed": len(timed)})
    return rows


if __name__ == "__main__":
    arch, head_dim, recipe, layout, *lengths = sys.argv[1:]
    os.environ["SAGEBWD_AUTOTUNE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        tune.CACHE = Path(folder) / "launch.json"
        for row in first_seen(arch, int(head_dim), recipe, layout, [int(x) for x in lengths]):
            print(json.dumps(row))
