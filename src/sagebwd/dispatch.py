"""Which implementation runs a call: a table for each direction, fastest first, forward and backward chosen apart.

A row names a family, which is what ``impl`` asks for, and a module that says what it cannot run (``unsupported``) and
runs the rest (``forward`` or ``backward``; `sagebwd.call` has their arguments). A module that needs an extra also says
what of it is missing or broken (``unavailable``). A module is imported when a call first asks it.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sagebwd.call import Call, Saved
from sagebwd.recipe import FP8, Recipe

if TYPE_CHECKING:
    from sagebwd.kernels.replay import Recording


class Row(NamedTuple):
    """One implementation of a direction."""

    family: str
    module: str


FORWARD = (
    Row("hopper", "sagebwd.kernels.sm90.launch"),
    Row("hopper", "sagebwd.kernels.gluon.host"),
    Row("triton", "sagebwd.kernels.portable.host"),
    Row("reference", "sagebwd.reference"),
)
BACKWARD = (
    Row("hopper", "sagebwd.kernels.gluon.gradients"),
    Row("triton", "sagebwd.kernels.portable.gradients"),
    Row("reference", "sagebwd.reference"),
)
# What ``impl`` may name, and whose backward reads what its forward saves.
BACKWARD_FAMILIES = {"reference": ("reference",), "triton": ("triton",), "hopper": ("hopper", "triton")}
IMPLEMENTATIONS = tuple(BACKWARD_FAMILIES)
# The fastest that takes the call, settled inside the operators.
FASTEST = "fastest"


def forward(impl: str, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
    """The output, and what `backward` reads of it."""
    impl = _settled(impl, call)
    kind = call.recipe, call.head_dim, call.dtype
    check_supported(impl, *kind, call.mask is not None)
    row, _ = _first(FORWARD, (impl,), *kind)
    if impl == "reference":
        return _module(row).forward(call, q, k, v)
    if impl == "hopper" and not is_hopper(call.device):
        raise ValueError(f"impl='hopper' needs a GPU of compute capability 9.0 (H100, H200), got {call.device}")
    return _driver().forward(_module(row).forward, call, q, k, v)


def backward(
    impl: str, call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; q and k are given where `sagebwd.call.keeps_inputs` says so."""
    impl = _settled(impl, call)
    row, _ = _first(BACKWARD, BACKWARD_FAMILIES[impl], call.recipe, call.head_dim, call.dtype)
    if impl == "reference":
        return _module(row).backward(call, saved, do, dlse, q, k, v)
    return _driver().backward(_module(row).backward, call, saved, do, dlse, q, k, v)


def recorded_forward(impl: str, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Recording | None:
    """What a later `forward` of this kind will launch, if that is recorded."""
    if impl == "reference":
        return None
    row, _ = _first(FORWARD, (impl,), call.recipe, call.head_dim, call.dtype)
    return _driver().recorded(_module(row).forward, call, q, k, v)


def recorded_backward(
    impl: str, call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor
) -> Recording | None:
    """What a later `backward` of this kind will launch, if that is recorded."""
    row, _ = _first(BACKWARD, BACKWARD_FAMILIES[impl], call.recipe, call.head_dim, call.dtype)
    return _driver().recorded(_module(row).backward, call, saved, do, dlse, q, k, v)


def fastest(recipe: Recipe, head_dim: int, dtype: torch.dtype, device: torch.device, masked: bool = False) -> str:
    """The fastest kernels that take a call: "hopper" on compute capability 9.0 where they can, else "triton".

    masked: by a mask that is more than key padding.
    """
    if is_hopper(device) and is_supported("hopper", recipe, head_dim, dtype, masked):
        return "hopper"
    return "triton"


def automatic(impl: str | None, head_dim: int, dtype: torch.dtype, device: torch.device, masked: bool = False) -> str:
    """The recipe that "auto" stands for in a call: "mixed" where Hopper's kernels run it, else "token".

    masked: by a mask that is more than key padding.
    """
    hopper = impl in (None, FASTEST, "hopper") and is_hopper(device)
    fits = hopper and is_supported("hopper", Recipe.named("mixed"), head_dim, dtype, masked)
    return "mixed" if fits else "token"


def is_supported(impl: str, recipe: Recipe, head_dim: int, dtype: torch.dtype, masked: bool = False) -> bool:
    """Whether a kernel family runs a recipe, forward and backward; the reference runs all."""
    return unsupported(impl, recipe, head_dim, dtype, masked) is None


def unsupported(impl: str, recipe: Recipe, head_dim: int, dtype: torch.dtype, masked: bool = False) -> str | None:
    """Why a kernel family cannot run a recipe, or None."""
    if masked and impl == "hopper":
        return "masks other than causal, windows and key padding run on impl='triton'"
    if masked and impl == "triton" and FP8 in (recipe.dv, recipe.dq, recipe.dk):
        return (
            f"recipe {str(recipe)!r} has FP8 gradients, which Hopper's own kernels alone compute, and these take no "
            "masks but causal, windows and key padding; use recipe='token' for this call"
        )
    for table, families in ((FORWARD, (impl,)), (BACKWARD, BACKWARD_FAMILIES[impl])):
        row, reason = _first(table, families, recipe, head_dim, dtype)
        if row is None:
            return reason
    return None


def check_supported(impl: str, recipe: Recipe, head_dim: int, dtype: torch.dtype, masked: bool = False) -> None:
    """Raises NotImplementedError where a kernel family cannot run a recipe; the reference runs all."""
    reason = unsupported(impl, recipe, head_dim, dtype, masked)
    if reason is not None:
        raise NotImplementedError(f"impl={impl!r} does not support this call: {reason}; impl='reference' does")


def check_known(impl: str | None) -> None:
    """Raises ValueError for the name of no implementation; None is the fastest."""
    if impl is not None and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r} is not known; accepted: None, {', '.join(map(repr, IMPLEMENTATIONS))}")


def backward_family(impl: str, recipe: Recipe, head_dim: int, dtype: torch.dtype) -> str:
    """Whose backward an implementation runs: its own, but for recipes of which "hopper" has the forward alone."""
    row, _ = _first(BACKWARD, BACKWARD_FAMILIES[impl], recipe, head_dim, dtype)
    return row.family


def _settled(impl: str, call: Call) -> str:
    if impl != FASTEST:
        return impl
    return fastest(call.recipe, call.head_dim, call.dtype, call.device, call.mask is not None)


@cache
def _first(
    table: tuple[Row, ...], families: tuple[str, ...], recipe: Recipe, head_dim: int, dtype: torch.dtype
) -> tuple[Row | None, str]:
    """The first row of some families that runs a recipe; without one, what the last of each family says to it.

    Of a family that would run it with what is not there, that.
    """
    reasons, lacking = {}, {}
    for row in table:
        if row.family in families:
            module = _module(row)
            reason = module.unsupported(recipe, head_dim, dtype)
            if reason is None:
                reason = module.unavailable() if hasattr(module, "unavailable") else None
                if reason is None:
                    return row, ""
                lacking[row.family] = reason
            reasons[row.family] = reason
    return None, "; ".join(dict.fromkeys((reasons | lacking).values()))


@cache
def _module(row: Row) -> ModuleType:
    return importlib.import_module(row.module)


@cache
def _driver() -> ModuleType:
    return importlib.import_module("sagebwd.kernels.driver")


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether a device is of compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
