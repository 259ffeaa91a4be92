"""FlashAttention-4 as an attention of Transformers' models, and as operators that torch.compile takes whole.

Its own function is an ``autograd.Function`` around a compiler that cannot be traced. As operators it breaks no graph,
so that whole models are compared. These call what that function calls, in flash-attn-4 4.0.0b36.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

NAME = "fa4"


def register() -> str:
    """Tell Transformers of it; what it is called there. Raises ValueError where it is not installed."""
    _interface()
    registered = f"full-precision-{NAME}"
    AttentionInterface.register(registered, attention)
    AttentionMaskInterface.register(registered, flash_attention_mask)
    return registered


@cache
def _interface() -> ModuleType:
    try:
        return importlib.import_module("flash_attn.cute.interface")
    except ImportError as error:
        raise ValueError("attention 'fa4' needs flash-attn-4 (pip install flash-attn-4); expected another") from error


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **settings: object
) -> tuple[Tensor, None]:
    """What Transformers calls; without a mask, causal as the module is."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embedding leaves FP32 under BF16 autocast
    rows = (x.transpose(1, 2) for x in (query, key, value))
    return flash_attention_4(*rows, getattr(module, "is_causal", True), settings["scaling"])[0], None


@torch.library.custom_op("sagebwd::flash_attention_4", mutates_args=())
def flash_attention_4(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """O and lse of (batch, tokens, heads, head_dim) tensors."""
    o, lse, *_ = _interface()._flash_attn_fwd(q, k, v, softmax_scale=scale, causal=is_causal, return_lse=True)
    return o, lse


@flash_attention_4.register_fake
def _(q, k, v, is_causal, scale):
    batch, tokens, heads, _ = q.shape
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty((batch, heads, tokens), dtype=torch.float32)


@torch.library.custom_op("sagebwd::flash_attention_4_backward", mutates_args=())
def flash_attention_4_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    return tuple(_interface()._flash_attn_bwd(q, k, v, o, do, lse, scale, is_causal))


@flash_attention_4_backward.register_fake
def _(q, k, v, *_):
    return tuple(torch.empty_like(x) for x in (q, k, v))


def _save(ctx, inputs, output):
    *tensors, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, do, dlse):
    q, k, v, o, lse = ctx.saved_tensors
    return *flash_attention_4_backward(q, k, v, o, do, lse, ctx.is_causal, ctx.scale), None, None


flash_attention_4.register_autograd(_backward, setup_context=_save)
