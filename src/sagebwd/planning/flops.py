"""What `torch.utils.flop_counter` counts of a call: products of all queries and keys, hidden or not, as of SDPA."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

COUNTER = "torch.utils.flop_counter"


def register() -> None:
    """Give the formulas to torch's counter where it is imported, which imports triton, and to those that count now."""
    if COUNTER not in sys.modules:
        return
    counter = sys.modules[COUNTER]
    for name, formula in FORMULAS.items():
        operator = getattr(torch.ops.sagebwd, name)
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator, get_raw=True)(formula)
        for mode in _get_current_dispatch_mode_stack():
            if hasattr(getattr(mode, "counter", None), "flop_registry"):  # a copy of that from when it was made
                mode.counter.flop_registry.setdefault(operator, formula)


def _forward(given: dict[str, Any]) -> int:
    """Q K^T and P V."""
    q, v = given["q"], given["v"]
    return 2 * _pairs(q, v, given) * (q.shape[-1] + v.shape[-1])


def _backward(given: dict[str, Any]) -> int:
    """Q K^T again, dP, dV, dQ and dK."""
    o, v = given["o"], given["v"]
    return 2 * _pairs(o, v, given) * (3 * given.get("head_dim", o.shape[-1]) + 2 * v.shape[-1])


def _pairs(q: Tensor, k: Tensor, given: dict[str, Any]) -> int:
    """Pairs of a query and a key, of all heads, of tensors with the rows of q and k."""
    offsets, longest = ([given[f"{name}_{side}"] for side in "qk"] for name in ("cu_seqlens", "max_seqlen"))
    if offsets[0] is None:
        return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    queries, keys = map(sys.modules[COUNTER]._offsets_to_lengths, offsets, longest)
    return q.shape[1] * sum(n * m for n, m in zip(queries, keys))


def _formula_of(name: str, products: Callable[[dict[str, Any]], int]) -> Callable[..., int]:
    """What the counter calls with an operator's arguments; products: of these by name."""

    def formula(*given: object, out_val: object = None, **by_name: object) -> int:
        names = [argument.name for argument in getattr(torch.ops.sagebwd, name).default._schema.arguments]
        return products(dict(zip(names, given)) | by_name)

    return formula


FORMULAS = {
    name: _formula_of(name, products)
    for operator in ("attention", "qk_norm_rope_attention")  # whose norm and rotary embedding count nothing
    for name, products in ((operator, _forward), (f"{operator}_backward", _backward))
}
