"""An assay of gradients: those of all weights of a trained model under recipes, against FP32's, and planted faults.

The model runs in FP32, forward and backward, on windows of a text, with attention in FP32 and then in each `Arm`, on
q, k and v rounded to BF16. Of the gradient g of all weights, and of some groups of them, against FP32's g0:

- error, ||g - g0|| / ||g0||;
- slope less 1, <g, g0> / <g0, g0> - 1: what the gradient shrinks by, which no average over steps takes back;
- angle, 1 - <g, g0> / (||g|| ||g0||), 1 less the cosine;
- the change of the loss.

Losses of training runs do not show gradients that are wrong (docs/results/pretraining.md), so this comes first. The
loss, and each measure of each group, are compared between an arm and the recipe's own, window by window, by a paired t
test, and `holm` corrects for their number. An arm is told apart where the least p is below `LEVEL`. Each fault of
`planted_faults` must be, and what computes the same must not: the recipe's emulator, and the recipe on tensors that
were moved by less than BF16 tells. Where a fault is not, the assay is too blunt to say anything of the recipe.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from lab.studies.planted_faults import FAULTS, planted
from lab.training.gaps import holm, interval, within
from sagebwd import sage_attention

EXACT, ROUNDED = "fp32", "bf16"
RECIPES = (ROUNDED, "mixed", "token")
# Of weights, by what is in their name; "all" is every one.
GROUPS = ("all", "q_proj", "k_proj", "v_proj", "o_proj")
MEASURES = ("error", "slope", "angle")
LAYER = re.compile(r"\.layers\.(\d+)\.")
NAME = "assay"
LEVEL = 0.01
MOVED = 2.0**-14
"""Standard deviation of a relative change of q, k and v, of which BF16 shows one in thirty."""


@dataclass(frozen=True)
class Arm:
    """Attention under a recipe; impl: as `sage_attention` takes it; fault: one of `FAULTS`; moved: see `MOVED`."""

    recipe: str
    impl: str | None = "reference"
    fault: str | None = None
    moved: bool = False
    emulated: bool = False

    @property
    def name(self) -> str:
        """What tables and files call it."""
        what = self.fault or ("moved" if self.moved else "emulated" if self.emulated else None)
        return self.recipe if what is None else f"{self.recipe}, {what}"


def arms(recipe: str, impl: str | None, faults: bool = True) -> list[Arm]:
    """A recipe's own arm and those that are compared with it; of kernels their emulator is one."""
    if recipe == ROUNDED or not faults:
        return [Arm(recipe, impl)]
    same = [Arm(recipe, impl, moved=True)]
    same += [] if impl == "reference" else [Arm(recipe, "reference", emulated=True)]
    return [Arm(recipe, impl), *same, *(Arm(recipe, impl, fault) for fault in FAULTS)]


class Probe:
    """Attention of whichever arm it was told last, for `transformers.AttentionInterface`; None is FP32."""

    def __init__(self) -> None:
        self.arm: Arm | None = None
        self.generator: torch.Generator | None = None
        AttentionInterface.register(NAME, self)
        AttentionMaskInterface.register(NAME, lambda *_, **__: None)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **settings: object
    ) -> tuple[Tensor, None]:
        """What Transformers calls: causal attention of (batch, heads, tokens, head_dim), tokens before heads."""
        arm, scale = self.arm, settings["scaling"]
        tensors = query, key, value
        if arm is None or arm.recipe == ROUNDED:
            if arm is not None:
                tensors = tuple(x.bfloat16().to(x.dtype) for x in tensors)
            o = F.scaled_dot_product_attention(*tensors, is_causal=True, scale=scale, enable_gqa=True)
            return o.transpose(1, 2), None
        if arm.moved:
            tensors = tuple(x + x * MOVED * self._noise(x) for x in tensors)
        tensors = tuple(x.bfloat16() for x in tensors)

        def attention(*tensors: Tensor) -> Tensor:
            return sage_attention(
                *tensors, is_causal=True, scale=scale, enable_gqa=True, recipe=arm.recipe, impl=arm.impl
            )

        o = attention(*tensors) if arm.fault is None else planted(arm.fault, attention, *tensors, scale)
        return o.transpose(1, 2).to(query.dtype), None

    def _noise(self, x: Tensor) -> Tensor:
        if self.generator is None:
            self.generator = torch.Generator(x.device).manual_seed(0)
        return torch.randn(x.shape, generator=self.generator, device=x.device, dtype=x.dtype)


