"""Checks of the public functions' arguments, each of which raises an error that names the argument and the way out."""

from __future__ import annotations

import math
import numbers as kinds
import operator
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from sagebwd.kernels import capabilities
from sagebwd.masks.band import FARTHEST
from sagebwd.tracing import assume_constant

REFERENCE_DTYPES = tuple(getattr(torch, name) for name in capabilities.REFERENCE_DTYPES)
_SDPA = "torch.nn.functional.scaled_dot_product_attention"
_INSTEAD = f"leave recipe and impl out, or use {_SDPA} for this layer"
BY_SEQUENCE = f"use {_SDPA} for each sequence"
_ITS_OWN = torch._C._nn.scaled_dot_product_attention
_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"
# Steps of `sagebwd.integrations.context_parallel.ring_attention` that are under way, of each thread its own.
_rings = threading.local()


@contextmanager
def in_ring() -> Iterator[None]:
    """Inside, calls are steps of a ring over the processes that share a sequence."""
    before = getattr(_rings, "count", 0)
    _rings.count = before + 1
    try:
        yield
    finally:
        _rings.count = before


def is_divided() -> bool:
    """Whether torch's context_parallel is on, and a call, which is no step of a ring, would see a part of its tokens.

    torch then replaces its own function, which alone knows of the other processes. A trace reads that function, so
    that a call which was compiled before is traced again.
    """
    return F.scaled_dot_product_attention is not _ITS_OWN and _is_of_context_parallel()


@assume_constant
def _is_of_context_parallel() -> bool:
    if _CONTEXT_PARALLEL not in sys.modules or getattr(_rings, "count", 0):
        return False
    replaced = getattr(sys.modules[_CONTEXT_PARALLEL], "_replaced_functions", ())
    return F.scaled_dot_product_attention in replaced


def refuse_divided() -> None:
    """Raises NotImplementedError where `is_divided`."""
    if is_divided():
        raise NotImplementedError(
            "torch.distributed.tensor.experimental.context_parallel divides the sequence among processes and replaces "
            f"{_SDPA} alone: sagebwd would attend to this process's tokens only; use "
            "sagebwd.integrations.context_parallel.ring_attention, or for a model of Transformers "
            "sagebwd.integrations.transformers_sharing.share_sequences"
        )


