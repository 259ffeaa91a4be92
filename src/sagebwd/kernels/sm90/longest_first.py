"""How many heads take turns, so that the longest tiles go first: under a causal mask, and under block lists.

Head by head a head's longest tile, 33 times its shortest at 4K tokens, begins when few others are left, and programs
end far apart.
"""

from __future__ import annotations

# Tiles of the heads that are begun together, in rounds of all programs: enough to level, few enough that L2 keeps
# these heads' keys and values.
ROUNDS = 2
# The same under block lists, of the last heads alone: these level the end, and before them one head after another has
# L2 for its keys and values.
LAST_ROUNDS = 8
# Tiles of one packed sequence whose heads take turns, at most: four rounds of an H200.
MOST_TOGETHER = 528


def heads_at_once(tiles: int, heads: int, programs: int) -> int:
    """Heads of so many tiles whose tiles take turns, in groups of equal size."""
    at_once = -(-ROUNDS * programs // max(tiles, 1))
    groups = max(heads // at_once, 1)
    return max(-(-heads // groups), 1)


def last_heads(tiles: int, heads: int, programs: int) -> int:
    """The last heads of so many tiles that take turns, behind the others, which go head by head."""
    return max(min(heads, -(-LAST_ROUNDS * programs // max(tiles, 1))), 1)


def in_turns(number, first, heads, tiles):
    """The tile that is taken as the ``number``-th where ``heads`` heads of so many tiles take turns from ``first`` on.

    Of integers, or of a kernel's.
    """
    return first + (number - first) % heads * tiles + (number - first) // heads
