"""Scheduling of the backward: the key tile of a program, its sequence and head, and the query blocks that see it."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagebwd.kernels.sm90 import longest_first
from sagebwd.kernels.sm90.backward.block_sparse import split_field
from sagebwd.kernels.sm90.backward.tile import CONSUMERS, ROWS, block_range, sequence, sum_scale_of_length

MOST_TOGETHER = gl.constexpr(longest_first.MOST_TOGETHER)


class TileCoord(NamedTuple):
    """A key tile: sequence, key head, the sequence's first token and length, and the tile's first key in it."""

    batch: gl.tensor
    head: gl.tensor
    start: gl.tensor
    length: gl.tensor
    first: gl.tensor


class SeqQ(NamedTuple):
    """A sequence's queries: first token, length, and bounds on key - query."""

    start: gl.tensor
    length: gl.tensor
    lower: gl.tensor
    upper: gl.tensor


class Place(NamedTuple):
    """A program's packed sequence and key head, its number among this sequence's of one head, and their number.

    What kernels find once, before their loops: it takes a search. Zeros if dense.
    """

    batch: gl.tensor
    head: gl.tensor
    number: gl.tensor
    programs: gl.tensor


@gluon.jit
def owner_of(cu_seqlens, sequences, block, span):
    """As `sagebwd.kernels.common.tile.owner_of`, by a layout of one warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    found = block * 0
    left = sequences
    while left > 1:
        step = (left + 31) // 32
        at = found + gl.arange(0, 32, LAYOUT) * step
        there = at < sequences
        begins = gl.load(cu_seqlens + at, mask=there, other=0) // span + at
        found += (gl.sum((there & (begins <= block)).to(gl.int32), 0) - 1) * step
        left = step
    return found


@gluon.jit
def turn_of(number, heads, programs):
    """Head and program, of ``programs`` a head of one packed sequence, where the heads of a group take turns."""
    at_once = (heads + heads * programs // MOST_TOGETHER) // (1 + heads * programs // MOST_TOGETHER)
    first = number // (programs * at_once) * at_once
    within = number - first * programs
    heads = at_once if first + at_once <= heads else heads - first
    return first + within % heads, within // heads


@gluon.jit
def place_of(tensors, sizes, tiles, IN_ORDER: gl.constexpr):
    """`Place` of this program, which takes ``tiles`` key tiles; where it has none its number is beyond all programs.

    A head has the blocks of a padded layout of so many keys each. Programs go sequence by sequence; in order head by
    head, as `head_and_number` has them, the last block first.
    """
    if tensors.cu_seqlens_k is not None:
        span = tiles * (CONSUMERS * ROWS)
        if IN_ORDER:
            head, block = head_and_number(gl.program_id(0), sizes, True)
            block = sizes.programs - 1 - block
        else:
            # each head has as many programs of a sequence: this is the block of one of them
            head, block = 0, gl.program_id(0) // sizes.heads_in_all
        batch = owner_of(tensors.cu_seqlens_k, sizes.tokens_k, block, span)
        start, length = sequence(tensors.cu_seqlens_k, batch, sizes.tokens_k, True)
        number, begin = block - start // span - batch, start // span + batch
        if not IN_ORDER:
            end = (start + length) // span + batch + 1
            end = sizes.programs if batch == sizes.tokens_k - 1 else end
            head, number = turn_of(gl.program_id(0) - begin * sizes.heads_in_all, sizes.heads_in_all, end - begin)
        return Place(batch, head, number, (length + span - 1) // span)
    else:
        return Place(0, 0, 0, 0)


@gluon.jit
def share_place(place):
    """A packed call's `Place` in shared memory, for `place_in`: in registers loops would hold it."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    memory = gl.allocate_shared_memory(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    lane, x = gl.arange(0, 32, LAYOUT), place.programs
    for field in gl.static_range(3):
        x = gl.where(lane == field, place[field], x)
    memory.store(x)
    return memory


