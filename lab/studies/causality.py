"""What a causal output depends on beyond its own past: scales and means that later tokens take part in.

    python -m lab.studies.causality docs/results/causality.json

Only tokens after a query are changed, so that the outputs of exact causal attention would stay as they are. `CHANGES`
says how: the second half of the sequence is drawn anew, `OUTLIER` is added to the last token, or the last token is
NaN; in Q, in K or in V alone. Queries of the first half ("far") share no block with what is changed; the 63 before
the last ("near") share its blocks. Emulator in FP32, Gaussian inputs drawn in BF16.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lab.studies.study_tables import command, table, tell
from sagebwd.diagnostics.trace import emulate
from sagebwd.masks.band import Band
from sagebwd.recipe import Recipe
from sagebwd.reference.metrics import relative_l2

RECIPES = ("full", "paper", "token", "mixed", "token(dp=int8)", "mixed(dp=int8)")
OPERANDS = ("q", "k", "v")
TENSORS = {"o": "O", "dq": "dQ"}
TOKENS, HEAD_DIM, SEEDS = 1024, 64, 2
NEAR = 63
OUTLIER = 1000
Inputs = dict[str, Tensor]


def draw(seed: int, tokens: int = TOKENS, head_dim: int = HEAD_DIM) -> Inputs:
    """q, k, v and do of one head, N(0, 1), (1, 1, tokens, head_dim) FP32, drawn in BF16."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(1, 1, tokens, head_dim, generator=generator).bfloat16().float() for _ in range(4))
    return dict(zip((*OPERANDS, "do"), drawn))


def second_half(x: Tensor, other: Tensor) -> Tensor:
    """x up to its middle, then ``other``."""
    middle = x.shape[-2] // 2
    return torch.cat([x[..., :middle, :], other[..., middle:, :]], -2)


def added_to_last(x: Tensor, by: float) -> Tensor:
    """x with a number added to each channel of its last token."""
    return torch.cat([x[..., :-1, :], x[..., -1:, :] + by], -2)


CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "second half": second_half,
    "outlier": lambda x, other: added_to_last(x, OUTLIER),
    "nan": lambda x, other: added_to_last(x, math.nan),
}
PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "far": lambda x: x[..., : x.shape[-2] // 2, :],
    "near": lambda x: x[..., -1 - NEAR : -1, :],
}
COLUMNS = (("second half", "far"), ("outlier", "far"), ("outlier", "near"), ("nan", "far"))


def run(inputs: Inputs, recipe: Recipe) -> dict[str, Tensor]:
    """O and dQ of causal attention under a recipe."""
    tensors = tuple(inputs[name] for name in (*OPERANDS, "do"))
    return emulate(tensors, recipe, tensors[0].shape[-1] ** -0.5, Band.of(True))


def dependence(
    recipe: Recipe, operand: str, seed: int, tokens: int = TOKENS
) -> dict[tuple[str, str], dict[str, float]]:
    """How far O and dQ of earlier queries move where an operand is changed, relative L2, by change and place.

    Of "nan" it is the share of their numbers that are NaN.
    """
    inputs, other = draw(seed, tokens), draw(seed + 1000, tokens)
    before, found = run(inputs, recipe), {}
    for how, change in CHANGES.items():
        after = run(inputs | {operand: change(inputs[operand], other[operand])}, recipe)
        for place, of in PLACES.items():
            pairs = {name: (of(after[name]), of(before[name])) for name in TENSORS}
            if how == "nan":
                found[how, place] = {name: a.isnan().double().mean().item() for name, (a, _) in pairs.items()}
            else:
                found[how, place] = {name: relative_l2(a, b) for name, (a, b) in pairs.items()}
    return found


def measure(recipes: Sequence[str] = RECIPES, seeds: int = SEEDS) -> list[dict[str, object]]:
    """A row for each recipe: error against FP64, and of each of `COLUMNS` the dependence; means over draws."""
    found = []
    for step, name in enumerate(recipes, 1):
        tell(name, step, len(recipes))
        recipe = Recipe.parse(name)
        row: dict[str, object] = {"recipe": name, "error": _mean([error(recipe, seed) for seed in range(seeds)])}
        for operand in OPERANDS:
            each = [dependence(recipe, operand, seed) for seed in range(seeds)]
            for how, place in COLUMNS:
                row.setdefault(f"{how}, {place}", {})[operand] = _mean([one[how, place] for one in each])
        found.append(row)
    return found


def error(recipe: Recipe, seed: int) -> dict[str, float]:
    """Relative L2 of O and dQ against FP64."""
    inputs = draw(seed)
    actual, exact = run(inputs, recipe), run({x: y.double() for x, y in inputs.items()}, Recipe.named("full"))
    return {name: relative_l2(actual[name], exact[name]) for name in TENSORS}


def _mean(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: _short(sum(row[name] for row in rows) / len(rows)) for name in rows[0]}


def _short(x: float) -> float:
    return float(f"{x:.4g}")


def markdown(content: dict) -> str:
    """A table for O and one for dQ; three numbers are of changes to Q, to K and to V."""
    heads = (
        "error",
        "second half drawn anew",
        f"{OUTLIER} added to the last token",
        "the same, in its block",
        "NaN in it",
    )
    tables = []
    for tensor, label in TENSORS.items():
        lines = []
        for row in content["rows"]:
            cells = [f"`{row['recipe']}`", f"{row['error'][tensor]:.4f}"]
            for how, place in COLUMNS:
                values = [row[f"{how}, {place}"][operand][tensor] for operand in OPERANDS]
                cells.append(" / ".join(_cell(value, how) for value in values))
            lines.append(cells)
        tables.append(table([f"{label}, recipe", *heads], lines))
    return "\n\n".join(tables)


def _cell(value: float, how: str) -> str:
    if how == "nan":
        return f"{value:.0%}"
    return "0" if value == 0 else f"{value:.4f}"


def main(arguments: Sequence[str]) -> None:
    """Measure, write the JSON that ``arguments`` name, if any, and print the tables."""
    command(arguments, __doc__, measured, markdown)


def measured() -> dict:
    """What the study found, and its settings."""
    return {"torch": torch.__version__, "tokens": TOKENS, "head_dim": HEAD_DIM, "seeds": SEEDS, "rows": measure()}


if __name__ == "__main__":
    main(sys.argv[1:])
