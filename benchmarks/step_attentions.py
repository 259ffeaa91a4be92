"""The attentions that `python -m benchmarks step` times a model with: Transformers' and Diffusers', and ours."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask

from benchmarks.baselines import flex
from benchmarks.step_models import Decoder, Joint, Model, Trained, Video
from sagebwd import read_block_mask, sage_attention
from sagebwd.auto.operands import traced

SDPA, UNMASKED, EAGER, FLEX = "sdpa", "sdpa-unmasked", "eager", "flex_attention"
"""`UNMASKED`: Transformers' ``sdpa`` under a name whose mask function makes no mask, right for causal layers alone.
`EAGER`: of gpt-oss alone, which has no ``sdpa``."""
FLASH_4, FLASH_3 = "flash_attention_4", "flash_attention_3"
OURS, FUSED = "sagebwd", "sagebwd+fuse"
"""`FUSED`: with ``config.sagebwd = {"fuse": True}``."""
NAMES = SDPA, UNMASKED, EAGER, FLASH_4, FLASH_3, FLEX, OURS, FUSED
DIFFUSERS = "diffusers.models.transformers.transformer_"
"""Modules of its models: ``wan`` and ``flux``."""
BACKENDS = {FLASH_4: "flash_4_hub", FLASH_3: "_flash_3", OURS: "sagebwd"}
"""What Diffusers calls them. `SDPA` and `FLEX` are called in its place. A step with its ``native`` ended in an illegal
access to memory (torch 2.11, H200), whose cuDNN reads each dO by the strides of the first (`sagebwd.auto.operands`):
in Flux those of blocks of one stream and of two differ. Its ``flex`` is not compiled, and holds all scores."""


def is_ours(name: str) -> bool:
    """Whether an attention is this package's."""
    return name.partition("+")[0] == OURS


def names_of(model: Model, compiled: bool) -> tuple[str, ...]:
    """The attentions that a model has, without those that are another one there."""
    if isinstance(model, Joint):
        return SDPA, FLASH_4, FLASH_3, FLEX, OURS
    if isinstance(model, Video):
        return SDPA, FLEX, OURS
    leaves_out = {SDPA if model.family == "GptOss" else EAGER}
    if not compiled or "sliding_window" in model.sizes:
        leaves_out.add(UNMASKED)
    return tuple(name for name in NAMES if name not in leaves_out)


class Attentions:
    """Has a model compute with one attention or another."""

    def __init__(self, model: Model, trained: Trained) -> None:
        self.model, self.trained = model, trained
        self._functions: dict[str, Callable[..., Tensor]] = {}  # one each: what calls another would be compiled anew

    @contextmanager
    def applied(self, name: str) -> Iterator[None]:
        """While it is open. Raises what the model's library does for an attention that it lacks."""
        if isinstance(self.model, Decoder):
            _in_transformers(name, self.trained.model)
            yield
        elif isinstance(self.model, Joint) and name in BACKENDS:
            importlib.import_module("sagebwd.integrations.diffusers").register()
            self.trained.model.set_attention_backend(BACKENDS[name])
            yield
        else:
            module = importlib.import_module(DIFFUSERS + ("flux" if isinstance(self.model, Joint) else "wan"))
            dispatch = module.dispatch_attention_fn
            if name not in self._functions:
                self._functions[name] = _in_diffusers(name, self.trained, dispatch)
            module.dispatch_attention_fn = self._functions[name]
            try:
                yield
            finally:
                module.dispatch_attention_fn = dispatch


def _in_transformers(name: str, model: nn.Module) -> None:
    importlib.import_module("sagebwd.integrations.transformers").register()
    if name == UNMASKED:
        masking_utils = importlib.import_module("transformers.masking_utils")
        transformers = importlib.import_module("transformers")
        transformers.AttentionInterface.register(UNMASKED, transformers.AttentionInterface()[SDPA])
        masking_utils.AttentionMaskInterface.register(UNMASKED, masking_utils.flash_attention_mask)
    model.config.sagebwd = {"fuse": name == FUSED}
    model.set_attn_implementation(name.partition("+")[0])


def _in_diffusers(name: str, trained: Trained, dispatch: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Diffusers' function, but for self-attention, under the model's mask where it has one."""
    mask, tokens = trained.mask, trained.tokens
    device = next(trained.model.parameters()).device
    if name == SDPA:
        elements = None if mask is None else create_mask(mask.mask_mod, None, None, tokens, tokens, device=device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return traced(F.scaled_dot_product_attention, q, k, v, elements, factor=None)
    elif name == FLEX:
        attend = flex(mask, device.type)
    else:
        read = read_block_mask(mask)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sage_attention(q, k, v, block_mask=read)

    def called(query: Tensor, key: Tensor, value: Tensor, **settings: object) -> Tensor:
        if key.shape[1] != tokens:
            return dispatch(query, key, value, **settings)
        return attend(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)

    return called
