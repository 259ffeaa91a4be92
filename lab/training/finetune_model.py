"""The model of a fine-tuning run: a checkpoint, or a BERT from scratch, with one attention or another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from lab.training.config import SDPA
from lab.training.finetune_config import Finetuning, Lora
from sagebwd.diagnostics.models import in_full, located
from sagebwd.integrations.transformers import NAME, register

Loaded = TypeVar("Loaded")
_ATTENTION_DROPOUT = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")


def build(config: Finetuning, tokens: PreTrainedTokenizerBase, labels: list[str] | None) -> nn.Module:
    """The model of one run; a seed gives one set of new weights, whatever the attention. Attention dropout is 0.

    Args: labels, the names of the classes; None for a decoder that answers.

    Raises ValueError for a checkpoint that cannot be loaded or is too short for data.max_tokens, a tokeniser with ids
    that it does not have, and LoRA without peft.
    """
    register()
    settings, path = config.model, config.model.path
    if path is None:
        model_config = BertConfig(
            vocab_size=len(tokens),
            hidden_size=settings.width,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            intermediate_size=settings.mlp_width,
            hidden_dropout_prob=settings.dropout,
            max_position_embeddings=config.data.max_tokens,
            pad_token_id=tokens.pad_token_id,
        )
    else:
        model_config = _loaded(path, AutoConfig.from_pretrained)
    for name in _ATTENTION_DROPOUT:
        if getattr(model_config, name, None):
            setattr(model_config, name, 0.0)
    longest = getattr(model_config, "max_position_embeddings", None)
    if longest is not None and longest < config.data.max_tokens:
        raise ValueError(f"data.max_tokens={config.data.max_tokens} is beyond the model's {longest} positions")
    if len(tokens) > model_config.vocab_size:
        raise ValueError(
            f"data.tokenizer={config.data.tokenizer!r} has {len(tokens)} token ids, model.path={path!r} knows "
            f"{model_config.vocab_size}; expected the tokeniser that it was trained with"
        )
    implementation = SDPA if config.attention.recipe == SDPA else NAME
    if implementation == NAME:
        setattr(model_config, NAME, asdict(config.attention))
    model_config.use_cache = False
    kind = AutoModelForCausalLM
    if labels is not None:
        kind = AutoModelForSequenceClassification
        model_config.id2label = dict(enumerate(labels))
        model_config.label2id = {label: index for index, label in enumerate(labels)}
        if model_config.pad_token_id is None:
            model_config.pad_token_id = tokens.pad_token_id
    set_seed(config.seeds[0])
    if path is None:
        model = BertForSequenceClassification._from_config(model_config, attn_implementation=implementation)
    else:
        model = _loaded(
            path,
            partial(
                kind.from_pretrained, config=model_config, attn_implementation=implementation, dtype=torch.float32
            ),
        )
    return _with_adapters(in_full(model), config.lora, "CAUSAL_LM" if labels is None else "SEQ_CLS")


def _loaded(path: str, load: Callable[..., Loaded]) -> Loaded:
    try:
        folder, named = located(path)
        return load(folder, **named)
    except (OSError, ValueError, KeyError) as error:
        kind = "no folder here; the hub's model of that name"
        if Path(path).exists() or path.endswith(".gguf"):
            kind = "the folder" if Path(path).is_dir() else "the file"
        raise ValueError(
            f"model.path={path!r}: {kind} cannot be loaded ({' '.join(str(error).split())[:160]})"
        ) from None


def _with_adapters(model: PreTrainedModel, lora: Lora, task: str) -> nn.Module:
    if not lora.rank:
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError(
            f"lora.rank={lora.rank}: LoRA needs peft; install it with: pip install 'peft>=0.21', or set lora.rank=0"
        ) from None
    targets = lora.targets or "all-linear"
    return get_peft_model(
        model,
        LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets, task_type=task
        ),
    )