def gradients(model: PreTrainedModel, ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    """The loss of a window and the gradient of each weight."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def compared(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, dict]:
    """`MEASURES` of each group, and under "layers" of each layer's groups, by the layer's number."""
    sums: dict[tuple[str, str], list[float]] = {}
    for name, expected in exact.items():
        a, b = found[name].double().flatten(), expected.double().flatten()
        parts = ((a - b) @ (a - b)).item(), (a @ b).item(), (b @ b).item(), (a @ a).item()
        layer = LAYER.search(name)
        for group in GROUPS:
            if group == "all" or group in name:
                for place in {"", layer.group(1) if layer else ""}:
                    known = sums.get((place, group), (0.0, 0.0, 0.0, 0.0))
                    sums[place, group] = [total + part for total, part in zip(known, parts)]
    of: dict[str, dict] = {}
    for (place, group), (error, dot, norm, own) in sums.items():
        if norm:
            angle = 1 - dot / math.sqrt(norm * own) if own else 1.0
            measures = math.sqrt(error / norm), dot / norm - 1, angle
            of.setdefault(place, {})[group] = dict(zip(MEASURES, measures))
    return {**of.pop("", {}), "layers": of}


def measure(
    model: PreTrainedModel, chosen: Sequence[Tensor], of: Sequence[Arm], layers: dict
) -> Iterator[dict[str, object]]:
    """A row for each window: the loss, and by arm its change and `MEASURES`.

    layers: by arm, layer and group, what `average` makes of the windows so far; written.
    """
    probe = Probe()
    model.set_attn_implementation(NAME)
    for index, ids in enumerate(chosen):
        probe.arm = None
        loss, exact = gradients(model, ids)
        row: dict[str, object] = {"window": index, "loss": loss, "recipes": {}}
        for arm in of:
            probe.arm = arm
            changed, found = gradients(model, ids)
            whole = compared(found, exact)
            for layer, groups in whole.pop("layers").items():
                for group, one in groups.items():
                    place = layers.setdefault(arm.name, {}).setdefault(layer, {})
                    place[group] = average(place.get(group), index + 1, one)
            row["recipes"][arm.name] = {"loss": changed - loss, **whole}
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


@dataclass(frozen=True)
class Difference:
    """An arm less the recipe's own, by the measure of a group that tells them best apart: mean over windows, 95%
    interval, and p corrected for all measures and groups."""

    arm: Arm
    measure: str
    group: str
    mean: float
    interval: tuple[float, float]
    p: float

    @property
    def apart(self) -> bool:
        """Whether the arm is told from the recipe's own."""
        return self.p < LEVEL

    @property
    def right(self) -> bool:
        """Whether it is told apart as it should: faults are, what computes the same is not."""
        return self.apart == (self.arm.fault is not None)


def difference(rows: Sequence[dict], arm: Arm, own: Arm) -> Difference:
    """The two arms compared over windows, at least two."""
    pairs = [(row["recipes"][arm.name], row["recipes"][own.name]) for row in rows]
    groups = [group for group in GROUPS if group in pairs[0][0]]
    values = {
        (name, group): [a[group][name] - b[group][name] for a, b in pairs] for group in groups for name in MEASURES
    }
    values["loss", "all"] = [a["loss"] - b["loss"] for a, b in pairs]
    found = [(*place, statistics.mean(own), interval(own), _p(own)) for place, own in values.items()]
    corrected = holm([one[-1] for one in found])
    best = min(range(len(found)), key=lambda index: found[index][-1])
    return Difference(arm, *found[best][:-1], corrected[best])


def _p(values: Sequence[float]) -> float:
    """Of a t test that the mean is 0."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    if error == 0:
        return float(statistics.mean(values) == 0)
    return 1 - within(abs(statistics.mean(values)) / error, len(values) - 1)


def differences(rows: Sequence[dict], of: Sequence[Arm]) -> list[Difference]:
    """Every arm but a recipe's own beside that."""
    own = {arm.recipe: arm for arm in of if arm.name == arm.recipe}
    return [difference(rows, arm, own[arm.recipe]) for arm in of if arm.name != arm.recipe]


def told(one: Difference) -> dict[str, object]:
    """A difference as a file has it."""
    return {**asdict(one), "arm": one.arm.name, "apart": one.apart, "right": one.right}


def _mean(values: Sequence[float], signed: bool) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):{'+' if signed else ''}.4f} ± {error:.4f}"


def table(rows: Sequence[dict]) -> Table:
    """Means over windows, with standard errors."""
    groups = [group for group in GROUPS if group in next(iter(rows[0]["recipes"].values()))]
    columns = ("change of loss", "slope - 1", "1 - cosine", *(f"error, {group}" for group in groups))
    found = Table("recipe", *columns, title=f"gradient of all weights against FP32's, {len(rows)} windows")
    for recipe in rows[0]["recipes"]:
        own = [row["recipes"][recipe] for row in rows]
        errors = [_mean([one[group]["error"] for one in own], signed=False) for group in groups]
        slope, angle = (_mean([one["all"][name] for one in own], signed=name == "slope") for name in MEASURES[1:])
        found.add_row(recipe, _mean([one["loss"] for one in own], signed=True), slope, angle, *errors)
    return found


def table_of_faults(found: Sequence[Difference]) -> Table:
    """What is told apart from the recipe, and by what."""
    drawn = Table("arm", "told apart", "by", "difference (95%)", "p, corrected", "as it should")
    for one in found:
        ends = f"{one.mean:+.5f} ({one.interval[0]:+.5f} to {one.interval[1]:+.5f})"
        drawn.add_row(one.arm.name, "yes" if one.apart else "no", f"{one.measure}, {one.group}", ends, f"{one.p:.4f}",
                      "yes" if one.right else "[red]NO[/red]")  # fmt: skip
    return drawn


def with_weights(model: PreTrainedModel, path: Path) -> None:
    """Put a file's weights into a model. Raises ValueError where these are not the model's, all of them."""
    found, own = load_file(path), dict(model.named_parameters())
    if set(found) != set(own):
        raise ValueError(f"weights={path}: of {len(own)} of the model it has {len(set(found) & set(own))}")
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(found[name])
