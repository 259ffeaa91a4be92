"""Settings of the monitor. Imports neither torch nor Transformers, so that configs can be read without them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Monitor:
    """Settings of `sagebwd.diagnostics.monitor.AttentionMonitor`, and the ``monitor`` section of a training config.

    Args:
        every: steps between checks; 0 for none.
        layers: which, by index from 0; all without.
        heads: query heads of a layer that are checked: the worst so far, the one with the largest logits, the others
            in turn.
        tokens: of the sequence that is checked, from its beginning.
        threshold: relative L2 error of dQ or dK above which a layer is warned of.

    Raises ValueError for a value out of range.
    """

    every: int = 100
    layers: list[int] | None = None
    heads: int = 3
    tokens: int = 1024
    threshold: float = 0.15

    def __post_init__(self) -> None:
        layers = self.layers
        if layers is not None and not (
            isinstance(layers, (list, tuple, range)) and layers
            and all(type(layer) is int and layer >= 0 for layer in layers)
        ):  # fmt: skip
            raise ValueError(f"monitor.layers={layers!r} must list layers from 0, for example [0, 5], or be left out")
        for name, least in (("every", 0), ("heads", 1), ("tokens", 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"monitor.{name}={value!r} must be at least {least}, an integer")
        if not isinstance(self.threshold, (int, float)) or not 0 < self.threshold < math.inf:
            raise ValueError(f"monitor.threshold={self.threshold!r} must be a number above 0")
