"""What ``flash_attn.bert_padding`` has of use with packed sequences: padding taken out of a batch and put back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows ``indices``, (n,) integers, of (rows, ...): (n, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) with ``values``, (n, ...), at rows ``indices`` and zeros elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch that count, packed.

    Args: hidden_states (batch, tokens, ...); attention_mask (batch, tokens), bool or integer, not 0 where a token
    counts; unused_mask likewise, of tokens that are kept beside them.

    Returns: (total, ...); where these lie in (batch * tokens); offsets of sequences, (batch + 1,) int32; the longest
    one's tokens; how many of attention_mask each has, (batch,) int32.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, offsets, int(lengths.max()), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, ...) of packed tokens, (total, ...), and `unpad_input`'s indices; padding is zeros."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


FUNCTIONS = {x.__name__: x for x in (index_first_axis, index_put_first_axis, pad_input, unpad_input)}
