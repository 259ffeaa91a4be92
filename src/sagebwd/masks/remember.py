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
        if any(isinstance(x, Tensor) and x.is_inference() for x in objects):  # these count no versions
            return make()
        entries = self._entries.setdefault(objects[0], {})
        key = (settings, *((id(x), x._version if isinstance(x, Tensor) else 0) for x in objects))
        known = entries.get(key)
        if known is not None and all(reference() is x for reference, x in zip(known[0], objects)):
            return known[1]
        if len(entries) >= MOST:
            entries.clear()
        with torch.inference_mode(False), torch.no_grad():  # what is made may be saved for a backward
            made = make()
        entries[key] = [weakref.ref(x) for x in objects], made
        return made
