"""Attention sinks: error against a sink's strength, product by product, and of the sink's key apart from the rest.

``python -m lab.studies.sinks strengths | products | keys`` measure, write JSON and print Markdown tables; ``plot
FILE PICTURE`` draws what ``strengths`` wrote. Products are emulated in FP32 from inputs drawn in BF16 and compared
with FP64 on the same inputs, causal; relative L2 throughout.

Kinds of sink, all else being N(0, 1): ``first``, the first key; ``first and mean``, with a mean of 3 over tokens in
each channel of K and V; ``four``, the first four keys; ``delimiter``, the first key and one in the middle.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lab.studies.gaussian import with_sinks
from lab.studies.study_tables import tell, write
from sagebwd.diagnostics.plots import save
from sagebwd.diagnostics.trace import OUTPUTS, emulate, sources, without
from sagebwd.masks.band import Band
from sagebwd.recipe import Recipe
from sagebwd.reference.emulator import Emulator
from sagebwd.reference.metrics import relative_l2
from sagebwd.reference.quantize import pad_tokens

KINDS = ("first", "first and mean", "four", "delimiter")
RECIPES = ("token", "token(first_keys=0)", "paper", "paper(first_keys=1)", "mixed")
STRENGTHS = (0, 2, 4, 6, 8, 10, 12, 14)
CAUSAL = Band.of(True)


def draw(kind: str, logits: float, tokens: int, head_dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, K, V and dO of one head, (1, 1, tokens, head_dim) FP32, drawn in BF16. Raises ValueError for another kind."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not known; accepted: {', '.join(KINDS)}")
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(1, 1, tokens, head_dim, generator=generator) for _ in range(4))
    if kind == "first and mean":
        k, v = (x + 3 * torch.randn(1, 1, 1, head_dim, generator=generator) for x in (k, v))
    keys = {"four": (0, 1, 2, 3), "delimiter": (0, tokens // 2)}.get(kind, (0,))
    q, k, v = with_sinks(q, k, v, logits, keys, generator)
    return tuple(x.bfloat16().float() for x in (q, k, v, do))


def exact(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Full precision, FP64."""
    return run([x.double() for x in tensors], Recipe.named("full"))


def run(tensors: Sequence[Tensor], recipe: Recipe) -> dict[str, Tensor]:
    """O, lse, delta, dQ, dK and dV under a recipe."""
    return emulate(tuple(tensors), recipe, tensors[0].shape[-1] ** -0.5, CAUSAL)


def errors(actual: dict[str, Tensor], target: dict[str, Tensor]) -> dict[str, float]:
    """Relative L2 of each of O, dQ, dK and dV."""
    return {name: _short(relative_l2(actual[name], target[name])) for name in OUTPUTS}


def weight_of_first(tensors: Sequence[Tensor], lse: Tensor) -> float:
    """The mean over queries of the first key's P."""
    q, k = (x.double() for x in tensors[:2])
    logits = (q @ k[:, :, :1].mT).squeeze(-1) * q.shape[-1] ** -0.5
    return torch.exp(logits - lse).mean().item()


