"""How far one tensor is from another: the only home of these formulas. All accumulate in FP64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cosine(actual: Tensor, expected: Tensor) -> float:
    """Cosine of the angle between two tensors of one shape; 1 if both are zero."""
    a, b = _flat(actual), _flat(expected)
    norms = (a.norm() * b.norm()).item()
    if norms == 0:
        return 1.0 if a.norm() == b.norm() else 0.0
    return (a @ b).item() / norms


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||; 0 if both are zero, infinite if only ``expected`` is."""
    a, b = _flat(actual), _flat(expected)
    error, norm = (a - b).norm().item(), b.norm().item()
    if norm == 0:
        return 0.0 if error == 0 else math.inf
    return error / norm


def rms(x: Tensor) -> float:
    """Root of the mean square."""
    return math.sqrt(_flat(x).square().mean().item()) if x.numel() else 0.0


def sqnr_db(actual: Tensor, expected: Tensor) -> float:
    """Signal to quantisation noise, in dB: -20 log10 of the relative L2 error."""
    error = relative_l2(actual, expected)
    return math.inf if error == 0 else -20 * math.log10(error)


def _flat(x: Tensor) -> Tensor:
    return x.detach().to(torch.float64).flatten()
