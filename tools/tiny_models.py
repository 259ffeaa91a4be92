"""Tiny models of Transformers with inputs that they run on, by model type, without weights or a network.

Three ways, tried in turn: the default config made small; the configs and inputs of the library's own tests, where a
checkout of Transformers is named; and, for a part of a larger model, what the larger one hands it.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto

BATCH, TOKENS, VOCABULARY, PIXELS = 2, 12, 99, 32

OTHERS = [mapping for name, mapping in vars(modeling_auto).items() if name.startswith("MODEL_FOR_")]
OTHERS = [mapping for mapping in OTHERS if isinstance(mapping, type(MODEL_MAPPING))]

# what default configs are made small by, where they have the attribute
SMALL = {
    2: (
        "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers depth "
        "num_decoder_layers num_key_value_heads num_kv_heads n_kv_heads num_local_experts num_experts n_routed_experts"
    ),
    4: (
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "encoder_num_attention_heads decoder_num_attention_heads"
    ),
    8: (
        "patch_size head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim sliding_window attention_chunk_size "
        "local_attention rotary_dim index_block_size"
    ),
    16: "q_lora_rank kv_lora_rank index_head_dim",
    32: (
        "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim encoder_hidden_size image_size "
        "projection_dim model_dim out_hidden_size projection_size cross_attention_hidden_size"
    ),
    64: (
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner moe_intermediate_size "
        "shared_expert_intermediate_size intermediate_size_mlp dense_intermediate_size shared_intermediate_size"
    ),
    VOCABULARY: "vocab_size text_vocab_size vocab_size_per_layer_input",
    128: "max_position_embeddings n_positions max_source_positions max_target_positions",
}  # fmt: skip
SIZES = {name: value for value, names in SMALL.items() for name in names.split()}
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
MASKS = ("attention_mask", "decoder_attention_mask", "encoder_attention_mask", "input_mask")


@dataclass(frozen=True)
class Tiny:
    """A class of models, a small config, and the inputs of one forward by name."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    inputs: dict[str, object]

    @property
    def is_text(self) -> bool:
        """Whether there are tokens, which can be padded and gone on with."""
        ids = self.inputs.get("input_ids")
        return isinstance(ids, Tensor) and ids.ndim == 2

    def model(self, implementation: str) -> PreTrainedModel:
        """The model with an attention implementation, the same random weights each time."""
        torch.manual_seed(0)
        config = copy.deepcopy(self.config)
        return self.model_class._from_config(config, attn_implementation=implementation).eval()


def shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config with small sizes, without dropout, and its parts likewise."""
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            shrunk(getattr(config, name))
    for name, value in list(vars(config).items()):
        if name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, min(value, SIZES[name]))
        elif name in SIZES and isinstance(value, (list, tuple)) and len(value) == 2 and name.endswith("_size"):
            setattr(config, name, type(value)([SIZES[name]] * 2))
        elif ("drop" in name or name == "layerdrop") and isinstance(value, float):
            setattr(config, name, 0.0)
        elif name in TOKEN_IDS and value is not None:
            setattr(config, name, TOKEN_IDS[name])
    if getattr(config, "kv_lora_rank", None) and getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = config.num_attention_heads
    for name, value in (
        ("num_experts_per_tok", 2),
        ("top_k_experts", 2),
        ("moe_topk", 2),
        ("n_group", 1),
        ("topk_group", 1),
    ):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), value))
    rope = getattr(config, "rope_parameters", None) or {}
    known = getattr(type(config), "ignore_keys_at_rope_validation", None) or ()
    if isinstance(rope, dict) and "mrope_section" in {*rope, *known} and hasattr(config, "num_attention_heads"):
        heads = config.hidden_size // config.num_attention_heads
        half = (getattr(config, "head_dim", None) or heads) // 2
        rope["mrope_section"] = [half // 2, half // 4, half - half // 2 - half // 4]
    layers = getattr(config, "num_hidden_layers", None)
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers", "attention_types", "layers_block_type"):
        value = getattr(config, name, None)
        if isinstance(value, list) and isinstance(layers, int) and len(value) > layers:
            other = next((x for x in reversed(value) if x != value[0]), value[0])
            setattr(config, name, [value[0], other][:layers])  # one of each kind
    return config


def model_classes_of(config_class: type[PreTrainedConfig]) -> list[type[PreTrainedModel]]:
    """The classes to build, the one that a causal language model has first, those that no auto class knows last."""
    found = []
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_MAPPING, *OTHERS):
        if config_class in mapping:
            known = mapping[config_class]
            found += known if isinstance(known, (list, tuple)) else [known]
    try:
        module = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    except ModuleNotFoundError:  # another model's by another name
        return list(dict.fromkeys(found))
    for known in vars(module).values():
        is_model = isinstance(known, type) and issubclass(known, PreTrainedModel)
        if is_model and known.__dict__.get("forward") and known.config_class is config_class:
            found.append(known)
    return list(dict.fromkeys(found))


def anywhere(config: PreTrainedConfig, name: str, default: object) -> object:
    """An attribute of a config or of one of its parts."""
    places = (config, *(getattr(config, part, None) for part in config.sub_configs))
    return next((found for place in places if (found := getattr(place, name, None)) is not None), default)


def inputs_of(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Iterator[dict[str, Tensor]]:
    """Random inputs by the name of the model's main one, and of what it cannot do without; the likeliest first."""
    generator = torch.Generator().manual_seed(0)
    parameters = inspect.signature(model_class.forward).parameters
    required = [name for name, x in parameters.items() if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]
    name = model_class.main_input_name
    if name not in parameters:
        name = next((x for x in parameters if x in ("pixel_values", "input_features", "input_values")), name)
    grid = next((other for other in required if other.endswith("grid_thw")), None)
    if grid is not None:
        yield from _patches(required[1], grid, config, generator)
    elif name == "pixel_values":
        size = anywhere(config, "image_size", PIXELS)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = anywhere(config, "num_channels", 3)
        yield {name: torch.rand(BATCH, channels, height, width, generator=generator)}
    elif name == "input_values":
        yield {name: torch.randn(BATCH, 3840, generator=generator)}
        yield {name: torch.randn(BATCH, 1, 3840, generator=generator)}
    elif name == "input_features":
        bins, frames = anywhere(config, "num_mel_bins", 80), 2 * anywhere(config, "max_source_positions", 64)
        bins *= anywhere(config, "num_stacked_frames", 1)
        shapes = (BATCH, frames, bins), (BATCH, bins, frames)
        for shape in reversed(shapes) if hasattr(config, "max_source_positions") else shapes:
            features = {name: torch.randn(shape, generator=generator)}
            yield features | {x: torch.ones(BATCH, frames, dtype=torch.long) for x in required if x.endswith("_mask")}
    else:
        ids = {"input_ids": torch.randint(3, 60, (BATCH, TOKENS), generator=generator)}
        if config.is_encoder_decoder:
            ids["decoder_input_ids"] = torch.randint(3, 60, (BATCH, TOKENS), generator=generator)
        yield ids
        vision = getattr(config, "vision_config", None)
        if vision is not None:
            size = getattr(vision, "image_size", PIXELS)
            size = size if isinstance(size, int) else size[0]
            yield ids | {"pixel_values": torch.rand(BATCH, 3, size, size, generator=generator)}


def _patches(
    name: str, grid: str, config: PreTrainedConfig, generator: torch.Generator
) -> Iterator[dict[str, Tensor]]:
    """Two images of 4 x 4 patches, in one sequence: each patch flat, or as an image of its own."""
    grids = {grid: torch.tensor([[1, 4, 4]] * BATCH)}
    patch = anywhere(config, "patch_size", 8)
    patch = patch if isinstance(patch, int) else patch[0]
    channels = getattr(config, "in_channels", None) or anywhere(config, "num_channels", 3)
    for frames in (2, 1):
        yield grids | {name: torch.rand(BATCH * 16, channels * frames * patch**2, generator=generator)}
    yield grids | {name: torch.rand(BATCH * 16, channels, patch, patch, generator=generator)}


def from_default(model_type: str) -> Iterator[Tiny]:
    """The default config made small, with random inputs, of every class."""
    for model_class in model_classes_of(CONFIG_MAPPING[model_type]):
        config = shrunk(CONFIG_MAPPING[model_type]())
        if "CausalLM" in model_class.__name__ or "LMHead" in model_class.__name__:
            config.is_decoder = True  # a BERT that generates, say
        ids = {"decoder_input_ids": torch.arange(TOKENS).expand(BATCH, -1)}
        for inputs in inputs_of(model_class, config):
            yield Tiny(model_class, config, inputs)
            if ids.keys() <= inspect.signature(model_class.forward).parameters.keys() - inputs.keys():
                yield Tiny(model_class, config, inputs | ids)


