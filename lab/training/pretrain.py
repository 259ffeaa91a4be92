"""One training run through Transformers' Trainer, in a folder that says all there is to know about it.

The folder holds ``config.yaml``, ``metrics.jsonl`` (a line a logging step, an evaluation and a check of the attention
monitor), TensorBoard's files, checkpoints, and, once the run has finished, ``result.json``, or ``diverged.json`` where
it stopped at a NaN. A checkpoint counts only when its marker file is there, which is written last, so a half-written
one is never resumed from.

Under ``torchrun`` every process runs this: a step holds the same sequences whatever their number, and a checkpoint of
one number resumes on another.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from tqdm import tqdm
from transformers import AttentionInterface, Trainer, TrainerCallback, TrainingArguments
from transformers.masking_utils import AttentionMaskInterface

from lab.training import data as text
from lab.training import processes, sharding
from lab.training.config import FULL_PRECISION, Config
from lab.training.logits import largest_logit
from lab.training.model import build, checkpoint_layers
from lab.training.run_dir import (
    COMPLETE,
    DIVERGED,
    METRICS,
    RESULT,
    checkpoints,
    digest_after,
    keep_newest,
    open_run_dir,
    read_metrics,
    switches_in,
)
from sagebwd.cli.results import commit
from sagebwd.diagnostics.monitor import PREFIX, AttentionMonitor
from sagebwd.environment import write_whole
from sagebwd.recipe import INT8, Recipe
from sagebwd.version import __version__


class TrainingStopped(ValueError):
    """A run that cannot go on; the message says why and what is left."""


def run(config: Config, output: Path, resume: bool = False) -> None:
    """Train one model into ``output``.

    With ``resume`` it goes on from the newest whole checkpoint, to the losses of a run that was never stopped, or,
    from there, with another attention. Warns where S is INT8 and the model has no QK-norm.

    Raises ValueError where tokens_per_step does not divide among the devices, where the folder holds another run,
    where there is nothing to resume, or where the loss is not finite (the last good checkpoint stays); OSError where a
    checkpoint cannot be written.
    """
    transformers.utils.logging.disable_progress_bar()
    processes.join()
    accumulation, checkpoint = processes.agreed(lambda: _prepare(config, output, resume))
    with processes.first_of_host():
        tokens = text.load(config)
    model = build(config, tokens.vocabulary)
    if processes.is_first() and not config.model.qk_norm and _quantises(config.attention.recipe):
        warnings.warn(
            f"model.qk_norm=false with attention.recipe={config.attention.recipe}: without QK-norm INT8 attention can "
            "diverge at many tokens a step (arXiv 2603.02170); set model.qk_norm=true, or watch the monitor",
            stacklevel=2,
        )
    settings, optimisation = config.logging, config.optimisation
    checkpoint_layers(model, optimisation)
    sequences = optimisation.tokens_per_step * optimisation.steps // config.data.context
    train = text.Blocks(tokens.train, config.data.context, sequences, seed=config.seed)
    held_out = text.Blocks(tokens.held_out, config.data.context)
    held_out.count = min(held_out.available, settings.evaluate_sequences)
    record = _Record(config, output, held_out)
    trainer = _Trainer(
        model=model,
        args=_arguments(config, output, accumulation),
        train_dataset=train,
        eval_dataset=held_out,
        callbacks=[record, _ProgressBar(optimisation.tokens_per_step)],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    record.trainer = trainer
    trainer.keep_checkpoints = settings.keep_checkpoints
    monitor = _monitor(config, held_out, trainer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*", category=UserWarning)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except TrainingStopped as stopped:
            if processes.is_first():
                result = _result(config, output, trainer, monitor)
                write_whole(output / DIVERGED, json.dumps({**result, "diverged": str(stopped)}, indent=1))
            raise
    weights = sharding.whole_weights(model, keep=processes.is_first())
    if processes.is_first():
        model.save_pretrained(output / "model", state_dict=weights)
        result = _result(config, output, trainer, monitor)
        write_whole(output / RESULT, json.dumps(result, indent=1))


def _quantises(recipe: str) -> bool:
    """Whether S is quantised, whose error large logits multiply."""
    return recipe not in FULL_PRECISION and Recipe.parse(recipe).s == INT8


def _prepare(config: Config, output: Path, resume: bool) -> tuple[int, Path | None]:
    """What the first process does before all begin: micro-batches a step, the folder, and the token files' making."""
    devices = processes.count() if processes.count() > 1 else max(1, torch.cuda.device_count())
    accumulation = config.accumulation(devices)
    checkpoint = open_run_dir(config, output, resume)
    text.load(config)
    return accumulation, checkpoint


