"""Channel pieces: operands and accumulators of a head size that is no power of two; else one piece is all."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagebwd.kernels.sm90.backward.tile import load_tile


@gluon.jit
def load_pieces(desc, row, column, full, memory, slot, PIECES: gl.constexpr):
    """A block of rows, PIECES boxes of channels side by side, to as many buffers from ``slot`` times as many on."""
    for piece in gl.static_range(PIECES):
        load_tile(desc, [row, column + piece * memory.shape[2]], full, memory.index(slot * PIECES + piece))


@gluon.jit
def load_copy(desc, row, column, full, memory, slot, PIECES: gl.constexpr):
    """Load a block of a transposed copy, whose rows are channels, as `load_pieces` does."""
    for piece in gl.static_range(PIECES):
        load_tile(desc, [row + piece * memory.shape[1], column], full, memory.index(slot * PIECES + piece))


@gluon.jit
def pieces_of(memory, slot, PIECES: gl.constexpr):
    """Buffers of a slot, as a tuple."""
    out = ()
    for piece in gl.static_range(PIECES):
        out += (memory.index(slot * PIECES + piece),)
    return out


@gluon.jit
def parts_of_copy(memory, slot, SIZE: gl.constexpr, COUNT: gl.constexpr):
    """Channels of a slot's transposed copy, SIZE at a time: a buffer each, or slices of one buffer."""
    out = ()
    for part in gl.static_range(COUNT):
        if memory.shape[1] == SIZE:
            out += (memory.index(slot * COUNT + part),)
        else:
            out += (memory.index(slot).slice(part * SIZE, SIZE, 0),)
    return out


@gluon.jit
def loaded(pieces, LAYOUT: gl.constexpr):
    """Load pieces into registers."""
    return [piece.load(LAYOUT) for piece in pieces]


@gluon.jit
def repeated(x, COUNT: gl.constexpr):
    """Tuple of COUNT times x."""
    out = ()
    for _ in gl.static_range(COUNT):
        out += (x,)
    return out


@gluon.jit
def scaled(pieces, factor):
    """Pieces times a scalar."""
    return [piece * factor for piece in pieces]


@gluon.jit
def halves(x, LAYOUT: gl.constexpr):
    """Halves of an accumulator's columns: the same registers under other names."""
    N: gl.constexpr = x.shape[1] // 2
    low, high = gl.split(x.reshape([x.shape[0], 2, N]).permute([0, 2, 1]))
    return gl.convert_layout(low, LAYOUT, assert_trivial=True), gl.convert_layout(high, LAYOUT, assert_trivial=True)


@gluon.jit
def joined(low, high, LAYOUT: gl.constexpr):
    """Inverse of `halves`."""
    x = gl.join(low, high).permute([0, 2, 1]).reshape([low.shape[0], low.shape[1] * 2])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)
