"""Portable Triton kernels: every NVIDIA GPU since sm_80, and Triton's interpreter on a CPU."""

from sagebwd.kernels.portable.host import backward, forward, unsupported

__all__ = ["backward", "forward", "unsupported"]
