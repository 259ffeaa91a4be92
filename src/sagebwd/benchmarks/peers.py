"""The full-precision attentions that ours is compared with: SDPA's backends and, where installed, FlashAttention-4."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagebwd.benchmarks.shapes import Shape
from sagebwd.dispatch import is_hopper

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

FLASH_ATTENTION_4 = "fa4"
"""The fastest on Hopper: without it nothing there is compared with the best."""


def candidates(shape: Shape, device: str) -> dict[str, Attention]:
    """Those that are installed, whether they take the shape or not: cudnn, fa2 and fa4; "sdpa" on a CPU."""

    def sdpa(*backends: SDPBackend) -> Attention:
        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(list(backends)):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=shape.is_causal, enable_gqa=shape.heads != shape.kv_heads
                )

        return attention

    if not device.startswith("cuda"):
        return {"sdpa": sdpa(SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)}
    found = {"cudnn": sdpa(SDPBackend.CUDNN_ATTENTION), "fa2": sdpa(SDPBackend.FLASH_ATTENTION)}
    fa4 = _flash_attention_4(shape)
    return found if fa4 is None else {**found, FLASH_ATTENTION_4: fa4}


def baselines(shape: Shape, device: str) -> dict[str, Attention]:
    """The candidates that take this shape here."""
    return {name: run for name, run in candidates(shape, device).items() if refusal(run, shape, device) is None}


def refusal(attention: Attention, shape: Shape, device: str) -> str | None:
    """Why one does not take this shape, forward and backward, tried on one short batch; None where it does."""
    q, k, v, do = replace(shape, batch=1, tokens=min(shape.tokens, 1024)).inputs(device, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    try:
        torch.autograd.grad(attention(*leaves), leaves, do)
    except Exception as error:  # a compiler of another project raises what it likes
        lines = str(error).splitlines() or [""]
        return f"does not run: {type(error).__name__}: {lines[0][:120]}"
    return None


def may_claim_best(timed: set[str], device: str) -> bool:
    """Whether the best of the baselines that were timed is the best there is: on Hopper, with FlashAttention-4."""
    return FLASH_ATTENTION_4 in timed or not is_hopper(torch.device(device))


def _flash_attention_4(shape: Shape) -> Attention | None:
    try:
        flash_attn_func = importlib.import_module("flash_attn.cute").flash_attn_func
    except ImportError:
        return None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=shape.is_causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attention
