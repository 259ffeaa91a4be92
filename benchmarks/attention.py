"""Speed and memory of attention, dense and packed, end to end, against the best BF16 kernels on the same tensors.

What is timed is what a training step pays: quantisation, smoothing, delta, conversions and allocation included.
All are interleaved in rounds and compared by the median. Before a shape is timed, one head of it is held
against the recipe's emulator (forward and gradients); a shape that fails prints FAILED and no figure. The baselines'
are held against attention in FP64; one that is wrong at a shape is timed and marked, and nothing is compared with it.

TFLOPS count the useful work of `benchmarks.shapes.flops`: INT8 products at their full count, recomputation not at all.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import low_bit
from benchmarks.baselines import DOES_NOT_RUN, Attention, candidates, refusal
from benchmarks.correctness import emulated, errors_of, gate, wrong_tensors
from benchmarks.packed import Packed
from benchmarks.shapes import Shape
from sagebwd import dispatch
from sagebwd.attention import sage_attention, sage_attention_varlen
from sagebwd.call import Ask
from sagebwd.cli.timer import ROUNDS, time_interleaved
from sagebwd.environment import write_whole
from sagebwd.masks import kinds
from sagebwd.recipe import FP8, Recipe
from sagebwd.switches import switches

DIRECTIONS = ("fwd", "bwd", "fwd+bwd")
BASELINE = "bf16"
DETERMINISTIC = " (deterministic)"
CHECKING = {"cpu": 0.2, "cuda": 0.6}
"""The share of a shape's time that its checks take, about."""


Key = tuple[str, str]
"""An implementation and a recipe, or a baseline and `BASELINE`."""


