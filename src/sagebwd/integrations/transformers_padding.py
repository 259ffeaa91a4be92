"""Whether a loss depends on queries of padding, which give zeros here and values under SDPA.

Then their rows of dO are not zero, mostly because labels of padding are not -100.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from sagebwd.integrations.transformers_masks import Mask
from sagebwd.integrations.transformers_torch import say

# Layers whose dO was looked at. The host waits for the GPU to read it, so only the first that has such padding is.
_looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def watch_padding(module: nn.Module, out: Tensor, mask: Mask, is_causal: bool) -> None:
    """Warn, once a process, where the gradient of ``out`` is not zero at padding whose queries SDPA computes.

    A layer is looked at in its first backward with such padding.

    Args: out, (batch, tokens, heads, head_dim); mask, with padding, which layers share; is_causal, whether padding
    before a row's first real token sees no key, and gives zeros under SDPA too.
    """
    if module in _looked_at or not out.requires_grad:
        return
    hidden = mask.ends[not is_causal]  # what lies in a hole is computed
    if hidden is None:
        return
    layer = weakref.ref(module)

    def look(gradient: Tensor) -> None:
        module = layer()
        if module is None or module in _looked_at or (gradient.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        rows = gradient[hidden.to(gradient.device).expand(gradient.shape[:2])]
        if not bool(rows.isfinite().all()):  # of a step that overflowed zeros are 0 * inf
            return
        _looked_at.add(module)
        if bool(rows.any()):
            where = "after a row's last real token" if is_causal else "before or after a row's real tokens"
            say(
                f"attn_implementation='sagebwd': the loss depends on queries of padding {where}, which give zeros, "
                "and values under 'sdpa'; give their labels -100 (docs/integrations/transformers.md#"
                "padding-packing-and-masks)"
            )

    out.register_hook(look)
