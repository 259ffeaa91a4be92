"""`python -m tests.kernels.norm_rope_compilations ARCH HEAD_DIM CHANNELS ROPE` compiles both kernels of a norm and a
rotary embedding of so many channels, without a GPU, and prints a JSON line each. It runs in a process of its own, as
kernels of a process with TRITON_INTERPRET=1 cannot be compiled."""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from sagebwd.kernels import norm_rope
from sagebwd.kernels.runtime import program
from sagebwd.norm_rope_composed import INTERLEAVED
from tools.cross_compile import Launch, Unstarted, count, registers, sass


def compiled(arch: int, head_dim: int, channels: int, rope: str) -> list[dict]:
    """A row a kernel, of grouped heads in BF16."""
    rows: list[dict] = []

    def record(fn: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> Unstarted:
        kernel = Launch.of(fn, arch, *args, **kwargs).compiled()
        counted = count(sass(kernel))
        spills = sum(counted[opcode] for opcode in ("STL", "LDL"))
        used = {"registers": registers(kernel), "spills": spills, "shared_bytes": kernel.metadata.shared}
        rows.append({"kernel": fn.__name__, **used})
        return Unstarted()

    JITFunction.run = record

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def describe() -> None:
        q, k = (empty(2, 4096, heads, head_dim).transpose(1, 2) for heads in (16, 4))
        weights = empty(head_dim), empty(head_dim)
        tables = [empty(1, 4096, channels) for _ in range(4)]
        norms = [empty(*x.shape[:-1], dtype=torch.float32) for x in (q, k)]
        interleaved, dtypes = rope == INTERLEAVED, (torch.bfloat16, torch.bfloat16)
        norm_rope.forward(q, k, *weights, *tables, 1e-6, interleaved, None)
        norm_rope.backward(q, k, q, k, *norms, *weights, *tables, None, None, interleaved, dtypes)

    program.Program.alone(describe, torch.device("cpu"))
    return rows


if __name__ == "__main__":
    arch, head_dim, channels, rope = sys.argv[1:]
    for row in compiled(int(arch), int(head_dim), int(channels), rope):
        print(json.dumps(row))
