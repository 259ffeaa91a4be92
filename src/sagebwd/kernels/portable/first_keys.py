"""First keys of a sequence that the recipe keeps apart: a row begins with their softmax, P V in 16 bit."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Packing
from sagebwd.kernels.common.strided import ONE, Strided, pitch_of, rows_of
from sagebwd.kernels.common.tile import LOG2_E, dot_16bit, load_rows, to_16bit
from sagebwd.kernels.portable.blocks import BlockRange, shows, within
from sagebwd.kernels.portable.lists import Listed, strides
from sagebwd.kernels.portable.pieces import Rows, scores_by_pieces
from sagebwd.kernels.portable.softmax import probabilities, scores, times


class FirstKeys(NamedTuple):
    """V as it was given, whose tokens `strided` finds, which keys they are, and a mask's elements; or nothing.

    number (batch, COUNT) where there is a mask of keys, the sequence's length where it leaves fewer; mask (batch,
    heads or 1, queries, COUNT). Triton 3.6 compares no tuple that holds None with None: kernels look at ``at``.
    """

    at: Tensor | None = None
    batch: int | None = None
    head: int | None = None
    token: int | None = None
    number: Tensor | None = None
    mask: Tensor | None = None
    mask_batch: int | None = None
    mask_head: int | None = None
    COUNT: tl.constexpr = ONE
    unit: tl.constexpr = ONE

    @classmethod
    def of(cls, v: Tensor, keys: Packing, number: Tensor | None, listed: Listed | None, count: int) -> FirstKeys:
        """v (B, H, N, D) or packed; count: a power of two, 16 at least, as one product's keys are; else nothing."""
        if count == 0:
            return cls()
        at, *apart, unit = Strided.of(v, keys)
        elements = (None,) * 3 if listed is None else (listed.first, *strides(listed.first)[:2])
        return cls(at, *apart, number, *elements, tl.constexpr(count), unit)


@triton.jit
def numbers_of(first_keys, batch):
    """Which keys they are."""
    of_all = tl.arange(0, first_keys.COUNT)
    if first_keys.number is not None:
        of_all = tl.load(first_keys.number + batch * first_keys.COUNT + of_all)
    return of_all


@triton.jit
def last_of(first_keys, batch):
    """The last of them: each key up to it that a mask leaves is one."""
    if first_keys.number is not None:
        return tl.load(first_keys.number + batch * first_keys.COUNT + (first_keys.COUNT - 1))
    else:
        return batch * 0 + (first_keys.COUNT - 1)


@triton.jit
def cut_first_block(n_range):
    """The range with its block 0, where the keys lie without a mask, among those that need one."""
    full_begin = tl.minimum(tl.maximum(n_range.full_begin, 1), n_range.full_end)
    return BlockRange(n_range.begin, full_begin, n_range.full_end, n_range.end)


@triton.jit
def first_products(
    first_keys, q_tile, row_scale, k, pitch, k_scale, v, work_tile, owner, queries, inside, bounds, mask, columns,
    scale_2, head_dim: tl.constexpr, V_SCALE: tl.constexpr, EVEN: tl.constexpr, INT8: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """m, l and acc of every row over them alone; k: the sequence's, acc in units of V's scale if the sequence's."""
    number = numbers_of(first_keys, work_tile.batch)
    length = work_tile.length_k
    far = number.to(tl.int64)
    if not WIDE:
        k_tile = load_rows(k, far, columns, pitch, length, head_dim, False, EVEN)
    v_at = rows_of(
        Strided(first_keys.at, first_keys.batch, first_keys.head, first_keys.token, first_keys.unit), work_tile.batch,
        work_tile.head_k, work_tile.start_k,
    )  # fmt: skip
    v_tile = load_rows(v_at, far, columns, pitch_of(first_keys), length, head_dim, False, EVEN)
    if v.mean is not None:
        # a row of its own shape: the same load as at the end would be one, whose registers all blocks then lack
        mean = load_rows(v.mean + owner.to(tl.int64) * head_dim, tl.arange(0, 1), columns, 0, 1, head_dim, True, EVEN)
        v_tile = to_16bit(v_tile.to(tl.float32) - mean, v_tile.dtype)

    if WIDE:
        s = scores_by_pieces(q_tile, Rows(k, far, pitch, length), head_dim, False)  # S = Q K^T
    else:
        s = times(q_tile, k_tile)  # S = Q K^T
    s = scores(s, k_scale, 0, number, length, scale_2, INT8, True, True)
    keep = within(number[None, :] - queries[:, None], bounds) & (number < length)[None, :]
    if mask is not None:
        of_head = work_tile.batch.to(tl.int64) * first_keys.mask_batch
        of_head += work_tile.head.to(tl.int64) * first_keys.mask_head
        at = first_keys.mask + of_head + queries[:, None] * first_keys.COUNT
        element = tl.load(at + tl.arange(0, first_keys.COUNT)[None, :], mask=inside[:, None], other=0)
        keep = keep & shows(element, mask)
        if mask.BIAS:
            if row_scale is not None:
                s = s * row_scale[:, None]
                row_scale = None
            s += element.to(tl.float32) * LOG2_E
    s = tl.where(keep, s, float("-inf"))
    p, m = probabilities(s, row_scale)  # P = exp2(S - m)
    acc = dot_16bit(to_16bit(p, v_tile.dtype), v_tile)  # P V
    if V_SCALE == "sequence":
        acc /= tl.load(v.scale + owner.to(tl.int64) * head_dim + columns, mask=columns < head_dim, other=1)[None, :]
    return m, tl.sum(p, 1), acc  # l = rowsum(P)
