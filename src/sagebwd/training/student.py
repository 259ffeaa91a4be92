"""Student's t distribution of whole degrees of freedom: how far the mean of a few values may lie from that of many.

The probability of |T| < t is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4), so nothing is tabulated.
"""

from __future__ import annotations

import math


def within(t: float, freedom: int) -> float:
    """The probability that |T| is below ``t``, of 0 or more, with ``freedom`` degrees of freedom, at least 1."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, squared = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for index in range(1 + odd, freedom, 2):
        total += term
        term *= squared * index / (index + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def above(t: float, freedom: int) -> float:
    """The probability that T is above ``t``, of either sign."""
    tail = (1 - within(abs(t), freedom)) / 2
    return tail if t > 0 else 1 - tail


def critical(confidence: float, freedom: int) -> float:
    """The t that |T| stays below with a probability of ``confidence``, which is above 0 and below 1."""
    low, high = 0.0, 1.0
    while within(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < confidence else (low, middle)
    return high
