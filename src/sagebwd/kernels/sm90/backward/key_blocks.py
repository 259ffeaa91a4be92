"""Which keys a program of the backward takes, whose they are, and which queries see them."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagebwd.kernels.sm90.backward.block_sparse import of_share
from sagebwd.kernels.sm90.backward.tile import CONSUMERS, ROWS, block_range, sequence


class Place(NamedTuple):
    """Keys of a program's turn: of which sequence and key head, where that begins, how long it is, and the first."""

    batch: gl.tensor
    head: gl.tensor
    start: gl.tensor
    length: gl.tensor
    first: gl.tensor


class Queries(NamedTuple):
    """A sequence's queries: where it begins, how long it is, and bounds on key - query."""

    start: gl.tensor
    length: gl.tensor
    lower: gl.tensor
    upper: gl.tensor


@gluon.jit
def head_and_number(program, sizes, IN_ORDER: gl.constexpr):
    """A program's key head, counted over all sequences, and its number among those of this head.

    IN_ORDER: of heads_at_once heads, each gets its first program before any gets its second.
    """
    if IN_ORDER:
        first = program // (sizes.programs * sizes.heads_at_once) * sizes.heads_at_once
        heads = gl.minimum(sizes.heads_at_once, sizes.heads_in_all - first)
        program = program - first * sizes.programs
        return first + program % heads, program // heads
    else:
        return program // sizes.programs, program % sizes.programs


@gluon.jit
def key_block(turn, number, programs, IN_ORDER: gl.constexpr):
    """The key block of a program's turn, there and back: under a causal mask all programs so get the same work.

    IN_ORDER: of one turn alone, from the last block to the first.
    """
    return turn * programs + gl.where(((turn & 1) == 1) | IN_ORDER, programs - 1 - number, number)


@gluon.jit
def place_of(program, turn, tensors, sizes, BY_TURNS: gl.constexpr = False):
    """The place of a program's turn.

    BY_TURNS: heads take programs by turns where blocks do not add to dQ in order too, but from the first block on.
    Where lists are cut, these say which program has which place.
    """
    IN_ORDER: gl.constexpr = tensors.added is not None
    if tensors.shares is None:
        head, number = head_and_number(program, sizes, IN_ORDER or BY_TURNS)
    else:
        head, number = of_share(tensors.shares, program, 0), of_share(tensors.shares, program, 1)
    batch = head // sizes.heads_k
    start, length = sequence(tensors.cu_seqlens_k, batch, sizes.tokens_k, tensors.cu_seqlens_k is not None)
    # whose number is then a block's
    programs = sizes.programs if tensors.shares is None else 0
    first = key_block(turn, number, programs, IN_ORDER) * (CONSUMERS * ROWS)
    return Place(batch, head % sizes.heads_k, start, length, first)


@gluon.jit
def queries_of(place, tensors, sizes):
    """The queries of a place's sequence."""
    VARLEN: gl.constexpr = tensors.cu_seqlens_q is not None
    start, length = sequence(tensors.cu_seqlens_q, place.batch, sizes.tokens_q, VARLEN)
    if VARLEN:
        apart = place.length - length
        return Queries(start, length, sizes.lower + apart, sizes.upper + apart)
    else:
        return Queries(start, length, sizes.lower, sizes.upper)


@gluon.jit
def heads_of(place, sizes, VARLEN: gl.constexpr):
    """Among those of per-token values the first query head of a place's sequence, and its key head."""
    if VARLEN:
        return 0, place.head
    else:
        return place.batch * sizes.heads_k * sizes.group, place.batch * sizes.heads_k + place.head


class Met(NamedTuple):
    """Blocks of queries that see any of a program's keys; of a mask of elements, numbers of its list's blocks.

    No mask cuts those from ``whole_from`` to ``whole_until``, and no end. loops: from where, to where, and by how much
    a block's place in order is more; over numbers of `block_cut`, then over whole blocks, which need no branches.
    """

    begin: gl.tensor
    whole_from: gl.tensor
    whole_until: gl.tensor
    end: gl.tensor
    loops: tuple


@gluon.jit
def kept_of(place, first_k, key_mask, tokens_k):
    """How many of a program's keys a mask keeps; each warp counts all."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([CONSUMERS * ROWS // 32], [32], [gl.num_warps()], [0])
    keys = first_k + gl.arange(0, CONSUMERS * ROWS, LAYOUT)
    row = key_mask + place.batch.to(gl.int64) * tokens_k
    return gl.sum((gl.load(row + keys, mask=keys < place.length, other=0) != 0).to(gl.int32), 0)


@gluon.jit
def queries_met(
    place, first_k, key_mask, tokens_k, queries, walk, listed, IN_ORDER: gl.constexpr, KIND: gl.constexpr,
    BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """What keys from ``first_k`` on meet: nothing if a mask hides them all, unless blocks of keys add to dQ in order.

    walk: of a mask of elements, where ``listed`` counts blocks, those of all heads (`list_of`); or None.
    """
    if walk is not None:
        begin, whole_from, whole_until, end = 0, listed[1], listed[2], listed[2]
    else:
        begin, whole_from, whole_until, end = block_range(
            first_k, queries.length, -queries.upper, -queries.lower, CONSUMERS * ROWS, BLOCK_Q, KIND.HAS_UPPER,
            KIND.HAS_LOWER, False,
        )  # fmt: skip
        if key_mask is not None:
            kept = kept_of(place, first_k, key_mask, tokens_k)
            if not IN_ORDER:
                end = gl.where(kept > 0, end, begin)
            are_cut = kept < CONSUMERS * ROWS
        else:
            are_cut = first_k + CONSUMERS * ROWS > place.length
        if KIND.RAGGED or key_mask is not None:
            whole_from = gl.where(are_cut, end, whole_from)
            whole_until = gl.where(are_cut, end, whole_until)
        if not cut_at_both_ends(KIND):
            whole_until = end
    # under a window and with grouped heads one loop is faster: going from loop to loop so often costs what they gain
    CUT: gl.constexpr = KIND.HAS_UPPER or KIND.RAGGED or key_mask is not None
    if walk is not None or (CUT and not KIND.HAS_LOWER and not KIND.GROUPED):
        tail = end - whole_until
        loops = (begin, whole_from + tail, -begin), (whole_from, whole_until, tail - begin)
    else:
        loops = ((begin, end, -begin),)
    return Met(begin, whole_from, whole_until, end, loops)


@gluon.constexpr_function
def cut_at_both_ends(kind):
    """Whether a program meets what is cut at an end of its queries with what a mask cuts, before all whole blocks."""
    return kind.RAGGED and not kind.HAS_LOWER and not kind.GROUPED


@gluon.jit
def block_cut(number, met, KIND: gl.constexpr):
    """The block of queries that is met as that number from ``met.begin`` on, of those that a mask or an end cuts."""
    if cut_at_both_ends(KIND):
        return number + gl.where(number < met.whole_from, 0, met.whole_until - met.whole_from)
    else:
        return number


@gluon.jit
def block_met(number, met, KIND: gl.constexpr):
    """`block_cut`, or the whole block that comes after these."""
    block = block_cut(number, met, KIND)
    if cut_at_both_ends(KIND):
        tail = met.end - met.whole_until
        block = gl.where(number < met.whole_from + tail, block, number - tail)
    return block
