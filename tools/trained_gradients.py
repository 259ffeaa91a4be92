"""Gradients of a trained model's weights under recipes: `python -m tools.trained_gradients MODEL TEXT`.

MODEL is the folder of a causal language model of Transformers with its tokenizer, or a GGUF file; TEXT is a text file,
xz or not. The model runs in FP32, forward and backward, on windows of the text, with attention in FP32 and then in
each recipe's emulator, on q, k and v rounded to BF16. Of the gradient g of all weights, and of some groups of them,
against FP32's g0 it prints means over windows, with standard errors:

- error, ||g - g0|| / ||g0||;
- slope less 1, <g, g0> / <g0, g0> - 1: what the gradient shrinks by, which no average over steps takes back;
- the change of the loss.

``--weights`` are of a file that `python -m lab continue` wrote, in place of the model's. TEXT may be its token file.

"bf16" beside the recipes is full precision on the rounded tensors. With ``--device cuda`` recipes run on the kernels
that `sage_attention` takes there, unless they are ``--emulated``. The ``--output`` has every window, and means over
windows of the errors and slopes of every layer's projections, with the slopes' standard errors.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from lab.training.continued import tokens
from lab.training.data import know_runs
from sagebwd import sage_attention
from sagebwd.cli.hardware import check_device
from sagebwd.cli.outputs import check_files
from sagebwd.cli.results import environment
from sagebwd.diagnostics.models import load_model, text_windows, windows
from sagebwd.environment import write_whole
from sagebwd.recipe import Recipe

EXACT, ROUNDED = "fp32", "bf16"
RECIPES = (ROUNDED, "mixed", "token")
# Of weights, by what is in their name; "all" is every one.
GROUPS = ("all", "q_proj", "k_proj", "v_proj", "o_proj")
LAYER = re.compile(r"\.layers\.(\d+)\.")
NAME = "trained-gradients"


class Probe:
    """Attention of whichever recipe it was told last, for `transformers.AttentionInterface`."""

    def __init__(self, impl: str | None = "reference") -> None:
        self.recipe, self.impl = EXACT, impl
        AttentionInterface.register(NAME, self)
        AttentionMaskInterface.register(NAME, lambda *_, **__: None)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **settings: object
    ) -> tuple[Tensor, None]:
        """What Transformers calls: causal attention of (batch, heads, tokens, head_dim), tokens before heads."""
        tensors, scale = (query, key, value), settings["scaling"]
        if self.recipe != EXACT:
            tensors = tuple(x.bfloat16() for x in tensors)
        if self.recipe in (EXACT, ROUNDED):
            tensors = tuple(x.to(query.dtype) for x in tensors)
            o = F.scaled_dot_product_attention(*tensors, is_causal=True, scale=scale, enable_gqa=True)
        else:
            o = sage_attention(
                *tensors, is_causal=True, scale=scale, enable_gqa=True, recipe=self.recipe, impl=self.impl
            )
        return o.transpose(1, 2).to(query.dtype), None


def gradients(model: PreTrainedModel, ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    """The loss of a window and the gradient of each weight."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def compared(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, dict]:
    """Error and slope less 1 of each group, and under "layers" of each layer's groups, by the layer's number."""
    sums: dict[tuple[str, str], list[float]] = {}
    for name, expected in exact.items():
        a, b = found[name].double().flatten(), expected.double().flatten()
        parts = ((a - b) @ (a - b)).item(), (a @ b).item(), (b @ b).item()
        layer = LAYER.search(name)
        for group in GROUPS:
            if group == "all" or group in name:
                for place in {"", layer.group(1) if layer else ""}:
                    known = sums.get((place, group), (0.0, 0.0, 0.0))
                    sums[place, group] = [total + part for total, part in zip(known, parts)]
    of: dict[str, dict] = {}
    for (place, group), (error, dot, norm) in sums.items():
        if norm:
            of.setdefault(place, {})[group] = {"error": math.sqrt(error / norm), "slope": dot / norm - 1}
    return {**of.pop("", {}), "layers": of}


def measure(
    model: PreTrainedModel, chosen: list[Tensor], recipes: list[str], layers: dict, impl: str | None = "reference"
) -> Iterator[dict[str, object]]:
    """A row for each window: the loss, and by recipe its change, errors and slopes; impl: of recipes.

    layers: by recipe, layer and group, what `average` makes of the windows so far; written.
    """
    probe = Probe(impl)
    model.set_attn_implementation(NAME)
    for index, ids in enumerate(chosen):
        probe.recipe = EXACT
        loss, exact = gradients(model, ids)
        row: dict[str, object] = {"window": index, "loss": loss, "recipes": {}}
        for recipe in recipes:
            probe.recipe = recipe
            changed, found = gradients(model, ids)
            whole = compared(found, exact)
            for layer, groups in whole.pop("layers").items():
                for group, one in groups.items():
                    place = layers.setdefault(recipe, {}).setdefault(layer, {})
                    place[group] = average(place.get(group), index + 1, one)
            row["recipes"][recipe] = {"loss": changed - loss, **whole}
        yield row


