"""dK or dV of 64 keys where it is summed in pieces of 64 channels each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagebwd.kernels.sm90.backward.dq_sums import store_block
from sagebwd.kernels.sm90.backward.tile import ROWS, reinterpret


@gluon.jit
def store_pieces(
    pieces, pointer, desc, memory, strides, batch, head_k, start_k, length_k, first_k, heads_k, tokens_k,
    RAGGED: gl.constexpr, PLACES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Pieces of the keys from ``first_k`` on; memory: what this warpgroup alone has read, with PLACES for a piece."""
    if RAGGED:
        rows = first_k + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        columns = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
        written = gl.expand_dims(rows < length_k, 1)
        out_b, out_h, out_n = strides
        out = pointer + batch.to(gl.int64) * out_b + head_k.to(gl.int64) * out_h
        at = out + gl.expand_dims((start_k + rows).to(gl.int64) * out_n, 1) + gl.expand_dims(columns, 0)
        for piece in gl.static_range(len(pieces)):
            gl.store(at + piece * ROWS, pieces[piece].to(pointer.dtype.element_ty), mask=written)
    else:
        out = reinterpret(memory, desc.dtype, [PLACES, ROWS, ROWS], desc.layout)
        row = (batch * heads_k + head_k) * tokens_k + first_k
        for piece in gl.static_range(len(pieces)):
            store_block(desc, out.index(piece % PLACES), pieces[piece], row, piece * ROWS)
