"""Speed and memory of attention, dense and packed, end to end, against the best BF16 kernels on the same tensors.

What is timed is what a training step pays: quantisation, smoothing, delta, conversions and allocation included.
All are interleaved in rounds and compared by the median. Before a shape is timed, one head of it is held
against the recipe's emulator (forward and gradients); a shape that fails prints FAILED and no figure. The baselines'
are held against attention in FP64; one that is wrong at a shape is timed and marked, and nothing is compared with it.

A load is steady, as in training, or bursts: calls behind a pause, on a cool GPU that waits for the host.

TFLOPS count the useful work of `benchmarks.shapes.flops`: INT8 products at their full count, recomputation not at all.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch._functorch.config
from torch import Tensor

from benchmarks import low_bit
from benchmarks.baselines import DOES_NOT_RUN, Attention, candidates, refusal
from benchmarks.correctness import Outcome, emulated, errors_of, gate, wrong_tensors
from benchmarks.packed import Packed
from benchmarks.shapes import Shape
from benchmarks.timer import time_bursts
from sagebwd import dispatch
from sagebwd.attention import sage_attention, sage_attention_varlen
from sagebwd.auto.contenders import PEERS, TORCH
from sagebwd.call import Ask
from sagebwd.cli.timer import ROUNDS, time_interleaved
from sagebwd.environment import write_whole
from sagebwd.explain import explain, explain_varlen
from sagebwd.kernels.families import FAMILIES
from sagebwd.masks import kinds
from sagebwd.masks.band import UNLIMITED
from sagebwd.recipe import AUTO, FP8, Recipe
from sagebwd.switches import switches

DIRECTIONS = ("fwd", "bwd", "fwd+bwd")
BASELINE = "bf16"
DETERMINISTIC = " (deterministic)"
CHECKING = {"cpu": 0.2, "cuda": 0.6}
"""The share of a shape's time that its checks take, about."""


Key = tuple[str, str]
"""An implementation and a recipe, or a baseline and `BASELINE`."""


CALL = "head_dim", "value_dim", "heads", "kv_heads", "batch", "tokens", "lengths", "causal", "window"
"""Fields of a row that say which call it is of."""


@dataclass(frozen=True)
class Measurement:
    """One row of the result file; times in ms, rates in TFLOPS, memory in bytes beyond the inputs.

    impl: of recipe "auto" who runs the call, "torch", "fa4" and "fa3" too.
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
    window: int | None
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


def call_of(shape: Shape) -> tuple:
    """`CALL` of a shape's rows."""
    lengths = list(shape.lengths) if isinstance(shape, Packed) else None
    widths, heads = (shape.head_dim, shape.value_dim), (shape.heads, shape.kv_heads)
    return *widths, *heads, shape.batch, shape.tokens, lengths, shape.is_causal, shape.window


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


