"""How tokens are shared out among the programs of a pass that adds up chunks, or where each takes several blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from sagebwd.call import Packing
from sagebwd.kernels.common.tile import block_and_head, block_in_sequence, sequence

# Where programs hold R's signs: so many channels of all programs together, among which blocks are shared out. On an
# H100, head_dim 128, 16384 tokens x 2048, K's codes take 45 us plain, 48 rotated, and 69 if each block has a program
# (dev/log).
TURNED_PROGRAMS = 32768
# Chunks: of so many tokens, or of as many more as leave no more than so many chunks, which every block adds up.
CHUNK, MOST_CHUNKS = 256, 32


def chunks_of(packing: Packing, least: int = CHUNK, most: int = MOST_CHUNKS) -> tuple[int, int]:
    """Tokens of a chunk, and chunks of a head.

    Of packed sequences each has a length of its own, by which kernels take so many more (`its_chunk`): the chunk here
    is the least, and a sequence's lie as such blocks in a padded layout.
    """
    if packing.cu_seqlens is not None:
        return least, packing.blocks(least)
    chunk = max(least, triton.next_power_of_2(-(-packing.tokens // most)))
    return chunk, packing.blocks(chunk)


@triton.jit
def its_chunk(chunk, length, MOST: tl.constexpr, VARLEN: tl.constexpr):
    """Tokens of a chunk of a sequence, of `chunks_of`: its numbers depend on no other and on no bound."""
    if VARLEN:
        wanted = tl.cdiv(length, MOST)
        grown = length * 0 + chunk
        while grown < wanted:
            grown *= 2
        return grown
    else:
        return chunk


@triton.jit
def chunk_range(part, chunk, length, MOST: tl.constexpr, VARLEN: tl.constexpr):
    """A sequence's chunk number ``part``: its first token and the first beyond, no later if there is none."""
    chunk = its_chunk(chunk, length, MOST, VARLEN)
    if VARLEN:  # of the least chunks there are more than chunks
        part = tl.minimum(part, tl.cdiv(length, chunk))
    return part * chunk, tl.minimum(part * chunk + chunk, length)


@triton.jit
def chunks_of_sequence(chunk, chunks, cu_seqlens, batch, MOST: tl.constexpr, VARLEN: tl.constexpr):
    """The first of a sequence's chunks among those of its head, and how many it has; chunk, chunks: of `chunks_of`."""
    if VARLEN:
        start, length = sequence(cu_seqlens, batch, 0, VARLEN)
        return start // chunk + batch, tl.cdiv(length, its_chunk(chunk, length, MOST, VARLEN))
    else:
        return 0, chunks


def shares_of(packing: Packing, block: int, share: int) -> tuple[int, int]:
    """Programs of a pass of which each takes ``share`` blocks of tokens, and what its kernel takes as ``parts``.

    Those are the programs of a head or, of packed sequences, blocks of a program (`shared_blocks`).
    """
    if packing.cu_seqlens is not None:
        return packing.programs(block * share), share
    parts = -(-max(packing.blocks(block), 1) // share)
    return parts * packing.heads_in_all, parts


def turned_share(packing: Packing, block: int, width: int) -> int:
    """Blocks of a program that holds R's signs, of so many channels (`TURNED_PROGRAMS`)."""
    return max(1, packing.programs(block) * width // TURNED_PROGRAMS)


@triton.jit
def shared_blocks(parts, heads, cu_seqlens, tokens, BLOCK: tl.constexpr, VARLEN: tl.constexpr):
    """A program's first block in its sequence, and the head counted over all sequences; parts: of `shares_of`."""
    if VARLEN:
        programs = tl.num_programs(0) // heads
        return block_in_sequence(programs, heads, cu_seqlens, tokens, BLOCK * parts, VARLEN)
    else:
        return block_and_head(parts)


@triton.jit
def blocks_apart(parts, length, BLOCK: tl.constexpr, VARLEN: tl.constexpr):
    """How far apart a program's blocks are: as many programs share a sequence's, one at least."""
    if VARLEN:
        return tl.maximum(tl.cdiv(length, BLOCK * parts), 1)
    else:
        return parts
