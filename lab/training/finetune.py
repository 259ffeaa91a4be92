"""A Transformers checkpoint fine-tuned through Transformers' Trainer: variants of attention times seeds, scored.

The output folder holds a folder a run, as `lab.training.pretrain` makes them but without checkpoints once it has
finished, and ``comparison.json`` and ``comparison.md``, written anew after every run.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
import sys
import time
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from lab.training import examples, processes
from lab.training.finetune_config import Data, Finetuning
from lab.training.finetune_model import build
from lab.training.finetune_report import Outcome, folder_name, report
from lab.training.pretrain import ProgressBar, TrainingStopped, environment, trainer_arguments
from lab.training.run_dir import (
    COMPLETE,
    DIVERGED,
    METRICS,
    RESULT,
    checkpoints,
    digest_in,
    end_of,
    open_run_dir,
    refuse_single,
    write_whole,
)


@dataclass(frozen=True)
class Material:
    """What runs on one data set share; ``counts`` are `examples.answer_rows`'s, ``labels`` the classes."""

    tokenizer: PreTrainedTokenizerBase
    train: list[examples.Row]
    held_out: list[examples.Row]
    counts: list[int] | None
    labels: list[str] | None


def finetune(config: Finetuning, output: Path, resume: bool = False) -> list[Outcome]:
    """Fine-tune every variant with every seed, each into a folder of its own under ``output``, and compare.

    With ``resume``, runs that have finished or diverged are kept, one that was interrupted goes on from its newest
    checkpoint, and runs that the config has gained are made.

    Raises ValueError, before the first run, for data that cannot be read, a checkpoint or tokeniser that is not there,
    lines of a kind that does not fit the model, LoRA without peft, a folder that holds other runs or does not fit
    ``resume``, and more than one process or visible GPU.
    """
    if processes.count() > 1 or torch.cuda.device_count() > 1:
        raise ValueError(
            f"fine-tuning takes one process and one GPU; got {processes.count()} and {torch.cuda.device_count()}: "
            "start it without a launcher, with CUDA_VISIBLE_DEVICES=0"
        )
    transformers.utils.logging.disable_progress_bar()
    # seed by seed, so that what is cut off leaves variants to compare
    numbered = [(number, name, run) for name, runs in config.runs().items() for number, run in enumerate(runs)]
    runs = {folder_name(name, run): run for _, name, run in sorted(numbered, key=lambda entry: entry[0])}
    _check(runs, output, resume)
    for run_config in runs.values():
        material = _material(run_config.data, run_config.model.path)
        build(run_config, material.tokenizer, material.labels)
    for number, (name, run_config) in enumerate(runs.items(), 1):
        end = end_of(run_config, output / name)
        if end is not None:
            print(f"{name}: {'finished' if end == RESULT else 'diverged'} before, kept", file=sys.stderr)
            continue
        print(f"{name}: {number} of {len(runs)} runs", file=sys.stderr)
        _run(run_config, output / name)
        report(config, output)
        gc.collect()
    return report(config, output)


def _check(runs: dict[str, Finetuning], output: Path, resume: bool) -> None:
    refuse_single(output)
    begun = {name: digest for name in runs if (digest := digest_in(output / name)) is not None}
    for name, digest in begun.items():
        if digest != runs[name].digest():
            raise ValueError(f"{output / name} holds a run of other settings; choose another --output, or delete it")
    if begun and not resume:
        raise ValueError(
            f"{output} holds {len(begun)} of these {len(runs)} runs; go on with --resume, or choose another --output"
        )
    if resume and not begun:
        raise ValueError(f"{output} holds none of these runs to resume; start without --resume")


@lru_cache(maxsize=1)
def _material(data: Data, checkpoint: str | None) -> Material:
    train, held_out = examples.read(data.train, "data.train"), examples.read(data.held_out, "data.held_out")
    if train.kind != held_out.kind:
        raise ValueError(f"data.train holds {train.kind}, data.held_out {held_out.kind}; expected one kind")
    if train.kind == "answers" and checkpoint is None:
        raise ValueError("model.path is not given: lines with prompt and answer need a decoder's checkpoint")
    tokens = examples.tokenizer(data.tokenizer, checkpoint, pairs=train.kind == "labels")
    if train.kind == "answers":
        rows, _ = examples.answer_rows(train, tokens, data.max_tokens, data.end, choices=False)
        scored, counts = examples.answer_rows(held_out, tokens, data.max_tokens, data.end, choices=True)
        return Material(tokens, rows, scored, counts, None)
    names = examples.label_names(train)
    rows, scored = (examples.label_rows(part, tokens, data.max_tokens, names) for part in (train, held_out))
    return Material(tokens, rows, scored, None, names)


