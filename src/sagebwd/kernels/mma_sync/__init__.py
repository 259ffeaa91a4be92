"""Kernels in CUDA C++ for mma.sync, the instructions of Ampere, Ada and consumer Blackwell: `token` at 64 and 128."""
