"""Whether what a benchmark times computes what it should: a recipe's kernels the recipe, a peer attention.

One key head of the call is looked at, at the shape that is timed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sagebwd.benchmarks.peers import Attention
from sagebwd.benchmarks.shapes import Shape
from sagebwd.masks.band import Band
from sagebwd.meaning.conformance import violation
from sagebwd.meaning.metrics import relative_l2
from sagebwd.meaning.reference import Emulator
from sagebwd.recipe import Recipe

TENSORS = ("o", "dq", "dk", "dv")
PEER_LIMIT = 0.05
"""Relative L2 error above which a peer is wrong; rounding to BF16 makes .003 of it."""
PEER_TOKENS = 128
"""Tokens that are held to it at a time: among all, a few that are wrong would not show."""

Outcome = tuple[Tensor, Tensor, Tensor, Tensor]


def gate(shape: Shape, attention: Attention, recipe: Recipe, inputs: tuple[Tensor, ...]) -> str:
    """Whether the call is the recipe: "ok" or "FAILED".

    By `sagebwd.meaning.conformance`, with the emulator in the inputs' dtype for the kernel's precision.
    """
    low, high = (emulated(shape, recipe, inputs, dtype) for dtype in (inputs[0].dtype, torch.float64))
    eps = torch.finfo(inputs[0].dtype).eps
    problems = [
        violation(kernel, *sides, eps) for kernel, *sides in zip(_computed(shape, attention, inputs), low, high)
    ]
    return "ok" if problems == [None] * len(problems) else "FAILED"


def wrong_tensors(shape: Shape, attention: Attention, exact: Outcome, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    """The tensors, of `TENSORS`, that a full-precision attention computes wrongly, with the relative L2 error
    of the worst `PEER_TOKENS` tokens.

    exact: `emulated` of the same inputs by recipe "full" in FP64, which is attention itself.
    """
    wrong = {}
    for name, actual, expected in zip(TENSORS, _computed(shape, attention, inputs), exact):
        pieces = zip(actual.split(PEER_TOKENS, dim=-2), expected.split(PEER_TOKENS, dim=-2))
        worst = max((relative_l2(*pair) for pair in pieces), key=lambda error: (math.isnan(error), error))
        if not worst <= PEER_LIMIT:
            wrong[name] = worst
    return wrong


def emulated(shape: Shape, recipe: Recipe, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> Outcome:
    """O, dQ, dK and dV of the last key head, by the recipe's emulator in a dtype."""
    q, k, v, do = (shape.last_key_head(x).to(dtype) for x in inputs)
    emulator = Emulator(q, k, v, recipe, shape.head_dim**-0.5, Band.of(shape.is_causal))
    o, lse, _ = emulator.forward()
    return (o, *emulator.backward(do, o, lse))


def _computed(shape: Shape, attention: Attention, inputs: tuple[Tensor, ...]) -> Outcome:
    *tensors, do = inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attention(*leaves)
    return tuple(shape.last_key_head(x) for x in (out, *torch.autograd.grad(out, leaves, do)))
