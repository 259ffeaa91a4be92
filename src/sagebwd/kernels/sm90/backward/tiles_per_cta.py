"""Tiles per CTA: key blocks that a program of the backward takes, and heads that are begun at once."""

from __future__ import annotations

import math

from sagebwd.call import Call

# What one of its programs takes beside the steps of its loop, in steps: once, and again in every turn.
PROGRAM, TURN = 4.0, 3.0


# After so many steps of one block of keys the next may take its first, where they add to dQ in order.
HOP = 2.0


def backward_steps(call: Call, span: int, block_q: int) -> float:
    """Blocks of queries that a block of ``span`` keys meets, of all heads that share it, in the mean."""
    steps = call.queries.tokens / block_q * call.group
    if call.is_causal:
        steps /= 2
    if call.window_left >= 0:
        steps = min(steps, (call.window_left + span) / block_q * call.group)
    return steps


def backward_turns(call: Call, span: int, block_q: int, num_sms: int) -> int:
    """How many blocks of ``span`` keys a program of the one kernel takes, one after the other: 1, 2 or 4.

    More of them share what a program costs to begin and end, until too few programs are left to fill the GPU evenly.
    """
    steps = backward_steps(call, span, block_q)

    def rounds(turns: int) -> float:
        programs = -(-call.keys.grid(span) // turns) * call.keys.batch * call.keys.heads
        return -(-programs // num_sms) * (turns * (steps + TURN) + PROGRAM)

    return min((1, 2, 4), key=rounds)


def backward_heads_at_once(call: Call, span: int, block_q: int, num_sms: int) -> int:
    """Of how many key heads to start programs by turns, where a head's own start `HOP` steps after one another.

    Enough of them that no processor waits; no more, for what is under way at once should fit L2.
    """
    starts_a_step = num_sms / max(backward_steps(call, span, block_q), 1)
    return max(1, math.ceil(starts_a_step * HOP))
