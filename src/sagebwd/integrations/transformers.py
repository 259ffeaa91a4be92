"""`attn_implementation="sagebwd"` for Hugging Face Transformers (docs/integrations/transformers.md).

    from sagebwd.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sagebwd")

Transformers hands an attention function (batch, heads, tokens, head_dim) tensors and wants (batch, tokens, heads,
head_dim) back. Two of its habits are silent traps, handled here: without a mask function registered under the same
name it drops padding and packing, and under BF16 autocast rotary embedding and norms leave q and k in FP32 beside a
BF16 v.

What is visible is read from the model's own mask function (`transformers_masks`); what is no band of distances within
documents is carried as a mask. Padded and packed batches run as packed sequences, without the padding.
"""

from __future__ import annotations

import sys
import warnings
from functools import wraps

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from sagebwd import counts
from sagebwd.arguments import autocast_dtype
from sagebwd.attention import sage_attention, sage_attention_varlen
from sagebwd.extras import extra
from sagebwd.integrations import transformers_fusion as fusion
from sagebwd.integrations.transformers_masks import (
    CALLERS,
    Mask,
    Visible,
    documents_by,
    has_values,
    mask,
    read_attention_mask,
    refuse,
)  # fmt: skip
from sagebwd.integrations.transformers_norms import add_qk_norm
from sagebwd.integrations.transformers_padding import watch_padding
from sagebwd.integrations.transformers_settings import NAME, check_model, have_handed_down, settings_of
from sagebwd.integrations.transformers_sharing import shared_attention, sharing_of
from sagebwd.integrations.transformers_torch import decode, is_wide
from sagebwd.integrations.words import in_words_of
from sagebwd.kernels.capabilities import MAX_HEAD_DIM

with extra("transformers"):
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.utils.import_utils import is_tracing

__all__ = ["add_qk_norm", "attention", "read_attention_mask", "register"]

_UNSUPPORTED = {
    "softcap": ("soft-capped logits", "'eager' or 'flex_attention'"),  # which 'sdpa' leaves out
    "sinks": ("a sink for each query", "'eager'"),
    "indices": ("attention to chosen keys", "'sdpa' or 'eager'"),
    "block_indices": ("attention to chosen blocks of keys", "'sdpa' or 'eager'"),
    "cache": ("a paged cache", "'sdpa' or 'eager'"),
    "position_bias": ("a position bias", "'sdpa' or 'eager'"),
}
# The caller's words for `sage_attention`'s arguments.
_WORDS = {
    "cu_seqlens_q": "cu_seq_lens_q", "cu_seqlens_k": "cu_seq_lens_k", "max_seqlen_q": "max_length_q",
    "max_seqlen_k": "max_length_k", "attn_mask": "attention_mask", "scale=": "scaling=",
    "sinks: expected": "s_aux: expected", "sinks: dtype": "s_aux: dtype",
}  # fmt: skip
_PACKED = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"
_COMPILED_PACKING = (
    "packed documents are not seen in position_ids under torch.compile; give cu_seq_lens_q and the like, "
    "which DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes"
)
_LEFT_OUT = "a mask that leaves packed documents out"
_LEFT_OUT_INSTEAD = "give position_ids of each document with use_cache=False, and no attention_mask"


