"""Where a program's rows lie, which blocks of the other axis it meets, and which pairs of a block are seen."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sagebwd.kernels.operands.tile import block_range, sequence, visible
from sagebwd.masks import mask as masks

HIDDEN_FP16 = tl.constexpr(masks.HIDDEN[torch.float16])
HIDDEN_ELSE = tl.constexpr(masks.HIDDEN_ELSE)


class Place(NamedTuple):
    """A query head of a sequence, the key head that serves it, and where their tokens begin among all."""

    batch: tl.tensor
    head: tl.tensor
    head_k: tl.tensor
    start_q: tl.tensor
    length_q: tl.tensor
    start_k: tl.tensor
    length_k: tl.tensor


class Bounds(NamedTuple):
    """On the distance from a row to what it sees; see `sagebwd.call.Call.band`."""

    lower: tl.tensor
    upper: tl.tensor
    HAS_LOWER: tl.constexpr
    HAS_UPPER: tl.constexpr


class Walk(NamedTuple):
    """Blocks of the other axis: [full_begin, full_end) need no mask, the rest of [begin, end) does."""

    begin: tl.tensor
    full_begin: tl.tensor
    full_end: tl.tensor
    end: tl.tensor


@triton.jit
def place_of(batch_head, heads, group, cu_seqlens_q, cu_seqlens_k, tokens_q, tokens_k):
    """The place of a query head, counted over all sequences."""
    VARLEN: tl.constexpr = cu_seqlens_q is not None
    batch = batch_head // heads
    head = batch_head % heads
    head_k = head // group
    start_q, length_q = sequence(cu_seqlens_q, batch, tokens_q, VARLEN)
    start_k, length_k = sequence(cu_seqlens_k, batch, tokens_k, VARLEN)
    return Place(batch, head, head_k, start_q, length_q, start_k, length_k)


@triton.jit
def heads_of(place, batch_head, heads, group, VARLEN: tl.constexpr):
    """The two heads among per-token values, int64, and the key head among those of all sequences."""
    owner = place.batch * (heads // group) + place.head_k
    z_q = place.head.to(tl.int64) if VARLEN else batch_head.to(tl.int64)
    z_k = place.head_k.to(tl.int64) if VARLEN else owner.to(tl.int64)
    return z_q, z_k, owner


@triton.jit
def blocks_met(first, tokens, bounds, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, ALL_MASKED: tl.constexpr):
    """`block_range` of a block that begins with ``first``."""
    begin, full_begin, full_end, end = block_range(
        first, tokens, bounds.lower, bounds.upper, BLOCK_A, BLOCK_B, bounds.HAS_LOWER, bounds.HAS_UPPER, ALL_MASKED
    )
    return Walk(begin, full_begin, full_end, end)


@triton.jit
def within(distance, bounds):
    """Where the band holds; distance = key - query."""
    return visible(distance, bounds.lower, bounds.upper, bounds.HAS_LOWER, bounds.HAS_UPPER)


@triton.jit
def in_part(walk, condition):
    """The walk, all of whose blocks need a mask where the condition holds."""
    full_begin = tl.where(condition, walk.end, walk.full_begin)
    full_end = tl.where(condition, walk.end, walk.full_end)
    return Walk(walk.begin, full_begin, full_end, walk.end)


@triton.jit
def steps_of(walk, lists, PART: tl.constexpr):
    """How many blocks are met whole, or PART in part, and where the list of them begins, 0 without lists."""
    if lists is not None:
        return tl.load(lists + PART), lists + 2 + PART * tl.load(lists)
    else:
        count = walk.full_end - walk.full_begin
        if PART:
            count = walk.end - walk.begin - count
        return count, 0


@triton.jit
def block_of(step, walk, mask, listed, PART: tl.constexpr):
    """The block of a step; with a mask, of its list."""
    if mask is not None:
        return tl.load(listed + step)
    elif PART:
        at = walk.begin + step
        return at + tl.where(at >= walk.full_begin, walk.full_end - walk.full_begin, 0)
    else:
        return walk.full_begin + step


@triton.jit
def kept(first_q, queries, first_k, keys, left, bounds, apart, key_mask):
    """Which pairs of a tile (queries, keys) count; apart: a key that does not; key_mask: of the sequence; or None."""
    keep = within((first_k + keys)[None, :] - (first_q + queries)[:, None], bounds) & (keys < left)[None, :]
    if apart is not None:
        keep = keep & (first_k + keys != apart)[None, :]
    if key_mask is not None:
        keep = keep & (tl.load(key_mask + first_k + keys, mask=keys < left, other=0) != 0)[None, :]
    return keep


@triton.jit
def list_of(mask, batch, head, first):
    """Where the list of the program begins whose rows begin with ``first``."""
    at = batch.to(tl.int64) * mask.list_batch + head.to(tl.int64) * mask.list_head
    return mask.lists + (at + (first // mask.LIST_ROWS).to(tl.int64) * mask.list_row)


@triton.jit
def load_elements(mask, elements, listed, first_q, first_k, queries, keys, left_q, left_k):
    """A mask's elements of some queries and keys, which broadcast to the tile; what lies outside is 0 or never used.

    elements: of the batch element and head, or where mask.TILE is not 0 all of `masks.mask.Mask`'s tiles; which
    is theirs stands beside the block in its list. mask.EVEN: nothing lies outside, and so many elements are loaded at
    a time.
    """
    TILE: tl.constexpr = mask.TILE
    if TILE:
        tile = tl.load(listed + (mask.list_row - 2) // 2)
        corner = tile.to(tl.int64) * (TILE * TILE) + (first_q % TILE) * TILE + first_k % TILE
        # without the hint loads are of single elements, and the tile's layout follows them
        return tl.load(elements + tl.multiple_of(corner, 16) + queries * TILE + keys)
    else:
        at = elements + first_q.to(tl.int64) * mask.query + first_k.to(tl.int64) * mask.key
        if mask.EVEN:
            return tl.load(at + queries * mask.query + keys * mask.key)
        else:
            inside = (queries < left_q) & (keys < left_k)
            return tl.load(at + queries * mask.query + keys * mask.key, mask=inside, other=0)


@triton.jit
def shows(element, mask):
    """Where an element of a mask lets its key be seen; see `sagebwd.masks.mask.shown`."""
    if mask.BIAS:
        HIDDEN: tl.constexpr = HIDDEN_FP16 if mask.at.dtype.element_ty == tl.float16 else HIDDEN_ELSE
        hidden = element.to(tl.float32) <= HIDDEN
        return hidden == 0
    else:
        return element != 0
