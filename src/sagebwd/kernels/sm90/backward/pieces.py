"""Operands and sums of a width that is no power of two, in pieces of channels; where it is one, one piece has all."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagebwd.kernels.sm90.backward.tile import load_tile


@gluon.jit
def load_pieces(desc, row, column, full, memory, place, PIECES: gl.constexpr):
    """A block of rows, PIECES boxes of channels side by side, to as many buffers from ``place`` times as many on."""
    for piece in gl.static_range(PIECES):
        load_tile(desc, [row, column + piece * memory.shape[2]], full, memory.index(place * PIECES + piece))


@gluon.jit
def load_copy(desc, row, column, full, memory, place, PIECES: gl.constexpr):
    """As `load_pieces`, of a transposed copy, whose rows are channels."""
    for piece in gl.static_range(PIECES):
        load_tile(desc, [row + piece * memory.shape[1], column], full, memory.index(place * PIECES + piece))


@gluon.jit
def pieces_of(memory, place, PIECES: gl.constexpr):
    """The buffers of a place, as a tuple."""
    out = ()
    for piece in gl.static_range(PIECES):
        out += (memory.index(place * PIECES + piece),)
    return out


@gluon.jit
def parts_of_copy(memory, place, SIZE: gl.constexpr, COUNT: gl.constexpr):
    """A place's channels of a transposed copy, SIZE of them at a time: a buffer each, or parts of one that has all."""
    out = ()
    for part in gl.static_range(COUNT):
        if memory.shape[1] == SIZE:
            out += (memory.index(place * COUNT + part),)
        else:
            out += (memory.index(place).slice(part * SIZE, SIZE, 0),)
    return out


@gluon.jit
def loaded(pieces, LAYOUT: gl.constexpr):
    """Pieces in registers."""
    return [piece.load(LAYOUT) for piece in pieces]


@gluon.jit
def repeated(x, COUNT: gl.constexpr):
    """A tuple of x, COUNT times."""
    out = ()
    for _ in gl.static_range(COUNT):
        out += (x,)
    return out


@gluon.jit
def scaled(pieces, factor):
    """Each piece times a number."""
    return [piece * factor for piece in pieces]


@gluon.jit
def halves(x, LAYOUT: gl.constexpr):
    """Each half of a result's columns: the same registers under other names."""
    N: gl.constexpr = x.shape[1] // 2
    low, high = gl.split(x.reshape([x.shape[0], 2, N]).permute([0, 2, 1]))
    return gl.convert_layout(low, LAYOUT, assert_trivial=True), gl.convert_layout(high, LAYOUT, assert_trivial=True)


@gluon.jit
def joined(low, high, LAYOUT: gl.constexpr):
    """What `halves` parted."""
    x = gl.join(low, high).permute([0, 2, 1]).reshape([low.shape[0], low.shape[1] * 2])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)
