"""RMS norm of each head's channels, then rotary embedding, in PyTorch: what most decoders do to Q and K.

Of one row x, the head_dim channels of a token in a head (RMSNorm, arXiv 1910.07467; RoPE, arXiv 2104.09864)::

    z = x / sqrt(mean(x^2) + eps) * weight
    y = z cos + rotate(z) sin                 of the first R channels, as many as cos has; the rest of y is z

`rotate` turns pairs of channels by 90 degrees: (a, b) to (-b, a). Everything is FP32 (FP64 of FP64 inputs), and
rounded once, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF, INTERLEAVED = ROPES = ("half", "interleaved")
"""Which channels are a pair: i and i + R / 2, as Llama has them, or 2 i and 2 i + 1, as GPT-J and GLM."""


def norm_rope(
    x: Tensor, weight: Tensor | None, eps: float | None, cos: Tensor | None, sin: Tensor | None, rope: str = HALF,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """y of the rows x, (batch, heads, tokens, head_dim), in ``dtype``, x's unless given.

    Args: weight (head_dim,), None for ones; eps, None for no norm; cos, sin (batch or 1, tokens, R), None for no
    rotary embedding; rope, of `ROPES`.
    """
    high = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(high)
    if eps is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        y = y if weight is None else y * weight.to(high)
    if cos is not None:
        turned, rest = y[..., : cos.shape[-1]], y[..., cos.shape[-1] :]
        turned = turned * cos.to(high).unsqueeze(1) + rotate(turned, rope) * sin.to(high).unsqueeze(1)
        y = torch.cat((turned, rest), -1) if rest.shape[-1] else turned
    return y.to(dtype or x.dtype)


def rotate(x: Tensor, rope: str) -> Tensor:
    """Each pair (a, b) of the last dimension's channels as (-b, a)."""
    if rope == HALF:
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((-b, a), -1).flatten(-2)
