"""Tensors where kernels can read them: aligned, and with strides that TMA takes."""

from __future__ import annotations

from torch import Tensor

from sagebwd.call import empty_like_rows
from sagebwd.kernels.runtime.program import copy

# Addresses and strides that TMA reads from are multiples of so many bytes.
TMA_BYTES = 16


def contiguous(x: Tensor | None) -> Tensor | None:
    """As kernels read masks and values of tokens; aligned too, as slices of them may not be."""
    if x is None or (x.is_contiguous() and x.data_ptr() % TMA_BYTES == 0):
        return x
    return copy(x.new_empty(x.shape), x)


def aligned_rows(x: Tensor | None) -> Tensor | None:
    """As kernels read Q, K, V, O, dO and saved codes: any strides but the last, from an address that TMA takes.

    The one place that looks at addresses: a view that begins elsewhere, as slices of a flat buffer do, is copied.
    Without TMA too, where kernels would be compiled anew, to read K and V an element at a time again and again.
    """
    if x is None or (x.stride(-1) == 1 and x.data_ptr() % TMA_BYTES == 0):
        return x
    return copy(empty_like_rows(x), x)


def fits_tma(x: Tensor) -> bool:
    """TMA wants strides in multiples of 16 bytes, as the address is by `aligned_rows`."""
    return all(s * x.element_size() % TMA_BYTES == 0 for s in x.stride()[:-1]) and min(x.shape) > 0
