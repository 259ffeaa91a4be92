"""The backward on Hopper: its passes, and one kernel for dQ, dK and dV, or two."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.call import Call, Saved, empty_gradients
from sagebwd.kernels.masks.sm90_block_lists import of_keys
from sagebwd.kernels.masks.work_splits import MOST
from sagebwd.kernels.runtime import device
from sagebwd.kernels.runtime.program import launch_by_length, zeros
from sagebwd.kernels.sm90 import widths
from sagebwd.kernels.sm90.backward.arguments import Factors, Kind, Sizes, Tensors, WorkSplits, block_sparse_and_bias
from sagebwd.kernels.sm90.backward.block_sparse import COUNTERS
from sagebwd.kernels.sm90.backward.descriptor import (
    Rows,
    empty_by_head,
    gradient_blocks,
    gradient_strides,
    matrix,
    transposed,
    vectors,
)
from sagebwd.kernels.sm90.backward.kernel import backward_kernel, key_query_kernel
from sagebwd.kernels.sm90.backward.tile import CONSUMERS, DELTA_CHANNELS, ROWS
from sagebwd.kernels.sm90.backward.tiles_per_cta import backward_heads_at_once, backward_tiles_per_cta
from sagebwd.kernels.sm90.backward.value_kernel import value_kernel
from sagebwd.kernels.sm90.longest_first import last_heads
from sagebwd.kernels.sm90.operands.bwd_postprocess import dq_sum_scale, launch_finish_dq
from sagebwd.kernels.sm90.operands.bwd_preprocess import DELTA_PARTS, SCALES, RowValues, launch_row_values
from sagebwd.kernels.sm90.operands.finish_gradients import launch_finish_gradients, launch_sum_shares
from sagebwd.kernels.sm90.operands.quantize_k import launch_channel_maxima
from sagebwd.masks.band import Band

# FP32 numbers between two blocks' scales in shared memory, where TMA writes from multiples of 128 bytes on.
SCALES_APART = 32
# Registers of any thread at launch; see `tile.REGISTERS`.
LAUNCH = {"maxnreg": 168, "num_warps": 4}


# Rows narrower than the form are read as they are.
FILLS = True


def prepare(direction: str, call: Call) -> Call:
    """The call with lists of its mask's blocks."""
    tile = widths.width(call.head_dim, call.value_dim).backward
    tokens, blocks = (call.queries.tokens, call.keys.tokens), (tile.queries, CONSUMERS.value * ROWS.value)
    band = Band.of(call.is_causal, call.window_left, call.window_right)
    # splits of a list are added up in any order
    heads, in_all = 0 if call.deterministic else call.keys.heads, call.keys.heads_in_all
    # two kernels have all heads take turns
    last = in_all if tile.split_dkdv else last_heads(call.keys.blocks(blocks[1]), in_all, device.num_sms(call.device))
    block_lists = of_keys(call.mask, call.key_mask, tokens, band, blocks, call.group, heads, last)
    # kernels go by the tile's number: how many there are is no part of a call's specification
    return call._replace(mask=None, lists=block_lists._replace(words=block_lists.words[:1]))


class Operands(NamedTuple):
    """What a backward reads by TMA as rows."""

    q: Rows
    k: Rows
    v: Rows
    do: Rows

    @classmethod
    def of(cls, call: Call, q_int8: Tensor, k_int8: Tensor, v: Tensor, do: Tensor) -> Operands:
        """Codes of Q and K, V, and dO or what stands for it."""
        queries, keys = call.queries, call.keys
        return cls(Rows.of(q_int8, queries), Rows.of(k_int8, keys), Rows.of(v, keys), Rows.of(do, queries))

    @property
    def steps(self) -> tuple[int, ...]:
        """What kernels take of all four, in this order."""
        return *self.q.steps, *self.k.steps, *self.v.steps, *self.do.steps


def _zeros(call: Call, block_q: int, like: Tensor) -> tuple[Tensor, Tensor | None, Tensor, WorkSplits | None]:
    """What is raised or counted up from 0, in one piece, for one launch to clear.

    Bits of the largest K of each key head; how many blocks of keys have added to each half of a block of
    dQ^T if they are to in order; bits of V's largest by channel, (batch, heads, D); sums of split lists.
    """
    keys, queries = call.keys, call.queries
    heads = keys.batch * keys.heads
    counts = queries.heads_in_all * queries.blocks(block_q) * CONSUMERS.value if call.deterministic else 0
    programs = None if call.lists is None else call.lists.work_splits
    span = CONSUMERS.value * ROWS.value
    # each list that is cut has one split more than its own
    cut = 0 if programs is None else min(MOST, heads * keys.blocks(span))
    channels = call.head_dim + call.value_dim
    sizes = cut * span * channels, cut * COUNTERS.value, heads, counts, heads * call.columns[1]
    sums, arrived, largest, dq_semaphore, v_maxima = zeros((sum(sizes),), torch.int32, like.device).split(sizes)
    return (
        largest, dq_semaphore if call.deterministic else None, v_maxima.view(keys.batch, keys.heads, call.columns[1]),
        None if programs is None else WorkSplits(programs, sums.view(torch.float32), arrived),
    )  # fmt: skip


