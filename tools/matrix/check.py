"""Whether one row is right: four calls on poisoned memory, each against FP32, three of them against the emulator."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sagebwd.switches import switches
from tools import fuzz
from tools.matrix import exact
from tools.matrix.forms import Cell

TENSORS = ("o", "lse", "dq", "dk", "dv")
CALLS = 4
"""The first, which describes its launches, and some that run what was described, with other numbers."""
EMULATED = (0, 1, 3)
REFUSALS = (ValueError, TypeError, NotImplementedError)
ARGUMENTS = re.compile(r"\b(query|key|value|attn_mask|block_mask|recipe|impl|head_dim|window|is_causal)\b")

# Largest relative L2 against FP32 of o, lse, dq, dk, dv: about twice what the emulator has at most over all forms, at
# widths of every kind (`python -m tools.matrix --device cpu --recipe token`). BF16 alone rounds by .002 to .004.
BOUNDS = {
    "full": (0.006, 0.001, 0.01, 0.01, 0.006),
    "mixed": (0.025, 0.01, 0.09, 0.09, 0.09),
    "token": (0.03, 0.01, 0.08, 0.05, 0.05),
    "paper": (0.04, 0.01, 0.13, 0.13, 0.13),
}
# Of one channel nothing averages e4m3's rounding out: the emulator's dQ under `mixed` is off by up to .21 in 40 draws.
ONE_CHANNEL = 4
# Gradients of queries that see one key, or several much alike, vanish in exact arithmetic: no error is relative to
# less than this part of what the terms of the difference dP - delta make, as many at random as there are keys.
VANISHING = 0.5


def bounds(recipe: str, head_dim: int) -> tuple[float, ...]:
    """Largest errors of o, lse, dq, dk, dv that are right, of a recipe with changed fields those of the named one."""
    name = recipe.partition("(")[0]
    wider = ONE_CHANNEL if name == "mixed" and head_dim == 1 else 1
    return tuple(bound if tensor in ("o", "lse") else wider * bound for tensor, bound in zip(TENSORS, BOUNDS[name]))


class _Memory:
    """Bytes at an address of the GPU, as a tensor may be made of them."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (size,), "typestr": "|u1", "version": 2,
        }  # fmt: skip


def reserve(device: str) -> None:
    """Let PyTorch's allocator hold blocks of both its pools, so that calls get memory that `poison` has reached."""
    if device.startswith("cuda"):
        small = [torch.empty(2**20, dtype=torch.uint8, device=device) for _ in range(64)]
        large = [torch.empty(2**24, dtype=torch.uint8, device=device) for _ in range(16)]
        del small, large


def poison(device: str) -> None:
    """Fill all memory that PyTorch's allocator holds and has not given out with 0xFF, NaN in every floating type."""
    if not device.startswith("cuda"):
        return
    for segment in torch.cuda.memory_snapshot():
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                torch.as_tensor(_Memory(address, block["size"]), device=device).fill_(255)
            address += block["size"]


def outcome(cell: Cell, inputs: list[Tensor], impl: str | None, device: str) -> list[Tensor]:
    """Of one call of the public functions on poisoned memory: o, lse as it is, and the three gradients."""
    *leaves, do = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]
    with switches(deterministic=cell.shape.deterministic):
        poison(device)
        o, lse = fuzz.attended(cell, leaves, impl)
        poison(device)
        gradients = torch.autograd.grad(o, leaves, do)
    return [o.detach(), lse.detach(), *gradients]


