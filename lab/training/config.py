"""What a training run is: one YAML file, read strictly.

Every key is a field below, in its section; one that does not exist is an error that names the nearest one that does.
``--set section.key=value`` changes a key after the file is read. Keys and types are checked, variants' too, before
torch is imported, which takes seconds.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import hashlib
import json
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from sagebwd.diagnostics.monitor_settings import Monitor

SDPA = "sdpa"
SMALL_DV = "sdpa-small-dv"
FULL_PRECISION = {SDPA: None, "cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", SMALL_DV: None}
"""Each attention.recipe that stands for torch's own full-precision scaled_dot_product_attention, and its backend in
`torch.nn.attention.SDPBackend`; None: the one that torch takes of itself. `SMALL_DV` has dV 8% too small: a control,
which a comparison has to tell from the others."""


@dataclass(frozen=True)
class Model:
    """A Llama decoder; with ``qk_norm`` a Qwen3, which is a Llama with RMS norm on q and k.

    With ``value_dim`` a DeepSeek V3 without experts, whose keys and values come of a latent that is normalised.
    """

    layers: int = 4
    width: int = 128
    heads: int = 2
    kv_heads: int | None = None  # as many as heads
    head_dim: int | None = None  # width / heads
    value_dim: int | None = None  # head_dim; less is multi-head latent attention, where the rest has the positions
    mlp_width: int = 384
    qk_norm: bool = True
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    vocabulary_multiple: int = 1  # embeddings get rows up to a multiple: tensor cores want one of 64
    rope_theta: float = 10000.0


@dataclass(frozen=True)
class Attention:
    """``recipe``: one of `FULL_PRECISION` for torch's own attention, or a recipe's text, which "auto" is none of: a
    config fixes its run's numbers on any machine; ``impl`` as in `sage_attention`; ``fuse``, whether norm and rotary
    embedding of Q and K run with attention, as in ``config.sagebwd`` (docs/qk-norm-rope.md)."""

    recipe: str = "token"
    impl: str | None = None
    fuse: bool = False


@dataclass(frozen=True)
class Data:
    """Where text comes from and how it becomes tokens; see `lab.training.data`."""

    source: str = "python-stdlib"  # or a path of .txt, .txt.xz or .txt.zst, or hf:NAME
    held_out: str | None = None  # a path; without one, a share of the source's documents
    held_out_share: float = 0.02
    tokenizer: str = "bytes"  # or bpe:SIZE, trained on the spot, or the path of a tokenizer.json
    context: int = 256  # tokens a sequence
    max_megabytes: float | None = None  # of training text; all of it without
    cache: str | None = None  # folder for token files; SAGEBWD_CACHE_DIR or ~/.cache/sagebwd without


@dataclass(frozen=True)
class Optimisation:
    """``tokens_per_step`` is the setting; micro-batch, accumulation and devices only say how it is reached."""

    tokens_per_step: int = 4096
    micro_batch: int = 8  # sequences a device computes at once
    steps: int = 200
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    precision: str = "fp32"  # or bf16: autocast
    compile: bool = False
    gradient_checkpointing: bool = False
    keep_attention: bool = False  # in it: all but attention is computed again, see `sagebwd.checkpointing`
    sharding: str = "none"  # or fsdp: weights and optimiser divided among processes, see `lab.training.sharding`


@dataclass(frozen=True)
class Logging:
    """How often, in steps; a checkpoint is kept until ``keep_checkpoints`` newer ones are whole."""

    every: int = 10
    evaluate_every: int = 50
    evaluate_sequences: int = 64
    checkpoint_every: int = 100
    keep_checkpoints: int = 2


LEAST = {"context": 2, "warmup_steps": 0}
"""The least that a key takes, where it is not 1 of a whole number."""


def _monitor() -> Monitor:
    from sagebwd.diagnostics.monitor_settings import Monitor

    return Monitor()


class Settings:
    """What every kind of config can do: dotted overrides, and ``variants``, which are overrides with names."""

    variants: dict[str, dict[str, object]]

    def replace(self, overrides: dict[str, object]) -> typing.Self:
        """A copy with dotted keys changed, as ``{"attention.recipe": "paper"}``. Raises ValueError as `load` does."""
        return build(type(self), _overridden(self.as_dict(), overrides), "")

    def as_dict(self) -> dict[str, typing.Any]:
        """The config as nested plain values."""
        return dataclasses.asdict(self)

    def numbers(self) -> dict[str, typing.Any]:
        """`as_dict` without an ``attention.fuse`` that is off, so that a run from before there was one goes on."""
        content = self.as_dict()
        if not content["attention"]["fuse"]:
            del content["attention"]["fuse"]
        return content

    def each_variant(self) -> dict[str, typing.Self]:
        """Each variant as a config of its own, so that a mistake in the last one shows before the first has run.

        Raises ValueError for a name that cannot be a folder's, or overrides that are none.
        """
        return {
            name: self.replace({**overrides, "variants": {}}) for name, overrides in _variants(self.variants).items()
        }

    def check_numbers(self) -> None:
        """Raises ValueError for a number of a section below its `LEAST`; else 1 of whole numbers, and 0 of others."""
        sections = {name: values for name, values in self.as_dict().items() if isinstance(values, dict)}
        numbers = {f"{name}.{key}": value for name, values in sections.items() for key, value in values.items()}
        for key, value in numbers.items():
            if type(value) not in (int, float) or key.startswith(("monitor.", "variants.")):
                continue
            least = LEAST.get(key.split(".")[1], 1 if type(value) is int else 0)
            if not value >= least:
                raise ValueError(f"{key}={value} must be at least {least}")

    def check_known(self, known: dict[str, tuple[str, ...]]) -> None:
        """Raises ValueError where a dotted key's value is none of its names, or the attention none that there is."""
        for key, names in known.items():
            section, name = key.split(".")
            value = getattr(getattr(self, section), name)
            if value not in names:
                raise ValueError(f"{key}={value!r} is not known; accepted: {', '.join(names)}")
        from sagebwd import dispatch
        from sagebwd.recipe import Recipe

        dispatch.check_known(self.attention.impl)
        if self.attention.recipe not in FULL_PRECISION:
            Recipe.parse(self.attention.recipe)
        elif self.attention.fuse:
            raise ValueError(
                f"attention.fuse=true with attention.recipe={self.attention.recipe}, which is torch's own attention; "
                "expected a recipe"
            )