# a compiled backward that is timed by itself, many times after one forward, may not write over that one's buffers
@torch._functorch.config.patch(donated_buffer=False)
def measure_shape(
    shape: Shape, recipes: Iterable[Recipe | str], impls: Iterable[str] | None, device: str = "cuda",
    rounds: int = ROUNDS, *, deterministic: bool = False, low_bit_peers: Iterable[str] = (), bursts: bool = False,
    tell: Callable[[str, float], object] = lambda *_: None,
) -> list[Measurement]:  # fmt: skip
    """Rows of one shape: of each recipe in each implementation that runs it, of each low-bit peer, and each baseline.

    recipes: "auto" too. impls: None for each recipe's fastest. deterministic: also FP8 recipes, the only ones whose
    gradients do not repeat bit for bit, made to; such a row's recipe ends in `DETERMINISTIC`. low_bit_peers: of
    `low_bit.PEERS`; one that does not take the shape has no rows. bursts: in a steady load's place. tell: is told
    what begins, and which share of the shape's work is done.

    Raises NotImplementedError where none runs a recipe.
    """
    inputs = shape.inputs(device, torch.bfloat16)
    checking = CHECKING[torch.device(device).type]
    attentions, gates, refused, errors = checked(
        shape, inputs, recipes, impls, device, deterministic=deterministic, low_bit_peers=low_bit_peers,
        tell=lambda text, done: tell(text, checking * done),
    )  # fmt: skip
    times = _time_all(
        attentions, gates, inputs, device, rounds, time_bursts if bursts else time_interleaved,
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


class Checked(NamedTuple):
    """Attentions of a shape, what each one's gate of a direction says, who does not run and why, and errors."""

    attentions: dict[Key, Attention]
    gates: dict[Key, dict[str, str]]
    refused: dict[str, str]
    errors: dict[Key, dict[str, float]]


def checked(
    shape: Shape, inputs: tuple[Tensor, ...], recipes: Iterable[Recipe | str], impls: Iterable[str] | None,
    device: str, *, deterministic: bool = False, low_bit_peers: Iterable[str] = (),
    tell: Callable[[str, float], object] = lambda *_: None,
) -> Checked:  # fmt: skip
    """What `measure_shape` times, held against what it should compute. Raises NotImplementedError as it does."""
    attentions: dict[Key, Attention] = {}
    gates: dict[Key, dict[str, str]] = {}
    exact = emulated(shape, Recipe.named("full"), inputs, torch.float64)
    found = _ours(shape, recipes, impls, device, inputs)
    for number, ours in enumerate(found):
        tell(f"checking {ours.text} ({ours.impl})", number / (len(found) + 1))
        key = ours.impl, ours.text
        attentions[key] = ours.attention
        gates[key] = dict.fromkeys(DIRECTIONS, _our_gate(shape, ours, inputs, exact))
        if deterministic and FP8 in (ours.recipe.dv, ours.recipe.dq, ours.recipe.dk):
            ours = ours._replace(
                text=ours.text + DETERMINISTIC, attention=switches(deterministic=True)(ours.attention)
            )
            key = ours.impl, ours.text
            attentions[key] = ours.attention
            gates[key] = dict.fromkeys(DIRECTIONS, _our_gate(shape, ours, inputs, exact))
    tell("checking the baselines", len(found) / (len(found) + 1))
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
    return Checked(attentions, gates, refused, errors)


class Ours(NamedTuple):
    """One attention of the package: by whom, as which text of a recipe, and the recipe that it runs."""

    impl: str
    text: str
    recipe: Recipe
    attention: Attention


def attention_of(
    shape: Shape, recipe: Recipe | str, impl: str | None, device: str, packed: Callable | None = None,
    dense: Callable | None = None,
) -> Callable:  # fmt: skip
    """The call of a shape by the package.

    packed, dense: what takes its arguments, `sage_attention_varlen` and `sage_attention` unless given.
    """
    settings = {"is_causal": shape.is_causal, "recipe": recipe, "impl": impl}
    if isinstance(shape, Packed):
        ends, longest = shape.offsets(device), shape.longest
        function = packed or sage_attention_varlen
        return lambda q, k, v: function(q, k, v, ends, ends, longest, longest, **settings)
    if shape.window is not None:
        settings["window"] = shape.window, UNLIMITED
    function = dense or sage_attention
    return lambda q, k, v: function(q, k, v, enable_gqa=shape.heads != shape.kv_heads, **settings)


def _ours(
    shape: Shape, recipes: Iterable[Recipe | str], impls: Iterable[str] | None, device: str,
    inputs: tuple[Tensor, ...],
) -> list[Ours]:  # fmt: skip
    """Each recipe in each implementation that runs it; of a wide shape, of those recipes that any does.

    Raises NotImplementedError where none does.
    """
    kind = kinds.PACKED if isinstance(shape, Packed) else kinds.FULL
    found = []
    for recipe in map(Recipe.parse_or_auto, recipes):
        ask = Ask(recipe, shape.head_dim, shape.value_dim, inputs[0].dtype, torch.device(device), kind)
        if impls is None and recipe == AUTO:
            leaves = [x.detach().requires_grad_() for x in inputs[:3]]
            told = attention_of(shape, recipe, None, device, explain_varlen, explain)(*leaves)
            runs = told.forward if told.forward == told.backward else f"{told.forward}/{told.backward}"
            found.append(Ours(runs, AUTO, Recipe.parse(told.recipe), attention_of(shape, AUTO, None, device)))
            continue
        choices, refused = [], None
        for impl in [None] if impls is None else impls:
            try:
                choices.append(dispatch.choose(ask._replace(impl=impl)))
            except NotImplementedError as error:
                refused = error
        if not choices and shape.is_wide:
            continue
        if not choices:
            raise refused
        for choice in choices:
            attention = attention_of(shape, recipe, impl_of(choice), device)
            found.append(Ours(impl_of(choice), str(recipe), choice.recipe, attention))
    return found


def impl_of(choice: dispatch.Choice) -> str:
    """What ``impl`` would name: of two families the later, whose direction the other's completes."""
    named = [name for name in FAMILIES if name in (choice.forward.impl, choice.backward.impl)]
    return named[-1] if named else choice.forward.impl  # "torch", which is nothing to name


def _our_gate(shape: Shape, ours: Ours, inputs: tuple[Tensor, ...], exact: Outcome) -> str:
    """Whether the call is the recipe, "ok" or "FAILED"; one that "auto" hands over, attention."""
    if ours.impl in (TORCH, *PEERS):
        return "FAILED" if wrong_tensors(shape, ours.attention, exact, inputs) else "ok"
    return gate(shape, ours.attention, ours.recipe, inputs)


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
    timed: Callable[..., dict[Key, tuple[float, float]]],
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
        timed(
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
        impl, recipe, *call_of(shape), direction, "end_to_end", ms, host_ms,
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
    """Write the rows, dataclasses or dictionaries, beside ``path``, as .csv; its path. What is None there is empty."""
    path = path.with_suffix(".csv")
    text = io.StringIO()
    found = [row if isinstance(row, dict) else asdict(row) for row in rows]
    writer = csv.DictWriter(text, list(found[0]) if found else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    write_whole(path, text.getvalue())
    return path
