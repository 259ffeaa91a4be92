"""One attention over several GPUs: sagebwd's ring beside PyTorch's own, forward and backward, causal.

    torchrun --nproc-per-node 2 -m tools.ring_time --shape 128x131072 --shape 64x262144

PyTorch's is `torch.distributed.tensor.experimental.context_parallel` with each of its kernels and both its ways to
pass keys on, FlashAttention-4 among them where flash-attn-4 is installed. All take turns; a time is the slowest
process's, the median counts. Errors are relative L2 of the whole sequence's O, dQ, dK and dV to full precision's on
one GPU, beside the recipe's own on one GPU; above `ERRORS_TO` tokens nothing is compared. A peer that is wrong or does
not run is named and does not count. Without a GPU `--device cpu --impl reference` runs it over gloo.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # imported after a process group is made, it keeps the group's threads past the program's end
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.correctness import PEER_LIMIT, TENSORS
from benchmarks.shapes import Shape
from benchmarks.timer import from_rest
from lab.training import processes
from sagebwd import sage_attention
from sagebwd.cli.results import environment, save
from sagebwd.integrations.context_parallel import ring_attention, shard
from sagebwd.reference.metrics import Comparison
from tools import fa4_in_torch

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "fa4": SDPBackend.FLASH_ATTENTION,
    "cpu": SDPBackend.FLASH_ATTENTION,
}
ROTATIONS = ("allgather", "alltoall")
ERRORS_TO = 1 << 18
"""Tokens up to which one GPU computes the whole sequence too."""
RING_LIMIT = 1.75
"""The ring's error over that of the recipe on one GPU, at most: what its test allows on CPUs."""
DIRECTIONS = ("forward", "both")

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Ring:
    """An attention over all processes: PyTorch's by a kernel and a rotation, or without them sagebwd's by a recipe."""

    recipe: str = ""
    impl: str | None = None
    kernel: str = ""
    rotation: str = ""

    @property
    def name(self) -> str:
        """As rows have it."""
        return f"torch {self.kernel} {self.rotation}" if self.kernel else f"sagebwd {self.recipe}"

    @contextmanager
    def ready(self, mesh: DeviceMesh, tokens: int) -> Iterator[Attention]:
        """The attention of this process's queries to all keys; inside, nothing may raise: torch 2.11 would leave its
        own function replaced."""
        if not self.kernel:
            yield partial(ring_attention, is_causal=True, recipe=self.recipe, impl=self.impl)
            return
        set_rotate_method(self.rotation)
        divided = torch.zeros(1, tokens, device=mesh.device_type)  # it wants a buffer to divide
        chosen = fa4_in_torch.active() if self.kernel == "fa4" else nullcontext()
        shared = context_parallel(mesh, buffers=[divided], buffer_seq_dims=[1])
        with chosen, shared, sdpa_kernel(BACKENDS[self.kernel]):
            yield lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Timed(tuple):
    """O, dQ, dK and dV, with ``ms`` of the forward and of both, and ``peak_bytes`` beyond what was there."""

    ms: dict[str, float]
    peak_bytes: int | None


def run(attention: Attention, tensors: tuple[Tensor, ...], device: str) -> Timed:
    """Forward and backward, begun by all processes together; times of this process."""
    *leaves, do = (x.detach() for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    before = _reset_peak(device)
    dist.barrier()
    out, forward, _ = from_rest(lambda: attention(*leaves), device)
    gradients, backward, _ = from_rest(lambda: torch.autograd.grad(out, leaves, do), device)
    found = Timed((out.detach(), *gradients))
    found.ms = {"forward": forward, "both": forward + backward}
    found.peak_bytes = None if before is None else torch.cuda.max_memory_allocated() - before
    return found


def attempt(ring: Ring, mesh: DeviceMesh, tokens: int, parts: tuple[Tensor, ...], device: str) -> Timed | str:
    """`run` of a ring, or why it does not run on some process."""
    with ring.ready(mesh, tokens) as attention:
        try:
            found: Timed | str = run(attention, parts, device)
        except Exception as error:  # kernels of other projects raise what they like
            found = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, found if isinstance(found, str) else None)
    return next((reason for reason in reasons if reason), found)


