"""A plan as autograd runs it, outside of torch.compile."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.call import Prologue
from sagebwd.derivatives import once_differentiable, refuse_batched, savable
from sagebwd.kernels.runtime.device import device_of

_AS_IT_IS = nullcontext()


class Tensors(NamedTuple):
    """What autograd sees of a call, in the order in which it is given them and gives gradients back.

    The last six are those of a `Prologue`.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    sinks: Tensor | None
    key_mask: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    q_cos: Tensor | None = None
    q_sin: Tensor | None = None
    k_cos: Tensor | None = None
    k_sin: Tensor | None = None


class SageAttention(torch.autograd.Function):
    """A plan and its derivative, by whose name profilers call them; before: what a `Prologue` has beside tensors."""

    @staticmethod
    def forward(ctx, plan, mask, with_lse, before, *tensors):
        """`Plan.forward`; o alone but ``with_lse``: autograd wraps every output, and again when it is unpacked."""
        x = Tensors(*tensors)
        offsets, prologue = (x.cu_seqlens_q, x.cu_seqlens_k), Prologue(*before, *tensors[7:]) if before else None
        with device_of(x.q):
            outputs = plan.forward(x.q, x.k, x.v, x.sinks, x.key_mask, mask, *offsets, prologue, True)
        keep_q, keep_k = plan.keeps
        ctx.plan, ctx.before = plan, before
        # a mask that the user has read stays as it is; of others autograd watches what backward reads for writes
        ctx.mask, watched = (mask, ()) if mask is None or mask.is_kept else mask.without_watched()
        ctx.set_materialize_grads(False)
        rows = x.q if keep_q else None, x.k if keep_k else None, x.v
        # in the operator's order, which may compute a checkpoint's forward again; of sinks the dtype alone is read
        ctx.save_for_backward(*savable(*rows, *outputs, *tensors[3:], *watched))
        if not with_lse:
            return outputs[0]
        ctx.mark_non_differentiable(outputs[2])
        return outputs

    @staticmethod
    def backward(ctx, do, dlse=None, _=None):
        """`Plan.backward`."""
        if do is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        refuse_batched(do, dlse)
        q, k, v, o, lse, workspace, *rest = ctx.saved_tensors
        count = len(ctx.needs_input_grad) - 4
        x, watched = Tensors(q, k, v, *rest[: count - 3]), rest[count - 3 :]
        mask = ctx.mask.with_watched(watched) if watched and watched[0] is not None else ctx.mask
        do = torch.zeros_like(o) if do is None else do
        prologue = Prologue(*ctx.before, *x[7:]) if ctx.before else None
        create_graph = torch.is_grad_enabled()
        with torch.no_grad() if create_graph else _AS_IT_IS, device_of(x.v):
            masks = x.key_mask, mask, x.cu_seqlens_q, x.cu_seqlens_k
            found = ctx.plan.backward(do, dlse, x.q, x.k, x.v, o, lse, workspace, *masks, prologue)
        dq, dk, dv, *weights, dsinks = found
        gradients = Tensors(dq, dk, dv, dsinks.to(x.sinks.dtype) if ctx.needs_input_grad[7] else None)
        if weights:
            gradients = gradients._replace(
                q_weight=_like(weights[0], x.q_weight), k_weight=_like(weights[1], x.k_weight)
            )
        if create_graph:
            gradients = once_differentiable((o, do, dlse), gradients)
        return None, None, None, None, *gradients[:count]


def _like(gradient: Tensor | None, weight: Tensor | None) -> Tensor | None:
    return None if weight is None else gradient.to(weight.dtype)
