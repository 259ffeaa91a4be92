"""The full-precision attentions that ours is compared with: torch's and, where installed, FlashAttention-4 and -3."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks import wide_baselines
from benchmarks.packed import Packed
from benchmarks.shapes import Shape
from benchmarks.timer import wait
from sagebwd import block_masks
from sagebwd.auto import torch_attention
from sagebwd.dispatch import arch_of
from sagebwd.masks.kinds import PACKED

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

FLASH_ATTENTION_4, FLASH_ATTENTION_3 = "fa4", "fa3"
"""The fastest on Hopper, each somewhere: without both nothing there is compared with the best."""
VARLEN = "varlen"
"""Torch's attention of packed sequences, `torch.nn.attention.varlen.varlen_attn`, which is FlashAttention-2."""
FLEX = "flex"
"""Compiled FlexAttention."""
DOES_NOT_RUN = "does not run"
_MODULES = {FLASH_ATTENTION_4: "flash_attn.cute", FLASH_ATTENTION_3: "flash_attn_interface"}


def candidates(shape: Shape, device: str) -> dict[str, Attention]:
    """Those that are installed, whether they take the shape or not.

    They are cudnn, fa2, fa4 and fa3, of packed sequences varlen, flex, fa4 and fa3, of a wide shape
    those of `wide_baselines` beside fa4 and fa3; on a CPU "sdpa" alone, a sequence at a time.
    """
    if isinstance(shape, Packed):
        return _of_packed(shape, device)
    if shape.is_wide:
        flash = _flash_attentions() if device.startswith("cuda") else {}
        dense = {name: _dense(module, shape) for name, module in flash.items()}
        return wide_baselines.candidates(shape, device) | dense

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
    return found | {name: _dense(module, shape) for name, module in _flash_attentions().items()}


def available(shape: Shape, device: str) -> dict[str, Attention]:
    """The candidates that take this shape here."""
    return {name: run for name, run in candidates(shape, device).items() if refusal(run, shape, device) is None}


def refusal(attention: Attention, shape: Shape, device: str, *, backward: bool = True) -> str | None:
    """Why one does not take this shape, tried on its short form; None where it does.

    backward: False to try forward alone, which is all that FlashAttention-3 has where it was built so.
    """
    q, k, v, do = shape.short().inputs(device, torch.bfloat16)
    leaves = [x.requires_grad_(backward) for x in (q, k, v)]
    try:
        out = attention(*leaves)
        if backward:
            torch.autograd.grad(out, leaves, do)
    except Exception as error:  # a compiler of another project raises what it likes
        return reason_of(error, device)
    return None


class BrokenDevice(RuntimeError):
    """A GPU that does nothing more for this process, as after an access to memory that is not there."""


def reason_of(error: Exception, device: str | torch.device) -> str:
    """An error as a results file has it. Raises `BrokenDevice` where it left one: there nothing else would run."""
    lines = str(error).splitlines() or [""]
    reason = f"{type(error).__name__}: {lines[0][:120]}"
    try:
        wait(device)
    except Exception:  # CUDA gives such an error again to whoever calls it
        raise BrokenDevice(f"{device} does nothing more in this process: {reason}") from error
    return f"{DOES_NOT_RUN}: {reason}"


def may_claim_best(timed: set[str], device: str) -> bool:
    """Whether the best baseline that was timed is the best there is: on Hopper, with FlashAttention-4 and -3."""
    return timed >= _MODULES.keys() or arch_of(torch.device(device)) != 90


def _flash_attentions() -> dict[str, ModuleType]:
    """FlashAttention-4 and -3, those that are installed; their functions are called alike."""
    found = {}
    for name, module in _MODULES.items():
        try:
            found[name] = importlib.import_module(module)
        except ImportError:
            continue
    return found


def _dense(flash_attention: ModuleType, shape: Shape) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attention.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=shape.is_causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attention


def _of_packed(shape: Packed, device: str) -> dict[str, Attention]:
    """The candidates of (tokens, heads, head_dim) tensors."""
    if not device.startswith("cuda"):
        return {"sdpa": lambda q, k, v: _by_sequence(shape, q, k, v)}
    offsets, longest, scale = shape.offsets(device), shape.longest, shape.head_dim**-0.5
    sequences = {
        "cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest,
    }  # fmt: skip

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        way = torch_attention.Way(PACKED, is_causal=shape.is_causal, longest=(longest, longest))
        return torch_attention.run(way, scale, q, k, v, None, offsets, offsets)

    def theirs(module: ModuleType, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = module.flash_attn_varlen_func(q, k, v, **sequences, causal=shape.is_causal)
        return out[0] if isinstance(out, tuple) else out

    found = {VARLEN: varlen, FLEX: _flex_documents(shape, device)}
    return found | {name: partial(theirs, module) for name, module in _flash_attentions().items()}


def flex(mask: BlockMask, device: str, **options: object) -> Attention:
    """FlexAttention under a mask, compiled but on a CPU, where no time is a claim."""
    run = torch.compile(flex_attention, dynamic=False) if device.startswith("cuda") else flex_attention
    return lambda q, k, v: run(q, k, v, block_mask=mask, enable_gqa=True, **options)


def _flex_documents(shape: Packed, device: str) -> Attention:
    """Of one sequence, whose mask, made by the first call, keeps causal documents apart."""

    @cache
    def attention() -> Attention:
        torch._dynamo.reset()  # or all shapes' graphs are one function's, and beyond eight of these none is compiled
        return flex(block_masks.prefix_documents(shape.lengths, device=device), device)

    return lambda *call: attention()(*(x.transpose(0, 1)[None] for x in call))[0].transpose(0, 1)


def _by_sequence(shape: Packed, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outs = []
    for tokens in shape.sequences():
        one = (x[tokens].transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(*one, is_causal=shape.is_causal, enable_gqa=shape.heads != shape.kv_heads)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)