def errors(found: Timed, expected: list[Tensor]) -> dict[str, float]:
    """Relative L2 of each tensor over the tokens of all processes, of which ``expected`` has this one's."""
    sums = []
    for actual, right in zip(found, expected):
        compared = Comparison()
        for head in range(actual.shape[1]):
            compared.add(actual[:, head], right[:, head])
        sums.append([compared.error_square, compared.expected_square])
    total = torch.tensor(sums, dtype=torch.float64, device=found[0].device)
    dist.all_reduce(total)
    return {name: math.sqrt(error / square) for name, (error, square) in zip(TENSORS, total.tolist())}


def slowest(ms: dict[str, float], device: str) -> dict[str, float]:
    """Of all processes."""
    times = torch.tensor([ms[way] for way in DIRECTIONS], dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return dict(zip(DIRECTIONS, times.tolist()))


def measure(shape: Shape, rings: list[Ring], mesh: DeviceMesh, device: str, rounds: int) -> list[dict]:
    """A row for each ring, and for attention on one GPU where the sequence is short enough."""
    own = rings[0]
    whole = shape.inputs(device, torch.bfloat16)
    parts = tuple(shard(x, 2) for x in whole)
    rows, expected = [], None
    if shape.tokens <= ERRORS_TO:
        backend = BACKENDS["cpu" if device == "cpu" else "cudnn"]
        with sdpa_kernel(backend):
            for _ in range(2):  # the first compiles
                exact = run(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), whole, device)
        expected = [shard(x, 2) for x in exact]
        rows.append(_row(shape, "one process, full precision", [slowest(exact.ms, device)], 1, exact.peak_bytes))
        del exact
        alone = partial(sage_attention, is_causal=True, recipe=own.recipe, impl=own.impl)
        for _ in range(2):
            found = run(alone, whole, device)
        single = Timed(shard(x, 2) for x in found)
        row = _row(shape, f"one process, {own.recipe}", [slowest(found.ms, device)], 1, found.peak_bytes)
        rows.append(row | {"errors": errors(single, expected)})
        del found, single
    del whole
    if device != "cpu":
        torch.cuda.empty_cache()  # of what whole sequences took
    good, ring_rows = [], {}
    for ring in rings:
        found = attempt(ring, mesh, shape.tokens, parts, device)
        ring_rows[ring] = _row(shape, ring.name, [], dist.get_world_size(), None)
        if isinstance(found, str):
            ring_rows[ring]["refusal"] = found
            _say(f"{shape} {ring.name}: does not run, {found}")
            continue
        if expected is not None:
            ring_rows[ring]["errors"] = errors(found, expected)
        ring_rows[ring]["gate"] = _gate(ring, ring_rows[ring].get("errors"), rows)
        good.append(ring)
        del found
    times: dict[Ring, list[dict[str, float]]] = {ring: [] for ring in good}
    for _ in range(rounds):
        for ring in good:
            found = attempt(ring, mesh, shape.tokens, parts, device)
            if isinstance(found, str):
                raise RuntimeError(f"{shape} {ring.name} ran before, and then: {found}")
            times[ring].append(slowest(found.ms, device))
            ring_rows[ring]["peak_bytes"] = found.peak_bytes
            del found
    for ring, taken in times.items():
        peak = ring_rows[ring].pop("peak_bytes")
        ring_rows[ring] |= _row(shape, ring.name, taken, dist.get_world_size(), peak)
    return rows + list(ring_rows.values())


def compared(rows: list[dict]) -> str:
    """The ring of sagebwd over the fastest of PyTorch's that is right, of one shape's rows."""
    own = next(row for row in rows if row["attention"].startswith("sagebwd"))
    if own.get("gate") == "FAILED":
        return f"FAILED: the error of sagebwd's ring is over {RING_LIMIT} times that of one process"
    peers = [row for row in rows if row["attention"].startswith("torch") and row.get("gate") in ("ok", "not checked")]
    if not peers or "ms" not in own:
        return "nothing to compare with: no ring of PyTorch's runs and is right, or sagebwd's does not"
    best = {way: min(peers, key=lambda row: row["ms"][way]) for way in DIRECTIONS}
    parts = [
        f"{way} {own['ms'][way]:.1f} ms, {own['ms'][way] / best[way]['ms'][way]:.3f} of {best[way]['attention']}"
        for way in DIRECTIONS
    ]
    return "; ".join(parts)


