"""What a saturated softmax does to low precision, emulated on a CPU.

    python -m lab.studies.saturation docs/results/saturation.json

Where a query gives one key nearly all of its weight, dP - delta of that key is the small difference of two large sums,
and the gradients of scores, dS = P (dP - delta), are as small: errors of the size of a product's codes are as large as
the result, or larger.

Gaussian Q and K of a standard deviation sigma, V and dO of 1, at several softmax scales: the share of queries whose
largest P is at least `SATURATED`, and the relative L2 of O, dQ, dK and dV against FP64 under each of `COLUMNS`. Inputs
are BF16; "16 bit" is torch's own attention on them. One head, no mask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.studies.study_tables import command, table, tell
from sagebwd import sage_attention
from sagebwd.diagnostics.trace import SATURATED
from sagebwd.reference.metrics import relative_l2

RECIPES = ("token", "mixed")
SIXTEEN_BIT = "16 bit"
COLUMNS = (*RECIPES, SIXTEEN_BIT)
SCALES = (0.125, 1.0, 8.0, 30.0)
SIGMAS = (0.5, 1.0, 3.0)
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
    """The share of saturated queries, and by recipe the relative L2 of `TENSORS`."""
    inputs = draw(sigma, tokens)
    q, k, *_ = wide = [x.double() for x in inputs]
    share = ((q @ k.mT * scale).softmax(-1).amax(-1) >= SATURATED).double().mean().item()
    in_torch = partial(F.scaled_dot_product_attention, scale=scale)
    exact, found = outcomes(wide, in_torch), {SIXTEEN_BIT: outcomes(inputs, in_torch)}
    narrow = [x.float() for x in inputs]
    for recipe in RECIPES:
        found[recipe] = outcomes(narrow, partial(sage_attention, scale=scale, recipe=recipe, impl="reference"))
    return share, {name: [relative_l2(a, e) for a, e in zip(actual, exact)] for name, actual in found.items()}


def measure(scales: Sequence[float] = SCALES, sigmas: Sequence[float] = SIGMAS, tokens: int = TOKENS) -> list[dict]:
    """A row for each scale and sigma."""
    rows = []
    for step, (scale, sigma) in enumerate(product(scales, sigmas), 1):
        tell(f"scale {scale:g}, sigma {sigma:g}", step, len(scales) * len(sigmas))
        share, found = errors(scale, sigma, tokens)
        of = {name: {x: float(f"{e:.4g}") for x, e in zip(TENSORS, found[name])} for name in COLUMNS}
        rows.append({"scale": scale, "sigma": sigma, "saturated": share, "errors": of})
    return rows


def markdown(content: dict) -> str:
    """The table; three numbers are those of `COLUMNS`."""
    lines = [
        [f"{row['scale']:g}", f"{row['sigma']:g}", f"{row['saturated']:.0%}",
         *(", ".join(f"{row['errors'][name][x]:.3f}" for name in COLUMNS) for x in TENSORS)]
        for row in content["rows"]
    ]  # fmt: skip
    return table(["scale", "sigma", "saturated", *(f"{x}: {', '.join(COLUMNS)}" for x in TENSORS)], lines)


def main(arguments: Sequence[str]) -> None:
    """Measure, write the JSON that ``arguments`` name, if any, and print the tables."""
    command(arguments, __doc__, measured, markdown)


def measured() -> dict:
    """What the study found, and its settings."""
    return {"torch": torch.__version__, "tokens": TOKENS, "head_dim": HEAD_DIM, "rows": measure()}


if __name__ == "__main__":
    main(sys.argv[1:])
