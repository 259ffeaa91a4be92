"""FlexAttention's signature, in low precision: for models written against ``torch.nn.attention.flex_attention``.

What a BlockMask hides is skipped (docs/masks.md). A score_mod is refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from sagebwd.attention import sage_attention
from sagebwd.masks.mask import Mask
from sagebwd.recipe import AUTO, Recipe

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import FlexKernelOptions, _score_mod_signature

# Options of torch's own kernels that ask for tiles, warps, a kernel, or an order of work, or promise what makes
# checks superfluous: what attention is stays the same. Others may change it, and are refused.
OPTIONS = frozenset((
    "num_warps", "num_stages", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "PRESCALE_QK",
    "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ", "FORCE_USE_FLEX_ATTENTION", "USE_TMA", "kpack",
    "matrix_instr_nonkdim", "waves_per_eu", "BACKEND",
))  # fmt: skip


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: _score_mod_signature | None = None,
    block_mask: BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest | None = None,
    recipe: str | Recipe = AUTO,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention by FlexAttention's signature, differentiable.

    Args:
        query: (batch, heads, tokens, head_dim); key, value: (batch, kv_heads, kv_tokens, head_dim), or of batch 1
            beside a block_mask, for all.
        score_mod: None. A function of scores cannot be run in the kernels, nor be proved to be a mask by its results.
        block_mask, scale, enable_gqa, return_lse, recipe, impl: as in `sage_attention`.
        kernel_options: those of `OPTIONS`, which have no effect here. ``fwd_`` and ``bwd_`` may stand before them.
        return_aux: an AuxRequest, of lse alone.

    Returns:
        (batch, heads, tokens, value's head_dim); with return_lse also lse, (batch, heads, tokens), FP32, natural log;
        with return_aux an AuxOutput in its place. A query that sees no key gives zeros and lse -inf.

    Raises:
        NotImplementedError: score_mod, max_scores, an option that is not known; as `sage_attention`.
        ValueError, TypeError: return_lse beside return_aux; as `sage_attention`.
    """
    if score_mod is not None:
        _refuse_score_mod(score_mod)
    _check_options(kernel_options)
    if return_lse and return_aux is not None:
        raise ValueError("return_lse=True beside return_aux is not accepted; use return_aux=AuxRequest(lse=True)")
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError(
            "return_aux: max_scores is not supported, only lse; sagebwd.sage_attention(..., return_max_logits=True) "
            "gives the largest of each head; for those of queries keep torch.nn.attention.flex_attention here"
        )
    if block_mask is not None and key.dim() == 4 and key.shape[0] == 1 != query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    wants_lse = return_lse if return_aux is None else return_aux.lse
    found = sage_attention(
        query, key, value, scale=scale, enable_gqa=enable_gqa, block_mask=block_mask, recipe=recipe, impl=impl,
        return_lse=wants_lse,
    )  # fmt: skip
    if return_aux is None:
        return found
    return (found[0], AuxOutput(lse=found[1])) if wants_lse else (found, AuxOutput())


def _refuse_score_mod(score_mod: object) -> None:
    name = getattr(score_mod, "__qualname__", None) or type(score_mod).__name__
    raise NotImplementedError(
        f"score_mod: {name} is not supported: kernels cannot call a function. If it hides keys, make it a mask_mod "
        "and pass block_mask=create_block_mask(mask_mod, ...); if it adds a bias, pass that as attn_mask= of "
        "sagebwd.sage_attention; for softcap and others keep torch.nn.attention.flex_attention for this call"
    )


def _check_options(options: FlexKernelOptions | None) -> None:
    unknown = [name for name in options or () if name.removeprefix("fwd_").removeprefix("bwd_") not in OPTIONS]
    if unknown:
        raise NotImplementedError(
            f"kernel_options: {', '.join(map(repr, unknown))} may change numbers, and is not supported; leave it out. "
            f"Accepted, without effect: {', '.join(sorted(OPTIONS))}"
        )