def _monitor(config: Config, held_out: text.Blocks, trainer: Trainer) -> AttentionMonitor | None:
    """Watch the first held-out sequence; nothing where attention is torch's own or the config wants no checks."""
    if config.attention.recipe in FULL_PRECISION or not config.monitor.every:
        return None
    return AttentionMonitor(held_out[0]["input_ids"][None], config.monitor).attach(trainer)


def _arguments(config: Config, output: Path, accumulation: int) -> TrainingArguments:
    optimisation, settings = config.optimisation, config.logging
    sharded = optimisation.sharding == "fsdp" and processes.count() > 1
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(output / "tensorboard")
    return TrainingArguments(
        output_dir=str(output),
        max_steps=optimisation.steps,
        per_device_train_batch_size=optimisation.micro_batch,
        per_device_eval_batch_size=optimisation.micro_batch,
        gradient_accumulation_steps=accumulation,
        learning_rate=optimisation.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=optimisation.warmup_steps,
        weight_decay=optimisation.weight_decay,
        adam_beta1=optimisation.beta1,
        adam_beta2=optimisation.beta2,
        max_grad_norm=optimisation.clip_norm,
        bf16=optimisation.precision == "bf16",
        torch_compile=optimisation.compile,
        logging_steps=settings.every,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=settings.evaluate_every,
        save_strategy="steps",
        save_steps=settings.checkpoint_every,
        seed=config.seed,
        data_seed=config.seed,
        disable_tqdm=True,
        report_to="tensorboard",
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        prediction_loss_only=True,
        **(sharding.arguments() if sharded else {}),
    )


class _Trainer(sharding.ShardedTrainer):
    """Trainer with the data in its own order, and checkpoints that are whole or not there."""

    keep_checkpoints: int

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        finite = all(bool(torch.isfinite(weight).all()) for weight in sharding.held(model.parameters()))
        if float(self.accelerator.reduce(torch.tensor(float(not finite), device=self.args.device))):
            raise TrainingStopped(_not_finite("a weight", self.state.global_step, Path(self.args.output_dir)))
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()  # every process has a part in it
            if self.args.should_save:
                (folder / COMPLETE).touch()
        except (OSError, RuntimeError) as error:
            # safetensors and torch.save report a full disk as their own RuntimeErrors
            if isinstance(error, RuntimeError) and not _is_write_error(error):
                raise
            shutil.rmtree(folder, ignore_errors=True)
            raise OSError(
                f"checkpoint {folder} could not be written: {error}. Free some space or choose another --output; "
                "the checkpoints before it are whole, go on with --resume"
            ) from error
        if self.args.should_save:  # Trainer's save_total_limit would delete before the new one is marked
            keep_newest(folder.parent, self.keep_checkpoints)


def _is_write_error(error: RuntimeError) -> bool:
    return any(
        word in str(error) for word in ("No space left", "I/O error", "file write failed", "PytorchStreamWriter")
    )


