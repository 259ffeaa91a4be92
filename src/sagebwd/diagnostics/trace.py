"""Error of a recipe on captured attention calls, tensor by tensor (the paper's Table 2), and where it comes from.

Every head is emulated by itself from the tensors as they were captured, in their dtype, and compared with full
precision in FP64 on the same tensors; the mean of O that an INT8 dP takes off V is then the head's own. What is of
size queries x keys is compared a few blocks of queries at a time. Where a query does not see a key P, dP and dS are
zero, on both sides and in every root mean square, which is over all N x M pairs.

Bound: row i of dS = P (dP - delta) has norm at most max_j |dP_ij - delta_i|, for the squares of P's row sum to at most
1. Over N queries and M keys therefore RMS(dS) <= max |dP - delta| / sqrt(M), the maximum over visible pairs.

Attribution (`attribute`): each product of a recipe alone in INT8, the others in 16 bit, and all but that one; groups,
blocks and smoothing stay the recipe's. A source's share is ||its error alone||^2 / ||the recipe's error||^2; where
sources are independent and small the shares add up to 1. ``s`` reaches every tensor, through P; the share of ``o`` in
dQ and dK is that of delta = sum(dO O), which is all they see of O.

Source: arXiv 2603.02170, Table 2, figures 5 and 6 and appendix B (with M = N).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sagebwd.diagnostics.capture import Captured
from sagebwd.masks.band import Band
from sagebwd.recipe import PRODUCTS, SIXTEEN_BIT, Recipe
from sagebwd.reference.emulator import Emulator, Observer
from sagebwd.reference.metrics import Comparison, relative_l2

TENSORS = ("delta", "p", "dp", "ds", "o", "dq", "dk", "dv")
OUTPUTS = ("o", "dq", "dk", "dv")
PAIRS = ("p", "dp", "ds")
SATURATED = 0.99
"""The largest P of a query from which on its softmax is saturated: dS, P (dP - delta), is a difference of equals."""

# cosine and relative L2: Table 2 of the paper, layer 11 of its QK-normed 325M model.
PAPER_TABLE_2: dict[str, tuple[float, float]] = {
    "delta": (0.9973, 0.0736),
    "p": (0.9917, 0.1293),
    "dp": (1.0, 0.0),
    "ds": (0.9789, 0.2045),
    "o": (0.9969, 0.0793),
    "dq": (0.9664, 0.2579),
    "dk": (0.9537, 0.3074),
    "dv": (0.9985, 0.0540),
}


@dataclass(frozen=True)
class Source:
    """One product's part in one tensor's error: relative L2 with it alone in INT8 and with all others; its share."""

    alone: float
    without: float
    share: float


@dataclass(frozen=True)
class Row:
    """A recipe on one head of one window of text, or, with head None, on a layer (`sagebwd.diagnostics.layers`).

    cosine and relative_l2 by tensor of `TENSORS`. Of full precision: norm, by tensor of `TENSORS`; rms by tensor of
    `PAIRS`, ds_bound, at least rms["ds"], largest_logit, the largest |scale q . k|, and ds_peak_to_rms, max |dS| /
    RMS(dS); first_weight, the mean over queries of the first key's P, and first_value, the norm of its value over the
    root mean square of all; sink and sink_weight, the key with the largest mean weight; saturated, the share of
    queries whose largest P is at least `SATURATED`. attribution by source and tensor of `OUTPUTS`, empty unless asked
    for. With grouped heads dK and dV are one query head's part of the sum over its group.
    """

    recipe: str
    layer: int
    head: int | None
    cosine: dict[str, float]
    relative_l2: dict[str, float]
    rms: dict[str, float]
    ds_bound: float
    largest_logit: float
    ds_peak_to_rms: float
    first_weight: float = 0.0
    first_value: float = 0.0
    sink: int = 0
    sink_weight: float = 0.0
    saturated: float = 0.0
    attribution: dict[str, dict[str, Source]] = field(default_factory=dict)
    norm: dict[str, float] = field(default_factory=dict)
    window: int | None = 0


def measure(
    captured: Iterable[Captured],
    recipes: Iterable[Recipe | str] = ("paper", "token"),
    *,
    attribute: bool = False,
    window: int = 0,
    progress: Callable[[str, float], object] = lambda step, done: None,
) -> list[Row]:
    """A row for every recipe, layer and head, heads in turn. ``progress`` is called before each, with the share of
    them that is done.

    Args: captured, of one window of text, whose number is ``window``.

    Raises ValueError for no recipe and for tensors that hold NaN or Inf, naming layer and head.
    """
    recipes = [Recipe.parse(recipe) for recipe in recipes]
    if not recipes:
        raise ValueError("recipes: at least one is needed")
    rows, captured = [], list(captured)
    count = sum(len(call.heads) for call in captured) * len(recipes)
    for call in captured:
        band = Band.of(call.is_causal, *(call.window or (-1, -1)))
        for head in call.heads:
            tensors = call.head(head)
            for name, tensor in zip(("q", "k", "v", "the output gradient"), tensors):
                if not tensor.isfinite().all():
                    raise ValueError(f"layer {call.layer}, head {head}: {name} holds NaN or Inf")
            progress(f"window {window}, layer {call.layer}, head {head}", len(rows) / count)
            exact = Exact(*tensors, call.scale, band)
            for recipe in recipes:
                rows.append(replace(_row(call.layer, head, tensors, recipe, exact, attribute), window=window))
    return rows


class Exact:
    """One head in full precision, FP64; what is of size queries x keys is computed a piece at a time.

    Args: q, do (B, 1, N, D) and k, v (B, 1, M, D), any floating dtype; scale, the softmax scale; band, which keys a
    query sees. ``values`` holds o, lse, delta, dq, dk and dv.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float, band: Band) -> None:
        self.q, self.k, self.v, self.do = (x.double() for x in (q, k, v, do))
        self.scale, self.band = scale, band
        self.values = emulate((self.q, self.k, self.v, self.do), Recipe.named("full"), scale, band)

    def pairs(self, rows: slice, keys: slice) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """p, dp and ds of a range of queries and keys; their logits, -inf where hidden; dp - delta, 0 where hidden."""
        queries = torch.arange(rows.start, rows.stop, device=self.q.device)
        visible = self.band.mask(queries, torch.arange(keys.start, keys.stop, device=self.q.device))
        hidden = torch.zeros((), dtype=torch.bool, device=self.q.device) if visible is None else ~visible
        logits = (self.q[:, :, rows] @ self.k[:, :, keys].mT * self.scale).masked_fill(hidden, -math.inf)
        p = torch.exp(logits - self.values["lse"][:, :, rows, None])
        dp = (self.do[:, :, rows] @ self.v[:, :, keys].mT).masked_fill(hidden, 0)
        distance = (dp - self.values["delta"][:, :, rows, None]).masked_fill(hidden, 0)
        return {"p": p, "dp": dp, "ds": p * distance}, logits, distance


