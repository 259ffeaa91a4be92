"""What torch.compile takes for constant when it traces a call, and what it does not know."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils._pytree import register_constant

from sagebwd.recipe import Recipe

F = TypeVar("F", bound=Callable)

# A graph is for recipes that equal the one it was traced with: a trace sets no guard on what ``is`` compares.
register_constant(Recipe)


def assume_constant(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which would import dynamo, for seconds, where nobody compiles.

    A trace runs the function itself and takes what it returns for constant; its arguments must be so.
    """
    function._dynamo_marked_constant = True
    return function


def is_known(holds: bool) -> bool:
    """Whether a comparison holds; False in a trace of a length that the graph reads, which nobody knows."""
    if not torch.compiler.is_compiling():
        return holds
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # which takes long to import

    return guard_or_false(holds)
