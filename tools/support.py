"""The support matrix: `python -m tools.support` asks dispatch who runs each form of call and writes docs/support.json.

docs/support.md shows it (`python -m tools.tables`). A test asks again, so that the file changes in the commit in which
dispatch does. `native`: the implementation's own kernels run both directions, on a card on which they have been run;
`served by X`: X runs it, or a direction of it; `not validated`: accepted, but never run on such a card, or at such a
head_dim; `declined`: it raises an error.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from sagebwd import dispatch, explain, explain_varlen
from sagebwd.auto.model import widths_text
from sagebwd.block_masks import causal_frames
from sagebwd.call import Ask
from sagebwd.kernels.families import FAMILIES
from sagebwd.recipe import Recipe

FILE = Path(__file__).parents[1] / "docs" / "support.json"
NATIVE, SERVED, NOT_VALIDATED, DECLINED = "native", "served by {}", "not validated", "declined"
DEFAULT = "default"
VALIDATED = {"9.0": "H100, H200", "no GPU": "CPU"}
"""Cards on which kernels, or the reference, have been run."""
CARDS = {
    "9.0": "H100, H200", "8.0": "A100", "8.6": "RTX 3090, A40", "8.9": "RTX 4090, L40S", "10.0": "B200",
    "12.0": "RTX 5090", "7.5": "T4, RTX 20", "no GPU": "CPU",
}  # fmt: skip
"""By compute capability."""
RECIPES = "mixed", "token", "token(dp=int8)", "paper", "full"
WIDTHS = (64, 64), (128, 128), (192, 128), (256, 256), (512, 512)
TIMED = "NVIDIA H200"


def runs(recipe: str, widths: tuple[int, int], capability: str, impl: str | None) -> tuple[str, str] | None:
    """Who runs forward and backward of a call on a card with all that the extras bring; None where it raises."""
    on_gpu = capability in CARDS and capability != "no GPU"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    arch = int(capability.replace(".", "")) if on_gpu else 0
    ask = Ask(Recipe.parse(recipe), *widths, torch.bfloat16, device, impl=impl, training=True)
    try:
        choice = dispatch.choose(ask, arch)
    except (NotImplementedError, ValueError, TypeError):
        return None
    return choice.forward.impl, choice.backward.impl


def status(found: tuple[str, str] | None, impl: str, capability: str) -> str:
    """What an implementation that is named does."""
    if found is None:
        return DECLINED
    others = [f"{other}, {way}" for way, other in zip(("forward", "backward"), found) if other != impl]
    if impl != "reference" and capability not in VALIDATED:
        return NOT_VALIDATED + (f", {SERVED.format(others[0])}" if others else "")
    return SERVED.format(others[0]) if others else NATIVE


def widths_and_recipes() -> dict[str, dict[str, dict[str, str]]]:
    """By recipe and head_dim, and by card: what runs by default, and the status of each implementation."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for recipe in RECIPES:
        for widths in WIDTHS:
            by_card = found.setdefault(f"{recipe}, head_dim {widths_text(*widths)}", {})
            for capability in CARDS:
                default = runs(recipe, widths, capability, None)
                cells = {DEFAULT: DECLINED if default is None else " / ".join(dict.fromkeys(default))}
                for impl in FAMILIES:
                    cells[impl] = status(runs(recipe, widths, capability, impl), impl, capability)
                by_card[capability] = cells
    return found


