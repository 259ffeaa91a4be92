"""What `torch.utils.flop_counter` counts of a call: products of all queries and keys, hidden or not, as of SDPA."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

COUNTER = "torch.utils.flop_counter"


def register() -> None:
    """Give the formulas to torch's counter where it is imported, which imports triton, and to those that count now."""
    if COUNTER not in sys.modules:
        return
    counter = sys.modules[COUNTER]
    for operator, formula in (
        (torch.ops.sagebwd.attention, _forward),
        (torch.ops.sagebwd.attention_backward, _backward),
        (torch.ops.sagebwd.qk_norm_rope_attention, _forward_behind_a_prologue),
        (torch.ops.sagebwd.qk_norm_rope_attention_backward, _backward_behind_a_prologue),
    ):
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator, get_raw=True)(formula)
        for mode in _get_current_dispatch_mode_stack():
            if hasattr(getattr(mode, "counter", None), "flop_registry"):  # a copy of that from when it was made
                mode.counter.flop_registry.setdefault(operator, formula)


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: object, out_val: object = None) -> int:
    """Q K^T and P V; rest: of `sagebwd.ops.attention`, sinks first."""
    return 2 * _pairs(q, v, rest[5:7], rest[7:9]) * (q.shape[-1] + v.shape[-1])


def _backward(
    do: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor, o: Tensor, lse: Tensor,
    workspace: Tensor, *rest: object, out_val: object = None,
) -> int:  # fmt: skip
    """Q K^T again, dP, dV, dQ and dK; rest: of `sagebwd.ops.attention_backward`, sinks first."""
    return 2 * _pairs(o, v, rest[5:7], rest[8:10]) * (3 * rest[7] + 2 * v.shape[-1])


def _forward_behind_a_prologue(q: Tensor, k: Tensor, v: Tensor, *rest: object, out_val: object = None) -> int:
    """The same where norm and rotary embedding, which count nothing, are within."""
    offsets, longest = rest[6:8], rest[8:10]
    return 2 * _pairs(q, v, offsets, longest) * (q.shape[-1] + v.shape[-1])


def _backward_behind_a_prologue(
    do: Tensor, q: Tensor | None, k: Tensor | None, v: Tensor, o: Tensor, lse: Tensor, workspace: Tensor,
    *rest: object, out_val: object = None,
) -> int:  # fmt: skip
    """The same where norm and rotary embedding are within."""
    offsets, longest = rest[6:8], rest[8:10]
    return 2 * _pairs(o, v, offsets, longest) * (3 * o.shape[-1] + 2 * v.shape[-1])


def _pairs(q: Tensor, k: Tensor, offsets: tuple[Tensor | None, Tensor | None], longest: tuple[int, int]) -> int:
    """Pairs of a query and a key, of all heads, of tensors with the rows of q and k."""
    if offsets[0] is None:
        return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    queries, keys = map(sys.modules[COUNTER]._offsets_to_lengths, offsets, longest)
    return q.shape[1] * sum(n * m for n, m in zip(queries, keys))
