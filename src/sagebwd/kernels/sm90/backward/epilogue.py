"""Epilogue of the backward: store dK and dV of a key tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from sagebwd.kernels.common.strided import elements
from sagebwd.kernels.sm90.backward.block_sparse import sum_of_splits
from sagebwd.kernels.sm90.backward.tile import ROWS, barrier, reinterpret, store_tile


@gluon.jit
def store_block(desc, memory, x, row, column):
    """Store 64 rows of dK or dV by TMA, once it has read the rows before."""
    tma.store_wait(0)
    barrier()
    memory.store(x.to(memory.dtype))
    fence_async_shared()
    barrier()
    store_tile(desc, [row, column], memory)


@gluon.jit
def store_rows(x, out, strides, work_tile, first_k, LAYOUT: gl.constexpr):
    """Store dK or dV of 64 keys from ``first_k`` on, by channel pieces, without TMA; rows past the end are masked.

    strides: of a batch element, a head and a token; then the number of channels in memory, if not all, and the unit of
    these four (`operands.strided`).
    """
    of_batch, of_head, of_token = strides[0], strides[1], strides[2]
    if len(strides) > 3:
        of_batch, of_head = elements(strides[0], strides[4]), elements(strides[1], strides[4])
        of_token = elements(strides[2], strides[4])
    rows = first_k + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, x[0].shape[1], gl.SliceLayout(0, LAYOUT))
    written = gl.expand_dims(rows < work_tile.length, 1)
    first = work_tile.batch.to(gl.int64) * of_batch + work_tile.head.to(gl.int64) * of_head
    at = first + gl.expand_dims((work_tile.start + rows).to(gl.int64) * of_token, 1) + gl.expand_dims(columns, 0)
    for piece in gl.static_range(len(x)):
        there = written
        if len(strides) > 3:
            there = written & gl.expand_dims(piece * columns.shape[0] + columns < elements(strides[3], strides[4]), 0)
        gl.store(out + at + piece * columns.shape[0], x[piece].to(out.dtype.element_ty), mask=there)


@gluon.jit
def as_tiles(memory, desc, COUNT: gl.constexpr):
    """Reinterpret shared memory as COUNT tiles of a descriptor."""
    return reinterpret(memory, desc.dtype, [COUNT, desc.block_shape[0], desc.block_shape[1]], desc.layout)


@gluon.jit
def store_gradient(
    pieces, out, strides, desc, memory, work_tile, first_k, sizes, KIND: gl.constexpr, LAYOUT: gl.constexpr
):
    """Store dK or dV of 64 keys from ``first_k`` on, by channel pieces.

    memory: `as_tiles` of a buffer that this warpgroup alone has read; pieces use its tiles one after another.
    """
    # a block of TMA is as wide as the form, and would write on into the next head's channels
    NARROW: gl.constexpr = len(strides) > 3
    if KIND.RAGGED or (KIND.BY_TOKEN and NARROW):
        store_rows(pieces, out, strides, work_tile, first_k, LAYOUT)
    else:
        WIDTH: gl.constexpr = pieces[0].shape[1]
        row, column = (work_tile.batch * sizes.heads_k + work_tile.head) * sizes.tokens_k + first_k, 0
        if KIND.BY_TOKEN:
            row, column = work_tile.batch * sizes.tokens_k + first_k, work_tile.head * (len(pieces) * WIDTH)
        for piece in gl.static_range(len(pieces)):
            part = memory.index(piece % memory.shape[0])
            store_block(desc, part, pieces[piece], row, column + piece * WIDTH)


@gluon.jit
def store_both(
    dk, dv, tensors, dk_desc, dv_desc, out, work_tile, sizes, CONSUMER: gl.constexpr, KIND: gl.constexpr,
    WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
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
        store_gradient(dk, tensors.dk, of_dk, dk_desc, out, work_tile, first_k, sizes, KIND, LAYOUT)
        store_gradient(dv, tensors.dv, of_dv, dv_desc, out, work_tile, first_k, sizes, KIND, LAYOUT)
