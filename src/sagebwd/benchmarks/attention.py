"""Speed and memory of attention, end to end, against the best BF16 kernels on the same tensors.

What is timed is what a training step pays: quantisation, smoothing, delta, conversions and allocation included.
All are interleaved in rounds and compared by the median. Before a shape is timed, one head of it is held
against the recipe's emulator (forward and gradients); a shape that fails prints FAILED and no figure.

TFLOPS count the useful work of `sagebwd.hardware.flops`: INT8 products at their full count, nothing for recomputation.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagebwd.attention import sage_attention
from sagebwd.band import Band
from sagebwd.conformance import violation
from sagebwd.dispatch import is_supported
from sagebwd.hardware import flops
from sagebwd.recipe import FP8, Recipe
from sagebwd.reference import Emulator
from sagebwd.switches import switches

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

DIRECTIONS = ("fwd", "bwd", "fwd+bwd")
GRID_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
TOTAL_TOKENS = 16384
MODEL_WIDTH = 2048
ROUNDS = 4
DETERMINISTIC = " (deterministic)"
ROUND_MS = 8.0
"""How long one attention is timed in one round."""
LEAD_MS = 120.0
"""How long it runs before that on a GPU: its clock follows its power so slowly (docs/log/2026-11-23-power.md)."""


@dataclass(frozen=True)
class Shape:
    """One attention call: batch x heads x tokens x head_dim, query and key lengths equal."""

    head_dim: int
    heads: int
    kv_heads: int
    batch: int
    tokens: int
    is_causal: bool

    def __str__(self) -> str:
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"D{self.head_dim} H{heads} B{self.batch} N{self.tokens} {'causal' if self.is_causal else 'no mask'}"

    def inputs(self, device: str, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gaussian q, k, v and do, the same for all."""
        generator = torch.Generator(device).manual_seed(seed)
        sizes = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return tuple(
            torch.randn(self.batch, heads, self.tokens, self.head_dim, generator=generator, device=device, dtype=dtype)
            for heads in sizes
        )

    def flops(self, direction: str) -> float:
        """Useful operations of one direction."""
        return flops(
            self.batch, self.heads, self.tokens, self.tokens, self.head_dim,
            is_causal=self.is_causal, direction=direction,
        )  # fmt: skip


