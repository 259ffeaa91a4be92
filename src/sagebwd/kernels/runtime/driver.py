"""A call on kernels at the widths that they are compiled for: rows that are filled up, launches, and rows cut off.

A family is a module with ``forward`` and ``backward`` (`sagebwd.call`), with ``prepare(direction, call)`` where its
kernels read more of a mask than is in the call, and with ``FILLS`` where it takes rows narrower than its form. All
here can be described (`sagebwd.kernels.runtime.program`).
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from sagebwd.call import Call, Saved, empty_gradients, empty_like_rows, lies_by_token
from sagebwd.kernels import sinks as kernels
from sagebwd.kernels.max_logits import max_logits
from sagebwd.kernels.runtime.alignment import aligned_rows, contiguous
from sagebwd.kernels.runtime.parts import parts_of
from sagebwd.kernels.runtime.program import begin_part, copy, zeros
from sagebwd.recipe import FP8

# Channels of narrow rows are multiples of so many, 16 bytes, as TMA and loads of 16 bytes want.
CHANNELS = 8
# Tokens of a block of the padded layouts, at most, and how many times a packed call's tokens such a layout may have.
BLOCK, MOST_PADDED = 128, 8


def forward(
    family: ModuleType, form: tuple[int, int], call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> Saved:
    """What ``family.forward(call, q, k, v)`` gives, at the widths of ``form``, beside sinks where there are any."""
    wide = _at_widths(family, form, call)
    given = (_filled(x, width) for x, width in zip((q, k, v), (wide.columns[0], *wide.columns)))
    saved = Saved(*family.forward(wide, *map(aligned_rows, given)))
    if wide.columns[1] != call.value_dim:
        saved = saved._replace(o=copy(empty_like_rows(q, call.value_dim), saved.o[..., : call.value_dim]))
    if wide.columns[0] != call.head_dim:
        # a copy of one row too, whose columns are contiguous as they lie: the workspace has room for these alone
        narrow = saved.k_mean.new_empty((*saved.k_mean.shape[:-1], call.head_dim))
        saved = saved._replace(k_mean=copy(narrow, saved.k_mean[..., : call.head_dim]))
    mean = saved.k_mean if call.recipe.smooth_k else None
    if call.max_logits:
        largest = max_logits(saved.row_max, saved.lse, q, mean, call.scale, call.queries)
        kept = saved.row_max if call.recipe.dv == FP8 else None
        saved = saved._replace(max_logits=largest, row_max=kept)
    if sinks is None:
        return saved
    rest = call.scale, call.queries.cu_seqlens, call.queries.tokens
    return saved._replace(weight=kernels.weigh(saved.o, saved.lse, q, mean, sinks, *rest))


def backward(
    family: ModuleType, form: tuple[int, int], call: Call, saved: Saved, do: Tensor, dlse: Tensor | None,
    q: Tensor | None, k: Tensor | None, v: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """What ``family.backward(call, saved, do, dlse, q, k, v)`` gives, at the widths of ``form``.

    Then sinks' gradient by blocks of queries, or None.
    """
    wide = _at_widths(family, form, call)
    columns, values = wide.columns
    rows = {"o": _filled(saved.o, values), "q_int8": saved.q_int8, "k_int8": saved.k_int8}
    rows = {name: aligned_rows(x) for name, x in rows.items()}
    saved = saved._replace(lse=contiguous(saved.lse))
    given = saved._replace(**rows, k_mean=_filled(saved.k_mean, columns)), aligned_rows(_filled(do, values))
    inputs = (aligned_rows(_filled(x, width)) for x, width in zip((q, k, v), (columns, columns, values)))
    gradients = _by_parts(family, wide, *given, contiguous(dlse), *inputs)
    if wide.columns != (call.head_dim, call.value_dim):
        narrow = empty_gradients(call.head_dim, saved.o, v)
        gradients = tuple(
            gradient if gradient.shape == x.shape else copy(x, gradient[..., : x.shape[-1]])
            for x, gradient in zip(narrow, gradients)
        )
    if saved.weight is None:
        return *gradients, None
    mean = saved.k_mean if call.recipe.smooth_k else None
    rest = call.scale, wide.queries.cu_seqlens, call.queries.tokens
    return *gradients, kernels.gradient_by_block(do, dlse, saved.o, saved.weight, gradients[0], mean, *rest)


def _by_parts(
    family: ModuleType, call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None,
    v: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """``family.backward``, of `key_heads_a_part` key heads at a time, one part after another in one memory."""
    step = key_heads_a_part(call)
    if step == call.keys.heads:
        return family.backward(call, saved, do, dlse, q, k, v)
    gradients = empty_gradients(call.columns[0], saved.o, v)
    for part in parts_of(call, step):
        begin_part()
        found = family.backward(part.call, *part.given(saved, do, dlse, q, k, v))
        for whole, x, heads in zip(gradients, found, (part.queries, part.keys, part.keys)):
            copy(part.rows(whole, heads), x)
    return gradients


def key_heads_a_part(call: Call) -> int:
    """Key heads that a backward has operands of at a time: all, unless most of a packed layout would be padding.

    Each sequence begins a block of its own, so that 3000 of 8 tokens fill 9 times their memory. A prologue's weights
    have gradients of all heads together.
    """
    heads = call.keys.heads
    if not call.packed or call.prologue is not None:
        return heads
    padded = max(x.blocks(BLOCK) * BLOCK / max(x.total, 1) for x in (call.queries, call.keys))
    return -(-heads // min(max(-(-int(padded) // MOST_PADDED), 1), heads)) if heads else 0


def _at_widths(family: ModuleType, form: tuple[int, int], call: Call) -> Call:
    """The call at the widths of a form, with what its tensors will lack of these."""
    lacking = 0, 0
    if getattr(family, "FILLS", False):
        own = (-(-width // CHANNELS) * CHANNELS for width in (call.head_dim, call.value_dim))
        lacking = tuple(width - there for width, there in zip(form, own))
    queries, keys = (x._replace(cu_seqlens=contiguous(x.cu_seqlens)) for x in (call.queries, call.keys))
    return call._replace(
        head_dim=form[0], value_dim=form[1], queries=queries, keys=keys, key_mask=contiguous(call.key_mask),
        lacking=lacking,
    )  # fmt: skip


def _filled(x: Tensor | None, width: int) -> Tensor | None:
    """x with zeros up to a width, laid out as it is: scores, scales and means stay, results gain zeros."""
    if x is None or x.shape[-1] == width:
        return x
    if lies_by_token(x):  # results lie as these rows do
        return _filled(x.transpose(1, 2), width).transpose(1, 2)
    wide = zeros((*x.shape[:-1], width), x.dtype, x.device)
    copy(wide[..., : x.shape[-1]], x)
    return wide
