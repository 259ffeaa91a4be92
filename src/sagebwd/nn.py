"""Layers that make attention safe to quantise."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class QKNorm(nn.Module):
    """RMS norm, with a learned gain, of each token's query and key over head_dim, as Qwen3's q_norm and k_norm.

    It bounds the logits, which is what the paper finds INT8 attention to need at large batches. Apply it after the
    projections and before rotary embedding.

    Args: head_dim; eps, added to the mean square.
    """

    def __init__(self, head_dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.query = nn.RMSNorm(head_dim, eps=eps)
        self.key = nn.RMSNorm(head_dim, eps=eps)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """query and key, (..., head_dim), normalised; shapes and dtypes are kept."""
        return self.query(query).to(query.dtype), self.key(key).to(key.dtype)


def largest_logit(query: Tensor, key: Tensor, *, is_causal: bool = False, scale: float | None = None) -> float:
    """The largest |scale q . k| over visible pairs, for logging.

    Args: query (batch, heads, tokens, head_dim), key (batch, kv_heads, kv_tokens, head_dim). Memory is that of one
    head's scores.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    groups = query.shape[1] // key.shape[1]
    largest = 0.0
    with torch.no_grad():
        for batch in range(query.shape[0]):
            for head in range(query.shape[1]):
                scores = query[batch, head].float() @ key[batch, head // groups].float().mT
                scores = scores.tril() if is_causal else scores
                largest = max(largest, scores.abs().max().item() * abs(scale))
    return largest
