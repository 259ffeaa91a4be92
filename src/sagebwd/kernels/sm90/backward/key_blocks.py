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


@gluon.jit
def queries_met(first_k, queries, walk, listed, KIND: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Blocks of queries that see any of a program's keys: begin, the first that no mask cuts, and end.

    walk: of a mask of elements, where ``listed`` counts them, those of all heads (`list_of`); or None.
    """
    if walk is not None:
        return 0, listed[1], listed[2]
    else:
        begin, whole_from, _, end = block_range(
            first_k, queries.length, -queries.upper, -queries.lower, CONSUMERS * ROWS, BLOCK_Q, KIND.HAS_UPPER,
            KIND.HAS_LOWER, False,
        )  # fmt: skip
        return begin, whole_from, end


@gluon.jit
def edges_of(begin, whole_from, end, walk, KIND: gl.constexpr):
    """Where loops over blocks of queries begin, and the last one ends: one, or first one of those that a mask cuts.

    What masks need would take registers that the other has not.
    """
    if walk is not None or (KIND.HAS_UPPER and not KIND.HAS_LOWER and not KIND.GROUPED):
        return begin, whole_from, end
    else:
        return begin, end
