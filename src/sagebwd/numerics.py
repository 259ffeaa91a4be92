"""Numbers that recipes' kernels and their emulator share: ranges of INT8 and e4m3 codes, blocks of the rotation."""

from __future__ import annotations

INT8_MAX = 127
# The least magnitude that counts: 127 / TINY and 1 / (TINY / 127) are numbers of FP32, which kernels multiply by.
TINY = 2.0**-119
E4M3_MAX = 448.0
# What is left of a query's P' at least (`sagebwd.reference.float8`).
LEAST_REST = 2.0**-10
# Octaves that P' of a query gives up at most, if dP is INT8 or the input FP16.
MOST_LOWERED = 4
# Of 2^-b dO in FP16: its largest magnitude, and the exponent of the least that has all digits.
LARGEST_HALF, LEAST_HALF = 2.0**15, -14
LEAST_B = -125
# Rounding to e4m3 makes numbers smaller on average: above a power of two steps are twice as wide as below it, so more
# is rounded down to it than up. <x, e4m3(x)> is .9993 <x, x> for normal, log-normal, Laplacian and Student's x alike.
RESTORED = 0.9993**-2


# Channels of a block of the rotation at most: as many of dQ and dK as a program has.
MOST_ROTATED = 256


def rotation_sizes(head_dim: int) -> tuple[int, ...]:
    """Sizes of the blocks of the rotation R (`sagebwd.reference.rotation`), the largest first."""
    if head_dim > MOST_ROTATED:
        return MOST_ROTATED, *rotation_sizes(head_dim - MOST_ROTATED)
    return tuple(1 << bit for bit in range(head_dim.bit_length() - 1, -1, -1) if head_dim >> bit & 1)


def rounded_up(count: int, unit: int) -> int:
    """The least multiple of a unit that is no less than a count."""
    return (count + unit - 1) // unit * unit
