"""What all autograd functions of the package share: tensors that may be saved, gradients that have no derivative."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_is_batched, _is_batched_by_grad = torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor


def savable(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors, copied where they were made in inference mode: autograd saves no such tensor."""
    return [x.clone() if x is not None and x.is_inference() else x for x in tensors]


def refuse_batched(*gradients: Tensor | None) -> None:
    """Raises NotImplementedError where vmap gives a backward the gradients of several outputs at once."""
    for x in gradients:
        if x is not None and (_is_batched(x) or _is_batched_by_grad(x)):
            raise NotImplementedError(
                "several gradients at once (is_grads_batched=True, jacobian with vectorize=True, vmap of a backward) "
                "are not supported by sagebwd's attention; call backward for one after the other, or use "
                "torch.nn.functional.scaled_dot_product_attention"
            )


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients as they are; who differentiates them again is told."""

    @staticmethod
    def forward(ctx, gradients, *causes):
        return tuple(gradient.clone() for gradient in gradients)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(
            "second derivatives of sagebwd's attention (create_graph=True, a gradient penalty) are not supported; use "
            "torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


def once_differentiable(
    causes: Iterable[Tensor | None], gradients: Iterable[Tensor | None]
) -> list[Tensor | None]:  # fmt: skip
    """Gradients that raise NotImplementedError where they are differentiated again.

    causes: all that they depend on, or what depends on that itself: autograd asks no node which leads only elsewhere.
    The output stands for every input of a call, but not for what came to its backward: dO depends on what is behind.
    """
    gradients = list(gradients)
    found = iter(_OnceDifferentiable.apply([x for x in gradients if x is not None], *causes))
    return [None if x is None else next(found) for x in gradients]