def _operands_of_dp(
    call: Call, saved: Saved, v: Tensor, do: Tensor, dlse: Tensor | None, v_maxima: Tensor, largest: Tensor,
    dq: Tensor, tile: widths.BackwardTile,
) -> tuple[Tensor, Tensor, RowValues]:  # fmt: skip
    """V and the scaled dO as TMA reads them, and row values."""
    signs = torch.empty(call.block_d, call.block_d, dtype=torch.int8, device=v.device) if call.rotation else None
    # dQ is written last: its memory has the scaled dO until then, unless TMA fills rows up
    by_head, do_scaled = (
        (empty_by_head(v), empty_by_head(do)) if any(call.lacking) else (None, dq[..., : call.value_dim])
    )
    launch_channel_maxima(v, call.keys, call.key_mask, v_maxima, signs, call.turned, by_head)
    values = launch_row_values(call, saved, v_maxima, signs, do, dlse, largest, do_scaled, tile)
    return v if by_head is None else by_head, do_scaled, values


def backward(
    call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv in e4m3 (`sagebwd.reference.float8`), bit for bit the same in every run where ``call.deterministic``.

    do, v, o: any strides with a contiguous last dimension; q and k are read by a prologue's norm alone. With a
    prologue dq and dk are of what forward was given, and gradients of its weights follow (`finish_gradients`).
    """
    queries, keys, tile = call.queries, call.keys, widths.width(call.head_dim, call.value_dim).backward
    largest, dq_semaphore, v_maxima, work_splits = _zeros(call, tile.queries, v)
    dq, dk, dv = empty_gradients(call.columns[0], saved.o, v)
    v_read, do_read, values = _operands_of_dp(call, saved, v, do, dlse, v_maxima, largest, dq, tile)
    tensors = Tensors(
        saved.k_scale, largest, call.key_mask, dk, dv, dq_semaphore, queries.cu_seqlens, keys.cu_seqlens,
        gradient_strides(call, dk, dv), *block_sparse_and_bias(call), work_splits,
    )  # fmt: skip
    _launch_kernels(call, Operands.of(call, saved.q_int8, saved.k_int8, v_read, do_read), values, tensors)
    sums = values.dq_sums, values.spread, largest
    if call.prologue is None:
        launch_finish_dq(call, *sums, dq, tile)
        return dq, dk, dv
    dq, dk, *shares = launch_finish_gradients(call, saved, *sums, dk, q, k, dq, tile)
    return dq, dk, dv, *launch_sum_shares(*shares)


def _launch_kernels(call: Call, operands: Operands, values: RowValues, tensors: Tensors) -> None:
    """Write dk and dv of ``tensors``, and add to dQ's sums: by one kernel, or by one for dV and one for dK and dQ."""
    width, num_sms = widths.width(call.head_dim, call.value_dim), device.num_sms(call.device)
    keys, tile, rows = call.keys, width.backward, ROWS.value
    heads = keys.heads_in_all
    block_q, span, piece = tile.queries, CONSUMERS.value * rows, tile.piece or call.head_dim
    tiles_per_cta, heads_at_once = 1, heads if tile.split_dkdv else 1
    if call.deterministic:
        heads_at_once = backward_heads_at_once(call, span, block_q, num_sms)
    elif tile.persistent and tensors.work_splits is None:
        tiles_per_cta = backward_tiles_per_cta(call, span, block_q, num_sms)
    grid = keys.blocks(span * tiles_per_cta)
    programs = grid * heads if tensors.work_splits is None else len(tensors.work_splits.programs)
    sizes = Sizes.of(call, block_q, grid, heads_at_once)
    factors = Factors(call.scale, dq_sum_scale(call))
    kind = Kind.of(call, block_q, span)
    options = {"KIND": kind, "WIDTH": width, **LAUNCH}
    # packed calls have one form
    lengths = None if call.packed else (call.queries.tokens, keys.tokens)
    by_length = lengths, {"KIND": kind._replace(RAGGED=not kind.RAGGED)}
    q, k, v, do = (x.blocks(tokens, piece) for x, tokens in zip(operands, (block_q, rows, rows, block_q)))
    q_t, do_t = (
        transposed(values.q_t, call.head_dim, piece, block_q),
        transposed(values.do_t, call.value_dim, piece, block_q),
    )
    scales = vectors(values.scales, SCALES.value, SCALES_APART)
    dq_sums = matrix(values.dq_sums, values.dq_sums.shape[1], (rows, tile.piece // 2 or rows))
    box = rows, rows if tile.split_dkdv else piece
    dk, dv = (gradient_blocks(x, box) for x in (tensors.dk, tensors.dv))
    if not tile.split_dkdv:
        planes = vectors(values.planes, 2 * block_q, 2 * block_q)
        delta = matrix(values.delta_parts, DELTA_PARTS.value, (block_q, DELTA_CHANNELS.value))
        launch_by_length(
            *by_length, backward_kernel, (programs,), q, k, v, do, q_t, do_t, planes, scales, delta, dq_sums, dk, dv,
            tensors, *operands.steps, **sizes._asdict(), tiles_per_cta=tiles_per_cta, factors=factors, **options,
        )  # fmt: skip
        return
    two, four = (vectors(values.planes, 3 * block_q, count * block_q) for count in (2, 4))
    of_dv = tensors._replace(largest=None, dk=None, dq_semaphore=None, strides=gradient_strides(call, tensors.dv))
    launch_by_length(
        *by_length, value_kernel, (programs,), q, k, do_t, two, scales, dv, of_dv, *operands.q.steps,
        *operands.k.steps, *sizes._replace(heads_at_once=heads), Factors(call.scale), **options,
    )  # fmt: skip
    of_dk = tensors._replace(dv=None, strides=gradient_strides(call, tensors.dk))
    launch_by_length(
        *by_length, key_query_kernel, (programs,), q, k, v, do, q_t, four, scales, dq_sums, dk, of_dk,
        *operands.steps, *sizes, factors, **options,
    )  # fmt: skip
