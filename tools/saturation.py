"""What a saturated softmax does to low precision, emulated on a CPU: `python -m tools.saturation`.

Where a query gives one key nearly all of its weight, dP - delta of that key is the small difference of two large sums,
and the gradients of scores, dS = P (dP - delta), are as small: errors of the size of a product's codes are as large as
the result, or larger.

Prints a table, in Markdown, for Gaussian Q and K of a standard deviation sigma, V and dO of 1, at several softmax
scales: the share of queries whose largest P is at least `SATURATED`, and the relative L2 of O, dQ, dK and dV against
FP64 under each of `COLUMNS`. Inputs are BF16; "16 bit" is torch's own attention on them. One head, no mask.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sagebwd import sage_attention
from sagebwd.diagnostics.trace import SATURATED
from sagebwd.reference.metrics import relative_l2

RECIPES = ("token", "mixed")
SIXTEEN_BIT = "16 bit"
SCALES = (0.125, 1.0, 8.0, 30.0)
SIGMAS = (0.5, 1.0, 3.0)
COLUMNS = (*RECIPES, SIXTEEN_BIT)
TOKENS, HEAD_DIM = 512, 64
TENSORS = ("O", "dQ", "dK", "dV")


def draw(sigma: float, tokens: int = TOKENS) -> list[Tensor]:
    """Q, K, V and dO of one head, (1, 1, tokens, `HEAD_DIM`) BF16."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, tokens, HEAD_DIM, generator=generator) for _ in range(4))
    return [x.bfloat16() for x in (q * sigma, k * sigma, v, do)]


def outcomes(inputs: Iterable[Tensor], attention: Callable[..., Tensor]) -> list[Tensor]:
    """O, dQ, dK and dV of one call."""
    *leaves, do = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]
    o = attention(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def errors(scale: float, sigma: float, tokens: int = TOKENS) -> tuple[float, dict[str, list[float]]]:
    """The share of saturated queries, and by recipe the relative L2 of O, dQ, dK and dV."""
    inputs = draw(sigma, tokens)
    q, k, *_ = wide = [x.double() for x in inputs]
    share = ((q @ k.mT * scale).softmax(-1).amax(-1) >= SATURATED).double().mean().item()
    exact = outcomes(wide, lambda *x: F.scaled_dot_product_attention(*x, scale=scale))
    found = {SIXTEEN_BIT: outcomes(inputs, lambda *x: F.scaled_dot_product_attention(*x, scale=scale))}
    narrow = [x.float() for x in inputs]
    for recipe in RECIPES:
        attention = partial(sage_attention, scale=scale, recipe=recipe, impl="reference")
        found[recipe] = outcomes(narrow, attention)
    return share, {name: [relative_l2(a, e) for a, e in zip(actual, exact)] for name, actual in found.items()}


def table(scales: Iterable[float] = SCALES, sigmas: Iterable[float] = SIGMAS) -> Iterator[str]:
    """The lines of the table."""
    headings = ["scale", "sigma", "saturated", *(f"{name}: {', '.join(COLUMNS)}" for name in TENSORS)]
    yield f"| {' | '.join(headings)} |"
    yield f"|{' --- |' * len(headings)}"
    for scale in scales:
        for sigma in sigmas:
            share, found = errors(scale, sigma)
            cells = [", ".join(f"{x:.3f}" for x in of) for of in zip(*(found[name] for name in COLUMNS))]
            yield f"| {scale:g} | {sigma:g} | {share:.0%} | {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, nargs="+", default=SCALES, help="softmax scales")
    parser.add_argument("--sigma", type=float, nargs="+", default=SIGMAS, help="standard deviations of Q and K")
    given = parser.parse_args()
    for line in table(given.scale, given.sigma):
        print(line, flush=True)
