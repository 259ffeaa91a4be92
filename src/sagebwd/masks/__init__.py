"""Masks that are more than key padding, as the reference and all kernels read them."""