class _Record(TrainerCallback):
    """Writes metrics.jsonl, and stops a run whose loss is not finite."""

    def __init__(self, config: Config, output: Path, held_out: text.Blocks) -> None:
        self.config, self.output, self.held_out = config, output, held_out
        self.trainer: Trainer | None = None
        self.clock = time.monotonic()
        self.seen_step = 0
        self.seconds = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        """Forget what was written after the checkpoint that the run goes on from."""
        path = self.output / METRICS
        kept = [line for line in read_metrics(self.output) if line["step"] <= state.global_step]
        if state.global_step == 0:
            kept = []
        if processes.is_first():
            write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
        self.seconds = max((line.get("seconds", 0.0) for line in kept), default=0.0)
        self.clock, self.seen_step = time.monotonic(), state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs):
        """One line: training metrics, an evaluation's, or a check's of the attention monitor."""
        step, logs = state.global_step, logs or {}
        tokens = step * self.config.optimisation.tokens_per_step
        if "eval_loss" in logs:
            logit = self._largest_logit()
            self._write({"step": step, "tokens": tokens, "held_out_loss": logs["eval_loss"], "largest_logit": logit})
        elif "loss" in logs:
            elapsed = time.monotonic() - self.clock
            new_tokens = (step - self.seen_step) * self.config.optimisation.tokens_per_step
            self.seconds += elapsed
            loss, norm = float(logs["loss"]), float(logs.get("grad_norm", math.nan))
            self._write(
                {
                    "step": step,
                    "tokens": tokens,
                    "loss": loss,
                    "grad_norm": norm,
                    "learning_rate": logs.get("learning_rate"),
                    "tokens_per_s": new_tokens / elapsed if elapsed else 0.0,
                    "seconds": self.seconds,
                }
            )
            self.seen_step = step
            if not math.isfinite(loss):
                raise TrainingStopped(_not_finite(f"the loss ({loss})", step, self.output))
        elif f"{PREFIX}seconds" in logs:
            found = {key: value for key, value in logs.items() if key.startswith(PREFIX)}
            self._write({"step": step, "tokens": tokens, **found})
            self.clock += logs[f"{PREFIX}seconds"]  # a check is no training, as an evaluation is not
            return
        self.clock = time.monotonic()

    def _write(self, line: dict[str, object]) -> None:
        if processes.is_first():
            with (self.output / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _largest_logit(self) -> float:
        """The largest attention logit, over all layers, on the first held-out sequence."""
        model = self.trainer.model
        ids = self.held_out[0]["input_ids"][None].to(model.device)
        with logits_observed(model) as seen, torch.no_grad(), self.trainer.autocast_smart_context_manager():
            model(input_ids=ids)
        return max(seen)


@contextmanager
def logits_observed(model: transformers.PreTrainedModel) -> Iterator[list[float]]:
    """While it is open, each attention layer's largest |logit| is appended to the list, its result unchanged."""
    before = model.config._attn_implementation
    inner, seen = AttentionInterface()[before], []

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object):
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        seen.append(largest_logit(query, key, is_causal=causal, scale=kwargs.get("scaling")))
        return inner(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("observed", attention)
    AttentionMaskInterface.register("observed", AttentionMaskInterface()[before])
    model.config._attn_implementation = "observed"
    try:
        yield seen
    finally:
        model.config._attn_implementation = before


class _ProgressBar(TrainerCallback):
    """A bar with loss, the time left and tokens/s."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.bar: tqdm | None = None
        self.evaluation: tqdm | None = None
        self.shown: dict[str, str] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        """Open the bar where the run begins."""
        if state.is_world_process_zero:
            name = Path(args.output_dir).name
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc=name, unit="step", file=sys.stderr)

    def on_step_end(self, args, state, control, **kwargs):
        """Advance."""
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the newest losses."""
        if self.bar is None or not logs:
            return
        for name, value in (("loss", logs.get("loss")), ("held-out", logs.get("eval_loss"))):
            if value is not None:
                self.shown[name] = f"{float(value):.3f}"
        rate = self.bar.format_dict["rate"]
        if rate:
            self.shown["tokens/s"] = f"{rate * self.tokens_per_step:,.0f}"
        self.bar.set_postfix(self.shown, refresh=False)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        """A bar of an evaluation that takes over two seconds."""
        if self.evaluation is None and state.is_world_process_zero:
            count = len(eval_dataloader)
            self.evaluation = tqdm(total=count, desc="evaluating", leave=False, delay=2, file=sys.stderr)
        if self.evaluation is not None:
            self.evaluation.update()

    def on_evaluate(self, args, state, control, **kwargs):
        """Close that bar."""
        if self.evaluation is not None:
            self.evaluation.close()
        self.evaluation = None

    def on_train_end(self, args, state, control, **kwargs):
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()


def _not_finite(what: str, step: int, output: Path) -> str:
    whole = checkpoints(output)
    kept = f"the last good checkpoint is {whole[-1]}" if whole else "no checkpoint had been written yet"
    return (
        f"{what} is not finite at step {step}; stopped, {kept}. Lower optimisation.learning_rate, "
        "set model.qk_norm=true, or use a finer attention.recipe"
    )


def _result(config: Config, output: Path, trainer: Trainer, monitor: AttentionMonitor | None) -> dict[str, object]:
    lines = read_metrics(output)
    losses = [line["loss"] for line in lines if "loss" in line and math.isfinite(line["loss"])]
    evaluations = [line for line in lines if "held_out_loss" in line]
    last = losses[-max(1, len(losses) // 10) :]
    tokens = trainer.state.global_step * config.optimisation.tokens_per_step
    # of every part of a run that was resumed, evaluations and checks not counted
    seconds = max((line["seconds"] for line in lines if "seconds" in line), default=0.0)
    switched = switches_in(output)
    return {
        "digest": digest_after(config, switched),
        **({"switched": switched} if switched else {}),
        "held_out_loss": evaluations[-1]["held_out_loss"] if evaluations else None,
        "train_loss": sum(last) / len(last) if last else None,
        "largest_logit": max((line["largest_logit"] for line in evaluations), default=None),
        "steps": trainer.state.global_step,
        "tokens": tokens,
        "parameters": sum(weight.numel() for weight in trainer.model.parameters()),
        "parameters_held": sum(weight.numel() for weight in sharding.held(trainer.model.parameters())),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds if seconds else 0.0,
        "monitor": None if monitor is None else monitor.summary(),
        "environment": environment(),
    }


def environment() -> dict[str, str | None]:
    """The versions and hardware a run depends on."""
    import triton

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": triton.__version__,
        "sagebwd": __version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores",
        "processes": str(processes.count()),
        "commit": commit(),
    }
