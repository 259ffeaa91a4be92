"""The error of a model's attention while it trains, layer by layer, and an alarm (docs/safety.md#the-monitor).

Every ``every`` steps one sequence, always the same so that what changes is the model, goes through the model forward
and backward in full precision (`sagebwd.diagnostics.capture`), and a few heads of each chosen layer are emulated under
the layer's own recipe and compared with FP64 (`sagebwd.diagnostics.trace`). Training goes on as if nothing had
happened: no weight gets a gradient, modes and random numbers are put back, and the config is only read.

A layer under "auto" is measured by the recipe that "auto" takes on this device where its calls are long enough for low
precision; shorter ones may run in 16 bit, whose errors are less.

Threshold: .15 is half of what the paper prints for dQ and dK of its 325M model (arXiv 2603.02170, Table 2: .26 and
.31); Gaussian inputs reach it at a standard deviation of 5, and sound layers of our own runs lie at .01 to .07.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields

import torch
from torch import Tensor, nn

from sagebwd.auto import choice as auto_choice
from sagebwd.auto.model import Size
from sagebwd.call import Ask
from sagebwd.diagnostics.capture import Captured, capture, check_token_ids
from sagebwd.diagnostics.monitor_settings import Monitor
from sagebwd.diagnostics.trace import SATURATED, Row, measure
from sagebwd.extras import extra
from sagebwd.integrations.transformers_settings import NAME, settings
from sagebwd.masks.kinds import CAUSAL, FULL, WINDOW
from sagebwd.recipe import AUTO, Recipe

with extra("diagnostics"):
    from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainerCallback

TENSORS = ("ds", "dq", "dk", "dv", "o")
PREFIX = "monitor/"
"""Of every name it logs: monitor/layer_3/dq, monitor/layer_3/saturated, monitor/seconds, monitor/share."""
MOST = 0.5
"""The share of saturated queries above which a head's softmax is saturated, and a warning says so."""
BUDGET = 0.02
STATE = "sagebwd_monitor"
"""Where its state is in ``TrainerState.stateful_callbacks``, which every checkpoint holds and a resumed run reads."""


LONG = 1 << 17
"""Tokens of a sequence that low precision is faster at than at any shorter one."""


@dataclass
class Layer:
    """What the monitor knows of one layer: errors of its newest check by tensor of `TENSORS`."""

    recipe: str = ""
    """What the newest check measured, as text."""
    warned: bool = False
    head: int | None = None
    """The head with the largest error of dQ or dK in the newest check."""
    errors: dict[str, float] = field(default_factory=dict)
    highest: float = 0.0
    """The largest error of dQ or dK in any check."""
    saturated: float = 0.0
    """The share of the queries of ``head`` whose largest P is .99 or more (`sagebwd.diagnostics.trace.SATURATED`)."""


