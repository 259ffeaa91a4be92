"""Whether what a benchmark times computes what it should: a recipe's kernels the recipe, a peer attention.

One key head of the call is looked at, at the shape that is timed; of packed sequences, that of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from benchmarks.baselines import Attention
from benchmarks.conformance import emulator_error, violation
from benchmarks.shapes import Shape
from sagebwd import sinks as epilogue
from sagebwd.masks.band import Band
from sagebwd.masks.mask import Mask
from sagebwd.recipe import Recipe
from sagebwd.reference.emulator import Emulator
from sagebwd.reference.metrics import relative_l2

TENSORS = ("o", "dq", "dk", "dv")
PEER_LIMIT = 0.05
"""Relative L2 error above which a peer is wrong; rounding to BF16 makes .003 of it."""
PEER_TOKENS = 128
"""Tokens that are held to it at a time: among all, a few that are wrong would not show."""

Outcome = tuple[Tensor, Tensor, Tensor, Tensor]


def gate(
    shape: Shape, attention: Attention, recipe: Recipe, inputs: tuple[Tensor, ...], mask: Mask | None = None,
    tokens: slice | None = None, band: Band | None = None, sinks: Tensor | None = None,
) -> str:  # fmt: skip
    """Whether the call is the recipe: "ok" or "FAILED".

    By `benchmarks.conformance`, with the emulator in the inputs' dtype for the kernel's precision. Each of the
    shape's sequences is held to it by itself: in one tensor of all, one that is wrong in a short one would not show.
    Of hundreds some have a code that rounds the other way in the kernel alone: by how much that may lead, the
    emulator's errors of sequences of about their length say.

    mask, band, sinks: as of `emulated`. tokens: a sequence of packed ones, which alone is looked at.
    """
    eps = torch.finfo(inputs[0].dtype).eps
    computed, errors, doubtful = _computed(shape, attention, inputs), [], []

    def sides_of(one: slice) -> list[tuple[Tensor, Tensor]]:
        dtypes = inputs[0].dtype, torch.float64
        return list(zip(*(emulated(shape, recipe, inputs, x, mask, band, sinks, one) for x in dtypes)))

    def is_broken(one: slice, sides: list[tuple[Tensor, Tensor]], others: Iterable[Iterable]) -> bool:
        found = (violation(x[..., one, :], *pair, eps, more) for x, pair, more in zip(computed, sides, others))
        return any(x is not None for x in found)

    for one in shape.sequences() if tokens is None else [tokens]:
        sides = sides_of(one)
        errors.append((one, [emulator_error(*pair) for pair in sides]))
        if is_broken(one, sides, [()] * len(TENSORS)):
            doubtful.append(one)
    for one in doubtful:
        others = [error for other, error in errors if _are_about_as_long(one, other)]
        if is_broken(one, sides_of(one), zip(*others)):
            return "FAILED"
    return "ok"


def _are_about_as_long(one: slice, other: slice) -> bool:
    """Whether neither of two sequences is over twice as long; slices of all are."""
    if one == other:
        return True
    lengths = sorted(x.stop - x.start for x in (one, other))
    return lengths[1] <= 2 * lengths[0]


def wrong_tensors(
    shape: Shape, attention: Attention, exact: Outcome, inputs: tuple[Tensor, ...], *, backward: bool = True
) -> dict[str, float]:
    """The tensors, of `TENSORS`, that a full-precision attention computes wrongly, with the relative L2 error
    of the worst `PEER_TOKENS` tokens.

    exact: `emulated` of the same inputs by recipe "full" in FP64, which is attention itself. backward: False for an
    attention that has none, of which O is looked at.
    """
    wrong = {}
    for name, actual, expected in zip(TENSORS, _computed(shape, attention, inputs, backward), exact):
        pieces = zip(actual.split(PEER_TOKENS, dim=-2), expected.split(PEER_TOKENS, dim=-2))
        worst = max((relative_l2(*pair) for pair in pieces), key=lambda error: (math.isnan(error), error))
        if not worst <= PEER_LIMIT:
            wrong[name] = worst
    return wrong


def errors_of(
    shape: Shape, attention: Attention, exact: Outcome, inputs: tuple[Tensor, ...]
) -> dict[str, float]:  # fmt: skip
    """Relative L2 errors of `TENSORS`, each as a whole; ``exact`` as of `wrong_tensors`."""
    computed = _computed(shape, attention, inputs)
    return {name: relative_l2(*pair) for name, *pair in zip(TENSORS, computed, exact)}


def emulated(
    shape: Shape, recipe: Recipe, inputs: tuple[Tensor, ...], dtype: torch.dtype, mask: Mask | None = None,
    band: Band | None = None, sinks: Tensor | None = None, tokens: slice | None = None,
) -> Outcome:  # fmt: skip
    """O, dQ, dK and dV of the last key head, by the recipe's emulator in a dtype.

    mask: one for all heads, beside the band. band: the shape's by default. sinks: a logit a query head.
    tokens: those of one sequence; all of the shape's by default, each computed by itself.
    """
    if tokens is None:
        settings = dtype, mask, band, sinks
        parts = [emulated(shape, recipe, inputs, *settings, one) for one in shape.sequences()]
        return tuple(torch.cat(part, dim=-2) for part in zip(*parts))
    q, k, v, do = (shape.last_key_head(x)[..., tokens, :].to(dtype) for x in inputs)
    keys = None if mask is None else mask.keys.expand(1, shape.tokens)
    scale, band = shape.head_dim**-0.5, shape.band if band is None else band
    emulator = Emulator(q, k, v, recipe, scale, band, keys, mask)
    o, lse, k_mean = emulator.forward()
    if sinks is None:
        return (o, *emulator.backward(do, o, lse))
    weight = epilogue.weigh(o, lse, q, k_mean, sinks[-q.shape[1] :], scale, None)
    dq, dk, dv = emulator.backward(do, o, lse)
    epilogue.gradient(do, None, o, weight, dq, k_mean, scale, None)
    return o, dq, dk, dv


def _computed(
    shape: Shape, attention: Attention, inputs: tuple[Tensor, ...], backward: bool = True
) -> tuple[Tensor, ...]:
    *tensors, do = inputs
    if not backward:
        return (shape.last_key_head(attention(*tensors)),)
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attention(*leaves)
    return tuple(shape.last_key_head(x) for x in (out, *torch.autograd.grad(out, leaves, do)))
