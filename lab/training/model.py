"""The model of a run, from Transformers: Llama, Qwen3 with a norm of q and k, DeepSeek V3 with narrower values.

Qwen3 is a Llama after `add_qk_norm`, as a class that ``from_pretrained`` knows.
"""

from __future__ import annotations

import math
from dataclasses import asdict

from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    set_seed,
)

from lab.training import full_precision
from lab.training.config import FULL_PRECISION, Config, Model, Optimisation
from sagebwd.checkpointing import keep_attention
from sagebwd.integrations.transformers import NAME, register

LATENT = 4
"""Widths of a value that the latent of keys and values has, as in DeepSeek V2-Lite and V3: 512 for 128."""


def build(config: Config, vocabulary: int) -> PreTrainedModel:
    """A freshly initialised model; one seed gives one set of weights, whatever the attention.

    Args: vocabulary, the number of token ids; rows of embeddings beyond it, up to ``model.vocabulary_multiple``, are
    classes that no token has.
    """
    register()
    model = config.model
    shared = {
        "vocab_size": math.ceil(vocabulary / model.vocabulary_multiple) * model.vocabulary_multiple,
        "hidden_size": model.width,
        "intermediate_size": model.mlp_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "max_position_embeddings": config.data.context,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_bias": False,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config_class, model_class, of_heads = _architecture(model)
    if config.attention.recipe in FULL_PRECISION:
        implementation = full_precision.register(config.attention.recipe)
    else:
        implementation = NAME
        shared[NAME] = asdict(config.attention)
    set_seed(config.seed)
    return model_class._from_config(config_class(**shared, **of_heads), attn_implementation=implementation)


def _architecture(model: Model) -> tuple[type, type, dict[str, object]]:
    """Its classes, of the config and of the model, and what is theirs alone of the config."""
    if model.value_dim is None:
        classes = (Qwen3Config, Qwen3ForCausalLM) if model.qk_norm else (LlamaConfig, LlamaForCausalLM)
        return *classes, {"head_dim": model.head_dim or model.width // model.heads}
    return DeepseekV3Config, DeepseekV3ForCausalLM, {
        "qk_nope_head_dim": model.value_dim,
        "qk_rope_head_dim": model.head_dim - model.value_dim,
        "v_head_dim": model.value_dim,
        "kv_lora_rank": LATENT * model.value_dim,
        "q_lora_rank": None,
        "first_k_dense_replace": model.layers,
        "num_mtp_layers": 0,
    }  # fmt: skip


def checkpoint_layers(model: PreTrainedModel, settings: Optimisation) -> None:
    """Have a model compute its layers again in backward, where the config says so, with or without attention."""
    if settings.gradient_checkpointing:
        kept = {"context_fn": keep_attention} if settings.keep_attention else {}
        model.gradient_checkpointing_enable({"use_reentrant": False, **kept})
