"""`attn_implementation="sagebwd"` for Hugging Face Transformers.

    from sagebwd.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sagebwd")

Transformers hands an attention function (batch, heads, tokens, head_dim) tensors and wants (batch, tokens, heads,
head_dim) back. Two of its habits are silent traps, handled here: without a mask function registered under the same
name it drops padding and packing, and under BF16 autocast rotary embedding and norms leave q and k in FP32 beside a
BF16 v.

Settings live in the model's config and so survive saving: ``config.sagebwd = {"recipe": "token", "impl": None,
"layers": {"0": {"recipe": "full"}}}``, every key optional; ``layers`` overrides by layer index.

Padded and packed batches run as packed sequences, without the padding. Calls with fewer queries than keys and a causal
mask, which is decoding with a KV cache, go to torch's scaled_dot_product_attention: a warning says so once.

`add_qk_norm` gives a model that is to be pre-trained the norm of queries and keys that INT8 attention wants.
"""

from __future__ import annotations

import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, find_packed_sequence_indices, flash_attention_mask
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from sagebwd.attention import sage_attention, sage_attention_varlen

NAME = "sagebwd"
_SETTINGS = ("recipe", "impl")
_UNSUPPORTED = {
    "softcap": "soft-capped logits",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
}


def register() -> None:
    """Make ``attn_implementation="sagebwd"`` known to Transformers, with the mask function it needs."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)


def add_qk_norm(model: nn.Module) -> nn.Module:
    """Give every attention of a model an RMS norm of queries and keys: per head, with a gain, before rotary embedding.

    It is what Qwen3 has, under the same names, ``q_norm`` and ``k_norm``, and bounds the logits, which the SageBwd
    paper finds INT8 attention to need at large batches. For models that are still to be trained: it changes what a
    trained one computes. eps is the config's rms_norm_eps, or else 1e-6.

    The weights are saved with the others, but a plain ``from_pretrained`` has no place for them: it reports them as
    unexpected and leaves them out. To load a model that was saved, either

    - as the Qwen3 that a Llama with QK-norm is: ``Qwen3ForCausalLM.from_pretrained(folder)``,
    - through a class whose ``__init__(self, config)`` calls ``super().__init__(config)`` and ``add_qk_norm(self)``: it
      has a ``from_pretrained`` that knows them, or
    - by hand: build from the config, ``add_qk_norm(model)``, ``model.load_state_dict(...)``.

    Args:
        model: of Transformers, changed in place, before it is compiled or sharded. Its attentions are the modules with
            ``q_proj`` and ``k_proj``, both nn.Linear to (batch, tokens, heads * head_dim), and ``head_dim``; with more
            than one tower, give the one that is meant.

    Returns:
        The model.

    Raises:
        ValueError: it has a norm of queries and keys already; or a projection is not of whole heads.
        NotImplementedError: there are no such attentions (one fused projection of q, k and v, LoRA's layers).
    """
    attentions = {name: module for name, module in model.named_modules() if _projects(module)}
    if not attentions:
        raise NotImplementedError(
            f"add_qk_norm: {type(model).__name__} has no attention with head_dim and with q_proj and k_proj of type "
            "nn.Linear; use a model that has QK-norm of its own, such as Qwen3"
        )
    for name, attention_module in attentions.items():
        present = [child for child, _ in attention_module.named_children() if "norm" in child]
        if present:
            raise ValueError(f"add_qk_norm: {name} has a norm already: {', '.join(present)}")
        for projection in (attention_module.q_proj, attention_module.k_proj):
            if projection.out_features % attention_module.head_dim:
                raise ValueError(
                    f"add_qk_norm: {name} projects to {projection.out_features}, "
                    f"which is not a multiple of head_dim {attention_module.head_dim}"
                )
    # the model's own kind, which its _init_weights knows how to start: Gemma's gain is 1 + weight
    own = next((type(module) for module in model.modules() if type(module).__name__.endswith("RMSNorm")), Qwen3RMSNorm)
    for attention_module in attentions.values():
        head_dim = attention_module.head_dim
        eps = getattr(getattr(attention_module, "config", None), "rms_norm_eps", 1e-6)
        for name, projection in (("q_norm", attention_module.q_proj), ("k_norm", attention_module.k_proj)):
            with projection.weight.device:
                norm = own(head_dim, eps=eps).to(projection.weight.dtype)
            attention_module.add_module(name, norm)
            projection.register_forward_hook(partial(_normalise_heads, norm, head_dim))
    return model


def _projects(module: nn.Module) -> bool:
    projections = (getattr(module, "q_proj", None), getattr(module, "k_proj", None))
    return isinstance(getattr(module, "head_dim", None), int) and all(isinstance(x, nn.Linear) for x in projections)


def _normalise_heads(
    norm: nn.Module, head_dim: int, projection: nn.Module, inputs: tuple, projected: Tensor
) -> Tensor:
    return norm(projected.unflatten(-1, (-1, head_dim))).flatten(-2)


def settings(config: object, layer: int | None) -> dict[str, object]:
    """The recipe and impl of one layer, from ``config.sagebwd``.

    Raises ValueError for a key that is not one of recipe, impl and layers.
    """
    chosen = dict(getattr(config, NAME, None) or {})
    layers = chosen.pop("layers", None) or {}
    chosen |= layers.get(str(layer), {})
    unknown = sorted(set(chosen) - set(_SETTINGS))
    if unknown:
        raise ValueError(f"config.sagebwd: {unknown[0]!r} is not known; accepted: recipe, impl, layers")
    return {"recipe": chosen.get("recipe", "token"), "impl": chosen.get("impl")}


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
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention function that Transformers calls.

    Args: query (batch, heads, tokens, head_dim); key, value (batch, kv_heads, kv_tokens, head_dim); attention_mask,
    None or (batch, kv_tokens), nonzero where a token counts; sliding_window, in tokens, the current one included.

    Returns: (batch, tokens, heads, head_dim) in the dtype that the layer computes in, and None for the weights.

    Raises NotImplementedError for dropout, 4D masks, soft-capping, sinks and position biases.
    """
    _refuse_unsupported(dropout, attention_mask, kwargs)
    query, key, value = _one_dtype(module, query, key, value)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    tokens_q, tokens_k = query.shape[2], key.shape[2]
    shared = {
        "scale": scaling,
        "is_causal": is_causal,
        # a window of w tokens holds the query's own and w - 1 before it; the other side is open without a causal mask
        "window": None if sliding_window is None else (sliding_window - 1, -1 if is_causal else sliding_window - 1),
        **settings(getattr(module, "config", None), getattr(module, "layer_idx", None)),
    }
    if is_causal and tokens_q < tokens_k:
        return _decode(query, key, value, attention_mask, scaling, sliding_window), None
    if attention_mask is not None:
        return _padded(query, key, value, attention_mask, shared), None
    offsets = _packed_offsets(kwargs, tokens_q) if is_causal or "cu_seq_lens_q" in kwargs else None
    if offsets is not None:
        return _packed(query, key, value, *offsets, shared), None
    out = sage_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1], **shared)
    return out.transpose(1, 2).contiguous(), None


