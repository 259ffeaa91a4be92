"""What is made once of tensors and other objects, and kept as long as they live and are not written to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")
# Kept of one object; beyond that, all that was made of it is forgotten.
MOST = 32


class Memory:
    """Values by the identity and version of the objects that they were made of, which it holds weakly.

    A value must not refer to the first of its objects, or neither would ever be freed.
    """

    def __init__(self) -> None:
        self._entries = WeakIdKeyDictionary()

    def get(self, objects: tuple[Any, ...], settings: Hashable, make: Callable[[], T]) -> T:
        """What ``make()`` gave for the same objects, unchanged since, and settings; made now if it is not known."""
        known = self.known(objects, settings)
        if known is not None:
            return known
        with torch.inference_mode(False), torch.no_grad():  # what is made may be saved for a backward
            made = make()
        self.keep(objects, settings, made)
        return made

    def known(self, objects: tuple[Any, ...], settings: Hashable) -> Any:
        """What is kept for the same objects, unchanged since, and settings; None where nothing is."""
        if _count_no_versions(objects):
            return None
        entries = self._entries.get(objects[0])
        known = None if entries is None else entries.get(_key(objects, settings))
        if known is None or any(reference() is not x for reference, x in zip(known[0], objects)):
            return None
        return known[1]

    def keep(self, objects: tuple[Any, ...], settings: Hashable, value: Any) -> None:
        """Keep a value until the objects are freed or written to; in a CUDA graph's capture not at all."""
        if _count_no_versions(objects) or _is_captured(objects):
            return
        entries = self._entries.setdefault(objects[0], {})
        if len(entries) >= MOST:
            entries.clear()
        entries[_key(objects, settings)] = [weakref.ref(x) for x in objects], value


def _count_no_versions(objects: tuple[Any, ...]) -> bool:
    """Whether writing to one of them goes unnoticed, as of tensors of inference mode."""
    return any(isinstance(x, Tensor) and x.is_inference() for x in objects)


def _is_captured(objects: tuple[Any, ...]) -> bool:
    """Whether what is made of them now is filled when a CUDA graph is replayed, in memory of the graph's."""
    on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in objects)
    return on_gpu and torch.cuda.is_current_stream_capturing()


def _key(objects: tuple[Any, ...], settings: Hashable) -> tuple:
    return settings, *((id(x), x._version if isinstance(x, Tensor) else 0) for x in objects)
