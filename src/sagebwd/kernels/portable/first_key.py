"""The first key of a sequence where the recipe keeps it apart: a row begins with it, in FP32."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sagebwd.kernels.common.tile import INTERPRETED
from sagebwd.kernels.portable.lists import Listed, strides


class FirstKey(NamedTuple):
    """What is read of it: K, V's smoothed row, which key it is, and a mask's elements; all None where it is not apart.

    k lies as the kernel's own K does, of which it keeps another address. value (batch, heads, D) is in units of V's
    scale if that is the sequence's; number (batch,) where there is a mask of keys.
    """

    k: Tensor | None = None
    value: Tensor | None = None
    number: Tensor | None = None
    mask: Tensor | None = None
    mask_batch: int | None = None
    mask_head: int | None = None

    @classmethod
    def of(cls, k: Tensor, value: Tensor | None, number: Tensor | None, listed: Listed | None) -> FirstKey:
        """value is None where it is not apart."""
        if value is None:
            return cls()
        if listed is None:
            return cls(k, value, number)
        return cls(k, value, number, listed.first, *strides(listed.first)[:2])


@triton.jit
def first_score(
    q_tile, row_scale, k, k_scale, columns, first, there, scale_2, stride_t, head_dim: tl.constexpr
):  # fmt: skip
    """Every row's score, in base 2, of the first key; there: whether there is one."""
    inside = (columns < head_dim) & there
    k += first.to(tl.int64) * stride_t
    if q_tile.dtype == tl.int8 and head_dim % 16 == 0 and not INTERPRETED:
        # four products an instruction, their sum in place of the first; the key read once a row lies as Q's codes do.
        # Rows of whole 16 bytes alone: of others Triton may give a thread four rows of one column, not four columns
        at = tl.broadcast_to((k + columns)[None, :], q_tile.shape)
        products = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $4, $5, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;", "=r,=r,=r,=r,r,r",
            [q_tile, tl.load(at, mask=inside[None, :], other=0)], dtype=tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
        s = tl.sum(products, 1).to(tl.float32)
    else:
        key = tl.load(k + columns, mask=inside, other=0)
        s = tl.sum(q_tile.to(tl.float32) * key.to(tl.float32)[None, :], 1)  # of codes exact: below 2**24
    if row_scale is not None:
        s = s * (tl.load(k_scale + first, mask=there, other=0) * scale_2) * row_scale
    else:
        s = s * scale_2
    return s


@triton.jit
def value_of(first_key, owner, there, columns, head_dim):
    """V's row."""
    at = first_key.value + owner.to(tl.int64) * head_dim
    return tl.load(at + columns, mask=(columns < head_dim) & there, other=0)


@triton.jit
def first_element(first_key, work_tile, queries, inside):
    """A mask's elements of some queries and it."""
    offset = work_tile.batch.to(tl.int64) * first_key.mask_batch + work_tile.head.to(tl.int64) * first_key.mask_head
    return tl.load(first_key.mask + offset + queries, mask=inside, other=0)
