"""Switches for debugging and reproducibility, as a context manager or as SAGEBWD_ environment variables.

- ``disabled`` (SAGEBWD_DISABLED=1): every call runs the ``full`` recipe, all products in 16 bit.
- ``backward_16bit`` (SAGEBWD_BACKWARD_16BIT=1): dV, dQ and dK run in 16 bit; forward keeps its recipe.
- ``deterministic`` (SAGEBWD_DETERMINISTIC=1): backward adds in a fixed order, as under
  ``torch.use_deterministic_algorithms(True)``.

They are process-wide, as PyTorch's own; a call takes the setting that holds when its forward runs. Where blocks of
several threads overlap, the one decides that was entered last and is not left; after the last one all is as before.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sagebwd import environment
from sagebwd.environment import PREFIX
from sagebwd.recipe import SIXTEEN_BIT, Recipe


@dataclass
class _Switches:
    disabled: bool
    backward_16bit: bool
    deterministic: bool


environment.check()
# What the environment says, and what holds now.
_base = _Switches(**{x.name: environment.is_on(PREFIX + x.name.upper()) for x in dataclasses.fields(_Switches)})
current = dataclasses.replace(_base)
# What the blocks give that are entered and not left, of all threads; whoever changes it or ``current`` holds the lock.
_given: list[dict[str, bool]] = []
_lock = threading.Lock()


@contextmanager
def switches(
    *, disabled: bool | None = None, backward_16bit: bool | None = None, deterministic: bool | None = None
) -> Iterator[None]:
    """Set switches inside a ``with`` block.

    Args: disabled, backward_16bit, deterministic, as above, True or False; None leaves one as it is.

    Returns: a context manager. Raises TypeError for another value.
    """
    given = {"disabled": disabled, "backward_16bit": backward_16bit, "deterministic": deterministic}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be True, False or None")
    if torch.compiler.is_dynamo_compiling():
        # the calls traced here read the name, and compiled code binds it to the same again: no other thread sees that
        global current
        before, current = current, dataclasses.replace(current, **given)
        try:
            yield
        finally:
            current = before
        return
    with _lock:
        _given.append(given)
        _set(given)
    try:
        yield
    finally:
        with _lock:  # take back what this block gave, and nothing of the others
            del _given[[x is given for x in _given].index(True)]
            _set(given)


def _set(names: Iterable[str]) -> None:
    """Give switches the value of the block that was entered last among those that name them."""
    for name in names:
        values = [given[name] for given in _given if name in given]
        setattr(current, name, values[-1] if values else getattr(_base, name))


def apply_to(recipe: Recipe) -> Recipe:
    """The recipe that runs when ``recipe`` is asked for."""
    if current.disabled:
        return Recipe.named("full")
    if current.backward_16bit:
        return recipe.replace(dv=SIXTEEN_BIT, dq=SIXTEEN_BIT, dk=SIXTEEN_BIT)
    return recipe
