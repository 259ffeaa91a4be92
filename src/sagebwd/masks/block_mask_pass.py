"""A BlockMask read on a GPU without a wait: its lists as states of blocks, then one pass over tiles, a program a tile.

The pass computes the mask_mod where the lists say that a block is shown in part. It gives the numbers that
`sagebwd.masks.tiles` and `sagebwd.masks.sm90_block_lists` make with torch: only tiles that may be shown in part are
stored, all else are the two tiles that show all and nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.masks import mask as masks
from sagebwd.masks.mask_blocks import BLOCK, MASKED, SIDE, SKIP, TILE, WHOLE, bits_of, program, states_of
from sagebwd.masks.mask_mod_kernel import crossings, seen, store_along
from sagebwd.masks.trace_mask_mod import Trace

SHOWS_ALL, HIDES_ALL = tl.constexpr(masks.SHOWS_ALL), tl.constexpr(masks.HIDES_ALL)
# Tiles that are stored for no place alone, and the blocks of a list that are looked at together.
COMMON, CHUNK = tl.constexpr(2), 256


class Lists(NamedTuple):
    """Lists of a BlockMask: how many blocks of keys each block of queries sees in part, (B, H, rows), and which,
    (B, H, rows, columns), then the same of blocks that it sees whole, or None."""

    counts: Tensor
    indices: Tensor
    full_counts: Tensor | None
    full_indices: Tensor | None


class Read(NamedTuple):
    """What a pass writes: blocks, tiles and keys of `sagebwd.masks.mask.Mask`, keys (batch, M); and None where it was
    not asked for, words of rows of queries and of rows of keys as of `sm90_block_lists.BlockLists`, and elements."""

    blocks: Tensor
    tiles: Tensor
    keys: Tensor
    words: Tensor | None
    words_by_key: Tensor | None
    elements: Tensor | None


def states(lists: Lists) -> Tensor:
    """(B, H, rows, columns) uint8: SKIP, MASKED or WHOLE of each block."""
    return program().run(_states, lists)[0]


def stored(given: Tensor, sizes: tuple[int, int], tokens: tuple[int, int]) -> Tensor:
    """(B, H, N / TILE, M / TILE) int32: 1 where a tile is stored, else 0."""
    return program().run(_stored, given, sizes, tokens)[0]


def read(
    lists: Lists, trace: Trace, sizes: tuple[int, int], tokens: tuple[int, int], batch: int, *, words: bool = False,
    words_by_key: bool = False, elements: bool = False,
) -> Read:  # fmt: skip
    """A BlockMask with room for every tile."""
    return Read(*program().run(_read, lists, *trace, sizes, tokens, batch, words, words_by_key, elements))


def read_stored(
    given: Tensor, places: Tensor, count: int, trace: Trace, sizes: tuple[int, int], tokens: tuple[int, int]
) -> Read:
    """A BlockMask of such states, with elements of ``count`` tiles; places, of each among them, as of `stored`."""
    return Read(*program().run(_read_stored, given, places, count, *trace, sizes, tokens))


def _grid(given: Tensor, tokens: tuple[int, int]) -> tuple[int, int, int, int]:
    return (*given.shape[:2], *(-(-n // masks.TILE) for n in tokens))


def _states(lists: Lists) -> tuple[Tensor]:
    counts, indices, *full = lists
    found = torch.empty(indices.shape, dtype=torch.uint8, device=indices.device)
    given = (counts, *counts.stride(), indices, *indices.stride())
    full = (full[0], *full[0].stride(), full[1], *full[1].stride(), full[1].shape[3]) if full[0] is not None else (
        None, 0, 0, 0, None, 0, 0, 0, 0, 0
    )  # fmt: skip
    batch, heads, rows, columns = indices.shape
    program().launch(
        _states_kernel, (batch * heads * rows,), *given, *full, found, heads, rows, columns, CHUNK=CHUNK, num_warps=4
    )
    return (found,)


def _stored(given: Tensor, sizes: tuple[int, int], tokens: tuple[int, int]) -> tuple[Tensor]:
    grid = _grid(given, tokens)
    found = torch.empty(grid, dtype=torch.int32, device=given.device)
    program().launch(
        _stored_kernel,
        (math.prod(grid),),
        *_of_states(given),
        *grid[1:],
        *tokens,
        found,
        **_pieces(sizes),
        num_warps=1,
    )
    return (found,)


def _read(
    lists: Lists, text: str, tables: tuple[Tensor, ...], numbers: tuple, sizes: tuple[int, int],
    tokens: tuple[int, int], batch: int, words: bool, words_by_key: bool, elements: bool,
) -> Read:  # fmt: skip
    given, trace = _states(lists)[0], Trace(text, tables, numbers)
    count = math.prod(_grid(given, tokens))
    return _pass(given, None, count, trace, sizes, tokens, batch, words, words_by_key, elements)


def _read_stored(
    given: Tensor, places: Tensor, count: int, text: str, tables: tuple[Tensor, ...], numbers: tuple,
    sizes: tuple[int, int], tokens: tuple[int, int],
) -> Read:  # fmt: skip
    trace = Trace(text, tables, numbers)
    return _pass(given, places, count, trace, sizes, tokens, given.shape[0], False, False, True)


def _pass(
    given: Tensor, places: Tensor | None, count: int, trace: Trace, sizes: tuple[int, int], tokens: tuple[int, int],
    batch: int, words: bool, words_by_key: bool, elements: bool,
) -> Read:  # fmt: skip
    grid, device = _grid(given, tokens), given.device
    map_of, side = [-(-n // masks.BLOCK) for n in tokens], masks.TILE
    tiles = COMMON.value + count
    found = Read(
        torch.empty(*grid[:2], *map_of, dtype=torch.uint8, device=device),
        torch.empty(grid, dtype=torch.int32, device=device),
        program().zeros((batch, tokens[1]), torch.bool, device),
        torch.empty(tiles, side, 4, dtype=torch.int32, device=device) if words else None,
        torch.empty(tiles, side, 4, dtype=torch.int32, device=device) if words_by_key else None,
        torch.empty(tiles, side, side, dtype=torch.bool, device=device) if elements else None,
    )
    computed = _tables_of(trace, given)
    longest = max(tokens)
    along = torch.empty(max(1, len(crossings(trace.text))), *grid[:2], longest, dtype=torch.int64, device=device)
    chunks = -(-longest // CHUNK)
    program().launch(
        _along_kernel, (grid[0] * grid[1] * chunks,), *computed, grid[1], chunks, *tokens, longest, along,
        along.stride(0), TEXT=trace.text, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    program().launch(
        _pass_kernel,
        (math.prod(grid),),
        *_of_states(given),
        *grid[1:],
        *tokens,
        batch // grid[0],
        places,
        *computed,
        along,
        along.stride(0),
        longest,
        *found[:2],
        found.keys.view(torch.uint8),
        *found[3:5],
        found.elements.view(torch.uint8) if elements else None,
        TEXT=trace.text,
        **_pieces(sizes),
        num_warps=8,
    )
    return found


def _tables_of(trace: Trace, given: Tensor) -> tuple[tuple, tuple, tuple, tuple]:
    """A trace's tables, their sizes and strides, and its numbers, none of them empty, as Triton takes tuples."""
    tables = tuple(x.view(torch.uint8) if x.dtype == torch.bool else x for x in trace.tables) or (given,)
    lie = (tuple(tuple(way(x)) or (1,) for x in tables) for way in (Tensor.size, Tensor.stride))
    return tables, *lie, trace.numbers or (0,)


