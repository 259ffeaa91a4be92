"""Calls of Transformers that continue a KV cache: torch's scaled_dot_product_attention, in full precision."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from sagebwd.auto import counts

# Elements of a mask with sinks, which is one a head: 128 MiB in 16 bit.
MOST_ELEMENTS = 1 << 26


def decode(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """Queries that continue a cache, as (batch, tokens, heads, head_dim).

    Args: query, key, value and sinks as of `sage_attention`; visible (batch, 1, tokens or 1, kv_tokens), True where a
    query sees a key, or added to scores.
    """
    _warn()
    if not torch.compiler.is_compiling():
        counts.counts[f"{counts.TORCH} with a KV cache"] += 1
    visible = None if visible is None else visible.to(query.device)
    if sinks is None:
        out = _attend(query, key, value, visible, scale)
    else:
        out = _beside_sinks(query, key, value, visible, scale, sinks)
    return out.transpose(1, 2).contiguous()


@torch.compiler.assume_constant_result  # a trace warns once and goes on
def _warn() -> None:
    warnings.warn(
        "attn_implementation='sagebwd': decoding with a KV cache runs on torch's scaled_dot_product_attention",
        stacklevel=5,
    )


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _beside_sinks(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float | None, sinks: Tensor
) -> Tensor:
    """A sink is one more key of zeros, whose score the mask adds, with a value of zeros."""
    batch, heads, tokens, _ = query.shape
    key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
    rows = max(1, MOST_ELEMENTS // (batch * heads * key.shape[2]))
    parts = []
    for first in range(0, tokens, rows):
        some = query[:, :, first : first + rows]
        mask = query.new_zeros((batch, heads, some.shape[2], key.shape[2]))
        if visible is not None:
            shown = visible.expand(-1, -1, tokens, -1)[:, :, first : first + rows]
            mask[..., :-1] = shown if shown.is_floating_point() else torch.where(shown, 0.0, float("-inf"))
        mask[..., -1] = sinks.to(mask.dtype)[:, None]
        parts.append(_attend(some, key, value, mask, scale))
    return torch.cat(parts, 2)
