"""Tiles per CTA: key blocks that a program of the backward takes, and heads that are begun at once."""

from __future__ import annotations

import math

from sagebwd.call import Call

# Costs of a CTA beside its loop's steps, in steps: once a CTA, and once a key tile.
PER_CTA, PER_TILE = 4.0, 3.0


# After so many steps of one block of keys the next may take its first, where they add to dQ in order.
HOP = 2.0


def backward_steps(call: Call, span: int, block_q: int, tokens: float | None = None) -> float:
    """Mean number of query blocks that see a key tile of ``span`` keys, over all query heads that share it.

    tokens: of a sequence's queries; those of the longest unless given.
    """
    steps = (call.queries.tokens if tokens is None else tokens) / block_q * call.group
    if call.is_causal:
        steps /= 2
    if call.window_left >= 0:
        steps = min(steps, (call.window_left + span) / block_q * call.group)
    return steps


def backward_tiles_per_cta(call: Call, span: int, block_q: int, num_sms: int) -> int:
    """Key tiles of ``span`` keys that a persistent CTA of the one kernel takes, one after another: 1, 2 or 4.

    More tiles share the CTA's prologue and epilogue, until too few CTAs are left to fill the GPU evenly. All of a
    CTA's are one sequence's.
    """
    if call.packed:
        return _of_packed(call, span, block_q, num_sms)
    steps = backward_steps(call, span, block_q)

    def waves(tiles: int) -> float:
        programs = call.keys.programs(span * tiles)
        return -(-programs // num_sms) * (tiles * (steps + PER_TILE) + PER_CTA)

    return min((1, 2, 4), key=waves)


def _of_packed(call: Call, span: int, block_q: int, num_sms: int) -> int:
    """Where the GPU alone knows the lengths: the work of sequences of the mean length, and the longest one's CTA last.

    A sequence's last tile, and its last CTA, are half of one, on average.
    """
    queries, keys = call.queries, call.keys
    halves = keys.batch / 2
    steps = max(backward_steps(call, span, block_q, queries.total / max(queries.batch, 1)), call.group)
    longest = backward_steps(call, span, block_q, min(queries.tokens, queries.total))

    def steps_in_all(tiles: int) -> float:
        of_tiles = (keys.total / span + halves) * (steps + PER_TILE)
        of_ctas = (keys.total / (span * tiles) + halves) * PER_CTA
        last = min(tiles, -(-min(keys.tokens, keys.total) // span)) * (longest + PER_TILE) + PER_CTA
        return (of_tiles + of_ctas) * keys.heads / num_sms + last

    return min((1, 2, 4), key=steps_in_all)


def backward_heads_at_once(call: Call, span: int, block_q: int, num_sms: int) -> int:
    """Key heads whose CTAs are interleaved if dQ is added in order, where CTAs of one head start `HOP` steps apart.

    Enough heads that no SM waits; no more, so that all running heads fit L2.
    """
    starts_a_step = num_sms / max(backward_steps(call, span, block_q), 1)
    return max(1, math.ceil(starts_a_step * HOP))