def register() -> None:
    """Make ``attn_implementation="sagebwd"`` known to Transformers, with the mask function it needs.

    From then on a model that is asked for it and computes attention itself, without a call that could be taken over,
    raises NotImplementedError, and a model of several parts, of which one is asked, hands its ``config.sagebwd`` to
    those without their own.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    counts.log_at_exit()
    original = PreTrainedModel.get_correct_attn_implementation
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, *args: object, **kwargs: object
    ) -> str:
        if requested_attention == NAME:
            check_model(self)
            fusion.install(type(self))
        have_handed_down(self)  # parts are asked before the whole is made
        return original(self, requested_attention, *args, **kwargs)

    changes = PreTrainedModel.set_attn_implementation

    @wraps(changes)
    def set_attn_implementation(self: PreTrainedModel, *args: object, **kwargs: object) -> None:
        changes(self, *args, **kwargs)
        have_handed_down(self)

    ends = PreTrainedModel.post_init

    @wraps(ends)
    def post_init(self: PreTrainedModel) -> None:
        ends(self)
        have_handed_down(self)

    PreTrainedModel.post_init = post_init
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
    PreTrainedModel.set_attn_implementation = set_attn_implementation


@in_words_of(_WORDS)
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls.

    Args: query (batch, heads, tokens, head_dim); key, value (batch, kv_heads, kv_tokens, head_dim); attention_mask,
    what the registered mask function gave, which alone says what is visible, as under SDPA: ``is_causal`` counts where
    it is None. s_aux, (heads,), the sinks of gpt-oss and others. cu_seq_lens_q and the like, offsets of packed
    documents. Under ``fuse`` module, query and key are the stand-ins of `transformers_fusion`.

    Returns: (batch, tokens, heads, head_dim) in the dtype that the layer computes in, and None for the weights.

    Raises NotImplementedError for dropout, masks that need a gradient, soft-capping, a sink a query, position biases;
    for more than 512 channels a head, of packed documents NotImplementedError, else ValueError unless the recipe is
    "auto".
    """
    _refuse_unsupported(dropout, kwargs)
    module, query, key, left = fusion.put_off(module, query, key, value)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if isinstance(attention_mask, Tensor) and hasattr(sys.modules.get(type(module).__module__), "BlockMask"):
        # Doge, which leaves out what was made for it
        refuse(f"{type(module).__name__} makes its mask of tensors and leaves others out, which")
    mask = _known_mask(attention_mask, query, key, bool(is_causal), sliding_window)
    chosen = settings_of(module)
    sharing = sharing_of(module)
    if left is not None and not (sharing is None and _takes_projections(mask, query, key, value)):
        query, key = left.rows(query, key, chosen["impl"])
        left = None
    if left is None:
        query, key, value = _one_dtype(query, key, value)
    if sharing is not None:
        given = kwargs | {"s_aux": s_aux}
        return shared_attention(sharing, query, key, value, mask, given, {"scale": scaling, **chosen}), None
    if mask is None or mask.continues:
        if kwargs.get("cu_seq_lens_q") is not None:
            refuse("cu_seq_lens_q with a KV cache that is not empty", "give the documents of a batch in one call")
        return decode(query, key, value, None if mask is None else mask.dense, scaling, s_aux), None
    wide = is_wide(module, query, value, **chosen)  # which torch alone takes, and not packed
    if isinstance(mask.visible, str):
        _check_documents(mask, query, bool(is_causal), kwargs)
        return _carried(query, key, value, mask, {"scale": scaling, "sinks": s_aux, **chosen}), None
    key, value, visible = _fitting(mask, query, key, value)
    if mask.is_left_out and query.shape[2] > 1 and bool(is_causal) != (visible.upper == 0):
        what = f"the attention's is_causal={is_causal} contradicts the model's attention mask, which"
        refuse(what, "Transformers' own 'sdpa' and 'eager' differ")
    causal = visible.upper == 0
    window = (
        -1 if visible.lower is None else -visible.lower,
        -1 if causal or visible.upper is None else visible.upper,
    )
    shared = {
        "scale": scaling, "is_causal": causal, "window": None if window == (-1, -1) else window, "sinks": s_aux,
        **chosen,
    }  # fmt: skip
    offsets = _packed_offsets(mask, query, key, kwargs)
    if offsets is not None and wide:
        refuse(f"packed documents at head_dim {max(query.shape[-1], value.shape[-1])}, over {MAX_HEAD_DIM}")
    if offsets is not None:
        return _packed(query, key, value, *offsets, left, shared), None
    if mask.padding is None:
        attend = sage_attention if left is None else left.attend
        out = attend(query, key, value, enable_gqa=query.shape[1] != key.shape[1], **shared)
        return out.transpose(1, 2).contiguous(), None
    # only self-attention has a band: queries of padding are left out with its keys, but for those in a hole
    itself = visible.is_banded
    if wide or not has_values(query) or (itself and mask.has_holes):
        out = _masked(query, key, value, mask.padding, itself, shared)
    else:
        out = _unpadded(query, key, value, mask, itself, left, shared)
    if itself and has_values(query):
        watch_padding(module, out, mask, causal)
    return out, None


