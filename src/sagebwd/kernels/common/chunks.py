"""How tokens and channels are shared out among the programs of a pass."""

from __future__ import annotations

import triton

from sagebwd.call import Packing

# Where programs hold R's signs: so many channels of all programs together, among which blocks are shared out. On an
# H100, head_dim 128, 16384 tokens x 2048, K's codes take 45 us plain, 48 rotated, and 69 if each block has a program
# (dev/log).
TURNED_PROGRAMS = 32768
# Chunks: of so many tokens, or of as many more as leave no more than so many chunks, which every block adds up.
CHUNK, MOST_CHUNKS = 256, 32


def chunks_of(packing: Packing, least: int = CHUNK, most: int = MOST_CHUNKS) -> tuple[int, int]:
    """Tokens of a chunk and chunks of the longest sequence."""
    chunk = max(least, triton.next_power_of_2(-(-packing.tokens // most)))
    return chunk, packing.grid(chunk)