class AttentionMonitor(TrainerCallback):
    """Watches the attention error of a model with ``attn_implementation="sagebwd"``, under any Trainer or in a loop.

    Args: token_ids (batch, tokens) int64, without padding, of which the first ``settings.tokens`` of each sequence are
    used; one sequence is enough. settings, a `Monitor`, as in the ``monitor`` section of a run's config.

    Under a Trainer, use `attach` in place of ``callbacks=[...]``: the monitor logs through its Trainer, and each
    checkpoint has its counters. In a loop of your own, `watch` the model, and call `step` after each optimiser step;
    save `state_dict` with a checkpoint, and give it to `load_state_dict` after `watch`.

    Warnings are Python warnings, and in `events`. A check that cannot be made (NaN in the tensors, no memory) is
    warned of and left out. In distributed training every process checks, and the first one's findings hold for all.
    FSDP1 is not supported, nor FP16's loss scaling.

    Raises ValueError for token_ids of another shape, and in `watch` or as training begins for a model of another
    attention, a layer that is not there, a monitor that is attached to no Trainer, and FP16 under a Trainer.
    """

    def __init__(self, token_ids: Tensor, settings: Monitor | None = None) -> None:
        self.settings = settings or Monitor()
        check_token_ids(token_ids)
        self.token_ids = token_ids[:, : self.settings.tokens]
        self.trainer: Trainer | None = None
        self.model: PreTrainedModel | None = None
        self.dtype: torch.dtype | None = None
        self.steps = 0
        self.layers: dict[int, Layer] = {}
        self.events: list[dict[str, object]] = []
        self.count = 0
        self.seconds = 0.0
        self.began = time.monotonic()
        self.costly = False

    def attach(self, trainer: Trainer) -> AttentionMonitor:
        """Watch this Trainer's model, from its next ``train()`` on."""
        if any(isinstance(other, AttentionMonitor) for other in trainer.callback_handler.callbacks):
            raise ValueError(
                "AttentionMonitor: this Trainer has one already, whose state its checkpoints hold; give that one all "
                "layers, or trainer.remove_callback it first"
            )
        self.trainer = trainer
        trainer.add_callback(self)
        return self

    def watch(self, model: nn.Module, autocast: torch.dtype | None = None) -> AttentionMonitor:
        """Watch a model of Transformers in a loop without a Trainer, as is or as DDP, torch.compile or PEFT wraps it.

        Args: autocast, torch.bfloat16 where training has the forward under ``torch.autocast`` in it; None without.
        """
        if autocast not in (None, torch.bfloat16):
            raise ValueError(f"autocast={autocast}: accepted: None, torch.bfloat16")
        while not (isinstance(model, PreTrainedModel) or hasattr(model, "get_base_model")):  # which PEFT's models have
            inner = getattr(model, "module", getattr(model, "_orig_mod", None))
            if inner is None:
                raise ValueError(
                    f"model: {type(model).__name__} is no model of Transformers; accepted: one with "
                    f"attn_implementation='{NAME}'"
                )
            model = inner
        self.model, self.dtype, self.steps = model, autocast, 0
        self._begin(model)
        return self

    def step(self) -> dict[str, float] | None:
        """Count a step of the optimiser of a watched model, and make a check where one is due.

        Returns what a check found by name, such as "monitor/layer_3/dq", and None without a check. Raises ValueError
        before `watch`.
        """
        if self.model is None:
            raise ValueError("AttentionMonitor: call watch(model) before step()")
        self.steps += 1
        if not self.settings.every or self.steps % self.settings.every:
            return None
        with torch.autocast(self.model.device.type, enabled=False):  # the emulator computes in what it is given
            return self._check(self.model, self.steps)

    def state_dict(self) -> dict[str, object]:
        """Steps, counters and events, for a checkpoint; of plain numbers and texts."""
        return {**self.summary(), "elapsed": time.monotonic() - self.began, "steps": self.steps}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from a `state_dict`."""
        if self.model is None:
            raise ValueError("AttentionMonitor: call watch(model) before load_state_dict()")
        self.steps = state["steps"]
        self._restore(state)

    @property
    def share(self) -> float:
        """The checks' share of the time since training began, evaluations and checkpoints included."""
        return self.seconds / max(time.monotonic() - self.began, 1e-9)

    def summary(self) -> dict[str, object]:
        """For a report: checks made, their seconds and share, each layer's recipe and errors, and the events."""
        return {
            "checks": self.count,
            "seconds": self.seconds,
            "share": self.share,
            "layers": {str(index): asdict(layer) for index, layer in self.layers.items()},
            "events": list(self.events),
        }

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Find the layers, or go on with the counters of the checkpoint."""
        if self.trainer is None:
            raise ValueError("AttentionMonitor: call attach(trainer) in place of callbacks=[...], it logs through it")
        if args.fp16:
            raise ValueError("AttentionMonitor: fp16=True scales the loss, which a check does not; use bf16=True")
        self._begin(model)
        saved = state.stateful_callbacks.get(STATE)
        if saved is not None:
            self._restore(saved)

    def _begin(self, model: PreTrainedModel) -> None:
        """Find the layers of a model."""
        config, found = _attention(model)
        if config is None or config._attn_implementation != NAME:
            raise ValueError(
                f"AttentionMonitor: {type(model).__name__} has another attention; load it with "
                f"attn_implementation='{NAME}'"
            )
        chosen = found if self.settings.layers is None else self.settings.layers
        for index in chosen:
            if index not in found:
                raise ValueError(f"monitor.layers: {index} is not there; the model has layers 0 to {max(found)}")
        self.layers = {index: Layer() for index in chosen}
        self.events, self.count, self.seconds, self.costly = [], 0, 0.0, False
        self.began = time.monotonic()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Make a check where one is due."""
        if not self.settings.every or state.global_step % self.settings.every:
            return
        logs = self._check(model, state.global_step)
        due = control.should_log
        self.trainer.log(logs)
        control.should_log = due  # logging clears it, and the step's own line would be lost
        state.stateful_callbacks[STATE] = {**self.summary(), "elapsed": time.monotonic() - self.began}

    def _check(self, model: PreTrainedModel, step: int) -> dict[str, float]:
        """Measure every layer, and warn of those that are above; what was found by name."""
        start = _now(model.device)
        config, _ = _attention(model)
        for layer in self.layers.values():
            layer.errors = {}
        try:
            for call in self._capture(model):
                self._judge(call, step, recipe_of(config, call))
        except Exception as error:  # of whatever kind: training is not to end for a check
            self._announce(step, None, f"no check: {type(error).__name__}: {error}")
        self._agree()
        seconds = _now(model.device) - start
        self.count, self.seconds = self.count + 1, self.seconds + seconds
        logs = self._logs(seconds)
        if self.share > BUDGET and not self.costly:
            self.costly = True
            every = math.ceil(self.settings.every * self.share / BUDGET)
            message = f"checks take {self.share:.1%} of the time, above {BUDGET:.0%}; monitor.every={every} would not"
            self._announce(step, None, message)
        return logs

    def _capture(self, model: PreTrainedModel) -> list[Captured]:
        """The random numbers are as before; a compiled model runs uncompiled."""
        kind, devices = model.device.type, [model.device] if model.device.type == "cuda" else []
        autocast = nullcontext() if self.dtype is None else torch.autocast(kind, self.dtype)
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"), autocast:
            captured = capture(model, self.token_ids, layers=list(self.layers))
        return [
            call.select(choose_heads(call, self.settings.heads, self.layers[call.layer].head, self.count))
            for call in captured
        ]

    def _judge(self, call: Captured, step: int, recipe: Recipe) -> None:
        """Measure one layer, and warn of it."""
        layer, threshold = self.layers[call.layer], self.settings.threshold
        rows = measure([call], [recipe])
        worst = max(rows, key=lambda row: _gradient_error(row.relative_l2))
        layer.recipe, layer.head, layer.saturated = str(recipe), worst.head, worst.saturated
        layer.errors = worst_head(rows)
        error = _gradient_error(layer.errors)
        layer.highest = max(layer.highest, error)
        is_above = not error <= threshold
        if is_above and not layer.warned:
            self._announce(step, call.layer, f"{_described(layer, threshold)}; {_advice(call.layer)}")
        layer.warned = is_above

    def _announce(self, step: int, index: int | None, message: str) -> None:
        where = "" if index is None else f"layer {index}: "
        self.events.append({"step": step, "layer": index, "message": f"{where}{message}"})
        if not _is_distributed() or torch.distributed.get_rank() == 0:
            warnings.warn(f"attention monitor, step {step}: {where}{message}", stacklevel=2)

    def _agree(self) -> None:
        """The first process's findings in every process: the heads of the next check follow from them."""
        if _is_distributed():
            found = [(self.layers, self.events)]
            torch.distributed.broadcast_object_list(found, src=0)
            self.layers, self.events = found[0]

    def _logs(self, seconds: float) -> dict[str, float]:
        found = {
            f"{PREFIX}layer_{index}/{name}": value
            for index, layer in self.layers.items()
            if layer.errors
            for name, value in {**layer.errors, "saturated": layer.saturated}.items()
        }
        return {**found, f"{PREFIX}seconds": seconds, f"{PREFIX}share": self.share}

    def _restore(self, saved: dict) -> None:
        known = [kept.name for kept in fields(Layer)]  # a checkpoint of another version may have more
        for index, layer in saved["layers"].items():
            if int(index) in self.layers:
                self.layers[int(index)] = Layer(**{name: layer[name] for name in known if name in layer})
        self.events, self.count, self.seconds = list(saved["events"]), saved["checks"], saved["seconds"]
        self.began = time.monotonic() - saved["elapsed"]


