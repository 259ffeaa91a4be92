"""TMA descriptors of the portable kernels' operands."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sagebwd.kernels.runtime import alignment


def described(blocks: dict[str, tuple[Tensor, tuple[int, int]]]) -> dict[str, TensorDescriptor] | None:
    """A TMA descriptor for each (tensor, block of its last two dimensions), or None if one has odd strides."""
    if not all(alignment.fits_tma(x) for x, _ in blocks.values()):
        return None
    return {
        name: TensorDescriptor(x, list(x.shape), list(x.stride()), [1] * (x.dim() - 2) + list(block))
        for name, (x, block) in blocks.items()
    }


def transposed_view(x: Tensor, head_dim: int) -> Tensor:
    """A transposed copy as (heads, head_dim, padded tokens)."""
    return x.view(x.shape[0], head_dim, -1)
