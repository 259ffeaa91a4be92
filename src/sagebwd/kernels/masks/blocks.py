"""The map of a mask's blocks, by kernels where they read it, else by torch (`sagebwd.masks.mask.blocks_of`)."""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd.kernels.runtime.describing import is_described
from sagebwd.masks import mask as masks
from sagebwd.masks.mask import Mask

# Of elements that the pass reads.
DTYPES = torch.bool, torch.float16, torch.bfloat16, torch.float32


def by_kernels(x: Tensor) -> bool:
    """Whether kernels read a mask: on a GPU, and where a program of such is described."""
    return is_described() if x.is_meta else x.is_cuda  # other tensors on meta are a user's, who asks for shapes


def takes(elements: Tensor) -> bool:
    """Whether one pass of a kernel reads a mask's elements (`sagebwd.kernels.masks.mask_blocks`)."""
    return by_kernels(elements) and elements.dtype in DTYPES and elements.numel() > 0


def blocks_of(elements: Tensor) -> tuple[Tensor, Tensor]:
    """`Mask.blocks` of a tensor in four dimensions, and which keys any query of any head sees, (B or 1, M or 1)."""
    if takes(elements):
        from sagebwd.kernels.masks import mask_blocks

        return mask_blocks.blocks_of(elements)
    return masks.blocks_of(elements)


def of_tensor(elements: Tensor) -> Mask:
    """The mask of a tensor in four dimensions."""
    return Mask(elements, None, *blocks_of(elements))
