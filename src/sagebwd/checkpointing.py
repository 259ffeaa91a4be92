"""Activation checkpointing that keeps what attention leaves for its backward: all but attention is computed again.

out = checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)
# a model of Transformers
model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keep_attention})
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

ATTENTION = {
    "sagebwd::attention", "sagebwd::flash_attention_4",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
}  # fmt: skip
"""Operators whose outputs are kept: this project's, and torch's for layers that are left to it."""


def keep_attention() -> tuple[AbstractContextManager, AbstractContextManager]:
    """The ``context_fn`` of ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``, under torch.compile too.

    Kept of a call: o in the dtype of q, lse and, but for the implementation "reference" and head_dims over 256, the
    INT8 codes of q and k with their scales. v, and q and k where backward reads them, are computed again with the
    rest. Of torch's scaled_dot_product_attention the outputs are kept too, of all its kernels but the one in plain
    products.

    Returns: the contexts of forward and of what is computed again.
    """
    return create_selective_checkpoint_contexts(_policy)


def _policy(
    context: SelectiveCheckpointContext, operator: torch._ops.OpOverload, *arguments: object, **options: object
) -> CheckpointPolicy:
    """What becomes of an operator's outputs."""
    return CheckpointPolicy.MUST_SAVE if operator.name() in ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE
