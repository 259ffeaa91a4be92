"""What kernels ask of the GPU they run on."""

from __future__ import annotations

from functools import cache

import torch


@cache
def capability(device: torch.device) -> int:
    """90 for sm_90; 0 where the interpreter runs on a CPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
