"""Whose kernels run a call. `choose` answers, once a call; what it chose goes through the operators by name.

The rows that it chooses from are static (`sagebwd.kernels.capabilities`); a module is imported when a call first runs
on it. `sagebwd.auto.choice` says which calls of "auto" run in full precision instead.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.call import Ask, Call, Saved
from sagebwd.kernels import capabilities
from sagebwd.kernels.capabilities import BACKWARD, FORWARD, IMPLEMENTATIONS, TORCH, Row
from sagebwd.kernels.runtime import device as gpu
from sagebwd.recipe import AUTO, Recipe

# What "auto" stands for, by implementation: the reference that nobody named runs what torch has no function for.
AUTOMATIC = {"hopper": "mixed", "mma_sync": "token", "triton": "token", "reference": "full"}
# The same where mma.sync's own backward runs, which dP in INT8 makes faster; Triton's, at 64, it does not.
AUTOMATIC_OF_OWN_BACKWARD = Recipe.parse("token(dp=int8)")
# Compute capabilities that the kernels of mma.sync are compiled for in tests, and are tried first on.
MMA_SYNC = (80, 86, 89, 120)
# What the kernels of two families need, as `facts_of` names it.
NEEDED = {"hopper": "extra hopper", "mma_sync": "NVRTC"}
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

    @property
    def impl(self) -> str:
        """What ``impl`` would name: "hopper" where either direction is its own. "torch" is nothing to name."""
        return max(self.forward.impl, self.backward.impl, key=(*IMPLEMENTATIONS, TORCH).index)

    def forms(self, head_dim: int, value_dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The widths that its kernels run at, forward and backward, which a call's are filled up to with zeros.

        Backward reads codes of Q and K as wide as forward leaves them.
        """
        forward = self.forward.form(int(head_dim), int(value_dim))  # in a trace they may be symbols
        backward = self.backward.form(*forward)
        return (backward if self.forward.form(*backward) == backward else forward), backward


def choose(ask: Ask, card: str | None = None) -> Choice:
    """Whose kernels run a call, and by which recipe.

    "auto" is `mixed` where Hopper's kernels run it, `token(dp=int8)` where mma.sync's forward and backward do, else
    `token` on a GPU and under ``impl="reference"``, else `full`. The implementation is the named one, or Hopper's
    kernels on compute capability 9.0 where they take the call, mma.sync's on the `MMA_SYNC`, else Triton's on a GPU
    and the reference elsewhere.

    card: the name of a GPU of compute capability 9.0 with all of the extras, whose answer is wanted; None for the
    device itself.

    Raises ValueError for an unknown implementation or the wrong device, TypeError for a dtype and NotImplementedError
    for a recipe, width or mask that it lacks, each naming the way out.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return _choose(ask, arch_of(ask.device), interpreted) if card is None else _choose(ask, 90, interpreted, True)


@cache
def _choose(ask: Ask, arch: int, interpreted: bool, with_extras: bool = False) -> Choice:
    check_known(None if ask.impl == FASTEST else ask.impl)
    if ask.impl not in (None, FASTEST):
        wanted = (ask.impl,)
    elif ask.device.type == "cuda":
        wanted = (*before_triton(arch), "triton")
    else:
        wanted = ("reference",)
    _check_device(wanted[-1], ask.device, arch, interpreted)
    _check_dtype(wanted[-1], ask.dtype)
    reasons = {}
    for impl in wanted:
        recipe = _automatic(impl, ask) if ask.recipe == AUTO else ask.recipe
        found = _rows(impl, recipe, ask, with_extras)
        if not isinstance(found, str):
            return Choice(recipe, *found)
        reasons[found] = None
    raise NotImplementedError(
        f"impl={wanted[-1]!r} does not support this call: {'; '.join(reasons)}; impl='reference' does"
    )


def _automatic(impl: str, ask: Ask) -> Recipe:
    """What "auto" stands for where an implementation runs a call: one recipe, whether it trains or not."""
    if ask.impl == "reference":
        return Recipe.named("token")
    if impl == "mma_sync" and capabilities.row(BACKWARD, impl).form(ask.head_dim, ask.value_dim) is not None:
        return AUTOMATIC_OF_OWN_BACKWARD
    return Recipe.named(AUTOMATIC[impl])


def before_triton(arch: int) -> tuple[str, ...]:
    """Implementations that are faster than Triton's kernels on a GPU, where they take a call."""
    if arch == 90:
        return ("hopper",)
    return ("mma_sync",) if arch in MMA_SYNC else ()


def refusal(ask: Ask) -> str | None:
    """Why the implementation that is asked for lacks a recipe, width or mask, or None; the device is not looked at."""
    found = _rows(ask.impl, ask.recipe, ask)
    return found if isinstance(found, str) else None