def average(before: dict | None, count: int, one: dict) -> dict:
    """Means of error and slope over ``count`` windows, of those ``before`` and ``one`` more, by Welford's method.

    "slope_error" is the standard error of the slope's mean, 0 of one window.
    """
    before = before or {"error": 0.0, "slope": 0.0, "slope_error": 0.0}
    error, slope = (before[name] + (one[name] - before[name]) / count for name in ("error", "slope"))
    squares = before["slope_error"] ** 2 * (count - 1) * max(count - 2, 0)
    squares += (one["slope"] - before["slope"]) * (one["slope"] - slope)
    return {"error": error, "slope": slope, "slope_error": math.sqrt(squares / (count * max(count - 1, 1)))}


def _mean(values: list[float], signed: bool) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):{'+' if signed else ''}.4f} ± {error:.4f}"


def table(rows: list[dict]) -> Table:
    """Means over windows, with standard errors."""
    groups = [group for group in GROUPS if group in next(iter(rows[0]["recipes"].values()))]
    found = Table("recipe", "change of loss", "slope - 1", *(f"error, {group}" for group in groups))
    for recipe in rows[0]["recipes"]:
        own = [row["recipes"][recipe] for row in rows]
        errors = [_mean([one[group]["error"] for one in own], signed=False) for group in groups]
        slope = _mean([one["all"]["slope"] for one in own], signed=True)
        found.add_row(recipe, _mean([one["loss"] for one in own], signed=True), slope, *errors)
    return found


def with_weights(model: PreTrainedModel, path: Path) -> None:
    """Put a file's weights into a model. Raises ValueError where these are not the model's, all of them."""
    found, own = load_file(path), dict(model.named_parameters())
    if set(found) != set(own):
        raise ValueError(f"weights={path}: of {len(own)} of the model it has {len(set(found) & set(own))}")
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(found[name])


def kept(given: argparse.Namespace, measured: Iterable[dict], facts: dict[str, object]) -> list[dict]:
    """All rows, told as they come and written to ``--output`` with each: one that is cut off has what it measured.

    facts: what they depend on beside the model, the text and the windows' tokens.
    """
    facts = {"model": given.model.name, "text": given.text.name, "tokens": given.tokens, **facts}
    rows = []
    for row in measured:
        rows.append(row)
        print(f"window {row['window']} of {given.windows} windows", file=sys.stderr, flush=True)
        if given.output is not None:
            write_whole(given.output, json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--recipe", action="append", help=f"repeat for several [default: {', '.join(RECIPES)}]")
    parser.add_argument("--output", type=Path, help="a JSON file of every row")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--weights", type=Path, help="a .safetensors of python -m lab continue")
    parser.add_argument("--emulated", action="store_true", help="on a GPU too")
    parser.add_argument("--commit", help="what ran, outside a git checkout")
    given = parser.parse_args(arguments)
    check_device(given.device)
    try:
        check_files({"--output": given.output}, {"MODEL": given.model, "TEXT": given.text, "--weights": given.weights})
    except ValueError as error:
        parser.error(str(error))
    recipes = [text if text == ROUNDED else str(Recipe.parse(text)) for text in given.recipe or RECIPES]
    know_runs()
    model = load_model(given.model, given.device, torch.float32)
    if given.weights is not None:
        with_weights(model, given.weights)
    if given.text.suffix == ".npy":
        ids = tokens.read(str(given.text), model.config.get_text_config().vocab_size, "text")
        found = windows(torch.from_numpy(ids.astype("int64"))[None], given.tokens, given.windows)
    else:
        found = text_windows(model, given.model, given.text, given.tokens, given.windows)
    chosen = [ids.to(given.device) for ids in found]
    impl = None if given.device.startswith("cuda") and not given.emulated else "reference"
    layers: dict[str, dict] = {}
    facts = environment(given.device, given.commit) | {"impl": impl, "weights": given.weights and str(given.weights)}
    rows = kept(given, measure(model, chosen, recipes, layers, impl), facts | {"layers": layers})
    Console(width=170).print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