def _known_mask(
    mask: Mask | Tensor | None, query: Tensor, key: Tensor, is_causal: bool, sliding_window: int | None
) -> Mask | None:
    """The mask of a call, whoever made it; None for one query that sees a whole cache."""
    if isinstance(mask, Mask):
        return mask
    shape = (query.shape[0], 1, query.shape[2], key.shape[2])
    if mask is None:
        within = _within(sliding_window, is_causal, shape)
        if is_causal and shape[2] == 1 < shape[3] and within is None:
            return None
        return Mask(shape, Visible(lower=None if within is None else 1 - within, upper=0 if is_causal else None))
    padding = _key_padding(mask, key) if isinstance(mask, Tensor) else None
    if padding is not None:
        return Mask(shape, Visible(), padding)
    if not isinstance(mask, (Tensor, BlockMask)):
        refuse(f"an attention_mask that is a {type(mask).__name__}", "accepted: a tensor or a BlockMask")
    if len(mask.shape) != 4:
        accepted = "(batch or 1, heads or 1, tokens or 1, kv_tokens). Give (batch, tokens) to the model"
        refuse(f"attention_mask of shape {tuple(mask.shape)}", f"accepted at an attention: {accepted}")
    return Mask(shape, CALLERS, dense=mask, continues=isinstance(mask, Tensor) and shape[2] == 1 < shape[3])


def _within(sliding_window: int | None, is_causal: bool, shape: tuple[int, int, int, int]) -> int | None:
    """How many keys a query of a causal layer sees without a mask, itself and those before it; None for all.

    Raises TypeError and ValueError for what is no number of tokens, and NotImplementedError where neither Transformers
    nor a call says what is meant: without is_causal, or of queries that continue a KV cache.
    """
    if sliding_window is None:
        return None
    if isinstance(sliding_window, bool) or not isinstance(sliding_window, int):
        raise TypeError(f"sliding_window={sliding_window!r} must be an integer, in tokens, or None")
    if sliding_window < 1:
        raise ValueError(f"sliding_window={sliding_window} must be at least 1, the token itself; None for no limit")
    if sliding_window >= shape[3]:
        return None
    if not is_causal or shape[2] != shape[3]:
        what = f"{shape[2]} queries and {shape[3]} keys" if is_causal else "is_causal=False"
        what = f"sliding_window={sliding_window} with {what} and without an attention_mask"
        refuse(what, "let the model make its mask, or use 'sdpa'")
    return sliding_window


def _takes_projections(mask: Mask | None, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether attention is of tokens as the layer has them, dense or packed, so that what makes its operands may
    normalise and rotate too: no cache, no padding that is hidden in place, no mask that is carried; widths that
    kernels take.
    """
    if mask is None or mask.continues or isinstance(mask.visible, str):
        return False
    if mask.padding is not None and (not mask.visible.is_banded or not has_values(query) or mask.has_holes):
        return False
    narrow = max(query.shape[-1], value.shape[-1]) <= MAX_HEAD_DIM
    return narrow and query.dtype == key.dtype == value.dtype


def _key_padding(mask: Tensor, key: Tensor) -> Tensor | None:
    """(batch, kv_tokens), True where a key counts, of a (batch or 1, 1, 1, kv_tokens) mask that says no more.

    A sum's mask of older models is 0 where a key counts and a dtype's least number elsewhere; in all else, None.
    """
    if mask.shape[1:] != (1, 1, key.shape[2]) or (mask.shape[0] != 1 and mask.shape[0] != key.shape[0]):
        return None
    if mask.dtype == torch.bool:
        return mask[:, 0, 0]
    if not mask.is_floating_point() or not has_values(mask):
        return None
    counts, hidden = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
    return counts[:, 0, 0] if bool((counts | hidden).all() & counts.any(-1).all()) else None


def _fitting(mask: Mask, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Visible]:
    """Keys and values that the mask speaks of, and what it lets through."""
    visible, made = mask.visible, mask.shape[2:]
    if mask.padding is None and not visible.is_banded:
        return key, value, visible
    if made[1] != key.shape[2] or (visible.is_banded and made[0] != query.shape[2]):
        at = f"{query.shape[2]} x {key.shape[2]}"
        refuse(f"an attention_mask of {made[0]} x {made[1]} tokens at an attention of {at}")
    if visible.upper == 0 and made[0] < made[1]:  # a static cache that is empty still
        key, value = key[:, :, : made[0]], value[:, :, : made[0]]
    return key, value, visible


def _refuse_unsupported(dropout: float, kwargs: dict[str, object]) -> None:
    if dropout:
        refuse(f"attention dropout {dropout}", "set attention_dropout=0 in the model's config, or use 'sdpa'")
    for name, (meaning, instead) in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            refuse(f"{name}: {meaning}", f"use {instead}")
    if kwargs.get("output_attentions"):
        warnings.warn("attn_implementation='sagebwd' returns no attention weights; use 'eager' for them", stacklevel=4)


def _one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype that the layer computes in: autocast's, or else that of values, which are projected.

    Norms and rotary embeddings leave queries and keys in another; the layer's weights may be quantised.
    """
    dtype = autocast_dtype(value.device) or value.dtype
    return tuple(x.to(dtype) for x in (query, key, value))


def _carried(query: Tensor, key: Tensor, value: Tensor, mask: Mask, shared: dict[str, object]) -> Tensor:
    """A mask that is no band of distances, by the kernels that take any."""
    argument = mask.argument(query.device)
    visible = argument.get("attn_mask")
    if visible is not None and visible.requires_grad and torch.is_grad_enabled():
        refuse("an attention_mask that needs a gradient, such as a learned bias,")
    out = sage_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1], **argument, **shared)
    return out.transpose(1, 2).contiguous()


