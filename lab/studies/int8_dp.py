"""dP in INT8: errors of recipes with it and without it, and what each step of it mends.

``python -m lab.studies.int8_dp recipes | steps`` measure, write JSON and print a Markdown table; ``show FILE`` prints
that of a file, or of some of its kinds and recipes; ``figure FILE [FILE ...] --output PNG`` draws the errors of dS in
files that ``steps`` wrote. Products are emulated in FP32 from inputs drawn in BF16 and compared with FP64 on the same
inputs, causal; relative L2 throughout. ``steps`` takes the steps of `DP_STEPS` away one at a time, all but the scales
a token, and all four; its last line is the recipe with dP in 16 bit.

Kinds: ``gaussian``, N(0, 1); ``outliers``, with means and channels of outliers in K and V;
``sink at N``, with key N 12 logits above the rest (`lab.studies.gaussian`); and what ``--load`` brings.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.pictures import save
from lab.studies import gaussian
from lab.studies.study_tables import table, write
from sagebwd.cli.outputs import check_files
from sagebwd.diagnostics import capture
from sagebwd.masks.band import Band
from sagebwd.recipe import Recipe
from sagebwd.reference.emulator import DpOperands, Emulator
from sagebwd.reference.metrics import relative_l2
from sagebwd.reference.quantize import pad_tokens, quantize_tokens
from sagebwd.reference.rotation import rotated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECIPES = (
    "mixed", "mixed(dp=int8)", "token", "token(dp=int8)", "token(first_keys=1)", "token(first_keys=1, dp=int8)",
    "paper",
)  # fmt: skip
BASES = ("mixed", "token")
DP_STEPS = ("rotation", "token scales", "delta of codes", "mean of O")
"""Of an INT8 dP: dO and V are rotated; V has a scale a token, not one for 128 keys; delta is made of dO's codes, not
of dO; V is less the mean of O."""
KEYS_A_SCALE = 128
LABELS = {"o": "O", "ds": "dS", "dq": "dQ", "dk": "dK", "dv": "dV"}
SHOWN = {"recipes": ("o", "dq", "dk", "dv"), "steps": ("ds", "dq", "dk")}
KINDS = ("gaussian", "outliers", *(f"sink at {place}" for place in (0, 1, 5, 15, 40)))
STEPS: dict[str, Collection[str] | None] = {
    "all four": DP_STEPS,
    **{f"without: {step}": tuple(other for other in DP_STEPS if other != step) for step in DP_STEPS},
    "scales a token alone": ("token scales",),
    "none": (),
    "dP in 16 bit": None,
}
IN_WORDS = {
    "dP in 16 bit": "dP in 16 bit",
    "all four": "dP in INT8, all four steps",
    **{f"without: {step}": f"without {step}" for step in DP_STEPS},
    "scales a token alone": "token scales alone",
    "none": "none of the four",
}
"""`STEPS` as the figure names them, from its top down."""
COLORS = ("C2", "C0")
"""Of a figure's recipes, `mixed` first: those of `lab.commands.figures`."""
Tensors = tuple[Tensor, Tensor, Tensor, Tensor]
Sample = tuple[str, Tensors, float, Band]
"""A kind; q, k, v and do of one head, (1, 1, N, .); the softmax scale; which keys a query sees."""


def draw(kind: str, tokens: int, head_dim: int, value_dim: int, seed: int) -> Tensors:
    """q, k, v and do of one of `KINDS`, or of a sink at another key. Raises ValueError for another kind."""
    base, _, place = kind.partition(" at ")
    if base == "sink" and place.isdigit():
        drawn = gaussian.draw("sink", 1.0, tokens, head_dim, seed, int(place))
    elif kind in ("gaussian", "outliers"):
        drawn = gaussian.draw("plain" if kind == "gaussian" else "bias-and-sink", 1.0, tokens, head_dim, seed)
    else:
        raise ValueError(f"kind={kind!r} is not known; accepted: {', '.join(KINDS)}")
    q, k, v, do = (x.float() for x in drawn)
    if kind == "outliers":
        k[..., 3] *= 8
        v[..., 5] *= 8
    return q, k, v[..., :value_dim], do[..., :value_dim]


def drawn(kinds: Iterable[str], tokens: int, dims: tuple[int, int], seeds: int) -> Iterator[Sample]:
    """Samples of each kind, causal."""
    for kind in kinds:
        for seed in range(seeds):
            yield kind, draw(kind, tokens, *dims, seed), dims[0] ** -0.5, Band.of(True)


