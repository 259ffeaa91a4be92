"""FlashAttention-4 in place of torch's FlashAttention-2, for `tools.ring_time`.

Torch 2.11 to 2.13 has such a place of its own (`torch.nn.attention.activate_flash_attention_impl`), which takes two
tensors from FlashAttention-4's forward. 4.0.0b36 returns five, of which these are the first two.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention._fa4 import register_flash_attention_fa4

NAME, PACKAGE = "fa4-of-tools", "flash_attn.cute.interface"


def installed() -> bool:
    """Whether flash-attn-4 is there."""
    try:
        return importlib.util.find_spec(PACKAGE) is not None
    except ImportError:
        return False


@contextmanager
def active() -> Iterator[None]:
    """Inside, torch's backend FLASH_ATTENTION is FlashAttention-4."""
    register_flash_attention_impl(NAME, register_fn=lambda: register_flash_attention_fa4(__name__))
    activate_flash_attention_impl(NAME)
    try:
        yield
    finally:
        restore_flash_attention_impl()


def _flash_attn_fwd(*tensors: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    return importlib.import_module(PACKAGE)._flash_attn_fwd(*tensors, **options)[:2]


def _flash_attn_bwd(*tensors: Tensor, **options: object) -> tuple[Tensor, ...]:
    return importlib.import_module(PACKAGE)._flash_attn_bwd(*tensors, **options)[:3]
