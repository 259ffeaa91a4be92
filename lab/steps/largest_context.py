"""The longest sequence that one GPU trains a model on, with one attention or another: one that fits, and one that
does not, as close together as is asked.

A trial is a whole step, of a batch of one sequence unless told, with the optimiser's state there. Memory in use grows
with the tokens, so that after a trial that fits its peak says what to try next.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from benchmarks.timer import wait
from lab.steps.registry import Choice
from lab.steps.runner import Runner
from lab.training.config import Config

MULTIPLE = 4096
"""Tokens between the sequence that fits and the one that does not."""


@dataclass(frozen=True)
class Trial:
    """A step at one context: whether it ran, and the peak of memory in use, in bytes, where it did."""

    context: int
    fits: bool
    peak_bytes: int | None


@dataclass(frozen=True)
class LargestContext:
    """One row of the result file. ``context`` is the largest that was trained, None where not even the least was.

    ``too_large`` ran out of memory. ``peak_bytes`` is of ``context``, ``capacity_bytes`` all of the GPU's memory,
    ``before_bytes`` what weights and the optimiser take. ``compiled`` and ``checkpointing`` as in
    `lab.steps.timing.Step`.
    """

    attention: str
    recipe: str | None
    impl: str | None
    batch: int
    compiled: str
    checkpointing: str
    causal: bool
    parameters: int
    vocabulary: int
    context: int | None
    too_large: int
    peak_bytes: int | None
    before_bytes: int
    capacity_bytes: int | None
    trials: list[Trial]


def measure(
    config: Config,
    choices: Sequence[Choice],
    *,
    vocabulary: int,
    batch: int = 1,
    device: str = "cuda",
    compiled: str = "layers",
    is_causal: bool = True,
    multiple: int = MULTIPLE,
    progress: Callable[[str], object] = lambda text: None,
) -> Iterator[LargestContext]:
    """Of every attention, a row each as it is found; the search begins at the config's context.

    Args: multiple, of tokens, that every context but the first is; the others as in
    `lab.steps.timing.measure`.
    """
    runner = Runner(config, vocabulary, batch, device, compiled, is_causal)
    _fill_optimiser(runner)
    before, capacity = _memory(runner)
    for one in choices:
        with one.applied(runner.model):

            def trial(context: int, one: Choice = one) -> Trial:
                progress(f"{one.name}: {context} tokens")
                tried = _trial(runner, context)
                progress(f"{one.name}: {context} tokens {'fit' if tried.fits else 'do not fit'}")
                return tried

            trials = search(trial, config.data.context, multiple, before, capacity)
        fitting = max((x for x in trials if x.fits), key=lambda x: x.context, default=None)
        yield LargestContext(
            one.name, one.recipe, one.impl, batch, compiled, runner.checkpointing(), is_causal, runner.parameters(),
            vocabulary, fitting and fitting.context, min(x.context for x in trials if not x.fits),
            fitting and fitting.peak_bytes, before, capacity, trials,
        )  # fmt: skip


def search(
    trial: Callable[[int], Trial], start: int, multiple: int, before: int = 0, capacity: int | None = None
) -> list[Trial]:
    """Trials until one that fits and one that does not are ``multiple`` apart, or not even ``multiple`` fits.

    Args: before, bytes in use without any tokens; capacity, bytes in all. Where they say nothing, contexts double.
    """
    trials: list[Trial] = []
    low, high, context = 0, None, start
    while high is None or high - low > multiple:
        trials.append(trial(context))
        if trials[-1].fits:
            low = context
        else:
            high = context
        context = _next(low, high, multiple, _expected(trials, before, capacity))
    return trials


def _expected(trials: list[Trial], before: int, capacity: int | None) -> int | None:
    """Tokens that the trial of most tokens that fits says would fill the memory."""
    fitting = max((x for x in trials if x.fits), key=lambda x: x.context, default=None)
    if fitting is None or capacity is None or (fitting.peak_bytes or 0) <= before:
        return None
    return int(fitting.context * (capacity - before) / (fitting.peak_bytes - before))


def _next(low: int, high: int | None, multiple: int, expected: int | None) -> int:
    """A multiple above ``low`` and below ``high``: what is expected to fit, or the middle, or twice as much."""
    if expected is None:
        expected = 2 * low if high is None else (low + high) // 2
    context = max(expected, low + multiple)
    if high is not None:
        context = min(context, high - 1)
    return max(context // multiple, 1) * multiple


def _trial(runner: Runner, context: int) -> Trial:
    runner.context = context
    runner.reset_peak()
    fits = _runs(runner)
    peak = runner.peak_bytes() if fits else None
    runner.optimiser.zero_grad(set_to_none=True)
    torch._dynamo.reset()  # code of other lengths
    gc.collect()
    if runner.device.type == "cuda":
        torch.cuda.empty_cache()
    return Trial(context, fits, peak)


def _runs(runner: Runner) -> bool:
    """Apart from what clears up: an exception holds the frames' tensors."""
    try:
        runner.step(runner.tokens(0))
        wait(runner.device)
    except RuntimeError as error:  # the allocator's own, or of a library that finds no room beside it
        if not re.search("out of memory|ALLOC_FAILED", str(error)):
            raise
        return False
    return True


def _fill_optimiser(runner: Runner) -> None:
    """Its state is made by its first step."""
    for weight in runner.model.parameters():
        weight.grad = torch.zeros_like(weight)
    runner.optimiser.step()
    runner.optimiser.zero_grad(set_to_none=True)


def _memory(runner: Runner) -> tuple[int, int | None]:
    """Bytes in use and in all; of a CPU nobody knows."""
    if runner.device.type != "cuda":
        return 0, None
    return torch.cuda.memory_allocated(runner.device), torch.cuda.mem_get_info(runner.device)[1]


def table(rows: Sequence[LargestContext]) -> Table:
    """The rows for a terminal."""
    first = rows[0]
    again = {"no": "", "layers": ", layers checkpointed", "but attention": ", layers but attention checkpointed"}
    title = f"the longest sequence that fits: {first.parameters / 1e6:.0f}M weights, batch {first.batch}"
    drawn = Table(title=title + again[first.checkpointing], title_justify="left", box=None)
    for heading in ("attention", "tokens", "too many", "peak GiB", "of GiB"):
        drawn.add_column(heading, justify="left" if heading == "attention" else "right")
    for row in rows:
        sizes = ("" if size is None else f"{size / 2**30:.1f}" for size in (row.peak_bytes, row.capacity_bytes))
        drawn.add_row(row.attention, str(row.context or "none"), str(row.too_large), *sizes)
    return drawn
