"""The ten user stories, each as its user would live it; what they ask for is quoted in “”.

They run on a CPU with the reference, and those that need kernels also on a GPU (`-m gpu`).

1 kernel swap, 7 strides, 8 compile, 9 numerics: test_kernels. 3 padding, 4 packing, 5 Trainer: test_models. 2 SDPA
patch: tests/integrations/test_sdpa.py. 6 parity: tests/lab/training/test_compare.py and test_pretrain.py. 10 install
and bench: `make package`, tests/cli and tests/benchmarks.
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