@dataclass(frozen=True)
class Measurement:
    """One row of the result file; times in ms, rates in TFLOPS, memory in bytes beyond the inputs.

    host_ms: how long the host took to issue what the device took ms for; where it is no less, it set the pace. peer:
    the fastest baseline of the shape that is right in this direction, peer_ms its time, and speedup is over it. gate:
    "ok", "FAILED" of a kernel that is not its recipe, which has no time, what is "wrong" of a baseline, or why it does
    not run backward, which has no time either. peer_gates: the baselines that do not count here, each with why; fa2_ms
    and cudnn_ms are None of those. lengths: of packed sequences, whose batch is 1 and whose sum is tokens; None of
    dense calls, and not in older files. errors: of O, dQ, dK and dV, relative L2 against attention in FP64, where
    low-bit peers were asked for, of theirs and of the recipes' rows; a low-bit peer's recipe is "fp8". Not in older
    files.
    """

    impl: str
    recipe: str
    head_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    batch: int
    tokens: int
    lengths: list[int] | None
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
    peer_gates: dict[str, str]
    peak_bytes: int | None
    kept_bytes: int | None
    errors: dict[str, float] | None


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
    shape: Shape, recipes: Iterable[Recipe | str], impls: Iterable[str] | None, device: str = "cuda",
    rounds: int = ROUNDS, *, deterministic: bool = False, low_bit_peers: Iterable[str] = (),
    tell: Callable[[str, float], object] = lambda *_: None,
) -> list[Measurement]:  # fmt: skip
    """Rows of one shape: of each recipe in each implementation that runs it, of each low-bit peer, and each baseline.

    impls: None for each recipe's fastest. deterministic: also FP8 recipes, the only ones whose gradients do not repeat
    bit for bit, made to; such a row's recipe ends in `DETERMINISTIC`. low_bit_peers: of `low_bit.PEERS`; one that does
    not take the shape has no rows. tell: is told what begins, and which share of the shape's work is done.

    Raises NotImplementedError where none runs a recipe.
    """
    dtype = torch.bfloat16
    inputs = shape.inputs(device, dtype)
    attentions: dict[Key, Attention] = {}
    gates: dict[Key, dict[str, str]] = {}
    pairs, checking = _pairs(shape, recipes, impls, device, dtype), CHECKING[torch.device(device).type]
    for number, (impl, recipe) in enumerate(pairs):
        tell(f"checking {recipe} ({impl})", checking * number / (len(pairs) + 1))
        key = (impl, str(recipe))
        attention = attentions[key] = _ours(shape, recipe, impl, device)
        gates[key] = dict.fromkeys(DIRECTIONS, gate(shape, attention, recipe, inputs))
        if deterministic and FP8 in (recipe.dv, recipe.dq, recipe.dk):
            key = impl, str(recipe) + DETERMINISTIC
            attentions[key] = switches(deterministic=True)(attention)
            gates[key] = dict.fromkeys(DIRECTIONS, gate(shape, attentions[key], recipe, inputs))
    tell("checking the baselines", checking * len(pairs) / (len(pairs) + 1))
    exact = emulated(shape, Recipe.named("full"), inputs, torch.float64)
    errors: dict[Key, dict[str, float]] = {}
    refused: dict[str, str] = {}
    low_bit_attentions = low_bit.attentions(shape, low_bit_peers)
    if low_bit_attentions:
        errors = {key: errors_of(shape, attention, exact, inputs) for key, attention in attentions.items()}
    for name, attention in low_bit_attentions.items():
        reason = refusal(attention, shape, device)
        if reason is not None:
            refused[name] = reason
            continue
        key = name, low_bit.RECIPE
        attentions[key], errors[key] = attention, errors_of(shape, attention, exact, inputs)
        gates[key] = dict.fromkeys(DIRECTIONS, low_bit.gate(errors[key]))
    for name, attention in candidates(shape, device).items():
        reason = refusal(attention, shape, device)
        if reason is not None and refusal(attention, shape, device, backward=False) is not None:
            refused[name] = reason
            continue
        attentions[name, BASELINE] = attention
        wrong = wrong_tensors(shape, attention, exact, inputs, backward=reason is None)
        gates[name, BASELINE] = _peer_gates(wrong, reason)
    times = _time_all(
        attentions, gates, inputs, device, rounds,
        lambda text, done: tell(text, checking + 0.95 * (1 - checking) * done),
    )  # fmt: skip
    tell("measuring memory", 0.95 + 0.05 * checking)
    used = {
        key: memory(attention, inputs) if _has_backward(gates[key]) else (None, None)
        for key, attention in attentions.items()
    }
    return [
        _row(shape, key, direction, times, gates, refused, used, errors.get(key))
        for key in attentions
        for direction in DIRECTIONS
    ]


def _ours(shape: Shape, recipe: Recipe, impl: str, device: str) -> Attention:
    if isinstance(shape, Packed):
        ends, longest = shape.offsets(device), shape.longest
        return lambda q, k, v: sage_attention_varlen(
            q, k, v, ends, ends, longest, longest, is_causal=shape.is_causal, recipe=recipe, impl=impl
        )
    return lambda q, k, v: sage_attention(
        q, k, v, is_causal=shape.is_causal, enable_gqa=shape.heads != shape.kv_heads, recipe=recipe, impl=impl
    )


def _pairs(
    shape: Shape, recipes: Iterable[Recipe | str], impls: Iterable[str] | None, device: str, dtype: torch.dtype
) -> list[tuple[str, Recipe]]:
    """Implementations and the recipes that they run; all of a recipe's if none does, for the error's sake."""
    pairs = []
    for recipe in map(Recipe.parse, recipes):
        kind = kinds.PACKED if isinstance(shape, Packed) else kinds.FULL
        ask = Ask(recipe, shape.head_dim, shape.value_dim, dtype, torch.device(device), kind)
        if impls is None:
            pairs.append((dispatch.choose(ask).impl, recipe))
            continue
        runs = [impl for impl in impls if dispatch.refusal(ask._replace(impl=impl)) is None]
        pairs += [(impl, recipe) for impl in runs or impls]
    return pairs


