"""What puts back into S and dK what Q-smoothing took out."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Packing
from sagebwd.kernels.common.strided import ONE
from sagebwd.kernels.common.tile import load_rows


class SmoothQ(NamedTuple):
    """The mean of each query block, K's, and K as it was given, whose tokens `operands.strided` finds."""

    q_mean: Tensor  # (heads, blocks, D)
    turned_mean: Tensor  # the same times R, where dK is of rotated codes
    k_mean: Tensor  # (batch, heads, D)
    at: Tensor
    batch: int
    head: int
    token: int
    unit: tl.constexpr = ONE

    @classmethod
    def of(
        cls, q_mean: Tensor, k_mean: Tensor, k: Tensor, keys: Packing, turned_mean: Tensor | None = None
    ) -> SmoothQ:
        """k (B, H, N, D) or packed; turned_mean is None where nobody reads it."""
        return cls(q_mean, q_mean if turned_mean is None else turned_mean, k_mean, k, *keys.strides(k))


@triton.jit
def channels(x, number, columns, head_dim):
    """One vector of channels of many; 0 beyond them."""
    return tl.load(x + number * head_dim + columns, mask=columns < head_dim, other=0)


@triton.jit
def score_bias(
    k, stride_t, mu, shift, keys, columns, left, scale_2, head_dim: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """The share of a query block's mean in its scores of a block of keys, in base 2; k: the first of these keys."""
    exact = load_rows(k, keys, columns, stride_t, left, head_dim, False, head_dim == BLOCK_D).to(tl.float32)
    return tl.sum((exact - shift[None, :]) * mu[None, :], 1) * scale_2
