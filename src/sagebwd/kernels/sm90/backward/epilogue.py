"""Epilogue of the backward: store dK and dV of a key tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from sagebwd.kernels.common.strided import elements
from sagebwd.kernels.sm90.backward.block_sparse import sum_of_splits
from sagebwd.kernels.sm90.backward.tile import ROWS, barrier, reinterpret, store_tile


@gluon.jit
def share_block(memory, x):
    """Write 64 rows of dK or dV to shared memory, once TMA has read what it stores of there."""
    tma.store_wait(0)
    barrier()
    memory.store(x.to(memory.dtype))


@gluon.jit
def store_block(desc, memory, x, row, column):
    """Store 64 rows of dK or dV by TMA."""
    share_block(memory, x)
    fence_async_shared()
    barrier()
    store_tile(desc, [row, column], memory)


@gluon.jit
def store_rows(x, out, strides, memory, work_tile, first_k):
    """Store dK or dV of 64 keys from ``first_k`` on, by channel pieces, without TMA; rows past the end are masked.

    memory: shared, by which a thread gets eight channels side by side, of products it has two; or None. strides: of a
    batch element, a head and a token; then the number of channels in memory, if not all, and the unit of these four
    (`operands.strided`).
    """
    of_batch, of_head, of_token = strides[0], strides[1], strides[2]
    if len(strides) > 3:
        of_batch, of_head = elements(strides[0], strides[4]), elements(strides[1], strides[4])
        of_token = elements(strides[2], strides[4])
    LANES: gl.constexpr = x[0].shape[1] // 8
    SIDE_BY_SIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    LAYOUT: gl.constexpr = x[0].type.layout if memory is None else SIDE_BY_SIDE
    rows = first_k + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, x[0].shape[1], gl.SliceLayout(0, LAYOUT))
    written = gl.expand_dims(rows < work_tile.length, 1)
    first = work_tile.batch.to(gl.int64) * of_batch + work_tile.head.to(gl.int64) * of_head
    at = first + gl.expand_dims((work_tile.start + rows).to(gl.int64) * of_token, 1) + gl.expand_dims(columns, 0)
    for piece in gl.static_range(len(x)):
        there, tile = written, x[piece].to(out.dtype.element_ty)
        if len(strides) > 3:
            there = written & gl.expand_dims(piece * columns.shape[0] + columns < elements(strides[3], strides[4]), 0)
        if memory is not None:
            share_block(memory.index(piece % memory.shape[0]), tile)
            barrier()
            tile = memory.index(piece % memory.shape[0]).load(LAYOUT)
        gl.store(out + at + piece * columns.shape[0], tile, mask=there)


@gluon.jit
def store_blocks(pieces, desc, memory, work_tile, first_k, sizes, by_token, KIND: gl.constexpr):
    """Store dK or dV of 64 keys from ``first_k`` on, by channel pieces, by TMA."""
    WIDTH: gl.constexpr = pieces[0].shape[1]
    tokens = sizes.total_k if KIND.PACKED else sizes.tokens_k
    of_batch = 0 if KIND.PACKED else work_tile.batch * tokens
    of_head = of_batch * sizes.heads_k + work_tile.head * tokens
    row = work_tile.start + first_k + gl.where(by_token, of_batch, of_head)
    column = gl.where(by_token, work_tile.head * (len(pieces) * WIDTH), 0)
    for piece in gl.static_range(len(pieces)):
        store_block(desc, memory.index(piece % memory.shape[0]), pieces[piece], row, column + piece * WIDTH)


@gluon.jit
def as_tiles(memory, desc, COUNT: gl.constexpr):
    """Reinterpret shared memory as COUNT tiles of a descriptor."""
    return reinterpret(memory, desc.dtype, [COUNT, desc.block_shape[0], desc.block_shape[1]], desc.layout)


@gluon.jit
def store_gradient(
    pieces, out, strides, desc, memory, work_tile, first_k, sizes, KIND: gl.constexpr, IN_TURN: gl.constexpr = False
):  # fmt: skip
    """Store dK or dV of 64 keys from ``first_k`` on, by channel pieces: by TMA, or by rows where the sequence ends.

    memory: `as_tiles` of a buffer that this warpgroup alone has read; pieces use its tiles one after another. IN_TURN:
    the program has more tiles of keys than one; rows by shared memory would cost its loops of masked blocks 27%.
    """
    NARROW: gl.constexpr = len(strides) > 3
    by_token = strides[1] < strides[2]  # heads of a token lie side by side
    if NARROW or KIND.RAGGED:
        is_whole = first_k + ROWS <= work_tile.length
        if NARROW:  # a block of TMA is as wide as the form, and would write on into the next head's channels
            is_whole = is_whole & (by_token == 0)
        if is_whole:
            store_blocks(pieces, desc, memory, work_tile, first_k, sizes, by_token, KIND)
        else:
            store_rows(pieces, out, strides, None if IN_TURN else memory, work_tile, first_k)
    else:
        store_blocks(pieces, desc, memory, work_tile, first_k, sizes, by_token, KIND)


@gluon.jit
def store_both(
    dk, dv, tensors, dk_desc, dv_desc, out, work_tile, sizes, CONSUMER: gl.constexpr, KIND: gl.constexpr,
    WIDTH: gl.constexpr, IN_TURN: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store dK and dV, whose strides are one gradient's if there are no others; of programs that split one list, the
    last stores the sums of all."""
    # how many channels are in memory, and a unit, stand beside them if not all are
    EACH: gl.constexpr = 5 if len(tensors.strides) == 10 else 3
    is_mine = True
    if tensors.work_splits is not None:
        PIECES: gl.constexpr = len(dk)
        sums, is_mine = sum_of_splits(dk + dv, tensors.work_splits, work_tile, 0, CONSUMER, WIDTH, LAYOUT)
        dk, dv = sums[:PIECES], sums[PIECES:]
    if is_mine:
        first_k = work_tile.first + CONSUMER * ROWS
        of_dk, of_dv = tensors.strides[:EACH], tensors.strides[-EACH:]
        store_gradient(dk, tensors.dk, of_dk, dk_desc, out, work_tile, first_k, sizes, KIND, IN_TURN)
        store_gradient(dv, tensors.dv, of_dv, dv_desc, out, work_tile, first_k, sizes, KIND, IN_TURN)