def _masked(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor, itself: bool, shared: dict[str, object]
) -> Tensor:
    """A padded batch as it lies, its padding masked: where a trace cannot read lengths, or a row has a hole.

    In self-attention the queries before the first real token and after the last one come back as zeros, as from
    `_unpadded`. Those in a hole are computed: the logits that predict the next real token are of the last of them.
    """
    padding = padding.to(query.device).expand(query.shape[0], -1)
    hidden = (padding.cumsum(1) == 0) | (padding.flip(1).cumsum(1).flip(1) == 0)
    hidden = hidden[:, None, :, None]
    if itself:
        query = query.masked_fill(hidden, 0)  # a scale of several queries must not be a hidden one's
    grouped = query.shape[1] != key.shape[1]
    out = sage_attention(query, key, value, padding[:, None, None], enable_gqa=grouped, **shared)
    return (out.masked_fill(hidden, 0) if itself else out).transpose(1, 2).contiguous()


def _unpadded(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, itself: bool, left: fusion.Left | None,
    shared: dict[str, object],
) -> Tensor:  # fmt: skip
    """A padded batch as packed sequences of its real tokens, each row's without a hole in self-attention.

    In self-attention with a band padding comes back as zeros. Otherwise the queries may be another sequence, even
    where the lengths are the same (cross-attention), and only keys are unpadded.
    """
    batch, tokens_q = query.shape[0], query.shape[2]
    if mask.padding.shape[0] != batch:
        mask = Mask(mask.shape, mask.visible, mask.padding.expand(batch, -1))
    real, offsets_k = (x.to(query.device) for x in mask.real)
    offsets_q = offsets_k if itself else torch.arange(batch + 1, device=query.device, dtype=torch.int32) * tokens_q
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    packed = (query[real] if itself else query, key[real], value[real])
    attend = sage_attention_varlen if left is None else left.of_packed(batch, real).attend
    out = attend(
        *packed, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k, max_seqlen_q=tokens_q,
        max_seqlen_k=mask.padding.shape[1], **shared,
    )  # fmt: skip
    if itself:
        out = out.new_zeros(batch * tokens_q, *out.shape[1:]).index_copy(0, real, out)
    return out.unflatten(0, (batch, tokens_q))


