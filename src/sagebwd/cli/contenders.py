"""Each contender's call of attention in full precision that is here, for timings: as "auto" would make it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagebwd.auto import peers, torch_attention
from sagebwd.auto.contenders import PEERS, TORCH
from sagebwd.auto.model import Size
from sagebwd.auto.torch_attention import Way
from sagebwd.masks.kinds import CAUSAL, PACKED, WINDOW

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
UNLIMITED = -1, -1


def dense(
    kind: str, tensors: list[Tensor], mask: Tensor | None, window: tuple[int, int] = UNLIMITED, *, training: bool
) -> dict[str, Attention]:
    """Torch's function with what it picks (`TORCH`), with each backend that takes the call, and peers.

    mask: as torch gets it, a window's too, without which torch has none; window: (left, right) of `WINDOW`, as peers
    get it.
    """
    q, k, _ = tensors
    has_torch = kind != WINDOW or mask is not None
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    theirs = partial(F.scaled_dot_product_attention, attn_mask=mask, is_causal=kind == CAUSAL, **grouped)
    found: dict[str, Attention] = {TORCH: theirs} if has_torch else {}
    leaves = [x.detach().requires_grad_(training) for x in tensors]
    for name, backend in torch_attention.BACKENDS.items() if q.is_cuda and has_torch else ():
        if takes(TORCH, partial(by_backend, backend, theirs, *leaves)):
            found[name] = partial(torch_attention.preferring, int(backend), theirs)
    size = Size(q.shape[2], k.shape[2], q.shape[0] * q.shape[1], k.shape[0] * k.shape[1])
    is_causal = kind == CAUSAL or (kind == WINDOW and window[1] == 0)
    keys = q.shape[2] if kind == CAUSAL and q.shape[2] < k.shape[2] else None
    for peer in _asked(kind, q, training):
        if peers.fits(kind, size):
            found[peer] = peers.dense(peer, is_causal, window, keys, q.shape[-1] ** -0.5)
    return found


def packed(
    tensors: list[Tensor], offsets: Tensor, longest: int, window: tuple[int, int] = UNLIMITED, *, training: bool
) -> dict[str, Attention]:
    """Causal attention of packed sequences: torch's function on a GPU (`TORCH`), and peers."""
    q, k, v = tensors
    scale, found = q.shape[-1] ** -0.5, {}
    way = Way(PACKED, is_causal=True, longest=(longest, longest), window=window)
    if q.is_cuda and torch_attention.takes_packed(q.shape[-1], v.shape[-1], q.shape[1] != k.shape[1]):
        found[TORCH] = lambda *tensors: torch_attention.run(way, scale, *tensors, None, offsets, offsets)
    for peer in _asked(PACKED, q, training):
        run = peers.packed(peer, (longest, longest), True, window, scale)
        found[peer] = lambda *tensors, run=run: run(*tensors, None, offsets, offsets)
    return found


def _asked(kind: str, q: Tensor, training: bool) -> list[str]:
    """Peers that are installed and right."""
    return [peer for peer in peers.installed() if peers.takes(peer, kind, q.shape[-1], q.dtype, training)]


def by_backend(backend: SDPBackend, attention: Attention, *tensors: Tensor) -> Tensor:
    """What an attention of torch's gives by one of its backends alone."""
    with sdpa_kernel(backend):
        return attention(*tensors)


def picked(theirs: partial, leaves: list[Tensor]) -> str:
    """The backend that torch's own function, `TORCH` of `dense`, takes for its tensors, as torch names it."""
    options = {name: value for name, value in theirs.keywords.items() if value is not None}
    return SDPBackend(torch._fused_sdp_choice(*leaves, **options)).name


def takes(name: str, run: Callable[[], object]) -> bool:
    """Whether an attention takes the call, with the memory that there is; ours says so by these errors alone."""
    # a compiler of another project raises what it likes
    refusals: tuple[type[Exception], ...] = (Exception,) if name in PEERS else (RuntimeError, ValueError)
    if name == "ours":
        refusals = NotImplementedError, torch.OutOfMemoryError
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why torch's backends refuse a call, a warning a reason
            run()
    except refusals:
        return False
    return True
