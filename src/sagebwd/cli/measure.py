"""What calls take in low precision and by each contender in full precision: what `sagebwd doctor --measure` times.

Each kind of mask at each pair of widths is timed at the sizes and lengths of `POINTS`, windows at those of `WINDOWS`,
which `sagebwd.auto.fit` fits a model to. All are timed as a user calls them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd import dispatch
from sagebwd.attention import sage_attention, sage_attention_varlen
from sagebwd.auto.contenders import PEERS, PICKED, TORCH
from sagebwd.auto.fit import window_of
from sagebwd.auto.model import DIRECTIONS, TRAINING, widths_text
from sagebwd.call import Ask
from sagebwd.cli import contenders
from sagebwd.cli.contenders import Attention, takes
from sagebwd.cli.processes import run_in_processes
from sagebwd.cli.timer import time_contenders
from sagebwd.masks.kinds import CAUSAL, FULL, KINDS, MASK, PACKED, PADDING, WINDOW
from sagebwd.recipe import AUTO, Recipe


class Point(NamedTuple):
    """A size and lengths that are timed.

    power: of two, about batch x heads x tokens x value_dim. group: query heads that share one of keys. kv_tokens: of
    keys, 0 for as many as queries, which no other mask than `FULL` has. left: keys before a query in its window.
    """

    power: int
    tokens: int
    group: int = 1
    kv_tokens: int = 0
    left: int = 0


# One sequence of a small model, one of 4096 tokens with 32 heads of 128, and a training step of 16384 tokens; long
# sequences and short ones; lengths that are no multiple of a tile; grouped heads; and few keys, as of a text.
POINTS = (
    Point(25, 8192), Point(25, 2048), Point(25, 1024), Point(24, 4096), Point(22, 8192), Point(22, 2048),
    Point(24, 32768), Point(25, 320), Point(25, 3000), Point(24, 12072, group=4), Point(25, 1472, group=4),
    Point(25, 4096, kv_tokens=512),
)  # fmt: skip
# Of windows, which take so little of the GPU's time that most calls of those sizes would wait for the host.
WINDOWS = (
    Point(27, 8192, left=255), Point(27, 2048, left=511), Point(27, 1024, left=127), Point(26, 4096, left=1023),
    Point(24, 8192, left=511), Point(24, 2048, left=255), Point(26, 32768, left=1023), Point(27, 320, left=80),
    Point(27, 3000, left=127), Point(26, 12072, group=4, left=511), Point(27, 1472, group=4, left=368),
    Point(26, 32768, left=127),
)  # fmt: skip
# Of a mask of elements, beyond which it is not made.
MOST_ELEMENTS = 1 << 28
# What is called most comes first. Wide heads are measured where they are named.
MEASURED_WIDTHS = ("128", "64", "256", "192/128", "192", "96", "80", "112", "72")
WIDE_WIDTHS = ("512", "384", "320", "288")
MEASURED_KINDS = (CAUSAL, FULL, PACKED, WINDOW, PADDING, MASK)
MODEL_WIDTH = 2048  # heads x value_dim, at most
WIDEST = 1 << 16  # a head_dim that may be asked about, of tensors that fit any memory
ROUNDS, ROUND_MS, LEAD_MS = 3, 8.0, 30.0
# The share of the time that compiling takes, about.
COMPILING = 0.5
# Processes that compile at once, each with a context of its own on the GPU.
MOST_PROCESSES = 12
# By which FlashAttention-4 keeps what it has compiled.
FA4_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"

Timer = Callable[[dict[str, Callable[[], object]], str], dict[str, tuple[float, float | None]]]
"""(ms, host's ms) of each run, None of a host where the run was timed once."""


@dataclass(frozen=True)
class Timing:
    """One row of the results file; times in ms of a call, forward alone or forward and backward.

    kv_tokens: of keys. width: keys in a window, else 0. ms, host_ms: low precision's and its host's; None where it
    does not run. torch_ms, torch_host_ms: those of what torch picks, its backend ``picked``; None where torch has
    nothing. others: (ms, host's ms) of more contenders in full precision by name. A host's are None where a slow
    contender was timed once.
    """

    kind: str
    head_dim: int
    value_dim: int
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    kv_tokens: int
    width: int
    direction: str
    recipe: str
    impl: str
    ms: float | None
    host_ms: float | None
    torch_ms: float | None
    torch_host_ms: float | None
    picked: str
    others: dict[str, tuple[float, float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One kind of mask at one pair of widths."""

    kind: str
    head_dim: int
    value_dim: int

    def __str__(self) -> str:
        return f"{self.kind}, head_dim {widths_text(self.head_dim, self.value_dim)}"

    @property
    def points(self) -> list[Point]:
        """Those that are timed: under a mask of elements where there is room for it."""
        if self.kind == WINDOW:
            return list(WINDOWS)
        few = [point for point in POINTS if self.kind == FULL or not point.kv_tokens]
        return [point for point in few if self.kind != MASK or point.tokens**2 <= MOST_ELEMENTS]

    def shape(self, point: Point) -> tuple[int, int, int, int, int]:
        """batch, heads, heads of keys, tokens, and tokens of keys: as many as the size has room for, heads first."""
        in_all = max(1, (1 << point.power) // (point.tokens * self.value_dim))
        kv_heads = max(1, min(in_all, MODEL_WIDTH // self.value_dim) // point.group)
        heads = kv_heads * point.group
        return max(1, in_all // heads), heads, kv_heads, point.tokens, point.kv_tokens or point.tokens

    def inputs(self, point: Point, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gaussian q, k, v and do in BF16; of packed sequences (tokens of all, heads, width)."""
        batch, heads, kv_heads, tokens, kv_tokens = self.shape(point)
        generator = torch.Generator(device).manual_seed(0)

        def drawn(heads: int, tokens: int, width: int) -> Tensor:
            shape = (batch * tokens, heads) if self.kind == PACKED else (batch, heads, tokens)
            return torch.randn(*shape, width, generator=generator, device=device, dtype=torch.bfloat16)

        keys = [drawn(kv_heads, kv_tokens, width) for width in (self.head_dim, self.value_dim)]
        return drawn(heads, tokens, self.head_dim), *keys, drawn(heads, tokens, self.value_dim)


def cases(kinds: Iterable[str] = KINDS, widths: Iterable[str] = MEASURED_WIDTHS) -> list[Case]:
    """What is measured of kinds of mask at widths, what is called most first.

    Raises ValueError for a kind or a width that there is not.
    """
    for what, names, known in (("kind", kinds, KINDS), ("head_dim", widths, MEASURED_WIDTHS + WIDE_WIDTHS)):
        for name in names:
            if name not in known:
                raise ValueError(f"{what}={name!r} is not known; accepted: {', '.join(known)}")
    pairs = [pair_of(name) for name in MEASURED_WIDTHS + WIDE_WIDTHS if name in widths]
    return [Case(kind, *pair) for kind in MEASURED_KINDS if kind in kinds for pair in pairs]


def pair_of(width: str) -> tuple[int, int]:
    """(head_dim, value_dim) as the command line writes them, "128" or "192/128".

    Raises ValueError for another text.
    """
    head_dim, slash, value_dim = width.partition("/")
    pair = head_dim, value_dim if slash else head_dim
    if not all(part.isdecimal() and 1 <= int(part) <= WIDEST for part in pair):
        raise ValueError(
            f"head_dim={width!r}: expected a number from 1 to {WIDEST}, or two as 192/128 where value's is another"
        )
    return int(pair[0]), int(pair[1])


def measure(
    device: str, chosen: list[Case], timer: Timer | None = None, tell: Callable[..., object] = lambda *_: None
) -> Iterator[list[Timing]]:
    """The rows of each case, one case after another.

    timer: for tests, in place of the device's clock. tell: is told what begins and which share of its part is done.
    """
    compiling = COMPILING if device.startswith("cuda") else 0.0
    if compiling:
        os.environ.setdefault(FA4_CACHE, "1")  # so that the processes compile FlashAttention-4's too
        _compile(device, chosen, tell)
    timer = timer or partial(time_contenders, rounds=ROUNDS, round_ms=ROUND_MS, lead_ms=LEAD_MS)
    for number, case in enumerate(chosen):
        tell(f"{number + 1} of {len(chosen)}: {case}", compiling + (1 - compiling) * number / len(chosen))
        yield [row for point in case.points for row in measure_point(case, point, device, timer)]


def measure_point(case: Case, point: Point, device: str, timer: Timer) -> list[Timing]:
    """A row of each direction."""
    *tensors, do = case.inputs(point, device)
    choice = _choice(case, tensors)
    width = point.left + 1 if case.kind == WINDOW else 0
    shape = case.kind, case.head_dim, case.value_dim, *case.shape(point), width
    rows = []
    for direction in DIRECTIONS:
        attentions = attentions_of(case, point, tensors, direction)
        picked = _picked(case, attentions, tensors, direction)
        attentions.pop(PICKED.get(picked), None)  # which torch's own pick is
        runs = {name: run_of(attention, tensors, do, direction) for name, attention in attentions.items()}
        times = timer({name: run for name, run in runs.items() if takes(name, run)}, device)
        ours, theirs = (times.pop(name, (None, None)) for name in ("ours", TORCH))
        rows.append(Timing(*shape, direction, str(choice.recipe), choice.name, *ours, *theirs, picked, times))
    return rows


def _choice(case: Case, tensors: list[Tensor]) -> dispatch.Choice:
    """What "auto" runs in low precision."""
    return dispatch.choose(Ask.of(tensors[0], tensors[2], AUTO, dispatch.FASTEST, case.kind))


def _picked(case: Case, attentions: dict[str, Attention], tensors: list[Tensor], direction: str) -> str:
    """The backend that torch's own function takes; "" where torch has none."""
    if case.kind == PACKED:
        return "varlen_attn"
    if TORCH not in attentions:
        return ""
    leaves = [x.detach().requires_grad_(direction == TRAINING) for x in tensors]
    return contenders.picked(attentions[TORCH], leaves)


def run_of(attention: Attention, tensors: list[Tensor], do: Tensor, direction: str) -> Callable[[], object]:
    """A call forward alone, or forward and backward, of its tensors and dO."""
    if direction == TRAINING:
        leaves = [x.detach().requires_grad_() for x in tensors]
        return lambda: torch.autograd.grad(attention(*leaves), leaves, do)
    return lambda: attention(*tensors)


def attentions_of(case: Case, point: Point, tensors: list[Tensor], direction: str) -> dict[str, Attention]:
    """Low precision ("ours"), torch's function (`TORCH`) where it has one, and other contenders in full precision."""
    q, training = tensors[0], direction == TRAINING
    if case.kind == PACKED:
        theirs = contenders.packed(tensors, offsets_of(q, point.tokens), point.tokens, training=training)
    else:
        window = (point.left, 0) if case.kind == WINDOW else contenders.UNLIMITED
        theirs = contenders.dense(case.kind, tensors, torch_mask(case.kind, q, point.left), window, training=training)
    return {"ours": ours_of(case, point, tensors), **theirs}


def ours_of(case: Case, point: Point, tensors: list[Tensor]) -> Attention:
    """Low precision."""
    q, recipe = tensors[0], _choice(case, tensors).recipe
    if case.kind == PACKED:
        return partial(packed_attention, offsets_of(q, point.tokens), point.tokens, recipe)
    options = {"is_causal": case.kind == CAUSAL, "recipe": recipe, "enable_gqa": point.group > 1}
    if case.kind == WINDOW:
        options["window"] = (point.left, 0)
    elif case.kind in (PADDING, MASK):
        options["attn_mask"] = torch_mask(case.kind, q)
    return partial(sage_attention, **options)


def offsets_of(q: Tensor, tokens: int) -> Tensor:
    """Of packed sequences of one length."""
    return torch.arange(0, q.shape[0] + 1, tokens, dtype=torch.int32, device=q.device)


def packed_attention(offsets: Tensor, longest: int, recipe: Recipe | str, *tensors: Tensor) -> Tensor:
    """Ours, causal, over packed sequences."""
    return sage_attention_varlen(*tensors, offsets, offsets, longest, longest, is_causal=True, recipe=recipe)


def torch_mask(kind: str, q: Tensor, left: int | None = None) -> Tensor | None:
    """A kind's mask as torch has it: a window of ``left`` or a quarter, an eighth padding, a prefix of a quarter.

    None of another kind, and of a window whose mask would have more than `MOST_ELEMENTS`.
    """
    batch, _, tokens, _ = q.shape
    if kind == WINDOW and tokens**2 > MOST_ELEMENTS:
        return None
    places = torch.arange(tokens, device=q.device)
    if kind == PADDING:
        return (places < tokens - tokens // 8).expand(batch, 1, 1, tokens)
    if kind not in (WINDOW, MASK):
        return None
    distance = places - places[:, None]
    past = distance <= 0
    return (
        past & (distance >= -(window_of(tokens) if left is None else left))
        if kind == WINDOW
        else past | (places < tokens // 4)
    )


def _compile(device: str, chosen: list[Case], tell: Callable[..., object]) -> None:
    """Compile what our kernels need, in several processes, so that timing finds it on disk."""
    count = max(1, min(len(chosen), (os.cpu_count() or 1) - 1, MOST_PROCESSES))
    tell(f"compiling the kernels of {len(chosen)} kinds of call in {count} processes")
    calls = run_in_processes(_call, [(case, device) for case in chosen], count)
    for done, (_, error) in enumerate(calls, 1):
        if error is not None:
            raise error
        tell(f"compiled {done} of {len(chosen)}", COMPILING * done / len(chosen))


def _call(case: Case, device: str) -> None:
    """Call what is compiled once in each form that timing will."""
    for point in case.points:
        *tensors, do = case.inputs(point, device)
        for direction in DIRECTIONS:
            compile_run(attentions_of(case, point, tensors, direction), tensors, do, direction)


def compile_run(attentions: dict[str, Attention], tensors: list[Tensor], do: Tensor, direction: str) -> None:
    """Run once what is compiled at its first call."""
    for name in ("ours", *PEERS):
        if name in attentions:
            takes(name, run_of(attentions[name], tensors, do, direction))