def tensor(name: str, x: object) -> None:
    """Raises TypeError for what is no tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")


def dimensions(count: int, what: str = "", **tensors: Tensor) -> None:
    """Raises TypeError for what is no tensor, and ValueError for one of another number of dimensions."""
    for name, x in tensors.items():
        tensor(name, x)
        if x.dim() != count:
            raise ValueError(f"{name}: expected {count} dimensions{what}, got shape {tuple(x.shape)}")


def same_device(name: str, x: Tensor, device: torch.device, whose: str = "query's", instead: str = "") -> None:
    """Raises ValueError for a tensor on another device than ``whose``; instead: the way out."""
    if x.device != device:
        raise ValueError(f"{name}: device {x.device} differs from {whose} {device}{instead}")


def are_tensors(*given: object) -> bool:
    """Whether all are tensors."""
    return all(isinstance(x, Tensor) for x in given)


def options(impl: str | None, **flags: bool) -> None:
    """Raises TypeError, naming the argument, for an impl that is no name and a flag that is not True or False."""
    if impl is not None and not isinstance(impl, str):
        raise TypeError(f"impl={impl!r} must be None or the name of an implementation")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name}={flag!r} must be True or False")


def numbers(is_causal: bool, scale: float, window: tuple[int, int] | None) -> tuple[float, tuple[int, int]]:
    """The scale as a float, and the window as two integers, at most `FARTHEST`."""
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal={is_causal!r} must be True or False")
    if not is_number(scale):
        raise TypeError(f"scale={scale!r} must be a number or None")
    if not is_finite(scale):
        raise ValueError(f"scale={scale} must be finite")
    return float(scale), _window(window)


def _window(window: tuple[int, int] | None) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        size = index(window)
        instead = "" if size is None else f"; a query's last {size} tokens, its own among them, are ({size - 1}, 0)"
        raise ValueError(f"window={window!r} must be None or (left, right) in tokens, -1 for no limit{instead}")
    left, right = map(index, window)
    if left is None or right is None or left < -1 or right < -1:
        raise ValueError(f"window={window!r} must hold two integers, each at least 0, or -1 for no limit")
    return min(left, FARTHEST), min(right, FARTHEST)


def is_number(x: object) -> bool:
    """Whether x is a real number, of numpy too, or a symbol of a trace."""
    return isinstance(x, (kinds.Real, torch.SymFloat, torch.SymInt)) and not isinstance(x, bool)


def is_finite(x: float) -> bool:
    """Whether a number is one of a float, which NaN and integers of over 300 digits are not."""
    try:
        return abs(float(x)) < math.inf  # math.isfinite cannot be traced
    except OverflowError:
        return False


def index(x: object) -> int | None:
    """x as an int, where it is an integer, of numpy too; a symbol of a trace as it is. None for what is none."""
    if isinstance(x, (int, torch.SymInt)):
        return None if isinstance(x, bool) else x
    try:
        return None if isinstance(x, Tensor) else operator.index(x)
    except TypeError:
        return None


def kind(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> None:
    """Raises for what is no plain tensor, and for transforms that the operator has no rules for."""
    given = {"query": query, "key": key, "value": value} | ({} if sinks is None else {"sinks": sinks})
    for name, x in given.items():
        tensor(name, x)
        if x.is_nested:
            raise NotImplementedError(
                f"{name}: nested tensors are not supported; use sage_attention_varlen with values() and offsets(), or "
                f"{_SDPA}"
            )
        strided(name, x)
    alike(query=query, key=key, value=value)
    refuse_divided()
    if torch.compiler.is_compiling():
        return
    if torch.jit.is_tracing():
        raise NotImplementedError(f"torch.jit.trace is not supported; use torch.compile or torch.export, or {_SDPA}")
    refuse_forward_mode(given.items())
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in given.values())
    if transforms and (differentiated or any(x.key() == torch._C._functorch.TransformType.Grad for x in transforms)):
        refuse_transforms()


def refuse_transforms() -> NoReturn:
    """Raises what gradients by transforms are refused with."""
    raise NotImplementedError(
        f"gradients of torch.func (grad, vjp, jacrev) and under vmap are not supported; use backward, or {_SDPA}"
    )


def refuse_forward_mode(given: Iterable[tuple[str, Tensor | None]]) -> None:
    """Raises where a tensor of such a name has a tangent, which the operators would drop without a word."""
    if forward_ad._current_level < 0:
        return
    for name, tensor in given:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{name}: forward-mode differentiation (torch.func.jvp, forward_ad) is not supported; use backward, "
                f"or {_SDPA}"
            )


def refuse_distributed(**given: Tensor | None) -> None:
    """Raises NotImplementedError for a DTensor, which the operators do not take (`sagebwd.dtensor`)."""
    module = sys.modules.get("torch.distributed.tensor")  # which takes long to import; who has a DTensor has done so
    if module is None or torch.compiler.is_compiling():
        return
    for name, tensor in given.items():
        if isinstance(tensor, module.DTensor):
            raise NotImplementedError(
                f"{name}: a DTensor is not supported here; accepted: query, key and value with equal placements, of "
                "batch (Shard(0)) or heads (Shard(1)) in equal parts, an attn_mask of size 1 there or divided by "
                "batch alike, and sinks placed like heads. Where each process can attend to its part of others: from "
                "torch.distributed.tensor.experimental import local_map; local_map(sage_attention, "
                "list(query.placements), (query.placements, key.placements, value.placements))(query, key, value), or "
                f"pass {name}.to_local(); where tokens are divided, use "
                "sagebwd.integrations.context_parallel.ring_attention"
            )


def alike(**given: object) -> None:
    """Raises TypeError for a tensor beside a DTensor, and the reverse, of which torch's own error names no argument.

    Not inside torch's ``implicit_replication``, which takes each tensor for one that all processes have.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or torch.compiler.is_compiling():
        return
    if getattr(module.DTensor._op_dispatcher, "_allow_implicit_replication", False):
        return
    first, *others = [(name, isinstance(x, module.DTensor)) for name, x in given.items() if isinstance(x, Tensor)]
    for name, distributed in others:
        if distributed and not first[1]:
            raise TypeError(f"{name}: a DTensor beside {first[0]}, which is none; give {name}.full_tensor()")
        if not distributed and first[1]:
            mesh = f"{first[0]}.device_mesh"
            raise TypeError(
                f"{name}: a plain tensor beside {first[0]}, a DTensor; give distribute_tensor({name}, {mesh}, "
                f"[Replicate()] * {mesh}.ndim), both of torch.distributed.tensor, or placed otherwise"
            )


