"""What a fine-tuning is: one YAML file, read as `lab.training.config` reads its own."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

from lab.training.config import SDPA, Attention, Settings, check_seeds


@dataclass(frozen=True)
class Model:
    """``path``: a checkpoint's folder, GGUF file or hub name; without one, to classify, a BERT of these sizes."""

    path: str | None = None
    layers: int = 4
    width: int = 256
    heads: int = 4
    mlp_width: int = 1024
    dropout: float = 0.1  # not of attention: that one is 0 in every model


@dataclass(frozen=True)
class Data:
    """JSON lines, see `lab.training.examples`."""

    train: str = ""
    held_out: str = ""
    tokenizer: str | None = None  # the checkpoint's own; or bytes, or the path of a tokenizer.json
    max_tokens: int = 512  # of an example
    end: bool = True  # the end-of-text token follows an answer, and is part of it


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters in place of all weights, through peft."""

    rank: int = 0  # 0 for none
    alpha: int = 16
    dropout: float = 0.0
    targets: list[str] | None = None  # names of linear layers; all of them without


@dataclass(frozen=True)
class Optimisation:
    """AdamW, a linear schedule; ``batch`` examples a step, however many micro-batches that takes."""

    epochs: float = 1.0
    batch: int = 32
    micro_batch: int = 8
    learning_rate: float = 5e-5
    warmup_share: float = 0.05
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    precision: str = "fp32"  # or bf16: autocast


@dataclass(frozen=True)
class Logging:
    """How often, in steps, whether a finished run keeps its model, and whether it is scored before the first step."""

    every: int = 10
    checkpoint_every: int = 200
    keep_model: bool = True
    score_before: bool = True


@dataclass(frozen=True)
class Finetuning(Settings):
    """Each of ``variants`` (dotted keys to values), or the config itself, with each of ``seeds``."""

    name: str
    seeds: list[int] = field(default_factory=lambda: [0])
    model: Model = field(default_factory=Model)
    attention: Attention = field(default_factory=Attention)
    data: Data = field(default_factory=Data)
    lora: Lora = field(default_factory=Lora)
    optimisation: Optimisation = field(default_factory=Optimisation)
    logging: Logging = field(default_factory=Logging)
    variants: dict[str, dict[str, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError for a value out of range."""
        self.check_known({"optimisation.precision": ("fp32", "bf16")}, [SDPA])
        self.check_numbers()
        check_seeds(self.seeds)
        optimisation = self.optimisation
        if not optimisation.epochs > 0:
            raise ValueError(f"optimisation.epochs={optimisation.epochs} must be above 0")
        if optimisation.batch % optimisation.micro_batch:
            raise ValueError(
                f"optimisation.batch={optimisation.batch} is not a multiple of "
                f"optimisation.micro_batch={optimisation.micro_batch}"
            )
        if self.model.width % self.model.heads:
            raise ValueError(f"model.width={self.model.width} is not a multiple of model.heads={self.model.heads}")

    def runs(self) -> dict[str, list[Finetuning]]:
        """Of each variant, or of the config itself under its recipe's name, a config a seed. Raises ValueError."""
        variants = self.each_variant() or {self.attention.recipe: self}
        return {
            name: [variant.replace({"seeds": [seed], "variants": {}}) for seed in variant.seeds]
            for name, variant in variants.items()
        }

    def digest(self) -> str:
        """A hash of all that changes the numbers."""
        content = self.numbers()
        del content["name"], content["variants"], content["logging"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
