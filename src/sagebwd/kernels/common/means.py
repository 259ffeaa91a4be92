"""Means of K and V over a sequence's valid tokens, and V's scale for each channel of the sequence.

One read of each tensor: every program sums up a chunk of tokens, a second kernel adds the chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Packing, padded_head_dim
from sagebwd.kernels.common.strided import Strided, head_of, pitch_of
from sagebwd.kernels.common.tile import (
    block_and_head,
    in_sequence,
    load_rows,
    padded_block,
    psi_scale,
    sequence,
    whose,
)
from sagebwd.kernels.runtime.program import launch, zeros
from sagebwd.recipe import INT8, SAMPLE, SAMPLE_AT, SAMPLE_OF, SAMPLED_FROM, Recipe

# Tokens that one program reads: enough programs to fill a GPU at batch x heads = 16, few enough to add up quickly.
CHUNK = 256
UNROLL = tl.constexpr(8)
# Columns that a program of the second kernel adds up.
FINISHED_COLUMNS = 32
KEPT, KEPT_AT, KEPT_OF, KEPT_FROM = map(tl.constexpr, (SAMPLE, SAMPLE_AT, SAMPLE_OF, SAMPLED_FROM))


@triton.jit
def sampled(length, at):
    """Which tokens of a sequence a sampled mean is of (`sagebwd.recipe.Recipe.k_mean`), and how many they are."""
    count = length // KEPT_OF * KEPT + tl.minimum(tl.maximum(length % KEPT_OF - KEPT_AT, 0), KEPT)
    offset = at % KEPT_OF - KEPT_AT
    taken = (length < KEPT_FROM) | ((offset >= 0) & (offset < KEPT))
    return taken, tl.where(length < KEPT_FROM, length, count)


@triton.jit
def _chunk(
    x,
    partial,
    planes,
    key_mask,
    first_keys,
    cu_seqlens,
    heads,
    tokens,
    chunks,
    head_dim: tl.constexpr,
    EXTREMES: tl.constexpr,
    SAMPLED: tl.constexpr,
    FIRST: tl.constexpr,
    VARLEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A chunk's share of the mean, if EXTREMES its largest and least value too, into partial (3, chunks, heads, D).

    Of packed sequences ``chunks`` are those of a padded layout, which has one head for all of them.

    SAMPLED: of a sample of the tokens, where there is no mask.

    first_keys (batch, FIRST): the first that key_mask leaves, then the sequence's length; written if not None.
    """
    of_head, head = block_and_head(chunks)
    partial += (of_head.to(tl.int64) * (tl.num_programs(0) // chunks) + head) * head_dim
    chunk, batch_head = in_sequence(of_head, head, heads, cu_seqlens, tokens, CHUNK, VARLEN)
    batch, head, _, start, length = whose(batch_head, heads, cu_seqlens, tokens, VARLEN)
    columns = tl.arange(0, BLOCK_D)
    rows = head_of(x, batch, head)
    count = length
    if key_mask is not None:
        key_mask += batch.to(tl.int64) * tokens
        count = 0
        for first in range(0, length, 1024):
            at = first + tl.arange(0, 1024)
            counts = tl.load(key_mask + at, mask=at < length, other=0) != 0
            if first_keys is not None:  # noqa: SIM102, settled at compile time
                if count < FIRST:
                    nth = count + tl.cumsum(counts.to(tl.int32), 0) - 1
                    tl.store(first_keys + batch * FIRST + nth, at, mask=counts & (nth < FIRST))
            count += tl.sum(counts.to(tl.int32))
        if first_keys is not None:  # the same from every program
            nth = tl.arange(0, FIRST)
            tl.store(first_keys + batch * FIRST + nth, length + 0 * nth, mask=nth >= count)
    # rows are reduced once, at the end: a reduction in the loop would cross warps every time
    sums = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    highs = tl.full((BLOCK, BLOCK_D), float("-inf"), tl.float32)
    lows = tl.full((BLOCK, BLOCK_D), float("inf"), tl.float32)
    begin = chunk * CHUNK
    local = tl.arange(0, BLOCK * UNROLL)
    for first in range(begin, tl.minimum(begin + CHUNK, length), BLOCK * UNROLL):
        # one load of many rows, so that all are in flight at a time; of BLOCK apart a thread holds the same columns
        block = rows + (start + first).to(tl.int64) * pitch_of(x)
        tile = load_rows(block, local, columns, pitch_of(x), length - first, head_dim, False, head_dim == BLOCK_D)
        tile = tile.to(tl.float32)
        keep = first + local < length
        if key_mask is not None:
            keep = keep & (tl.load(key_mask + first + local, mask=keep, other=0) != 0)
            tile = tl.where(keep[:, None], tile, 0.0)
        elif SAMPLED:
            taken, count = sampled(length, first + local)
            tile = tl.where(taken[:, None], tile, 0.0)
        sums += tl.sum(tile.reshape(UNROLL, BLOCK, BLOCK_D), 0)
        if EXTREMES:
            high = tl.where(keep[:, None], tile, float("-inf")).reshape(UNROLL, BLOCK, BLOCK_D)
            low = tl.where(keep[:, None], tile, float("inf")).reshape(UNROLL, BLOCK, BLOCK_D)
            highs = tl.maximum(highs, tl.max(high, 0))
            lows = tl.minimum(lows, tl.min(low, 0))
    total = tl.sum(sums, 0) / tl.maximum(count, 1).to(tl.float32)
    partial += columns
    tl.store(partial, total, mask=columns < head_dim)
    if EXTREMES:
        tl.store(partial + planes, tl.max(highs, 0), mask=columns < head_dim)
        tl.store(partial + planes * 2, tl.min(lows, 0), mask=columns < head_dim)


@triton.jit(do_not_specialize=["planes", "heads", "tokens", "chunks"])
def statistics_kernel(
    k,
    v,
    partial,
    planes,
    key_mask,
    first_keys,
    cu_seqlens,
    heads,
    tokens,
    chunks,
    head_dim: tl.constexpr,
    V_SCALE: tl.constexpr,
    K_SAMPLED: tl.constexpr,
    FIRST: tl.constexpr,
    VARLEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One chunk of K or of V, `Strided`; partial: (2, 3, chunks, heads over the batch, D), planes: the last three.

    V_SCALE: V's extremes are wanted. K_SAMPLED: K's mean is of a sample.
    """
    planes = planes.to(tl.int64)
    if tl.program_id(1) == 0:
        _chunk(
            k, partial, planes, key_mask, first_keys, cu_seqlens, heads, tokens, chunks, head_dim, False, K_SAMPLED,
            FIRST, VARLEN, CHUNK, BLOCK, BLOCK_D,
        )  # fmt: skip
    else:
        _chunk(
            v, partial + 3 * planes, planes, key_mask, None, cu_seqlens, heads, tokens, chunks, head_dim, V_SCALE,
            False, 0, VARLEN, CHUNK, BLOCK, BLOCK_D,
        )  # fmt: skip


@triton.jit(do_not_specialize=["planes", "chunks"])
def finish_kernel(
    partial,
    mean,
    scale,
    planes,
    cu_seqlens,
    heads,
    chunks,
    head_dim: tl.constexpr,
    SMOOTH_K: tl.constexpr,
    SMOOTH_V: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """mean (2, heads, D), zero where not smoothed; scale (heads, D): psi's over all tokens of V less its mean.

    A program adds up COLUMNS of them: it waits for memory alone, so that many small ones are done sooner.
    heads: of packed sequences, else None: all of the batch.
    """
    all_heads = tl.num_programs(0)
    planes = planes.to(tl.int64)
    which = tl.program_id(1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    kept = columns < head_dim
    if cu_seqlens is None:
        apart = all_heads * head_dim
        partial += which * 3 * planes + tl.program_id(0).to(tl.int64) * head_dim
    else:
        batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
        start, length = sequence(cu_seqlens, batch, 0, True)
        chunks = tl.cdiv(length, CHUNK)
        apart = heads * head_dim
        first_chunk = padded_block(start, batch, CHUNK, True)
        partial += which * 3 * planes + first_chunk.to(tl.int64) * apart + head * head_dim
    total = tl.zeros((COLUMNS,), tl.float32)
    largest = tl.full((COLUMNS,), float("-inf"), tl.float32)
    least = tl.full((COLUMNS,), float("inf"), tl.float32)
    for first in range(0, chunks, CHUNKS):
        rows = first + tl.arange(0, CHUNKS)
        at = partial + rows[:, None] * apart + columns[None, :]
        inside = (rows < chunks)[:, None] & kept[None, :]
        total += tl.sum(tl.load(at, mask=inside, other=0), 0)
        if scale is not None:
            inside = inside & (which == 1)
            largest = tl.maximum(largest, tl.max(tl.load(at + planes, mask=inside, other=float("-inf")), 0))
            least = tl.minimum(least, tl.min(tl.load(at + planes * 2, mask=inside, other=float("inf")), 0))
    at = (which * all_heads + tl.program_id(0)).to(tl.int64) * head_dim + columns
    shift = total
    if not SMOOTH_V:
        shift = tl.where(which == 1, 0.0, shift)
    if not SMOOTH_K:
        shift = tl.where(which == 0, 0.0, shift)
    tl.store(mean + at, shift, mask=kept)
    if scale is not None:  # noqa: SIM102, settled at compile time
        if which == 1:
            amax = tl.maximum(tl.maximum(largest - shift, shift - least), 0.0)
            # maxima lose NaN, sums do not
            chosen = psi_scale(amax) + 0 * total
            tl.store(scale + tl.program_id(0).to(tl.int64) * head_dim + columns, chosen, mask=kept)


def launch_statistics(
    recipe: Recipe, k: Tensor, v: Tensor, packing: Packing, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Means of k and v, (B, H, D) FP32, zero where not smoothed, and v's scale of each channel, (B, H, D) or None.

    And where there is a mask, the first keys that it leaves, then how many keys there are, (B, first_keys) int32.
    """
    head_dim, device = k.shape[-1], k.device
    heads = packing.batch * packing.heads
    shape = 2, packing.batch, packing.heads, head_dim
    of_v = recipe.o == INT8  # V is smoothed, and has scales, only to be quantised
    smooth_v, v_scale = of_v and recipe.smooth_v, of_v and recipe.v_scale == "sequence"
    first_keys = recipe.first_keys if of_v and key_mask is not None else 0
    if not (recipe.smooth_k or smooth_v or v_scale or first_keys):
        return *zeros(shape, torch.float32, device), None, None
    mean = torch.empty(shape, dtype=torch.float32, device=device)
    scale = torch.empty_like(mean[1]) if v_scale else None
    first = torch.empty(packing.batch, first_keys, dtype=torch.int32, device=device) if first_keys else None
    chunks = max(1, packing.blocks(CHUNK))
    planes = chunks * packing.heads_in_all * head_dim
    partial = torch.empty(2, 3, planes, dtype=torch.float32, device=device)
    block_d = padded_head_dim(head_dim)
    launch(
        statistics_kernel,
        (chunks * packing.heads_in_all, 2),
        Strided.of(k, packing),
        Strided.of(v, packing),
        partial,
        planes,
        key_mask,
        first,
        packing.cu_seqlens,
        packing.heads,
        packing.extent,
        chunks,
        head_dim=head_dim,
        V_SCALE=v_scale,
        K_SAMPLED=recipe.k_mean == "sample",
        FIRST=first_keys,
        VARLEN=packing.cu_seqlens is not None,
        CHUNK=CHUNK,
        BLOCK=max(8, 1024 // block_d),
        BLOCK_D=block_d,
    )
    launch(
        finish_kernel,
        (heads, 2, -(-head_dim // FINISHED_COLUMNS)),
        partial,
        mean,
        scale,
        planes,
        packing.cu_seqlens,
        None if packing.cu_seqlens is None else packing.heads,
        chunks,
        head_dim=head_dim,
        SMOOTH_K=recipe.smooth_k,
        SMOOTH_V=smooth_v,
        CHUNK=CHUNK,
        CHUNKS=64,
        COLUMNS=FINISHED_COLUMNS,
    )
    return mean[0], mean[1], scale, first