def _run(config: Finetuning, output: Path) -> None:
    """One run; it goes on from the folder's newest checkpoint where there is one."""
    checkpoint = open_run_dir(config, output, resume=bool(checkpoints(output)))
    material = _material(config.data, config.model.path)
    model = build(config, material.tokenizer, material.labels)
    tokens, labels = material.tokenizer, material.labels
    trainer = Trainer(
        model=model,
        args=_arguments(config, output, len(material.train)),
        train_dataset=material.train,
        eval_dataset=material.held_out,
        processing_class=tokens,
        data_collator=DataCollatorForSeq2Seq(tokens) if labels is None else DataCollatorWithPadding(tokens),
        compute_metrics=partial(answer_metrics, counts=material.counts) if labels is None else label_metrics,
        preprocess_logits_for_metrics=answer_scores if labels is None else predicted_labels,
        callbacks=[ProgressBar(), _Record(output)],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    start, stopped = time.monotonic(), None
    before = trainer.evaluate() if config.logging.score_before else {}
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        after = trainer.evaluate()
        if not math.isfinite(_loss(after)):
            stopped = f"the held-out loss ({_loss(after)}) is not finite at the end"
    except TrainingStopped as stop:
        stopped, after = str(stop), {}
    result = {
        "digest": config.digest(),
        "accuracy": after.get("eval_accuracy"),
        "accuracy_before": before.get("eval_accuracy"),
        "held_out_loss": None if stopped else _loss(after),
        "examples": len(material.counts or material.held_out),
        "steps": trainer.state.global_step,
        "trained_weights": sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        "seconds": time.monotonic() - start,
        "environment": environment(),
    }
    if stopped:
        write_whole(output / DIVERGED, json.dumps({**result, "accuracy": None, "diverged": stopped}, indent=1))
        print(f"{output.name}: {stopped}", file=sys.stderr)
        return
    if config.logging.keep_model:
        trainer.save_model(str(output / "model"))
    write_whole(output / RESULT, json.dumps(result, indent=1))
    for path in output.glob("checkpoint-*"):
        shutil.rmtree(path)


def _loss(metrics: dict[str, float]) -> float:
    """Nats a token of the right answers, or an example; Trainer's own mean would count wrong choices."""
    return metrics.get("eval_answer_loss", metrics["eval_loss"])


def _arguments(config: Finetuning, output: Path, count: int) -> TrainingArguments:
    optimisation = config.optimisation
    steps = math.ceil(count * optimisation.epochs / optimisation.batch)
    return trainer_arguments(
        output,
        optimisation,
        config.logging,
        config.seeds[0],
        num_train_epochs=optimisation.epochs,
        gradient_accumulation_steps=optimisation.batch // optimisation.micro_batch,
        lr_scheduler_type="linear",
        warmup_steps=math.ceil(steps * optimisation.warmup_share),
        save_total_limit=2,
        label_names=["labels"],
    )


class _Record(TrainerCallback):
    """Writes metrics.jsonl, marks whole checkpoints, and stops a run whose loss is not finite."""

    def __init__(self, output: Path) -> None:
        self.output = output

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Write what Trainer has logged since the run began, whatever process it began in."""
        write_whole(self.output / METRICS, "".join(json.dumps(line) + "\n" for line in state.log_history))
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(float(loss)):
            raise TrainingStopped(
                f"the loss ({loss}) is not finite at step {state.global_step}; stopped. Lower "
                "optimisation.learning_rate, or use a finer attention.recipe"
            )

    def on_save(self, args, state, control, **kwargs):
        """A checkpoint counts once it is written."""
        (self.output / f"checkpoint-{state.global_step}" / COMPLETE).touch()


def answer_scores(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Of each row (log-likelihood of its answer, the answer's tokens, 1 where each of them is the likeliest).

    Args: logits (rows, tokens, vocabulary), or a tuple that begins with them; labels (rows, tokens), `IGNORED` outside
    of the answer. Returns (rows, 3).
    """
    logits = (logits[0] if isinstance(logits, tuple) else logits)[:, :-1]
    labels = labels[:, 1:]
    counted = labels != examples.IGNORED
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=examples.IGNORED, reduction="none"
    )
    exact = ((logits.argmax(-1) == labels) | ~counted).all(1)
    return torch.stack([-losses.view_as(labels).sum(1), counted.sum(1), exact], dim=1).float()


def answer_metrics(prediction: EvalPrediction, counts: list[int]) -> dict[str, float]:
    """Accuracy, and nats a token of the right answers.

    With choices the likeliest is the model's; an answer alone counts where greedy decoding gives it, token by token.
    Args: predictions as `answer_scores` gives; counts, rows of each example, the right answer's first.
    """
    right, lost, tokens, first = 0, 0.0, 0.0, 0
    for count in counts:
        scores = prediction.predictions[first : first + count]
        likeliest = bool((scores[0, 0] > scores[1:, 0]).all())  # a tie, or NaN, is not right
        right += likeliest if count > 1 else bool(scores[0, 2])
        lost, tokens, first = lost - float(scores[0, 0]), tokens + float(scores[0, 1]), first + count
    return {"accuracy": right / len(counts), "answer_loss": lost / tokens}


def predicted_labels(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """The likeliest class of each row: logits (rows, classes), or a tuple that begins with them, to (rows,)."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def label_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """The share of rows whose class is right."""
    return {"accuracy": float((prediction.predictions == prediction.label_ids).mean())}
