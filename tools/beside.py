"""Attention in several source trees, one beside another: `python -m tools.beside OLD NEW`, on a GPU.

OLD and NEW are folders that hold a package sagebwd, such as src of two checkouts. Each tree's calls run in processes
of its own, which take turns; of each tree the least time of its turns counts. The table has milliseconds of the first
tree and how many times as fast the others are, forward and backward, backward, and forward alone. `CASES` are kinds of
calls that kernels compile differently for: what makes one of them faster may slow another. First every call is
compiled, in ``--processes`` at once. `python -m benchmarks attention` compares with other projects.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]
WAYS = ("both", "backward", "forward")
# As `benchmarks.packed` has them, which older trees have not.
MIXED = (1317, 4099, 700, 8192, 2500, 333, 6000, 1024, 5000, 3603)


class Case(NamedTuple):
    """A call; lengths: of packed sequences, in place of batch and tokens; hidden: a share of the last one's keys."""

    head_dim: int
    batch: int = 1
    heads: int = 16
    kv_heads: int = 16
    tokens: int = 4096
    value_dim: int | None = None
    is_causal: bool = True
    lengths: tuple[int, ...] = ()
    window: tuple[int, int] = (-1, -1)
    hidden: float = 0.0


CASES = {
    "128": Case(128, 4),
    "64": Case(64, 4, 32, 32),
    "72": Case(72, 4, 28, 28),
    "96": Case(96, 4, 21, 21),
    "192/128": Case(192, 4, value_dim=128),
    "192": Case(192, 4, 10, 10),
    "256": Case(256, 4, 8, 8),
    "128, 1K": Case(128, 16, tokens=1024),
    "64, 1K": Case(64, 16, 12, 12, tokens=1024),
    "128, no mask": Case(128, 4, is_causal=False),
    "64, no mask": Case(64, 4, 32, 32, is_causal=False),
    "128, grouped": Case(128, 4, 32, 8),
    "64, grouped": Case(64, 4, 32, 8),
    "128, ragged": Case(128, 4, tokens=4000),
    "64, ragged": Case(64, 4, 32, 32, tokens=4000),
    "128, window": Case(128, 2, tokens=8192, window=(1024, 0)),
    "64, window": Case(64, 2, 32, 32, tokens=8192, window=(1024, 0)),
    "64, narrow window": Case(64, 1, 64, 8, tokens=8192, window=(127, 0)),
    "128, padded": Case(128, 4, hidden=0.5),
    "64, padded": Case(64, 4, 32, 32, hidden=0.5),
    "128, packed 2K": Case(128, lengths=(2048,) * 16),
    "64, packed 2K": Case(64, heads=32, kv_heads=32, lengths=(2048,) * 16),
    "128, packed": Case(128, lengths=MIXED),
    "64, packed": Case(64, heads=32, kv_heads=32, lengths=MIXED),
    "128, packed, grouped": Case(128, heads=32, kv_heads=8, lengths=MIXED),
    "64, packed, grouped": Case(64, heads=32, kv_heads=8, lengths=MIXED),
}


def runs_of(case: Case, recipe: str, device: str) -> dict[str, Callable[[], object]]:
    """What is timed of a call, by `WAYS`."""
    from sagebwd import sage_attention, sage_attention_varlen

    generator = torch.Generator(device).manual_seed(0)
    value_dim, total = case.value_dim or case.head_dim, sum(case.lengths)

    def drawn(heads: int, width: int) -> torch.Tensor:
        shape = (total, heads, width) if case.lengths else (case.batch, heads, case.tokens, width)
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    widths = ((case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, value_dim))
    leaves = [drawn(*width).requires_grad_() for width in widths]
    do = drawn(case.heads, value_dim)
    options = {"is_causal": case.is_causal, "recipe": recipe}
    if case.lengths:
        offsets = torch.tensor([0, *case.lengths], device=device).cumsum(0, dtype=torch.int32)
        longest = max(case.lengths)

        def forward() -> torch.Tensor:
            return sage_attention_varlen(*leaves, offsets, offsets, longest, longest, **options)
    else:
        mask = None
        if case.hidden:  # of each sequence more than of the one before
            shares = torch.linspace(0, case.hidden, case.batch, device=device)[:, None]
            mask = (torch.arange(case.tokens, device=device) < case.tokens * (1 - shares))[:, None, None]
        options |= {"attn_mask": mask, "window": case.window, "enable_gqa": case.heads != case.kv_heads}

        def forward() -> torch.Tensor:
            return sage_attention(*leaves, **options)

    out = forward()

    def alone() -> torch.Tensor:
        with torch.no_grad():
            return forward()

    return {
        "both": lambda: torch.autograd.grad(forward(), leaves, do),
        "backward": lambda: torch.autograd.grad(out, leaves, do, retain_graph=True),
        "forward": alone,
    }