def strided(name: str, tensor: Tensor) -> None:
    """Raises NotImplementedError for a tensor without strides, as sparse and nested ones are."""
    if tensor.is_nested:
        raise NotImplementedError(f"{name}: nested tensors are not supported")
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"{name}: layout {tensor.layout} is not supported; accepted: torch.strided, as {name}.to_dense() gives"
        )


def shapes(query: Tensor, key: Tensor, value: Tensor, dims: int, layout: str) -> None:
    """Raises unless dimensions, dtypes, devices and sizes go together; layout: what the dimensions are."""
    dimensions(dims, f" {layout}", query=query, key=key, value=value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype not in REFERENCE_DTYPES:
            raise TypeError(
                f"{name}: dtype {tensor.dtype} is not supported; accepted: {', '.join(capabilities.REFERENCE_DTYPES)}"
            )
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name}: dtype {tensor.dtype} differs from query's {query.dtype}; they must be equal")
        same_device(name, tensor, query.device)
        if tensor.shape[-1] == 0:
            _refuse_head_dim(name, tensor)
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key: head_dim {key.shape[-1]} differs from query's {query.shape[-1]}; they must be equal")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"value: shape {tuple(value.shape)} differs from key's {tuple(key.shape)}; they must be equal"
        )


def _refuse_head_dim(name: str, tensor: Tensor, instead: str = _INSTEAD) -> None:
    raise ValueError(
        f"{name}: head_dim {tensor.shape[-1]} is not supported; accepted: 1 to {capabilities.MAX_HEAD_DIM}; {instead}"
    )


def only_torch(query: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float) -> str | None:
    """What of a call torch's own attention alone computes, or None.

    Raises for a dropout_p that is no probability.
    """
    if not is_number(dropout_p):
        raise TypeError(f"dropout_p={dropout_p!r} must be a number")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p={dropout_p} must be at least 0 and at most 1")
    for tensor in (query, value):
        if tensor.shape[-1] > capabilities.MAX_HEAD_DIM:
            return f"head_dim {tensor.shape[-1]}, over {capabilities.MAX_HEAD_DIM}"
    if dropout_p != 0:
        return "dropout_p"
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return "the gradient of an attn_mask"
    return None


def refuse_only_torch(
    query: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, instead: str = _INSTEAD
) -> None:
    """Raises where `only_torch` names something: of calls that torch's own attention is not to run, or cannot."""
    for name, tensor in (("query", query), ("value", value)):
        if tensor.shape[-1] > capabilities.MAX_HEAD_DIM:
            _refuse_head_dim(name, tensor, instead)
    if dropout_p != 0:
        raise NotImplementedError(
            f"dropout_p={dropout_p} is not supported, only 0: each kernel would draw the same random numbers again; "
            f"apply dropout to the output, {instead}"
        )
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "attn_mask: gradients of an additive mask are not supported; pass attn_mask.detach() if it needs none, "
            f"{instead}"
        )