@gluon.jit
def place_in(places, VARLEN: gl.constexpr):
    """The `Place` that `share_place` has stored, in a tuple, which is empty if dense."""
    if VARLEN:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        lane = gl.arange(0, 32, LAYOUT)
        x = places[0].load(LAYOUT)
        return Place(
            gl.sum(gl.where(lane == 0, x, 0), 0), gl.sum(gl.where(lane == 1, x, 0), 0),
            gl.sum(gl.where(lane == 2, x, 0), 0), gl.sum(gl.where(lane == 3, x, 0), 0),
        )  # fmt: skip
    else:
        return Place(0, 0, 0, 0)


@gluon.jit
def head_and_number(program, sizes, IN_ORDER: gl.constexpr):
    """A program's key head, counted over a batch, and its number among the programs of this head.

    IN_ORDER: heads_at_once heads are interleaved: each gets its first program before any gets its second.
    """
    if IN_ORDER:
        first = program // (sizes.programs * sizes.heads_at_once) * sizes.heads_at_once
        heads = gl.minimum(sizes.heads_at_once, sizes.heads_in_all - first)
        program = program - first * sizes.programs
        return first + program % heads, program // heads
    else:
        return program // sizes.programs, program % sizes.programs


@gluon.jit
def key_block(tile_index, number, programs, IN_ORDER: gl.constexpr):
    """Key block of a program's tile, in serpentine order: under a causal mask all programs get equal work.

    IN_ORDER: one tile a program, from the last key block to the first.
    """
    return tile_index * programs + gl.where(((tile_index & 1) == 1) | IN_ORDER, programs - 1 - number, number)


@gluon.jit
def work_tile_of(program, tile_index, tensors, sizes, place, HEADS_INTERLEAVED: gl.constexpr = False):
    """Coordinates of the key tile number ``tile_index`` of a program; place: its `Place`.

    HEADS_INTERLEAVED: heads are interleaved even if dQ is not added in order, then from the first key block on.
    With work splits, these say which program has which tile.
    """
    IN_ORDER: gl.constexpr = tensors.dq_semaphore is not None
    if tensors.cu_seqlens_k is not None:
        start, length = sequence(tensors.cu_seqlens_k, place.batch, sizes.tokens_k, True)
        # programs of a head have their order already
        first = key_block(tile_index, place.number, place.programs, False) * (CONSUMERS * ROWS)
        return TileCoord(place.batch, place.head, start, length, first)
    else:
        if tensors.work_splits is None:
            head, number = head_and_number(program, sizes, IN_ORDER or HEADS_INTERLEAVED)
        else:
            head, number = split_field(tensors.work_splits, program, 0), split_field(tensors.work_splits, program, 1)
        batch = head // sizes.heads_k
        start, length = sequence(tensors.cu_seqlens_k, batch, sizes.tokens_k, False)
        # of a work split the number is the key block itself
        programs = sizes.programs if tensors.work_splits is None else 0
        first = key_block(tile_index, number, programs, IN_ORDER) * (CONSUMERS * ROWS)
        return TileCoord(batch, head % sizes.heads_k, start, length, first)


@gluon.jit
def dq_sum_scale_of(work_tile, tensors, factors):
    """Scale of what a tile adds to dQ's FP16 sums (`bwd_postprocess.dq_sum_scale`)."""
    if tensors.cu_seqlens_k is not None:
        return sum_scale_of_length(work_tile.length, False)
    else:
        return factors.sum_scale


@gluon.jit
def seq_q_of(work_tile, tensors, sizes):
    """Queries of a key tile's sequence."""
    VARLEN: gl.constexpr = tensors.cu_seqlens_q is not None
    start, length = sequence(tensors.cu_seqlens_q, work_tile.batch, sizes.tokens_q, VARLEN)
    if VARLEN:
        apart = work_tile.length - length
        return SeqQ(start, length, sizes.lower + apart, sizes.upper + apart)
    else:
        return SeqQ(start, length, sizes.lower, sizes.upper)


@gluon.jit
def heads_of(work_tile, sizes, VARLEN: gl.constexpr):
    """Rows of per-token tensors: the first query head of a tile's sequence, and its key head."""
    if VARLEN:
        return 0, work_tile.head
    else:
        return work_tile.batch * sizes.heads_k * sizes.group, work_tile.batch * sizes.heads_k + work_tile.head


