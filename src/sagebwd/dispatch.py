"""Whose kernels run a call. `choose` answers, once a call; what it chose goes through the operators by name.

It reads the records of `sagebwd.kernels.families`, which are static; a module is imported when a call first runs on
it. `sagebwd.auto.choice` says which calls of "auto" run in full precision instead.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch

from sagebwd.call import Ask, Call
from sagebwd.kernels import families
from sagebwd.kernels.capabilities import BACKWARD, FORWARD, Family, Row
from sagebwd.kernels.families import FAMILIES
from sagebwd.kernels.runtime import device as gpu
from sagebwd.recipe import AUTO, Recipe

# An implementation of a traced call, which the operators choose.
FASTEST = "fastest"
# Of a choice's name, the forward's before it and the backward's behind.
SEPARATOR = "/"


class Choice(NamedTuple):
    """A recipe, and who runs each direction of a call.

    contender: of a call that "auto" hands over in full precision, who runs it (`sagebwd.auto.contenders`).
    """

    recipe: Recipe
    forward: Row
    backward: Row
    contender: str | None = None

    @property
    def name(self) -> str:
        """By which `named` finds the rows again."""
        return f"{self.forward.impl}{SEPARATOR}{self.backward.impl}"

    def forms(self, head_dim: int, value_dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The widths that its kernels run at, forward and backward, which a call's are filled up to with zeros.

        Backward reads codes of Q and K as wide as forward leaves them.
        """
        forward = self.forward.form(int(head_dim), int(value_dim))  # in a trace they may be symbols
        backward = self.backward.form(*forward)
        return (backward if self.forward.form(*backward) == backward else forward), backward


def choose(ask: Ask, arch: int | None = None) -> Choice:
    """Whose kernels run a call, and by which recipe.

    "auto" is what the family's record says. The implementation is the named one, or the first of those that are faster
    on the GPU's compute capability and take the call, else Triton's on a GPU and the reference elsewhere.

    arch: the compute capability of a GPU with all of the extras, whose answer is wanted; None for the device itself.

    Raises ValueError for an unknown implementation or the wrong device, TypeError for a dtype and NotImplementedError
    for a recipe, width or mask that it lacks, each naming the way out.
    """
    if arch is not None:
        return _choose(ask, arch, False, True)
    return _choose(ask, arch_of(ask.device), os.environ.get("TRITON_INTERPRET") == "1")


@cache
def _choose(ask: Ask, arch: int, interpreted: bool, with_extras: bool = False) -> Choice:
    check_known(None if ask.impl == FASTEST else ask.impl)
    if ask.impl not in (None, FASTEST):
        wanted = (ask.impl,)
    else:
        on_gpu = ask.device.type == "cuda"
        wanted = (*(families.faster_on(arch) if on_gpu else ()), families.any_of(on_gpu).name)
    last = FAMILIES[wanted[-1]]
    _check_device(last, ask.device, arch, interpreted)
    _check_dtype(last, ask.dtype)
    reasons = {}
    for impl in wanted:
        recipe = _automatic(FAMILIES[impl], ask) if ask.recipe == AUTO else ask.recipe
        found = _rows(FAMILIES[impl], recipe, ask, with_extras)
        if isinstance(found, tuple):
            return Choice(recipe, *found)
        reasons |= dict.fromkeys(found)
    tried = f"{' and '.join(map(repr, wanted))} {'does' if len(wanted) == 1 else 'do'}"
    raise NotImplementedError(
        f"impl={tried} not support this call: {'; '.join(reasons)}; impl={families.REFERENCE.name!r} does"
    )


def _automatic(family: Family, ask: Ask) -> Recipe:
    """What "auto" stands for where a family runs a call: one recipe, whether it trains or not."""
    if ask.impl == family.name and family.auto_if_named:
        return Recipe.named(family.auto_if_named)
    own = family.auto_of_own_backward
    if own is not None and family.backward.form(ask.head_dim, ask.value_dim) is not None:
        return Recipe.parse(own)
    return Recipe.named(family.auto)


