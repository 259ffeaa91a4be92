"""What kernels read of a mask, made once: kept with the mask object itself, and ordered among streams by events."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
# Parts kept of one mask. Beyond these a part is made anew in each call; none is dropped, since a CUDA graph may read
# it.
MOST = 64


class Parts:
    """Tensors made of a mask's own, by settings.

    On another stream than theirs they are waited for, and the allocator is told of the use. While a CUDA graph is
    captured nothing is kept, since its memory is the graph's, and what is not known to be finished is made anew.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, _Part] = {}

    def get(self, settings: Hashable, make: Callable[[], T]) -> T:
        """The part that ``make()`` gives for some settings."""
        known = self._made.get(settings)
        if known is not None and known.arrive():
            return known.value
        with torch.inference_mode(False), torch.no_grad():  # a part may be saved for a backward
            made = make()
        self.keep(settings, made)
        return made

    def take(self, settings: Hashable, make: Callable[[], T]) -> T:
        """`get`, of what one direction of a call reads once."""
        return self.get(settings, make)

    def keep(self, settings: Hashable, value: Any) -> None:
        """Keep a part that was made on the current stream."""
        part = _Part(value)
        if len(self._made) < MOST and not part.is_captured():
            self._made[settings] = part.recorded()

    def arrive(self) -> None:
        """Order the current stream behind the making of the mask's own tensors, kept as ``"mask"``."""
        if "mask" in self._made:
            self._made["mask"].arrive()


class PartsOfCall(Parts):
    """Parts of a mask that one call reads, whose backward runs on its stream."""

    def get(self, settings: Hashable, make: Callable[[], T]) -> T:
        """The part that ``make()`` gives for some settings."""
        if settings not in self._made:
            self._made[settings] = make()
        return self._made[settings]

    def known(self, settings: Hashable) -> Any:
        """A part that was kept."""
        return self._made[settings]

    def take(self, settings: Hashable, make: Callable[[], T]) -> T:
        """`get`, of what one direction reads once: not kept any longer."""
        return self._made.pop(settings) if settings in self._made else make()

    def keep(self, settings: Hashable, value: Any) -> None:
        """Keep a part."""
        self._made[settings] = value

    def arrive(self) -> None:
        """Nothing is to be waited for."""


class _Part:
    """A part, the stream that it was made on, and the event behind its making."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.on_gpu = [x for x in tensors_in(value) if x.is_cuda]
        self.stream = self.event = None

    def is_captured(self) -> bool:
        """Whether a CUDA graph's replay will fill it."""
        return bool(self.on_gpu) and torch.cuda.is_current_stream_capturing()

    def recorded(self) -> _Part:
        """The same with an event behind what the current stream has been given."""
        if self.on_gpu:
            self.stream = torch.cuda.current_stream(self.on_gpu[0].device)
            self.event = torch.cuda.Event()
            self.event.record(self.stream)
        return self

    def arrive(self) -> bool:
        """Order the current stream behind it; False where that cannot be done."""
        if not self.on_gpu:
            return True
        stream = torch.cuda.current_stream(self.on_gpu[0].device)
        if stream == self.stream and (self.event is None or not torch.cuda.is_current_stream_capturing()):
            return True
        if self.event is not None:
            if torch.cuda.is_current_stream_capturing():
                return False
            if self.event.query():
                self.event = None
            else:
                stream.wait_event(self.event)
        if stream != self.stream:
            for x in self.on_gpu:
                x.record_stream(stream)
        return True


def tensors_in(x: Any) -> Iterator[Tensor]:
    """Tensors in tuples, in their order."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple):
        for field in x:
            yield from tensors_in(field)
