"""The rotation under which S's operands are quantised (`sagebwd.recipe.Recipe.rotate`).

R is orthogonal and symmetric: Hadamard matrices over their size's root along the diagonal, of the powers of two that
add up to head_dim, the largest first and none over 256 (128 and 64 for 192, 256 twice for 512). Scores are as they
were, since (q R) (k R)^T = q k^T, and a channel that is large in every query is spread over all channels of its block,
so that the scale of a row suits them. R is its own inverse.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from sagebwd.numerics import rotation_sizes


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix of 1 and -1, of a power of two; (i, j) is -1 where i & j has an odd number of ones."""
    matrix = torch.ones(1, 1, dtype=torch.float64, device="cpu")  # inside `torch.device("meta")` too: R is kept
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@cache
def rotation(head_dim: int) -> Tensor:
    """R, (head_dim, head_dim), in FP64."""
    return torch.block_diag(*(hadamard(size) * size**-0.5 for size in rotation_sizes(head_dim)))


def rotated(x: Tensor) -> Tensor:
    """x R, of (..., tokens, head_dim), in x's dtype; rotated twice is x."""
    return x @ rotation(x.shape[-1]).to(x)
