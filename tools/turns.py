"""Calls of `mixed` by two trees of this repository or more, by turns: `python -m tools.turns OLD . --seconds 120`.

No change to machine code lands untimed: whether it pays is told by the tree before and the tree after it in one run
on one GPU. Each tree has a process and compiled kernels of its own. A line a case: ms of forward and of both
directions by each tree, how many times as fast it is as the first, and of which of o, dq, dk and dv the bits are the
first's: dQ of `mixed` is summed in any order. A tree needs src/ and benchmarks/ alone:
`git archive COMMIT src benchmarks lab | tar -x -C OLD`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

DENSE = "dense", "by-token", "full", "grouped"
PACKED = "packed"
CASES = (
    "teacher-forcing", "causal-frames", "documents", "packed:128:16x2k", "packed:128:sft", "packed:128:heavy-tailed",
    "packed:64:sft", "dense:128", "dense:64", "by-token:128", "full:128", "grouped:128",
)  # fmt: skip
"""Kinds of `benchmarks.mask_cases`, lengths of `benchmarks.packed`, calls of 16K tokens in all: causal unless full,
of 4096 tokens each unless a third part says of how many, grouped of four heads to a key head."""
NAMES = "o", "dq", "dk", "dv"
ROUNDS = 3
LEAD_MS, ROUND_MS = 60.0, 60.0
"""How long a tree's call runs before it is timed, and while it is."""
CPU_TOKENS = 64


def call_of(case: str, device: str, impl: str | None) -> tuple[list[Tensor], Tensor, Callable[..., Tensor]]:
    """q, k, v with gradients, dO, and the call."""
    from benchmarks.mask_cases import Case
    from benchmarks.packed import packed_shapes
    from benchmarks.shapes import TOTAL_TOKENS, Shape
    from sagebwd import sage_attention, sage_attention_varlen

    kind, *more = case.split(":")
    options: dict[str, object] = {"recipe": "mixed", "impl": impl, "is_causal": True}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sage_attention(q, k, v, **options)

    if kind == PACKED:
        shape = packed_shapes([more[0]], [more[1]], device)[0]
        offsets, longest = shape.offsets(device), shape.longest

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sage_attention_varlen(q, k, v, offsets, offsets, longest, longest, **options)
    elif kind in DENSE:
        head_dim, tokens = int(more[0]), int(more[1]) if more[1:] else 4096
        causal, group = kind != "full", 4 if kind == "grouped" else 1
        heads = 2048 // head_dim
        shape = Shape(head_dim, heads, heads // group, TOTAL_TOKENS // tokens, tokens, causal)
        shape = shape if device == "cuda" else Shape(head_dim, group, 1, 1, CPU_TOKENS, causal)
        options |= {"is_causal": causal, "enable_gqa": group > 1}
    else:
        masked = Case.of(kind, None, None if device == "cuda" else CPU_TOKENS)
        shape, block_mask = masked.shape, masked.block_mask(masked.mask_mod(device), device)
        options |= {"is_causal": False, "enable_gqa": shape.heads != shape.kv_heads, "block_mask": block_mask}

    *tensors, do = shape.inputs(device, torch.bfloat16)
    if kind == "by-token":
        *tensors, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (*tensors, do))
    return [x.requires_grad_() for x in tensors], do, attend


def digest(x: Tensor) -> int:
    """A number of a tensor's bits and where each stands."""
    bits = x.detach().contiguous().view(torch.int16).flatten().to(torch.int64)
    return int((bits * (torch.arange(bits.numel(), device=bits.device) % 1000003 + 1)).sum())


