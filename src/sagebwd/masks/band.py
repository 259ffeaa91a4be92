"""Which keys a query sees: causal and sliding-window masks as one diagonal band.

Query i sees key j where ``lower <= j - i <= upper``; a bound of None is open. Causal and window masks, aligned top
left (dense calls, as scaled_dot_product_attention does) or bottom right (packed sequences, as flash-attention does),
are all of this form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNLIMITED = -1
# Tokens on either side that a window counts at most, which no sequence has: sums with places fit 32 bits.
FARTHEST = 1 << 30


@dataclass(frozen=True)
class Band:
    """Bounds on ``key - query``, in tokens; None where there is none."""

    lower: int | None = None
    upper: int | None = None

    @classmethod
    def of(cls, is_causal: bool, window_left: int = UNLIMITED, window_right: int = UNLIMITED, offset: int = 0) -> Band:
        """The band of a causal flag and a window (-1: unlimited), its diagonal shifted right by ``offset`` keys.

        Of a window no more than `FARTHEST` counts.
        """
        lower = None if window_left == UNLIMITED else offset - min(window_left, FARTHEST)
        upper = None if window_right == UNLIMITED else offset + min(window_right, FARTHEST)
        if is_causal:
            upper = offset if upper is None else min(upper, offset)
        return cls(lower, upper)

    def keys(self, query_start: int, query_stop: int, tokens_k: int) -> tuple[int, int]:
        """The range of keys that any query in [query_start, query_stop) may see; empty ranges give (0, 0)."""
        start = 0 if self.lower is None else max(0, query_start + self.lower)
        stop = tokens_k if self.upper is None else min(tokens_k, query_stop + self.upper)
        return (start, stop) if start < stop else (0, 0)

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """True where query ``queries[i]`` sees key ``keys[j]``: (queries, keys) bool, or None if all do."""
        if self.lower is None and self.upper is None:
            return None
        distance = keys[None, :] - queries[:, None]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.lower is not None:
            visible &= distance >= self.lower
        if self.upper is not None:
            visible &= distance <= self.upper
        return visible
