"""A call on kernels: its tensors where they can read them, its launches replayed where an earlier call was alike."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sagebwd.call import Call, Saved
from sagebwd.kernels.alignment import aligned_rows, contiguous
from sagebwd.kernels.portable import lists
from sagebwd.kernels.replay import recorded, repeat

__all__ = ["backward", "forward", "recorded"]


def forward(kernels: Callable[..., Saved], call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
    """What ``kernels(call, q, k, v)`` gives."""
    call = call._replace(key_mask=contiguous(call.key_mask))
    if call.mask is not None:  # which the portable kernels alone run
        call = call._replace(lists=lists.of_forward(call))
    return Saved(*repeat(kernels, call, aligned_rows(q), aligned_rows(k), aligned_rows(v)))


def backward(
    kernels: Callable[..., tuple[Tensor, Tensor, Tensor]],
    call: Call,
    saved: Saved,
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``kernels(call, saved, do, dlse, q, k, v)`` gives."""
    call = call._replace(key_mask=contiguous(call.key_mask))
    if call.mask is not None:
        call = call._replace(lists=lists.of_backward(call))
    rows = {name: aligned_rows(getattr(saved, name)) for name in ("o", "q_int8", "k_int8")}
    given = aligned_rows(do), contiguous(dlse), aligned_rows(q), aligned_rows(k), aligned_rows(v)
    return repeat(kernels, call, saved._replace(**rows), *given)