def recipe_of(config: PreTrainedConfig, call: Captured) -> Recipe:
    """What a layer computes with by its config; of "auto", what that takes of low precision, if anything.

    That is its choice for sequences of `LONG` tokens: full precision where none is faster, or nobody has timed it.
    """
    chosen = settings(config, call.layer)
    recipe = Recipe.parse_or_auto(chosen["recipe"])
    if recipe != AUTO:
        return recipe
    kind = WINDOW if call.window is not None else CAUSAL if call.is_causal else FULL
    ask = Ask.of(call.q, call.v, AUTO, chosen["impl"], kind)._replace(training=True)
    width = 0 if call.window is None else sum(max(0, side) for side in call.window) + 1
    return auto_choice.choose(ask, Size(LONG, LONG, call.q.shape[1], call.k.shape[1], width)).recipe


def worst_head(rows: Sequence[Row]) -> dict[str, float]:
    """The largest relative L2 error of any head, by tensor of `TENSORS`; NaN where any head's is."""
    return {name: _largest([row.relative_l2[name] for row in rows]) for name in TENSORS}


def choose_heads(call: Captured, count: int, worst: int | None, turn: int) -> list[int]:
    """The query heads to check: the worst known, the one with the largest bound on |q . k|, then others in turn.

    The bound is max|q| max|k - mean k|, after K-smoothing.
    """
    q = call.q.float().norm(dim=-1).amax((0, 2))
    k = call.k.float()
    k = (k - k.mean(2, keepdim=True)).norm(dim=-1).amax((0, 2)).repeat_interleave(call.group)
    heads, turn = list(call.heads), turn % len(call.heads)
    order = ([] if worst is None else [worst]) + [heads[int((q * k).argmax())], *heads[turn:], *heads[:turn]]
    return sorted(list(dict.fromkeys(order))[:count])


