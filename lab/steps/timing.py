"""Training steps of a whole model under one attention or another: tokens a second, memory, attention's share.

One model, one AdamW (fused) and one clip of the gradient, as `python -m lab pretrain` has them, under BF16 autocast on
random tokens; between steps only the attention changes, so that weights, data and memory are the same for all.
Attentions take turns in every round and the median counts. A step is one micro-batch with its optimiser step.

Under torchrun every process takes such a micro-batch of its own and gradients are averaged (DDP). The first process
reports its own times, and the tokens a second of all. A run of one process and one of several show how it scales.

Before anything is timed, the gradients of the attention's projections are compared with the first baseline's, a kernel
in full precision, on the same weights and tokens: an attention that is far off prints FAILED and no figure.

Model FLOPs are 6 a token and weight that takes part in a matrix product (embeddings look up and count nothing), plus
attention: 3 times `benchmarks.shapes.flops` of forward, since backward's own products are twice forward's and what is
computed again is not credited. Utilisation is over the dense BF16 peak, INT8 products too.
"""

from __future__ import annotations

import gc
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import transformers

from benchmarks.breakdown import PARTS, breakdown
from lab.steps.registry import Choice
from lab.steps.runner import Runner
from lab.training import processes
from lab.training.config import Config
from sagebwd.cli.hardware import peak_rates
from sagebwd.cli.results import environment
from sagebwd.reference.metrics import Comparison

TOKENS_AT_ONCE = 32768
"""Tokens of a micro-batch unless told."""
VOCABULARY = 50257
"""GPT-2's."""
FLOOR = 0.97
"""Cosine of the projections' gradients to full precision's: a wrong kernel is below, the coarsest recipe above."""
PIECE = 1 << 24
"""Numbers of a gradient taken to FP64 at a time."""
STEPS_OF_A_START = 40  # that compiling takes as long as, about
PROFILED_STEPS = 2


@dataclass(frozen=True)
class Step:
    """One row of the result file: an attention at one context; times in ms a step, memory in bytes.

    All are one process's but ``tokens_per_s``, which counts the tokens of all ``processes``. ``parts`` says where the
    step's time goes (`benchmarks.breakdown`), ``attention_ms`` is its attention and passes and ``busy_ms`` all
    but idle, which is what of ``step_ms`` the profiler finds nothing in; ``attention_share`` is the ratio of the two.
    ``host_ms`` is until Python returns, the GPU still at work; where that has a step's launches queued, Python waits
    for it. ``peer`` names the fastest baseline and ``speedup`` is over it. ``peak_bytes`` holds weights and optimiser
    too, ``kept_bytes`` what the forward of all layers and of the loss leaves for backward. ``compiled`` is one of
    `COMPILED`. ``checkpointing`` is what of the layers is computed again: "no", "layers" or all of them "but
    attention". ``attention_kernels`` and ``other_kernels`` are ms by name, the longest alone.
    """

    attention: str
    recipe: str | None
    impl: str | None
    context: int
    batch: int
    processes: int
    compiled: str
    checkpointing: str
    causal: bool
    parameters: int
    steps: int
    gate: str
    gradient_cosine: float | None
    step_ms: float | None
    all_ms: list[float]
    host_ms: float | None
    tokens_per_s: float | None
    peer: str | None
    speedup: float | None
    peak_bytes: int | None
    kept_bytes: int | None
    attention_ms: float | None
    busy_ms: float | None
    attention_share: float | None
    parts: dict[str, float]
    attention_kernels: dict[str, float]
    other_kernels: dict[str, float]
    flops_per_step: float
    peak_tflops: float | None
    utilisation: float | None
    start_s: float


