"""V's operand of an INT8 dP (`sagebwd.recipe.Recipe.dp`): the mean c of O, and codes of V less it.

Two launches: sums of O over chunks of queries; V's codes, which add these up, and what else is asked for. c is kept as
rotated rows are, c R.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Call, Saved, padded_head_dim
from sagebwd.kernels.common.chunks import (
    CHUNK,
    MOST_CHUNKS,
    blocks_apart,
    chunk_range,
    chunks_of,
    chunks_of_sequence,
    shared_blocks,
    shares_of,
    turned_share,
)
from sagebwd.kernels.common.rotation import (
    PIECE,
    floats,
    load_pieces,
    piece_width,
    signs_and_factors,
    store_signs,
    turned,
    turned_row,
    whole_row,
)
from sagebwd.kernels.common.strided import Strided, head_of, pitch_of, row_of
from sagebwd.kernels.common.tile import (
    abs_max,
    divide,
    in_sequence,
    load_rows,
    psi_scale,
    to_int8,
    whose,
)
from sagebwd.kernels.runtime.program import launch

# Of the sums of O: rows of a step, and so many steps' loads are under way at a time.
SUMMED = {"BLOCK": 32, "STAGES": 4, "num_warps": 4}
# Tokens of a block of V, and rows of sums of O that a program adds up at a time.
VALUES, SUMS = 64, 32
LEAST_CHUNK, MOST = tl.constexpr(CHUNK), tl.constexpr(MOST_CHUNKS)


@triton.jit(do_not_specialize=["heads", "tokens", "total", "chunk", "chunks", "all_heads"])
def sum_outputs_kernel(
    o, lse, sums, counts, cu_seqlens, heads, tokens, total, chunk, chunks, all_heads, values: tl.constexpr,
    TURNED: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of O over a chunk of one head's queries that see a key, and their number.

    o: `Strided`. sums (chunks, heads, COLUMNS), of `turned_row` where TURNED; counts (chunks, heads).
    """
    head, part = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    for piece in tl.static_range((COLUMNS + PIECE - 1) // PIECE):
        sum_piece_of_outputs(
            o, lse, sums, counts, cu_seqlens, head, part, heads, tokens, total, chunk, all_heads, piece, values,
            TURNED, VARLEN, BLOCK, STAGES, COLUMNS,
        )  # fmt: skip


@triton.jit
def sum_piece_of_outputs(
    o, lse, sums, counts, cu_seqlens, of_head, part, heads, tokens, total, chunk, all_heads, piece: tl.constexpr,
    values: tl.constexpr, TURNED: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A piece of channels of `sum_outputs_kernel`."""
    WIDTH: tl.constexpr = piece_width(COLUMNS, piece * PIECE)
    EVEN: tl.constexpr = piece * PIECE + WIDTH <= values
    number, program = in_sequence(part, of_head, heads, cu_seqlens, tokens, chunk, VARLEN)
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    columns = piece * PIECE + tl.arange(0, WIDTH)
    local = tl.arange(0, BLOCK)
    begin, end = chunk_range(number, chunk, length, MOST, VARLEN)
    o_sum = tl.zeros((BLOCK, WIDTH), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    o_at = head_of(o, batch, head)
    for first in tl.range(begin, end, BLOCK, num_stages=STAGES):
        o_rows = o_at + (start + first).to(tl.int64) * pitch_of(o)
        tile = load_rows(o_rows, local, columns, pitch_of(o), end - first, values, False, EVEN)
        row_lse = tl.load(lse + z * total + start + first + local, mask=first + local < end, other=float("-inf"))
        seen = row_lse != float("-inf")
        o_sum += tl.where(seen[:, None], tile.to(tl.float32), 0.0)
        count += seen.to(tl.float32)
    found = tl.sum(o_sum, 0)
    if TURNED:
        found = turned_row(found, TURNED, piece)
    at = part * all_heads + of_head
    tl.store(sums + at.to(tl.int64) * COLUMNS + columns, found, mask=columns < COLUMNS)
    if piece == 0:
        tl.store(counts + at, tl.sum(count, 0))


@triton.jit
def mean_of_outputs(
    sums, counts, first_chunk, first_head, group, chunks, all_heads, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The mean of a key head's O, of ``chunks`` of ``group`` query heads; WIDTH channels from FIRST on."""
    columns = FIRST + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    count = tl.zeros((ROWS,), tl.float32)
    for first in range(0, chunks * group, ROWS):
        number = first + tl.arange(0, ROWS)
        at = (first_chunk + number // group) * all_heads + first_head + number % group
        there = number < chunks * group
        count += tl.load(counts + at, mask=there, other=0)
        at = at.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
        total += tl.sum(tl.load(sums + at, mask=there[:, None] & (columns < COLUMNS)[None, :], other=0), 0)
    return total / tl.maximum(tl.sum(count, 0), 1.0)


@triton.jit(do_not_specialize=["heads", "tokens", "total", "parts", "group", "chunks", "all_heads"])
def value_codes_kernel(
    v, sums, counts, codes, scales, center, signs, key_mask, cu_seqlens, cu_seqlens_q, heads,
    tokens, total, parts, group, chunks, all_heads, values: tl.constexpr, TURNED: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PITCH: tl.constexpr,
):  # fmt: skip
    """Codes of (V - c) R with a scale a token; c R, and R's signs.

    v, codes: `Strided`. Programs share the blocks of a head, ``parts`` of `shares_of`. center (heads, PITCH): c R.
    signs: where not None, what `store_signs` writes of the rotation of V, of TURNED channels.
    """
    number, batch_head = shared_blocks(parts, heads, cu_seqlens, tokens, BLOCK, VARLEN)
    if signs is not None:  # noqa: SIM102, settled at compile time
        if tl.program_id(0) == 0:
            store_signs(signs, TURNED, PITCH)
    batch, head, z, start, length = whose(batch_head, heads, cu_seqlens, tokens, VARLEN)
    apart = blocks_apart(parts, length, BLOCK, VARLEN)
    if VARLEN:  # noqa: SIM102, settled at compile time
        if number >= apart:
            return
    mu = ()
    first_chunk, chunks = chunks_of_sequence(LEAST_CHUNK, chunks, cu_seqlens_q, batch, MOST, VARLEN)
    first_head = (head if VARLEN else batch_head) * group
    for first in tl.static_range(0, COLUMNS, PIECE):
        mu += (mean_of_outputs(  # c = mean of O
            sums, counts, first_chunk, first_head, group, chunks, all_heads, first, piece_width(COLUMNS, first),
            COLUMNS, ROWS,
        ),)  # fmt: skip
    rotation = None
    if TURNED:
        mu = whole_row(mu, TURNED)
        rotation = signs_and_factors(v.at.dtype.element_ty, TURNED, COLUMNS)
    if number == 0:
        for piece in tl.static_range(len(mu)):
            columns = piece * mu[0].shape[0] + tl.arange(0, mu[piece].shape[0])
            tl.store(center + batch_head.to(tl.int64) * PITCH + columns, mu[piece], mask=columns < PITCH)
    for i in range(number, tl.cdiv(length, BLOCK), apart):
        store_value_codes(
            v, mu, rotation, codes, scales, key_mask, i * BLOCK, batch, head, z, start, length, tokens, total, values,
            BLOCK, COLUMNS,
        )  # fmt: skip


@triton.jit
def store_value_codes(
    v, mu, rotation, codes, scales, key_mask, first, batch, head, z, start, length, tokens, total,
    values: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One block of `value_codes_kernel`. Hidden keys count as zeros."""
    local = tl.arange(0, BLOCK)
    inside = first + local < length
    tile = load_pieces(row_of(v, batch, head, start + first), local, pitch_of(v), length - first, values, COLUMNS)
    if key_mask is not None:
        keep = tl.load(key_mask + batch.to(tl.int64) * tokens + first + local, mask=inside, other=0) != 0
        tile = only(tile, keep)
    x = less(turned(tile, rotation) if rotation is not None else floats(tile), mu)  # (V - c) R
    scale = psi_scale(abs_max_of(x))
    store_codes(codes_of(x, scale), codes, batch, head, start + first, local, inside, COLUMNS)
    tl.store(scales + z * total + start + first + local, scale, mask=inside)


@triton.jit
def only(pieces, keep):
    """Rows that are kept; zeros for others."""
    return [tl.where(keep[:, None], piece, tl.zeros_like(piece)) for piece in pieces]


@triton.jit
def less(pieces, mu):
    """Pieces of rows less a row."""
    found = ()
    for piece in tl.static_range(len(pieces)):
        found += (pieces[piece] - mu[piece][None, :],)
    return found


@triton.jit
def abs_max_of(pieces):
    """The largest magnitude of each row; NaN wins."""
    largest = abs_max(pieces[0], 1)
    if len(pieces) > 1:
        largest = tl.maximum(largest, abs_max(pieces[1], 1), propagate_nan=tl.PropagateNan.ALL)
    return largest


@triton.jit
def codes_of(pieces, scale):
    """psi's codes of rows with a scale each."""
    found = ()
    for piece in tl.static_range(len(pieces)):
        found += (to_int8(divide(pieces[piece], scale[:, None], (1.0 / scale)[:, None])),)
    return found


@triton.jit
def store_codes(pieces, codes, batch, head, token, local, inside, COLUMNS: tl.constexpr):
    """Write rows of codes, `Strided`, from a token on."""
    at = row_of(codes, batch, head, token) + local[:, None] * pitch_of(codes)
    for piece in tl.static_range(len(pieces)):
        columns = piece * pieces[0].shape[1] + tl.arange(0, pieces[piece].shape[1])
        tl.store(at + columns[None, :], pieces[piece], mask=inside[:, None] & (columns < COLUMNS)[None, :])


@triton.jit
def delta_of_codes(codes, o, center, PITCH: tl.constexpr):
    """rowsum(dO^ ((O - c) R)) over dO's scales, of pieces of dO's codes and of O R; center: where c R begins."""
    delta = tl.zeros((codes[0].shape[0],), tl.float32)
    for piece in tl.static_range(len(codes)):
        columns = piece * o[0].shape[1] + tl.arange(0, o[piece].shape[1])
        mu = tl.load(center + columns, mask=columns < PITCH, other=0)
        delta += tl.sum(codes[piece].to(tl.float32) * (o[piece] - mu[None, :]), 1)  # delta = rowsum(dO^ * (O - c) R)
    return delta


class CenteredValues(NamedTuple):
    """V's codes, as wide as the kernels are, their scale a token, c R (heads, pitch), and R's signs or None."""

    v_int8: Tensor
    v_scale: Tensor
    center: Tensor
    signs: Tensor | None


def launch_centered_values(call: Call, saved: Saved, v: Tensor, rows: int = VALUES) -> CenteredValues:
    """Codes of (V - c) R. rows: tokens that `value_codes_kernel` takes at a time."""
    queries, keys, device, columns = call.queries, call.keys, v.device, call.value_dim
    programs, heads = queries.heads_in_all, keys.batch * keys.heads
    pitch, turned_v = padded_head_dim(columns), sum(call.value_rotation)
    chunk, chunks = chunks_of(queries)
    sums = torch.empty(chunks, programs, columns, dtype=torch.float32, device=device)
    counts = torch.empty(chunks, programs, dtype=torch.float32, device=device)
    shape = {"values": call.columns[1], "VARLEN": call.packed, "TURNED": turned_v, "COLUMNS": columns}
    launch(
        sum_outputs_kernel,
        (chunks * programs,),
        Strided.of(saved.o, queries), saved.lse, sums, counts, queries.cu_seqlens, queries.heads, queries.extent,
        queries.total, chunk, chunks, programs, **SUMMED, **shape,
    )  # fmt: skip
    v_int8 = torch.empty((*v.shape[:-1], columns), dtype=torch.int8, device=device)
    v_scale, center = keys.per_token(device), torch.empty(heads, pitch, dtype=torch.float32, device=device)
    signs = torch.empty(pitch, pitch, dtype=torch.int8, device=device) if turned_v else None
    shared, parts = shares_of(keys, rows, turned_share(keys, rows, pitch) if turned_v else 1)
    launch(
        value_codes_kernel,
        (shared,),
        Strided.of(v, keys), sums, counts, Strided.of(v_int8, keys), v_scale, center, signs,
        call.key_mask, keys.cu_seqlens, queries.cu_seqlens, keys.heads, keys.extent, keys.total, parts,
        call.group, chunks, programs, BLOCK=rows, ROWS=SUMS, PITCH=pitch,
        num_warps=4 * max(1, pitch // 128), **shape,
    )  # fmt: skip
    return CenteredValues(v_int8, v_scale, center, signs)
