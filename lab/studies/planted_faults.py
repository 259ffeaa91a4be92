"""Faults of attention, planted on what a call gives: what the assay has to tell from the same call without them.

A call is causal, of q (batch, heads, queries, head_dim) and of as many or fewer heads of k and v. What a fault takes
from a gradient, or adds to it, is computed in FP32 of the call's own tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LOST = 16
"""Of so many blocks of queries the last is lost."""
SMALL, WRONG_DELTA = 0.92, 1.05


class Call(NamedTuple):
    """A call's tensors in FP32; do is the gradient of its output, None in the forward."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    do: Tensor | None = None

    def spread(self, x: Tensor) -> Tensor:
        """Heads of keys, one for each of q's."""
        return x.repeat_interleave(self.q.shape[1] // x.shape[1], 1)

    def shared(self, x: Tensor) -> Tensor:
        """Sums over the heads of q that share one of keys."""
        return x.unflatten(1, (self.k.shape[1], -1)).sum(2)

    def parts(self) -> tuple[Tensor, Tensor]:
        """P, and dP = dO V^T."""
        hidden = torch.ones(self.q.shape[2], self.k.shape[2], dtype=torch.bool, device=self.q.device).triu(1)
        scores = (self.q @ self.spread(self.k).mT * self.scale).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1), self.do @ self.spread(self.v).mT


Gradients = tuple[Tensor, Tensor, Tensor]


def lost_dk(call: Call, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
    """dK lacks what one block of queries in 16 gives it, the last."""
    p, dp = call.parts()
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * call.scale
    first = ds.shape[2] - max(1, ds.shape[2] // LOST)
    return dq, dk - call.shared(ds[:, :, first:].mT @ call.q[:, :, first:]), dv


def small_dv(call: Call, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
    """dV is 8% too small."""
    return dq, dk, dv * SMALL


def wrong_delta(call: Call, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
    """delta = sum_j P_ij dP_ij is 5% too large."""
    p, dp = call.parts()
    ds = -p * (p * dp).sum(-1, keepdim=True) * (WRONG_DELTA - 1) * call.scale
    return dq + ds @ call.spread(call.k), dk + call.shared(ds.mT @ call.q), dv


def short_mean(call: Call, o: Tensor) -> Tensor:
    """V's mean, which is taken off before the product and given back after it, lacks its last row when given back."""
    return o - call.spread(call.v[:, :, -1:] / call.v.shape[2])


OF_GRADIENTS: dict[str, Callable[..., Gradients]] = {
    "dK of one block in 16 lost": lost_dk,
    "dV 8% small": small_dv,
    "delta 5% large": wrong_delta,
}
OF_OUTPUTS: dict[str, Callable[[Call, Tensor], Tensor]] = {"a mean off by one row": short_mean}
FAULTS = (*OF_GRADIENTS, *OF_OUTPUTS)


class _Planted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, attention, scale, fault):
        with torch.enable_grad():
            ctx.leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            ctx.o = attention(*ctx.leaves)
        ctx.scale, ctx.fault = scale, fault
        o = ctx.o.detach()
        if fault in OF_OUTPUTS:
            o = OF_OUTPUTS[fault](Call(*(x.float() for x in (q, k, v)), scale), o.float()).to(o.dtype)
        return o

    @staticmethod
    def backward(ctx, do):
        found = torch.autograd.grad(ctx.o, ctx.leaves, do)
        if ctx.fault in OF_GRADIENTS:
            q, k, v = (x.detach().float() for x in ctx.leaves)
            wrong = OF_GRADIENTS[ctx.fault](Call(q, k, v, ctx.scale, do.float()), *(x.float() for x in found))
            found = [x.to(own.dtype) for x, own in zip(wrong, found)]
        return *found, None, None, None


def planted(
    fault: str, attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
) -> Tensor:
    """``attention(q, k, v)`` with one of `FAULTS` in its output or in its gradients."""
    return _Planted.apply(q, k, v, attention, scale, fault)
