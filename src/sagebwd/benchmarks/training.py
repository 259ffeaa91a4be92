"""Training steps of a whole model under one attention or another: tokens a second, memory, attention's share.

One model, one AdamW (fused) and one clip of the gradient, as `sagebwd pretrain` has them, under BF16 autocast on
random tokens; between steps only the attention changes, so that weights, data and memory are the same for all.
Attentions take turns in every round and the median counts. A step is one micro-batch with its optimiser step.

Under torchrun every process takes such a micro-batch of its own and gradients are averaged (DDP). The first process
reports its own times, and the tokens a second of all. A run of one process and one of several show how it scales.

Before anything is timed, the gradients of the attention's projections are compared with the first baseline's, a kernel
in full precision, on the same weights and tokens: an attention that is far off prints FAILED and no figure.

Model FLOPs are 6 a token and weight that takes part in a matrix product (embeddings look up and count nothing), plus
attention: 3 times `sagebwd.hardware.flops` of forward, since backward's own products are twice forward's and what is
computed again is not credited. Utilisation is over the dense BF16 peak, INT8 products too.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import transformers
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sagebwd.benchmarks.breakdown import PARTS, breakdown
from sagebwd.benchmarks.choices import Choice
from sagebwd.benchmarks.results import environment
from sagebwd.hardware import flops, peak_rates
from sagebwd.metrics import Comparison
from sagebwd.training import processes
from sagebwd.training.config import Config
from sagebwd.training.model import build, checkpoint_layers

TOKENS_AT_ONCE = 32768
"""Tokens of a micro-batch unless told."""
VOCABULARY = 50257
"""GPT-2's."""
FLOOR = 0.97
"""Cosine of the projections' gradients to full precision's: a wrong kernel is below, the coarsest recipe above."""
PIECE = 1 << 24
"""Numbers of a gradient taken to FP64 at a time."""
PROFILED_STEPS = 2
COMPILED = ("model", "layers", "no")
"""The whole model by torch.compile; each decoder layer by itself, one for all, and the loss; nothing."""


@dataclass(frozen=True)
class Step:
    """One row of the result file: an attention at one context; times in ms a step, memory in bytes.

    All are one process's but ``tokens_per_s``, which counts the tokens of all ``processes``. ``parts`` says where the
    step's time goes (`sagebwd.benchmarks.breakdown`), ``attention_ms`` is its attention and passes and ``busy_ms`` all
    but idle, which is what of ``step_ms`` the profiler finds nothing in; ``attention_share`` is the ratio of the two.
    ``peer`` names the fastest baseline and ``speedup`` is over it. ``peak_bytes`` holds weights and optimiser too.
    ``compiled``: "model", "layers" each by itself, or "no".
    """

    attention: str
    recipe: str | None
    impl: str | None
    context: int
    batch: int
    processes: int
    compiled: str
    causal: bool
    parameters: int
    steps: int
    gate: str
    gradient_cosine: float | None
    step_ms: float | None
    all_ms: list[float]
    tokens_per_s: float | None
    peer: str | None
    speedup: float | None
    peak_bytes: int | None
    attention_ms: float | None
    busy_ms: float | None
    attention_share: float | None
    parts: dict[str, float]
    attention_kernels: dict[str, float]
    flops_per_step: float
    peak_tflops: float | None
    utilisation: float | None
    start_s: float


