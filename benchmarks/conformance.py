"""Whether a kernel is the recipe: the rule that tests, the fuzz and the benchmark's gate hold every kernel to.

Let ``high`` be the recipe's emulator in FP64 and ``low`` the emulator at the kernel's precision. A kernel passes where
max|kernel - high| <= 2 (max|low - high| + eps max|high|), the root mean squares obey the same inequality, and every
value is finite. The budget follows from the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def rms(x: Tensor) -> float:
    """Root of the mean square."""
    return math.sqrt(x.detach().double().square().mean().item()) if x.numel() else 0.0


def emulator_error(low: Tensor, high: Tensor) -> tuple[float, float]:
    """(largest, RMS) distance of the emulator at a kernel's precision from the emulator in FP64."""
    difference = low.detach().double() - high.detach()
    return (difference.abs().max().item(), rms(difference)) if difference.numel() else (0.0, 0.0)


def moved(*tensors: Tensor, seed: int = 0) -> list[Tensor]:
    """Tensors in FP64, each value a 2^-16th off, at random.

    Of Q and K that are rotated some codes then are others: FP32 sums in another order turn single ones over, in the
    kernel alone or in the emulator alone. The error of the emulator of these is one of `violation`'s ``other_errors``.
    """
    generator = torch.Generator().manual_seed(seed)
    factors = (1 + 2.0**-16 * torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in tensors)
    return [x.double() * factor.to(x.device) for x, factor in zip(tensors, factors)]


def violation(
    actual: Tensor, low: Tensor, high: Tensor, eps_out: float, other_errors: Iterable[tuple[float, float]] = ()
) -> str | None:
    """What of a kernel's ``actual`` breaks the rule, or None; the three tensors have one shape.

    Args: eps_out, of the output's dtype; other_errors, `emulator_error` of other draws of the same shape, the largest
    of which counts: a tensor of a few values does not show by itself how far its precision may lead.
    """
    if not actual.numel():
        return None
    errors = [emulator_error(low, high), *other_errors]
    max_error, rms_error = (max(column) for column in zip(*errors))
    actual, high = actual.detach().double(), high.detach().double()
    if not torch.isfinite(actual).all():
        return f"{int((~torch.isfinite(actual)).sum())} values are not finite"
    largest, error = high.abs().max().item(), (actual - high).abs()
    budget, rms_budget = 2 * (max_error + eps_out * largest), 2 * (rms_error + eps_out * rms(high))
    if not error.max().item() <= budget:
        place = tuple(int(index) for index in torch.unravel_index(error.argmax(), error.shape))
        return f"error {error.max().item():.3e} over budget {budget:.3e} at {place}, largest value {largest:.3e}"
    if not rms(error) <= rms_budget:
        return f"RMS error {rms(error):.3e} over {rms_budget:.3e}"
    return None
