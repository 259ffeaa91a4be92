"""What a model's queries and keys say of whether its attention is safe to quantise."""

from __future__ import annotations

import torch
from torch import Tensor


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
