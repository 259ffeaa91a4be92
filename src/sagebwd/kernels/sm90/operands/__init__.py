"""Passes that make operands of the Hopper kernels alone."""
