"""Each kernel's own time by the profiler, and the error against cuDNN, on a GPU: for work on kernels, not for claims.

`python -m tools.timing --recipe mixed --head-dim 64` prints a line a shape. `--replace backward_kernel=variant.py`
runs another file's kernel of that name in place of Hopper's, `--set backward.64.stages=2` changes a row of
`sagebwd.kernels.sm90.widths`; both may be repeated. Claims come from `python -m benchmarks attention`.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from sagebwd import sage_attention
from sagebwd.kernels.sm90 import widths
from sagebwd.kernels.sm90.backward import launch
from sagebwd.reference.metrics import relative_l2

TOTAL_TOKENS, MODEL_WIDTH = 16384, 2048


def replace_kernel(text: str) -> None:
    """Put NAME=FILE's kernel where Hopper's is launched."""
    name, path = text.split("=", 1)
    spec = importlib.util.spec_from_file_location(f"replaced_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(launch, name):
        raise ValueError(f"--replace {text}: {launch.__name__} launches no {name}")
    setattr(launch, name, getattr(module, name))


def change_launch(text: str) -> None:
    """DIRECTION.HEAD_DIM.OPTION=VALUE of a row of `sagebwd.kernels.sm90.widths`."""
    path, value = text.split("=", 1)
    direction, head_dim, option = path.split(".")
    row = widths.width(int(head_dim), int(head_dim))
    tile = getattr(row, direction)
    if option not in tile._fields:
        raise ValueError(f"--set {text}: {direction} has {', '.join(tile._fields)}")
    widths._OF[row[:2]] = row._replace(**{direction: tile._replace(**{option: int(value)})})


def step(q, k, v, do, attention):
    """O and the three gradients."""
    o = attention(q, k, v)
    return o, *torch.autograd.grad(o, (q, k, v), do)


def measure(recipe: str, impl: str | None, head_dim: int, tokens: int, is_causal: bool, runs: int = 3) -> str:
    """One shape: microseconds by kernel, relative L2 of O, dQ, dK and dV against cuDNN."""
    batch, heads = max(1, TOTAL_TOKENS // tokens), MODEL_WIDTH // head_dim
    torch.manual_seed(0)
    *leaves, do = (torch.randn(batch, heads, tokens, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in leaves]

    def ours(q, k, v):
        return sage_attention(q, k, v, is_causal=is_causal, recipe=recipe, impl=impl)

    def cudnn(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    errors = [relative_l2(a, e) for a, e in zip(step(*leaves, do, ours), step(*leaves, do, cudnn))]
    step(*leaves, do, ours)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(runs):
            step(*leaves, do, ours)
        torch.cuda.synchronize()
    times = {event.key.split("(")[0][-32:]: event.device_time_total / runs for event in profiled.key_averages()}
    kernels = ", ".join(f"{name} {us:.0f}" for name, us in sorted(times.items(), key=lambda x: -x[1]) if us >= 1)
    mask = "causal" if is_causal else "no mask"
    return f"D{head_dim} N{tokens} {mask}: {kernels} us; errors {' '.join(f'{error:.4f}' for error in errors)}"


def main() -> None:
    """Parse the command line and print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mixed")
    parser.add_argument("--impl")
    parser.add_argument("--head-dim", type=int, action="append")
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--replace", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--set", action="append", default=[], metavar="DIRECTION.HEAD_DIM.OPTION=VALUE")
    arguments = parser.parse_args()
    for text in arguments.replace:
        replace_kernel(text)
    for text in arguments.set:
        change_launch(text)
    for head_dim in arguments.head_dim or (64, 128):
        for tokens in arguments.tokens or (4096, 16384):
            for is_causal in (False, True):
                print(measure(arguments.recipe, arguments.impl, head_dim, tokens, is_causal), flush=True)


if __name__ == "__main__":
    main()
