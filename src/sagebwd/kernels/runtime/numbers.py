"""Numbers that a program is given anew in each run, as a mask_mod's: their values are in no specification."""

from __future__ import annotations

from typing import Any


class Numbers:
    """Integers and fractions of one program, equal to others that kernels take alike.

    Of an integer n kernels are given 4n + 3: Triton makes a constant of a 1, and another kernel of multiples of 16.
    """

    def __init__(self, numbers: tuple[int | float, ...]) -> None:
        self.values = [4 * n + 3 if isinstance(n, int) else n for n in numbers]
        self.kinds = tuple(isinstance(n, float) or (-(2**31) <= n < 2**31, "integer") for n in self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numbers) and other.kinds == self.kinds

    def __hash__(self) -> int:
        return hash(self.kinds)

    def places(self) -> tuple[Number, ...]:
        """What stands for them in a description."""
        return tuple(Number(place - len(self.values), value) for place, value in enumerate(self.values))


class Number:
    """One that is given at a place, counted from the end of all that is; sample: one that kernels take alike."""

    def __init__(self, place: int, sample: int | float) -> None:
        self.place, self.sample = place, sample


def sampled(x: Any) -> Any:
    """Arguments with samples in place of `Number`s."""
    if isinstance(x, Number):
        return x.sample
    if type(x) is tuple or hasattr(x, "_fields"):
        fields = map(sampled, x)
        return type(x)(*fields) if hasattr(x, "_fields") else tuple(fields)
    return x
