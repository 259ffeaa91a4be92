"""Launches of a call's kernels, made again without asking Triton which compiled kernels they are.

Triton works that out from the arguments at every launch: with some 30 of them 15 of 20 us (docs/kernels.md). But the
arguments follow from what the call was given, so that calls alike in shapes, strides, types, alignment and settings
launch the same compiled kernels in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

Launch = Callable[..., None]
# Calls remembered; beyond that, as lengths that never repeat would have it, all are forgotten.
MOST_CALLS = 1024
_calls: dict[Hashable, dict[int, tuple[Any, dict[str, Any], Any, list[str]]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """``kernel[grid](*arguments, **options)``: as Triton launches."""
    kernel[grid](*arguments, **options)


def _alike(x: Any) -> Hashable:
    """What Triton looks at in a tensor: where it lies but for its address, beside alignment."""
    if isinstance(x, Tensor):
        return x.dtype, x.shape, x.stride(), x.data_ptr() % 16, x.device.index
    return x


class Repeated:
    """`launch` for one call: each launch in turn is the one that a call alike made in its place.

    Args: everything that decides with what arguments, but for addresses, the call launches its kernels. Temporary
    tensors need not be among them, as PyTorch aligns what it allocates. A launch of another kernel, or with other
    options, than in its place before goes to Triton.
    """

    def __init__(self, *given: Hashable) -> None:
        if len(_calls) > MOST_CALLS:
            _calls.clear()
        self._launches = _calls.setdefault(tuple(map(_alike, given)), {})
        self._count = 0

    def __call__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """`launch`."""
        number, self._count = self._count, self._count + 1
        known = self._launches.get(number)
        if known is not None and known[0] is kernel and known[1] == options:
            _, _, compiled, names = known
            compiled[(*grid, 1, 1)](*arguments, *(options[name] for name in names))
            return
        compiled = kernel[grid](*arguments, **options)
        # nothing comes back from Triton's interpreter
        if compiled is not None:
            self._launches[number] = kernel, options, compiled, kernel.arg_names[len(arguments) :]
