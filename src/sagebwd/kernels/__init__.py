"""Kernels: `table` says who has what, a folder each has the portable ones and Hopper's."""
