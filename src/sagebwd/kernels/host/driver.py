"""A call on kernels: its tensors where they can read them, its launches replayed where an earlier call was alike.

A family is a module with ``forward`` or ``backward`` (`sagebwd.call`), with ``prepare(direction, call)`` where its
kernels read more of a mask than is in the call, and with ``FILLS`` where it takes rows narrower than its form.
"""

from __future__ import annotations

from types import ModuleType

import torch.nn.functional as F
from torch import Tensor

from sagebwd.call import Call, Saved, empty_gradients, empty_like_rows
from sagebwd.kernels.host.alignment import aligned_rows, contiguous
from sagebwd.kernels.host.replay import recorded, repeat

__all__ = ["backward", "forward", "recorded"]

# Channels of narrow rows are multiples of so many, 16 bytes, as TMA and loads of 16 bytes want.
CHANNELS = 8


def forward(family: ModuleType, form: tuple[int, int], call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
    """What ``family.forward(call, q, k, v)`` gives, at the widths of ``form``."""
    wide = _prepared(family, "forward", form, call)
    given = (_filled(x, width) for x, width in zip((q, k, v), (wide.columns[0], *wide.columns)))
    saved = Saved(*repeat(family.forward, wide, *map(aligned_rows, given)))
    if wide.columns[1] != call.value_dim:
        saved = saved._replace(o=empty_like_rows(q, call.value_dim).copy_(saved.o[..., : call.value_dim]))
    if wide.columns[0] != call.head_dim:
        saved = saved._replace(k_mean=saved.k_mean[..., : call.head_dim].contiguous())
    return saved


def backward(
    family: ModuleType,
    form: tuple[int, int],
    call: Call,
    saved: Saved,
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``family.backward(call, saved, do, dlse, q, k, v)`` gives, at the widths of ``form``."""
    wide = _prepared(family, "backward", form, call)
    columns, values = wide.columns
    rows = {"o": _filled(saved.o, values), "q_int8": saved.q_int8, "k_int8": saved.k_int8}
    rows = {name: aligned_rows(x) for name, x in rows.items()}
    given = saved._replace(**rows, k_mean=_filled(saved.k_mean, columns)), aligned_rows(_filled(do, values))
    inputs = (aligned_rows(_filled(x, width)) for x, width in zip((q, k, v), (columns, columns, values)))
    gradients = repeat(family.backward, wide, *given, contiguous(dlse), *inputs)
    if wide.columns == (call.head_dim, call.value_dim):
        return gradients
    narrow = empty_gradients(call.recipe, call.head_dim, saved.o, v)
    return tuple(
        gradient if gradient.shape == x.shape else x.copy_(gradient[..., : x.shape[-1]])
        for x, gradient in zip(narrow, gradients)
    )


def _prepared(family: ModuleType, direction: str, form: tuple[int, int], call: Call) -> Call:
    """The call at the widths of a form, with what its tensors will lack of these."""
    lacking = 0, 0
    if getattr(family, "FILLS", False):
        own = (-(-width // CHANNELS) * CHANNELS for width in (call.head_dim, call.value_dim))
        lacking = tuple(width - there for width, there in zip(form, own))
    call = call._replace(head_dim=form[0], value_dim=form[1], key_mask=contiguous(call.key_mask), lacking=lacking)
    return family.prepare(direction, call) if hasattr(family, "prepare") else call


def _filled(x: Tensor | None, width: int) -> Tensor | None:
    """x with zeros up to a width: scores, scales and means stay, the output and gradients gain zeros."""
    if x is None or x.shape[-1] == width:
        return x
    return F.pad(x, (0, width - x.shape[-1]))
