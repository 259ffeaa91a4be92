"""psi and smoothing in plain PyTorch: the meaning that every kernel is held to.

psi(X) over a group: ``scale = max|X| / 127`` and ``codes = round_half_even(X / scale)``, so codes lie in [-127, 127]
(never -128). A group of zeros, or of nothing as large as `TINY`, has codes 0 and scale 1. NaN or Inf in a group makes
the dequantised group NaN or Inf.

Source: arXiv 2603.02170, section 3; SageAttention for K-smoothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sagebwd.numerics import INT8_MAX, TINY
from sagebwd.recipe import SAMPLE, SAMPLE_AT, SAMPLE_OF, SAMPLED_FROM


def quantize(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """psi with one scale per group, a group being all of ``dims``.

    Args: x, any floating dtype and shape; dims, the dimensions that share a scale.
    Returns: codes, integers in x's dtype and shape; scale, x's dtype, with ``dims`` kept at size 1.
    """
    largest = x.abs().amax(dims, keepdim=True)
    scale = largest / torch.full_like(largest, INT8_MAX)  # by a number, CUDA would multiply by 1/127 instead
    scale = torch.where(largest < TINY, torch.ones_like(scale), scale)
    return torch.round(x / scale), scale


def quantize_tokens(x: Tensor, group: str, block: int) -> tuple[Tensor, Tensor]:
    """psi of a (..., tokens, head_dim) operand.

    Args: group, "token" (one scale a row), "block" (one per ``block`` rows), "lane" (one per rows of a block with the
    same (index mod 8) // 2), "channel" (one per column of a block) or "sequence" (one per column). The last block may
    be short.
    Returns: codes, x's shape; scale, (..., tokens, 1), or (..., tokens, head_dim) for "channel" and "sequence".
    """
    tokens = x.shape[-2]
    if group == "sequence":
        if tokens == 0:
            return x, torch.ones_like(x)
        codes, scale = quantize(x, (-2,))
        return codes, scale.expand_as(x)
    if group == "token":
        return quantize(x, (-1,))
    if group == "lane":
        # (..., blocks, eights, lanes, pairs, head_dim)
        lanes = token_blocks(x, block).unflatten(-2, (-1, 4, 2))
        codes, scale = quantize(lanes, (-4, -2, -1))
        scale = scale.expand(*lanes.shape[:-1], 1)
        return tuple(y.flatten(-5, -2)[..., :tokens, :] for y in (codes, scale))
    blocks = token_blocks(x, block)
    codes, scale = quantize(blocks, (-2, -1) if group == "block" else (-2,))
    codes = codes.flatten(-3, -2)[..., :tokens, :]
    scale = scale.expand(*scale.shape[:-2], block, scale.shape[-1]).flatten(-3, -2)[..., :tokens, :]
    return codes, scale


def token_blocks(x: Tensor, block: int) -> Tensor:
    """(..., tokens, head_dim) as (..., blocks, block, head_dim), the last block filled with zeros."""
    return pad_tokens(x, block).unflatten(-2, (-1, block))


def pad_tokens(x: Tensor, block: int) -> Tensor:
    """(..., tokens, head_dim) with zero rows added up to a multiple of ``block``."""
    missing = -x.shape[-2] % block
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def smooth(x: Tensor, valid: Tensor | None = None, sample: bool = False) -> tuple[Tensor, Tensor]:
    """Subtract the mean over tokens.

    Args: x, (..., tokens, head_dim); valid, bool, broadcastable to (..., tokens, 1): tokens that count; sample: of
    many tokens that all count the mean is that of some (`Recipe.k_mean`).
    Returns: x minus its mean, zero where not valid; the mean, (..., 1, head_dim), zero if no token counts.
    """
    if x.shape[-2] == 0:
        return x, x.new_zeros(*x.shape[:-2], 1, x.shape[-1])
    if valid is None:
        taken = x
        if sample and x.shape[-2] >= SAMPLED_FROM:
            place = torch.arange(x.shape[-2], device=x.device) % SAMPLE_OF
            taken = x[..., (place >= SAMPLE_AT) & (place < SAMPLE_AT + SAMPLE), :]
        mean = taken.mean(-2, keepdim=True)
        return x - mean, mean
    x = torch.where(valid, x, 0)
    count = valid.expand(*x.shape[:-1], 1).sum(-2, keepdim=True)
    mean = x.sum(-2, keepdim=True) / count.clamp(min=1)
    return torch.where(valid, x - mean, 0), mean
