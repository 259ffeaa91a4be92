"""A plan as autograd runs it, outside of torch.compile."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from sagebwd.call import Prologue
from sagebwd.derivatives import once_differentiable, savable
from sagebwd.kernels.runtime.device import device_of

_AS_IT_IS = nullcontext()


class SageAttention(torch.autograd.Function):
    """A plan and its derivative, by whose name profilers call them; prologue: the fields of a `Prologue`, or none."""

    @staticmethod
    def forward(ctx, plan, mask, with_lse, q, k, v, sinks, key_mask, cu_seqlens_q, cu_seqlens_k, *prologue):
        """`Plan.forward`; o alone but ``with_lse``: autograd wraps every output, and again when it is unpacked."""
        masks, before = (key_mask, mask, cu_seqlens_q, cu_seqlens_k), Prologue(*prologue) if prologue else None
        with device_of(q):
            o, lse, workspace = plan.forward(q, k, v, sinks, *masks, before, True)
        keep_q, keep_k = plan.keeps
        ctx.plan, ctx.settings, ctx.sinks_dtype = plan, prologue[:2], None if sinks is None else sinks.dtype
        ctx.weights = len(prologue[2:])
        # a mask that the user has read stays as it is; of others autograd watches what backward reads for writes
        ctx.mask, watched = (mask, [None]) if mask is None or mask.is_kept else mask.without_watched()
        ctx.set_materialize_grads(False)
        inputs = q if keep_q else None, k if keep_k else None, v
        rest = key_mask, cu_seqlens_q, cu_seqlens_k, *prologue[2:], *watched
        ctx.save_for_backward(*map(savable, inputs), o, lse, workspace, *map(savable, rest))
        if not with_lse:
            return o
        ctx.mark_non_differentiable(workspace)
        return o, lse, workspace

    @staticmethod
    def backward(ctx, do, dlse=None, _=None):
        """`Plan.backward`."""
        if do is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, o, lse, workspace, key_mask, cu_seqlens_q, cu_seqlens_k, *tensors = ctx.saved_tensors
        tensors, watched = tensors[: ctx.weights], tensors[ctx.weights :]
        mask = ctx.mask if watched[0] is None else ctx.mask.with_watched(watched)
        do = torch.zeros_like(o) if do is None else do
        prologue = Prologue(*ctx.settings, *tensors) if ctx.settings else None
        create_graph = torch.is_grad_enabled()
        with torch.no_grad() if create_graph else _AS_IT_IS, device_of(v):
            masks = key_mask, mask, cu_seqlens_q, cu_seqlens_k
            dq, dk, dv, *weights, dsinks = ctx.plan.backward(do, dlse, q, k, v, o, lse, workspace, *masks, prologue)
        weights = [None if x is None else dx.to(x.dtype) for x, dx in zip(tensors, weights)]
        gradients = [dq, dk, dv, dsinks.to(ctx.sinks_dtype) if ctx.needs_input_grad[6] else None, *weights]
        if create_graph:
            gradients = once_differentiable((o, do, dlse), gradients)
        rest = (None, None, *gradients[4:], *(None,) * 4) if ctx.settings else ()
        return None, None, None, *gradients[:4], None, None, None, *rest
