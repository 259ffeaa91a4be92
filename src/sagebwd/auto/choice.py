"""Who runs a call of "auto": low precision on kernels (`sagebwd.dispatch`), or one of `contenders` in full precision.

`choose` answers for every call, and asks the kernels alone where a recipe or an implementation is named. What calls
take by each is known of cards that were timed (`sagebwd.auto.model`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import cache

import torch

from sagebwd import dispatch, switches
from sagebwd.auto import agreement, model, peers, timings
from sagebwd.auto.contenders import CUDNN, FLASH, LOW, PEERS, TORCH
from sagebwd.auto.model import Size, Times
from sagebwd.call import Ask, padded_head_dim
from sagebwd.dispatch import Choice
from sagebwd.kernels import families
from sagebwd.kernels.capabilities import BACKWARD, FORWARD, REFERENCE_DTYPES, Row, as_it_is, is_wide
from sagebwd.masks.kinds import CAUSAL, WINDOW
from sagebwd.recipe import AUTO, Recipe
from sagebwd.tracing import assume_constant
from sagebwd.version import __version__

# Compute capability of the cards of `model.of_this_project`.
_TIMED = 90
# Both directions of a call in full precision, by functions of torch's own.
_ROWS = [
    Row(direction, TORCH, "torch.nn.functional", REFERENCE_DTYPES, {}, as_it_is, "any")
    for direction in (FORWARD, BACKWARD)
]


@cache
def handed_to(contender: str) -> Choice:
    """The choice of a call that "auto" hands over: in full precision, by one of `sagebwd.auto.contenders`."""
    return Choice(Recipe.named("full"), *_ROWS, contender)


def choose(ask: Ask, size: Size | None = None, card: str | None = None, planned: bool = True) -> Choice:
    """Who runs a call, and by which recipe: `handed_to` whom `contender_of` names, else as `sagebwd.dispatch.choose`
    says.

    size: None where nobody else computes the same, or where kernels alone are asked for. card: one of
    `sagebwd.auto.model.of_this_project` with all of the extras, whose answer is wanted; None for the device itself.
    planned: as of `contender_of`.
    """
    contender = contender_of(ask, size, card, planned)
    return _by_kernels(ask, card) if contender is None else handed_to(contender)


def _by_kernels(ask: Ask, card: str | None) -> Choice:
    return dispatch.choose(ask, None if card is None else _TIMED)


def contender_of(ask: Ask, size: Size | None, card: str | None = None, planned: bool = True) -> str | None:
    """Who runs a call in full precision: one of "auto" that needs it, or that is not slower by it; None for kernels.

    It follows from what is known of tensors without their values, so that a trace may ask too. planned: whether the
    call gets a plan, by which alone backends of torch are chosen and peers run; else torch picks.
    """
    if size is None or ask.recipe != AUTO or ask.impl is not None or not (size.by_torch or planned):
        return None
    if ask.only_torch is not None:
        return TORCH
    costs = _costs(card, planned, *ask)
    if isinstance(costs, bool):
        return TORCH if costs and size.by_torch else None
    low, full = costs
    of = ask.kind, ask.training
    fastest, least = None, None
    for name, cost in full:
        if not (peers.fits(ask.kind, size) if name in PEERS else size.is_for(name)):
            continue
        taken = model.taken(cost, size.work(name, *of))
        if not is_wrong(name, ask, size) and (least is None or not model.is_less(least, taken)):
            fastest, least = name, taken
        if not planned:
            break  # what torch picks comes first
    if least is None or (low is not None and model.is_less(model.taken(low, size.work(LOW, *of)), least)):
        return None
    return fastest if planned else TORCH


def is_wrong(name: str, ask: Ask, size: Size) -> bool:
    """Whether a contender's gradients are known to be wrong for a call.

    cuDNN's dQ is NaN under a mask tensor where keys are 64 more than a multiple of 128 and a query's log-sum-exp is
    less than -88.7 (torch's issue 196678; torch 2.11, H100). That counts where the mask is of this package's making: a
    window's, and a causal one's of more queries than keys. FlashAttention-2 takes no mask, and torch runs cuDNN there.
    Where gradients have to repeat torch runs no cuDNN.
    """
    if not ask.training or torch.are_deterministic_algorithms_enabled():
        return False
    masked = ask.kind == WINDOW or (ask.kind == CAUSAL and size.queries > size.keys)
    return name in (CUDNN, FLASH) and masked and size.keys % 128 == 64


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
    without_torch = families.any_of(on_gpu).forward
    if str(ask.dtype).removeprefix("torch.") not in without_torch.dtypes:
        return False
    times = times_of(ask, card) if on_gpu else None
    if times is None:
        return True
    names = [name for name in times.full if name not in PEERS]
    if planned and card is None:
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
    times = [found._replace(source="") for found in timings.of_card(card, torch.__version__)]
    measured = hashlib.sha256(repr(times).encode()).hexdigest()[:12] if times else "none"
    facts = {"card": card, "sagebwd": __version__, "torch": torch.__version__, "measured times": measured}
    for name in families.faster_on(dispatch.arch_of(device)):
        family = families.FAMILIES[name]
        usable = dispatch.missing(family.forward) is None
        facts[family.needs] = "usable" if usable else "not usable"
    found = [f"{peer} without backward" if peers.lacks_backward(peer) else peer for peer in peers.installed()]
    facts["peers"] = ", ".join(found) or "none"
    on = [name for name, is_on in dataclasses.asdict(switches.current).items() if is_on]
    return facts | {"switches": ", ".join(on) or "none"}


@cache
def times_of(ask: Ask, card: str | None = None) -> Times | None:
    """What such calls take on a card, None where nobody has timed them; without low precision's where others ran.

    Of a pair of widths that was not timed counts the next smaller one of the same form of the kernels: torch is faster
    there than at the call's own.
    """
    known = known_of(ask.device) if card is None else model.of_this_project()[card]
    if not known:
        return None
    choice = _by_kernels(ask, card)
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
    return timings.of_card(card_of(device), torch.__version__)


def _tile(choice: Choice, head_dim: int, value_dim: int) -> tuple[int, int] | None:
    """The widths that a call costs as much as; None where these kernels do not run it, or not as fast: wide heads of
    no multiple of 32 channels are read with masks, for which there are no registers, and of two widths the greater
    counts for both."""
    if any(row.form(head_dim, value_dim) is None for row in (choice.forward, choice.backward)):
        return None
    if is_wide(head_dim, value_dim) and (head_dim != value_dim or head_dim % 32):
        return None
    form = choice.forms(head_dim, value_dim)[0]
    return tuple(map(padded_head_dim, form)) if choice.forward.powers_of_two else form


@cache
def card_of(device: torch.device) -> str:
    """CUDA's name of a GPU."""
    return torch.cuda.get_device_properties(device).name
