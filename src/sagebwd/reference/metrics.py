"""How far one tensor is from another, in FP64: the only home of these formulas."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cosine(actual: Tensor, expected: Tensor) -> float:
    """Cosine of the angle between two tensors of one shape; 1 if both are zero."""
    return Comparison.of(actual, expected).cosine()


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||; 0 if both are zero, infinite if only ``expected`` is."""
    return Comparison.of(actual, expected).relative_l2()


class Comparison:
    """Two tensors that come in pieces: nothing is kept but sums."""

    def __init__(self) -> None:
        self.dot = self.actual_square = self.expected_square = self.error_square = 0.0
        self.peak = 0.0
        """The largest |expected| so far."""

    @classmethod
    def of(cls, actual: Tensor, expected: Tensor) -> Comparison:
        """Of two whole tensors."""
        found = cls()
        found.add(actual, expected)
        return found

    def add(self, actual: Tensor, expected: Tensor) -> None:
        """Count one more piece; both of one shape."""
        a, b = _flat(actual), _flat(expected)
        error = a - b
        self.dot += (a @ b).item()
        self.actual_square += (a @ a).item()
        self.expected_square += (b @ b).item()
        self.error_square += (error @ error).item()
        self.peak = max(self.peak, b.abs().max().item()) if b.numel() else self.peak

    def cosine(self) -> float:
        """As `cosine`."""
        norms = math.sqrt(self.actual_square) * math.sqrt(self.expected_square)
        if norms == 0:
            return 1.0 if self.actual_square == self.expected_square else 0.0
        return self.dot / norms

    def relative_l2(self) -> float:
        """As `relative_l2`."""
        if self.expected_square == 0:
            return 0.0 if self.error_square == 0 else math.inf
        return math.sqrt(self.error_square / self.expected_square)

    def rms(self, count: int) -> float:
        """Root of the mean square of ``expected`` over ``count`` elements, those that never came being zero."""
        return math.sqrt(self.expected_square / count)


def _flat(x: Tensor) -> Tensor:
    return x.detach().to(torch.float64).flatten()
