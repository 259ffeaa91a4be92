"""A whole training step of models that people train, with one attention or another: time, memory, attention's share.

A step is forward, loss, backward and fused AdamW, all in BF16. One model is timed under all attentions: between their
steps only the attention changes, so that weights, tokens and memory are the same. Attentions take turns, in an order
that each round draws, and the median counts. ``torch.compile`` compiles all of a model, as people call it, with its
limit of recompilations raised: attentions that break the graph would else run uncompiled from the ninth layer on.

Before anything is timed, the loss of each attention and the gradients of all weights of attentions are held against
those of the first that is not ours, on the same weights and tokens. One that is off is timed and marked, and not
compared with the others; one that breaks is recorded with its error, and one that breaks the device ends the run.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.baselines import DOES_NOT_RUN, BrokenDevice, reason_of
from benchmarks.breakdown import PARTS, breakdown
from benchmarks.step_attentions import NAMES, Attentions, is_ours, names_of
from benchmarks.step_models import CHUNKED, MODELS, Trained
from benchmarks.timer import from_rest
from sagebwd.cli.results import environment, installed_version
from sagebwd.reference.metrics import Comparison

TOTAL_TOKENS = 32768
"""Tokens of a step unless told."""
CPU_TOKENS = 64
LOSS_OFF, COSINE = 0.01, 0.97
"""How far a loss may be from the first attention's, and the cosine of gradients below which they are wrong."""
PIECE = 1 << 24
"""Numbers of a gradient taken to FP64 at a time."""
LONGEST = 12
"""Kernels that a row names."""


@dataclass(frozen=True)
class Case:
    """A model at a length, compiled or not."""

    model: str
    tokens: int
    compiled: bool

    def __str__(self) -> str:
        length = f"{self.tokens // 1024}K" if self.tokens % 1024 == 0 else str(self.tokens)
        return f"{self.model}, {length} tokens, {'compiled' if self.compiled else 'eager'}"


@dataclass(frozen=True)
class Measurement:
    """One row of the result file: an attention of a case; times in ms a step, memory in bytes.

    asked_tokens: of a sequence, as they were asked for; tokens, as the model has them. layers: as many as were timed,
    of whole_layers. attention: of `benchmarks.step_attentions.NAMES`. gate: "ok", what is "wrong", or why it does not
    run. loss_value, gradient_cosine: of the first batch. best: the fastest that is right and not ours; over_best: its
    time over this one's, of rows that are right. peak_bytes holds weights and optimiser too. parts, of `PARTS` in ms;
    attention_share, of attention and its passes in all that the device does. attention_kernels, other_kernels: ms by
    name. start_s: of the first forward and backward, what they compile included; timing_s, all steps of it.
    """

    model: str
    asked_tokens: int
    tokens: int
    batch: int
    compiled: bool
    loss: str
    layers: int
    whole_layers: int
    vocabulary: int | None
    parameters: int
    attention: str
    gate: str
    loss_value: float | None
    gradient_cosine: float | None
    ms: float | None
    all_ms: list[float]
    host_ms: float | None
    tokens_per_s: float | None
    best: str | None
    over_best: float | None
    peak_bytes: int | None
    attention_share: float | None
    parts: dict[str, float]
    attention_kernels: dict[str, float]
    other_kernels: dict[str, float]
    start_s: float | None
    timing_s: float


@dataclass
class _Found:
    """What is known of an attention so far."""

    name: str
    device: str
    gate: str = "ok"
    loss: float | None = None
    cosine: float | None = None
    spent: list[tuple[float, float]] = field(default_factory=list)
    peak: int | None = None
    profile: tuple[Counter[str], Counter[str], Counter[str]] | None = None
    start_s: float | None = None
    timing_s: float = 0.0

    @property
    def runs(self) -> bool:
        return not self.gate.startswith(DOES_NOT_RUN)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """An error inside is what the attention is known by from then on."""
        try:
            yield
        except Exception as error:  # a compiler of another project raises what it likes
            try:
                self.gate = reason_of(error, self.device)
            except BrokenDevice as broken:
                raise BrokenDevice(f"{self.name}: {broken}") from error


def attentions_of(case: Case, names: Sequence[str] | None) -> list[str]:
    """Those that a case has of names, None for all."""
    return [name for name in names_of(MODELS[case.model], case.compiled) if name in (names or NAMES)]