def answer(case: str, what: str, device: str, made: dict[str, tuple]) -> list[int] | list[float]:
    """Digests of `NAMES`, or ms of forward and of both directions; made: the call of the case before."""
    from sagebwd.cli.timer import time_interleaved

    if case not in made:
        made.clear()
        made[case] = call_of(case, device, "hopper" if device == "cuda" else None)
    tensors, do, attend = made[case]

    def both() -> tuple[Tensor, ...]:
        out = attend(*tensors)
        return out, *torch.autograd.grad(out, tensors, do)

    if what == "bits":
        return [digest(x) for x in both()]
    runs = {"forward": torch.no_grad()(lambda: attend(*tensors)), "both": both}
    times = time_interleaved(runs, device, 1, ROUND_MS if device == "cuda" else 0.0, LEAD_MS)
    return [times[name][0] for name in runs]


def serve(device: str) -> None:
    """Answer lines of JSON, as the process of a tree."""
    made: dict[str, tuple] = {}
    for line in sys.stdin:
        case, what = json.loads(line)
        try:
            found: object = answer(case, what, device, made)
        except Exception as error:  # a tree may lack what a case needs: it is said, and the others go on
            found = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        print(json.dumps({"found": found}), flush=True)


class Tree:
    """A tree's process."""

    def __init__(self, folder: Path, device: str) -> None:
        folder = folder.resolve()
        if not (folder / "src" / "sagebwd").is_dir():
            raise ValueError(f"{folder} has no src/sagebwd; expected a tree of this repository")
        before = os.environ.get("PYTHONPATH", "")
        paths = [str(folder / "src"), str(folder), *filter(None, before.split(os.pathsep))]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, __file__, "--serve", "--device", device]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment
        )
        self.name = folder.name

    def ask(self, case: str, what: str) -> None:
        """Have it begin."""
        self.process.stdin.write(json.dumps([case, what]) + "\n")
        self.process.stdin.flush()

    def found(self) -> object:
        """Its answer; what else is printed is passed over."""
        for line in self.process.stdout:
            if line.startswith('{"found"'):
                return json.loads(line)["found"]
        return f"ended with status {self.process.wait()}"

    def close(self) -> None:
        """End it."""
        self.process.stdin.close()
        self.process.wait()


def compared(case: str, trees: list[Tree]) -> str:
    """The line of a case."""
    for tree in trees:  # compile side by side
        tree.ask(case, "bits")
    bits = [tree.found() for tree in trees]
    refused = [f"{tree.name}: {found}" for tree, found in zip(trees, bits) if isinstance(found, str)]
    if refused:
        return f"{case:24} {'; '.join(refused)}"
    times: list[list[list[float]]] = [[] for _ in trees]
    for turn in range(ROUNDS):
        for number in range(len(trees))[:: 1 if turn % 2 else -1]:
            trees[number].ask(case, "time")
            times[number].append(trees[number].found())
    medians = [[statistics.median(column) for column in zip(*own)] for own in times]
    cells = []
    for tree, own, found in zip(trees, medians, bits):
        over = " ".join(f"{first / ms:.3f}" for first, ms in zip(medians[0], own))
        same = [name for name, one, other in zip(NAMES, found, bits[0]) if one == other]
        cells.append(f"{tree.name} {own[0]:.3f} {own[1]:.3f} ({over}) same {' '.join(same) or 'none'}")
    return f"{case:24} {' | '.join(cells)}"


def main(arguments: list[str] | None = None) -> int:
    """Compare trees, or serve as one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, help="folders; times are over the first's")
    parser.add_argument("--case", action="append", help=f"repeat for several; {', '.join(CASES)} unless named")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case later")
    parser.add_argument("--device", default="cuda", help="cpu tries the command out")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        serve(given.device)
        return 0
    if len(given.trees) < 2:
        parser.error("expected two trees or more")
    began, trees = time.monotonic(), [Tree(folder, given.device) for folder in given.trees]
    print(f"{'case':24} each: ms forward, ms both, times as fast as {trees[0].name}", flush=True)
    for case in given.case or CASES:
        if time.monotonic() - began > given.seconds:
            print(f"{case:24} no time")
            continue
        print(f"{compared(case, trees)}, {time.monotonic() - began:.0f} s", flush=True)
    for tree in trees:
        tree.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
