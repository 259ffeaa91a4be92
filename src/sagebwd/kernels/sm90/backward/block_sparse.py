"""Block-sparse masks in the backward: the query blocks that a key tile meets, and the visible pairs of a block.

`sagebwd.masks.sm90_block_lists` makes the lists and the bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagebwd.kernels.sm90.backward.tile import CONSUMERS, ROWS, anew, visible
from sagebwd.masks import mask as masks
from sagebwd.masks import sm90_block_lists
from sagebwd.masks import work_splits as splits_of_lists

TILE = gl.constexpr(masks.TILE)
HEAD_BIT = gl.constexpr(sm90_block_lists.HEAD_BIT)
# Numbers of a list that belong to one block.
FIELDS = gl.constexpr(splits_of_lists.ENTRY)
# Numbers that say what a program takes of a list.
SHARE = gl.constexpr(splits_of_lists.FIELDS)


@gluon.jit
def of_share(shares, program, FIELD: gl.constexpr):
    """One number of what a program takes, in a uniform register: loops have few others left.

    Impure, or it might come to stand where not all of a warp's threads are.
    """
    x = gl.load(shares.programs + program * SHARE + FIELD)
    return gl.inline_asm_elementwise(
        "redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def list_of(walk, shares, batch, head, first_k):
    """The list of a program's keys, or its share of it: where it begins, in numbers, how many blocks a mask cuts of
    it, and how many it has."""
    if walk is None:
        return 0, 0, 0
    elif shares is None:
        at = batch * walk.batch + head * walk.head + first_k // (CONSUMERS * ROWS) * walk.row
        in_part = gl.load(walk.lists + at)
        return at, in_part, in_part + gl.load(walk.lists + at + 1)
    else:
        program = gl.program_id(0)
        return of_share(shares, program, 2), of_share(shares, program, 3), of_share(shares, program, 4)


@gluon.jit
def head_and_block(entry):
    """Of those that share the keys' head a query head, and a block of its queries: a listed block's first field."""
    return entry >> HEAD_BIT, entry & ((1 << HEAD_BIT) - 1)


@gluon.jit
def met_of(walk, at, i):
    """Where a list has its block i; its first field; how many blocks of keys behind the program's add to its dQ."""
    met = at + (i + 1) * FIELDS
    return met, gl.load(walk.lists + met), gl.load(walk.lists + met + 2)


@gluon.jit
def pairs_seen(
    walk, met, first_k, keys, keep_key, first_q, queries, KIND: gl.constexpr, BLOCK_Q: gl.constexpr,
    LAYOUT: gl.constexpr,
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
    at = gl.load(walk.lists + met + 1) * (TILE * 4) + first_k % TILE * 4
    word = gl.load(walk.words + at + gl.expand_dims(row * 4, 1) + gl.expand_dims(lane, 0))
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
    if KIND.HAS_LOWER or KIND.HAS_UPPER:
        rows_q = first_q + gl.arange(0, BLOCK_Q, gl.SliceLayout(0, LAYOUT))
        distance = gl.expand_dims(keys, 1) - gl.expand_dims(rows_q, 0)
        seen = seen & visible(distance, queries.lower, queries.upper, KIND.HAS_LOWER, KIND.HAS_UPPER)
    return seen


@gluon.jit
def bias_of(bias, walk, met, keys, seen, first_q, place, group, BLOCK_Q: gl.constexpr, LAYOUT: gl.constexpr):
    """What is added to a score tile, FP32, 0 where it is not seen."""
    head = place.head * group + head_and_block(gl.load(walk.lists + met))[0]
    at = place.batch.to(gl.int64) * bias.batch + head.to(gl.int64) * bias.head
    stride = anew(bias.query)  # what follows from it would be kept in registers
    at += first_q.to(gl.int64) * stride
    rows_q = gl.arange(0, BLOCK_Q, gl.SliceLayout(0, LAYOUT)) * stride
    elements = bias.elements + at + gl.expand_dims(keys, 1) + gl.expand_dims(rows_q, 0)
    return gl.load(elements, mask=seen, other=0).to(gl.float32)
