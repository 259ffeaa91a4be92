"""Switches for debugging and reproducibility, as a context manager or as SAGEBWD_ environment variables.

- ``disabled`` (SAGEBWD_DISABLED=1): every call runs the ``full`` recipe, all products in 16 bit.
- ``backward_16bit`` (SAGEBWD_BACKWARD_16BIT=1): dV, dQ and dK run in 16 bit; forward keeps its recipe.
- ``deterministic`` (SAGEBWD_DETERMINISTIC=1): backward adds in a fixed order, as under
  ``torch.use_deterministic_algorithms(True)``.

They are process-wide, as PyTorch's own; a call takes the setting that holds when its forward runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sagebwd import environment
from sagebwd.environment import PREFIX
from sagebwd.recipe import SIXTEEN_BIT, Recipe


@dataclass
class _Switches:
    disabled: bool
    backward_16bit: bool
    deterministic: bool


environment.check()
current = _Switches(**{x.name: environment.is_on(PREFIX + x.name.upper()) for x in dataclasses.fields(_Switches)})


@contextmanager
def switches(
    *, disabled: bool | None = None, backward_16bit: bool | None = None, deterministic: bool | None = None
) -> Iterator[None]:
    """Set the given switches inside a ``with`` block; None leaves one as it is. Raises TypeError for anything else."""
    before = dataclasses.replace(current)
    given = {"disabled": disabled, "backward_16bit": backward_16bit, "deterministic": deterministic}
    for name, value in given.items():
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be True, False or None")
    for name, value in given.items():
        if value is not None:
            setattr(current, name, value)
    try:
        yield
    finally:
        for field in dataclasses.fields(before):
            setattr(current, field.name, getattr(before, field.name))


def apply_to(recipe: Recipe) -> Recipe:
    """The recipe that runs when ``recipe`` is asked for."""
    if current.disabled:
        return Recipe.named("full")
    if current.backward_16bit:
        return recipe.replace(dv=SIXTEEN_BIT, dq=SIXTEEN_BIT, dk=SIXTEEN_BIT)
    return recipe
