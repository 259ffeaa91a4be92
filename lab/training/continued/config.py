"""What is trained on: one YAML file, read as `lab.training.config` reads its own."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from lab.training.config import SDPA, Attention, Settings, build, check_seeds


@dataclass(frozen=True)
class Data:
    """Token files, see `lab.training.continued.tokens`."""

    train: str = ""
    held_out: str = ""
    context: int = 2048  # tokens a sequence
    held_out_sequences: int = 64  # the first ones of the file, the same for all runs


@dataclass(frozen=True)
class Optimisation:
    """AdamW on FP32 weights; ``tokens_per_step`` is the setting, ``micro_batch`` only says how it is reached."""

    tokens_per_step: int = 8192
    micro_batch: int = 4  # sequences computed at once
    steps: int = 500
    learning_rate: float = 1e-4  # a stage's own goes before it
    schedule: str = "cosine"  # to 0, or constant, after the warmup
    warmup_steps: int = 20
    weight_decay: float = 0.1  # of matrices
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    precision: str = "bf16"  # autocast; or fp32
    compile: bool = False  # all but attention, layer by layer


@dataclass(frozen=True)
class Logging:
    """How often, in steps; evaluations also before the first step and after the last."""

    every: int = 10
    evaluate_every: int = 125
    weights_at: list[int] = field(default_factory=list)  # steps after which weights-STEP.safetensors is written


@dataclass(frozen=True)
class Stage:
    """Runs that train together, seed by seed: ``variants``, all of them unless named, at a learning rate."""

    learning_rate: float = 1e-4
    variants: list[str] | None = None


@dataclass(frozen=True)
class Continued(Settings):
    """Each of ``stages`` in order; the first of ``variants`` (dotted keys to values) is the baseline of all gaps."""

    name: str
    model: str = ""  # a folder of Transformers', or a GGUF file
    seeds: list[int] = field(default_factory=lambda: [0])
    stages: list = field(default_factory=list)  # of `Stage`'s keys; without any, one at optimisation.learning_rate
    attention: Attention = field(default_factory=lambda: Attention(SDPA))
    data: Data = field(default_factory=Data)
    optimisation: Optimisation = field(default_factory=Optimisation)
    logging: Logging = field(default_factory=Logging)
    variants: dict[str, dict[str, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError for a value out of range."""
        known = {"optimisation.precision": ("bf16", "fp32"), "optimisation.schedule": ("cosine", "constant")}
        self.check_known(known)
        self.check_numbers()
        check_seeds(self.seeds)
        if self.attention.fuse:
            raise ValueError("attention.fuse=true is not supported where a run goes on from a model; expected false")
        settings = self.optimisation
        out_of_range = [step for step in self.logging.weights_at if not 0 < step <= settings.steps]
        if out_of_range:
            raise ValueError(f"logging.weights_at={self.logging.weights_at}: steps are 1 to {settings.steps}")
        together = self.data.context * settings.micro_batch
        if settings.tokens_per_step % together:
            raise ValueError(
                f"optimisation.tokens_per_step={settings.tokens_per_step} is not a multiple of data.context "
                f"({self.data.context}) x optimisation.micro_batch ({settings.micro_batch}) = {together}"
            )
        self.each_stage()

    def each_stage(self) -> list[Stage]:
        """The stages as such. Raises ValueError for one that is none."""
        if not self.stages:
            return [Stage(self.optimisation.learning_rate)]
        return [build(Stage, stage, f"stages[{index}].") for index, stage in enumerate(self.stages)]

    def runs(self) -> dict[str, Continued]:
        """A config for each run by its folder, ``lr-RATE/seed-N/VARIANT``, in the order in which they train.

        Raises ValueError where the config has no variants, one whose name cannot be a folder's, or not one that a
        stage names.
        """
        variants = self.each_variant()
        if not variants:
            raise ValueError(f"config {self.name}: it has no variants to compare")
        found: dict[str, Continued] = {}
        for stage in self.each_stage():
            unknown = [name for name in stage.variants or [] if name not in variants]
            if unknown:
                raise ValueError(f"stages: there is no variant {unknown[0]!r}; variants: {', '.join(variants)}")
            for seed in self.seeds:
                for name in stage.variants or variants:
                    chosen = replace(variants[name].optimisation, learning_rate=stage.learning_rate)
                    run = replace(variants[name], seeds=[seed], stages=[], optimisation=chosen)
                    found.setdefault(f"{rate_folder(stage.learning_rate)}/seed-{seed}/{name}", run)
        return found

    def digest(self) -> str:
        """A hash of all that changes the numbers, the files of model and tokens by what is in them.

        Raises ValueError where one of them is not there.
        """
        content = self.numbers()
        del (
            content["name"],
            content["variants"],
            content["stages"],
            content["logging"]["every"],
            content["logging"]["weights_at"],
        )
        content["model"] = fingerprint(self.model, "model")
        for part in ("train", "held_out"):
            content["data"][part] = fingerprint(content["data"][part], f"data.{part}")
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def rate_folder(rate: float) -> str:
    """Of all runs of a learning rate, the folder, which `python -m lab gaps` reads."""
    return f"lr-{rate:g}"


@lru_cache
def fingerprint(path: str, name: str) -> str:
    """The SHA-256 of a file, or of a folder's files, weights and configs, in their order.

    Raises ValueError, which names ``name``, where there is none.
    """
    place = Path(path)
    files = sorted(place.glob("*.safetensors")) + sorted(place.glob("*.json")) if place.is_dir() else [place]
    if not path or not files or not files[0].is_file():
        raise ValueError(f"{name}={path!r}: there is no such file, or no model in that folder")
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 24):
                total.update(chunk)
    return total.hexdigest()
