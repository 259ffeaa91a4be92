"""Calls whose grids or tensors are large: more heads times batch than a grid's second axis, over 2^31 elements.

Slices are compared with FP32: nothing of one sequence or head reaches another, and of a window what lies further back
than it does not matter.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sagebwd import sage_attention, sage_attention_varlen
from tools.matrix import check as checks
from tools.matrix import exact
from tools.matrix.forms import Cell, Form, cell_of

# 4097 times 16 heads and 66000 sequences are more than 65535; 16 heads of 128 over 2**20 tokens are 2**31 elements.
BATCH, HEADS, TOKENS = 4097, 16, 16
SEQUENCES, LENGTH = 66000, 4
LONG, WINDOW, SEEN = 2**20 + 1000, 64, 512
FORMS = {
    "many-heads": Form((TOKENS,), heads=HEADS, kv_heads=HEADS, is_causal=True),
    "many-sequences": Form((LENGTH,), layout="packed", is_causal=True),
    "over-2^31": Form((LONG,), heads=HEADS, kv_heads=1, is_causal=True, window=(WINDOW, -1)),
}


def cells() -> list[Cell]:
    """The rows of this file."""
    found = [cell_of(FORMS, 128, 128, "over-2^31", recipe, "bfloat16") for recipe in ("auto", "token")]
    for head_dim in (64, 72, 128):
        for form in ("many-heads", "many-sequences"):
            found.append(cell_of(FORMS, head_dim, head_dim, form, "auto", "bfloat16"))
    return found


def check(cell: Cell, impl: str | None, device: str) -> dict[str, object]:
    """As `tools.matrix.check.check`; two calls."""
    return checks.refusals_told(_checked, cell, impl, device)


def _checked(cell: Cell, impl: str | None, device: str) -> dict[str, object]:
    name, problem, largest = cell.emulated_as(device, impl).recipe, None, [0.0] * len(checks.TENSORS)
    for call in range(2):
        for where, small, actual, expected in _slices(cell, impl, device, seed=call):
            found = checks.errors(small, expected[0], actual, expected[1])
            largest = [max(pair) for pair in zip(largest, found)]
            for tensor, error, bound in zip(checks.TENSORS, found, checks.BOUNDS[name]):
                if not error <= bound:
                    problem = problem or f"call {call + 1}: {where}: {tensor}: relative L2 {error:.3g} over {bound}"
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    return checks.row(problem, largest)


def _slices(cell: Cell, impl: str | None, device: str, seed: int) -> list[tuple]:
    """(where, a small cell, its o, lse, dq, dk, dv of the large call, (inputs, what they are)) of first and last."""
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        x = torch.empty(shape, dtype=cell.dtype, device=device).normal_(generator=generator)
        return x if cell.layout == "packed" else x.transpose(1, 2)

    shape, tokens, head_dim = cell.shape, cell.lengths_q[0], cell.head_dim
    if cell.layout == "packed":
        sizes = [(SEQUENCES * tokens, heads, head_dim) for heads in (cell.heads, cell.kv_heads)]
    else:
        batch = BATCH if cell.form == "many-heads" else 1
        sizes = [(batch, tokens, heads, head_dim) for heads in (cell.heads, cell.kv_heads)]
    q, k, v, do = (drawn(*sizes[number]) for number in (0, 1, 1, 0))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    shared = {
        "is_causal": True, "window": cell.window, "recipe": cell.recipe, "impl": impl, "return_lse": True,
    }  # fmt: skip
    checks.poison(device)
    if cell.layout == "packed":
        offsets = torch.arange(0, (SEQUENCES + 1) * tokens, tokens, device=device, dtype=torch.int32)
        o, lse = sage_attention_varlen(q, k, v, offsets, offsets, tokens, tokens, **shared)
    else:
        o, lse = sage_attention(q, k, v, enable_gqa=True, **shared)
    checks.poison(device)
    gradients = torch.autograd.grad(o, leaves, do)
    results = [o.detach(), lse.detach(), *gradients]
    found = []
    for where in ("first", "last"):
        if cell.form == "over-2^31":
            found.append((where, *_of_a_window(cell, where, (q, k, v, do), results)))
            continue
        if cell.layout == "packed":  # sequences as a batch
            part = slice(0, 8 * tokens) if where == "first" else slice(-8 * tokens, None)
            inputs = [x[part].detach().unflatten(0, (8, tokens)).transpose(1, 2) for x in (q, k, v, do)]
            o, lse, *gradients = results
            lse = lse[:, part].unflatten(1, (8, tokens)).transpose(0, 1)
            o, *gradients = (x[part].unflatten(0, (8, tokens)).transpose(1, 2) for x in (o, *gradients))
            outputs = [o, lse, *gradients]
        else:
            part = slice(0, 8) if where == "first" else slice(-8, None)
            inputs = [x[part].detach() for x in (q, k, v, do)]
            outputs = [x[part] for x in results]
        inputs, outputs = ([x.clone() for x in part] for part in (inputs, outputs))  # which lets go of the large ones
        visible = exact.band(*[torch.arange(tokens)] * 2, shape.is_causal, None).to(device)[None, None]
        small = replace(cell, lengths_q=(tokens,), lengths_k=(tokens,), layout="dense")
        found.append((where, small, outputs, (inputs, exact.attention(*inputs, cell.scale, visible))))
    return found


def _of_a_window(cell: Cell, where: str, inputs: tuple[Tensor, ...], results: list[Tensor]) -> tuple:
    """The first or last tokens; of what lies further than the window at their other end, nothing is compared."""
    part = slice(0, SEEN) if where == "first" else slice(-SEEN, None)
    # queries WINDOW and more from the cut see all they see, and keys there are seen by all that see them
    whole = slice(0, SEEN - WINDOW) if where == "first" else slice(WINDOW, None)
    local = [x[:, :, part].detach().clone() for x in inputs]
    visible = exact.band(*[torch.arange(SEEN)] * 2, cell.is_causal, cell.window).to(local[0].device)[None, None]
    small = replace(cell, lengths_q=(SEEN,), lengths_k=(WINDOW,))
    expected = [x[:, :, whole] for x in exact.attention(*local, cell.scale, visible)]
    actual = [x[:, :, part][:, :, whole].clone() for x in results]
    assert math.prod(inputs[0].shape) > 2**31
    return small, actual, (local, expected)