def errors(cell: Cell, inputs: list[Tensor], actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Relative L2 of each tensor, infinite where one is not finite or lse is -inf at other places."""
    q, k, v, do = (x.float().square().mean().sqrt().item() if x.numel() else 0.0 for x in inputs)
    natural = VANISHING * cell.scale * (cell.value_dim / max(1, *cell.lengths_k)) ** 0.5 * do * v
    terms = {"lse": 0.3, "dq": natural * k, "dk": natural * q}
    found = []
    for name, x, y in zip(TENSORS, actual, expected):
        if name == "lse":
            if not torch.equal(x == -math.inf, y == -math.inf):
                found.append(math.inf)
                continue
            x, y = (a.masked_fill(y == -math.inf, 0) for a in (x, y))
        if x.shape != y.shape or not torch.isfinite(x).all():
            found.append(math.inf)
            continue
        error, norm = (x.double() - y.double()).norm().item(), y.double().norm().item()
        norm = max(norm, terms.get(name, 0.0) * math.sqrt(y.numel()))
        found.append(error / norm if norm else (math.inf if error else 0.0))
    return found


def _unseen(cell: Cell, actual: list[Tensor], visible: Tensor) -> str | None:
    """What rows that see no key give beside zeros."""
    o, _, dq, *_ = actual
    if cell.layout == "packed":
        o, dq = o.transpose(0, 1)[None], dq.transpose(0, 1)[None]
    unseen = ~visible.any(-1).expand(o.shape[:3])
    for name, x in (("o", o), ("dq", dq)):
        if x[unseen].any():
            return f"{name}: rows that see no key are not zeros"
    return None


def check(cell: Cell, impl: str | None, device: str) -> dict[str, object]:
    """The row: status "ok", "refused" or "wrong", the largest error against FP32 of each tensor, and a message."""
    return refusals_told(_checked, cell, impl, device)


def refusals_told(
    checked: Callable[[Cell, str | None, str], dict[str, object]], cell: Cell, impl: str | None, device: str
) -> dict[str, object]:
    """``checked(cell, impl, device)``, or the row of a refusal: one that is in place names the argument."""
    try:
        return checked(cell, impl, device)
    except REFUSALS as error:
        text = f"{type(error).__name__}: {error}"
        if not ARGUMENTS.search(str(error)):
            return {"status": "wrong", "message": f"the refusal names no argument: {text}"}
        if not cell.may_be_refused(device, impl):
            return {"status": "wrong", "message": f"refused: {text}"}
        return {"status": "refused", "message": text}


def row(problem: str | None, errors: list[float]) -> dict[str, object]:
    """Of a call that was made."""
    numbers = [float(f"{x:.3g}") if math.isfinite(x) else None for x in errors]
    found = {"status": "ok" if problem is None else "wrong", "errors": numbers}
    return found if problem is None else found | {"message": problem}


def _checked(cell: Cell, impl: str | None, device: str) -> dict[str, object]:
    visible, bias = exact.visible_and_bias(cell, device)
    clean, actual, largest, problem = [], [], [0.0] * len(TENSORS), None
    isolated = cell.shape.spoilt in ("sequence", "head")  # other forms, with NaN beside
    for call in range(CALLS):
        drawn = replace(cell, seed=cell.seed + call * 1_000_000)
        inputs = drawn.inputs(device)
        clean.append(inputs)
        actual.append(outcome(drawn, drawn.with_spoilt(inputs), impl, device))
        if cell.shape.deterministic:
            again = outcome(drawn, inputs, impl, device)
            if not all(map(torch.equal, actual[-1], again)):
                problem = problem or f"call {call + 1}: other bits for the same inputs"
    name = cell.emulated_as(device, impl).recipe
    for call, (inputs, results) in enumerate(zip(clean, actual)):
        expected = exact.outcome(cell, inputs, visible, bias)
        found = errors(cell, inputs, cell.kept(results), cell.kept(expected))
        largest = [max(pair) for pair in zip(largest, found)]
        for tensor, error, bound in zip(TENSORS, found, bounds(name, cell.head_dim)):
            if not error <= bound:
                problem = problem or f"call {call + 1}: {tensor}: relative L2 {error:.3g} over {bound}"
        if not isolated:
            problem = problem or _unseen(cell, results, visible)
    if not isolated:
        problem = problem or _emulator_says(cell.emulated_as(device, impl), clean, actual)
    return row(problem, largest)


def _emulator_says(cell: Cell, clean: list[list[Tensor]], actual: list[list[Tensor]]) -> str | None:
    """What breaks the conformance rule; each call's draw serves the others too."""
    pairs = {call: fuzz.emulated(cell, clean[call]) for call in EMULATED}
    for call in EMULATED:
        results = list(actual[call])
        results[1] = results[1].masked_fill(results[1] == -math.inf, 0)
        others = [pairs[other] for other in EMULATED if other != call]
        problem = fuzz.judge(cell, clean[call], results, [pairs[call], *others])
        if problem is not None:
            return f"call {call + 1}: emulator: {problem}"
    return None
