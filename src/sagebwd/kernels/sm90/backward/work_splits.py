"""Work splits: programs that share one block list add up dK and dV in FP32 in memory; the last one stores both."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagebwd.kernels.sm90.backward.block_sparse import split_field
from sagebwd.kernels.sm90.backward.tile import CONSUMERS, ROWS, barrier, opaque, program_number

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
