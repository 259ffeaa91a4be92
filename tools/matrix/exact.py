"""Attention in FP32 with an explicit mask, and its gradients: what shares no line with the recipes' emulator."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sagebwd.masks.mask import Mask, shown
from tests.masks import dense
from tools.matrix.forms import Cell


def attention(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float, visible: Tensor, bias: Tensor | None = None
) -> list[Tensor]:
    """o, lse (-inf where a query sees no key), dq, dk and dv, all FP32.

    Args: q, do (B, H, N, D); k, v (B, Hkv, M, D); visible, bool, and bias, which broadcast to (B, H, N, M).
    """
    groups = q.shape[1] // k.shape[1]
    q, k, v = leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
    s = q @ k.repeat_interleave(groups, 1).mT * scale
    if bias is not None:
        s = s + bias.float()
    s = s.masked_fill(~visible, -math.inf)
    seen = visible.any(-1, keepdim=True)
    lse = torch.logsumexp(torch.where(seen, s, 0), -1, keepdim=True)
    o = torch.where(visible, torch.exp(s - lse), 0) @ v.repeat_interleave(groups, 1)
    gradients = torch.autograd.grad(o, leaves, do.float())
    return [o.detach(), torch.where(seen, lse, -math.inf)[..., 0].detach(), *gradients]


def band(queries: Tensor, keys: Tensor, is_causal: bool, window: tuple[int, int] | None) -> Tensor:
    """Which keys, by their positions, queries see: (queries, keys) bool."""
    left, right = window or (-1, -1)
    ahead = keys[None, :] - queries[:, None]
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if is_causal:
        visible &= ahead <= 0
    if left >= 0:
        visible &= ahead >= -left
    if right >= 0:
        visible &= ahead <= right
    return visible


def visible_and_bias(cell: Cell, device: str) -> tuple[Tensor, Tensor | None]:
    """What a call's masks show, (B or 1, H or 1, queries, keys); those of a pack with all sequences side by side."""
    if cell.layout == "packed":
        blocks = [
            band(torch.arange(m - n, m), torch.arange(m), cell.is_causal, cell.window)  # aligned bottom right
            for n, m in zip(cell.lengths_q, cell.lengths_k)
        ]
        return torch.block_diag(*blocks).bool().to(device)[None, None], None
    n, m = max(cell.lengths_q), max(cell.lengths_k)
    visible = band(torch.arange(n), torch.arange(m), cell.is_causal, cell.window).to(device)[None, None]
    for mask in cell.masks(device).values():
        elements = mask
        if isinstance(mask, Mask):  # asked of its mask_mod again
            elements = dense(cell.mask, (len(cell.lengths_q), cell.heads, n, m)).to(device)
        if elements.is_floating_point():
            hidden = ~shown(elements)
            return visible & ~hidden, elements.masked_fill(hidden, 0)
        visible = visible & elements
    return visible, None


def outcome(cell: Cell, inputs: list[Tensor], visible: Tensor, bias: Tensor | None) -> list[Tensor]:
    """`attention` of inputs that nothing is spoilt in, in the layout of `tools.fuzz.outcome`, lse as it is."""
    if cell.layout != "packed":
        return attention(*inputs, cell.scale, visible, bias)
    o, lse, *gradients = attention(*(x.transpose(0, 1)[None] for x in inputs), cell.scale, visible, bias)
    o, dq, dk, dv = (x[0].transpose(0, 1) for x in (o, *gradients))
    return [o, lse[0], dq, dk, dv]
