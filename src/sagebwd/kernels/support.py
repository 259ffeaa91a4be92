"""How kernels say what they cannot run."""

from __future__ import annotations

import torch

from sagebwd.recipe import Recipe

# Steps of P (`Recipe.p_levels`) that forward kernels compute; any other value would get the numbers of one of these.
P_LEVELS = (127, 254)
DTYPES = (torch.bfloat16, torch.float16)


def lacks(recipe: Recipe, fields: dict[str, object]) -> str | None:
    """Names a recipe and the fields that kernels want of it, where it has others."""
    if all(getattr(recipe, name) == value for name, value in fields.items()):
        return None
    return f"recipe {str(recipe)!r} is not one with {', '.join(f'{name}={value!r}' for name, value in fields.items())}"


def outside(name: str, value: object, accepted: tuple) -> str | None:
    """Says that a value is not among those that kernels take, where it is not."""
    return None if value in accepted else f"{name}{value} is not one of {', '.join(map(str, accepted))}"


def other_dtype(dtype: torch.dtype) -> str | None:
    """Says that a dtype has not 16 bits, where it has not."""
    return None if dtype in DTYPES else f"{dtype} is neither bfloat16 nor float16"
