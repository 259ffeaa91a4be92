"""How large logits are."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def largest_logit(query: Tensor, key: Tensor, *, is_causal: bool = False, scale: float | None = None) -> float:
    """The largest |scale q . k| over visible pairs, for logging; memory is that of one head's scores.

    Args: query (batch, heads, tokens, head_dim), key (batch, kv_heads, kv_tokens, head_dim).
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = (q.float() @ k.float().mT for q, k in zip(query.flatten(0, 1), key.flatten(0, 1)))
    largest = max((s.tril() if is_causal else s).abs().max().item() for s in scores)
    return largest * abs(query.shape[-1] ** -0.5 if scale is None else scale)
