"""Scheduling and masking of the portable kernels: a program's tile, its block range, visible pairs of a block."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sagebwd.kernels.common.strided import ANY, elements
from sagebwd.kernels.common.tile import block_range, sequence, visible
from sagebwd.masks import mask as masks

HIDDEN_FP16 = tl.constexpr(masks.HIDDEN[torch.float16])
HIDDEN_ELSE = tl.constexpr(masks.HIDDEN_ELSE)


class TileCoord(NamedTuple):
    """A tile's sequence, query head and key head, and the first token and length of its queries and keys."""

    batch: tl.tensor
    head: tl.tensor
    head_k: tl.tensor
    start_q: tl.tensor
    length_q: tl.tensor
    start_k: tl.tensor
    length_k: tl.tensor


class Bounds(NamedTuple):
    """Bounds on the distance from a row to a visible column; see `sagebwd.call.Call.band`."""

    lower: tl.tensor
    upper: tl.tensor
    HAS_LOWER: tl.constexpr
    HAS_UPPER: tl.constexpr


class BlockRange(NamedTuple):
    """Blocks of the other axis: [full_begin, full_end) need no mask, the rest of [begin, end) does."""

    begin: tl.tensor
    full_begin: tl.tensor
    full_end: tl.tensor
    end: tl.tensor


@triton.jit
def work_tile_of(batch_head, heads, group, cu_seqlens_q, cu_seqlens_k, tokens_q, tokens_k):
    """Coordinates of a query head, counted over the batch."""
    VARLEN: tl.constexpr = cu_seqlens_q is not None
    batch = batch_head // heads
    head = batch_head % heads
    head_k = head // group
    start_q, length_q = sequence(cu_seqlens_q, batch, tokens_q, VARLEN)
    start_k, length_k = sequence(cu_seqlens_k, batch, tokens_k, VARLEN)
    return TileCoord(batch, head, head_k, start_q, length_q, start_k, length_k)


@triton.jit
def heads_of(work_tile, batch_head, heads, group, VARLEN: tl.constexpr):
    """Query and key head in per-token tensors, int64, and the key head counted over the batch."""
    owner = work_tile.batch * (heads // group) + work_tile.head_k
    z_q = work_tile.head.to(tl.int64) if VARLEN else batch_head.to(tl.int64)
    z_k = work_tile.head_k.to(tl.int64) if VARLEN else owner.to(tl.int64)
    return z_q, z_k, owner


@triton.jit
def block_range_of(first, tokens, bounds, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, ALL_MASKED: tl.constexpr):
    """Block range of the BLOCK_A rows from ``first`` on (`block_range`)."""
    begin, full_begin, full_end, end = block_range(
        first, tokens, bounds.lower, bounds.upper, BLOCK_A, BLOCK_B, bounds.HAS_LOWER, bounds.HAS_UPPER, ALL_MASKED
    )
    return BlockRange(begin, full_begin, full_end, end)


@triton.jit
def within(distance, bounds):
    """Where the band holds; distance = key - query."""
    return visible(distance, bounds.lower, bounds.upper, bounds.HAS_LOWER, bounds.HAS_UPPER)


@triton.jit
def mask_all_where(span, condition):
    """The range with all blocks masked where the condition holds."""
    full_begin = tl.where(condition, span.end, span.full_begin)
    full_end = tl.where(condition, span.end, span.full_end)
    return BlockRange(span.begin, full_begin, full_end, span.end)


@triton.jit
def steps_of(span, lists, PART: tl.constexpr):
    """Number of whole blocks, or of those in PART masked, and the start of their list; 0 without lists."""
    if lists is not None:
        return tl.load(lists + PART), lists + 2 + PART * tl.load(lists)
    else:
        count = span.full_end - span.full_begin
        if PART:
            count = span.end - span.begin - count
        return count, 0


@triton.jit
def block_of(step, span, mask, listed, PART: tl.constexpr):
    """Block number of a step; with a mask, of its list."""
    if mask is not None:
        return tl.load(listed + step)
    elif PART:
        at = span.begin + step
        return at + tl.where(at >= span.full_begin, span.full_end - span.full_begin, 0)
    else:
        return span.full_begin + step


@triton.jit
def visible_pairs(first_q, queries, first_k, keys, left, bounds, key_mask):
    """Visible pairs of a tile (queries, keys); key_mask: of the sequence, or None."""
    keep = within((first_k + keys)[None, :] - (first_q + queries)[:, None], bounds) & (keys < left)[None, :]
    if key_mask is not None:
        keep = keep & (tl.load(key_mask + first_k + keys, mask=keys < left, other=0) != 0)[None, :]
    return keep


@triton.jit
def list_of(mask, batch, head, first):
    """Start of the block list of the program whose rows begin with ``first``."""
    at = batch.to(tl.int64) * elements(mask.list_batch, ANY) + head.to(tl.int64) * elements(mask.list_head, ANY)
    return mask.lists + (at + (first // mask.LIST_ROWS).to(tl.int64) * elements(mask.list_row, ANY))


@triton.jit
def load_elements(mask, its_elements, listed, first_q, first_k, queries, keys, left_q, left_k):
    """Load a mask's elements of some queries and keys, which broadcast to the tile; outside 0, or never used.

    its_elements: of the batch element and head, or where mask.TILE is not 0 all of `masks.mask.Mask`'s tiles; which
    is theirs stands beside the block in its list. mask.EVEN: nothing lies outside, and so many elements are loaded at
    a time.
    """
    TILE: tl.constexpr = mask.TILE
    if TILE:
        tile = tl.load(listed + (elements(mask.list_row, ANY) - 2) // 2)
        corner = tile.to(tl.int64) * (TILE * TILE) + (first_q % TILE) * TILE + first_k % TILE
        # without the hint loads are of single elements, and the tile's layout follows them
        return tl.load(its_elements + tl.multiple_of(corner, 16) + queries * TILE + keys)
    else:
        pitch = elements(mask.query, mask.unit)
        at = its_elements + first_q.to(tl.int64) * pitch + first_k.to(tl.int64) * mask.key
        if mask.EVEN:
            return tl.load(at + queries * pitch + keys * mask.key)
        else:
            inside = (queries < left_q) & (keys < left_k)
            return tl.load(at + queries * pitch + keys * mask.key, mask=inside, other=0)


@triton.jit
def shows(element, mask):
    """Whether a mask element makes its pair visible; see `sagebwd.masks.mask.shown`."""
    if mask.BIAS:
        HIDDEN: tl.constexpr = HIDDEN_FP16 if mask.at.dtype.element_ty == tl.float16 else HIDDEN_ELSE
        hidden = element.to(tl.float32) <= HIDDEN
        return hidden == 0
    else:
        return element != 0