def _rows(impl: str, recipe: Recipe, ask: Ask, with_extras: bool = False) -> tuple[Row, Row] | str:
    """The rows of an implementation for both directions, or why it lacks the call.

    "hopper" and "mma_sync" have at least one of the two themselves; the other is Triton's, to the same recipe, where
    they lack that or what compiles them is missing; with_extras: it is not.
    """
    dtype = str(ask.dtype).removeprefix("torch.")
    rows, refusals = [], []
    for direction in (FORWARD, BACKWARD):
        for candidate in (impl, "triton") if impl in ("hopper", "mma_sync") else (impl,):
            row = capabilities.row(direction, candidate)
            reason = row.refusal(recipe, ask.head_dim, ask.value_dim, dtype)
            if reason is None and row.needs and not with_extras:
                reason = missing(row)
            if reason is None:
                rows.append(row)
                break
            refusals.append(reason)
    if len(rows) == 2 and impl in (row.impl for row in rows):
        return rows[0], rows[1]
    return "; ".join(dict.fromkeys(refusals))


def missing(row: Row) -> str | None:
    """What is missing or broken here of what a row needs, or None."""
    return _module(row.needs).unavailable()


def check_known(impl: str | None) -> None:
    """Raises ValueError for the name of no implementation; None is the fastest."""
    if impl is not None and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r} is not known; accepted: None, {', '.join(map(repr, IMPLEMENTATIONS))}")


def check_traced(impl: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Raises what `choose` does, as far as a trace knows: the operators choose when it runs."""
    check_known(impl)
    on_gpu = device.type == "cuda"
    likely = impl or ("triton" if on_gpu else "reference")
    _check_device(likely, device, 90 if on_gpu else 0, os.environ.get("TRITON_INTERPRET") == "1")
    _check_dtype(likely, dtype)


def _check_device(impl: str, device: torch.device, arch: int, interpreted: bool) -> None:
    if impl == "hopper" and arch != 90:
        way_out = "use impl='triton'" if device.type == "cuda" else "use impl='reference' on a CPU"
        raise ValueError(f"impl='hopper' needs a GPU of compute capability 9.0 (H100, H200), got {device}; {way_out}")
    if impl == "mma_sync" and arch < 80:
        way_out = "use impl='triton'" if device.type == "cuda" else "use impl='reference' on a CPU"
        raise ValueError(f"impl='mma_sync' needs a GPU of compute capability 8.0 or more, got {device}; {way_out}")
    if impl == "triton" and device.type != "cuda" and not interpreted:
        raise ValueError(
            f"impl='triton' needs a CUDA device, got {device}; "
            "use impl='reference', or set TRITON_INTERPRET=1 for Triton's (very slow) interpreter"
        )


def _check_dtype(impl: str, dtype: torch.dtype) -> None:
    accepted = capabilities.row(FORWARD, impl).dtypes
    name = str(dtype).removeprefix("torch.")
    if name not in accepted:
        raise TypeError(
            f"query: dtype {name} is not supported by impl={impl!r}; accepted: {', '.join(accepted)}. Run under "
            "torch.autocast, cast the tensors, or ask for impl='reference' (slow)"
        )


def named(recipe: Recipe, name: str) -> Choice:
    """The choice of a recipe and a `Choice.name`."""
    forward, _, backward = name.partition(SEPARATOR)
    return Choice(recipe, capabilities.row(FORWARD, forward), capabilities.row(BACKWARD, backward))


def forward(choice: Choice, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
    """The output, and what `backward` reads of it, each in memory of its own."""
    if choice.forward.impl == "reference":
        return _module(choice.forward.module).forward(call, q, k, v)
    given = *family(FORWARD, choice, call), prepared(FORWARD, choice, call), q, k, v
    return Saved(*runtime().program.run(runtime().driver.forward, *given))


def backward(
    choice: Choice, call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv; q and k are given where `sagebwd.call.keeps_inputs` says so."""
    if choice.backward.impl == "reference":
        return _module(choice.backward.module).backward(call, saved, do, dlse, q, k, v)
    given = *family(BACKWARD, choice, call), prepared(BACKWARD, choice, call), saved, do, dlse, q, k, v
    return runtime().program.run(runtime().driver.backward, *given)[:-1]


def family(direction: str, choice: Choice, call: Call) -> tuple[ModuleType, tuple[int, int]]:
    """The module of a direction's kernels, and the widths that they run at."""
    forms = choice.forms(call.head_dim, call.value_dim)
    row = choice.forward if direction == FORWARD else choice.backward
    return _module(row.module), forms[direction == BACKWARD]


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
def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


def arch_of(device: torch.device) -> int:
    """90 for compute capability 9.0; 0 where there is no GPU, of which no kernels are asked."""
    return gpu.capability(device) if device.type == "cuda" else 0


def is_hopper(device: torch.device) -> bool:
    """Whether a device is of compute capability 9.0."""
    return arch_of(device) == 90