def _rows(family: Family, recipe: Recipe, ask: Ask, with_extras: bool = False) -> tuple[Row, Row] | list[str]:
    """The rows of a family for both directions, or the reasons why it lacks the call.

    A family that falls back has at least one of the two itself; the other is run to the same recipe, where it lacks
    that or what compiles it is missing; with_extras: it is not.
    """
    dtype = str(ask.dtype).removeprefix("torch.")
    rows, refusals = [], []
    for direction in (FORWARD, BACKWARD):
        candidates = family, *([FAMILIES[family.falls_back]] if family.falls_back else [])
        for candidate in candidates:
            row = candidate.row(direction)
            if row is None:
                refusals.append(f"{candidate.name} has no {direction}")
                continue
            reason = row.refusal(recipe, ask.head_dim, ask.value_dim, dtype)
            if reason is None and row.needs and not with_extras:
                reason = missing(row)
            if reason is None:
                rows.append(row)
                break
            refusals.append(reason)
    if len(rows) == 2 and family.name in (row.impl for row in rows):
        return rows[0], rows[1]
    return refusals


def missing(row: Row) -> str | None:
    """What is missing or broken here of what a row needs, or None."""
    return module_of(row.needs).unavailable()


def check_known(impl: str | None) -> None:
    """Raises ValueError for the name of no implementation; None is the fastest."""
    if impl is not None and impl not in list(FAMILIES):  # a list has no hash
        raise ValueError(f"impl={impl!r} is not known; accepted: None, {', '.join(map(repr, FAMILIES))}")


def check_traced(impl: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Raises what `choose` does, as far as a trace knows: the operators choose when it runs."""
    check_known(impl)
    on_gpu = device.type == "cuda"
    likely = families.any_of(on_gpu) if impl is None else FAMILIES[impl]
    _check_device(likely, device, 90 if on_gpu else 0, os.environ.get("TRITON_INTERPRET") == "1")
    _check_dtype(likely, dtype)


def _check_device(family: Family, device: torch.device, arch: int, interpreted: bool) -> None:
    if family.runs_on(arch) or (family.interpreted and interpreted):
        return
    runs = next(x.name for x in (families.any_of(True), families.REFERENCE) if x.runs_on(arch))
    way_out = f"use impl={runs!r}"
    if family.interpreted:
        way_out += ", or set TRITON_INTERPRET=1 for Triton's (very slow) interpreter"
    elif device.type != "cuda":
        way_out += " on a CPU"
    raise ValueError(f"impl={family.name!r} needs {family.gpu}, got {device}; {way_out}")


def _check_dtype(family: Family, dtype: torch.dtype) -> None:
    accepted = (family.forward or family.backward).dtypes
    name = str(dtype).removeprefix("torch.")
    if name not in accepted:
        raise TypeError(
            f"query: dtype {name} is not supported by impl={family.name!r}; accepted: {', '.join(accepted)}. Run "
            f"under torch.autocast, cast the tensors, or ask for impl={families.REFERENCE.name!r} (slow)"
        )


def named(recipe: Recipe, name: str) -> Choice:
    """The choice of a recipe and a `Choice.name`."""
    forward, _, backward = name.partition(SEPARATOR)
    return Choice(recipe, families.row(FORWARD, forward), families.row(BACKWARD, backward))


def family(direction: str, choice: Choice, call: Call) -> tuple[ModuleType, tuple[int, int]]:
    """The module of a direction's kernels, and the widths that they run at."""
    forms = choice.forms(call.head_dim, call.value_dim)
    row = choice.forward if direction == FORWARD else choice.backward
    return module_of(row.module), forms[direction == BACKWARD]


def prepared(direction: str, choice: Choice, call: Call) -> Call:
    """The call at its kernels' widths with what they read of a mask in the mask's place."""
    if call.mask is None:
        return call
    module, (head_dim, value_dim) = family(direction, choice, call)
    wide = call._replace(head_dim=head_dim, value_dim=value_dim)
    return call._replace(mask=None, lists=module.prepare(direction, wide).lists)


class Runtime(NamedTuple):
    """What runs kernels: modules that import triton."""

    program: ModuleType
    driver: ModuleType
    sinks: ModuleType


@cache
def runtime() -> Runtime:
    """The modules that describe and run calls of kernels."""
    names = "kernels.runtime.program", "kernels.runtime.driver", "kernels.sinks"
    return Runtime(*(importlib.import_module(f"sagebwd.{name}") for name in names))


@cache
def module_of(name: str) -> ModuleType:
    """The module of a row's functions, or of what it needs, by its name."""
    return importlib.import_module(name)


def arch_of(device: torch.device) -> int:
    """90 for compute capability 9.0; 0 where there is no GPU, of which no kernels are asked."""
    return gpu.capability(device) if device.type == "cuda" else 0
