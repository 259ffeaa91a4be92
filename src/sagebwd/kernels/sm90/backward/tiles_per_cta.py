"""Tiles per CTA: key blocks that a program of the backward takes, and heads that are begun at once."""

from __future__ import annotations

import math

from sagebwd.call import Call

# Costs of a CTA beside its loop's steps, in steps: once a CTA, and once a key tile.
PER_CTA, PER_TILE = 4.0, 3.0


# After so many steps of one block of keys the next may take its first, where they add to dQ in order.
HOP = 2.0


def backward_steps(call: Call, span: int, block_q: int) -> float:
    """Mean number of query blocks that see a key tile of ``span`` keys, over all query heads that share it."""
    steps = call.queries.tokens / block_q * call.group
    if call.is_causal:
        steps /= 2
    if call.window_left >= 0:
        steps = min(steps, (call.window_left + span) / block_q * call.group)
    return steps


def backward_tiles_per_cta(call: Call, span: int, block_q: int, num_sms: int) -> int:
    """Key tiles of ``span`` keys that a persistent CTA of the one kernel takes, one after another: 1, 2 or 4.

    More tiles share the CTA's prologue and epilogue, until too few CTAs are left to fill the GPU evenly.
    """
    steps = backward_steps(call, span, block_q)

    def waves(tiles: int) -> float:
        programs = call.keys.programs(span * tiles)
        return -(-programs // num_sms) * (tiles * (steps + PER_TILE) + PER_CTA)

    return min((1, 2, 4), key=waves)


def backward_heads_at_once(call: Call, span: int, block_q: int, num_sms: int) -> int:
    """Key heads whose CTAs are interleaved if dQ is added in order, where CTAs of one head start `HOP` steps apart.

    Enough heads that no SM waits; no more, so that all running heads fit L2.
    """
    starts_a_step = num_sms / max(backward_steps(call, span, block_q), 1)
    return max(1, math.ceil(starts_a_step * HOP))
