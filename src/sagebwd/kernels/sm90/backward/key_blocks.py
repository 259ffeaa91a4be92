"""Which keys a program of the backward takes, whose they are, and which queries see them."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagebwd.kernels.sm90.backward.listed import of_share
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
    """Blocks of queries that see any of a program's keys, and which of them no mask cuts and no end.

    Of a mask of elements, numbers of its list's blocks.
    """

    begin: gl.tensor
    whole_from: gl.tensor
    whole_until: gl.tensor
    end: gl.tensor


class Keys(NamedTuple):
    """A sequence's keys: of which of a batch, how many, the mask of keys or None, and how many are a row of it."""

    batch: gl.tensor
    length: gl.tensor
    mask: gl.tensor
    tokens: gl.tensor


@gluon.jit
def kept_of(keys, first_k):
    """How many of a program's keys count; each warp counts all."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([CONSUMERS * ROWS // 32], [32], [gl.num_warps()], [0])
    these = first_k + gl.arange(0, CONSUMERS * ROWS, LAYOUT)
    row = keys.mask + keys.batch.to(gl.int64) * keys.tokens
    return gl.sum((gl.load(row + these, mask=these < keys.length, other=0) != 0).to(gl.int32), 0)


@gluon.jit
def queries_met(
    first_k, keys, queries, walk, listed, IN_ORDER: gl.constexpr, KIND: gl.constexpr, BLOCK_Q: gl.constexpr
):
    """What a program's keys meet: nothing if a mask hides them all, unless blocks of keys add to dQ in order.

    walk: of a mask of elements, where ``listed`` counts blocks, those of all heads (`list_of`); or None.
    """
    if walk is not None:
        return Met(0, listed[1], listed[2], listed[2])
    else:
        begin, whole_from, whole_until, end = block_range(
            first_k, queries.length, -queries.upper, -queries.lower, CONSUMERS * ROWS, BLOCK_Q, KIND.HAS_UPPER,
            KIND.HAS_LOWER, False,
        )  # fmt: skip
        if keys.mask is not None:
            kept = kept_of(keys, first_k)
            if not IN_ORDER:
                end = gl.where(kept > 0, end, begin)
            are_cut = kept < CONSUMERS * ROWS
        else:
            are_cut = first_k + CONSUMERS * ROWS > keys.length
        if KIND.RAGGED or keys.mask is not None:
            whole_from = gl.where(are_cut, end, whole_from)
            whole_until = gl.where(are_cut, end, whole_until)
        if cut_at_both_ends(KIND):
            return Met(begin, whole_from, whole_until, end)
        else:
            return Met(begin, whole_from, end, end)


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


@gluon.jit
def loops_of(met, walk, key_mask, KIND: gl.constexpr):
    """Loops over blocks of queries: from where, to where, and by how much a block's place in order is more.

    Over numbers of `block_cut` first, then over whole blocks, which need fewer registers and no branches. Under a
    window and with grouped heads one loop over all is faster: going from loop to loop so often costs what they gain.
    """
    CUT: gl.constexpr = KIND.HAS_UPPER or KIND.RAGGED or key_mask is not None
    if walk is not None or (CUT and not KIND.HAS_LOWER and not KIND.GROUPED):
        tail = met.end - met.whole_until
        return (met.begin, met.whole_from + tail, -met.begin), (met.whole_from, met.whole_until, tail - met.begin)
    else:
        return ((met.begin, met.end, -met.begin),)
