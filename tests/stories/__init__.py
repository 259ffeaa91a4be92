"""User stories as their users would live them, where no other test has them; what they ask for is quoted in “”.

On a CPU with the reference, and those that need kernels also on a GPU (`-m gpu`).
"""

import pytest
import torch

from tests.gpus import HAS_HOPPER

on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def low_precision(device):
    """The recipe that "auto" runs on a device where it does not hand the call to torch."""
    return "mixed" if device == "cuda" and HAS_HOPPER else "token"


def randn(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
