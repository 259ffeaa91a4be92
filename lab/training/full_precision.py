"""Attention in full precision for models that are trained: torch's own, causal as the module is and without a mask.

In a compiled model Transformers' own function gets the whole causal mask, which keeps FlashAttention from running on a
GPU and makes cuDNN read it. Sequences here are whole, so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from lab.studies.planted_faults import SMALL
from lab.training.config import FULL_PRECISION, SDPA, SMALL_DV


def register(name: str) -> str:
    """Tell Transformers of an attention by its name in `FULL_PRECISION`; what it is called there.

    A name of its own each, so that compiled code is its own. Raises ValueError for cuDNN without a CUDA GPU.
    """
    backend = FULL_PRECISION[name]
    if backend == "CUDNN_ATTENTION" and not torch.cuda.is_available():
        raise ValueError(
            f"attention.recipe={name!r} needs a CUDA GPU; expected {SDPA!r}, torch's own choice, or a recipe"
        )
    registered = f"full-precision-{name}"
    AttentionInterface.register(registered, _attention(backend, name == SMALL_DV))
    AttentionMaskInterface.register(registered, flash_attention_mask)
    return registered


class SmallGradient(torch.autograd.Function):
    """A tensor as it is, whose gradient is 8% too small."""

    @staticmethod
    def forward(ctx, x):
        """x."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        """The gradient of x."""
        return gradient * SMALL


@cache  # one function each: another would be compiled anew
def _attention(backend: str | None, has_small_dv: bool) -> Callable[..., tuple[Tensor, None]]:
    """What chooses the backend has to be in what is compiled."""
    chosen = None if backend is None else getattr(SDPBackend, backend)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **settings: object
    ) -> tuple[Tensor, None]:
        query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embedding leaves FP32 under BF16 autocast
        grouped = query.shape[1] != key.shape[1]
        value = SmallGradient.apply(value) if has_small_dv else value
        with nullcontext() if chosen is None else sdpa_kernel(chosen):
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=getattr(module, "is_causal", True), scale=settings.get("scaling"),
                enable_gqa=grouped,
            )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    return attention