def emulate(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    recipe: Recipe,
    scale: float,
    band: Band,
    observe: Observer | None = None,
) -> dict[str, Tensor]:
    """o, lse, delta, dq, dk and dv of a recipe; observe, as in `sagebwd.reference.emulator.Emulator`."""
    q, k, v, do = tensors
    emulator = Emulator(q, k, v, recipe, scale, band)
    o, lse, _ = emulator.forward()
    dq, dk, dv = emulator.backward(do, o, lse, observe=observe)
    return {"o": o, "lse": lse, "delta": emulator.delta(do, o, lse), "dq": dq, "dk": dk, "dv": dv}


class _Watch:
    """Compares P, dP and dS with full precision as the emulator computes them."""

    def __init__(self, exact: Exact) -> None:
        self.exact = exact
        self.errors = {name: Comparison() for name in PAIRS}
        self.largest_logit = self.largest_distance = 0.0
        self.weights = exact.k.new_zeros(exact.k.shape[2])  # of each key, the sum of P over queries
        self.largest_p = torch.zeros_like(exact.values["lse"])  # of each query

    def __call__(self, name: str, rows: slice, keys: slice, value: Tensor) -> None:
        rows = slice(rows.start, min(rows.stop, self.exact.q.shape[2]))
        keys = slice(keys.start, min(keys.stop, self.exact.k.shape[2]))
        if name == "p":  # comes first of the three
            self.expected, logits, distance = self.exact.pairs(rows, keys)
            self.hidden = logits == -math.inf
            self.weights[keys] += self.expected["p"].sum((0, 1, 2))
            largest = self.largest_p[:, :, rows]
            torch.maximum(largest, self.expected["p"].amax(-1), out=largest)
            self.largest_logit = max(self.largest_logit, logits.masked_fill(self.hidden, 0).abs().max().item())
            self.largest_distance = max(self.largest_distance, distance.abs().max().item())
        value = value[..., : rows.stop - rows.start, : keys.stop - keys.start].flatten(1, 2)
        self.errors[name].add(value.masked_fill(self.hidden, 0), self.expected[name])


