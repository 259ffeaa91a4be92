"""Who runs a call. `choose` answers, once a call; what it chose goes through the operators by name.

The rows that it chooses from are static (`sagebwd.kernels.capabilities`); a module is imported when a call first runs
on it. So is what calls take, by which "auto" chooses (`sagebwd.auto.model`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd import switches
from sagebwd.auto import agreement, model, peers
from sagebwd.auto.assume_constant import assume_constant
from sagebwd.auto.contenders import CUDNN, EFFICIENT, FLASH, LOW, PEERS
from sagebwd.auto.contenders import TORCH as PICKED_BY_TORCH
from sagebwd.auto.model import CAUSAL, WINDOW, Size, Times
from sagebwd.call import Ask, Call, Saved, padded_head_dim
from sagebwd.kernels import capabilities
from sagebwd.kernels.capabilities import BACKWARD, FORWARD, IMPLEMENTATIONS, TORCH, Row
from sagebwd.kernels.runtime import device as gpu
from sagebwd.recipe import AUTO, Recipe
from sagebwd.version import __version__

# What "auto" stands for, by implementation: the reference that nobody named runs what torch has no function for.
AUTOMATIC = {"hopper": "mixed", "mma_sync": "token", "triton": "token", "reference": "full"}
# The same where mma.sync's own backward runs, which dP in INT8 makes faster; Triton's, at 64, it does not.
AUTOMATIC_OF_OWN_BACKWARD = Recipe.parse("token(dp=int8)")
# Compute capabilities that the kernels of mma.sync are compiled for in tests, and are tried first on.
MMA_SYNC = (80, 86, 89, 120)
# What the kernels of two families need, as `facts_of` names it.
_NEEDED = {"hopper": "extra hopper", "mma_sync": "NVRTC"}
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
    def runs(self) -> tuple[str, str]:
        """Who runs forward and backward, in words that users know."""
        return (self.contender,) * 2 if self.contender in PEERS else (self.forward.impl, self.backward.impl)

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


@cache
def handed_to(contender: str) -> Choice:
    """The choice of a call that "auto" hands over: in full precision, by one of `sagebwd.auto.contenders`."""
    return Choice(Recipe.named("full"), capabilities.row(FORWARD, TORCH), capabilities.row(BACKWARD, TORCH), contender)


def choose(ask: Ask, size: Size | None = None, card: str | None = None, planned: bool = True) -> Choice:
    """Who runs a call, and by which recipe.

    "auto" is `handed_to` whom `contender_of` names, else `mixed` where Hopper's kernels run it, `token(dp=int8)` where
    mma.sync's forward and backward do, else `token` on a GPU and under ``impl="reference"``, else `full`. The
    implementation is the named one, or Hopper's kernels on compute capability 9.0 where they take the call, mma.sync's
    on the `MMA_SYNC`, else Triton's on a GPU and the reference elsewhere.

    size: None where nobody else computes the same, or where kernels alone are asked for. card: one of
    `sagebwd.auto.model.of_this_project` with all of the extras, whose answer is wanted; None for the device itself.
    planned: as of `contender_of`.

    Raises ValueError for an unknown implementation or the wrong device, TypeError for a dtype and NotImplementedError
    for a recipe, width or mask that it lacks, each naming the way out.
    """
    contender = contender_of(ask, size, card, planned)
    return _choose_kernels(ask, card) if contender is None else handed_to(contender)


def contender_of(ask: Ask, size: Size | None, card: str | None = None, planned: bool = True) -> str | None:
    """Who runs a call in full precision: one of "auto" that needs it, or that is not slower by it; None for kernels.

    It follows from what is known of tensors without their values, so that a trace may ask too. planned: whether the
    call gets a plan, by which alone backends of torch are chosen and peers run; else torch picks.
    """
    if size is None or ask.recipe != AUTO or ask.impl is not None or not (size.by_torch or planned):
        return None
    if ask.only_torch is not None:
        return PICKED_BY_TORCH
    costs = _costs(card, planned, *ask)
    if isinstance(costs, bool):
        return PICKED_BY_TORCH if costs and size.by_torch else None
    low, full = costs
    of = ask.kind, ask.training
    fastest, least = None, None
    for name, cost in full:
        if not (peers.fits(ask.kind, size) if name in PEERS else size.by_torch):
            continue
        if is_wrong(name, ask, size):
            continue
        taken = model.taken(cost, size.work(name, *of))
        if least is None or not model.is_less(least, taken):
            fastest, least = name, taken
    if least is None or (low is not None and model.is_less(model.taken(low, size.work(LOW, *of)), least)):
        return None
    return fastest if planned else PICKED_BY_TORCH


def is_wrong(name: str, ask: Ask, size: Size) -> bool:
    """Whether a contender's gradients are known to be wrong for a call.

    cuDNN's dQ is NaN under a mask tensor where keys are 64 more than a multiple of 128 and a query's log-sum-exp is
    less than -88.7 (torch's issue 196678; torch 2.11, H100). That counts where the mask is of this package's making: a
    window's, and a causal one's of more queries than keys. Where a backend refuses a call torch runs cuDNN:
    FlashAttention-2 takes no mask, the memory-efficient no grouped heads. Where gradients have to repeat torch runs no
    cuDNN. What all get wrong for some operands and scales is mended for all (`sagebwd.auto.operands`).
    """
    if not ask.training or torch.are_deterministic_algorithms_enabled():
        return False
    masked = ask.kind == WINDOW or (ask.kind == CAUSAL and size.queries > size.keys)
    by_cudnn = name in (CUDNN, FLASH) or (name == EFFICIENT and size.heads > size.kv_heads)
    return by_cudnn and masked and size.keys % 128 == 64


@assume_constant
def _costs(
    card: str | None, planned: bool, *asked: object
) -> bool | tuple[tuple[int, ...] | None, tuple[tuple[str, tuple[int, ...]], ...]]:
    """Low precision's cost with the margin, and contenders', of a call whose `Ask` a trace hands on by its parts.

    Or whether torch runs all such calls: without a GPU it does. A dtype that nobody else takes is not handed over:
    that is for its error to say.
    """
    ask = Ask(*asked)
    if card is None:
        check_agreement(ask.device)
    on_gpu = ask.device.type == "cuda"
    without_torch = capabilities.row(FORWARD, "triton" if on_gpu else "reference")
    if str(ask.dtype).removeprefix("torch.") not in without_torch.dtypes:
        return False
    times = times_of(ask, card) if on_gpu else None
    if times is None:
        return True
    names = [name for name in times.full if name not in PEERS]
    if not planned:
        names = names[:1]  # what torch picks
    elif card is None:
        names += [name for name in times.full if name in PEERS and why_not(name, ask, times) is None]
    if not names:
        return False
    low = None if times.low is None else tuple(times.low.with_margin())
    return low, tuple((name, tuple(times.full[name])) for name in names)


def why_not(peer: str, ask: Ask, times: Times, card: str | None = None) -> str | None:
    """Why a peer is not asked for calls that were timed, or None; it is imported where all else is right.

    card: as of `choose`, where every peer may be installed.
    """
    if (times.head_dim, times.value_dim) != (ask.head_dim, ask.value_dim) or peer not in times.full:
        return "was not timed"
    if not peers.takes(peer, ask.kind, ask.head_dim, ask.dtype, ask.training):
        lacking = ask.training and peers.lacks_backward(peer)
        return "was built without its backward" if lacking else "does not take the call, or computes it wrong"
    return "is not installed" if card is None and peers.module_of(peer) is None else None


def check_agreement(device: torch.device) -> None:
    """Warn, once a process group, where another process of the job may choose otherwise on a GPU under "auto"."""
    if device.type == "cuda":
        agreement.check(facts_of, device)


def facts_of(device: torch.device) -> dict[str, str]:
    """What the choices of "auto" on a GPU follow from, by name: versions, what was measured, extras, switches."""
    card = card_of(device)
    # without the name of the file, which has the user's home
    times = [found._replace(source="") for found in model.of_card(card, torch.__version__)]
    measured = hashlib.sha256(repr(times).encode()).hexdigest()[:12] if times else "none"
    facts = {"card": card, "sagebwd": __version__, "torch": torch.__version__, "measured times": measured}
    for impl in _before_triton(arch_of(device)):
        usable = _missing(capabilities.row(FORWARD, impl)) is None
        facts[_NEEDED[impl]] = "usable" if usable else "not usable"
    found = [f"{peer} without backward" if peers.lacks_backward(peer) else peer for peer in peers.installed()]
    facts["peers"] = ", ".join(found) or "none"
    on = [name for name, is_on in dataclasses.asdict(switches.current).items() if is_on]
    return facts | {"switches": ", ".join(on) or "none"}


@cache
def times_of(ask: Ask, card: str | None = None) -> Times | None:
    """What such calls take on a card, None where nobody has timed them; without low precision's where others ran.

    Of a pair of widths that was not timed counts the next smaller one that the same kernels are as fast at: torch is
    faster there than at the call's own.
    """
    known = known_of(ask.device) if card is None else model.of_this_project()[card]
    if not known:
        return None
    choice = _choose_kernels(ask, card)
    direction = model.TRAINING if ask.training else model.FORWARD
    dims = ask.head_dim, ask.value_dim
    ran = str(choice.recipe), choice.name
    found = [
        times if (times.recipe, times.impl) == ran else times._replace(low=None)
        for times in known
        if (times.direction, times.kind) == (direction, ask.kind)
        and times.head_dim <= dims[0]
        and times.value_dim <= dims[1]
        and _tile(choice, times.head_dim, times.value_dim) == _tile(choice, *dims)
    ]
    return max(found, key=lambda times: (times.low is not None, times.head_dim + times.value_dim), default=None)


def known_of(device: torch.device) -> tuple[Times, ...]:
    """What is known of a GPU."""
    return model.of_card(card_of(device), torch.__version__)


def _tile(choice: Choice, head_dim: int, value_dim: int) -> tuple[int, int] | None:
    """The widths that a call costs as much as; None where these kernels do not run it."""
    if any(row.form(head_dim, value_dim) is None for row in (choice.forward, choice.backward)):
        return None
    form = choice.forms(head_dim, value_dim)[0]
    return tuple(map(padded_head_dim, form)) if choice.forward.impl == "triton" else form


@cache
def card_of(device: torch.device) -> str:
    """CUDA's name of a GPU."""
    return torch.cuda.get_device_properties(device).name


def _choose_kernels(ask: Ask, card: str | None = None) -> Choice:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return _choose(ask, arch_of(ask.device), interpreted) if card is None else _choose(ask, 90, interpreted, True)


@cache
def _choose(ask: Ask, arch: int, interpreted: bool, with_extras: bool = False) -> Choice:
    check_known(None if ask.impl == FASTEST else ask.impl)
    if ask.impl not in (None, FASTEST):
        wanted = (ask.impl,)
    elif ask.device.type == "cuda":
        wanted = (*_before_triton(arch), "triton")
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


def _before_triton(arch: int) -> tuple[str, ...]:
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
                reason = _missing(row)
            if reason is None:
                rows.append(row)
                break
            refusals.append(reason)
    if len(rows) == 2 and impl in (row.impl for row in rows):
        return rows[0], rows[1]
    return "; ".join(dict.fromkeys(refusals))


def _missing(row: Row) -> str | None:
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