def heads(heads: int, kv_heads: int, enable_gqa: bool) -> None:
    """Raises ValueError unless query heads share key heads evenly, and are allowed to."""
    if heads == kv_heads:
        return
    if not enable_gqa:
        raise ValueError(f"key: {kv_heads} heads for query's {heads}; pass enable_gqa=True to share key heads")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"key: {kv_heads} heads do not divide query's {heads}")


def sinks(given: Tensor | None, query: Tensor) -> None:
    """Raises unless sinks are None or one number a query head; query, whose heads are its second dimension."""
    if given is None:
        return
    if not given.is_floating_point():
        raise TypeError(f"sinks: dtype {given.dtype} is not supported; accepted: floating-point dtypes")
    if tuple(given.shape) != (query.shape[1],):
        raise ValueError(
            f"sinks: expected shape ({query.shape[1]},), one logit a query head, got {tuple(given.shape)}"
        )
    same_device("sinks", given, query.device)


def refuse_beside(only_torch: str, **given: object) -> None:
    """Raises for what a call that torch's own attention alone computes is given and torch lacks; None and False are
    not given."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"{name}: not supported beside {only_torch}, which torch's own attention alone takes, without {name}; "
                "leave one of the two out"
            )


def packing(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, longest: tuple[int, int], device: torch.device
) -> tuple[int, int]:
    """The longest lengths; raises unless they and the offsets of packed sequences are what they should be.

    The values of offsets are not read.
    """
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_offsets(name, offsets, device)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k name {cu_seqlens_q.shape[0] - 1} and {cu_seqlens_k.shape[0] - 1} "
            "sequences; they must name as many"
        )
    return _longest("max_seqlen_q", longest[0]), _longest("max_seqlen_k", longest[1])


def _longest(name: str, given: object) -> int:
    tokens = index(given)
    if tokens is not None and torch.compiler.is_compiling():
        torch._check(tokens >= 0)  # of a length that was read in the graph nothing else is known
    elif tokens is None or tokens < 0:
        instead = f"; pass {name}.item(), which waits for the device" if isinstance(given, Tensor) else ""
        raise ValueError(f"{name}={given!r} must be an integer, at least 0{instead}")
    return tokens


def _check_offsets(name: str, offsets: Tensor, device: torch.device) -> None:
    if not isinstance(offsets, Tensor):
        raise TypeError(
            f"{name}: expected an int32 tensor, got {type(offsets).__name__}; pass torch.tensor({name}, "
            "dtype=torch.int32, device=query.device)"
        )
    strided(name, offsets)
    if offsets.dtype != torch.int32 or offsets.dim() != 1 or offsets.shape[0] < 2:
        instead = "" if offsets.dtype == torch.int32 else f"; pass {name}.int()"
        raise ValueError(
            f"{name}: expected int32 of shape (sequences + 1,), one sequence at least, got {offsets.dtype} of shape "
            f"{tuple(offsets.shape)}{instead}"
        )
    if not offsets.is_contiguous():
        raise ValueError(f"{name}: expected offsets side by side, got stride {offsets.stride(0)}; pass .contiguous()")
    same_device(name, offsets, device, instead=f"; pass {name}.to(query.device)")


def packing_values(cu_seqlens: Tensor, name: str, total: int, max_seqlen: int) -> None:
    """Raises ValueError unless the offsets split ``total`` tokens into sequences of at most ``max_seqlen``."""
    lengths = cu_seqlens.diff()
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0 or last != total or bool((lengths < 0).any()):
        raise ValueError(
            f"{name} must rise from 0 to the number of packed tokens ({total}); it runs from {first} to {last}"
            + (" and falls in between" if bool((lengths < 0).any()) else "")
        )
    if int(lengths.max()) > max_seqlen:
        suffix = name.removeprefix("cu_seqlens_")
        raise ValueError(f"max_seqlen_{suffix}={max_seqlen} is less than the longest sequence, {int(lengths.max())}")
