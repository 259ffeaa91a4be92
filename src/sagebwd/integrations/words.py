"""Errors in the caller's words: arguments of an integration have other names than `sage_attention`'s."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable)


def in_words_of(caller: Mapping[str, str]) -> Callable[[F], F]:
    """Have what a function raises of arguments say the caller's words for those of `sage_attention`.

    Args: caller, by what stands in a message; a trace raises it as it is.
    """
    known = re.compile("|".join(rf"(?<!\w){re.escape(ours)}" for ours in caller))

    def worded(function: F) -> F:
        @wraps(function)
        def run(*given: object, **named: object) -> object:
            if torch.compiler.is_compiling():
                return function(*given, **named)
            try:
                return function(*given, **named)
            except (TypeError, ValueError, NotImplementedError) as error:
                said = known.sub(lambda found: caller[found.group()], str(error))
                if said == str(error):
                    raise
                raise type(error)(said) from error

        return run

    return worded
