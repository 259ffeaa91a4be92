"""What a call would run, and why, without running it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from sagebwd.arguments import choice_of
from sagebwd.attention import sage_attention, sage_attention_varlen
from sagebwd.auto import agreement, model, peers
from sagebwd.auto import choice as auto_choice
from sagebwd.auto.contenders import CUDNN, NAMES, PEERS, TORCH
from sagebwd.auto.model import DIRECTIONS, Size, Times, widths_text
from sagebwd.call import Ask
from sagebwd.dispatch import Choice
from sagebwd.kernels.capabilities import WIDE, is_wide
from sagebwd.masks.kinds import FULL, KINDS, MASK, PADDING, WINDOW
from sagebwd.recipe import AUTO

# In words, where the kind's own name is none.
_KINDS = {kind: kind for kind in KINDS} | {
    FULL: "no mask", WINDOW: "a window", PADDING: "key padding", MASK: "a mask of elements",
}  # fmt: skip


class Explanation(NamedTuple):
    """Who runs a call.

    recipe: its text. forward, backward: "torch", "fa4" (FlashAttention-4), "fa3", "reference", "triton", "mma_sync" or
    "hopper". form: the (head_dim, value's head_dim) that each direction is filled up to. why: one sentence. digest: of
    what the choices of "auto" on this GPU follow from, the same on two hosts where it is alike, as `sagebwd doctor`
    prints it; None of a call that "auto" does not decide on a GPU of its own.
    """

    recipe: str
    forward: str
    backward: str
    form: tuple[tuple[int, int], tuple[int, int]]
    why: str
    digest: str | None = None

    def __str__(self) -> str:
        """One line, and one of the digest."""
        impls = self.forward, self.backward
        pairs = [f"{impl} at head_dim {widths_text(*form)}" for impl, form in zip(impls, self.form)]
        runs = pairs[0] if pairs[0] == pairs[1] else f"{pairs[0]}, backward on {pairs[1]}"
        line = f"{self.recipe} on {runs}: {self.why}"
        return line if self.digest is None else f"{line}\n{digest_line(self.digest)}"


def explain(*arguments: object, **options: object) -> Explanation:
    """What `sage_attention` would run for the same arguments, and why; nothing runs.

    Args: those of `sage_attention`, of any device, meta too, and ``device``, a card that this project has timed, such
    as "NVIDIA H100 80GB HBM3": the answer is that card's with all of the extras and neither FlashAttention-4 nor -3,
    of which the sentence says where they would be faster. A call counts as one of training where an input requires a
    gradient and gradients are enabled.

    Returns: an `Explanation`. Its times are those of a model of timings (docs/results/auto-model.md has its errors).

    Raises: what `sage_attention` raises for the arguments, and ValueError for a card that was not timed.
    """
    return _explained(explain, sage_attention, arguments, options)


def explain_varlen(*arguments: object, **options: object) -> Explanation:
    """`explain` of `sage_attention_varlen`: the arguments of that, and ``device``; returns and raises alike."""
    return _explained(explain_varlen, sage_attention_varlen, arguments, options)


for _asked, _attention in ((explain, sage_attention), (explain_varlen, sage_attention_varlen)):
    _of = inspect.signature(_attention)
    _device = inspect.Parameter("device", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None")
    _asked.__signature__ = _of.replace(
        parameters=[*_of.parameters.values(), _device], return_annotation=Explanation.__name__
    )


def _explained(asked: Callable, attention: Callable, arguments: tuple, options: dict[str, object]) -> Explanation:
    """What a function that was ``asked`` returns: of the function that it explains."""
    signature = inspect.signature(asked)
    try:
        given = signature.bind(*arguments, **options).arguments
    except TypeError as error:
        raise TypeError(f"{asked.__name__}: {error}; accepted: {', '.join(signature.parameters)}") from None
    card = given.pop("device", None)
    known = model.of_this_project()
    if card is not None and card not in list(known):  # a list has no hash
        raise ValueError(f"device={card!r} was not timed; accepted: {', '.join(map(repr, known))}")
    choice, checked = choice_of(attention, **given, card=card)
    return explained(choice, checked.ask, checked.size, given.get("recipe", AUTO), card)


def explained(choice: Choice, ask: Ask, size: Size | None, recipe: object, card: str | None = None) -> Explanation:
    """An answer of `sagebwd.auto.choice.choose`, with its reason; recipe: as it was asked for."""
    why = _why(choice, ask, size, recipe, card)
    forms = choice.forms(ask.head_dim, ask.value_dim)
    decides = recipe == AUTO and ask.device.type == "cuda" and card is None
    digest = agreement.digest(auto_choice.facts_of(ask.device)) if decides else None
    runs = (choice.forward.impl, choice.backward.impl) if choice.contender not in PEERS else (choice.contender,) * 2
    return Explanation(str(choice.recipe), *runs, forms, why, digest)


def digest_line(digest: str) -> str:
    """What a digest is for."""
    return f"auto: digest {digest}, the same on two machines where it chooses alike"


def _why(choice: Choice, ask: Ask, size: Size | None, recipe: object, card: str | None) -> str:
    if recipe != AUTO:
        return f"recipe={str(recipe)!r} was asked for"
    if ask.impl is not None:
        return f"impl={ask.impl!r} was asked for"
    if ask.recipe != AUTO:
        return "a switch is on, under which recipe='auto' is one of 'token'"
    if choice.contender is not None and ask.only_torch is not None:
        return f"torch's own attention alone takes {ask.only_torch}"
    on_gpu = ask.device.type == "cuda"
    times = auto_choice.times_of(ask, card) if on_gpu and size is not None else None
    if size is None or not (size.by_torch or times):
        runs = "" if on_gpu else f", so the reference runs it in full precision on {ask.device}"
        return f"torch has nothing that computes the same, or the switch deterministic is on{runs}"
    if not on_gpu:
        return f"kernels need a CUDA GPU; on {ask.device} torch's own attention is faster than the reference"
    if times is None:
        return _untimed(ask, card)
    compared = _compared(choice, times, size)
    by = "" if choice.contender in (None, TORCH) else f", by {NAMES[choice.contender]}"
    tokens = str(size.queries) if size.queries == size.keys else f"{size.queries} on {size.keys}"
    told = f"{tokens} tokens, {_call(ask)}{by}: {compared}, by {times.source}{newer_torch(times)}"
    return told + _other_peers(choice, ask, size, times, card)


def _untimed(ask: Ask, card: str | None) -> str:
    name = card or auto_choice.card_of(ask.device)
    named = f", head_dims over {WIDE} where `--head-dim` names them" if is_wide(ask.head_dim, ask.value_dim) else ""
    if card is None and not auto_choice.known_of(ask.device):
        return (
            f"nobody has timed low precision on {name} with torch {torch.__version__} and this sagebwd; "
            f"`sagebwd doctor --measure` does, in a few minutes{named}"
        )
    return f"low precision was not timed on {name} for {_call(ask)}; `sagebwd doctor --measure` may time it{named}"


def _compared(choice: Choice, times: Times, size: Size) -> str:
    """What each takes; full precision keeps what is within `model.MARGIN` percent."""
    low_ms, full_ms = times.ms(size)
    if low_ms is None:
        low, first = f"{times.recipe} was not timed on these kernels", " takes about {:.3g} ms"
    else:
        low, first = f"{times.recipe} takes about {low_ms:.3g} ms", " {:.3g}"
    if not full_ms:
        return f"{low} and torch does not run it"
    taken = [NAMES[name] + (" {:.3g}" if i else first).format(ms) for i, (name, ms) in enumerate(full_ms.items())]
    close = choice.contender is not None and low_ms is not None and low_ms < full_ms.get(choice.contender, 0)
    return ", ".join([low, *taken]) + (f": less than {model.MARGIN}% apart" if close else "")


def _other_peers(choice: Choice, ask: Ask, size: Size, times: Times, card: str | None) -> str:
    """Why peers that were timed, or that are installed, do not run a call, where that is not by their times.

    On a card of a name, which run it where they are installed.
    """
    told, (low_ms, full_ms) = [], times.ms(size)
    low_ms = math.inf if low_ms is None else model.with_margin(low_ms)
    taken = full_ms.get(choice.contender, math.inf) if choice.contender else low_ms
    for peer in PEERS:
        timed = peer in times.full
        if choice.contender == peer or not (timed or (card is None and peers.module_of(peer))):
            continue
        why = auto_choice.why_not(peer, ask, times, card)
        if why is None and not peers.fits(ask.kind, size):
            why = "has no such mask"
        if why is None and card is not None and full_ms[peer] < taken:
            why, taken = "runs it where it is installed", full_ms[peer]
        if why is not None:
            told.append(f"; {NAMES[peer]} {why}")
    if CUDNN in times.full and size.by_torch and auto_choice.is_wrong(CUDNN, ask, size):
        told.append(f"; {NAMES[CUDNN]} may give NaN in gradients under a mask of {size.keys} keys")
    return "".join(told)


def newer_torch(times: Times) -> str:
    """Where this torch is newer than the one that was timed, that it may differ."""
    if not model.is_newer(torch.__version__, times.torch):
        return ""
    return f"; they are of torch {times.torch}, and torch {torch.__version__} may differ"


def _call(ask: Ask) -> str:
    direction = DIRECTIONS[ask.training]
    return f"{_KINDS[ask.kind]} at head_dim {widths_text(ask.head_dim, ask.value_dim)}, {direction}"