def folder_of(model_type: str) -> str:
    """The folder of a model type in Transformers."""
    return CONFIG_MAPPING[model_type].__module__.split(".")[-2]


def use_tests(checkout: Path) -> None:
    """Let ``import tests`` be that of Transformers' sources, of about the version that is installed."""
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path.insert(0, str(checkout))
    for name in ("test_modeling_common", "causal_lm_tester", "vlm_tester"):  # once, before there are processes
        try:
            importlib.import_module(f"tests.{name}")
        except ImportError as error:
            raise SystemExit(f"--tests {checkout}: {error}") from error


def from_tests(model_type: str, checkout: Path) -> Iterator[Tiny | Exception]:
    """What Transformers' own tests of the model run on: of every test class with such a config, every model class.

    ``checkout`` is what `use_tests` was given.
    """
    folder = folder_of(model_type)
    for file in sorted((checkout / "tests" / "models" / folder).glob("test_modeling_*.py")):
        module = importlib.import_module(f"tests.models.{folder}.{file.stem}")
        for test_class in vars(module).values():
            if isinstance(test_class, type) and test_class.__module__ == module.__name__:
                try:
                    yield from _of_test(test_class, CONFIG_MAPPING[model_type])
                except Exception as error:  # the tester's own
                    yield error


def _of_test(test_class: type, config_class: type[PreTrainedConfig]) -> Iterator[Tiny]:
    if not hasattr(test_class, "_prepare_for_class") or not hasattr(test_class, "all_model_classes"):
        return
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    test = test_class()
    test.setUp()
    tester = getattr(test, "model_tester", None)
    if tester is None or not test.all_model_classes:
        return
    config, inputs = tester.prepare_config_and_inputs_for_common()
    if type(config) is not config_class:
        return
    # those that generate first: they have the most runs
    for model_class in sorted(test.all_model_classes, key=lambda kind: not kind.can_generate()):
        prepared = dict(test._prepare_for_class(inputs, model_class))
        for name in MASKS:
            if isinstance(prepared.get(name), Tensor) and prepared[name].ndim == 2:
                prepared[name] = torch.ones_like(prepared[name])  # padding is what the sweep adds
        yield Tiny(model_class, config, {name: x for name, x in prepared.items() if x is not None})


def from_whole(model_type: str, checkout: Path | None) -> Iterator[Tiny]:
    """A part of a larger model of the same folder, with the inputs that the larger one hands it."""
    config_class = CONFIG_MAPPING[model_type]
    others = [
        other
        for other in CONFIG_MAPPING
        if folder_of(other) == folder_of(model_type)
        and CONFIG_MAPPING[other] is not config_class
        and CONFIG_MAPPING[other].sub_configs
    ]
    for other in others:
        for whole in candidates(other, checkout, parts=False):
            if isinstance(whole, Tiny):
                yield from _handed(whole, config_class)


def _handed(whole: Tiny, config_class: type[PreTrainedConfig]) -> list[Tiny]:
    """The parts of a model with such a config that one forward calls."""
    try:
        model = whole.model("sdpa")
    except Exception:  # it does not build, or has no SDPA
        return []
    found: dict[type, Tiny] = {}

    def keep(module: PreTrainedModel, arguments: tuple, options: dict) -> None:
        names = list(inspect.signature(module.forward).parameters)
        given = dict(zip(names, arguments)) | options
        plain = {name: x.detach() if isinstance(x, Tensor) else x for name, x in given.items()}
        plain = {name: x for name, x in plain.items() if x is not None and "past_key_values" not in name}
        found.setdefault(type(module), Tiny(type(module), module.config, plain))

    for module in model.modules():
        if isinstance(module, PreTrainedModel) and type(module.config) is config_class:
            module.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad():
            model(**whole.inputs)
    except Exception:  # it may have come as far as the part
        pass
    return list(found.values())


def candidates(model_type: str, checkout: Path | None = None, parts: bool = True) -> Iterator[Tiny | Exception]:
    """Tiny models of a type, or why there are none by one way, the likeliest first."""
    ways = [lambda: from_default(model_type)]
    if checkout is not None:
        ways.append(lambda: from_tests(model_type, checkout))
    if parts:
        ways.append(lambda: from_whole(model_type, checkout))
    for way in ways:
        try:
            yield from way()
        except Exception as error:  # a config without defaults, an import that is missing, a tester's own error
            yield error