def _peer_gates(wrong: dict[str, float], refused: str | None) -> dict[str, str]:
    """What a baseline's row of each direction says: forward counts by its O alone, backward by the gradients too.

    refused: why its backward does not run; None where it does.
    """
    gates = {}
    for direction in DIRECTIONS:
        found = [f"{name} {error:.2f}" for name, error in wrong.items() if name == "o" or direction != "fwd"]
        gates[direction] = f"wrong: {', '.join(found)}" if found else "ok"
        if refused is not None and direction != "fwd":
            gates[direction] = refused
    return gates


def _has_backward(gates: dict[str, str]) -> bool:
    return not gates["bwd"].startswith(DOES_NOT_RUN)


def _time_all(
    attentions: dict[Key, Attention],
    gates: dict[Key, dict[str, str]],
    inputs: tuple[Tensor, ...],
    device: str,
    rounds: int,
    tell: Callable[[str, float], object],
) -> dict[tuple[Key, str], tuple[float, float]]:
    *tensors, do = inputs
    forward, backward = {}, {}
    for key, attention in attentions.items():
        if "FAILED" in gates[key].values():
            continue
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = attention(*leaves)
        forward[key] = lambda attention=attention, leaves=leaves: attention(*leaves)
        if not _has_backward(gates[key]):
            continue
        backward[key] = lambda out=out, leaves=leaves: torch.autograd.grad(out, leaves, do, retain_graph=True)
    forward, backward = (
        time_interleaved(
            runs, device, rounds,
            tell=lambda done, name=name, index=index: tell(f"timing {name}", (index + done) / 2),
        )
        for index, (name, runs) in enumerate({"forward": forward, "backward": backward}.items())
    )  # fmt: skip
    times = {(key, "fwd"): ms for key, ms in forward.items()}
    for key, ms in backward.items():
        times[key, "bwd"], times[key, "fwd+bwd"] = ms, tuple(map(sum, zip(forward[key], ms)))
    return times


def _row(
    shape: Shape, key: Key, direction: str, times: dict, gates: dict, refused: dict[str, str], used: dict,
    errors: dict[str, float] | None,
) -> Measurement:  # fmt: skip
    impl, recipe = key
    ms, host_ms = times.get((key, direction), (None, None))
    peers = {name: found[direction] for (name, kind), found in gates.items() if kind == BASELINE}
    right = {name: times[(name, BASELINE), direction][0] for name, found in peers.items() if found == "ok"}
    best = min(right, key=right.get) if right else None
    found = gates[key][direction]
    peak, kept = used[key]
    return Measurement(
        impl, recipe, shape.head_dim, shape.value_dim, shape.heads, shape.kv_heads, shape.batch, shape.tokens,
        list(shape.lengths) if isinstance(shape, Packed) else None, shape.is_causal, None, direction, "end_to_end", ms,
        host_ms,
        None if ms is None else shape.flops(direction) / ms * 1e-9, best, right.get(best),
        None if best is None or found != "ok" else right[best] / ms, right.get("fa2"), right.get("cudnn"), found,
        refused | {name: found for name, found in peers.items() if found != "ok"}, peak, kept,
        errors,
    )  # fmt: skip


def timed_both_ways(rows: list[Measurement]) -> set[str]:
    """Implementations and baselines whose backward was timed too."""
    return {row.impl for row in rows if row.direction == DIRECTIONS[-1] and row.ms is not None}


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
        {
            (row.head_dim, row.value_dim, row.heads, row.kv_heads, row.tokens, str(row.lengths), row.causal): row.ms
            for row in mine
            if row.recipe == name
        }
        for name in (recipe, recipe + DETERMINISTIC)
    )
    ratios = [ms / default[shape] for shape, ms in slower.items() if shape in default]
    return statistics.geometric_mean(ratios) if ratios else None


def save_csv(rows: list, path: Path) -> Path:
    """Write the rows, dataclasses, beside ``path``, as .csv; its path. What is None there is empty."""
    path = path.with_suffix(".csv")
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(rows[0])] if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    write_whole(path, text.getvalue())
    return path