def measure_strengths(
    kinds: Sequence[str], recipes: Sequence[str], strengths: Sequence[float], tokens: int, head_dim: int, seeds: int
) -> list[dict[str, object]]:
    """A row for each kind, strength and recipe: mean errors over draws, and the mean weight of the first key."""
    rows = []
    for kind in kinds:
        for logits in strengths:
            steps = len(kinds) * len(strengths)
            tell(f"{kind}, {logits:g} logits", len(rows) // len(recipes) + 1, steps)
            found: dict[str, list[dict[str, float]]] = {recipe: [] for recipe in recipes}
            weights = []
            for seed in range(seeds):
                tensors = draw(kind, logits, tokens, head_dim, seed)
                target = exact(tensors)
                weights.append(weight_of_first(tensors, target["lse"]))
                for recipe in recipes:
                    found[recipe].append(errors(run(tensors, Recipe.parse(recipe)), target))
            rows += [
                {
                    "kind": kind,
                    "logits": logits,
                    "weight": _short(sum(weights) / seeds),
                    "recipe": recipe,
                    **{name: _short(sum(one[name] for one in each) / seeds) for name in OUTPUTS},
                }
                for recipe, each in found.items()
            ]
    return rows


def measure_products(
    recipes: Sequence[str], logits: float, tokens: int, head_dim: int, seed: int = 0
) -> list[dict[str, object]]:
    """Errors of each recipe, and of it with one of its products in 16 bit; a single first key as the sink."""
    tensors = draw("first", logits, tokens, head_dim, seed)
    target = exact(tensors)
    rows = []
    for recipe in map(Recipe.parse, recipes):
        changed = {"": recipe, **{source: without(recipe, source) for source in sources(recipe)}}
        rows += [
            {"recipe": str(recipe), "16bit": source, **errors(run(tensors, one), target)}
            for source, one in changed.items()
        ]
    return rows


class FirstKeyApart(Emulator):
    """INT8 gradient products that keep the first key out of P's and dS's scales and add its part unrounded.

    Attributes: products, which of "dv", "dq" and "dk" do so: dV's and dK's row of the key, dS's column in dQ.
    """

    products: tuple[str, ...] = ()
    first_is_zero = False  # in dS when it is quantised

    def _quantized(self, x: Tensor, group: str) -> Tensor:
        if self.first_is_zero:
            x = torch.cat([torch.zeros_like(x[..., :1]), x[..., 1:]], -1)
        return super()._quantized(x, group)

    def gradients(self, do: Tensor) -> dict[str, Tensor]:
        """dQ, dK and dV; causal, so that every chunk begins with the first key."""
        o, lse, _ = self.forward()
        columns: dict[str, list[Tensor]] = {"p": [], "dp": [], "ds": []}

        def observe(name: str, rows: slice, keys: slice, value: Tensor) -> None:
            columns[name].append(value[..., :1])

        found = dict(zip(("dq", "dk", "dv"), self.backward(do, o, lse, observe=observe)))
        p, ds = (torch.cat(columns[name], -2) for name in ("p", "ds"))
        x = self.operands
        if "dv" in self.products:
            found["dv"][:, :, :1] = (p.mT @ pad_tokens(self._group_heads(do), self.recipe.block_q)).sum(2)
        if "dk" in self.products:
            found["dk"][:, :, :1] = (ds.mT @ self.turned(x.q_codes * x.q_scale)).sum(2) * self.scale
        if "dq" in self.products:
            self.first_is_zero = True
            part = ds @ self.turned(x.k_codes * x.k_scale)[..., :1, :] * self.scale
            found["dq"] = self.backward(do, o, lse)[0] + part[..., : self.tokens_q, :].flatten(1, 2)
        return found


def measure_keys(logits: Sequence[float], tokens: int, head_dim: int, seed: int = 0) -> list[dict[str, object]]:
    """Backward by column: dV's and dK's error of the first key and of the rest, and what keeping it apart would do."""
    rows = []
    for strength in logits:
        tensors = draw("first", strength, tokens, head_dim, seed)
        target, recipe = exact(tensors), Recipe.named("token")
        scale, (q, k, v, do) = head_dim**-0.5, tensors
        for products in ((), ("dv",), ("dq",), ("dk",)):
            emulator = FirstKeyApart(q, k, v, recipe, scale, CAUSAL)
            emulator.products = products
            found = emulator.gradients(do)
            row = {
                "logits": strength,
                "apart": " ".join(products),
                "dq": _short(relative_l2(found["dq"], target["dq"])),
            }
            for name in ("dk", "dv"):
                a, b = found[name], target[name]
                row[name] = _short(relative_l2(a, b))
                row[f"{name} first"] = _short(relative_l2(a[:, :, :1], b[:, :, :1]))
                row[f"{name} rest"] = _short(relative_l2(a[:, :, 1:], b[:, :, 1:]))
            rows.append(row)
    return rows


def _short(x: float) -> float:
    return float(f"{x:.4g}")


def markdown(rows: Sequence[dict[str, object]]) -> str:
    """Rows as a table."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([_cell(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _cell(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def plot(rows: Sequence[dict], path: Path) -> None:
    """Error against strength: a panel for O, dQ and dK, a line for each recipe; of kind ``first``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["kind"] == "first"]
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.6), sharey=True, layout="constrained")
    for axis, (name, title) in zip(axes, (("o", "O"), ("dq", "dQ"), ("dk", "dK"))):
        for index, recipe in enumerate(dict.fromkeys(row["recipe"] for row in rows)):
            line = [row for row in rows if row["recipe"] == recipe]
            style = "--" if "first_keys" in recipe else "-"
            axis.plot([r["logits"] for r in line], [r[name] for r in line], style, color=f"C{index}", marker=".",
                      label=recipe)  # fmt: skip
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("the first key's logit above the rest")
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("relative L2 to FP64")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, ncol=3, loc="outside lower center")
    save(figure, path, dpi=90)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m lab.studies.sinks", description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=("strengths", "products", "keys", "plot"))
    parser.add_argument("file", nargs="?", type=Path, help="the JSON to write; with plot, to read")
    parser.add_argument("picture", nargs="?", type=Path, help="plot: the picture to draw")
    parser.add_argument("--kind", action="append", choices=KINDS, help="strengths: repeat [default: all]")
    parser.add_argument("--recipe", action="append", help="recipe name or text; repeat for several")
    parser.add_argument("--logits", type=float, action="append", help="strength of the sink; repeat for several")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=2, help="strengths: draws to average")
    given = parser.parse_args(arguments)
    if given.part == "plot":
        if given.file is None or not given.file.is_file() or given.picture is None:
            parser.error("plot: expected a file that strengths wrote, and a picture to draw")
        plot(json.loads(given.file.read_text(encoding="utf-8"))["rows"], given.picture)
        return
    recipes = given.recipe or RECIPES
    if given.part == "strengths":
        strengths = given.logits or STRENGTHS
        rows = measure_strengths(given.kind or KINDS, recipes, strengths, given.tokens, given.head_dim, given.seeds)
    elif given.part == "products":
        strength = (given.logits or [12.0])[0]
        rows = measure_products(given.recipe or RECIPES[:2], strength, given.tokens, given.head_dim)
    else:
        rows = measure_keys(given.logits or (0.0, 6.0, 12.0), given.tokens, given.head_dim)
    if given.file is not None:
        head = {"part": given.part, "torch": torch.__version__, "tokens": given.tokens, "head_dim": given.head_dim}
        write(given.file, {**head, "rows": rows})
    print(markdown(rows))


if __name__ == "__main__":
    main()
