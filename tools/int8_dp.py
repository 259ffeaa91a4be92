"""dP in INT8 on a GPU: `python -m tools.int8_dp errors`, and `times`.

``errors`` holds the portable kernels under `token(dp=int8)`, or others by a recipe with dp=int8, to its emulator
(`benchmarks.conformance`), over forms of masks, lengths and widths, and prints what breaks the rule, or the
distance of dQ, dK and dV from the emulator in FP32. ``times`` prints forward + backward, and backward alone, of the
recipe with 16-bit and with INT8 dP, everything included: medians of interleaved rounds, batch x tokens = 16384, heads
= 2048 / head_dim. Other kernels, at head_dim 65 to 128: ``--impl mma_sync``.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable
from functools import partial

import torch

from sagebwd import sage_attention
from sagebwd.cli.timer import time_interleaved
from sagebwd.recipe import INT8, Recipe
from sagebwd.reference.metrics import relative_l2
from tests.attention_case import AttentionCase

TOKENS = 16384
WIDTHS = ("128", "64", "256", "192/128", "96", "192")
FORMS = {
    "causal, grouped, dlse": AttentionCase(
        heads=4, kv_heads=2, tokens_q=333, tokens_k=333, is_causal=True, with_dlse=True
    ),
    "full, odd lengths": AttentionCase(tokens_q=301, tokens_k=517, batch=2),
    "whole blocks": AttentionCase(tokens_q=512, tokens_k=512, heads=4, kv_heads=4, is_causal=True),
    "window": AttentionCase(tokens_q=700, tokens_k=700, window=(100, 0)),
    "hidden keys": AttentionCase(tokens_q=300, tokens_k=600, batch=2, masked=True),
    "packed": AttentionCase(lengths_q=[5, 300, 70], lengths_k=[5, 280, 129], heads=4, kv_heads=2, is_causal=True),
    "sink": AttentionCase(tokens_q=640, tokens_k=640, sink=12.0, is_causal=True),
    "FP16": AttentionCase(tokens_q=200, tokens_k=200, dtype=torch.float16),
    "documents": AttentionCase(mask="document", tokens_q=700, tokens_k=700, heads=4, kv_heads=2),
    "deterministic": AttentionCase(tokens_q=700, tokens_k=700, is_causal=True, deterministic=True),
}


def recipes_of(name: str) -> tuple[str, str]:
    """A recipe with 16-bit and with INT8 dP."""
    return name, str(Recipe.parse(name).replace(dp=INT8))


def of_width(text: str) -> tuple[int, int]:
    """head_dim and value's, of "128" or "192/128"."""
    head_dim, _, value_dim = text.partition("/")
    return int(head_dim), int(value_dim or head_dim)


def errors(widths: Iterable[str], recipe: str = "token", impl: str = "triton") -> int:
    """Print a line a form and width; how many break the rule."""
    broken = 0
    for width in widths:
        head_dim, value_dim = of_width(width)
        for name, form in FORMS.items():
            changes = {"recipe": recipes_of(recipe)[1], "head_dim": head_dim, "value_dim": value_dim, "device": "cuda"}
            call = dataclasses.replace(form, **changes)
            inputs = call.inputs()
            try:
                found, said = call.run(impl, inputs), "ok"
                wanted = call.run("reference", inputs)
                distances = " / ".join(f"{relative_l2(found[x], wanted[x]):.4f}" for x in ("dq", "dk", "dv"))
                call.check_outputs(inputs, found, ("o", "lse", "dq", "dk", "dv"))
            except (AssertionError, RuntimeError, NotImplementedError) as error:
                broken, said = broken + 1, f"BROKEN {str(error)[:300]}"
                distances = distances if isinstance(error, AssertionError) else ""
            print(f"{width:8} {name:24} {distances:26} {said}", flush=True)
    return broken


def runs_of(
    shape: tuple[int, int, int], value_dim: int, is_causal: bool, recipe: str = "token", impl: str = "triton"
) -> dict[str, Callable[[], object]]:
    """Both directions and backward of each recipe, by name; shape: batch, tokens and head_dim."""
    batch, tokens, head_dim = shape
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.randn(batch, 2048 // head_dim, tokens, dim, generator=generator, device="cuda").bfloat16()
        for dim in (head_dim, head_dim, value_dim, value_dim)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    runs: dict[str, Callable[[], object]] = {}
    for name in recipes_of(recipe):
        forward = partial(sage_attention, *leaves, is_causal=is_causal, recipe=name, impl=impl)
        backward = partial(torch.autograd.grad, forward(), leaves, do, retain_graph=True)
        runs[f"{name} both"] = lambda forward=forward: torch.autograd.grad(forward(), leaves, do)
        runs[f"{name} backward"] = backward
    return runs


def times(
    widths: Iterable[str], lengths: Iterable[int], rounds: int, recipe: str = "token", impl: str = "triton"
) -> None:
    """Print a line a width, mask and length: milliseconds with 16-bit dP, and how many times as fast INT8 dP is."""
    for width in widths:
        head_dim, value_dim = of_width(width)
        for is_causal in (True, False):
            for tokens in lengths:
                runs = runs_of((TOKENS // tokens, tokens, head_dim), value_dim, is_causal, recipe, impl)
                found = {name: ms for name, (ms, _) in time_interleaved(runs, "cuda", rounds).items()}
                cells = []
                for way in ("both", "backward"):
                    before, after = (found[f"{name} {way}"] for name in recipes_of(recipe))
                    cells.append(f"{way} {before:.3f} -> {after:.3f} ms, {before / after:.3f}")
                print(f"{width:8} {'causal' if is_causal else 'full':6} {tokens:6}  {'; '.join(cells)}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("errors", "times"))
    parser.add_argument("--width", action="append", help="head_dim, or head_dim/value's; all of them if not given")
    parser.add_argument("--tokens", type=int, action="append", help="of a sequence; 8192 and 16384 if not given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recipe", default="token")
    parser.add_argument("--impl", default="triton")
    given = parser.parse_args(arguments)
    widths = given.width or WIDTHS
    if given.what == "errors":
        return min(errors(widths, given.recipe, given.impl), 1)
    times(widths, given.tokens or (8192, TOKENS), given.rounds, given.recipe, given.impl)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
