"""A model of Transformers whose sequences are divided among processes: its attentions are `ring_attention`.

The batch is what `context_parallel.shard` gives this process of ids, labels and position_ids, or what torch's
``context_parallel``, and Accelerate's by it, makes of them in place: the same tokens in the same order.
"""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sagebwd.extras import extra
from sagebwd.integrations.context_parallel import checked_ring_attention, place, shard
from sagebwd.integrations.transformers_masks import Mask
from sagebwd.integrations.transformers_settings import NAME

with extra("transformers"):
    from transformers import PreTrainedModel
    from transformers.utils.import_utils import is_tracing

# A module's attribute, so that copies of a model are shared among the same processes.
_ATTRIBUTE = "_sagebwd_sharing"


class Sharing:
    """The processes that share a model's sequences; its copies are itself, as processes are not copied."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, _: object) -> Sharing:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "share_sequences: a model whose sequences are divided among processes cannot be pickled, as its process "
            "group cannot; save its state_dict (save_pretrained does), or call keep_sequences(model) first"
        )


def share_sequences(model: PreTrainedModel, group: dist.ProcessGroup | None = None) -> None:
    """From now on a model's sequences are divided among the processes of a group, all of them by default.

    Every forward of the model then is one of all these processes, on each with its tokens of the same sequences. So is
    one of a copy (``copy.deepcopy``, ``AveragedModel``). Under another ``attn_implementation``, which would attend to
    this process's tokens alone, a forward raises NotImplementedError.

    Raises ValueError for a model that is not under ``attn_implementation="sagebwd"``.
    """
    given = _implementation_of(model)
    if given != NAME:
        raise ValueError(
            f"share_sequences: {type(model).__name__} has attn_implementation={given!r}; accepted: {NAME!r}"
        )
    place(group)  # raises for what is no group of this process
    keep_sequences(model)
    sharing = Sharing(group)
    for module in model.modules():
        setattr(module, _ATTRIBUTE, sharing)
        if _implementation_of(module) == NAME:
            module.register_forward_pre_hook(_check_implementation)


def keep_sequences(model: PreTrainedModel) -> None:
    """Take back `share_sequences`: the model's sequences are whole."""
    for module in model.modules():
        module.__dict__.pop(_ATTRIBUTE, None)
        hooks = module._forward_pre_hooks  # found again in a copy of a model, whose handles nobody has
        for key in [key for key, hook in hooks.items() if hook is _check_implementation]:
            del hooks[key]


def sharing_of(module: nn.Module) -> Sharing | None:
    """What an attention's sequences are divided among; None where they are whole."""
    return getattr(module, _ATTRIBUTE, None)


def _implementation_of(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _check_implementation(module: nn.Module, _: object) -> None:
    """Raises where a module of a shared model, which ran sagebwd's attention, has been given another since."""
    given = _implementation_of(module)
    if given != NAME:
        raise NotImplementedError(
            f"{type(module).__name__}: attn_implementation={given!r} is not supported where share_sequences divides a "
            "model's sequences among processes, since it would attend to this process's tokens alone; set "
            f"{NAME!r} again, or call keep_sequences(model) for whole ones"
        )


def shared_attention(
    sharing: Sharing, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, kwargs: dict[str, object],
    options: dict[str, object],
) -> Tensor:  # fmt: skip
    """Attention of this process's queries to the keys of all.

    Args: query (batch, heads, tokens, head_dim), key and value, as a layer has them; mask, the known one; kwargs, what
    the model handed its attention beside; options, scale, recipe and impl.

    Returns (batch, tokens, heads, value's head_dim). Raises NotImplementedError for what a ring does not compute, and
    ValueError for position_ids of other tokens than this process's; on all processes where one of them does.
    """
    if is_tracing(query):
        _refuse("torch.compile")
    reason = _reason_to_refuse(query, key, mask, kwargs)
    is_causal = reason is None and mask.visible.upper == 0
    positions = kwargs.get("position_ids")

    def check() -> None:
        if reason is not None:
            _refuse(reason)
        if is_causal and (positions is not None or mask.visible.documents is not None):
            _check_places(sharing.group, positions, query)

    options = {"enable_gqa": query.shape[1] != key.shape[1], **options}
    out = checked_ring_attention(query, key, value, is_causal, options, sharing.group, check)
    return out.transpose(1, 2).contiguous()


def _refuse(reason: str) -> NoReturn:
    raise NotImplementedError(
        f"{reason} is not supported where share_sequences divides a model's sequences among processes; call "
        "keep_sequences(model) for whole ones"
    )


def _reason_to_refuse(query: Tensor, key: Tensor, mask: Mask | None, kwargs: dict[str, object]) -> str | None:
    if mask is None or mask.continues:
        return "a KV cache"
    if query.shape[2] != key.shape[2]:
        return f"attention of {query.shape[2]} tokens to {key.shape[2]} others"
    if isinstance(mask.visible, str):
        return f"a mask that is carried ({mask.visible})"
    if mask.padding is not None:
        return "padding"
    if mask.visible.lower is not None or mask.visible.upper not in (None, 0):
        return "a sliding window"
    if kwargs.get("cu_seq_lens_q") is not None:
        return "cu_seq_lens_q, of packed documents,"
    if kwargs.get("s_aux") is not None:
        return "an attention with sinks"
    return None


def _check_places(group: dist.ProcessGroup | None, positions: Tensor | None, query: Tensor) -> None:
    """Raises unless position_ids are those of this process's tokens, as `shard` divides them.

    Every attention reads them, and waits for its GPU to do so: the tensor of the one before may be written anew.
    """
    rank, count = place(group)
    tokens = query.shape[2] * count
    expected = shard(torch.arange(tokens, device=query.device), 0, group)
    if positions is None or positions.shape[1:] != expected.shape or not bool((positions == expected).all()):
        raise ValueError(
            f"position_ids: not those of the tokens that process {rank} of {count} has of {tokens}; give "
            "shard(torch.arange(tokens), 0, group)[None], or divide them with the batch. Packed documents are not "
            "supported"
        )