def measure(
    config: Config,
    choices: Sequence[Choice],
    *,
    batch: int | None = None,
    vocabulary: int = VOCABULARY,
    device: str = "cuda",
    steps: int = 8,
    warmup: int = 2,
    compiled: str = "no",
    is_causal: bool = True,
    progress: Callable[[str, float], object] = lambda text, done: None,
) -> list[Step]:
    """Every attention on one config's model and context, a row each.

    Args: batch, sequences of a micro-batch [`TOKENS_AT_ONCE` tokens]; steps, timed for each after ``warmup`` others;
    compiled, one of `COMPILED`; is_causal, False for attention as video models have it; progress, is told what runs,
    and which share of the whole is done.
    Of several processes each calls it, once `lab.training.processes.join` has.

    Raises ValueError for no choices, steps or warmup below 1, or an unknown ``compiled``; RuntimeError where a step
    that was timed compiled something, which is no step's time, or "reduce-overhead" made no CUDA graphs.
    """
    if not choices or min(steps, warmup) < 1:
        raise ValueError(f"expected choices, steps and warmup; got {len(choices)}, {steps} and {warmup}")
    done, total = 0, len(choices) * (steps + warmup + PROFILED_STEPS + (STEPS_OF_A_START if compiled != "no" else 1))

    def tell(text: str, count: int) -> None:
        """``count`` steps begin."""
        nonlocal done
        progress(text, done / total)
        done += count

    torch._dynamo.reset()
    gc.collect()  # an earlier call's model
    batch = batch or max(1, TOKENS_AT_ONCE // config.data.context)
    runner = Runner(config, vocabulary, batch, device, compiled, is_causal)
    # an error beats times of layers that run uncompiled
    with torch._dynamo.config.patch(recompile_limit=8 + len(choices), fail_on_recompile_limit_hit=True):
        starts, cosines = _start(runner, choices, tell)
        good = [one for one in choices if _gate(cosines[one]) != "FAILED"]
        for one in good:
            tell(f"{one.name}: warming up", warmup)
            with one.applied(runner.model):
                for seed in range(warmup):
                    runner.step(runner.tokens(seed))
        skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
        if compiled == "reduce-overhead" and skipped and runner.device.type == "cuda":
            raise RuntimeError(f"{skipped} graphs are no CUDA graphs: TORCH_LOGS=perf_hints says why")
        compilations = _compilations()
        times: dict[Choice, list[tuple[float, float]]] = {one: [] for one in choices}
        peaks: dict[Choice, int | None] = {}
        for index in range(steps):
            ids = runner.tokens(warmup + index)
            for one in good:
                tell(f"{one.name}: step {index + 1} of {steps}", 1)
                runner.reset_peak()
                with one.applied(runner.model):
                    times[one].append(runner.milliseconds(lambda ids=ids: runner.step(ids)))
                peaks[one] = max(peaks.get(one) or 0, runner.peak_bytes() or 0) or None
        if _compilations() != compilations:
            raise RuntimeError(f"steps at context {runner.context} compiled as they were timed: raise warmup={warmup}")
        kept, profiles = {}, {}
        for one in good:
            tell(f"{one.name}: profiling", PROFILED_STEPS)
            with one.applied(runner.model):
                kept[one] = runner.kept_bytes(runner.tokens(0))
                profiles[one] = _profile(runner)
    return _rows(runner, choices, cosines, times, peaks, kept, profiles, starts)


def _start(
    runner: Runner, choices: Sequence[Choice], tell: Callable[[str, int], object]
) -> tuple[dict[Choice, float], dict[Choice, float | None]]:
    """Compile each; seconds of that, and cosines of its gradients to those of the first in full precision."""
    starts, cosines = {}, {}
    first = next((one for one in choices if one.recipe is None), None)
    expected = None
    for one in sorted(choices, key=lambda one: one != first):
        if runner.compiled == "no":
            tell(f"{one.name}: first step", 1)
        else:
            tell(f"{one.name}: compiling", STEPS_OF_A_START)
        with one.applied(runner.model):
            starts[one] = runner.milliseconds(lambda: runner.gradients(runner.tokens(0)))[0] / 1e3
        if one == first:
            expected = runner.projections()
        cosines[one] = None
        if expected is not None:
            comparison = Comparison()  # in FP64, by pieces: FP32 sums of millions of products leave a cosine above 1
            for pair in zip(runner.projections().split(PIECE), expected.split(PIECE)):
                comparison.add(*pair)
            cosines[one] = comparison.cosine()
    return starts, cosines


def _gate(cosine: float | None) -> str:
    if cosine is None:
        return "not checked"
    return "ok" if cosine >= FLOOR else "FAILED"


def _compilations() -> int:
    """Graphs that torch.compile has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _profile(runner: Runner) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Ms a step in each of `PARTS` but idle, in each kernel of attention, and in others."""
    ids = runner.tokens(0)
    found = breakdown(lambda: [runner.step(ids) for _ in range(PROFILED_STEPS)], runner.device)
    return tuple(Counter({name: spent * 1e-3 / PROFILED_STEPS for name, spent in one.items()}) for one in found)


def _rows(
    runner: Runner,
    choices: Sequence[Choice],
    cosines: dict[Choice, float | None],
    times: dict[Choice, list[tuple[float, float]]],
    peaks: dict[Choice, int | None],
    kept: dict[Choice, int | None],
    profiles: dict[Choice, tuple[Counter[str], Counter[str], Counter[str]]],
    starts: dict[Choice, float],
) -> list[Step]:
    medians = {one: statistics.median(ms for ms, _ in spent) for one, spent in times.items() if spent}
    baselines = {one: ms for one, ms in medians.items() if one.recipe is None}
    best = min(baselines, key=baselines.get) if baselines else None
    rates = peak_rates(torch.cuda.get_device_name(runner.device)) if runner.device.type == "cuda" else None
    peak = None if rates is None else rates.bf16_tflops
    work, tokens = runner.flops(), runner.batch * runner.context
    rows = []
    for one in choices:
        ms = medians.get(one)
        profiled, *kernels = profiles.get(one, (Counter(), Counter(), Counter()))
        busy, attention = profiled.total(), profiled["attention"] + profiled["passes"]
        found = ms is not None and attention > 0
        parts = {part: round(max(0.0, ms - busy) if part == "idle" else profiled[part], 4) for part in PARTS if found}
        rows.append(
            Step(
                one.name, one.recipe, one.impl, runner.context, runner.batch, processes.count(),
                runner.compiled, runner.checkpointing(), runner.is_causal, runner.parameters(), len(times[one]),
                _gate(cosines[one]), cosines[one], ms, [whole for whole, _ in times[one]],
                ms and statistics.median(host for _, host in times[one]),
                ms and processes.count() * tokens / ms * 1e3, best and best.name, ms and best and medians[best] / ms,
                peaks.get(one), kept.get(one), attention if found else None, busy if found else None,
                attention / busy if found else None, parts,
                *({name[:100]: round(spent, 4) for name, spent in some.most_common(24)} for some in kernels), work,
                peak, ms and peak and work / ms * 1e-9 / peak, starts[one],
            )
        )  # fmt: skip
    return rows


def facts(device: str, commit: str | None, config: Config) -> dict[str, object]:
    """What the result depends on: as for the attention benchmark, with Transformers and the config."""
    rates = peak_rates(torch.cuda.get_device_name()) if device.startswith("cuda") else None
    return {
        **environment(device, commit),
        "transformers": transformers.__version__,
        "peak": None if rates is None else f"{rates.bf16_tflops} TFLOP/s dense BF16, {rates.source}",
        "model": asdict(config.model),
    }