def _packed_offsets(
    mask: Mask, query: Tensor, key: Tensor, kwargs: dict[str, object]
) -> tuple[Tensor, Tensor, int, int] | None:
    """cu_seqlens and longest lengths of packed documents, as given or from position_ids.

    Without a mask and a cache Transformers has cut those itself, as for SDPA, wherever they do not rise by 1.
    """
    _check_packed(kwargs)
    if kwargs.get("cu_seq_lens_q") is not None:
        if mask.padding is not None:
            refuse("cu_seq_lens_q beside an attention_mask with padding", "accepted: one of the two")
        return tuple(kwargs[name] for name in _PACKED)
    ids, positions = mask.visible.documents, kwargs.get("position_ids")
    # with a KV cache, also one to be filled, Transformers' masks leave documents out
    whole = mask.visible.upper == 0 and mask.padding is None and query.shape[2] == key.shape[2]
    if not whole or positions is None or positions.shape[1:] != key.shape[2:3]:
        positions = None
    if query.device.type == "meta":
        return None
    if is_tracing(query):
        alone = [] if mask.visible.positions is None else [(mask.visible.positions.diff(dim=1) == 1).all()]
        if ids is not None:
            alone.append((ids == ids[:, :1]).all())
        elif positions is not None:
            alone.append((positions.diff(dim=1) >= 0).all())
        for is_alone in alone:
            torch._assert_async(is_alone, f"attn_implementation='sagebwd': {_COMPILED_PACKING}")
        return None
    if ids is not None and mask.padding is not None:
        refuse("a batch of packed documents beside padding")
    found = mask.documents if ids is not None else None if positions is None else mask.documents_of(positions)
    return None if found is None else (found[0], found[0], found[1], found[1])


def _check_documents(mask: Mask, query: Tensor, is_causal: bool, kwargs: dict[str, object]) -> None:
    """Raises where a mask that is carried shows tokens of other packed documents, as `_packed_offsets` knows them.

    Transformers makes its mask by position_ids alone, and leaves documents out with a KV cache, also one to be filled.
    """
    _check_packed(kwargs)
    offsets, positions = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
    (batch, _, tokens, _), is_callers = query.shape, mask.visible == CALLERS
    if offsets is not None and is_callers and mask.shape[3] == tokens:  # other keys are of no document of the queries
        refuse("cu_seq_lens_q beside an attention_mask of four dimensions", "accepted: one of the two")
    if is_callers or query.device.type == "meta":
        return
    if offsets is not None:

        def documents() -> Tensor:
            places = torch.arange(batch * tokens, device=offsets.device, dtype=offsets.dtype)
            return torch.bucketize(places, offsets[1:], right=True).unflatten(0, (batch, tokens))

        joins = mask.joins(offsets, documents)
    else:
        if not is_causal or mask.padding is not None or positions is None or positions.shape[1:] != query.shape[2:3]:
            return
        if not is_tracing(query) and mask.documents_of(positions) is None:
            return
        joins = mask.joins(positions, lambda: documents_by(positions))
    if is_tracing(query):
        torch._assert_async(~joins, f"attn_implementation='sagebwd': {_LEFT_OUT}; {_LEFT_OUT_INSTEAD}")
    elif joins:
        refuse(f"{_LEFT_OUT} ({mask.visible})", _LEFT_OUT_INSTEAD)


def _check_packed(kwargs: dict[str, object]) -> None:
    """Raises ValueError and TypeError for offsets of packed documents that lack a part, or are none."""
    given = [name for name in _PACKED if kwargs.get(name) is not None]
    offsets = [name for name in given if name in _PACKED[:2]]
    if offsets and len(given) < len(_PACKED):
        missing = [name for name in _PACKED if name not in given]
        raise ValueError(
            f"{' and '.join(offsets)} without {', '.join(missing)}: packed documents need {', '.join(_PACKED)}, which "
            "DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes"
        )
    for name in offsets:
        if not isinstance(kwargs[name], Tensor):
            raise TypeError(f"{name}: expected an int32 tensor, got {type(kwargs[name]).__name__}")
    for name in _PACKED[2:] if offsets else ():
        if isinstance(kwargs[name], (str, float)):
            raise TypeError(f"{name}={kwargs[name]!r} must be an integer")


def _packed(
    query: Tensor, key: Tensor, value: Tensor, offsets_q: Tensor, offsets_k: Tensor, longest_q: int, longest_k: int,
    left: fusion.Left | None, shared: dict[str, object],
) -> Tensor:  # fmt: skip
    batch, _, tokens, _ = query.shape
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    offsets = {"cu_seqlens_q": offsets_q.to(query.device), "cu_seqlens_k": offsets_k.to(query.device)}
    lengths = {"max_seqlen_q": int(longest_q), "max_seqlen_k": int(longest_k)}
    attend = sage_attention_varlen if left is None else left.of_packed(batch).attend
    out = attend(*packed, **offsets, **lengths, **shared)
    return out.unflatten(0, (batch, tokens))