def _row(
    shape: Shape, name: str, times: list[dict[str, float]], count: int, peak_bytes: int | None
) -> dict[str, object]:
    row: dict[str, object] = {
        "attention": name, "head_dim": shape.head_dim, "heads": shape.heads, "tokens": shape.tokens,
        "processes": count,
    }  # fmt: skip
    if times:
        row["ms"] = {way: round(statistics.median(one[way] for one in times), 3) for way in DIRECTIONS}
        row["all_ms"] = [round(one["both"], 3) for one in times]
        row["tflops_each"] = round(shape.flops("fwd+bwd") / count / row["ms"]["both"] * 1e-9, 1)
    return row if peak_bytes is None else row | {"peak_bytes": peak_bytes}


def _gate(ring: Ring, found: dict[str, float] | None, rows: list[dict]) -> str:
    """Whether a ring is right: PyTorch's within a peer's limit, sagebwd's within `RING_LIMIT` of one process's."""
    if found is None:
        return "not checked"
    single = next(row["errors"] for row in rows if "errors" in row)
    limits = {name: PEER_LIMIT if ring.kernel else RING_LIMIT * single[name] for name in TENSORS}
    return "ok" if all(found[name] <= limits[name] for name in TENSORS) else "FAILED"


def _table(rows: list[dict]) -> Iterator[str]:
    for row in rows:
        of = " ".join(f"{name} {error:.4f}" for name, error in row.get("errors", {}).items())
        peak = f", peak {row['peak_bytes'] / 2**30:.2f} GiB" if row.get("peak_bytes") else ""
        if "ms" in row:
            ms = ", ".join(f"{way} {row['ms'][way]:.1f} ms" for way in DIRECTIONS)
            yield f"  {row['attention']}: {ms}, {row['tflops_each']} TFLOPS each{peak} {row.get('gate', '')} {of}"


def _reset_peak(device: str) -> int | None:
    if device == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _say(line: str) -> None:
    if processes.is_first():
        print(line, flush=True)


def rings_of(recipe: str, impl: str | None, kernels: list[str] | None, device: str) -> list[Ring]:
    """sagebwd's, then PyTorch's: with these kernels, or all that are installed."""
    if not kernels:
        kernels = ["cpu"] if device == "cpu" else ["cudnn", "fa2", *(["fa4"] if fa4_in_torch.installed() else [])]
    peers = [Ring(kernel=kernel, rotation=rotation) for kernel in kernels for rotation in ROTATIONS]
    return [Ring(recipe, impl), *peers]


def main(given: list[str] | None = None) -> None:
    """The table, the file, and a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="HEAD_DIMxTOKENS of the whole sequence; repeat [128x131072]")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kernel", action="append", choices=BACKENDS, help="of PyTorch's; repeat [all installed]")
    parser.add_argument("--recipe", default="mixed")
    parser.add_argument("--impl")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no shape is begun")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--commit")
    arguments = parser.parse_args(given)
    began, device, count = time.monotonic(), arguments.device, processes.count()
    if count < 2:
        raise ValueError("one process has no ring; start it by torchrun --nproc-per-node 2 -m tools.ring_time")
    if device == "cuda":
        torch.cuda.set_device(processes.rank())
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(minutes=3))
    mesh = init_device_mesh(device, (count,))
    facts = environment(device, arguments.commit) | {"processes": count, "recipe": arguments.recipe}
    rings, rows = rings_of(arguments.recipe, arguments.impl, arguments.kernel, device), []
    for text in arguments.shape or ["128x131072"]:
        head_dim, tokens = map(int, text.split("x"))
        shape = Shape(head_dim, arguments.heads, arguments.heads, 1, tokens, True)
        if processes.agreed(lambda: time.monotonic() - began > arguments.seconds):
            _say(f"{shape}: left out, {arguments.seconds:.0f} s are over")
            continue
        _say(f"{shape}: begun after {time.monotonic() - began:.0f} s")
        found = measure(shape, rings, mesh, device, arguments.rounds)
        rows += found
        for line in (*_table(found), f"{shape}: {compared(found)}"):
            _say(line)
        if processes.is_first():  # anew with every shape: one that is cut off has what it measured
            path = save(rows, facts, arguments.output, f"ring_{count}-processes")
            print(f"wrote {path}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
