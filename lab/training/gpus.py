"""The GPUs that runs take in turn."""

from __future__ import annotations

import os

import torch


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    return [str(index) for index in range(torch.cuda.device_count())]
