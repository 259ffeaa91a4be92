"""A call's specification, which plans are looked up by: shapes, strides, dtypes, devices, alignment and settings.

Never a value, never the identity of a user's tensor.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sagebwd import checks, switches
from sagebwd.auto import agreement
from sagebwd.auto import choice as auto_choice
from sagebwd.cache import TAKEN
from sagebwd.kernels.masks.traced_block_mask import TracedBlockMask
from sagebwd.masks.mask import Mask
from sagebwd.planning import flops
from sagebwd.recipe import AUTO, Recipe

PLAIN = (Tensor, torch.nn.Parameter)
# What every call asks torch, without the way there.
STRIDED = torch.strided
_is_traced, _is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_is_deterministic = torch._C._get_deterministic_algorithms
_count_of_modes, _tracing_state = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_transforms = torch._C._functorch.peek_interpreter_stack


def kind_of(
    tensors: tuple[Tensor | None, ...], mask: Mask | TracedBlockMask | None, recipe: str | Recipe,
    window: tuple[int, int] | None, settings: tuple[Hashable, ...],
) -> Hashable | None:  # fmt: skip
    """A call's specification but for how q, k and v lie in memory, of which torch's own attention knows.

    None where it must take the operators: modes, subclasses, transforms, tracing; and for q, k and v that do not go
    together, which those refuse. Every call pays for it: what most calls lack is looked for by one comparison.

    Args: tensors, q, k, v, attn_mask, cu_seqlens_q, cu_seqlens_k and sinks, then any others; mask, of a block_mask;
    settings, all else that a call is given.
    """
    if _is_traced():
        return None
    if _count_of_modes():
        flops.register()  # for a mode that counts them
        return None
    q, k, v, attn_mask, cu_seqlens_q, _, sinks = tensors[:7]
    if (
        _tracing_state() is not None
        or _transforms() is not None
        or forward_ad._current_level >= 0
        or checks.is_divided()
        or not (q.__class__ in PLAIN and k.__class__ in PLAIN and v.__class__ in PLAIN)
        or not (q.layout is k.layout is v.layout is STRIDED)
        or (recipe.__class__ is not str and recipe.__class__ is not Recipe)
        or (window is not None and window.__class__ is not tuple)
    ):
        return None
    dtype, device, grad = q.dtype, q.device, _is_grad_enabled()
    if not (k.dtype is v.dtype is dtype and k.device == v.device == device):
        return None
    rest = [grad and (q.is_inference() or k.is_inference() or v.is_inference())]  # of which copies are saved
    if not (attn_mask is cu_seqlens_q is sinks is None and len(tensors) == 7):
        for x in tensors[3:]:
            if x is None:
                rest.append(None)
            elif (
                x.__class__ not in PLAIN or x.layout is not STRIDED or x.is_nested or x.is_neg()
                or x._is_zerotensor()
            ):  # fmt: skip
                return None
            else:
                rest += x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % TAKEN, grad and x.is_inference()
                rest.append(grad and x.requires_grad)  # refused of some, and of others one of training
    if window is not None:
        rest += map(type, window)
    if mask.__class__ is TracedBlockMask:
        rest += TracedBlockMask, mask.shape, mask.lists.indices.device
    elif mask is not None:
        elements, tiles, blocks, keys = mask.tensors
        first = elements if tiles is None else tiles
        rest += tiles is None, mask.queries, first.shape, first.stride(), elements.dtype, blocks.shape, keys.shape
        rest += elements.device, first.device, blocks.device, keys.device, first.dtype, blocks.dtype, keys.dtype
    if recipe.__class__ is str and recipe == AUTO:  # who runs a call depends on whether it trains
        rest += grad and (q.requires_grad or k.requires_grad or v.requires_grad), _is_deterministic()
        if q.is_cuda and agreement.due() is not None:
            auto_choice.check_agreement(device)
    on = switches.current
    try:
        return (
            recipe, window, settings, *map(type, settings), on.disabled, on.backward_16bit, on.deterministic, q.shape,
            k.shape, v.shape, dtype, device, *rest,
        )  # fmt: skip
    except RuntimeError:  # a nested tensor has no shape
        return None


def laid_out(kind: Hashable | None, tensors: tuple[Tensor | None, ...]) -> Hashable | None:
    """A kind of call with how q, k and v lie: its specification; None where it must take the operators.

    Those know the shapes of tensors on the device meta, and what signs and zeros that torch keeps apart stand for.
    """
    q, k, v = tensors[:3]
    if kind is None or q.is_meta:
        return None
    spec = [kind]
    for x in (q, k, v):
        if x.is_neg() or x._is_zerotensor():
            return None
        spec += x.stride(), x.data_ptr() % TAKEN
    return tuple(spec)
