"""flash-attn's function signatures, in low precision: for code written against ``from flash_attn import ...``.

    from sagebwd.integrations.flash_attn import flash_attn_func
    out = flash_attn_func(q, k, v, causal=True)   # (batch, tokens, heads, head_dim), as flash-attn 2.8

`install` puts the functions under the name ``flash_attn``, for code that is not edited.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, update_wrapper
from inspect import signature
from typing import NoReturn

import torch
from torch import Tensor

from sagebwd import checks
from sagebwd.attention import sage_attention, sage_attention_varlen
from sagebwd.dispatch import check_known
from sagebwd.integrations import flash_attn_padding as padding
from sagebwd.integrations.flash_attn_modules import Installation
from sagebwd.integrations.words import in_words_of
from sagebwd.recipe import AUTO, Recipe
from sagebwd.switches import switches

Attended = Tensor | tuple[Tensor, Tensor, Tensor]
_WORDS = {
    "query:": "q:", "key:": "k:", "value:": "v:", "query's": "q's", "key's": "k's", "scale=": "softmax_scale=",
    "is_causal=": "causal=", "window=": "window_size=",
}  # fmt: skip
_HEADS = ", heads the last but one"
_USE_INSTEAD = "keep the package flash-attn for this layer"


@in_words_of(_WORDS)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    recipe: str | Recipe = AUTO,
    impl: str | None = None,
) -> Attended:
    """Attention by flash-attn's signature, differentiable (docs/integrations/flash_attn.md#arguments).

    Args:
        q: (batch, tokens, heads, head_dim); k, v: (batch, kv_tokens, kv_heads, head_dim). kv_heads divides heads.
        causal, window_size: aligned bottom right: the last query meets the last key. A negative side has no limit.
        deterministic: backward adds in a fixed order, as under ``sagebwd.switches(deterministic=True)``.
        return_attn_probs: also return lse and an empty tensor in place of the weights.
        dropout_p, softcap, alibi_slopes: as they are by default. recipe, impl: as in `sage_attention`.

    Returns:
        (batch, tokens, heads, value's head_dim) in q's dtype; with ``return_attn_probs`` also the log-sum-exp of the
        scaled scores, (batch, heads, tokens) in FP32, which is differentiable, and the empty tensor. A query that sees
        no key gives zeros, and lse -inf, where flash-attn has inf.

    Raises:
        NotImplementedError: dropout_p, softcap or alibi_slopes that is not at its default; as `sage_attention`.
        TypeError, ValueError: as `sage_attention`.
    """
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs, recipe, impl
    )
    checks.dimensions(4, _HEADS, q=q, k=k, v=v)
    batch, tokens, kv_tokens = q.shape[0], q.shape[1], k.shape[1]
    if not batch == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k, v: batches of {batch}, {k.shape[0]} and {v.shape[0]}; they must be equal")
    attended = partial(_attended, options, deterministic)
    if tokens == kv_tokens or batch == 0 or not (causal or options["window"]):
        by_head = (x.transpose(1, 2) for x in (q, k, v))
        o, lse = attended(partial(sage_attention, enable_gqa=True), *by_head)
        return _returned(o.transpose(1, 2), lse)
    # of other lengths sage_attention aligns a band top left, and in packed sequences bottom right
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    packed = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    o, lse = attended(sage_attention_varlen, *packed, starts * tokens, starts * kv_tokens, tokens, kv_tokens)
    lse = None if lse is None else lse.unflatten(1, (batch, tokens)).transpose(0, 1)
    return _returned(o.unflatten(0, (batch, tokens)), lse)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: object, **named: object) -> Attended:
    """`flash_attn_func` of keys and values in one tensor, (batch, kv_tokens, 2, kv_heads, head_dim)."""
    return flash_attn_func(q, *_unpacked("kv", kv, 5, 2), *options, **named)


def flash_attn_qkvpacked_func(qkv: Tensor, *options: object, **named: object) -> Attended:
    """`flash_attn_func` of queries, keys and values in one tensor, (batch, tokens, 3, heads, head_dim)."""
    return flash_attn_func(*_unpacked("qkv", qkv, 5, 3), *options, **named)


@in_words_of(_WORDS)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    recipe: str | Recipe = AUTO,
    impl: str | None = None,
) -> Attended:
    """`flash_attn_func` over sequences of different lengths packed one after another, without padding.

    Args: q (total_tokens, heads, head_dim); k, v (total_kv_tokens, kv_heads, head_dim); cu_seqlens_q and cu_seqlens_k
    (sequences + 1,) int32, where each sequence starts, and the total; max_seqlen_q and max_seqlen_k, the longest in
    tokens (for a tensor of a GPU the host waits); block_table None. A causal mask and a window are aligned in each
    sequence as `flash_attn_func` says.

    Returns: (total_tokens, heads, value's head_dim); lse is (heads, total_tokens).

    Raises: as `flash_attn_func`, and NotImplementedError for a block_table.
    """
    if block_table is not None:
        raise NotImplementedError(f"block_table: keys in pages are not supported; pass them whole, or {_USE_INSTEAD}")
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs, recipe, impl
    )
    checks.dimensions(3, _HEADS, q=q, k=k, v=v)
    # Transformers hands over tensors
    longest = (int(x) if isinstance(x, Tensor) else x for x in (max_seqlen_q, max_seqlen_k))
    packed = q, k, v, cu_seqlens_q, cu_seqlens_k, *longest
    return _returned(*_attended(options, deterministic, sage_attention_varlen, *packed))


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *options: object, **named: object,
) -> Attended:  # fmt: skip
    """`flash_attn_varlen_func` of keys and values in one tensor, (total_kv_tokens, 2, kv_heads, head_dim)."""
    places = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, *_unpacked("kv", kv, 4, 2), *places, *options, **named)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *options: object, **named: object
) -> Attended:
    """`flash_attn_varlen_func` of queries, keys and values in one tensor, (total_tokens, 3, heads, head_dim)."""
    places = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(*_unpacked("qkv", qkv, 4, 3), *places, *options, **named)


# Signed with all options that they hand on but block_table, which flash-attn's packed functions do not have.
for _packed, _whole in (
    (flash_attn_kvpacked_func, flash_attn_func), (flash_attn_qkvpacked_func, flash_attn_func),
    (flash_attn_varlen_kvpacked_func, flash_attn_varlen_func),
    (flash_attn_varlen_qkvpacked_func, flash_attn_varlen_func),
):  # fmt: skip
    _first = [x for x in signature(_packed).parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    _rest = [x for x in signature(_whole).parameters.values() if x.default is not x.empty and x.name != "block_table"]
    _packed.__signature__ = signature(_packed).replace(parameters=[*_first, *_rest])


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *arguments: object, **options: object
) -> NoReturn:
    """Refused: flash-attn's function for generation, which has no gradients. Raises NotImplementedError."""
    raise NotImplementedError(
        "flash_attn_with_kvcache is not supported: it updates a cache in generation and has no backward; call "
        f"flash_attn_func with the part of the cache that is filled, or {_USE_INSTEAD}"
    )


_FUNCTIONS = (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)


def install(recipe: str | Recipe = AUTO, impl: str | None = None) -> Installation:
    """Put the functions of this module under the name ``flash_attn``, for code that imports them from there.

    ``flash_attn``, ``flash_attn.flash_attn_interface`` and ``flash_attn.bert_padding`` are there from this call on;
    other parts of flash-attn are not and fail to import. `importlib.metadata` finds a distribution flash-attn of
    version 2.8.4+sagebwd. Call it before what imports flash-attn, or asks whether it is there, is imported:
    Transformers asks once.

    Args: recipe, impl, as in `sage_attention`, for every call that does not say its own.

    Returns: what undoes it: by its ``uninstall()``, or at the end of a ``with`` block. Names that were imported
    meanwhile stay.

    Raises ValueError where flash_attn is imported already, the package or by an earlier call, and for an unknown
    recipe or impl; TypeError for a recipe of another type.
    """
    settings = {"recipe": Recipe.parse_or_auto(recipe), "impl": impl}
    check_known(impl)
    functions = {x.__name__: update_wrapper(partial(x, **settings), x) for x in _FUNCTIONS}
    functions[flash_attn_with_kvcache.__name__] = flash_attn_with_kvcache
    return Installation({"": functions, "flash_attn_interface": functions, "bert_padding": padding.FUNCTIONS})


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
    recipe: str | Recipe,
    impl: str | None,
) -> dict[str, object]:
    """What both of sage_attention's functions are called with."""
    if dropout_p != 0:
        raise NotImplementedError(
            f"dropout_p={dropout_p} is not supported, only 0: each kernel would draw the same random numbers again; "
            f"apply dropout to the output, or {_USE_INSTEAD}"
        )
    if softcap > 0:
        raise NotImplementedError(f"softcap={softcap} is not supported, only 0; {_USE_INSTEAD}, or use FlexAttention")
    if alibi_slopes is not None:
        raise NotImplementedError(
            "alibi_slopes is not supported; pass the bias that they stand for as attn_mask of sagebwd.sage_attention, "
            f"or {_USE_INSTEAD}"
        )
    return {
        "is_causal": causal, "scale": softmax_scale, "window": _window(window_size), "recipe": recipe, "impl": impl,
        "return_lse": return_attn_probs,
    }  # fmt: skip


def _window(window_size: Sequence[int]) -> tuple[int, int] | None:
    try:
        left, right = (max(operator.index(side), -1) for side in window_size)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"window_size={window_size!r} must be (left, right), two integers in tokens, -1 for no limit"
        ) from error
    return None if left == right == -1 else (left, right)


def _unpacked(name: str, packed: Tensor, dims: int, parts: int) -> tuple[Tensor, ...]:
    """Views of the tensors that lie side by side before heads."""
    checks.dimensions(dims, _HEADS, **{name: packed})
    if packed.shape[-3] != parts:
        raise ValueError(f"{name}: expected {parts} tensors before heads, got shape {tuple(packed.shape)}")
    return packed.unbind(-3)


def _attended(
    options: dict[str, object], deterministic: bool, function: Callable, *arguments: object
) -> tuple[Tensor, Tensor | None]:
    """Output, and lse where it is asked for."""
    with switches(deterministic=True) if deterministic else nullcontext():
        found = function(*arguments, **options)
    return found if options["return_lse"] else (found, None)


def _returned(o: Tensor, lse: Tensor | None) -> Attended:
    return o if lse is None else (o, lse, o.new_empty(0))
