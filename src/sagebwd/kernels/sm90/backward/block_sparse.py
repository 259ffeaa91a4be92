"""Block-sparse masks in the backward: the query blocks that a key tile meets, and the visible pairs of a block.

Programs that share one list, by work splits, add up dK and dV in FP32 in memory; the last one stores both.
`sagebwd.kernels.masks.sm90_block_lists` makes the lists and the bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagebwd.kernels.common import strided
from sagebwd.kernels.masks import work_splits as splits_of_lists
from sagebwd.kernels.sm90.backward.tile import (
    CONSUMERS,
    ROWS,
    barrier,
    elements,
    opaque,
    program_number,
    uniform,
    visible,
)
from sagebwd.masks import mask as masks

ANY = gl.constexpr(strided.ANY.value)
TILE = gl.constexpr(masks.TILE)
HEAD_BIT = gl.constexpr(splits_of_lists.HEAD_BIT)
# Numbers of a list that belong to one block.
ENTRY_FIELDS = gl.constexpr(splits_of_lists.ENTRY)
# Numbers that say what a program takes of a list.
SPLIT_FIELDS = gl.constexpr(splits_of_lists.FIELDS)


@gluon.jit
def split_field(splits, program, FIELD: gl.constexpr):
    """Field FIELD of a program's work split."""
    return uniform(gl.load(splits.programs + program * SPLIT_FIELDS + FIELD))


@gluon.jit
def list_of(sparse, splits, batch, head, first_k):
    """Block list of a key tile, or the program's split of it: offset in numbers, blocks that a mask cuts, all blocks.
    Zeros without a block-sparse mask."""
    if sparse is None:
        return 0, 0, 0
    elif splits is None:
        at = batch * sparse.batch + head * sparse.head + first_k // (CONSUMERS * ROWS) * sparse.row
        in_part = gl.load(sparse.lists + at)
        return at, in_part, in_part + gl.load(sparse.lists + at + 1)
    else:
        program = gl.program_id(0)
        return split_field(splits, program, 2), split_field(splits, program, 3), split_field(splits, program, 4)


@gluon.jit
def head_and_block(entry):
    """Unpack the first field of a listed block: the query head within its group, and the query block."""
    return entry >> HEAD_BIT, entry & ((1 << HEAD_BIT) - 1)


@gluon.jit
def listed_block(sparse, at, i):
    """Entry i of a list: its offset, its first field, and its rank: how many later key blocks add to the same dQ."""
    entry_at = at + (i + 1) * ENTRY_FIELDS
    return entry_at, gl.load(sparse.lists + entry_at), gl.load(sparse.lists + entry_at + 2)


@gluon.jit
def visible_pairs(
    sparse, entry_at, first_k, keys, keep_key, first_q, seq_q, KIND: gl.constexpr, BLOCK_Q: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Visibility of 64 keys x BLOCK_Q queries as a score tile, unpacked from one bit word a thread and key."""
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
    at = gl.load(sparse.lists + entry_at + 1) * (TILE * 4) + first_k % TILE * 4
    word = gl.load(sparse.words + at + gl.expand_dims(row * 4, 1) + gl.expand_dims(lane, 0))
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
        seen = seen & visible(distance, seq_q.lower, seq_q.upper, KIND.HAS_LOWER, KIND.HAS_UPPER)
    return seen


@gluon.jit
def bias_of(bias, sparse, entry, keys, seen, first_q, work_tile, group, BLOCK_Q: gl.constexpr, LAYOUT: gl.constexpr):
    """Attention bias of a score tile, FP32, 0 where a pair is not visible."""
    head = work_tile.head * group + head_and_block(gl.load(sparse.lists + entry))[0]
    at = work_tile.batch.to(gl.int64) * elements(bias.batch, ANY) + head.to(gl.int64) * elements(bias.head, ANY)
    stride = opaque(elements(bias.query, ANY))  # what follows from it would be kept in registers
    at += first_q.to(gl.int64) * stride
    rows_q = gl.arange(0, BLOCK_Q, gl.SliceLayout(0, LAYOUT)) * stride
    its_elements = bias.elements + at + gl.expand_dims(keys, 1) + gl.expand_dims(rows_q, 0)
    return gl.load(its_elements, mask=seen, other=0).to(gl.float32)


# Counters of a split list: one for each of `CONSUMERS`, padded to 16 bytes.
COUNTERS = gl.constexpr(4)


@gluon.jit
def sum_of_splits(
    pieces, splits, work_tile, FIRST: gl.constexpr, CONSUMER: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr
):
    """Sum dK and dV of 64 keys, by channel pieces, over the programs that split their list; and whether this program
    stores them: of several programs, only the last to arrive has the sums.

    FIRST: the first piece's first channel, of dK's channels and then dV's. Each warpgroup is
    counted by itself.
    """
    PIECE: gl.constexpr = pieces[0].shape[1]
    CHANNELS: gl.constexpr = WIDTH.head_dim + WIDTH.value_dim
    program = program_number(work_tile.first)
    count, split_index = split_field(splits, program, 5), split_field(splits, program, 6)
    is_mine = count == 1
    if count > 1:
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) * CHANNELS
        columns = gl.arange(0, PIECE, gl.SliceLayout(0, LAYOUT))
        if len(pieces) * PIECE > 4 * ROWS:
            # by single numbers: registers side by side would be spilled for in loops
            columns = opaque(columns)
        at = splits.sums + (split_index * CONSUMERS + CONSUMER) * (ROWS * CHANNELS) + FIRST
        at += gl.expand_dims(rows, 1) + gl.expand_dims(columns, 0)
        for piece in gl.static_range(len(pieces)):
            gl.atomic_add(at + piece * PIECE, pieces[piece], sem="relaxed")
        # one thread counts, for the additions of all
        barrier()
        arrived = gl.atomic_add(splits.arrived + split_index * COUNTERS + CONSUMER, 1, sem="acq_rel")
        barrier()
        # of two kernels the first has counted too
        is_mine = arrived % count == count - 1
        if is_mine:
            sums = ()
            for piece in gl.static_range(len(pieces)):
                sums += (gl.load(at + piece * PIECE, cache_modifier=".cg"),)
            pieces = sums
    return pieces, is_mine