def _variants(variants: dict) -> dict[str, dict[str, object]]:
    """Names and overrides. Raises ValueError for a name that cannot be a folder's, or overrides that are none."""
    for name, overrides in variants.items():
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w .()=,-]*", name):
            raise ValueError(f"variants: {name!r} cannot name a folder; use a text of letters, digits, spaces, .()=,-")
        if not isinstance(overrides or {}, dict) or not all(isinstance(key, str) for key in overrides or {}):
            raise ValueError(
                f"variants: {name} must map keys to values, as attention.recipe: paper; got {overrides!r}"
            )
    return {name: overrides or {} for name, overrides in variants.items()}


def _overridden(content: dict[str, object], overrides: dict[str, object]) -> dict[str, object]:
    """A copy of nested content with dotted keys changed. Raises ValueError for a section that is a plain value."""
    changed = copy.deepcopy(content)
    for key, value in overrides.items():
        *sections, last = key.split(".")
        target = changed
        for section in sections:
            target = target.setdefault(section, {}) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            raise ValueError(f"config: there is no section {'.'.join(sections)!r} to set {key!r} in")
        target[last] = value
    return changed


Kind = typing.TypeVar("Kind", bound=Settings)


@dataclass(frozen=True)
class Config(Settings):
    """One run, or with ``variants`` several that differ in the keys given (dotted keys to values)."""

    name: str
    seed: int = 0
    model: Model = field(default_factory=Model)
    attention: Attention = field(default_factory=Attention)
    data: Data = field(default_factory=Data)
    optimisation: Optimisation = field(default_factory=Optimisation)
    logging: Logging = field(default_factory=Logging)
    monitor: Monitor = field(default_factory=_monitor)
    variants: dict[str, dict[str, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks that need more than one key. Raises ValueError."""
        optimisation, model = self.optimisation, self.model
        known = {"optimisation.precision": ("fp32", "bf16"), "optimisation.sharding": ("none", "fsdp")}
        self.check_known(known)
        self.check_numbers()
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be at least 0")
        if self.data.held_out is None and not 0 < self.data.held_out_share < 1:
            raise ValueError(f"data.held_out_share={self.data.held_out_share} must be above 0 and below 1")
        if optimisation.keep_attention and not optimisation.gradient_checkpointing:
            raise ValueError("optimisation.keep_attention=true needs optimisation.gradient_checkpointing=true")
        if model.head_dim is None and model.width % model.heads:
            raise ValueError(f"model.width={model.width} is not a multiple of model.heads={model.heads}")
        if model.kv_heads is not None and model.heads % model.kv_heads:
            raise ValueError(f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}")
        if model.value_dim is not None:
            self._check_latent()
        if max(self.monitor.layers or [0]) >= model.layers:
            raise ValueError(f"monitor.layers={self.monitor.layers} goes beyond model.layers={model.layers}")

    def _check_latent(self) -> None:
        """What multi-head latent attention needs of the model. Raises ValueError."""
        model = self.model
        rest = (model.head_dim or 0) - model.value_dim
        if model.value_dim < 1 or rest < 2 or rest % 2:
            raise ValueError(
                f"model.value_dim={model.value_dim} with model.head_dim={model.head_dim}: expected a head_dim that is "
                "larger by an even number, as 192 for 128"
            )
        if self.attention.fuse:
            raise ValueError(
                f"model.value_dim={model.value_dim} with attention.fuse=true: multi-head latent attention rotates a "
                "part of its keys by itself; expected fuse: false"
            )
        if model.qk_norm or model.kv_heads is not None:
            raise ValueError(
                f"model.value_dim={model.value_dim} with model.qk_norm={str(model.qk_norm).lower()} and "
                f"model.kv_heads={model.kv_heads}: multi-head latent attention normalises its latent and has no "
                "groups of heads; expected qk_norm: false and no kv_heads"
            )

    def chosen(self, only: list[str] | None) -> dict[str, Config]:
        """The config's variants, or those in ``only``.

        Raises ValueError where there are none, ``only`` names another, or as `each_variant` does.
        """
        if not self.variants:
            raise ValueError(
                f"config {self.name}: it has no variants to compare; `python -m lab pretrain` trains one run"
            )
        variants = self.each_variant()
        unknown = [name for name in only or [] if name not in variants]
        if unknown:
            raise ValueError(f"there is no variant {unknown[0]!r}; variants: {', '.join(variants)}")
        return {name: variant for name, variant in variants.items() if not only or name in only}

    def accumulation(self, devices: int) -> int:
        """Micro-batches a device sums before a step, so that a step holds ``tokens_per_step`` tokens.

        Raises ValueError where they do not divide.
        """
        tokens = self.data.context * self.optimisation.micro_batch * devices
        if self.optimisation.tokens_per_step % tokens:
            raise ValueError(
                f"optimisation.tokens_per_step={self.optimisation.tokens_per_step} is not a multiple of data.context "
                f"({self.data.context}) x optimisation.micro_batch ({self.optimisation.micro_batch}) x devices "
                f"({devices}) = {tokens}; change one of them"
            )
        return self.optimisation.tokens_per_step // tokens

    def digest(self) -> str:
        """A hash of all that changes the numbers: not the name, variants, cache or monitor, which only watches."""
        content = self.numbers()
        del content["name"], content["variants"], content["data"]["cache"], content["logging"]["keep_checkpoints"]
        del content["monitor"]
        del content["optimisation"]["sharding"], content["optimisation"]["keep_attention"]
        if self.model.value_dim is None:  # so that a run from before there was one goes on
            del content["model"]["value_dim"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def check_seeds(seeds: list[int]) -> None:
    """Raises ValueError for a config's seeds that are none, no whole numbers from 0, or hold one twice."""
    if not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ValueError(f"seeds={seeds!r} must list at least one whole number from 0, for example [0, 1, 2]")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={seeds!r} holds one twice")


def load(path: Path, settings: list[str] | None = None, kind: type[Kind] = Config) -> Kind:
    """The config in a YAML file, of a ``kind``, with ``section.key=value`` settings applied. Raises as `read` does,
    and ValueError for a value out of range."""
    return build(kind, read(path, settings, kind), "")


def read(path: Path, settings: list[str] | None, kind: type[Settings]) -> dict[str, object]:
    """The keys and values of a config's file, with settings applied, every key and type checked, variants' too.

    Raises ValueError for a file that is missing, is not YAML, holds a key that does not exist or a value of the wrong
    type, or a setting that is not key=value.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"config {path}: there is no such file") from None
    except IsADirectoryError:
        raise ValueError(f"config {path}: a folder; expected a YAML file") from None
    except OSError as error:
        raise ValueError(f"config {path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"config {path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"config {path}: expected sections and keys, got {type(content).__name__}")
    content.setdefault("name", path.stem)
    overrides = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting}: expected section.key=value")
        overrides[key.strip()] = yaml.safe_load(value)
    content = _overridden(content, overrides)
    _values(kind, content, "")
    for changes in _variants(content.get("variants") or {}).values():
        _values(kind, _overridden(content, changes), "")
    return content


def build(kind: type, content: dict[str, object], section: str) -> typing.Any:
    """A dataclass from a mapping, every key and type checked."""
    return kind(**_values(kind, content, section))


def _values(kind: type, content: dict[str, object], section: str) -> dict[str, object]:
    """The fields of a dataclass from a mapping. Raises ValueError as `load` does."""
    if not isinstance(content, dict):
        raise ValueError(f"config: {section.rstrip('.')} must hold keys, got {content!r}")
    hints = typing.get_type_hints(kind, localns={"Monitor": object})
    names = [item.name for item in dataclasses.fields(kind)]
    values = {}
    for key in sorted(content, key=lambda key: hints.get(key) is object):  # the monitor, which imports torch, last
        if key not in names:
            near = difflib.get_close_matches(str(key), names, 1)
            hint = f"did you mean {section}{near[0]}?" if near else f"accepted: {', '.join(names)}"
            raise ValueError(f"config: there is no key {section}{key}; {hint}")
        hint = type(_monitor()) if hints[key] is object else hints[key]
        values[key] = _typed(hint, content[key], f"{section}{key}")
    return values


def _typed(hint: typing.Any, value: object, key: str) -> object:
    """``value`` as the type of its field: sections are built, whole numbers and 1e-3 are floats where one is due."""
    if dataclasses.is_dataclass(hint):
        return build(hint, value, f"{key}.")
    accepted = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    accepted = tuple(typing.get_origin(kind) or kind for kind in accepted)
    if float in accepted and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:  # YAML reads 1e-3, with no dot, as a string
            return float(value)
        except ValueError:
            pass
    if (isinstance(value, bool) and bool not in accepted) or not isinstance(value, accepted):
        names = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in accepted)
        raise ValueError(f"config: {key}={value!r} has the wrong type; expected {names}")
    return value
