"""Low-bit attentions of others, timed by `python -m benchmarks attention --peer`; none is taken for the BF16 peer."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import cudnn_fp8
from benchmarks.baselines import Attention
from benchmarks.packed import Packed
from benchmarks.shapes import Shape

if TYPE_CHECKING:
    from benchmarks.attention import Measurement

RECIPE = "fp8"
"""What their rows have as recipe."""
PEERS = {"cudnn-fp8": cudnn_fp8.E5M2, "cudnn-fp8-e4m3": cudnn_fp8.E4M3}
"""cuDNN's FP8 attention, by the type of dO, dS, dQ, dK and dV; q, k, v, P and O are E4M3."""
LIMIT = 0.5
"""Relative L2 error above which one is wrong; FP8's rounding makes a few hundredths of it."""


def check(names: Iterable[str]) -> None:
    """Raises ValueError for a name that is not of `PEERS`, and where what it needs is not installed."""
    for name in names:
        if name not in PEERS:
            raise ValueError(f"peer={name!r} is not known; accepted: {', '.join(PEERS)}")
        cudnn_fp8.frontend()


def facts(names: Iterable[str]) -> dict[str, str]:
    """What a result file says beside the rest where there are such names: versions of cuDNN and its frontend."""
    if not list(names):
        return {}
    frontend = cudnn_fp8.frontend()
    return {"cudnn": frontend.backend_version_string(), "cudnn_frontend": frontend.__version__}


def attentions(shape: Shape, names: Iterable[str]) -> dict[str, Attention]:
    """Those of such names, whether they take the shape or not. Raises ValueError for packed sequences."""
    names = list(names)
    if names and isinstance(shape, Packed):
        raise ValueError(f"peer={names[0]!r} takes no packed sequences; expected it without --packed")
    return {name: partial(cudnn_fp8.attention, is_causal=shape.is_causal, gradients=PEERS[name]) for name in names}


def gate(errors: dict[str, float]) -> str:
    """ "ok", or what is wrong of one, which has no emulator that it could be held to."""
    wrong = [f"{name} {error:.2f}" for name, error in errors.items() if not error <= LIMIT]
    return f"wrong: {', '.join(wrong)}" if wrong else "ok"


def comparisons(rows: Sequence[Measurement]) -> list[str]:
    """Of one shape's rows or of many's: how much faster each recipe is than each low-bit peer, and both errors.

    Speeds are the geometric mean over the shapes where both are right, errors the largest among them.
    """
    lines = []
    peers = dict.fromkeys(row.impl for row in rows if row.recipe == RECIPE)
    ours = dict.fromkeys((row.impl, row.recipe) for row in rows if row.errors and row.recipe != RECIPE)
    for impl, recipe in ours:
        for peer in peers:
            pairs = _pairs(rows, (impl, recipe), (peer, RECIPE))
            if not pairs:
                continue
            speeds = {
                way: statistics.geometric_mean(theirs.ms / mine.ms for mine, theirs in pairs if mine.direction == way)
                for way in dict.fromkeys(mine.direction for mine, _ in pairs)
            }
            speed = ", ".join(f"{way} {ratio:.2f}x" for way, ratio in speeds.items())
            mine, theirs = (_errors([pair[side] for pair in pairs]) for side in range(2))
            lines.append(f"{recipe} ({impl}) over {peer}: {speed}; errors: {mine}; {peer}'s: {theirs}")
    return lines


def _pairs(
    rows: Sequence[Measurement], ours: tuple[str, str], peer: tuple[str, str]
) -> list[tuple[Measurement, Measurement]]:
    """Rows of one shape and direction that both have a time and are right."""
    mine, theirs = (
        {_call(row): row for row in rows if (row.impl, row.recipe) == key and row.gate == "ok"} for key in (ours, peer)
    )
    return [(row, theirs[call]) for call, row in mine.items() if call in theirs]


def _call(row: Measurement) -> tuple:
    return row.head_dim, row.value_dim, row.heads, row.kv_heads, row.batch, row.tokens, row.causal, row.direction


def _errors(rows: Sequence[Measurement]) -> str:
    """The largest of each tensor."""
    names = dict.fromkeys(name for row in rows for name in row.errors)
    return ", ".join(f"{name} {max(row.errors[name] for row in rows):.4f}" for name in names)