def loaded(name: str, path: str | Path) -> Iterator[Sample]:
    """Every head in a file of `sagebwd trace --save`, as samples of a kind called ``name``."""
    for call in capture.load(path):
        for head in call.heads:
            tensors = tuple(x.float() for x in call.head(head))
            yield name, tensors, call.scale, Band.of(call.is_causal, *(call.window or (-1, -1)))


class Stepwise(Emulator):
    """The emulator of a dP in INT8 that takes some of the steps which keep dS.

    Attributes: steps, those of `DP_STEPS`; None for the recipe's own dP.
    """

    steps: Collection[str] | None = None

    def _dp_operands(self, do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None = None) -> DpOperands:
        if self.steps is None:
            return super()._dp_operands(do, o, lse, dlse)
        do, o = self._group_heads(do), self._group_heads(o)
        center = o.mean((2, 3), keepdim=True) if "mean of O" in self.steps else torch.zeros_like(self.v[..., :1, :])
        turned = rotated if "rotation" in self.steps else torch.clone
        do_codes, do_scale = quantize_tokens(turned(do), "token", 1)
        group = "token" if "token scales" in self.steps else "block"
        v_codes, v_scale = quantize_tokens(turned(self.v - center), group, KEYS_A_SCALE)
        coded = do_codes * do_scale
        products = coded * turned(o - center) if "delta of codes" in self.steps else do * (o - center)
        delta, shared = products.sum(-1, keepdim=True), (coded * turned(center)).sum(-1, keepdim=True)
        do_codes, do_scale, shared = (pad_tokens(x, self.recipe.block_q) for x in (do_codes, do_scale, shared))
        return DpOperands(do_codes, do_scale, v_codes, v_scale, delta, shared)


def outputs(
    tensors: Tensors, recipe: Recipe, scale: float, band: Band, steps: Collection[str] | None = None
) -> dict[str, Tensor]:
    """O, dS, dQ, dK and dV; steps, as `Stepwise` takes them."""
    q, k, v, do = tensors
    emulator = Stepwise(q, k, v, recipe, scale, band)
    emulator.steps = steps
    tokens_q, tokens_k = q.shape[2], k.shape[2]
    ds = q.new_zeros(*q.shape[:2], tokens_q, tokens_k)

    def observe(name: str, rows: slice, keys: slice, value: Tensor) -> None:
        if name == "ds":
            at = ds[:, :, rows, keys]
            at.copy_(value.flatten(1, 2)[..., : at.shape[-2], : at.shape[-1]])

    o, lse, _ = emulator.forward()
    dq, dk, dv = emulator.backward(do, o, lse, observe=observe)
    return {"o": o, "ds": ds, "dq": dq, "dk": dk, "dv": dv}


def measure(part: str, samples: Iterable[Sample], recipes: Sequence[str]) -> list[dict[str, object]]:
    """A row for each kind and recipe, of ``steps`` also each of `STEPS`: errors[tensor], one number a sample."""
    rows: dict[tuple[str, ...], dict] = {}
    for kind, tensors, scale, band in samples:
        exact = outputs(tuple(x.double() for x in tensors), Recipe.named("full"), scale, band)
        for text in recipes:
            recipe = Recipe.parse(text)
            for step, taken in STEPS.items() if part == "steps" else [("", None)]:
                actual = outputs(tensors, recipe, scale, band, taken)
                names = {"kind": kind, "recipe": text, **({"step": step} if step else {})}
                row = rows.setdefault((kind, text, step), {**names, "errors": {name: [] for name in LABELS}})
                for name, values in row["errors"].items():
                    values.append(float(f"{relative_l2(actual[name], exact[name]):.4g}"))
    return list(rows.values())


def markdown(content: dict) -> str:
    """The tables of a file: the median over samples, then the largest."""
    shown, steps = SHOWN[content["part"]], content["part"] == "steps"
    figures: tuple[Callable[[list[float]], float], ...] = (statistics.median, max)
    lines = []
    for row in content["rows"]:
        cells = [" / ".join(_cell(figure(row["errors"][name])) for name in shown) for figure in figures]
        names = [row["kind"], f"`{row['recipe']}`", *([row["step"]] if steps else [])]
        lines.append([*names, *cells])
    of = " / ".join(LABELS[name] for name in shown)
    return table(["data", "recipe", *(["steps"] if steps else []), f"{of}, median", "largest"], lines)


def _cell(error: float) -> str:
    return f"{error:.3f}".removeprefix("0")