def standard_grid(head_dims: Iterable[int] = (64, 128), tokens: Iterable[int] = GRID_TOKENS) -> list[Shape]:
    """The standard grid: heads = 2048 / head_dim, batch x tokens = 16384 (batch 1 beyond), causal and not."""
    return [
        Shape(d, MODEL_WIDTH // d, MODEL_WIDTH // d, max(1, TOTAL_TOKENS // n), n, is_causal)
        for d in head_dims
        for is_causal in (False, True)
        for n in tokens
    ]


def special_shapes() -> list[Shape]:
    """Grouped heads of a language model, and a video transformer's block."""
    grouped = [Shape(128, 32, 8, max(1, TOTAL_TOKENS // n), n, True) for n in (4096, 16384)]
    return [*grouped, Shape(128, 24, 24, 1, 32760, False)]


@dataclass(frozen=True)
class Measurement:
    """One row of the result file; times in ms, rates in TFLOPS, memory in bytes beyond the inputs.

    host_ms: how long the host took to issue what the device took ms for; where it is no less, it set the pace. peer:
    the fastest baseline of the shape, peer_ms its time, and speedup is over it.
    """

    impl: str
    recipe: str
    head_dim: int
    heads: int
    kv_heads: int
    batch: int
    tokens: int
    causal: bool
    window: None
    direction: str
    scope: str
    ms: float | None
    host_ms: float | None
    tflops: float | None
    peer: str | None
    peer_ms: float | None
    speedup: float | None
    fa2_ms: float | None
    cudnn_ms: float | None
    gate: str
    peak_bytes: int | None
    kept_bytes: int | None


def baselines(shape: Shape, device: str) -> dict[str, Attention]:
    """The full-precision kernels that run this shape here: cudnn, fa2 and, where installed, fa4; "sdpa" on a CPU."""

    def sdpa(*backends: SDPBackend) -> Attention:
        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(list(backends)):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=shape.is_causal, enable_gqa=shape.heads != shape.kv_heads
                )

        return attention

    if not device.startswith("cuda"):
        return {"sdpa": sdpa(SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)}
    candidates = {"cudnn": sdpa(SDPBackend.CUDNN_ATTENTION), "fa2": sdpa(SDPBackend.FLASH_ATTENTION)}
    fa4 = _flash_attention_4(shape)
    if fa4 is not None:
        candidates["fa4"] = fa4
    return {name: attention for name, attention in candidates.items() if _runs(attention, shape, device)}


def _flash_attention_4(shape: Shape) -> Attention | None:
    try:
        flash_attn_func = importlib.import_module("flash_attn.cute").flash_attn_func
    except ImportError:
        return None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=shape.is_causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attention


def _runs(attention: Attention, shape: Shape, device: str) -> bool:
    """Whether a kernel takes this shape, forward and backward, tried on one short batch."""
    q, k, v, do = replace(shape, batch=1, tokens=min(shape.tokens, 1024)).inputs(device, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    try:
        torch.autograd.grad(attention(*leaves), leaves, do)
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return True


def gate(shape: Shape, attention: Attention, recipe: Recipe, inputs: tuple[Tensor, ...]) -> str:
    """Whether one key head of the call is the recipe: "ok" or "FAILED".

    By `sagebwd.conformance`, with the emulator in the inputs' dtype for the kernel's precision.
    """
    q, k, v, do = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    gradients = torch.autograd.grad(out, leaves, do)
    batch, kv_head = shape.batch - 1, shape.kv_heads - 1
    groups = shape.heads // shape.kv_heads
    query_heads, key_heads = slice(kv_head * groups, None), slice(kv_head, None)

    def one_head(x: Tensor) -> Tensor:
        return x.detach()[batch : batch + 1, query_heads if x.shape[1] == shape.heads else key_heads]

    q, k, v, do = (one_head(x) for x in inputs)
    actual = [one_head(out), one_head(gradients[0]), *(x[batch : batch + 1, key_heads] for x in gradients[1:])]
    sides = []
    for dtype in (q.dtype, torch.float64):
        emulator = Emulator(
            q.to(dtype), k.to(dtype), v.to(dtype), recipe, shape.head_dim**-0.5, Band.of(shape.is_causal)
        )
        o, lse, _ = emulator.forward()
        sides.append((o, *emulator.backward(do.to(dtype), o, lse)))
    eps = torch.finfo(q.dtype).eps
    problems = [violation(kernel, low, high, eps) for kernel, low, high in zip(actual, *sides)]
    return "ok" if problems == [None] * len(problems) else "FAILED"


def _stopwatch(device: str) -> Callable[[Callable[[], object], int], tuple[float, float]]:
    """A function that runs another n times and returns ms a run, and the host's own."""

    def cuda(run: Callable[[], object], n: int) -> tuple[float, float]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # as in training, the GPU is busy with the call before: host time counts where the host is slower, not else
        run()
        start.record()
        host_ms, _ = host(run, n)
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / n, host_ms

    def host(run: Callable[[], object], n: int) -> tuple[float, float]:
        start = time.perf_counter()
        for _ in range(n):
            run()
        ms = (time.perf_counter() - start) * 1e3 / n
        return ms, ms

    return cuda if device.startswith("cuda") else host


def time_interleaved(
    runs: dict[str, Callable[[], object]], device: str, rounds: int = ROUNDS
) -> dict[str, tuple[float, float]]:
    """Median ms of each run, and of its host, taking turns in every round, each at the clock that it brings about."""
    measure, lead = _stopwatch(device), LEAD_MS / ROUND_MS if device.startswith("cuda") else 0.0
    for run in runs.values():
        measure(run, 2)
    repeats = {name: max(1, round(ROUND_MS / max(measure(run, 2)[0], 1e-3))) for name, run in runs.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            if lead:
                measure(run, round(lead * repeats[name]))
            times[name].append(measure(run, repeats[name]))
    return {name: tuple(map(statistics.median, zip(*values))) for name, values in times.items()}


def memory(attention: Attention, inputs: tuple[Tensor, ...]) -> tuple[int | None, int | None]:
    """Bytes of forward and backward at their peak, beyond the inputs, and bytes that backward keeps alive in between.

    Kept are the output and all that autograd saves, inputs among it: q and k are freed by a training step unless
    attention holds on to them.
    """
    q, k, v, do = inputs
    if not q.is_cuda:
        return None, None
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = attention(*leaves)
    note(out)
    gradients = torch.autograd.grad(out, leaves, do)
    peak = torch.cuda.max_memory_allocated() - before
    del out, gradients
    return peak, sum(kept.values())


def measure_shape(
    shape: Shape, recipes: Iterable[Recipe | str], impls: Iterable[str], device: str = "cuda", rounds: int = ROUNDS,
    *, deterministic: bool = False,
) -> list[Measurement]:  # fmt: skip
    """Rows of one shape: of each recipe in each implementation that runs it, and of each baseline.

    deterministic: also FP8 recipes, the only ones whose gradients do not repeat bit for bit, made to; such a row's
    recipe ends in `DETERMINISTIC`. Raises NotImplementedError where none runs a recipe.
    """
    dtype = torch.bfloat16
    inputs = shape.inputs(device, dtype)
    attentions: dict[tuple[str, str], Attention] = {}
    gates: dict[tuple[str, str], str] = {}
    for impl, recipe in _pairs(shape, recipes, impls, dtype):
        key = (impl, str(recipe))

        def attention(q: Tensor, k: Tensor, v: Tensor, recipe: Recipe = recipe, impl: str = impl) -> Tensor:
            return sage_attention(
                q, k, v, is_causal=shape.is_causal, enable_gqa=shape.heads != shape.kv_heads, recipe=recipe, impl=impl
            )

        attentions[key] = attention
        gates[key] = gate(shape, attention, recipe, inputs)
        if deterministic and FP8 in (recipe.dv, recipe.dq, recipe.dk):
            key = impl, str(recipe) + DETERMINISTIC
            attentions[key] = switches(deterministic=True)(attention)
            gates[key] = gate(shape, attentions[key], recipe, inputs)
    for name, attention in baselines(shape, device).items():
        attentions[(name, "bf16")] = attention
        gates[(name, "bf16")] = "ok"
    times = _time_all(attentions, gates, inputs, device, rounds)
    used = {key: memory(attention, inputs) for key, attention in attentions.items()}
    return [
        _row(shape, key, direction, times, gates, used) for key in attentions for direction in DIRECTIONS
    ]  # fmt: skip


def _pairs(
    shape: Shape, recipes: Iterable[Recipe | str], impls: Iterable[str], dtype: torch.dtype
) -> list[tuple[str, Recipe]]:
    """Implementations and the recipes that they run; all of a recipe's if none does, for the error's sake."""
    pairs = []
    for recipe in map(Recipe.parse, recipes):
        runs = [impl for impl in impls if is_supported(impl, recipe, shape.head_dim, dtype)]
        pairs += [(impl, recipe) for impl in runs or impls]
    return pairs


def _time_all(
    attentions: dict[tuple[str, str], Attention],
    gates: dict[tuple[str, str], str],
    inputs: tuple[Tensor, ...],
    device: str,
    rounds: int,
) -> dict[tuple[tuple[str, str], str], tuple[float, float]]:
    *tensors, do = inputs
    forward, backward = {}, {}
    for key, attention in attentions.items():
        if gates[key] != "ok":
            continue
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = attention(*leaves)
        forward[key] = lambda attention=attention, leaves=leaves: attention(*leaves)
        backward[key] = lambda out=out, leaves=leaves: torch.autograd.grad(out, leaves, do, retain_graph=True)
    forward, backward = (time_interleaved(runs, device, rounds) for runs in (forward, backward))
    times = {}
    for key in forward:
        times[key, "fwd"], times[key, "bwd"] = forward[key], backward[key]
        times[key, "fwd+bwd"] = tuple(map(sum, zip(forward[key], backward[key])))
    return times


def _row(shape: Shape, key: tuple[str, str], direction: str, times: dict, gates: dict, used: dict) -> Measurement:
    impl, recipe = key
    ms, host_ms = times.get((key, direction), (None, None))
    baselines_ms = {
        name: spent for ((name, kind), way), (spent, _) in times.items() if kind == "bf16" and way == direction
    }
    best = min(baselines_ms, key=baselines_ms.get) if baselines_ms else None
    peak, kept = used[key]
    return Measurement(
        impl, recipe, shape.head_dim, shape.heads, shape.kv_heads, shape.batch, shape.tokens, shape.is_causal, None,
        direction, "end_to_end", ms, host_ms, None if ms is None else shape.flops(direction) / ms * 1e-9, best,
        baselines_ms.get(best), None if ms is None or best is None else baselines_ms[best] / ms,
        baselines_ms.get("fa2"), baselines_ms.get("cudnn"), gates[key], peak, kept,
    )  # fmt: skip


def geometric_mean_speedup(rows: list[Measurement], impl: str, recipe: str, direction: str, over: str) -> float | None:
    """Geometric mean of ``over``'s time ("peer", "fa2" or "cudnn") over ours; None where nothing was measured."""
    ratios = [
        getattr(row, f"{over}_ms") / row.ms
        for row in rows
        if (row.impl, row.recipe, row.direction) == (impl, recipe, direction)
        and row.ms is not None
        and getattr(row, f"{over}_ms") is not None
    ]
    return statistics.geometric_mean(ratios) if ratios else None


def deterministic_cost(rows: list[Measurement], impl: str, recipe: str, direction: str) -> float | None:
    """Geometric mean of the deterministic mode's time over the default's; None where it was not measured."""
    mine = [row for row in rows if (row.impl, row.direction) == (impl, direction) and row.ms is not None]
    default, slower = (
        {(row.head_dim, row.heads, row.kv_heads, row.tokens, row.causal): row.ms for row in mine if row.recipe == name}
        for name in (recipe, recipe + DETERMINISTIC)
    )
    ratios = [ms / default[shape] for shape, ms in slower.items() if shape in default]
    return statistics.geometric_mean(ratios) if ratios else None
