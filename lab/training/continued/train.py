"""One run in the process that it is in: a model whose weights can be put back, trained from them and evaluated.

The folder of a run holds ``config.yaml``, ``metrics.jsonl`` (a line a logging step and an evaluation), and at its end
``result.json``, ``diverged.json`` where the loss was not finite, or `UNFINISHED` where time was up; and the weights
after the steps of ``logging.weights_at``. These are no checkpoints: a run that was stopped begins anew.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from lab.training import data as text
from lab.training import full_precision, kernel_commit
from lab.training.config import FULL_PRECISION, SDPA, Attention
from lab.training.continued import tokens
from lab.training.continued.config import Continued, fingerprint
from lab.training.pretrain import environment
from lab.training.run_dir import CONFIG, DIVERGED, METRICS, RESULT
from sagebwd.counts import counts
from sagebwd.diagnostics.models import load_model
from sagebwd.environment import write_whole
from sagebwd.integrations import transformers as integration

UNFINISHED = "unfinished.json"
NAME = "sagebwd-continued"
IGNORED = -100  # what `cross_entropy` leaves out


class Switch:
    """Attention of whichever recipe it was told last, which torch.compile does not look into: it compiles once."""

    def __init__(self) -> None:
        self.chosen = Attention(SDPA)
        self.backends: dict[tuple, str] = {}
        integration.register()
        AttentionInterface.register(NAME, torch.compiler.disable(self.attend))
        AttentionMaskInterface.register(NAME, flash_attention_mask)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **settings: object
    ) -> tuple[Tensor, None]:
        """What Transformers calls. Raises NotImplementedError for attention that is more than causal."""
        for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
            if settings.get(name) is not None:
                raise NotImplementedError(f"continued training has causal attention alone; the model asks for {name}")
        recipe = self.chosen.recipe
        if recipe in FULL_PRECISION:
            kind = (recipe, value.dtype, query.shape, torch.is_grad_enabled())
            if kind not in self.backends:
                self.backends[kind] = _backend(recipe, query, key, value)
            counts[f"full precision by {self.backends[kind]}"] += 1
            return AttentionInterface()[full_precision.register(recipe)](module, query, key, value, mask, **settings)
        setattr(module.config, integration.NAME, {"recipe": recipe, "impl": self.chosen.impl})
        return integration.attention(module, query, key, value, mask, **settings)


def _backend(recipe: str, query: Tensor, key: Tensor, value: Tensor) -> str:
    """The backend of torch's scaled_dot_product_attention: the one that is named, or the one that torch takes."""
    if FULL_PRECISION[recipe] is not None:
        return FULL_PRECISION[recipe]
    query, key = query.to(value.dtype), key.to(value.dtype)
    grouped = query.shape[1] != key.shape[1]
    taken = torch._fused_sdp_choice(query, key, value, None, 0.0, True, enable_gqa=grouped)
    return str(torch.nn.attention.SDPBackend(taken).name)


class Trainee:
    """A model on a device, with the weights that every run begins from and the attention that it has."""

    def __init__(self, config: Continued, device: str) -> None:
        """Raises ValueError as `load_model` does."""
        self.device, self.switch, self.path = device, Switch(), config.model
        self.model = load_model(config.model, device, torch.float32).eval()  # no dropout, in training neither
        self.model.set_attn_implementation(NAME)
        self.weights = list(self.model.parameters())
        self.start = [weight.detach().clone() for weight in self.weights]
        self.losses = losses
        if config.optimisation.compile:
            self.losses = torch.compile(losses)
            for layer in self.model.base_model.layers:
                layer.compile()

    def put_back(self) -> None:
        """The weights that it began with."""
        with torch.no_grad():
            for weight, first in zip(self.weights, self.start, strict=True):
                weight.copy_(first)
                weight.grad = None

    def of(self, ids: Tensor, precision: str) -> Tensor:
        """Mean loss of each sequence: ids (sequences, tokens) int64, to (sequences,) FP32."""
        with self._autocast(precision):
            return self.losses(self.model(input_ids=ids, use_cache=False).logits, ids)

    def _autocast(self, precision: str) -> AbstractContextManager:
        return torch.autocast(self.device.partition(":")[0], torch.bfloat16, enabled=precision == "bf16")


def losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Nats a token of each sequence: logits (sequences, tokens, vocabulary), ids (sequences, tokens), FP32."""
    targets = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
    each = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return each.view(ids.shape).sum(1) / (ids.shape[1] - 1)


def order(config: Continued, vocabulary: int) -> Tensor:
    """The sequences of a run as it reads them, (steps, sequences a step, tokens) int64: of its seed, whatever its
    attention or learning rate."""
    data, settings = config.data, config.optimisation
    each = settings.tokens_per_step // data.context
    ids = tokens.read(data.train, vocabulary, "data.train")
    blocks = text.Blocks(ids, data.context, each * settings.steps, seed=config.seeds[0])
    chosen = torch.stack([blocks[index]["input_ids"] for index in range(len(blocks))])
    return chosen.view(settings.steps, each, data.context)


def held_out(config: Continued, vocabulary: int) -> Tensor:
    """The sequences of all evaluations, (sequences, tokens) int64. Raises ValueError where there are too few."""
    blocks = text.Blocks(tokens.read(config.data.held_out, vocabulary, "data.held_out"), config.data.context)
    wanted = config.data.held_out_sequences
    if len(blocks) < wanted:
        raise ValueError(f"data.held_out_sequences={wanted}: data.held_out has {len(blocks)}")
    return torch.stack([blocks[index]["input_ids"] for index in range(wanted)])


def rate_at(step: int, config: Continued) -> float:
    """The learning rate of a step, from 0: linear up, then as ``schedule`` says."""
    settings = config.optimisation
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.learning_rate * (1 + math.cos(math.pi * done)) / 2


def train(trainee: Trainee, config: Continued, baseline: str, folder: Path, stop_at: float = math.inf) -> str:
    """Train one run into ``folder``; the file that says how it ended, `RESULT`, `DIVERGED` or `UNFINISHED`.

    Held-out losses are evaluated by the run's own attention and in full precision, by ``baseline`` of
    `FULL_PRECISION`. Args: stop_at, a `time.time` after which the run stops at its next logging step.

    Raises ValueError for token files that are none, or do not fit the model.
    """
    run = _Run(trainee, config, baseline, folder)
    end, why = run.steps(stop_at)
    result = {**run.result(), **({} if end == RESULT else {end.removesuffix(".json"): why})}
    write_whole(folder / end, json.dumps(result, indent=1) + "\n")
    return end


class _Run:
    """What one run has measured so far."""

    def __init__(self, trainee: Trainee, config: Continued, baseline: str, folder: Path) -> None:
        vocabulary = trainee.model.config.get_text_config().vocab_size
        self.trainee, self.config, self.baseline, self.folder = trainee, config, baseline, folder
        self.train, self.held_out = (part(config, vocabulary).to(trainee.device) for part in (order, held_out))
        self.lines: list[dict[str, object]] = []
        self.step, self.seconds, self.sequences = 0, 0.0, {}
        self.calls = Counter(counts)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, RESULT, DIVERGED, UNFINISHED):
            (folder / name).unlink(missing_ok=True)
        write_whole(folder / CONFIG, yaml.safe_dump({"digest": config.digest(), **config.as_dict()}, sort_keys=False))

    def steps(self, stop_at: float) -> tuple[str, str]:
        """Take all steps; how it ended, and why it did not finish."""
        config, trainee, settings = self.config, self.trainee, self.config.optimisation
        trainee.put_back()
        trainee.switch.chosen = config.attention
        optimiser = _optimiser(trainee.weights, config)
        self.evaluate()
        begun, since, noted = time.monotonic(), 0, []
        for step in range(settings.steps):
            rate = rate_at(step, config)
            noted.append(self._one(optimiser, self.train[step], rate))
            self.step = step + 1
            if self.step in config.logging.weights_at:
                self._keep_weights()
            evaluates = self.step % config.logging.evaluate_every == 0 or self.step == settings.steps
            if self.step % config.logging.every == 0 or self.step in (1, settings.steps) or evaluates:
                loss, norm = torch.stack([torch.stack(pair) for pair in noted]).mean(0).tolist()  # waits for the GPU
                elapsed = time.monotonic() - begun
                self.seconds += elapsed
                done = (self.step - since) * settings.tokens_per_step
                self._write(
                    {
                        "loss": loss, "grad_norm": norm, "learning_rate": rate, "tokens_per_s": done / elapsed,
                        "seconds": self.seconds,
                    }
                )  # fmt: skip
                since, noted = self.step, []
                if not math.isfinite(loss):
                    return DIVERGED, f"the loss ({loss}) is not finite at step {self.step}"
                if time.time() > stop_at and self.step < settings.steps:
                    return UNFINISHED, f"time was up at step {self.step} of {settings.steps}"
                if evaluates and not math.isfinite(self.evaluate()):
                    return DIVERGED, f"the held-out loss is not finite at step {self.step}"
                begun = time.monotonic()
        return RESULT, ""

    def _one(self, optimiser: torch.optim.Optimizer, ids: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """One step: ids (sequences, tokens); its loss and the gradient's norm before it is clipped."""
        settings, total = self.config.optimisation, 0.0
        parts = ids.split(settings.micro_batch)
        for part in parts:
            loss = self.trainee.of(part, settings.precision).mean() / len(parts)
            loss.backward()
            total = total + loss.detach()
        norm = nn.utils.clip_grad_norm_(self.trainee.weights, settings.clip_norm)
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return total, norm.detach()

    def evaluate(self) -> float:
        """Held-out losses, by the run's own attention and in full precision; the first of them."""
        own = self._held_out(self.config.attention)
        exact = Attention(self.baseline)
        self.sequences = {"own": own, "exact": own if self.config.attention == exact else self._held_out(exact)}
        own, exact = (sum(found) / len(found) for found in self.sequences.values())
        self._write({"held_out_loss": own, "held_out_loss_in_full_precision": exact})
        return own

    @torch.no_grad()
    def _held_out(self, attention: Attention) -> list[float]:
        """Of each held-out sequence, the loss by an attention."""
        trainee, settings = self.trainee, self.config.optimisation
        trainee.switch.chosen = attention
        found = [trainee.of(part, settings.precision) for part in self.held_out.split(settings.micro_batch)]
        trainee.switch.chosen = self.config.attention
        return torch.cat(found).tolist()

    def _keep_weights(self) -> None:
        """The model's weights as they are, by their names in it."""
        named = {name: weight.detach().contiguous() for name, weight in self.trainee.model.named_parameters()}
        write_whole(self.folder / f"weights-{self.step}.safetensors", lambda path: save_file(named, path))

    def _write(self, line: dict[str, object]) -> None:
        line = {"step": self.step, "tokens": self.step * self.config.optimisation.tokens_per_step, **line}
        self.lines.append(line)
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def result(self) -> dict[str, object]:
        """What the run came to, and all that it depends on."""
        config = self.config
        trained = [line["loss"] for line in self.lines if "loss" in line and math.isfinite(line["loss"])]
        last = trained[-max(1, len(trained) // 10) :]
        evaluations = [line for line in self.lines if "held_out_loss" in line]
        return {
            "digest": config.digest(),
            "held_out_loss": evaluations[-1]["held_out_loss"],
            "held_out_loss_in_full_precision": evaluations[-1]["held_out_loss_in_full_precision"],
            "held_out_sequences": self.sequences["own"],
            "held_out_sequences_in_full_precision": self.sequences["exact"],
            "train_loss": sum(last) / len(last) if last else None,
            "steps": self.step,
            "tokens": self.step * config.optimisation.tokens_per_step,
            "parameters": sum(weight.numel() for weight in self.trainee.weights),
            "seconds": self.seconds,
            "tokens_per_s": self.step * config.optimisation.tokens_per_step / self.seconds if self.seconds else 0.0,
            "recipe": config.attention.recipe,
            "seed": config.seeds[0],
            "learning_rate": config.optimisation.learning_rate,
            "tokens_per_step": config.optimisation.tokens_per_step,
            "context": config.data.context,
            "calls": dict(Counter(counts) - self.calls),
            "sha256": {
                "model": fingerprint(config.model, "model"),
                "train": fingerprint(config.data.train, "data.train"),
                "held_out": fingerprint(config.data.held_out, "data.held_out"),
            },
            "environment": {**environment(), "kernels": kernel_commit.tree()},
        }


def _optimiser(weights: list[nn.Parameter], config: Continued) -> torch.optim.AdamW:
    """AdamW; norms and biases do not decay."""
    settings = config.optimisation
    groups = [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=betas, fused=True)
