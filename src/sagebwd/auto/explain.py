"""What a call would run, and why, without running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd import dispatch
from sagebwd.arguments import choice_of, packed_choice_of
from sagebwd.auto import thresholds
from sagebwd.auto.thresholds import DIRECTIONS, FULL, KINDS, MASK, PADDING, WINDOW, Threshold, widths_text
from sagebwd.call import Ask, Size
from sagebwd.dispatch import Choice
from sagebwd.recipe import AUTO

# In words, where the kind's own name is none.
_KINDS = {kind: kind for kind in KINDS} | {
    FULL: "no mask", WINDOW: "a window", PADDING: "key padding", MASK: "a mask of elements",
}  # fmt: skip


class Explanation(NamedTuple):
    """Who runs a call.

    recipe: its text. forward, backward: "torch", "reference", "triton" or "hopper". form: the (head_dim, value's
    head_dim) that each direction is filled up to. why: one sentence.
    """

    recipe: str
    forward: str
    backward: str
    form: tuple[tuple[int, int], tuple[int, int]]
    why: str

    def __str__(self) -> str:
        """One line."""
        impls = self.forward, self.backward
        pairs = [f"{impl} at head_dim {widths_text(*form)}" for impl, form in zip(impls, self.form)]
        runs = pairs[0] if pairs[0] == pairs[1] else f"{pairs[0]}, backward on {pairs[1]}"
        return f"{self.recipe} on {runs}: {self.why}"


def explain(query: Tensor, key: Tensor, value: Tensor, *arguments: object, **options: object) -> Explanation:
    """What `sage_attention` would run for the same arguments, and why; nothing runs.

    A call counts as one of training where an input requires a gradient and gradients are enabled. Raises what
    `sage_attention` raises for the arguments.
    """
    _check("explain", choice_of, query, key, value, *arguments, **options)
    choice, checked = choice_of(query, key, value, *arguments, **options)
    return explained(choice, checked.ask, checked.size, options.get("recipe", AUTO))


def explain_varlen(query: Tensor, key: Tensor, value: Tensor, *arguments: object, **options: object) -> Explanation:
    """The same of `sage_attention_varlen`."""
    _check("explain_varlen", packed_choice_of, query, key, value, *arguments, **options)
    choice, ask, size = packed_choice_of(query, key, value, *arguments, **options)
    return explained(choice, ask, size, options.get("recipe", AUTO))


def _check(name: str, function: Callable, *arguments: object, **options: object) -> None:
    """Raises TypeError for arguments that one of the public functions does not take, whose ``function`` has."""
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        raise TypeError(f"{name}: {error}; accepted: {', '.join(signature.parameters)}") from None


def explained(choice: Choice, ask: Ask, size: Size | None, recipe: object) -> Explanation:
    """An answer of `sagebwd.dispatch.choose`, with its reason; recipe: as it was asked for."""
    if choice is dispatch.IN_TORCH:
        why = _why_torch(ask, size)
    else:
        why = _why_kernels(choice, ask, size, recipe)
    forms = choice.forms(ask.head_dim, ask.value_dim)
    return Explanation(str(choice.recipe), choice.forward.impl, choice.backward.impl, forms, why)


def _why_torch(ask: Ask, size: Size) -> str:
    if ask.only_torch is not None:
        return f"torch's own attention alone takes {ask.only_torch}"
    card = dispatch.card_of(ask.device)
    if not thresholds.of_card(card, torch.__version__):
        return (
            f"nobody has timed low precision on {card} with torch {torch.__version__} and this sagebwd; "
            "`sagebwd doctor --measure` does, in a few minutes"
        )
    found = dispatch.thresholds_of(ask)
    if not found:
        return f"low precision was not timed on {card} for {_call(ask)}; `sagebwd doctor --measure` may time it"
    row = _row(found, size)
    if row is None:
        least = found[-1].elements
        return f"the call is smaller than those that were timed, of {least:,} batch x heads x tokens x head_dim"
    until = "at all lengths that were timed" if row.tokens is None else f"up to {row.tokens} tokens"
    return f"{_tokens(size)} tokens, {_call(ask)}: full precision is faster {until}, {row.source}"


def _why_kernels(choice: Choice, ask: Ask, size: Size | None, recipe: object) -> str:
    if recipe != AUTO:
        return f"recipe={str(recipe)!r} was asked for"
    if ask.impl is not None:
        return f"impl={ask.impl!r} was asked for"
    if ask.recipe != AUTO:
        return "a switch is on, under which recipe='auto' is one of 'token'"
    if ask.device.type != "cuda":
        return f"the reference runs calls on {ask.device.type}"
    if size is None:
        return "torch has nothing that computes the same, or the switch deterministic is on"
    row = _row(dispatch.thresholds_of(ask), size)
    return f"{_tokens(size)} tokens, {_call(ask)}: {choice.recipe} is faster from {row.tokens} tokens on, {row.source}"


def _row(found: tuple[Threshold, ...], size: Size) -> Threshold | None:
    return next((row for row in found if size.elements >= row.elements), None)


def _call(ask: Ask) -> str:
    direction = DIRECTIONS[ask.training]
    return f"{_KINDS[ask.kind]} at head_dim {widths_text(ask.head_dim, ask.value_dim)}, {direction}"


def _tokens(size: Size) -> str:
    return str(size.queries) if size.queries == size.keys else f"{size.queries} on {size.keys}"
