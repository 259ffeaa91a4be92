"""Kernels of compute capability 9.0 (H100, H200), with `widths` saying which they have."""