class MBlockRange(NamedTuple):
    """Query blocks that see any key of a tile; with a block-sparse mask, entries of its list.

    Blocks in [whole_from, whole_until) are cut by no mask and no end. loops: (begin, end, offset to a block's step) of
    each loop; first over numbers of `masked_m_block`, then over whole blocks, which need no masking.
    """

    begin: gl.tensor
    whole_from: gl.tensor
    whole_until: gl.tensor
    end: gl.tensor
    loops: tuple


@gluon.jit
def kept_of(work_tile, first_k, key_mask, tokens_k):
    """Keys of a tile that the key mask keeps; each warp counts all of them."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([CONSUMERS * ROWS // 32], [32], [gl.num_warps()], [0])
    keys = first_k + gl.arange(0, CONSUMERS * ROWS, LAYOUT)
    row = key_mask + work_tile.batch.to(gl.int64) * tokens_k
    return gl.sum((gl.load(row + keys, mask=keys < work_tile.length, other=0) != 0).to(gl.int32), 0)


@gluon.jit
def m_block_range(
    work_tile, first_k, key_mask, tokens_k, seq_q, sparse, listed, IN_ORDER: gl.constexpr, KIND: gl.constexpr,
    BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Query blocks that see keys from ``first_k`` on: none if a mask hides all of them, unless dQ is added in order.

    sparse: block lists of an element mask, whose blocks, of all heads, ``listed`` counts (`list_of`); or None.
    """
    if sparse is not None:
        begin, whole_from, whole_until, end = 0, listed[1], listed[2], listed[2]
    else:
        begin, whole_from, whole_until, end = block_range(
            first_k, seq_q.length, -seq_q.upper, -seq_q.lower, CONSUMERS * ROWS, BLOCK_Q, KIND.HAS_UPPER,
            KIND.HAS_LOWER, False,
        )  # fmt: skip
        if key_mask is not None:
            kept = kept_of(work_tile, first_k, key_mask, tokens_k)
            if not IN_ORDER:
                end = gl.where(kept > 0, end, begin)
            are_cut = kept < CONSUMERS * ROWS
        else:
            are_cut = first_k + CONSUMERS * ROWS > work_tile.length
        if KIND.RAGGED or key_mask is not None:
            whole_from = gl.where(are_cut, end, whole_from)
            whole_until = gl.where(are_cut, end, whole_until)
        if not cut_at_both_ends(KIND):
            whole_until = end
    # under a window and with grouped heads one loop is faster: going from loop to loop so often costs what they gain
    CUT: gl.constexpr = KIND.HAS_UPPER or KIND.RAGGED or key_mask is not None
    if sparse is not None or (CUT and not KIND.HAS_LOWER and not KIND.GROUPED):
        tail = end - whole_until
        loops = (begin, whole_from + tail, -begin), (whole_from, whole_until, tail - begin)
    else:
        loops = ((begin, end, -begin),)
    return MBlockRange(begin, whole_from, whole_until, end, loops)


@gluon.constexpr_function
def cut_at_both_ends(kind):
    """Whether blocks cut at the end of the queries are visited with the masked ones, before all whole blocks."""
    return kind.RAGGED and not kind.HAS_LOWER and not kind.GROUPED


@gluon.jit
def masked_m_block(number, m_range, KIND: gl.constexpr):
    """Query block number ``number`` of a key tile, from ``m_range.begin`` on, of those that a mask or end cuts."""
    if cut_at_both_ends(KIND):
        return number + gl.where(number < m_range.whole_from, 0, m_range.whole_until - m_range.whole_from)
    else:
        return number


@gluon.jit
def m_block_at(number, m_range, KIND: gl.constexpr):
    """Query block number ``number`` of a tile: of `masked_m_block`, then of the whole blocks."""
    block = masked_m_block(number, m_range, KIND)
    if cut_at_both_ends(KIND):
        tail = m_range.end - m_range.whole_until
        block = gl.where(number < m_range.whole_from + tail, block, number - tail)
    return block