def _row(layer: int, head: int, tensors: tuple[Tensor, ...], recipe: Recipe, exact: Exact, attribute: bool) -> Row:
    watch = _Watch(exact)
    actual = emulate(tensors, recipe, exact.scale, exact.band, watch)
    errors = dict(watch.errors)
    for name in ("delta", *OUTPUTS):
        errors[name] = Comparison.of(actual[name], exact.values[name])
    tokens_k = tensors[1].shape[2]
    pairs = math.prod(tensors[0].shape[:3]) * tokens_k
    rms = {name: errors[name].rms(pairs) for name in PAIRS}
    weights = watch.weights / math.prod(tensors[0].shape[:3])
    norms = exact.v.square().sum(-1)
    return Row(
        str(recipe), layer, head,
        cosine={name: errors[name].cosine() for name in TENSORS},
        relative_l2={name: errors[name].relative_l2() for name in TENSORS},
        rms=rms,
        ds_bound=watch.largest_distance / math.sqrt(tokens_k),
        largest_logit=watch.largest_logit,
        ds_peak_to_rms=errors["ds"].peak / rms["ds"] if rms["ds"] else 0.0,
        first_weight=weights[0].item(),
        first_value=(norms[..., 0].mean() / norms.mean()).sqrt().item() if norms.any() else 0.0,
        sink=int(weights.argmax()),
        sink_weight=weights.max().item(),
        saturated=(watch.largest_p >= SATURATED).double().mean().item(),
        attribution=_attribution(tensors, recipe, exact, actual) if attribute else {},
        norm={name: math.sqrt(errors[name].expected_square) for name in TENSORS},
    )  # fmt: skip


def _attribution(
    tensors: tuple[Tensor, ...], recipe: Recipe, exact: Exact, actual: dict[str, Tensor]
) -> dict[str, dict[str, Source]]:
    def errors(values: dict[str, Tensor]) -> dict[str, float]:
        return {name: relative_l2(values[name], exact.values[name]) for name in OUTPUTS}

    total, found = errors(actual), {}
    for source in (x for x in PRODUCTS if getattr(recipe, x) != SIXTEEN_BIT):
        alone = {x: SIXTEEN_BIT for x in PRODUCTS if x != source}
        changed = (recipe.replace(**changes) for changes in (alone, {source: SIXTEEN_BIT}))
        one, rest = (errors(emulate(tensors, x, exact.scale, exact.band)) for x in changed)
        found[source] = {
            name: Source(one[name], rest[name], (one[name] / total[name]) ** 2 if total[name] else 0.0)
            for name in OUTPUTS
        }
    return found
