"""The full-precision attentions that ours is compared with: torch's and, where installed, FlashAttention-4."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.packed import Packed
from benchmarks.shapes import Shape
from sagebwd.auto import torch_attention
from sagebwd.dispatch import is_hopper
from sagebwd.masks.band import UNLIMITED

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

FLASH_ATTENTION_4 = "fa4"
"""The fastest on Hopper: without it nothing there is compared with the best."""
VARLEN = "varlen"
"""Torch's attention of packed sequences, `torch.nn.attention.varlen.varlen_attn`."""


def candidates(shape: Shape, device: str) -> dict[str, Attention]:
    """Those that are installed, whether they take the shape or not.

    They are cudnn, fa2 and fa4, of packed sequences varlen and fa4; on a CPU "sdpa" alone, a sequence at a time.
    """
    if isinstance(shape, Packed):
        return _of_packed(shape, device)

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


def available(shape: Shape, device: str) -> dict[str, Attention]:
    """The candidates that take this shape here."""
    return {name: run for name, run in candidates(shape, device).items() if refusal(run, shape, device) is None}


def refusal(attention: Attention, shape: Shape, device: str) -> str | None:
    """Why one does not take this shape, forward and backward, tried on its short form; None where it does."""
    q, k, v, do = shape.short().inputs(device, torch.bfloat16)
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


def _of_packed(shape: Packed, device: str) -> dict[str, Attention]:
    """The candidates of (tokens, heads, head_dim) tensors."""
    if not device.startswith("cuda"):
        return {"sdpa": lambda q, k, v: _by_sequence(shape, q, k, v)}
    offsets, longest, scale = shape.offsets(device), shape.longest, shape.head_dim**-0.5

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        unlimited = UNLIMITED, UNLIMITED
        call = q, k, v, (offsets, offsets), (longest, longest)
        return torch_attention.packed(*call, shape.is_causal, unlimited, scale)

    try:
        flash_attention = importlib.import_module("flash_attn.cute")
    except ImportError:
        return {VARLEN: varlen}

    def fa4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attention.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest,
            causal=shape.is_causal,
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    return {VARLEN: varlen, FLASH_ATTENTION_4: fa4}


def _by_sequence(shape: Packed, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outs = []
    for tokens in shape.sequences():
        one = (x[tokens].transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(*one, is_causal=shape.is_causal, enable_gqa=shape.heads != shape.kv_heads)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)
