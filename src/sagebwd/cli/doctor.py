"""What runs here and why: versions, the GPU, and each implementation's answer to one call."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import torch

from sagebwd import checks, dispatch
from sagebwd.arguments import ask_of
from sagebwd.attention import sage_attention
from sagebwd.kernels.families import FAMILIES, REFERENCE
from sagebwd.recipe import Recipe
from sagebwd.reference.metrics import relative_l2
from sagebwd.version import __version__


@dataclass(frozen=True)
class Answer:
    """Whether an implementation takes a call; ``reason`` says why not, or why it was chosen."""

    impl: str
    takes: bool
    chosen: bool
    reason: str


def facts() -> dict[str, str]:
    """Versions and hardware, by name."""
    found = {"sagebwd": __version__, "python": platform.python_version(), "torch": torch.__version__}
    try:
        import triton

        found["Triton"] = triton.__version__
    except Exception as error:  # whatever one raises that is broken
        why = f"cannot be imported ({type(error).__name__}: {error})"
        found["Triton"] = f"{why}: the kernels need it (pip install triton)"
    found["CUDA (torch)"] = torch.version.cuda or "none: this torch is built for CPUs"
    if os.environ.get("TRITON_INTERPRET") == "1":
        found["TRITON_INTERPRET"] = "1: triton's kernels are interpreted, which is very slow"
    if not torch.cuda.is_available():
        return found | {"GPU": "none that torch can see"}
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        shared = getattr(card, "shared_memory_per_block_optin", 0) // 1024
        found[f"GPU {index}"] = (
            f"{card.name}, sm_{card.major}{card.minor}, {card.multi_processor_count} multiprocessors, "
            f"{card.total_memory >> 30} GiB, {shared} KiB shared memory a block"
        )
        if (card.major, card.minor) == (9, 0):
            found["mixed on Hopper"] = _forward_of_mixed()
    return found


def _forward_of_mixed() -> str:
    """Which kernel runs the forward of `mixed` on a Hopper GPU."""
    from sagebwd.kernels.sm90.forward.compile import broken_compiler, unavailable

    if unavailable() is not None:
        return f"forward on the portable kernels, which are slower: {unavailable()}"
    if broken_compiler() is not None:
        return f"forward in CuTe DSL where it is compiled already: {broken_compiler()}"
    return "forward in CuTe DSL"


def _call(device: str, dtype: torch.dtype, widths: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A query and a value of one token; widths, (head_dim, value_dim)."""
    query, value = (torch.empty(1, 1, 1, width, device=device, dtype=dtype) for width in widths)
    return query, value


def recipe_of(device: str, dtype: torch.dtype, widths: tuple[int, int], recipe: str) -> Recipe:
    """The recipe of a call with these properties, "auto" settled."""
    return dispatch.choose(ask_of(*_call(device, dtype, widths), recipe, None)).recipe


def answers(device: str, dtype: torch.dtype, widths: tuple[int, int], recipe: Recipe) -> list[Answer]:
    """What each implementation says to a call with these properties, and which one ``impl=None`` takes."""
    call = _call(device, dtype, widths)

    def asked(impl: str | None) -> dispatch.Choice | str:
        try:
            checks.refuse_only_torch(*call, None, 0)
            return dispatch.choose(ask_of(*call, recipe, impl))
        except (ValueError, TypeError, NotImplementedError) as error:
            return str(error)

    fastest, found = asked(None), []
    for impl in FAMILIES:
        choice = asked(impl)
        if isinstance(choice, str):
            found.append(Answer(impl, False, False, choice))
            continue
        chosen = choice == fastest
        reason = "fastest that takes the call" if chosen else "takes the call; ask for it by name"
        for direction, row in (("forward", choice.forward), ("backward", choice.backward)):
            if row.impl != impl:
                reason += f"; {direction} runs {row.impl}'s kernels, as {impl} has none here for this recipe"
        found.append(Answer(impl, True, chosen, reason))
    return found


def self_test(device: str, dtype: torch.dtype, widths: tuple[int, int], recipe: Recipe) -> float:
    """Run forward and backward once and return the largest relative L2 distance to the reference's results.

    Two implementations of a recipe differ by 16-bit rounding and by codes that fall on the other side of a tie, which
    is well under 0.03.
    """
    generator = torch.Generator().manual_seed(0)
    head_dim, value_dim = widths
    of = head_dim, head_dim, value_dim, value_dim
    *inputs, do = (torch.randn(1, 2, 300, width, generator=generator).to(device, dtype) for width in of)

    def outcome(impl: str | None) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = sage_attention(*leaves, is_causal=True, recipe=recipe, impl=impl)
        return out, *torch.autograd.grad(out, leaves, do)

    return max(relative_l2(actual, expected) for actual, expected in zip(outcome(None), outcome(REFERENCE.name)))
