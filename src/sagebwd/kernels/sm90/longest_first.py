"""How many heads are begun together, so that under a causal mask the longest tiles go first.

Head by head a head's longest tile, 33 times its shortest at 4K tokens, begins when few others are left, and programs
end far apart.
"""

from __future__ import annotations

# Tiles of the heads that are begun together, in rounds of all programs: enough to level, few enough that L2 keeps
# these heads' keys and values.
ROUNDS = 2
# Tiles of one packed sequence whose heads take turns, at most: four rounds of an H200.
MOST_TOGETHER = 528


def heads_at_once(tiles: int, heads: int, programs: int) -> int:
    """Heads of so many tiles whose tiles take turns, in groups of equal size."""
    at_once = -(-ROUNDS * programs // max(tiles, 1))
    groups = max(heads // at_once, 1)
    return max(-(-heads // groups), 1)
