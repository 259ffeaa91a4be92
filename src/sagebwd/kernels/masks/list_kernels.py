"""Block lists of a mask made on a GPU, a program a list: of `lists`, `sm90_block_lists` and `work_splits` here.

Every number is settled, those beyond a list's counts too: the backward looks at a list's first block before it knows
that there is one. Blocks are put in their order by cumulative sums, `CHUNK` after `CHUNK`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.kernels.masks import work_splits
from sagebwd.kernels.runtime import program
from sagebwd.masks import mask as masks
from sagebwd.masks.band import Band

BLOCK, STORED = tl.constexpr(masks.BLOCK), tl.constexpr(masks.TILE)
SKIP, WHOLE = tl.constexpr(masks.SKIP), tl.constexpr(masks.WHOLE)
HEAD_BIT, LENGTHS = tl.constexpr(work_splits.HEAD_BIT), tl.constexpr(work_splits.LENGTHS)
ENTRY, FIELDS = tl.constexpr(work_splits.ENTRY), tl.constexpr(work_splits.FIELDS)
# Blocks of a list that are looked at together; lists whose lengths are.
CHUNK, LISTS = 128, 1024
# What differs from call to call: no length has kernels of its own.
OF_BLOCKS = ["stride_batch", "stride_head", "stride_row", "stride_column", "stride_keys", "tokens_q", "tokens_k"]
OF_TILES = ["tile_batch", "tile_head", "tile_row", "tile_column", "length"]
OF_LISTS = ["stride_row", "own", "of_batch", "columns", "count"]


def of_queries(
    blocks: Tensor, key_mask: Tensor | None, batch: int, tokens: tuple[int, int], band: Band, tile: tuple[int, int]
) -> Tensor:
    """The lists of `sm90_block_lists.of_queries`; key_mask, None for the mask's own keys."""
    return program.run(_query_lists, blocks, key_mask, batch, tokens, band, tile)[0]


