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


@assume_constant
def is_exported() -> bool:
    """Whether torch.export traces the call. Asked in a trace itself, torch 2.11 says yes of torch.compile's too."""
    return torch.compiler.is_exporting()


def is_known(holds: bool) -> bool:
    """Whether a comparison holds; False in a trace of a length that the graph reads, which nobody knows.

    And of lengths that an exported program takes as they come: a guard would refuse those of which it does not hold.
    """
    if not torch.compiler.is_compiling():
        return holds
    from torch.fx.experimental import symbolic_shapes as symbols  # which takes long to import

    return symbols.statically_known_true(holds) if is_exported() else symbols.guard_or_false(holds)
