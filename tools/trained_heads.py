"""Errors of recipes on what a trained model's layers hand to attention: `python -m tools.trained_heads MODEL TEXT`.

MODEL is the folder of a causal language model of Transformers with its tokenizer, or a GGUF file. The model runs in
FP32 on windows of TEXT, a text file, xz or not. Each layer's q, k, v and the gradient of its output are rounded to
BF16, and the emulator of each recipe is compared with FP64 on them.

An error is ||recipe - exact|| / ||exact|| of all heads of a layer together: a head whose first key has all the weight
has gradients near zero, and a ratio of its own says nothing. The line of a recipe has the root mean square over
layers and windows, and the worst layer. The ``--output`` has every layer. It also prints, of each layer, what makes
INT8 scales coarse: the largest channel's RMS of q and k over the median channel's, the largest element of a row over
the row's RMS, and the heaviest key with its mean weight.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from lab.training.data import know_runs
from sagebwd.cli.results import environment
from sagebwd.diagnostics.capture import Captured, capture
from sagebwd.diagnostics.models import load_model, text_windows
from sagebwd.diagnostics.trace import OUTPUTS, emulate
from sagebwd.masks.band import Band
from sagebwd.recipe import Recipe
from sagebwd.reference.metrics import relative_l2

RECIPES = ("mixed", "token", "paper", "mixed(s=16bit)")


def in_bf16(call: Captured) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and do; do scaled to a largest magnitude of 1, which relative errors do not see."""
    scaled = call.do / call.do.abs().max()
    return tuple(x.bfloat16() for x in (call.q, call.k, call.v, scaled))


def exact_layer(call: Captured, tensors: tuple[Tensor, ...], band: Band) -> tuple[dict[str, Tensor], Tensor]:
    """o, dq, dk and dv of a layer in FP64, dk and dv summed over the heads of a group, and each key's mean weight."""
    q, k = tensors[:2]
    weights = torch.zeros(k.shape[2], dtype=torch.float64)

    def watch(name: str, rows: slice, keys: slice, value: Tensor) -> None:
        if name == "p":
            keys = slice(keys.start, min(keys.stop, k.shape[2]))
            weights[keys] += value.flatten(0, -2).sum(0)[: keys.stop - keys.start]

    found = emulate(tuple(x.double() for x in tensors), Recipe.named("full"), call.scale, band, watch)
    return {name: found[name] for name in OUTPUTS}, weights / math.prod(q.shape[:3])


def coarseness(x: Tensor) -> tuple[float, float]:
    """The largest channel's RMS over the median's, and a row's largest magnitude over its RMS, means over heads."""
    x = x.double()
    channels = x.square().mean((0, 2)).sqrt()
    rows = x.abs().amax(-1) / x.square().mean(-1).sqrt().clamp(min=1e-30)
    return (channels.amax(-1) / channels.median(-1).values).mean().item(), rows.mean().item()


def measure(
    model: PreTrainedModel, chosen: list[Tensor], layers: list[int] | None, recipes: list[Recipe]
) -> Iterator[dict[str, object]]:
    """A row for each window and layer: errors by recipe and tensor, and what its heads look like."""
    for index, ids in enumerate(chosen):
        for call in capture(model, ids, layers=layers):
            band, tensors = Band.of(call.is_causal, *(call.window or (-1, -1))), in_bf16(call)
            exact, weights = exact_layer(call, tensors, band)
            row: dict[str, object] = {"window": index, "layer": call.layer, "errors": {}}
            for name, x in (("q", tensors[0]), ("k", tensors[1])):
                row[f"{name}_channel"], row[f"{name}_row"] = coarseness(x)
            row |= {"sink": int(weights.argmax()), "sink_weight": weights.max().item(), "first": weights[0].item()}
            for recipe in recipes:
                found = emulate(tensors, recipe, call.scale, band)
                row["errors"][str(recipe)] = {name: relative_l2(found[name], exact[name]) for name in OUTPUTS}
            yield row


def tables(rows: list[dict]) -> Iterator[Table]:
    """Errors of recipes over all rows, and what each layer's heads look like."""
    table = Table("recipe", *OUTPUTS, *(f"worst {name}" for name in OUTPUTS), title="error over a layer's norm")
    for recipe in rows[0]["errors"]:
        columns = [[row["errors"][recipe][name] for row in rows] for name in OUTPUTS]
        rms = [math.sqrt(sum(x * x for x in column) / len(column)) for column in columns]
        table.add_row(recipe, *(f"{x:.4f}" for x in rms), *(f"{max(column):.3f}" for column in columns))
    yield table
    names = {"q_channel": "q's largest channel", "q_row": "q's row", "k_channel": "k's", "k_row": "k's row"}
    table = Table("layer", *names.values(), "weight of the first key", "heaviest key, its weight", title="means")
    for layer in sorted({row["layer"] for row in rows}):
        own = [row for row in rows if row["layer"] == layer]
        cells = [f"{sum(row[name] for row in own) / len(own):.1f}" for name in names]
        heaviest = ", ".join(f"{row['sink']} {row['sink_weight']:.2f}" for row in own)
        table.add_row(str(layer), *cells, f"{sum(row['first'] for row in own) / len(own):.2f}", heaviest)
    yield table


def parser_of(description: str, tokens: int, count: int, recipes: Iterable[str]) -> argparse.ArgumentParser:
    """The command line of a tool that runs a trained model on windows of a text; the rest are its defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=tokens, help="of a window")
    parser.add_argument("--windows", type=int, default=count)
    parser.add_argument("--recipe", action="append", help=f"repeat for several [default: {', '.join(recipes)}]")
    parser.add_argument("--output", type=Path, help="a JSON file of every row")
    return parser


def kept(given: argparse.Namespace, measured: Iterable[dict], facts: dict[str, object]) -> list[dict]:
    """All rows, told as they come and written to ``--output`` with each: one that is cut off has what it measured.

    facts: what they depend on beside the model, the text and the windows' tokens.
    """
    facts = {"model": given.model.name, "text": given.text.name, "tokens": given.tokens, **facts}
    rows = []
    for row in measured:
        rows.append(row)
        place = ", ".join(f"{name} {row[name]}" for name in ("window", "layer") if name in row)
        print(f"{place} of {given.windows} windows", file=sys.stderr, flush=True)
        if given.output is not None:
            given.output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Capture, measure and print."""
    parser = parser_of(__doc__, 1024, 3, RECIPES)
    parser.add_argument("--layer", type=int, action="append", help="repeat for several; all unless named")
    given = parser.parse_args(arguments)
    recipes = [Recipe.parse(text) for text in given.recipe or RECIPES]
    know_runs()
    model = load_model(given.model, dtype=torch.float32)
    chosen = text_windows(model, given.model, given.text, given.tokens, given.windows)
    rows = kept(given, measure(model, chosen, given.layer, recipes), environment("cpu"))
    for table in tables(rows):
        Console(width=150).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
