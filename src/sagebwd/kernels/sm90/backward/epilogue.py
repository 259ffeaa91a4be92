"""What kernels of keys do with dK and dV at the end."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from sagebwd.kernels.sm90.backward.tile import ROWS, barrier, reinterpret, store_tile


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

    strides: of a batch element, a head and a token; then how many channels are in memory, if not all.
    """
    of_batch, of_head, of_token = strides[0], strides[1], strides[2]
    rows = first_k + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, x[0].shape[1], gl.SliceLayout(0, LAYOUT))
    written = gl.expand_dims(rows < place.length, 1)
    first = place.batch.to(gl.int64) * of_batch + place.head.to(gl.int64) * of_head
    at = first + gl.expand_dims((place.start + rows).to(gl.int64) * of_token, 1) + gl.expand_dims(columns, 0)
    for piece in gl.static_range(len(x)):
        there = written
        if len(strides) > 3:
            there = written & gl.expand_dims(piece * columns.shape[0] + columns < strides[3], 0)
        gl.store(out + at + piece * columns.shape[0], x[piece].to(out.dtype.element_ty), mask=there)


@gluon.jit
def store_gradients(
    dk_sums, dv_sums, tensors, descriptors, v_part, dq_part, place, first_k, sizes, IN_TURN: gl.constexpr,
    RAGGED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys from ``first_k`` on, by pieces of channels.

    v_part, dq_part: this warpgroup's first piece of V, and of blocks of dQ.
    """
    dk_desc, dv_desc = descriptors
    PIECE: gl.constexpr = dk_sums[0].shape[1]
    if RAGGED:
        strides = tensors.strides
        EACH: gl.constexpr = 4 if len(strides) == 8 else 3
        store_rows(dk_sums, tensors.dk, strides[:EACH], place, first_k, LAYOUT)
        store_rows(dv_sums, tensors.dv, strides[-EACH:], place, first_k, LAYOUT)
    else:
        # over what this warpgroup alone has read: V, or where the next turn's may lie, its blocks of dQ^T
        out = v_part
        if IN_TURN:
            gl.static_assert(PIECE == ROWS)
            out = reinterpret(dq_part, dk_desc.dtype, [ROWS, PIECE], dk_desc.layout)
        row = (place.batch * sizes.heads_k + place.head) * sizes.tokens_k + first_k
        for piece in gl.static_range(len(dk_sums)):
            store_block(dk_desc, out, dk_sums[piece], row, piece * PIECE)
        for piece in gl.static_range(len(dv_sums)):
            store_block(dv_desc, out, dv_sums[piece], row, piece * PIECE)


@gluon.jit
def store_pieces(
    pieces, out, strides, desc, memory, place, first_k, sizes, RAGGED: gl.constexpr, PLACES: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """dK or dV of 64 keys from ``first_k`` on; memory: what this warpgroup alone has read, with PLACES for a piece."""
    if RAGGED:
        store_rows(pieces, out, strides, place, first_k, LAYOUT)
    else:
        memory = reinterpret(memory, desc.dtype, [PLACES, ROWS, ROWS], desc.layout)
        row = (place.batch * sizes.heads_k + place.head) * sizes.tokens_k + first_k
        for piece in gl.static_range(len(pieces)):
            store_block(desc, memory.index(piece % PLACES), pieces[piece], row, piece * ROWS)
