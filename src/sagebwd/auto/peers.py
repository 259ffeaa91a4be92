"""FlashAttention-4 and FlashAttention-3 where they are installed: what they take, and their calls.

A peer is imported when "auto" first asks whether it may run a call. Signatures are those of flash-attn-4 4.0.0b36, and
of FlashAttention's ``hopper`` and the ``tokenspeed-fa3`` 3.0.0 that is built from it.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from sagebwd.auto.contenders import FA3, FA4, NAMES, PEERS
from sagebwd.auto.model import Size
from sagebwd.derivatives import once_differentiable
from sagebwd.masks.kinds import CAUSAL, FULL, PACKED, WINDOW

_MODULES = {FA4: "flash_attn.cute", FA3: "flash_attn_interface"}
_DTYPES = torch.bfloat16, torch.float16
# FlashAttention-4's dQ is wrong by its own size at 72, 80 and 112 (`peer_gates` of benchmarks/results/attention_*).
_RIGHT_GRADIENTS = 32
_NO_BACKWARD = "FLASHATTENTION_DISABLE_BACKWARD"
# Programs that CUDA launches along a grid's second and third dimension, where peers have heads and sequences.
_MOST_HEADS = 65535


@cache
def module_of(peer: str) -> ModuleType | None:
    """A peer's module; None where it is not installed or, with a warning, where it cannot be imported."""
    name = _MODULES[peer]
    if not _is_there(name):
        return None
    try:
        module = importlib.import_module(name)
        for function in ("flash_attn_func", "flash_attn_varlen_func"):
            getattr(module, function)
    except Exception as error:  # whatever a package does when it is imported
        warnings.warn(
            f"sagebwd: {NAMES[peer]} is installed and does not import, so recipe='auto' does without it: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )
        return None
    return module


def _is_there(name: str) -> bool:
    """Whether there is a module of this name; not even its package is imported, which may be another's."""
    if name in sys.modules:
        return sys.modules[name] is not None
    package, _, module = name.partition(".")
    try:
        spec = find_spec(package)
    except ValueError:  # of a stand-in without a spec
        return False
    if spec is None or not module:
        return spec is not None
    return PathFinder.find_spec(name, spec.submodule_search_locations or []) is not None


def installed() -> tuple[str, ...]:
    """The peers that can be imported."""
    return tuple(peer for peer in PEERS if module_of(peer) is not None)


def takes(peer: str, kind: str, head_dim: int, dtype: torch.dtype, training: bool) -> bool:
    """Whether a peer computes calls of a kind of mask right, of those sizes that `fits` says."""
    if kind not in (FULL, CAUSAL, WINDOW, PACKED) or dtype not in _DTYPES:
        return False
    return not (training and (lacks_backward(peer) or (peer == FA4 and head_dim % _RIGHT_GRADIENTS)))


def lacks_backward(peer: str) -> bool:
    """Whether a peer is installed without its backward, as FlashAttention-3 can be built, so that a gradient raises.

    Its build says so in ``flash_attn_config``; one that has no such module counts as without.
    """
    if peer != FA3 or module_of(peer) is None:
        return False
    try:
        return bool(importlib.import_module("flash_attn_config").CONFIG["build_flags"][_NO_BACKWARD])
    except (ImportError, AttributeError, KeyError, TypeError):
        return True


def fits(kind: str, size: Size) -> bool:
    """Whether a mask is a peer's own: theirs are aligned bottom right, dense ones of ours top left.

    And whether it launches so many heads: FlashAttention-4's backward raises at more than a grid's sides have.
    """
    if size.heads > _MOST_HEADS:
        return False
    if kind == WINDOW:
        return size.queries == size.keys
    return kind != CAUSAL or size.queries <= size.keys  # of more keys than queries the rest is cut off


def dense(
    peer: str, is_causal: bool, window: tuple[int, int], keys: int | None, scale: float
) -> Callable[..., Tensor]:
    """Attention of q (B, Hq, N, D), k (B, Hkv, M, D) and v (B, Hkv, M, Dv), of the first ``keys`` of M.

    window: (left, right) in tokens, -1 for no limit; where it has one, M is N. What a plan is given beside is None.
    """
    function, options = module_of(peer).flash_attn_func, _options(peer, is_causal, window, scale)

    def run(query: Tensor, key: Tensor, value: Tensor, *_: None) -> Tensor:
        if keys is not None:
            key, value = key[:, :, :keys], value[:, :, :keys]
        out = function(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **options)
        return _once_differentiable(out, query, key, value).transpose(1, 2)

    return run


def packed(
    peer: str, longest: tuple[int, int], is_causal: bool, window: tuple[int, int], scale: float
) -> Callable[..., Tensor]:
    """Attention of packed sequences, of q, k, v, None and offsets, as of `sagebwd.sage_attention_varlen`."""
    function = module_of(peer).flash_attn_varlen_func
    options = _options(peer, is_causal, window, scale) | {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}

    def run(query: Tensor, key: Tensor, value: Tensor, _: None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
        out = function(query, key, value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)
        return _once_differentiable(out, query, key, value)

    return run


def _options(peer: str, is_causal: bool, window: tuple[int, int], scale: float) -> dict[str, object]:
    unlimited = None if peer == FA4 else -1
    sides = tuple(unlimited if side < 0 else side for side in window)
    return {"softmax_scale": scale, "causal": is_causal, "window_size": sides}


def _once_differentiable(out: Tensor | tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
    """A peer's output, whose second derivative, which peers would leave out unsaid, raises."""
    out = out[0] if isinstance(out, tuple) else out
    if out.grad_fn is None:
        return out

    def hook(
        gradients: tuple[Tensor | None, ...], of_outputs: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...] | None:  # fmt: skip
        if not torch.is_grad_enabled():
            return None
        # of inputs, which the peer keeps too: by way of out there would be a circle
        return tuple(once_differentiable((*inputs, *of_outputs), gradients))

    out.grad_fn.register_hook(hook)
    return out
