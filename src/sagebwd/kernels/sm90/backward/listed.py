"""A mask of elements in the backward: which blocks of queries a program's keys meet, and which pairs of a block count.

`sagebwd.masks.walks` makes the lists and the bits.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagebwd.kernels.sm90.backward.tile import CONSUMERS, ROWS, visible
from sagebwd.masks import mask as masks
from sagebwd.masks import walks

TILE = gl.constexpr(masks.TILE)
HEAD_BIT = gl.constexpr(walks.HEAD_BIT)
# Numbers of a list that belong to one block.
FIELDS = gl.constexpr(4)


class Listed(NamedTuple):
    """The lists of a key head: where the first begins, and how far it is to the next block of keys' own."""

    at: gl.tensor
    row: gl.tensor


class Met(NamedTuple):
    """A listed block of queries: its number, its head of those that share the keys', the mask's tile, and how many
    blocks of keys behind the program's add to its dQ."""

    block: gl.tensor
    head: gl.tensor
    tile: gl.tensor
    rank: gl.tensor


@gluon.jit
def listed_of(tensors, place):
    """The lists of a place's head, or None without a mask."""
    walk = tensors.walk
    if walk is None:
        return None
    else:
        at = place.batch.to(gl.int64) * walk.batch + place.head.to(gl.int64) * walk.head
        return Listed(walk.lists + at, walk.row)


@gluon.jit
def list_of(listed, first_k):
    """The list of a program's keys; None without."""
    if listed is None:
        return None
    else:
        return listed.at + (first_k // (CONSUMERS * ROWS)).to(gl.int64) * listed.row


@gluon.jit
def block_of(blocks, head, i):
    """Head and number of block i of a list; without one i itself, of ``head``."""
    if blocks is None:
        return head, i
    else:
        entry = gl.load(blocks + (i + 1) * FIELDS)
        return head + (entry >> HEAD_BIT), entry & ((1 << HEAD_BIT) - 1)


@gluon.jit
def met(blocks, i):
    """All of a list's block i."""
    at = blocks + (i + 1) * FIELDS
    head, block = block_of(blocks, 0, i)
    return Met(block, head, gl.load(at + 1), gl.load(at + 2))


@gluon.jit
def pairs_seen(
    words, tile, first_k, keys, keep_key, first_q, queries, HAS_LOWER: gl.constexpr, HAS_UPPER: gl.constexpr,
    BLOCK_Q: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Which pairs of 64 keys with BLOCK_Q queries count, as a score tile: one word of bits a thread and key."""
    EIGHTS: gl.constexpr = BLOCK_Q // 8
    # of eight queries a thread has two; registers of a score tile go over these, rows 8 apart, and the eights
    FOLDED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [8, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
        + ([[0, 8, 0, 0]] if EIGHTS == 16 else []),
        [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [[16, 0, 0, 0], [32, 0, 0, 0]],
        [],
        [ROWS, EIGHTS, 4, 2],
    )
    THREADS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, FOLDED))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, THREADS))
    lane = gl.arange(0, 4, gl.SliceLayout(0, THREADS))
    at = tile * (TILE * 4) + first_k % TILE * 4
    word = gl.load(words + at + gl.expand_dims(row * 4, 1) + gl.expand_dims(lane, 0))
    word = word >> (first_q % TILE // 4)
    keep = gl.convert_layout(keep_key.to(gl.int32), gl.SliceLayout(1, THREADS), assert_trivial=True)
    word = word & -gl.expand_dims(keep, 1)
    eight = gl.arange(0, EIGHTS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, FOLDED))))
    one = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, FOLDED))))
    eight = gl.expand_dims(gl.expand_dims(gl.expand_dims(eight, 0), 2), 3)
    one = gl.expand_dims(gl.expand_dims(gl.expand_dims(one, 0), 1), 2)
    word = gl.expand_dims(gl.expand_dims(word, 1), 3)
    seen = ((word >> (eight * 2 + one)) & 1) != 0
    seen = gl.convert_layout(seen.reshape([ROWS, BLOCK_Q]), LAYOUT, assert_trivial=True)
    if HAS_LOWER or HAS_UPPER:
        rows_q = first_q + gl.arange(0, BLOCK_Q, gl.SliceLayout(0, LAYOUT))
        distance = gl.expand_dims(keys, 1) - gl.expand_dims(rows_q, 0)
        seen = seen & visible(distance, queries.lower, queries.upper, HAS_LOWER, HAS_UPPER)
    return seen
