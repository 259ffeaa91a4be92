"""What kernels of keys do with dK and dV at the end."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from sagebwd.kernels.operands.strided import elements
from sagebwd.kernels.sm90.backward.tile import ROWS, barrier, reinterpret, store_tile
from sagebwd.kernels.sm90.backward.work_splits import summed


@gluon.jit
def store_block(desc, memory, x, row, column):
    """Hand 64 rows of dK or dV to TMA, once it has read what it was given before."""
    tma.store_wait(0)
    barrier()
    memory.store(x.to(memory.dtype))
    fence_async_shared()
    barrier()
    store_tile(desc, [row, column], memory)


@gluon.jit
def store_rows(x, out, strides, place, first_k, LAYOUT: gl.constexpr):
    """Rows of dK or dV of 64 keys from ``first_k`` on, by pieces of channels; those past the end are not written.

    strides: of a batch element, a head and a token; then how many channels are in memory, if not all, and the unit of
    these four (`operands.strided`).
    """
    of_batch, of_head, of_token = strides[0], strides[1], strides[2]
    if len(strides) > 3:
        of_batch, of_head = elements(strides[0], strides[4]), elements(strides[1], strides[4])
        of_token = elements(strides[2], strides[4])
    rows = first_k + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, x[0].shape[1], gl.SliceLayout(0, LAYOUT))
    written = gl.expand_dims(rows < place.length, 1)
    first = place.batch.to(gl.int64) * of_batch + place.head.to(gl.int64) * of_head
    at = first + gl.expand_dims((place.start + rows).to(gl.int64) * of_token, 1) + gl.expand_dims(columns, 0)
    for piece in gl.static_range(len(x)):
        there = written
        if len(strides) > 3:
            there = written & gl.expand_dims(piece * columns.shape[0] + columns < elements(strides[3], strides[4]), 0)
        gl.store(out + at + piece * columns.shape[0], x[piece].to(out.dtype.element_ty), mask=there)


@gluon.jit
def places(memory, desc, COUNT: gl.constexpr):
    """Shared memory as so many blocks of a descriptor."""
    return reinterpret(memory, desc.dtype, [COUNT, desc.block_shape[0], desc.block_shape[1]], desc.layout)


@gluon.jit
def store_gradient(
    pieces, out, strides, desc, memory, place, first_k, sizes, RAGGED: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """dK or dV of 64 keys from ``first_k`` on, by pieces of channels.

    memory: `places` over what this warpgroup alone has read, which pieces take in turn.
    """
    if RAGGED:
        store_rows(pieces, out, strides, place, first_k, LAYOUT)
    else:
        row = (place.batch * sizes.heads_k + place.head) * sizes.tokens_k + first_k
        for piece in gl.static_range(len(pieces)):
            part = memory.index(piece % memory.shape[0])
            store_block(desc, part, pieces[piece], row, piece * pieces[0].shape[1])


@gluon.jit
def store_both(
    dk, dv, tensors, dk_desc, dv_desc, out, place, sizes, CONSUMER: gl.constexpr, KIND: gl.constexpr,
    WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """`store_gradient` of dK and of dV, whose strides are one gradient's if there are no others; of programs that
    share a list the last stores the sums of all."""
    # how many channels are in memory, and a unit, stand beside them if not all are
    EACH: gl.constexpr = 5 if len(tensors.strides) == 10 else 3
    is_mine = True
    if tensors.shares is not None:
        PIECES: gl.constexpr = len(dk)
        sums, is_mine = summed(dk + dv, tensors.shares, place, 0, CONSUMER, WIDTH, LAYOUT)
        dk, dv = sums[:PIECES], sums[PIECES:]
    if is_mine:
        first_k = place.first + CONSUMER * ROWS
        of_dk, of_dv = tensors.strides[:EACH], tensors.strides[-EACH:]
        store_gradient(dk, tensors.dk, of_dk, dk_desc, out, place, first_k, sizes, KIND.RAGGED, LAYOUT)
        store_gradient(dv, tensors.dv, of_dv, dv_desc, out, place, first_k, sizes, KIND.RAGGED, LAYOUT)
