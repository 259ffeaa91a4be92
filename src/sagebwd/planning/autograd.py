"""A plan as autograd runs it, outside of torch.compile."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from sagebwd.call import Prologue
from sagebwd.derivatives import once_differentiable, refuse_batched, savable
from sagebwd.kernels.runtime.device import device_of

_AS_IT_IS = nullcontext()
# Arguments of `SageAttention` before those of the prologue.
_OWN = 11


class SageAttention(torch.autograd.Function):
    """A plan and its derivative, by whose name profilers call them.

    before, of_prologue: the fields of a `Prologue`, but for tensors and these.
    """

    @staticmethod
    def forward(
        ctx, plan, mask, with_lse, before, q, k, v, sinks, key_mask, cu_seqlens_q, cu_seqlens_k, *of_prologue
    ):  # fmt: skip
        """`Plan.forward`; o alone but ``with_lse``: autograd wraps every output, and again when it is unpacked."""
        prologue = Prologue(*before, *of_prologue) if before else None
        with device_of(q):
            outputs = plan.forward(q, k, v, sinks, key_mask, mask, cu_seqlens_q, cu_seqlens_k, prologue, True)
        keep_q, keep_k = plan.keeps
        ctx.plan, ctx.before = plan, before
        # a mask that the user has read stays as it is; of others autograd watches what backward reads for writes
        ctx.mask, watched = (mask, ()) if mask is None or mask.is_kept else mask.without_watched()
        ctx.set_materialize_grads(False)
        rows = q if keep_q else None, k if keep_k else None, v
        # in the operator's order, which may compute a checkpoint's forward again; of sinks the dtype alone is read
        others = sinks, key_mask, cu_seqlens_q, cu_seqlens_k
        ctx.save_for_backward(*savable(*rows, *outputs, *others, *of_prologue, *watched))
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
        q, k, v, o, lse, workspace, sinks, key_mask, cu_seqlens_q, cu_seqlens_k, *rest = ctx.saved_tensors
        count = len(ctx.needs_input_grad) - _OWN
        of_prologue, watched = rest[:count], rest[count:]
        mask = ctx.mask.with_watched(watched) if watched and watched[0] is not None else ctx.mask
        do = torch.zeros_like(o) if do is None else do
        prologue = Prologue(*ctx.before, *of_prologue) if ctx.before else None
        create_graph = torch.is_grad_enabled()
        with torch.no_grad() if create_graph else _AS_IT_IS, device_of(v):
            masks = key_mask, mask, cu_seqlens_q, cu_seqlens_k
            dq, dk, dv, *of_weights, dsinks = ctx.plan.backward(do, dlse, q, k, v, o, lse, workspace, *masks, prologue)
        dsinks = dsinks.to(sinks.dtype) if ctx.needs_input_grad[7] else None
        of_weights = [None if weight is None else x.to(weight.dtype) for x, weight in zip(of_weights, of_prologue)]
        gradients = [dq, dk, dv, dsinks, None, None, None, *of_weights, *(None,) * (count - len(of_weights))]
        if create_graph:
            gradients = once_differentiable((o, do, dlse), gradients)
        return None, None, None, None, *gradients
