"""SageAttention's function signatures, with gradients: for code written against ``from sageattention import ...``.

SageAttention's own functions have no backward and ignore keywords that they do not know; these differentiate, and
refuse them, but for three that choose among SageAttention's kernels.
"""

from __future__ import annotations

from torch import Tensor

from sagebwd import checks
from sagebwd.attention import sage_attention, sage_attention_varlen
from sagebwd.integrations.words import in_words_of
from sagebwd.recipe import AUTO, Recipe

_LAYOUTS = ("HND", "NHD")
_WORDS = {"query:": "q:", "key:": "k:", "value:": "v:", "query's": "q's", "key's": "k's", "scale=": "sm_scale="}
_WITHOUT_EFFECT = ("qk_quant_gran", "pv_accum_dtype", "quantization_backend")


@in_words_of(_WORDS)
def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    *,
    smooth_k: bool | None = None,
    recipe: str | Recipe = AUTO,
    impl: str | None = None,
    **kwargs: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention by SageAttention's signature, differentiable.

    Args:
        q: (batch, heads, tokens, head_dim) in layout "HND", (batch, tokens, heads, head_dim) in "NHD"; bf16 or fp16,
            as in `sage_attention`.
        k, v: likewise, with kv_heads and kv_tokens; kv_heads divides heads.
        tensor_layout: "HND" or "NHD".
        is_causal: query i sees keys up to i, also where the lengths differ.
        sm_scale: softmax scale; 1 / sqrt(head_dim) by default.
        return_lse: also return the log-sum-exp of the scaled scores, natural log.
        smooth_k: whether the mean of the keys is taken off before they are quantised; None as the recipe
            says, which is True in all named ones but ``full``.
        recipe, impl: as in `sage_attention`.
        kwargs: ``qk_quant_gran``, ``pv_accum_dtype`` and ``quantization_backend``, without effect.

    Returns:
        The output in q's layout and dtype, contiguous; with ``return_lse`` also (batch, heads, tokens) in FP32.

    Raises:
        TypeError: an unknown keyword, attn_mask and dropout_p among them; a dtype that is not supported.
        ValueError: another tensor_layout; a shape, device or value that `sage_attention` refuses.
        NotImplementedError: a recipe that the implementation lacks.
    """
    _refuse_unknown("sageattn", kwargs)
    if not isinstance(tensor_layout, str) or tensor_layout not in _LAYOUTS:
        got = repr(tensor_layout) if isinstance(tensor_layout, str) else f"a {type(tensor_layout).__name__}"
        raise ValueError(
            f"tensor_layout: got {got}; accepted: 'HND', 'NHD'. To stand in for scaled_dot_product_attention use "
            "sagebwd.replace_sdpa or sagebwd.sage_attention"
        )
    checks.dimensions(4, q=q, k=k, v=v)
    swap = tensor_layout == "NHD"
    if swap:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    outcome = sage_attention(
        q, k, v, is_causal=is_causal, scale=sm_scale, enable_gqa=True, recipe=_smoothed(recipe, smooth_k), impl=impl,
        return_lse=return_lse,
    )  # fmt: skip
    out, lse = outcome if return_lse else (outcome, None)
    if swap:
        out = out.transpose(1, 2).contiguous()
    return (out, lse) if return_lse else out


@in_words_of(_WORDS)
def sageattn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool | None = None,
    *,
    recipe: str | Recipe = AUTO,
    impl: str | None = None,
    **kwargs: object,
) -> Tensor:
    """Attention over packed sequences by SageAttention's signature, differentiable.

    Args: q, k, v, offsets and longest lengths as in `sage_attention_varlen`, with its causal mask; the others, and
    what is raised, as in `sageattn`; smooth_k, of each sequence.

    Returns: (total_tokens, heads, head_dim) in q's dtype.
    """
    _refuse_unknown("sageattn_varlen", kwargs)
    return sage_attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal=is_causal, scale=sm_scale,
        recipe=_smoothed(recipe, smooth_k), impl=impl,
    )  # fmt: skip


def _refuse_unknown(function: str, kwargs: dict[str, object]) -> None:
    unknown = sorted(set(kwargs) - set(_WITHOUT_EFFECT))
    if unknown:
        raise TypeError(
            f"{function}: keyword {', '.join(map(repr, unknown))} is not supported; accepted besides the signature's, "
            f"without effect: {', '.join(_WITHOUT_EFFECT)}"
        )


def _smoothed(recipe: str | Recipe, smooth_k: bool | None) -> Recipe | str:
    """The recipe with K smoothed or not; "auto" stands for recipes that smooth it, "token" without for one more."""
    if smooth_k is None or (recipe == AUTO and smooth_k):
        return Recipe.parse_or_auto(recipe)
    return Recipe.parse("token" if recipe == AUTO else recipe).replace(smooth_k=smooth_k)