def _gradient_error(errors: dict[str, float]) -> float:
    """dQ's or dK's, whichever is larger: they are what dS goes into."""
    return _largest([errors["dq"], errors["dk"]])


def _largest(values: Sequence[float]) -> float:
    """As max, but NaN where any is."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def _described(layer: Layer, threshold: float) -> str:
    errors = f"relative L2 error of dQ {layer.errors['dq']:.3f}, dK {layer.errors['dk']:.3f}, above {threshold:g}"
    text = f"{errors}, under {layer.recipe}"
    if layer.saturated <= MOST:
        return text
    return (
        f"{text}; saturated softmax: {layer.saturated:.0%} of the queries of head {layer.head} give one key "
        f"{SATURATED:g} or more of their weight (docs/limits.md#a-saturated-softmax)"
    )


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _advice(index: int) -> str:
    return (
        f'a finer recipe, as config.{NAME}["layers"]["{index}"] = {{"recipe": "token(s=16bit)"}}, a lower learning '
        "rate or QK-norm may lower it (docs/safety.md#what-helps)"
    )


def _attention(model: PreTrainedModel) -> tuple[PreTrainedConfig | None, list[int]]:
    """The config that a model's attention layers read, and their indices."""
    parts = [part for part in model.modules() if hasattr(part, "layer_idx") and hasattr(part, "config")]
    return (parts[0].config if parts else None), sorted({part.layer_idx for part in parts})


def _now(device: torch.device) -> float:
    """The time once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()