def figure(rows: Sequence[dict]) -> Figure:
    """dS's relative L2 error by step, a panel for each kind: a mark at the median over heads, a bar to the largest.

    Args: rows, of files that ``steps`` wrote. Raises ValueError where there are none, where one has no step, or where
    there are more recipes than `COLORS`.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    kinds, recipes = (list(dict.fromkeys(row[name] for row in rows)) for name in ("kind", "recipe"))
    if not rows or not all("step" in row for row in rows) or len(recipes) > len(COLORS):
        raise ValueError(f"figure: expected rows of steps, of one or two recipes; got {len(rows)} of {recipes}")
    places = {step: place for place, step in enumerate(IN_WORDS)}
    drawn, axes = plt.subplots(
        1, len(kinds), figsize=(1.8 + 1.42 * len(kinds), 3.5), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, kind in zip(axes.flat, kinds):
        of_kind = [row for row in rows if row["kind"] == kind]
        for number, (recipe, color) in enumerate(zip(recipes, COLORS)):
            found = [row for row in of_kind if row["recipe"] == recipe]
            y = [places[row["step"]] + 0.3 * (number - (len(recipes) - 1) / 2) for row in found]
            middle, largest = ([of(row["errors"]["ds"]) for row in found] for of in (statistics.median, max))
            axis.hlines(y, middle, largest, color=color, linewidth=1.5)
            axis.plot(largest, y, "|", color=color, markersize=5)
            axis.plot(middle, y, "os"[number], color=color, markersize=4.5, label=recipe)
            without_int8 = [error for row, error in zip(found, middle) if row["step"] == "dP in 16 bit"]
            axis.vlines(without_int8, -0.5, len(places) - 0.5, color=color, linewidth=0.8, linestyle=":")
        axis.set_title(f"{kind}, {len(of_kind[0]['errors']['ds'])} heads", fontsize=9)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(numticks=9))
        axis.xaxis.set_major_formatter(lambda error, _: f"{error:g}".removeprefix("0"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.margins(y=0)
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8.5)
    axes[0, 0].set_yticks(range(len(places)), IN_WORDS.values())
    axes[0, 0].invert_yaxis()
    drawn.suptitle("dS's relative L2 error to FP64, median (mark) to largest (bar); dotted: dP in 16 bit", fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m lab.studies.int8_dp", description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=("recipes", "steps", "show", "figure"))
    parser.add_argument("files", nargs="*", type=Path, help="the JSON to write, or with show or figure to read")
    parser.add_argument("--output", type=Path, help="the PNG that figure writes")
    parser.add_argument("--kind", action="append", help=f"one of {', '.join(KINDS)}; repeat [default: all]")
    parser.add_argument("--load", action="append", default=[], help="NAME=FILE of `sagebwd trace --save`; repeat")
    parser.add_argument("--recipe", action="append", help="recipe name or text; repeat for several")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--head-dim", default="64", help="as 64, or with value's as 192/128")
    parser.add_argument("--seeds", type=int, default=4, help="draws, 0 for what is loaded alone")
    given = parser.parse_args(arguments)
    if len(given.files) > 1 and given.part != "figure":
        parser.error(f"{given.part}: expected one file, got {len(given.files)}")
    if (given.output is None) == (given.part == "figure"):
        parser.error("figure needs --output PNG, and no other part takes it")
    if given.part in ("show", "figure"):
        if not given.files or not all(path.is_file() for path in given.files):
            parser.error(f"{given.part}: expected files that exist, got {', '.join(map(str, given.files)) or 'none'}")
        contents = [json.loads(path.read_text(encoding="utf-8")) for path in given.files]
        for name, wanted in (("kind", given.kind), ("recipe", given.recipe)):
            for content in contents:
                content["rows"] = [row for row in content["rows"] if wanted is None or row[name] in wanted]
        if given.part == "show":
            print(markdown(contents[0]))
            return
        try:
            check_files({"--output": given.output}, {f"FILE {n}": path for n, path in enumerate(given.files, 1)})
            save(figure([row for content in contents for row in content["rows"]]), given.output, dpi=150)
        except ValueError as error:
            parser.error(str(error))
        print(given.output)
        return
    try:
        head_dim, _, value_dim = given.head_dim.partition("/")
        dims = int(head_dim), int(value_dim or head_dim)
        samples = list(drawn(given.kind or KINDS, given.tokens, dims, given.seeds))
        for text in given.load:
            name, equals, path = text.partition("=")
            if not equals:
                raise ValueError(f"--load {text!r}: expected NAME=FILE")
            samples += loaded(name, path)
        recipes = given.recipe or (BASES if given.part == "steps" else RECIPES)
        rows = measure(given.part, samples, recipes)
    except ValueError as error:
        parser.error(str(error))
    content = {
        "part": given.part, "torch": torch.__version__, "tokens": given.tokens, "head_dim": given.head_dim,
        "seeds": given.seeds, "rows": rows,
    }  # fmt: skip
    for path in given.files:
        write(path, content)
    print(markdown(content))


if __name__ == "__main__":
    main()
