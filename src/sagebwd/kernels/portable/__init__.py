"""Portable Triton kernels: every NVIDIA GPU since sm_80, and Triton's interpreter on a CPU."""
