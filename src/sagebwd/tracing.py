"""Functions whose result torch.compile takes for constant when it traces a call."""

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)


def assume_constant(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which would import dynamo, for seconds, where nobody compiles.

    A trace runs the function itself and takes what it returns for constant; its arguments must be so.
    """
    function._dynamo_marked_constant = True
    return function