def _refuse_unsupported(dropout: float, attention_mask: Tensor | None, kwargs: dict[str, object]) -> None:
    if dropout:
        raise NotImplementedError(
            f"attention dropout {dropout} is not supported by attn_implementation='sagebwd'; "
            "set attention_dropout=0 in the model's config, or use 'sdpa'"
        )
    for name, meaning in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{name}: {meaning} is not supported by attn_implementation='sagebwd'; use 'sdpa' or 'eager'"
            )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise NotImplementedError(
            f"attention_mask of shape {tuple(attention_mask.shape)} is not supported by "
            "attn_implementation='sagebwd'; accepted: (batch, tokens). "
            "Give position_ids or cu_seq_lens for packed sequences, or use 'sdpa'"
        )
    if kwargs.get("output_attentions"):
        warnings.warn("attn_implementation='sagebwd' returns no attention weights; use 'eager' for them", stacklevel=4)


def _one_dtype(module: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype that the layer computes in: autocast's, or else that of the layer's weights."""
    dtypes = {tensor.dtype for tensor in tensors}
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    elif len(dtypes) == 1:
        return tensors
    else:
        dtype = next(weight.dtype for weight in module.parameters() if weight.is_floating_point())
    return tuple(tensor.to(dtype) for tensor in tensors)


def _decode(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, window: int | None
) -> Tensor:
    """Queries at the end of a longer run of keys, through torch's own kernel, in full precision."""
    warnings.warn(
        "attn_implementation='sagebwd': decoding with a KV cache runs on torch's scaled_dot_product_attention",
        stacklevel=4,
    )
    tokens_q, tokens_k = query.shape[2], key.shape[2]
    distance = torch.arange(tokens_k, device=key.device) - torch.arange(
        tokens_k - tokens_q, tokens_k, device=key.device
    ).unsqueeze(-1)
    visible = distance <= 0
    if window is not None:
        visible &= distance > -window
    if mask is not None:
        visible = visible & mask[:, None, None, -tokens_k:].bool()
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous()


def _padded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, shared: dict) -> Tensor:
    """A padded batch as packed sequences of its real tokens.

    Under a causal mask or a window, which mean self-attention, padding comes back as zeros. Otherwise the queries may
    be another sequence, even where the lengths are the same (cross-attention), and only keys are unpadded.
    """
    mask = mask.bool()
    batch, heads, tokens_q, head_dim = query.shape
    offsets_k = _offsets(mask.sum(1))
    itself = shared["is_causal"] or shared["window"] is not None
    rows = mask if itself else mask.new_ones(batch, tokens_q)
    offsets_q = _offsets(rows.sum(1))
    packed = [x.transpose(1, 2)[real] for x, real in ((query, rows), (key, mask), (value, mask))]
    out = sage_attention_varlen(*packed, offsets_q, offsets_k, tokens_q, key.shape[2], **shared)
    padded = out.new_zeros(batch, tokens_q, heads, head_dim)
    padded[rows] = out
    return padded


def _offsets(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _packed_offsets(kwargs: dict[str, object], tokens: int) -> tuple[Tensor, Tensor, int, int] | None:
    """cu_seqlens and longest lengths of a packed batch, as given or from position ids that start again; else None."""
    if kwargs.get("cu_seq_lens_q") is not None:
        return tuple(kwargs[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
    positions = kwargs.get("position_ids")
    if positions is None or positions.dim() != 2 or positions.shape[1] != tokens or torch.compiler.is_compiling():
        return None
    if find_packed_sequence_indices(positions) is None:
        return None
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions.diff(dim=1) != 1
    offsets = F.pad(starts.flatten().nonzero().flatten(), (0, 1), value=positions.numel()).to(torch.int32)
    longest = int(offsets.diff().max())
    return offsets, offsets, longest, longest


def _packed(
    query: Tensor, key: Tensor, value: Tensor, offsets_q: Tensor, offsets_k: Tensor, longest_q: int, longest_k: int,
    shared: dict,
) -> Tensor:  # fmt: skip
    batch, _, tokens, _ = query.shape
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    out = sage_attention_varlen(*packed, offsets_q, offsets_k, int(longest_q), int(longest_k), **shared)
    return out.unflatten(0, (batch, tokens))