class _Runner:
    """The model, its optimiser and the tokens."""

    def __init__(
        self, config: Config, vocabulary: int, batch: int, device: str, compiled: str, is_causal: bool
    ) -> None:
        self.config, self.batch, self.device = config, batch, torch.device(device)
        self.vocabulary, self.context = vocabulary, config.data.context
        self.model = build(config, vocabulary).to(self.device).train()
        self.compiled, self.is_causal = compiled, is_causal
        self.model.config.is_causal = is_causal
        for layer in self.model.model.layers:
            layer.self_attn.is_causal = is_causal
            if compiled == "layers":
                layer.compile(dynamic=False)
        checkpoint_layers(self.model, config.optimisation)
        self.called: nn.Module = self.model
        if processes.count() > 1:  # wrapped, then compiled, as Accelerate does under Trainer
            self.called = DistributedDataParallel(self.model, broadcast_buffers=False)
        if compiled == "layers":
            self.model.loss_function = torch.compile(self.model.loss_function, dynamic=False)
        if compiled == "model":
            self.called = torch.compile(self.called, dynamic=False)
        settings = config.optimisation
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay, fused=True,
        )  # fmt: skip

    def tokens(self, seed: int) -> Tensor:
        """Random ids, the same for one seed in one process."""
        generator = torch.Generator(self.device).manual_seed(seed * processes.count() + processes.rank())
        shape = (self.batch, self.context)
        return torch.randint(self.vocabulary, shape, generator=generator, device=self.device)

    def gradients(self, ids: Tensor) -> None:
        """Forward and backward."""
        self.optimiser.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.called(input_ids=ids, labels=ids).loss
        loss.backward()

    def step(self, ids: Tensor) -> None:
        """Forward, backward, the clip and the optimiser's step."""
        self.gradients(ids)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimisation.clip_norm)
        self.optimiser.step()

    def projections(self) -> Tensor:
        """The gradients of every layer's projections to q, k and v, as one vector."""
        names = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
        return torch.cat([w.grad.flatten() for name, w in self.model.named_parameters() if name.endswith(names)])

    def flops(self) -> float:
        """Of one step, as the module's text counts them."""
        weights = sum(part.weight.numel() for part in self.model.modules() if isinstance(part, nn.Linear))
        model = self.config.model
        head_dim = model.head_dim or model.width // model.heads
        forward = flops(self.batch, model.heads, self.context, self.context, head_dim, is_causal=self.is_causal)
        return 6.0 * weights * self.batch * self.context + 3.0 * forward * model.layers

    def milliseconds(self, run: Callable[[], object]) -> float:
        """From nothing queued to nothing queued, begun by all processes together."""
        self.wait()
        if processes.count() > 1:
            torch.distributed.barrier()
        start = time.perf_counter()
        run()
        self.wait()
        return (time.perf_counter() - start) * 1e3

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


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
    progress: Callable[[str], object] = lambda text: None,
) -> list[Step]:
    """Every attention on one config's model and context, a row each.

    Args: batch, sequences of a micro-batch [`TOKENS_AT_ONCE` tokens]; steps, timed for each after ``warmup`` others;
    compiled, one of `COMPILED`; is_causal, False for attention as video models have it; progress, is told what runs.
    Of several processes each calls it, once `sagebwd.training.processes.join` has.

    Raises ValueError for no choices, steps or warmup below 1, or an unknown ``compiled``.
    """
    if compiled not in COMPILED:
        raise ValueError(f"compiled={compiled!r} is not known; accepted: {', '.join(COMPILED)}")
    if not choices or min(steps, warmup) < 1:
        raise ValueError(f"expected choices, steps and warmup; got {len(choices)}, {steps} and {warmup}")
    torch._dynamo.reset()
    gc.collect()  # an earlier call's model
    batch = batch or max(1, TOKENS_AT_ONCE // config.data.context)
    runner = _Runner(config, vocabulary, batch, device, compiled, is_causal)
    # an error beats times of layers that run uncompiled
    with torch._dynamo.config.patch(recompile_limit=8 + len(choices), fail_on_recompile_limit_hit=True):
        starts, cosines = _start(runner, choices, progress)
        good = [one for one in choices if _gate(cosines[one]) != "FAILED"]
        for one in good:
            progress(f"{one.name}: warming up")
            with one.applied(runner.model):
                for seed in range(warmup):
                    runner.step(runner.tokens(seed))
        times: dict[Choice, list[float]] = {one: [] for one in choices}
        peaks: dict[Choice, int] = {}
        for index in range(steps):
            ids = runner.tokens(warmup + index)
            for one in good:
                progress(f"{one.name}: step {index + 1} of {steps}")
                _reset_peak(runner)
                with one.applied(runner.model):
                    times[one].append(runner.milliseconds(lambda ids=ids: runner.step(ids)))
                if runner.device.type == "cuda":
                    peaks[one] = max(peaks.get(one, 0), torch.cuda.max_memory_allocated(runner.device))
        profiles = {}
        for one in good:
            progress(f"{one.name}: profiling")
            with one.applied(runner.model):
                profiles[one] = _profile(runner)
    return _rows(runner, choices, cosines, times, peaks, profiles, starts)


def _start(
    runner: _Runner, choices: Sequence[Choice], progress: Callable[[str], object]
) -> tuple[dict[Choice, float], dict[Choice, float | None]]:
    """Compile each; seconds of that, and cosines of its gradients to those of the first in full precision."""
    starts, cosines = {}, {}
    first = next((one for one in choices if one.recipe is None), None)
    expected = None
    for one in sorted(choices, key=lambda one: one != first):
        progress(f"{one.name}: first step" if runner.compiled == "no" else f"{one.name}: compiling")
        with one.applied(runner.model):
            starts[one] = runner.milliseconds(lambda: runner.gradients(runner.tokens(0))) / 1e3
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


def _reset_peak(runner: _Runner) -> None:
    if runner.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(runner.device)


def _profile(runner: _Runner) -> tuple[Counter[str], Counter[str]]:
    """Ms a step in each of `PARTS` but idle, and in each kernel of attention."""
    ids = runner.tokens(0)
    found = breakdown(
        lambda: [runner.step(ids) for _ in range(PROFILED_STEPS)], runner.wait, runner.device.type == "cuda"
    )
    return tuple(Counter({name: spent * 1e-3 / PROFILED_STEPS for name, spent in one.items()}) for one in found)


def _rows(
    runner: _Runner,
    choices: Sequence[Choice],
    cosines: dict[Choice, float | None],
    times: dict[Choice, list[float]],
    peaks: dict[Choice, int],
    profiles: dict[Choice, tuple[Counter[str], Counter[str]]],
    starts: dict[Choice, float],
) -> list[Step]:
    medians = {one: statistics.median(spent) for one, spent in times.items() if spent}
    baselines = {one: ms for one, ms in medians.items() if one.recipe is None}
    best = min(baselines, key=baselines.get) if baselines else None
    rates = peak_rates(torch.cuda.get_device_name(runner.device)) if runner.device.type == "cuda" else None
    peak = None if rates is None else rates.bf16_tflops
    work, tokens = runner.flops(), runner.batch * runner.context
    rows = []
    for one in choices:
        ms = medians.get(one)
        profiled, kernels = profiles.get(one, (Counter(), Counter()))
        busy, attention = profiled.total(), profiled["attention"] + profiled["passes"]
        found = ms is not None and attention > 0
        parts = {part: round(max(0.0, ms - busy) if part == "idle" else profiled[part], 4) for part in PARTS if found}
        rows.append(
            Step(
                one.name, one.recipe, one.impl, runner.context, runner.batch, processes.count(),
                runner.compiled, runner.is_causal, sum(weight.numel() for weight in runner.model.parameters()),
                len(times[one]), _gate(cosines[one]), cosines[one], ms, times[one],
                ms and processes.count() * tokens / ms * 1e3, best and best.name,
                ms and best and medians[best] / ms, peaks.get(one), attention if found else None,
                busy if found else None, attention / busy if found else None, parts,
                {name[:100]: round(spent, 4) for name, spent in kernels.most_common(16)}, work, peak,
                ms and peak and work / ms * 1e-9 / peak, starts[one],
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


def table(rows: Sequence[Step]) -> Table:
    """The rows for a terminal."""
    first = rows[0]
    how = {"model": "compiled", "layers": "layers compiled", "no": "not compiled"}[first.compiled]
    how += "" if first.causal else ", no mask"
    several = "" if first.processes == 1 else f" on each of {first.processes} processes"
    batch = f"batch {first.batch}{several}"
    title = f"{first.parameters / 1e6:.0f}M weights, context {first.context}, {batch}, {how}, BF16, AdamW"
    drawn = Table(title=title, title_justify="left", box=None)
    peak = "" if first.peak_tflops is None else f" of {first.peak_tflops:.0f} TFLOP/s BF16"
    headings = ("attention", "step ms", "tokens/s", "over best", "peak GiB", "in attention", f"model FLOPs{peak}")
    for heading in headings:
        drawn.add_column(heading, justify="left" if heading == "attention" else "right")
    for row in rows:
        if row.step_ms is None:
            drawn.add_row(row.attention, "[red]FAILED[/red]")
            continue
        share = "" if row.attention_ms is None else f"{row.attention_share:.0%}, {row.attention_ms:.1f} ms"
        drawn.add_row(
            row.attention,
            f"{row.step_ms:.1f}",
            f"{row.tokens_per_s:,.0f}",
            "" if row.speedup is None else f"{row.speedup:.3f}x {row.peer}",
            "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f}",
            share,
            "" if row.utilisation is None else f"{row.utilisation:.1%}",
        )
    return drawn


def parts_table(rows: Sequence[Step]) -> Table:
    """Where the time of the rows goes, for a terminal."""
    drawn = Table(title="where a step's time goes, ms", title_justify="left", box=None)
    for heading in ("of it", *PARTS):
        drawn.add_column(heading, justify="left" if heading == "of it" else "right")
    for row in rows:
        if row.parts:
            drawn.add_row(row.attention, *(f"{row.parts[part]:.1f}" for part in PARTS))
    return drawn
