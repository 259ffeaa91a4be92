"""One least-recently-used cache for all that follows from a call's specification: plans and programs.

A specification has shapes, strides, dtypes, devices, alignment and settings; never a value, never the identity of a
user's tensor. Entries keep no tensor. `ENTRIES` bounds them: an entry takes some tens of kilobytes of the host's
memory, and none of a GPU's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Any

from torch import Tensor

ENTRIES = 2048
# Addresses that kernels take as they are: multiples of TAKEN bytes. Pieces of one allocation begin at multiples of
# ALIGNMENT, as PyTorch's own do.
TAKEN, ALIGNMENT = 16, 512


class Cache:
    """A least-recently-used cache that threads share."""

    def __init__(self, entries: int = ENTRIES) -> None:
        # found: [value, how many had been put when it last moved to the end], the one that was used last at the end
        self.entries, self._found, self._puts, self._lock = entries, OrderedDict(), 0, Lock()

    def get(self, key: Hashable) -> Any:
        """The entry, or None, as for a key that cannot be hashed: settings in it have still to be refused.

        Entries are dropped when one is put. So an entry moves to the end once between two, and other hits look it up
        alone: without the lock, by one hash of the key.
        """
        try:
            found = self._found.get(key)
        except TypeError:
            return None
        if found is None:
            return None
        if found[1] != self._puts:
            with self._lock:
                if key in self._found:  # which no other thread has dropped
                    self._found.move_to_end(key)
                    found[1] = self._puts
        return found[0]

    def put(self, key: Hashable, value: Any) -> None:
        """Keep an entry, and drop those that were used longest ago beyond the bound."""
        with self._lock:
            self._puts += 1
            self._found[key] = [value, self._puts]
            self._found.move_to_end(key)
            while len(self._found) > self.entries:
                self._found.popitem(last=False)

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._found.clear()

    def __len__(self) -> int:
        return len(self._found)

    def values(self) -> list[Any]:
        """Entries, the one that would be dropped last at the end."""
        with self._lock:
            return [value for value, _ in self._found.values()]


def layout_of(x: Tensor | None) -> Hashable:
    """A tensor's part of a specification."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % TAKEN)


def rounded(size: int) -> int:
    """Bytes of a piece of an allocation."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


PLANS = Cache()
