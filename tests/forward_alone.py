"""Attention without a backward, as FlashAttention-3's can be built."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ERROR = "This flash attention build does not support backward."


class _ForwardAlone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    @staticmethod
    def backward(ctx, do: Tensor) -> Tensor:
        raise RuntimeError(ERROR)


forward_alone = _ForwardAlone.apply
"""Causal attention of q (B, Hq, N, D), k and v (B, Hkv, N, D)."""