def _of_states(given: Tensor) -> tuple[Tensor | int, ...]:
    return given, *given.shape[2:]


def _pieces(sizes: tuple[int, int]) -> dict[str, int]:
    """Of blocks of such sizes: how many of equal length make a tile of each axis, down to single tokens."""
    pieces = [1 if n % masks.TILE == 0 else masks.TILE // n if masks.TILE % n == 0 else masks.TILE for n in sizes]
    return {"SIZE_Q": sizes[0], "SIZE_K": sizes[1], "PIECES_Q": pieces[0], "PIECES_K": pieces[1]}


@triton.jit
def _states_kernel(
    counts, count_batch, count_head, count_row, indices, index_batch, index_head, index_row, index_column, full_counts,
    full_count_batch, full_count_head, full_count_row, full_indices, full_batch, full_head, full_row, full_column,
    full_columns, found, heads, rows, columns, CHUNK: tl.constexpr,
):  # fmt: skip
    """States of one block of queries: none is seen, then those that are in part, then those that are whole."""
    number = tl.program_id(0)
    row, head, batch = number % rows, (number // rows % heads).to(tl.int64), (number // rows // heads).to(tl.int64)
    found += number.to(tl.int64) * columns
    for first in range(0, columns, CHUNK):
        at = first + tl.arange(0, CHUNK)
        tl.store(found + at, tl.full([CHUNK], SKIP, tl.uint8), mask=at < columns)
    tl.debug_barrier()
    count = tl.load(counts + batch * count_batch + head * count_head + row * count_row)
    indices += batch * index_batch + head * index_head + row * index_row
    _mark(indices, index_column, tl.minimum(count, columns), found, columns, MASKED, CHUNK)
    if full_counts is not None:
        tl.debug_barrier()
        count = tl.load(full_counts + batch * full_count_batch + head * full_count_head + row * full_count_row)
        full_indices += batch * full_batch + head * full_head + row * full_row
        _mark(full_indices, full_column, tl.minimum(count, full_columns), found, columns, WHOLE, CHUNK)


@triton.jit
def _mark(indices, stride, count, found, columns, STATE: tl.constexpr, CHUNK: tl.constexpr):
    """Write the state of the blocks that a list names."""
    for first in range(0, count, CHUNK):
        at = first + tl.arange(0, CHUNK)
        column = tl.load(indices + at * stride, mask=at < count, other=-1)
        there = (column >= 0) & (column < columns)
        tl.store(found + column, tl.full([CHUNK], STATE, tl.uint8), mask=there)


@triton.jit
def _states_of_tile(
    given, rows, columns, of_head, first_q, first_k, SIZE_Q: tl.constexpr, SIZE_K: tl.constexpr,
    PIECES_Q: tl.constexpr, PIECES_K: tl.constexpr,
):  # fmt: skip
    """(PIECES_Q, PIECES_K): of the pieces of a tile, the states of the blocks that they lie in."""
    q = (first_q + tl.arange(0, PIECES_Q) * (TILE // PIECES_Q)) // SIZE_Q
    k = (first_k + tl.arange(0, PIECES_K) * (TILE // PIECES_K)) // SIZE_K
    q, k = tl.minimum(q, rows - 1), tl.minimum(k, columns - 1)
    return tl.load(given + (of_head.to(tl.int64) * rows + q)[:, None] * columns + k[None, :])


@triton.jit
def _is_all(state, STATE: tl.constexpr):
    return tl.min(tl.min((state == STATE).to(tl.int32), 1), 0) > 0


@triton.jit
def _stored_kernel(
    given, rows, columns, heads, tiles_q, tiles_k, tokens_q, tokens_k, found, SIZE_Q: tl.constexpr,
    SIZE_K: tl.constexpr, PIECES_Q: tl.constexpr, PIECES_K: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    first_q, first_k = number // tiles_k % tiles_q * TILE, number % tiles_k * TILE
    of_head = number // (tiles_q * tiles_k)
    state = _states_of_tile(given, rows, columns, of_head, first_q, first_k, SIZE_Q, SIZE_K, PIECES_Q, PIECES_K)
    inside = (first_q + TILE <= tokens_q) & (first_k + TILE <= tokens_k)
    tl.store(found + number, 1 - (_is_all(state, SKIP) | (_is_all(state, WHOLE) & inside)).to(tl.int32))


@triton.jit
def _along_kernel(
    tables, sizes, strides, numbers, heads, chunks, tokens_q, tokens_k, longest, along, stride_value,
    TEXT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What the mask_mod computes of queries alone, and of keys alone, at some tokens."""
    number = tl.program_id(0)
    of_head = number // chunks
    batch, head = (of_head // heads).to(tl.int64), (of_head % heads).to(tl.int64)
    at = (number % chunks * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    along += of_head.to(tl.int64) * longest
    # beyond the last token the mask_mod is asked of the last, whose tables have it
    last_q, last_k = tl.minimum(at, tokens_q - 1), tl.minimum(at, tokens_k - 1)
    store_along(TEXT, "q", tables, sizes, strides, numbers, batch, head, last_q, at < tokens_q, along, stride_value)
    store_along(TEXT, "k", tables, sizes, strides, numbers, batch, head, last_k, at < tokens_k, along, stride_value)


@triton.jit
def _pass_kernel(
    given, rows, columns, heads, tiles_q, tiles_k, tokens_q, tokens_k, copies, places, tables, sizes, strides, numbers,
    along, stride_value, longest, blocks, tiles, keys, words, words_by_key, elements, TEXT: tl.constexpr,
    SIZE_Q: tl.constexpr, SIZE_K: tl.constexpr, PIECES_Q: tl.constexpr, PIECES_K: tl.constexpr,
):  # fmt: skip
    """copies: batch elements of ``keys`` for each of the mask's. places: of tiles that are stored, among these; None
    where each has one of its own."""
    number = tl.program_id(0)
    if number == 0:
        _store_tile(tl.full([TILE, TILE], 1, tl.int1), SHOWS_ALL, words, words_by_key, elements)
        _store_tile(tl.full([TILE, TILE], 0, tl.int1), HIDES_ALL, words, words_by_key, elements)
    first_q, first_k = number // tiles_k % tiles_q * TILE, number % tiles_k * TILE
    of_head = number // (tiles_q * tiles_k)
    head, batch = of_head % heads, of_head // heads
    state = _states_of_tile(given, rows, columns, of_head, first_q, first_k, SIZE_Q, SIZE_K, PIECES_Q, PIECES_K)
    inside = (first_q + TILE <= tokens_q) & (first_k + TILE <= tokens_k)
    is_skipped, is_whole = _is_all(state, SKIP), _is_all(state, WHOLE) & inside
    number_in_tile, side = tl.arange(0, TILE), tl.arange(0, SIDE)
    row, column = first_q // BLOCK + side, first_k // BLOCK + side
    block_rows, block_columns = tl.cdiv(tokens_q, BLOCK), tl.cdiv(tokens_k, BLOCK)
    at_blocks = (of_head.to(tl.int64) * block_rows + row)[:, None] * block_columns + column[None, :]
    blocks_there = (row < block_rows)[:, None] & (column < block_columns)[None, :]
    if is_skipped | is_whole:
        all_of_it = tl.where(is_whole, WHOLE, SKIP).to(tl.uint8)
        tl.store(blocks + at_blocks, tl.zeros([SIDE, SIDE], tl.uint8) + all_of_it, mask=blocks_there)
        tl.store(tiles + number, tl.where(is_whole, SHOWS_ALL, HIDES_ALL))
        if is_whole:
            _store_keys(keys, batch, copies, tokens_k, first_k + number_in_tile, number_in_tile >= 0)
    else:
        q, k = first_q + number_in_tile, first_k + number_in_tile
        # beyond the last token the mask_mod is asked of the last, whose tables have it
        at_q, at_k = tl.minimum(q, tokens_q - 1).to(tl.int64), tl.minimum(k, tokens_k - 1).to(tl.int64)
        asked = seen(
            TEXT, tables, sizes, strides, numbers, batch.to(tl.int64), head.to(tl.int64), at_q, at_k,
            along + of_head.to(tl.int64) * longest, stride_value,
        )  # fmt: skip
        if PIECES_Q * PIECES_K > 1:
            of_pairs = _states_of_tile(given, rows, columns, of_head, first_q, first_k, SIZE_Q, SIZE_K, TILE, TILE)
        else:
            of_pairs = state
        there = (q < tokens_q)[:, None] & (k < tokens_k)[None, :]
        shown = ((of_pairs == WHOLE) | ((of_pairs == MASKED) & asked)) & there
        tl.store(blocks + at_blocks, states_of(shown, shown == 0), mask=blocks_there)
        place = number
        if places is not None:
            place = tl.load(places + number)
        place += COMMON
        tl.store(tiles + number, place)
        _store_tile(shown, place, words, words_by_key, elements)
        any_sees = tl.max(shown.to(tl.int32), 0)
        _store_keys(keys, batch, copies, tokens_k, k, any_sees != 0)


@triton.jit
def _store_keys(keys, batch, copies, tokens_k, k, seen):
    """Mark keys that are seen; all that write to a key write the same."""
    for copy in range(copies):
        row_of_keys = keys + (batch * copies + copy).to(tl.int64) * tokens_k
        tl.store(row_of_keys + k, tl.full([TILE], 1, tl.uint8), mask=seen)


@triton.jit
def _store_tile(shown, place, words, words_by_key, elements):
    """Store a tile's bits by rows of queries and of keys, and its elements, where they are asked for."""
    along, word = tl.arange(0, TILE), tl.arange(0, 4)
    at_words = tl.cast(place, tl.int64) * (TILE * 4)
    if words is not None:
        tl.store(words + at_words + along[:, None] * 4 + word[None, :], bits_of(shown, False))
    if words_by_key is not None:
        tl.store(words_by_key + at_words + along[None, :] * 4 + word[:, None], bits_of(shown, True))
    if elements is not None:
        at = tl.cast(place, tl.int64) * (TILE * TILE) + along[:, None] * TILE + along[None, :]
        tl.store(elements + at, shown.to(tl.uint8))
