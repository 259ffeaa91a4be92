"""What a model's training steps are timed with: full precision by one backend of torch's, or a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from sagebwd.attention import choose_implementation
from sagebwd.integrations.transformers import NAME
from sagebwd.recipe import Recipe
from sagebwd.training.config import SDPA

FULL_PRECISION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    SDPA: None,  # the one that torch takes of itself
}


@dataclass(frozen=True)
class Contender:
    """An attention by its name: one of `FULL_PRECISION`, or a recipe, or recipe@impl."""

    name: str
    recipe: str | None = None
    impl: str | None = None

    @staticmethod
    def parse(text: str, device: str) -> Contender:
        """Raises what `sagebwd.sage_attention` raises for a recipe or impl that is not there or does not run here."""
        if text in FULL_PRECISION:
            return Contender(text)
        recipe, _, impl = text.partition("@")
        parsed = Recipe.parse(recipe)
        like = torch.empty(1, 1, 1, 64, device=device, dtype=torch.bfloat16)
        chosen = choose_implementation(like, parsed, impl or None)
        return Contender(f"{recipe}@{chosen}", str(parsed), chosen)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """The model computes with this attention while it is open."""
        name = NAME if self.recipe else f"bench-{self.name}"  # a name of its own, so that compiled code is its own
        if not self.recipe:
            AttentionInterface.register(name, _full_precision(FULL_PRECISION[self.name]))
            AttentionMaskInterface.register(name, flash_attention_mask)
        model.config._attn_implementation = name
        setattr(model.config, NAME, {"recipe": self.recipe, "impl": self.impl} if self.recipe else None)
        yield


@cache  # one function each: another would be compiled anew
def _full_precision(backend: SDPBackend | None) -> Callable[..., tuple[Tensor, None]]:
    """An attention function for Transformers: torch's own, causal, by one backend or the one that torch takes.

    Transformers' own function, while it is compiled, is handed the causal mask in full, which FlashAttention does not
    take on a GPU; and what chooses the backend has to be in what is compiled.
    """

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **settings: object
    ) -> tuple[Tensor, None]:
        query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embedding leaves FP32 under BF16 autocast
        grouped = query.shape[1] != key.shape[1]
        with nullcontext() if backend is None else sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=settings.get("scaling"), enable_gqa=grouped
            )
        return out.transpose(1, 2).contiguous(), None

    return attention