def measure(
    case: Case, names: Sequence[str] | None, device: str, *, layers: int | None = None, total: int = TOTAL_TOKENS,
    loss: str = CHUNKED, rounds: int = 3, steps: int = 2, tell: Callable[[str, float], object] = lambda *_: None,
) -> list[Measurement]:  # fmt: skip
    """A row of each attention of a case.

    Args: names, of attentions, None for all that the model has; layers, None for the model's own; total, tokens of a
    step; loss, of `LOSSES`; steps, timed in each of ``rounds`` behind one that is not; tell, is told what begins and
    which share is done.

    Raises what the model's library does where the model cannot be made, and `BrokenDevice`.
    """
    model = MODELS[case.model]
    torch._dynamo.reset()
    _free(device)  # of an earlier model
    tell("making the model", 0.0)
    trained = model.build(layers, case.tokens, total, device, case.compiled, loss)
    optimizer = torch.optim.AdamW(trained.model.parameters(), lr=1e-6, fused=True)
    attentions = Attentions(model, trained)
    found = {name: _Found(name, device) for name in attentions_of(case, names)}
    limit = 8 + 2 * trained.layers + len(found)
    with torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True):
        first, reference = None, None
        for number, (name, one) in enumerate(_others_first(found)):
            tell(f"{name}: {'compiling' if case.compiled else 'first step'}", 0.6 * number / len(found))
            with one.recorded(), attentions.applied(name):
                one.loss, _, ms = from_rest(lambda: _gradients(trained, 0).item(), device)
                one.start_s = ms / 1e3
                if reference is None:
                    first, reference = one, _of_attention(trained)
                one.cosine = _cosine(_of_attention(trained), reference)
                _mark(one, first)
            optimizer.zero_grad()
            _free(device)
        reference = None
        draw, order = random.Random(0), list(found.items())
        for turn in range(rounds):
            draw.shuffle(order)
            for number, (name, one) in enumerate(order):
                if not one.runs:
                    continue
                tell(f"{name}: round {turn + 1} of {rounds}", 0.6 + 0.3 * (turn + number / len(order)) / rounds)
                began = time.perf_counter()
                with one.recorded(), attentions.applied(name):
                    _time(one, trained, optimizer, device, steps)
                one.timing_s += time.perf_counter() - began
                optimizer.zero_grad()
        for number, (name, one) in enumerate(found.items()):
            if one.runs:
                tell(f"{name}: profiling", 0.9 + 0.1 * number / len(found))
                with one.recorded(), attentions.applied(name):
                    one.profile = breakdown(lambda: _step(trained, optimizer, 0), torch.device(device))
    return _rows(case, model.whole, trained, loss, found)


def facts(device: str, commit: str | None) -> dict[str, object]:
    """What the results depend on: as for the attention benchmark, with the versions of libraries of models."""
    names = "transformers", "diffusers", "torchao", "flash-attn-3"
    return environment(device, commit) | {name.replace("-", "_"): installed_version(name) for name in names}


def _others_first(found: dict[str, _Found]) -> list[tuple[str, _Found]]:
    return sorted(found.items(), key=lambda item: is_ours(item[0]))


def _gradients(trained: Trained, seed: int) -> Tensor:
    loss = trained.loss(seed)
    loss.backward()
    return loss.detach()


def _step(trained: Trained, optimizer: torch.optim.Optimizer, seed: int) -> None:
    _gradients(trained, seed)
    optimizer.step()
    optimizer.zero_grad()


def _time(one: _Found, trained: Trained, optimizer: torch.optim.Optimizer, device: str, steps: int) -> None:
    """Steps that the device does one after another, as in training, behind one that has it at work."""
    _step(trained, optimizer, 0)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    _, ms, host_ms = from_rest(lambda: [_step(trained, optimizer, seed) for seed in range(steps)], device)
    if torch._dynamo.utils.counters["stats"]["unique_graphs"] != graphs:
        raise RuntimeError("compiled as it was timed")
    one.spent.append((ms / steps, host_ms / steps))
    if device != "cpu":
        one.peak = max(one.peak or 0, torch.cuda.max_memory_allocated())


def _of_attention(trained: Trained) -> list[Tensor]:
    """Gradients of what belongs to attentions."""
    return [
        weight.grad for name, weight in trained.model.named_parameters() if "attn" in name and weight.grad is not None
    ]


def _cosine(actual: list[Tensor], expected: list[Tensor]) -> float:
    comparison = Comparison()  # in FP64, by pieces: FP32 sums of millions of products leave a cosine above 1
    for pair in zip(actual, expected):
        for piece in zip(*(x.flatten().split(PIECE) for x in pair)):
            comparison.add(*piece)
    return comparison.cosine()


def _mark(one: _Found, first: _Found) -> None:
    wrong = []
    if not abs(one.loss - first.loss) <= LOSS_OFF:
        wrong.append(f"loss {one.loss:.3f} where {first.loss:.3f}")
    if not one.cosine >= COSINE:
        wrong.append(f"gradients' cosine {one.cosine:.3f}")
    if wrong:
        one.gate = f"wrong: {', '.join(wrong)}"


def _free(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def _rows(case: Case, whole_layers: int, trained: Trained, loss: str, found: dict[str, _Found]) -> list[Measurement]:
    medians = {name: statistics.median(ms for ms, _ in one.spent) for name, one in found.items() if one.spent}
    right = {name: ms for name, ms in medians.items() if found[name].gate == "ok"}
    others = {name: ms for name, ms in right.items() if not is_ours(name)}
    best = min(others, key=others.get, default=None)
    parameters = sum(weight.numel() for weight in trained.model.parameters())
    rows = []
    for name, one in found.items():
        ms = medians.get(name) if one.runs else None
        parts, *kernels = (
            Counter({key: us * 1e-3 for key, us in part.items()}) for part in one.profile or (Counter(),) * 3
        )
        busy = parts.total()
        rows.append(
            Measurement(
                case.model, case.tokens, trained.tokens, trained.batch, case.compiled, loss, trained.layers,
                whole_layers, trained.vocabulary, parameters, name, one.gate, one.loss, one.cosine,
                ms, [spent for spent, _ in one.spent], ms and statistics.median(host for _, host in one.spent),
                ms and trained.batch * trained.tokens / ms * 1e3, best,
                others[best] / ms if best and name in right else None, one.peak,
                (parts["attention"] + parts["passes"]) / busy if busy else None,
                {part: round(parts[part], 3) for part in PARTS if parts[part]},
                *({key[:100]: round(spent, 3) for key, spent in some.most_common(LONGEST)} for some in kernels),
                one.start_s, one.timing_s,
            )
        )  # fmt: skip
    return rows
