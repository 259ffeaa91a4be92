"""The operators of attention with a prologue, as torch.compile and modes of torch see them: schema, shapes, autograd.

``sagebwd::qk_norm_rope_attention`` and its backward run plans (`sagebwd.planning`) whose call has norm and rotary
embedding of Q and K within (`sagebwd.call.Prologue`); `sagebwd.norm_rope_plan` says which calls they are for. Beside O
they give what `sagebwd.ops` gives, and keep as much as the same call does outside of torch.compile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd import checks, dispatch
from sagebwd.cache import PLANS, layout_of
from sagebwd.call import Call, Prologue, empty_gradients, empty_like_rows
from sagebwd.derivatives import once_differentiable, savable
from sagebwd.kernels.runtime.device import device_of
from sagebwd.ops import LIBRARY, differentiable, operator, outputs_like, parsed
from sagebwd.planning.plan import Plan


@operator
def qk_norm_rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_cos: Tensor | None,
    q_sin: Tensor | None,
    k_cos: Tensor | None,
    k_sin: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
    eps: float | None,
    interleaved: bool,
    recipe: str,
    impl: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """O, lse of the smoothed scores, and the workspace, of q and k before their norm and rotation.

    Shapes: as of `sagebwd.call`, and of its `Prologue`. impl is a `sagebwd.dispatch.Choice.name`.
    """
    checks.refuse_divided()  # what was compiled may run where the sequence is divided among processes
    tensors = q_weight, k_weight, q_cos, q_sin, k_cos, k_sin
    offsets, prologue = (cu_seqlens_q, cu_seqlens_k), Prologue(eps, interleaved, *tensors)
    numbers = max_seqlen_q, max_seqlen_k, is_causal, window_left, window_right, scale
    settings = *numbers, recipe, impl, deterministic
    plan = _planned("forward of a prologue", (q, k, v), q, k, offsets, prologue, settings)
    with device_of(q):
        return plan.forward(q, k, v, None, None, None, *offsets, prologue)


def _planned(
    direction: str, rows: tuple[Tensor | None, ...], q: Tensor, k: Tensor,
    offsets: tuple[Tensor | None, Tensor | None], prologue: Prologue, settings: tuple,
) -> Plan:  # fmt: skip
    """The plan of a direction, whose rows are given; of q and k, or of tensors that lie like them."""
    eps, interleaved, *tensors = prologue
    key = direction, *map(layout_of, (*rows, *tensors, *offsets)), eps, interleaved, *settings
    plan = PLANS.get(key)
    if plan is None:
        *numbers, recipe, impl, deterministic = settings
        choice, dims = dispatch.named(parsed(recipe), impl), (q.shape[-1], q.shape[-1])
        call = Call.of(q, k, dims, None, *offsets, *numbers, choice.recipe, deterministic)
        plan = Plan(choice, call._replace(prologue=prologue), q, k, sinks=False)
        PLANS.put(key, plan)
    return plan


@torch.library.register_fake("sagebwd::qk_norm_rope_attention", lib=LIBRARY)
def _(q, k, v, q_weight, k_weight, q_cos, q_sin, k_cos, k_sin, cu_seqlens_q, cu_seqlens_k, *settings):
    *_, eps, _, recipe, impl, _ = settings
    return outputs_like(dispatch.named(parsed(recipe), impl), q, k, v, cu_seqlens_k, norm=eps is not None)


@operator
def qk_norm_rope_attention_backward(
    do: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    workspace: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    q_cos: Tensor | None,
    q_sin: Tensor | None,
    k_cos: Tensor | None,
    k_sin: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
    eps: float | None,
    interleaved: bool,
    recipe: str,
    impl: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in their shapes and dtypes, and of the weights (D,) FP32, empty where there are none.

    q and k are given where there is a norm.
    """
    tensors = q_weight, k_weight, q_cos, q_sin, k_cos, k_sin
    offsets, prologue = (cu_seqlens_q, cu_seqlens_k), Prologue(eps, interleaved, *tensors)
    numbers = max_seqlen_q, max_seqlen_k, is_causal, window_left, window_right, scale
    settings = *numbers, recipe, impl, deterministic
    plan = _planned("backward of a prologue", (q, k, v, o), o, v, offsets, prologue, settings)
    with device_of(v):
        found = plan.backward(do, None, q, k, v, o, lse, workspace, None, None, *offsets, prologue)
    return *found[:3], *(lse.new_empty(0) if x is None else x for x in found[3:5])


@torch.library.register_fake("sagebwd::qk_norm_rope_attention_backward", lib=LIBRARY)
def _(do, q, k, v, o, lse, workspace, q_weight, k_weight, *rest):
    recipe = parsed(rest[-3])
    dq, dk, dv = empty_gradients(recipe, o.shape[-1], o, v)
    shapes = [(0,) if weight is None else weight.shape for weight in (q_weight, k_weight)]
    return dq, empty_like_rows(dk if k is None else k), dv, *(lse.new_empty(shape) for shape in shapes)


class _NormRopeAttention(torch.autograd.Function):
    """The derivative of ``sagebwd::qk_norm_rope_attention``; below: the operator's kernels below autograd."""

    @staticmethod
    def forward(ctx, below, *arguments):
        q, k, v = arguments[:3]
        tensors, ctx.settings = arguments[3:11], arguments[11:]
        eps = ctx.settings[6]
        o, lse, workspace = below(*arguments)
        ctx.mark_non_differentiable(lse, workspace)
        inputs = (None, None) if eps is None else (q, k)  # a rotation reads none
        ctx.save_for_backward(*map(savable, (*inputs, v)), o, lse, workspace, *map(savable, tensors))
        return o, lse, workspace

    @staticmethod
    def backward(ctx, do, *_):
        saved = ctx.saved_tensors
        with torch.no_grad():
            *gradients, dq_weight, dk_weight = qk_norm_rope_attention_backward(do, *saved, *ctx.settings)
        for weight, gradient in zip(saved[6:8], (dq_weight, dk_weight)):
            gradients.append(None if weight is None else gradient.to(weight.dtype))
        if torch.is_grad_enabled():  # create_graph=True
            gradients = once_differentiable((saved[3], do), gradients)
        return None, *gradients, *(None,) * 17


differentiable(_NormRopeAttention, qk_norm_rope_attention, count=5)
