"""A BlockMask read on a GPU without a wait: its lists as states of blocks, then tiles, and what these show.

`_tiles_kernel` writes whatever follows from the lists alone, and lists the tiles that may be shown in part;
`_shown_kernel` computes the mask_mod in these. They give the numbers that `sagebwd.masks.tiles` and
`sagebwd.kernels.masks.sm90_block_lists` make with torch, but for the order in which tiles are stored.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.kernels.masks.mask_blocks import BLOCK, MASKED, SIDE, SKIP, TILE, WHOLE
from sagebwd.kernels.masks.mask_mod_kernel import across, crossings, seen, store_along
from sagebwd.kernels.runtime import program
from sagebwd.masks import mask as masks
from sagebwd.masks.kinds import ELEMENTS, WORDS_BY_KEY
from sagebwd.masks.trace_mask_mod import MOST_DIMENSIONS, Trace

OF_ELEMENTS, OF_KEYS = tl.constexpr(ELEMENTS), tl.constexpr(WORDS_BY_KEY)
if TYPE_CHECKING:
    from sagebwd.kernels.masks.traced_block_mask import Lists

SHOWS_ALL, HIDES_ALL = tl.constexpr(masks.SHOWS_ALL), tl.constexpr(masks.HIDES_ALL)
# Tiles that are stored for no place alone.
COMMON = tl.constexpr(2)
# Blocks of a list, tokens of an axis, and tiles of a row that are looked at together.
CHUNK, TOKENS, TILES = 256, 256, 32
# What follows from lengths, for which nothing is compiled.
OF_LENGTHS = [
    "count_batch", "count_head", "count_row", "index_batch", "index_head", "index_row", "index_columns",
    "full_count_batch", "full_count_head", "full_count_row", "full_batch", "full_head", "full_row", "full_columns",
    "rows", "columns", "stride_value", "longest", "chunks", "tiles_q", "tiles_k", "tokens_q", "tokens_k",
]  # fmt: skip
# Programs that take listed tiles in turn: some on each of a large GPU's processors.
PROGRAMS = 1024


class Read(NamedTuple):
    """What is read: blocks, tiles and keys of `sagebwd.masks.mask.Mask`, keys (batch, M), and what is stored: words as
    of `sm90_block_lists.BlockLists`, or elements of `Mask`."""

    blocks: Tensor
    tiles: Tensor
    keys: Tensor
    stored: Tensor


class Tiles(NamedTuple):
    """Tiles of a BlockMask before what they show: given, the states of its blocks; listed, the tiles that may be shown
    in part, and count (1,), how many these are."""

    given: Tensor
    blocks: Tensor
    tiles: Tensor
    keys: Tensor
    listed: Tensor
    count: Tensor


def read(lists: Lists, trace: Trace, sizes: tuple[int, int], tokens: tuple[int, int], batch: int, form: str) -> Read:
    """A BlockMask with room for every tile."""
    return Read(*program.run(_read, lists, *trace, sizes, tokens, batch, form))


def tiles_of(lists: Lists, sizes: tuple[int, int], tokens: tuple[int, int]) -> Tiles:
    """The tiles of a BlockMask."""
    return Tiles(*program.run(_tiles, lists, sizes, tokens, lists.counts.shape[0]))


def elements_of(found: Tiles, room: int, trace: Trace, sizes: tuple[int, int], tokens: tuple[int, int]) -> Read:
    """A BlockMask of such tiles, with room for as many as are listed: how many these are is in no program."""
    side = masks.TILE
    stored = torch.empty(COMMON.value + room, side, side, dtype=torch.bool, device=found.given.device)
    program.run(_elements, found, stored[:1], *trace, sizes, tokens)
    return Read(found.blocks, found.tiles, found.keys, stored)


def _states(lists: Lists, size: int, tokens: int) -> Tensor:
    """(B, H, rows, columns) uint8: SKIP, MASKED or WHOLE of each block, of so many keys."""
    counts, indices, *full = lists
    batch, heads, rows, listed = indices.shape
    columns = max(listed, -(-tokens // size))  # lists may have room for no more blocks than they name
    found = torch.empty(batch, heads, rows, columns, dtype=torch.uint8, device=indices.device)
    given = (counts, *counts.stride(), indices, *indices.stride(), listed)
    full = (full[0], *full[0].stride(), full[1], *full[1].stride(), full[1].shape[3]) if full[0] is not None else (
        None, 0, 0, 0, None, 0, 0, 0, 0, 0
    )  # fmt: skip
    program.launch(
        _states_kernel, (batch * heads * rows,), *given, *full, found, heads, rows, columns, CHUNK=CHUNK, num_warps=4
    )
    return found


def _read(
    lists: Lists, text: str, tables: tuple[Tensor, ...], numbers: tuple, sizes: tuple[int, int],
    tokens: tuple[int, int], batch: int, form: str,
) -> Read:  # fmt: skip
    found = _tiles(lists, sizes, tokens, batch)
    side, dtype = masks.TILE, torch.bool if form == ELEMENTS else torch.int32
    room = COMMON.value + math.prod(found.tiles.shape)
    stored = torch.empty(room, side, side if form == ELEMENTS else 4, dtype=dtype, device=found.given.device)
    _shown(found, stored, Trace(text, tables, numbers), sizes, tokens, form)
    return Read(found.blocks, found.tiles, found.keys, stored)


def _elements(
    found: Tiles, stored: Tensor, text: str, tables: tuple[Tensor, ...], numbers: tuple, sizes: tuple[int, int],
    tokens: tuple[int, int],
) -> tuple[()]:  # fmt: skip
    """What listed tiles show, into a tensor whose first tile is given."""
    _shown(found, stored, Trace(text, tables, numbers), sizes, tokens, ELEMENTS)
    return ()


def _tiles(lists: Lists, sizes: tuple[int, int], tokens: tuple[int, int], batch: int) -> Tiles:
    given, device = _states(lists, sizes[1], tokens[1]), lists.indices.device
    grid = (*given.shape[:2], *(-(-n // masks.TILE) for n in tokens))
    map_of = [-(-n // masks.BLOCK) for n in tokens]
    found = Tiles(
        given,
        torch.empty(*grid[:2], *map_of, dtype=torch.uint8, device=device),
        torch.empty(grid, dtype=torch.int32, device=device),
        program.zeros((batch, tokens[1]), torch.bool, device),
        torch.empty(math.prod(grid), dtype=torch.int32, device=device),
        program.zeros((1,), torch.int32, device),
    )
    chunks = -(-grid[3] // TILES)
    program.launch(
        _tiles_kernel, (math.prod(grid[:3]) * chunks,), given, *given.shape[2:], *grid[1:], chunks, *tokens,
        batch // grid[0], *found[1:3], found.keys.view(torch.uint8), *found[4:], TILES=TILES, **_pieces(sizes),
        num_warps=1,
    )  # fmt: skip
    return found


def _shown(
    found: Tiles, stored: Tensor, trace: Trace, sizes: tuple[int, int], tokens: tuple[int, int], form: str
) -> None:
    """Write what listed tiles show, their blocks and keys."""
    given, grid, longest = found.given, found.tiles.shape, max(tokens)
    asked, chunks = _asked(trace, found, longest), -(-longest // TOKENS)
    of_trace, places = (asked, asked.along.stride(0), longest), (found.listed, found.count)
    if crossings(trace.text):
        program.launch(
            _along_kernel, (grid[0] * grid[1] * chunks,), *of_trace, grid[1], chunks, *tokens, TEXT=trace.text,
            TOKENS=TOKENS, num_warps=4,
        )  # fmt: skip
    program.launch(
        _shown_kernel, (min(math.prod(grid), PROGRAMS),), given, *given.shape[2:], *of_trace, *grid[1:], *tokens,
        found.keys.shape[0] // grid[0], *places, found.blocks, found.keys.view(torch.uint8),
        stored.view(torch.uint8) if form == ELEMENTS else stored, TEXT=trace.text, FORM=form, **_pieces(sizes),
        num_warps=4,
    )  # fmt: skip


class Asked(NamedTuple):
    """A trace as kernels take it: tables, sizes and strides (`MOST_DIMENSIONS` of each table), numbers, none of them
    empty, and room for values along an axis of each head.

    Sizes and strides are doubled: of a 1 in a tuple Triton makes a constant, and Triton 3.6 then mixes up what is
    beside it. numbers: as `Numbers` gives them.
    """

    tables: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    numbers: tuple[int | float, ...]
    along: Tensor


def _asked(trace: Trace, found: Tiles, longest: int) -> Asked:
    given = found.given
    tables = tuple(x.view(torch.uint8) if x.dtype == torch.bool else x for x in trace.tables) or (given,)
    sizes, strides = (
        tuple(2 * n for x in tables for n in (*way(x), *(0,) * (MOST_DIMENSIONS - x.dim())))
        for way in (Tensor.size, Tensor.stride)
    )
    heads = given.shape[0] * given.shape[1]
    along = torch.empty(max(1, len(crossings(trace.text))), heads, longest, dtype=torch.int64, device=given.device)
    return Asked(tables, sizes, strides, trace.numbers or (0,), along)


def _pieces(sizes: tuple[int, int]) -> dict[str, int]:
    """Of blocks of such sizes: how many pieces of equal length make a tile of each axis, each of them in one block."""
    pieces = [masks.TILE // math.gcd(n, masks.TILE) for n in sizes]
    return {"SIZE_Q": sizes[0], "SIZE_K": sizes[1], "PIECES_Q": pieces[0], "PIECES_K": pieces[1]}


@triton.jit(do_not_specialize=OF_LENGTHS)
def _states_kernel(
    counts, count_batch, count_head, count_row, indices, index_batch, index_head, index_row, index_column,
    index_columns, full_counts, full_count_batch, full_count_head, full_count_row, full_indices, full_batch, full_head,
    full_row, full_column, full_columns, found, heads, rows, columns, CHUNK: tl.constexpr,
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
    _mark(indices, index_column, tl.minimum(count, index_columns), found, columns, MASKED, CHUNK)
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
def _state_at(given, rows, columns, of_head, q, k, SIZE_Q: tl.constexpr, SIZE_K: tl.constexpr):
    """States of the blocks that tokens lie in; q and k broadcast."""
    row, column = tl.minimum(q // SIZE_Q, rows - 1), tl.minimum(k // SIZE_K, columns - 1)
    return tl.load(given + (of_head.to(tl.int64) * rows + row) * columns + column)


@triton.jit
def _states_of(
    given, rows, columns, of_head, first_q, first_k, SIZE_Q: tl.constexpr, SIZE_K: tl.constexpr,
    PIECES_Q: tl.constexpr, PIECES_K: tl.constexpr,
):  # fmt: skip
    """Whether all blocks that lie in tiles are skipped, and whether all are whole."""
    is_skipped, is_whole = first_k >= 0, first_k >= 0
    for piece in range(PIECES_Q * PIECES_K):
        q = first_q + (piece // PIECES_K) * (TILE // PIECES_Q)
        k = first_k + (piece % PIECES_K) * (TILE // PIECES_K)
        state = _state_at(given, rows, columns, of_head, q, k, SIZE_Q, SIZE_K)
        is_skipped, is_whole = is_skipped & (state == SKIP), is_whole & (state == WHOLE)
    return is_skipped, is_whole


@triton.jit(do_not_specialize=OF_LENGTHS)
def _tiles_kernel(
    given, rows, columns, heads, tiles_q, tiles_k, chunks, tokens_q, tokens_k, copies, blocks, tiles, keys, listed,
    count, TILES: tl.constexpr, SIZE_Q: tl.constexpr, SIZE_K: tl.constexpr, PIECES_Q: tl.constexpr,
    PIECES_K: tl.constexpr,
):  # fmt: skip
    """Some tiles of one row. copies: batch elements of ``keys`` for each of the mask's."""
    number = tl.program_id(0)
    chunk, row, of_head = number % chunks, number // chunks % tiles_q, number // (chunks * tiles_q)
    column = chunk * TILES + tl.arange(0, TILES)
    first_q, first_k, there = row * TILE, column * TILE, column < tiles_k
    is_skipped, is_whole = _states_of(
        given, rows, columns, of_head, first_q, first_k, SIZE_Q, SIZE_K, PIECES_Q, PIECES_K
    )
    is_whole = is_whole & there & (first_q + TILE <= tokens_q) & (first_k + TILE <= tokens_k)
    above = tl.maximum(first_q - TILE, 0)
    _, is_below = _states_of(given, rows, columns, of_head, above, first_k, SIZE_Q, SIZE_K, PIECES_Q, PIECES_K)
    is_listed = there & (is_skipped == 0) & (is_whole == 0)
    place = tl.atomic_add(count, tl.sum(is_listed.to(tl.int32), 0), sem="relaxed")
    place += tl.cumsum(is_listed.to(tl.int32), 0) - 1
    at = of_head.to(tl.int64) * tiles_q * tiles_k + row * tiles_k + column
    tl.store(listed + place, at.to(tl.int32), mask=is_listed)
    tl.store(tiles + at, tl.where(is_listed, COMMON + place, tl.where(is_whole, SHOWS_ALL, HIDES_ALL)), mask=there)
    # the blocks of what is not listed
    state = tl.where(is_whole, WHOLE, SKIP).to(tl.uint8)[:, None]
    block_rows, block_columns = tl.cdiv(tokens_q, BLOCK), tl.cdiv(tokens_k, BLOCK)
    block_column = (column * SIDE)[:, None] + tl.arange(0, SIDE)[None, :]
    written = (there & (is_listed == 0))[:, None] & (block_column < block_columns)
    for i in tl.static_range(SIDE):
        block_row = row * SIDE + i
        to = (of_head.to(tl.int64) * block_rows + block_row) * block_columns + block_column
        tl.store(blocks + to, tl.broadcast_to(state, [TILES, SIDE]), mask=written & (block_row < block_rows))
    # keys of a whole tile below another are written by that; all that write to a key write the same
    is_first = is_whole & ((row == 0) | (is_below == 0))
    if tl.max(is_first.to(tl.int32), 0) > 0:
        k = first_k[:, None] + tl.arange(0, TILE)[None, :]
        one = tl.full([TILES, TILE], 1, tl.uint8)
        for copy in range(copies):
            batch = (of_head // heads * copies + copy).to(tl.int64)
            tl.store(keys + batch * tokens_k + k, one, mask=is_first[:, None])


@triton.jit(do_not_specialize=OF_LENGTHS)
def _along_kernel(
    asked, stride_value, longest, heads, chunks, tokens_q, tokens_k, TEXT: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """What the mask_mod computes of queries alone, and of keys alone, at some tokens."""
    number = tl.program_id(0)
    of_head = number // chunks
    batch, head = (of_head // heads).to(tl.int64), (of_head % heads).to(tl.int64)
    at = (number % chunks * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    # beyond the last token the mask_mod is asked of the last, whose tables have it
    last_q, last_k = tl.minimum(at, tokens_q - 1), tl.minimum(at, tokens_k - 1)
    along = asked.along + of_head.to(tl.int64) * longest
    store_along(TEXT, "q", asked, along, stride_value, batch, head, last_q, at < tokens_q)
    store_along(TEXT, "k", asked, along, stride_value, batch, head, last_k, at < tokens_k)


@triton.jit(do_not_specialize=OF_LENGTHS)
def _shown_kernel(
    given, rows, columns, asked, stride_value, longest, heads, tiles_q, tiles_k, tokens_q, tokens_k, copies, listed,
    count, blocks, keys, stored, TEXT: tl.constexpr, FORM: tl.constexpr, SIZE_Q: tl.constexpr, SIZE_K: tl.constexpr,
    PIECES_Q: tl.constexpr, PIECES_K: tl.constexpr,
):  # fmt: skip
    """Of listed tiles, each program some: what they show, and their blocks and keys."""
    if tl.program_id(0) == 0:
        _store_common(stored, FORM)
    block_rows, block_columns = tl.cdiv(tokens_q, BLOCK), tl.cdiv(tokens_k, BLOCK)
    for place in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        number = tl.load(listed + place)
        row, column, of_head = number // tiles_k % tiles_q, number % tiles_k, number // (tiles_q * tiles_k)
        along = asked.along + of_head.to(tl.int64) * longest
        of_tile = (
            of_head, row * TILE, column * TILE, tokens_q, tokens_k, heads, given, rows, columns, along, stride_value
        )  # fmt: skip
        to = blocks + (of_head.to(tl.int64) * block_rows + row * SIDE) * block_columns + column * SIDE
        of_blocks = to, block_columns, block_rows - row * SIDE, block_columns - column * SIDE
        of_keys = keys + (of_head // heads * copies).to(tl.int64) * tokens_k, copies, tokens_k
        at = stored + (number * 0 + place + COMMON).to(tl.int64) * (TILE * (TILE if FORM == OF_ELEMENTS else 4))
        UNIFORM: tl.constexpr = PIECES_Q * PIECES_K == 1  # a tile lies in one block
        is_whole = row < 0
        if UNIFORM:
            is_whole = _state_at(given, rows, columns, of_head, row * TILE, column * TILE, SIZE_Q, SIZE_K) == WHOLE
        if FORM == OF_ELEMENTS:
            _store_elements(at, asked, of_tile, of_blocks, of_keys, is_whole, TEXT, SIZE_Q, SIZE_K, UNIFORM)
        else:
            BY_KEY: tl.constexpr = FORM == OF_KEYS
            _store_words(at, asked, of_tile, of_blocks, of_keys, is_whole, TEXT, SIZE_Q, SIZE_K, UNIFORM, BY_KEY)


@triton.jit
def _seen(
    asked, of_tile, q, k, TEXT: tl.constexpr, SIZE_Q: tl.constexpr, SIZE_K: tl.constexpr,
    UNIFORM: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """`seen`, and where a tile lies in several blocks what their states say."""
    of_head, _, _, tokens_q, tokens_k, heads, given, rows, columns, along, stride_value = of_tile
    at_q, at_k = tl.minimum(q, tokens_q - 1).to(tl.int64), tl.minimum(k, tokens_k - 1).to(tl.int64)
    batch, head = (of_head // heads).to(tl.int64), (of_head % heads).to(tl.int64)
    shown = seen(TEXT, asked, along, stride_value, batch, head, at_q, at_k, BY_KEY)
    if not UNIFORM:
        q, k = across(q, BY_KEY), across(k, not BY_KEY)
        state = _state_at(given, rows, columns, of_head, q, k, SIZE_Q, SIZE_K)
        shown = (state == WHOLE) | ((state == MASKED) & shown)
    return shown


@triton.jit
def _store_words(
    at, asked, of_tile, of_blocks, of_keys, is_whole, TEXT: tl.constexpr, SIZE_Q: tl.constexpr, SIZE_K: tl.constexpr,
    UNIFORM: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """Words of a tile, bit after bit: word t of a row has columns 8j + 2t and 8j + 2t + 1 at bits 2j and 2j + 1, as
    `sm90_block_lists.pack` has them."""
    first_q, first_k, rows, columns = of_tile[1], of_tile[2], of_tile[3] - of_tile[1], of_tile[4] - of_tile[2]
    if BY_KEY:
        rows, columns = columns, rows
    blocks, block_columns, rows_left, columns_left = of_blocks
    row, word, side = tl.arange(0, TILE), tl.arange(0, 4), tl.arange(0, SIDE)
    words = tl.zeros([TILE, 4], tl.int32) - is_whole.to(tl.int32)
    if is_whole == 0:
        for bit in range(TILE // 4):
            column = bit // 2 * 8 + word * 2 + bit % 2
            if BY_KEY:
                q, k = first_q + column, first_k + row
            else:
                q, k = first_q + row, first_k + column
            shown = _seen(asked, of_tile, q, k, TEXT, SIZE_Q, SIZE_K, UNIFORM, BY_KEY)
            words = tl.where(shown, words | (tl.full((), 1, tl.int32) << bit), words)
    # bits of what lies before the last token
    count = columns // 8 * 2 + tl.minimum(tl.maximum(columns % 8 - word * 2, 0), 2)
    kept = tl.where(count < TILE // 4, (1 << count) - 1, -1)
    words = tl.where((row < rows)[:, None], words & kept[None, :], 0)
    tl.store(at + row[:, None] * 4 + word[None, :], words)
    # a byte of the four words has the pairs of a row with a block's columns
    of_rows = tl.reshape(words, [SIDE, BLOCK, 4])
    in_any, in_all = tl.reduce(of_rows, 1, _or), tl.reduce(of_rows, 1, _and)
    most = tl.max((in_any[:, :, None] >> (side * 8)[None, None, :]) & 255, 1)
    least = tl.min((in_all[:, :, None] >> (side * 8)[None, None, :]) & 255, 1)
    state = tl.where(most == 0, SKIP, tl.where(least == 255, WHOLE, MASKED)).to(tl.uint8)
    if BY_KEY:
        to = side[None, :] * block_columns + side[:, None]
        there = (side < rows_left)[None, :] & (side < columns_left)[:, None]
    else:
        to = side[:, None] * block_columns + side[None, :]
        there = (side < rows_left)[:, None] & (side < columns_left)[None, :]
    tl.store(blocks + to, state, mask=there)
    if BY_KEY:
        _store_keys(of_keys, first_k + row, tl.max((words != 0).to(tl.int32), 1) > 0)
    else:
        any_row, bits = tl.reduce(in_any, 0, _or), tl.arange(0, TILE // 4)
        k = first_k + (bits // 2 * 8 + bits % 2)[:, None] + (word * 2)[None, :]
        _store_keys(of_keys, k, ((any_row[None, :] >> bits[:, None]) & 1) != 0)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _and(a, b):
    return a & b


@triton.jit
def _store_elements(
    at, asked, of_tile, of_blocks, of_keys, is_whole, TEXT: tl.constexpr, SIZE_Q: tl.constexpr, SIZE_K: tl.constexpr,
    UNIFORM: tl.constexpr,
):  # fmt: skip
    """Elements of a tile, a column of blocks after the other."""
    first_q, first_k, tokens_q, tokens_k = of_tile[1], of_tile[2], of_tile[3], of_tile[4]
    blocks, block_columns, rows_left, columns_left = of_blocks
    row, column, side = tl.arange(0, TILE), tl.arange(0, BLOCK), tl.arange(0, SIDE)
    for number in range(SIDE):
        k = first_k + (column + number * BLOCK)
        shown = _seen(asked, of_tile, first_q + row, k, TEXT, SIZE_Q, SIZE_K, UNIFORM, False)
        there = (first_q + row < tokens_q)[:, None] & (k < tokens_k)[None, :]
        shown = ((is_whole | shown) & there).to(tl.int32)
        tl.store(at + row[:, None] * TILE + (k - first_k)[None, :], shown.to(tl.uint8))
        cut = tl.reshape(shown, [SIDE, BLOCK, BLOCK])
        most, least = tl.max(tl.max(cut, 2), 1), tl.min(tl.min(cut, 2), 1)
        state = tl.where(most == 0, SKIP, tl.where(least == 1, WHOLE, MASKED)).to(tl.uint8)
        there = (side < rows_left) & (number < columns_left)
        tl.store(blocks + side * block_columns + number, state, mask=there)
        _store_keys(of_keys, k, tl.max(shown, 0) > 0)


@triton.jit
def _store_keys(of_keys, k, seen):
    """Mark keys that are seen; all that write to a key write the same."""
    keys, copies, tokens_k = of_keys
    for copy in range(copies):
        tl.store(keys + tl.cast(copy, tl.int64) * tokens_k + k, (k >= 0).to(tl.uint8), mask=seen)


@triton.jit
def _store_common(stored, FORM: tl.constexpr):
    """The tiles that show all, and nothing."""
    if FORM == OF_ELEMENTS:
        at = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
        tl.store(stored + SHOWS_ALL * TILE * TILE + at, tl.full([TILE, TILE], 1, tl.uint8))
        tl.store(stored + HIDES_ALL * TILE * TILE + at, tl.full([TILE, TILE], 0, tl.uint8))
    else:
        at = tl.arange(0, TILE * 4)
        tl.store(stored + SHOWS_ALL * TILE * 4 + at, tl.full([TILE * 4], -1, tl.int32))
        tl.store(stored + HIDES_ALL * TILE * 4 + at, tl.full([TILE * 4], 0, tl.int32))
