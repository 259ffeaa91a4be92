"""The attentions that a model's training steps are timed with: full precision by one backend of torch or by
FlashAttention-4, or a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.attention import impl_of
from lab.steps import flash_attention_4
from lab.training import full_precision
from lab.training.config import FULL_PRECISION
from sagebwd import dispatch
from sagebwd.call import Ask
from sagebwd.integrations.transformers import NAME
from sagebwd.recipe import Recipe

FUSED = "+fused"
"""Behind a recipe: norm and rotary embedding run with attention, as ``fuse`` of ``config.sagebwd`` has it."""


@dataclass(frozen=True)
class Choice:
    """An attention by its name: one of `FULL_PRECISION`, "fa4", a recipe, recipe+fused, or either with @impl."""

    name: str
    recipe: str | None = None
    impl: str | None = None
    fuse: bool = False

    @staticmethod
    def parse(text: str, device: str) -> Choice:
        """Raises what `sagebwd.sage_attention` raises for a recipe or impl that is not there or does not run here, and
        ValueError where FlashAttention-4 is not installed."""
        if text in FULL_PRECISION:
            return Choice(text)
        if text == flash_attention_4.NAME:
            flash_attention_4.register()
            return Choice(text)
        named, _, impl = text.partition("@")
        parsed, fuse = Recipe.parse(named.removesuffix(FUSED)), named.endswith(FUSED)
        like = torch.empty(1, 1, 1, 64, device=device, dtype=torch.bfloat16)
        chosen = impl_of(dispatch.choose(Ask.of(like, like, parsed, impl or None)))
        return Choice(f"{named}@{chosen}", str(parsed), chosen, fuse)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """The model computes with this attention while it is open."""
        model.config._attn_implementation = NAME if self.recipe else _registered(self.name)
        settings = {"recipe": self.recipe, "impl": self.impl, "fuse": self.fuse}
        setattr(model.config, NAME, settings if self.recipe else None)
        yield


def _registered(name: str) -> str:
    return flash_attention_4.register() if name == flash_attention_4.NAME else full_precision.register(name)
