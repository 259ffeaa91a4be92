"""Calls of Transformers that run on torch's scaled_dot_product_attention, in full precision: those that continue a KV
cache, and under "auto" layers whose heads have more channels than kernels take.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagebwd import counts
from sagebwd.kernels.capabilities import MAX_HEAD_DIM
from sagebwd.recipe import AUTO

_said: set[str] = set()
# Elements of a mask with sinks, which is one a head: 128 MiB in 16 bit.
MOST_ELEMENTS = 1 << 26


def decode(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """Queries that continue a cache, as (batch, tokens, heads, head_dim).

    Args: query, key, value and sinks as of `sage_attention`; visible (batch, 1, tokens or 1, kv_tokens), True where a
    query sees a key, or added to scores.
    """
    say("attn_implementation='sagebwd': decoding with a KV cache runs on torch's scaled_dot_product_attention")
    if not torch.compiler.is_compiling():
        counts.counts[f"{counts.TORCH} with a KV cache"] += 1
    visible = None if visible is None else visible.to(query.device)
    if sinks is None:
        out = _attend(query, key, value, visible, scale)
    else:
        out = _beside_sinks(query, key, value, visible, scale, sinks)
    return out.transpose(1, 2).contiguous()


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


def is_wide(module: nn.Module, query: Tensor, value: Tensor, recipe: object, impl: str | None) -> bool:
    """Whether a layer's heads have more channels than kernels take, of which the first is said.

    Raises ValueError where a recipe or an impl is named, which is never handed over.
    """
    head_dim = max(query.shape[-1], value.shape[-1])
    if head_dim <= MAX_HEAD_DIM:
        return False
    name = type(module).__name__
    if recipe != AUTO or impl is not None:
        layer = getattr(module, "layer_idx", None)
        raise ValueError(
            f"{name}, layer {layer}: head_dim {head_dim} is not supported under recipe={str(recipe)!r}, impl={impl!r};"
            f" accepted: 1 to {MAX_HEAD_DIM}. The recipe 'auto' without an impl runs it in full precision: for such "
            f'layers alone, config.sagebwd["layers"] = {{"{layer}": {{"recipe": "auto", "impl": None}}}}'
        )
    say(
        f"attn_implementation='sagebwd': layers of {name} with head_dim {head_dim} run on torch's "
        f"scaled_dot_product_attention in full precision; kernels take up to {MAX_HEAD_DIM}"
    )
    return True


@torch.compiler.assume_constant_result  # a trace says it once and goes on
def say(text: str) -> None:
    """Warn, once a process."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=4)