def of_keys(
    blocks: Tensor, tiles: Tensor, key_mask: Tensor | None, batch: int, tokens: tuple[int, int], band: Band,
    tile: tuple[int, int], group: int, heads: int, last_heads: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The lists of `sm90_block_lists.of_keys`, and their splits if heads is not 0; tiles, of words."""
    limits = work_splits.MOST, work_splits.LEAST
    settings = batch, tokens, band, tile, group, heads, last_heads, limits
    return program.run(_key_lists, blocks, tiles, key_mask, *settings)


def lists_of(
    blocks: Tensor, tiles: Tensor | None, key_mask: Tensor | None, last: Tensor | None, batch: int,
    tokens: tuple[int, int], tile: tuple[int, int], band: Band, by_key: bool,
) -> Tensor:  # fmt: skip
    """The lists of `lists.lists_of`; last (B,), of the first keys that are apart."""
    return program.run(_lists, blocks, tiles, key_mask, last, batch, tokens, tile, band, by_key)[0]


def _lists(
    blocks: Tensor, tiles: Tensor | None, key_mask: Tensor | None, last: Tensor | None, batch: int,
    tokens: tuple[int, int], tile: tuple[int, int], band: Band, by_key: bool,
) -> tuple[Tensor]:  # fmt: skip
    heads, sizes = blocks.shape[1], _tiles_of(tokens, tile)
    of_lists, count = sizes[::-1] if by_key else sizes
    length = 2 + count * (1 if tiles is None else 2)
    lists = torch.empty(batch, heads, of_lists, length, dtype=torch.int32, device=blocks.device)
    stored = (tiles, *(_strides(tiles, 4) if tiles is not None else (0,) * 4))
    given = *_seen(blocks, key_mask, tokens, band), last, *stored, lists, heads, length
    options = {"BY_KEY": by_key, "TILE_Q": tile[0], "TILE_K": tile[1], "CHUNK": CHUNK, "num_warps": 4}
    program.launch(_lists_kernel, (batch * heads * of_lists,), *given, **options)
    return (lists,)


def _query_lists(
    blocks: Tensor, key_mask: Tensor | None, batch: int, tokens: tuple[int, int], band: Band, tile: tuple[int, int]
) -> tuple[Tensor]:
    heads, (rows, columns) = blocks.shape[1], _tiles_of(tokens, tile)
    lists = torch.empty(batch, heads, rows, 2 + columns, dtype=torch.int32, device=blocks.device)
    seen = _seen(blocks, key_mask, tokens, band)
    options = {"TILE_Q": tile[0], "TILE_K": tile[1], "CHUNK": CHUNK, "num_warps": 4}
    program.launch(_query_lists_kernel, (batch * heads * rows,), *seen, lists, heads, **options)
    return (lists,)


def _key_lists(
    blocks: Tensor, tiles: Tensor, key_mask: Tensor | None, batch: int, tokens: tuple[int, int], band: Band,
    tile: tuple[int, int], group: int, heads: int, last_heads: int, limits: tuple[int, int],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    of_blocks, (rows, columns) = blocks.shape[1], _tiles_of(tokens, tile)
    of_lists = -(-of_blocks // group)  # of one head of blocks one list is all heads'
    options = {"TILE_Q": tile[0], "TILE_K": tile[1], "CHUNK": CHUNK, "num_warps": 4}
    seen = _seen(blocks, key_mask, tokens, band)
    codes = torch.empty(batch, of_blocks, columns, rows, dtype=torch.int32, device=blocks.device)
    program.launch(_codes_kernel, (batch * of_blocks * rows,), *seen, codes, of_blocks, **options)
    length = -(-(work_splits.ENTRY * (1 + group * rows)) // work_splits.LENGTHS) * work_splits.LENGTHS
    lists = torch.empty(batch, of_lists, columns, length, dtype=torch.int32, device=blocks.device)
    program.launch(
        _key_lists_kernel,
        (batch * of_lists * columns,),
        codes,
        tiles,
        *_strides(tiles, 4),
        lists,
        of_blocks,
        group,
        rows,
        columns,
        length,
        **options,
    )
    return lists, _work_splits(lists, heads, last_heads, *limits) if heads else None


def _work_splits(lists: Tensor, heads: int, last_heads: int, most: int, least: int) -> Tensor:
    (batch, of_lists, columns, _), device = lists.shape, lists.device
    count = batch * heads * columns
    programs = torch.empty(count + most, work_splits.FIELDS, dtype=torch.int32, device=device)
    places = torch.empty(count, 3, dtype=torch.int32, device=device)
    given = lists, lists.stride(2), of_lists * columns, heads * columns, columns, count, places, programs
    program.launch(_places_kernel, (1,), *given, last_heads, MOST=most, LEAST=least, LISTS=LISTS, num_warps=8)
    program.launch(_shares_kernel, (count,), *given, CHUNK=32, num_warps=1)
    return programs


def _tiles_of(tokens: tuple[int, int], tile: tuple[int, int]) -> list[int]:
    return [-(-n // size) for n, size in zip(tokens, tile)]


def _seen(
    blocks: Tensor, key_mask: Tensor | None, tokens: tuple[int, int], band: Band
) -> tuple[Tensor | int | None, ...]:
    """What kernels take that look at blocks: these, the keys that count, tokens and the band."""
    keys = (None, 0, 0) if key_mask is None else (key_mask.view(torch.uint8), *key_mask.stride())
    return blocks, *_strides(blocks, 4), *keys, *tokens, band.lower, band.upper


def _strides(x: Tensor, count: int) -> list[int]:
    """The first strides of a tensor, 0 of what is one for all."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape[:count], x.stride())]


@triton.jit
def _order_of(
    blocks, stride_row, stride_column, key_mask, first_key, stride_key, tokens_q, tokens_k, lower, upper, row, columns,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """How much queries of one tile see of some tiles of keys: 2 where all, 1 in part, 0 nothing, or no keys there."""
    some, every = columns < 0, columns >= 0
    first_row, first_column = row * (TILE_Q // BLOCK), columns * (TILE_K // BLOCK)
    rows_there, columns_there = tl.cdiv(tokens_q, BLOCK) - first_row, tl.cdiv(tokens_k, BLOCK) - first_column
    first = first_row.to(tl.int64) * stride_row + first_column.to(tl.int64) * stride_column
    for i in tl.static_range(TILE_Q // BLOCK):
        for j in tl.static_range(TILE_K // BLOCK):
            there, at = (i < rows_there) & (j < columns_there), first + (i * stride_row + j * stride_column)
            state = tl.load(blocks + at, mask=there, other=SKIP)
            some, every = some | (state != SKIP), every & ((state == WHOLE) | (there == 0))
    if key_mask is None:
        every = every & ((columns + 1) * TILE_K <= tokens_k)
    else:
        any_counts, all_count = columns < 0, columns >= 0
        for j in tl.static_range(TILE_K // BLOCK):
            keys = (columns * TILE_K + j * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
            at = keys.to(tl.int64) * stride_key
            counts = (tl.load(key_mask + first_key + at, mask=keys < tokens_k, other=0) != 0).to(tl.int32)
            any_counts, all_count = any_counts | (tl.max(counts, 1) > 0), all_count & (tl.min(counts, 1) > 0)
        some, every = some & any_counts, every & all_count
    every = every & ((row + 1) * TILE_Q <= tokens_q)
    nearest = columns * TILE_K - (row * TILE_Q + TILE_Q - 1)
    farthest = columns * TILE_K + TILE_K - 1 - row * TILE_Q
    if lower is not None:
        some, every = some & (farthest >= lower), every & (nearest >= lower)
    if upper is not None:
        some, every = some & (nearest <= upper), every & (farthest <= upper)
    return tl.where(some, tl.where(every, 2, 1), 0)


@triton.jit
def _place_of(order, number, in_part, whole, part_before, whole_before):
    """Where blocks of a chunk stand in their list: in part, then whole, then the rest; how many of both are before.

    number: of the blocks. in_part, whole: how many the list has. part_before, whole_before: how many before the chunk.
    """
    is_part, is_whole = (order == 1).to(tl.int32), (order == 2).to(tl.int32)
    part_at = part_before + tl.cumsum(is_part, 0) - is_part
    whole_at = whole_before + tl.cumsum(is_whole, 0) - is_whole
    rest_at = in_part + whole + number - part_at - whole_at
    position = tl.where(order == 1, part_at, tl.where(order == 2, in_part + whole_at, rest_at))
    return position, part_before + tl.sum(is_part, 0), whole_before + tl.sum(is_whole, 0)


@triton.jit(do_not_specialize=[*OF_BLOCKS, *OF_TILES])
def _lists_kernel(
    blocks, stride_batch, stride_head, stride_row, stride_column, key_mask, stride_keys, stride_key, tokens_q,
    tokens_k, lower, upper, last_keys, tiles, tile_batch, tile_head, tile_row, tile_column, lists, heads, length,
    BY_KEY: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Lists of tiles of queries, or by key of keys: whole blocks, those in part, the rest, and then their tiles."""
    number = tl.program_id(0)
    rows, columns = tl.cdiv(tokens_q, TILE_Q), tl.cdiv(tokens_k, TILE_K)
    if BY_KEY:
        of_lists, count = columns, rows
    else:
        of_lists, count = rows, columns
    own, of_head = number % of_lists, number // of_lists
    batch, head = (of_head // heads).to(tl.int64), (of_head % heads).to(tl.int64)
    blocks += batch * stride_batch + head * stride_head
    apart = -1
    if last_keys is not None:
        apart = tl.load(last_keys + batch) // TILE_K
    at = lists + number.to(tl.int64) * length
    whole, in_part = 0, 0
    for first in range(0, count, CHUNK):
        others = first + tl.arange(0, CHUNK)
        row, column = _row_and_column(own, others, BY_KEY)
        order = _order_of(
            blocks, stride_row, stride_column, key_mask, batch * stride_keys, stride_key, tokens_q, tokens_k, lower,
            upper, row, column, TILE_Q, TILE_K,
        )  # fmt: skip
        is_whole = (order == 2) & (column != apart)
        whole += tl.sum(is_whole.to(tl.int32), 0)
        in_part += tl.sum(((order > 0) & (is_whole == 0)).to(tl.int32), 0)
    tl.store(at, whole)
    tl.store(at + 1, in_part)
    whole_before, part_before = 0, 0
    for first in range(0, count, CHUNK):
        others = first + tl.arange(0, CHUNK)
        row, column = _row_and_column(own, others, BY_KEY)
        order = _order_of(
            blocks, stride_row, stride_column, key_mask, batch * stride_keys, stride_key, tokens_q, tokens_k, lower,
            upper, row, column, TILE_Q, TILE_K,
        )  # fmt: skip
        # 1 for what comes first in the list, 2 for what comes next
        turn = tl.where(order == 0, 0, tl.where((order == 2) & (column != apart), 1, 2))
        position, whole_before, part_before = _place_of(turn, others, whole, in_part, whole_before, part_before)
        tl.store(at + 2 + position, others, mask=others < count)
        if tiles is not None:
            at_tile = batch * tile_batch + head * tile_head
            at_tile += row * TILE_Q // STORED * tile_row + column * TILE_K // STORED * tile_column
            tile = tl.load(tiles + at_tile, mask=others < count, other=0)
            tl.store(at + 2 + count + position, tile, mask=others < count)


@triton.jit
def _row_and_column(own, others, BY_KEY: tl.constexpr):
    """Tiles of queries and of keys, of a list's own and the others that it names."""
    if BY_KEY:
        row, column = others, own + tl.zeros_like(others)
    else:
        row, column = own + tl.zeros_like(others), others
    return row, column


@triton.jit(do_not_specialize=OF_BLOCKS)
def _query_lists_kernel(
    blocks, stride_batch, stride_head, stride_row, stride_column, key_mask, stride_keys, stride_key, tokens_q,
    tokens_k, lower, upper, lists, heads, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    rows, count = tl.cdiv(tokens_q, TILE_Q), tl.cdiv(tokens_k, TILE_K)
    row, head, batch = number % rows, (number // rows % heads).to(tl.int64), (number // rows // heads).to(tl.int64)
    blocks += batch * stride_batch + head * stride_head
    at = lists + number.to(tl.int64) * (2 + count)
    in_part, whole = 0, 0
    for first in range(0, count, CHUNK):
        order = _order_of(
            blocks, stride_row, stride_column, key_mask, batch * stride_keys, stride_key, tokens_q, tokens_k, lower,
            upper, row, first + tl.arange(0, CHUNK), TILE_Q, TILE_K,
        )  # fmt: skip
        in_part += tl.sum((order == 1).to(tl.int32), 0)
        whole += tl.sum((order == 2).to(tl.int32), 0)
    # the kernel's first step is one with masks, whose bits say that the block is whole, or that nothing is seen
    missing = tl.where(in_part == 0, 1, 0)
    tl.store(at, in_part + missing)
    tl.store(at + 1, tl.maximum(whole - missing, 0))
    part_before, whole_before = 0, 0
    for first in range(0, count, CHUNK):
        columns = first + tl.arange(0, CHUNK)
        order = _order_of(
            blocks, stride_row, stride_column, key_mask, batch * stride_keys, stride_key, tokens_q, tokens_k, lower,
            upper, row, columns, TILE_Q, TILE_K,
        )  # fmt: skip
        position, part_before, whole_before = _place_of(order, columns, in_part, whole, part_before, whole_before)
        tl.store(at + 2 + position, columns, mask=columns < count)


@triton.jit(do_not_specialize=OF_BLOCKS)
def _codes_kernel(
    blocks, stride_batch, stride_head, stride_row, stride_column, key_mask, stride_keys, stride_key, tokens_q,
    tokens_k, lower, upper, codes, heads, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of each tile of keys and of queries, (B, H or 1, keys, queries): `_order_of` it, and above two bits how many
    tiles of keys behind it the queries see."""
    number = tl.program_id(0)
    rows, count = tl.cdiv(tokens_q, TILE_Q), tl.cdiv(tokens_k, TILE_K)
    row, of_head = number % rows, number // rows
    batch, head = (of_head // heads).to(tl.int64), (of_head % heads).to(tl.int64)
    blocks += batch * stride_batch + head * stride_head
    codes += of_head.to(tl.int64) * count * rows + row
    behind = 0
    for step in range(0, count, CHUNK):
        columns = (tl.cdiv(count, CHUNK) - 1) * CHUNK - step + tl.arange(0, CHUNK)
        order = _order_of(
            blocks, stride_row, stride_column, key_mask, batch * stride_keys, stride_key, tokens_q, tokens_k, lower,
            upper, row, columns, TILE_Q, TILE_K,
        )  # fmt: skip
        seen = (order > 0).to(tl.int32)
        rank = behind + tl.cumsum(seen, 0, reverse=True) - seen
        tl.store(codes + columns.to(tl.int64) * rows, rank * 4 + order, mask=columns < count)
        behind += tl.sum(seen, 0)


@triton.jit(do_not_specialize=[*OF_TILES, "rows", "columns"])
def _key_lists_kernel(
    codes, tiles, tile_batch, tile_head, tile_row, tile_column, lists, heads, group, rows, columns, length,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """heads: of codes; those of a group are one list's, one alone is all of them."""
    number = tl.program_id(0)
    of_lists, count = tl.cdiv(heads, group), group * rows
    column, of_list, batch = number % columns, number // columns % of_lists, number // columns // of_lists
    # heads of codes from one of a group to the next
    step = tl.where(heads > 1, 1, 0)
    head = of_list * group * step
    first_code = ((batch * heads + head).to(tl.int64) * columns + column) * rows
    first_tile = batch.to(tl.int64) * tile_batch + head.to(tl.int64) * tile_head
    first_tile += column * TILE_K // STORED * tile_column
    at = lists + number.to(tl.int64) * length
    along = tl.arange(0, CHUNK)
    in_part, whole = 0, 0
    for first in range(0, count, CHUNK):
        entry = first + along
        at_code = first_code + (entry // rows * step).to(tl.int64) * columns * rows + entry % rows
        order = tl.load(codes + at_code, mask=entry < count, other=0) & 3
        in_part += tl.sum((order == 1).to(tl.int32), 0)
        whole += tl.sum((order == 2).to(tl.int32), 0)
    field = tl.arange(0, ENTRY)
    tl.store(at + field, tl.where(field == 0, in_part, tl.where(field == 1, whole, 0)))
    part_before, whole_before = 0, 0
    for first in range(0, count, CHUNK):
        entry = first + along
        of_group, row = entry // rows, entry % rows
        at_code = first_code + (of_group * step).to(tl.int64) * columns * rows + row
        code = tl.load(codes + at_code, mask=entry < count, other=0)
        at_tile = first_tile + (of_group * step).to(tl.int64) * tile_head + row * TILE_Q // STORED * tile_row
        tile = tl.load(tiles + at_tile, mask=entry < count, other=0)
        position, part_before, whole_before = _place_of(code & 3, entry, in_part, whole, part_before, whole_before)
        at_entry = at + (1 + position) * ENTRY
        tl.store(at_entry, (of_group << HEAD_BIT) + row, mask=entry < count)
        tl.store(at_entry + 1, tile, mask=entry < count)
        tl.store(at_entry + 2, code >> 2, mask=entry < count)
        tl.store(at_entry + 3, tl.zeros_like(code), mask=entry < count)
    # up to the length, which strides want
    behind = (1 + count) * ENTRY + tl.arange(0, LENGTHS)
    tl.store(at + behind, tl.zeros_like(behind), mask=behind < length)


@triton.jit
def _counts_of(lists, stride_row, number, there):
    """Where lists begin, how many blocks they have seen in part, and at all."""
    at = number.to(tl.int64) * stride_row
    in_part = tl.load(lists + at, mask=there, other=0)
    return at, in_part, in_part + tl.load(lists + at + 1, mask=there, other=0)


@triton.jit(do_not_specialize=[*OF_LISTS, "last_heads"])
def _places_kernel(
    lists, stride_row, own, of_batch, columns, count, places, programs, last_heads, MOST: tl.constexpr,
    LEAST: tl.constexpr, LISTS: tl.constexpr,
):  # fmt: skip
    """One program: of each list of each head its first program, how many these are, and its number; programs beyond
    the last. own: lists of a batch element; of_batch: the same counted for each head, of which one list may be all's.
    """
    along, sharing = tl.arange(0, LISTS), of_batch // own
    count_own, total = count // sharing, 0
    for first in range(0, count_own, LISTS):
        _, _, length = _counts_of(lists, stride_row, first + along, first + along < count_own)
        total += tl.sum(length, 0) * sharing
    longest = tl.maximum(total // MOST + 1, LEAST)
    cut_in_all, splits_total = 0, 0
    for first in range(0, count_own, LISTS):
        _, _, length = _counts_of(lists, stride_row, first + along, first + along < count_own)
        is_cut = (length > longest).to(tl.int32)
        cut_in_all += tl.sum(is_cut, 0) * sharing
        splits_total += tl.sum(is_cut * tl.cdiv(length, longest), 0) * sharing
    cut_before, splits_before = 0, 0
    first_turn = count - last_heads * columns
    for first in range(0, count, LISTS):
        turn = first + along
        past = turn - first_turn
        # as `longest_first.in_turns`
        in_turns = first_turn + past % last_heads * columns + past // last_heads
        number = tl.where((past >= 0) & (turn < count), in_turns, turn)
        of_list = number // of_batch * own + number % own
        _, _, length = _counts_of(lists, stride_row, of_list, turn < count)
        is_cut = (length > longest).to(tl.int32)
        splits = tl.where(is_cut == 1, tl.cdiv(length, longest), 1)
        cut = cut_before + tl.cumsum(is_cut, 0) - is_cut
        begun = splits_before + tl.cumsum(is_cut * splits, 0) - is_cut * splits
        uncut = turn - cut
        at = places + number * 3
        tl.store(at, tl.where(is_cut == 1, begun, splits_total + uncut), mask=turn < count)
        tl.store(at + 1, splits, mask=turn < count)
        tl.store(at + 2, tl.where(is_cut == 1, cut, cut_in_all + uncut), mask=turn < count)
        cut_before += tl.sum(is_cut, 0)
        splits_before += tl.sum(is_cut * splits, 0)
    used = splits_total + count - cut_in_all
    field = tl.arange(0, FIELDS)[None, :]
    for first in range(used, count + MOST, LISTS // FIELDS):
        row = (first + tl.arange(0, LISTS // FIELDS))[:, None]
        nothing = tl.where(field == 1, columns, 0) + tl.zeros_like(row)
        tl.store(programs + row * FIELDS + field, nothing, mask=row < count + MOST)


@triton.jit(do_not_specialize=OF_LISTS)
def _shares_kernel(lists, stride_row, own, of_batch, columns, count, places, programs, CHUNK: tl.constexpr):
    number = tl.program_id(0)
    begun, splits = tl.load(places + number * 3), tl.load(places + number * 3 + 1)
    position = tl.load(places + number * 3 + 2)
    at, in_part, length = _counts_of(lists, stride_row, number // of_batch * own + number % own, True)
    for first in range(0, splits, CHUNK):
        split = first + tl.arange(0, CHUNK)
        begin, end = split * length // splits, (split + 1) * length // splits
        to, there = programs + (begun + split) * FIELDS, split < splits
        tl.store(to, number // columns + tl.zeros_like(split), mask=there)
        tl.store(to + 1, number % columns + tl.zeros_like(split), mask=there)
        tl.store(to + 2, at + begin * ENTRY, mask=there)
        tl.store(to + 3, tl.minimum(tl.maximum(in_part - begin, 0), end - begin), mask=there)
        tl.store(to + 4, end - begin, mask=there)
        tl.store(to + 5, splits + tl.zeros_like(split), mask=there)
        tl.store(to + 6, position + tl.zeros_like(split), mask=there)
        tl.store(to + 7, tl.zeros_like(split), mask=there)
