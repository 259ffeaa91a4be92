"""What sinks make of a call's output and lse, after its forward, and what they add to its backward.

With L the true lse of query i's scores, s the sink of its head and w = exp(s - logaddexp(L, s)) the sink's weight::

    O' = (1 - w) O      L' = logaddexp(L, s)      c = w (dL' - <dO', O'>)      ds = sum of c over i

A backward that is given O' and L' in place of O and L computes dK and dV as it is. O and lse are overwritten, and what
is kept beside them is w, one FP32 a query and head. Rows of dS no longer sum to dL', but to dL' - c: where K is
smoothed, of which a row's sum is multiplied by the mean, dQ lacks -c times the softmax scale and K's mean.

A query that sees no key has w = 1 and O' = 0. Its lse stays -inf for backward, and no L' is put further above L than
`FARTHEST`: exponents of e4m3 products follow it. `true_lse` makes both s.

Shapes are those of `sagebwd.call`; sinks (Hq,), of any floating-point dtype. k_mean is None where K is not smoothed;
offsets are cu_seqlens of packed queries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Weights of e^-60 are gone, and powers of two of much more leave FP32.
FARTHEST = 60.0


def weigh(
    o: Tensor, lse: Tensor, q: Tensor, k_mean: Tensor | None, sinks: Tensor, scale: float, offsets: Tensor | None
) -> Tensor:
    """Overwrite o, and lse of the smoothed scores, by what they are beside sinks; returns w, shaped as lse."""
    above = _by_head(sinks, lse) - lse
    if k_mean is not None:
        above -= mean_scores(q, k_mean, offsets, lse.dtype) * scale
    blind = lse == -math.inf
    above = above.masked_fill(blind, math.inf)  # of the sink over the keys
    kept = torch.sigmoid(-above)
    o.mul_((kept if offsets is None else kept.T).unsqueeze(-1))
    lse += torch.logaddexp(above, torch.zeros_like(above)).clamp(max=FARTHEST).masked_fill(blind, 0)
    return torch.sigmoid(above)


def gradient(
    do: Tensor, dlse: Tensor | None, o: Tensor, weight: Tensor, dq: Tensor, k_mean: Tensor | None, scale: float,
    offsets: Tensor | None,
) -> Tensor:  # fmt: skip
    """The gradient of sinks, (Hq,) in lse's dtype, of what `weigh` left; adds to dq what it lacks."""
    products = (do.to(weight.dtype) * o.to(weight.dtype)).sum(-1)
    products = products if offsets is None else products.T
    change = weight * (-products if dlse is None else dlse - products)
    if k_mean is not None:
        by_token = change if offsets is None else change.T
        dq -= by_token.unsqueeze(-1) * _means(dq, k_mean, offsets) * scale
    return change.sum((0, 2) if offsets is None else 1)


def true_lse(
    lse: Tensor, q: Tensor, k_mean: Tensor, scale: float, offsets: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """lse with what K-smoothing took off, and the sink itself where that has all weight; differentiable."""
    found = lse + mean_scores(q, k_mean, offsets, lse.dtype) * scale
    return found if sinks is None else torch.maximum(found, _by_head(sinks, lse))


def mean_scores(q: Tensor, k_mean: Tensor, offsets: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Q times K's mean, shaped as lse."""
    products = (q.to(dtype) * _means(q, k_mean, offsets)).sum(-1)
    return products if offsets is None else products.T


def _means(q: Tensor, k_mean: Tensor, offsets: Tensor | None) -> Tensor:
    """K's mean of each query's sequence and head, broadcast as q."""
    k_mean = k_mean.repeat_interleave(q.shape[1] // max(k_mean.shape[1], 1), 1)
    if offsets is None:
        return k_mean.unsqueeze(2)
    tokens = torch.arange(q.shape[0], device=q.device, dtype=offsets.dtype)
    # tokens past the last sequence count to the last
    return k_mean[torch.searchsorted(offsets[1:], tokens, right=True).clamp(max=len(k_mean) - 1)]


def _by_head(sinks: Tensor, lse: Tensor) -> Tensor:
    return sinks.to(lse.dtype)[:, None]