def calls() -> dict[str, tuple[dict[str, object], dict[str, object]]]:
    """Forms of a call of 8K tokens in BF16: arguments of `sage_attention`, and sizes other than its defaults."""

    def mask(*shape: int, dtype: torch.dtype = torch.bool, grad: bool = False) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, requires_grad=grad)

    return {
        "no mask": ({}, {}),
        "`is_causal=True`": ({"is_causal": True}, {}),
        "`window=(1023, 0)`": ({"window": (1023, 0)}, {}),
        "key padding, boolean (batch, 1, 1, keys)": ({"attn_mask": mask(1, 1, 1, 8192)}, {}),
        "a boolean mask of elements": ({"attn_mask": mask(1, 1, 8192, 8192)}, {}),
        "an additive mask of elements": ({"attn_mask": mask(1, 1, 8192, 8192, dtype=torch.bfloat16)}, {}),
        "an additive mask that needs a gradient": (
            {"attn_mask": mask(1, 1, 8192, 8192, dtype=torch.bfloat16, grad=True)}, {},
        ),
        "`block_mask=`": ({"block_mask": causal_frames(8, 1024, device="cpu")}, {}),
        "`sinks=`": ({"sinks": mask(16, dtype=torch.float32)}, {}),
        "grouped heads, `enable_gqa=True`": ({"enable_gqa": True}, {"kv_heads": 4}),
        "`return_lse=True`": ({"return_lse": True}, {}),
        "`return_max_logits=True`": ({"return_max_logits": True}, {}),
        "keys and values of other head_dims, 192/128": ({}, {"widths": (192, 128)}),
        "packed sequences, `sage_attention_varlen`": ({"is_causal": True}, {"packed": True}),
        "head_dim 320": ({}, {"widths": (320, 320)}),
        "`dropout_p=0.1`": ({"dropout_p": 0.1}, {}),
        "FP16": ({}, {"dtype": torch.float16}),
        "FP32 without autocast": ({}, {"dtype": torch.float32}),
    }  # fmt: skip


def answer(
    recipe: str,
    options: dict[str, object],
    kv_heads: int = 16,
    widths: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    packed: bool = False,
) -> str:
    """What an H200 does with a form of call that trains."""
    shapes = (16, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1])
    sides = [((8192, heads) if packed else (1, heads, 8192), width) for heads, width in shapes]
    tensors = [torch.empty(*side, width, dtype=dtype, requires_grad=True) for side, width in sides]
    offsets = torch.tensor([0, 4096, 8192], dtype=torch.int32)
    asked, lengths = (explain_varlen, (offsets, offsets, 4096, 4096)) if packed else (explain, ())
    try:
        found = asked(*tensors, *lengths, recipe=recipe, device=TIMED, **options)
    except (NotImplementedError, ValueError, TypeError) as error:
        return f"{DECLINED}, {type(error).__name__}"
    return SERVED.format("torch") if found.forward == "torch" else " / ".join(dict.fromkeys(found[1:3]))


def forms() -> dict[str, dict[str, str]]:
    """By form of call: what an H200 does under "auto" and under a recipe that is named."""
    return {
        name: {recipe: answer(recipe, options, **sizes) for recipe in ("auto", "mixed", "token")}
        for name, (options, sizes) in calls().items()
    }


def matrix() -> dict[str, object]:
    """The content of the file."""
    return {"cards": CARDS, "recipes": widths_and_recipes(), "forms": forms()}


def text(content: dict[str, object]) -> str:
    """JSON, a line a form and card."""
    lines = ["{", f' "cards": {json.dumps(content["cards"])},', ' "recipes": {']
    for form, by_card in content["recipes"].items():
        lines.append(f"  {json.dumps(form)}: {{")
        lines += [f"   {json.dumps(card)}: {json.dumps(cells)}," for card, cells in by_card.items()]
        lines[-1] = lines[-1].removesuffix(",")
        lines.append("  },")
    lines[-1] = "  }"
    lines += [" },", ' "forms": {']
    lines += [f"  {json.dumps(form)}: {json.dumps(cells)}," for form, cells in content["forms"].items()]
    lines[-1] = lines[-1].removesuffix(",")
    return "\n".join([*lines, " }", "}", ""])


def main() -> None:
    """Write the file."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    FILE.write_text(text(matrix()), encoding="utf-8")


if __name__ == "__main__":
    main()