def timer() -> ModuleType:
    """This checkout's, whichever tree is timed."""
    spec = importlib.util.spec_from_file_location("timer", ROOT / "src" / "sagebwd" / "cli" / "timer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(names: list[str], recipe: str, device: str, ms: float) -> dict[str, dict[str, float]]:
    """Milliseconds by case and way, by the package that this process imports; ms 0: each is called once."""
    found = {}
    for name in names:
        runs = runs_of(CASES[name], recipe, device)
        if not ms:
            runs["both"]()
            continue
        found[name] = {way: took for way, (took, _) in timer().time_interleaved(runs, device, 3, ms).items()}
        runs.clear()
    return found


def in_tree(tree: Path, names: list[str], given: argparse.Namespace, ms: float) -> dict[str, dict[str, float]]:
    """`measure` in a process of its own. Raises RuntimeError with what it printed where that fails."""
    path = os.pathsep.join([str(tree.resolve()), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tools.beside", "--measure", "--recipe", given.recipe, "--device", given.device]
    command += ["--ms", str(ms), *(text for name in names for text in ("--case", name))]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT)
    if ran.returncode:
        raise RuntimeError(f"{tree}, {', '.join(names)}: {ran.stderr[-2000:]}")
    return json.loads(ran.stdout.splitlines()[-1])


def table(trees: list[Path], least: list[dict[str, dict[str, float]]]) -> str:
    """In Markdown; ``least`` of each tree."""
    lines = [f"| call | ms of {trees[0]}: {', '.join(WAYS)} |" + "".join(f" {tree} |" for tree in trees[1:])]
    lines.append("| --- |" + " --- |" * len(trees))
    for name, first in least[0].items():
        cells = [" / ".join(f"{first[way]:.3f}" for way in WAYS)]
        cells += [" / ".join(f"{first[way] / other[name][way]:.3f}" for way in WAYS) for other in least[1:]]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line; compile, measure by turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path, nargs="*")
    parser.add_argument("--case", action="append", choices=tuple(CASES), help="repeat for several [default: all]")
    parser.add_argument("--recipe", default="mixed")
    parser.add_argument("--turns", type=int, default=2, help="of each tree")
    parser.add_argument("--ms", type=float, default=40.0, help="of a call in each of three rounds of a turn")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every turn")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # what a process of a tree does
    given = parser.parse_args(arguments)
    names = given.case or list(CASES)
    if given.measure:
        print(json.dumps(measure(names, given.recipe, given.device, given.ms)))
        return
    for tree in given.trees:
        if not (tree / "sagebwd").is_dir():
            parser.error(f"{tree} holds no package sagebwd")
    if len(given.trees) < 2:
        parser.error(f"expected two trees or more, got {len(given.trees)}")
    with ThreadPoolExecutor(given.processes) as pool:
        calls = [(tree, name) for tree in given.trees for name in names]
        for done, _ in enumerate(pool.map(lambda call: in_tree(call[0], [call[1]], given, 0), calls), 1):
            print(f"compiled {done} of {len(calls)}", file=sys.stderr, flush=True)
    turns: list[list[dict]] = [[] for _ in given.trees]
    for turn in range(given.turns):
        for tree, found in zip(given.trees, turns):
            print(f"turn {turn + 1} of {given.turns}: {tree}", file=sys.stderr, flush=True)
            found.append(in_tree(tree, names, given, given.ms))
            if given.json:  # after each: what was measured is kept
                given.json.write_text(json.dumps(dict(zip(map(str, given.trees), turns)), indent=1))
    least = [
        {name: {way: min(turn[name][way] for turn in found) for way in WAYS} for name in names} for found in turns
    ]
    print(table(given.trees, least))


if __name__ == "__main__":
    main()
