"""Layers whose heads have more channels than low precision takes: "auto" runs them in full precision on torch.

Gemma 4's global layers have 512 beside 256 in the others. Such a model trains in low precision but for these layers,
which a warning names once.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from sagebwd.attention import sage_attention
from sagebwd.kernels.table import MAX_HEAD_DIM
from sagebwd.recipe import AUTO

_said: set[str] = set()


def is_wide(module: nn.Module, query: Tensor, value: Tensor, recipe: object, impl: str | None) -> bool:
    """Whether a layer's heads have more channels than low precision takes, of which the first is said.

    Raises ValueError where a recipe or an impl is named, which is never handed over.
    """
    head_dim = max(query.shape[-1], value.shape[-1])
    if head_dim <= MAX_HEAD_DIM:
        return False
    name = type(module).__name__
    if recipe != AUTO or impl is not None:
        layer = getattr(module, "layer_idx", None)
        raise ValueError(
            f"{name}, layer {layer}: head_dim {head_dim} is not supported under recipe={str(recipe)!r}, impl={impl!r};"
            f" accepted: 1 to {MAX_HEAD_DIM}. The recipe 'auto' without an impl runs it in full precision: for such "
            f'layers alone, config.sagebwd["layers"] = {{"{layer}": {{"recipe": "auto", "impl": None}}}}'
        )
    _say(
        f"attn_implementation='sagebwd': layers of {name} with head_dim {head_dim} run on torch's "
        f"scaled_dot_product_attention in full precision; low precision takes up to {MAX_HEAD_DIM}"
    )
    return True


@torch.compiler.assume_constant_result  # a trace says it once and goes on
def _say(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=4)


def documents_of_wide_heads(
    query: Tensor, key: Tensor, value: Tensor, offsets_q: Tensor, offsets_k: Tensor, longest_q: int, longest_k: int,
    shared: dict[str, object],
) -> Tensor:  # fmt: skip
    """Packed documents under a mask of elements, which torch takes at any head_dim, as SDPA would be given.

    Args: query, key, value (batch, heads, tokens, head_dim); offsets (documents + 1,) in batch * tokens; shared, the
    other arguments of `sage_attention`. Returns (batch, tokens, heads, value's head_dim).

    Raises NotImplementedError where queries and keys are packed differently.
    """
    batch, heads, tokens, _ = query.shape
    if tokens != key.shape[2] or (offsets_q is not offsets_k and not torch.equal(offsets_q, offsets_k)):
        raise NotImplementedError(
            f"cu_seq_lens_q that differ from cu_seq_lens_k are not supported at head_dim {query.shape[-1]}, over "
            f"{MAX_HEAD_DIM}; use attn_implementation='sdpa' with one document a row"
        )
    query, key, value = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
    places = torch.arange(batch * tokens, device=query.device, dtype=offsets_q.dtype)
    document = torch.searchsorted(offsets_q.to(query.device)[1:], places, right=True)
    visible = (document[:, None] == document)[None, None]
    out = sage_attention(query, key, value, visible, enable_gqa=heads != key.shape[1], **shared)
    return out[0].transpose(0, 1).unflatten(0, (batch, tokens)).contiguous()
