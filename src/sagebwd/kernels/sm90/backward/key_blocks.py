"""Which keys a program of the one-kernel backward takes, whose they are, and which queries see them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sagebwd.kernels.sm90.backward.tile import CONSUMERS, ROWS, sequence


@gluon.jit
def head_and_number(program, call, IN_ORDER: gl.constexpr):
    """A program's key head, counted over all sequences, and its number among those of this head.

    IN_ORDER: of heads_at_once heads, each gets its first program before any gets its second.
    """
    _, _, _, _, _, _, _, grid, heads_at_once, heads_in_all, _, _ = call
    if IN_ORDER:
        first = program // (grid * heads_at_once) * heads_at_once
        heads = gl.minimum(heads_at_once, heads_in_all - first)
        program = program - first * grid
        return first + program % heads, program // heads
    else:
        return program // grid, program % grid


@gluon.jit
def key_block(turn, number, programs, IN_ORDER: gl.constexpr):
    """The key block of a program's turn, there and back: under a causal mask all programs so get the same work.

    IN_ORDER: of one turn alone, from the last block to the first.
    """
    return turn * programs + gl.where(((turn & 1) == 1) | IN_ORDER, programs - 1 - number, number)


@gluon.jit
def keys_of(program, turn, call, VARLEN: gl.constexpr, IN_ORDER: gl.constexpr, BY_TURNS: gl.constexpr = False):
    """batch, key head, first key and number of keys of the sequence, and the first key in it of a program's turn.

    BY_TURNS: heads take programs by turns as IN_ORDER has them, but from the first block on where that does not hold.
    """
    _, cu_seqlens_k, heads_k, _, _, tokens_k, _, grid, _, _, _, _ = call
    head, number = head_and_number(program, call, IN_ORDER or BY_TURNS)
    batch = head // heads_k
    start_k, length_k = sequence(cu_seqlens_k, batch, tokens_k, VARLEN)
    first_k = key_block(turn, number, grid, IN_ORDER) * (CONSUMERS * ROWS)
    return batch, head % heads_k, start_k, length_k, first_k


@gluon.jit
def heads_and_band(batch, head_k, length_q, length_k, call, VARLEN: gl.constexpr):
    """The first query head of a batch and a key head among those of per-token values, and lower and upper."""
    _, _, heads_k, group, _, _, _, _, _, _, lower, upper = call
    if VARLEN:
        return 0, head_k, lower + (length_k - length_q), upper + (length_k - length_q)
    else:
        return batch * heads_k * group, batch * heads_k + head_k, lower, upper
