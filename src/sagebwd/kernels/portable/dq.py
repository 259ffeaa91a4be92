"""dQ, by query block: each program visits every key block that its queries see, and recomputes P.

Recomputing S and dP costs two products more than adding dQ up with atomics beside dK and dV, and saves the transpose
of dS through shared memory, the atomics and their FP32 buffer; it was faster (dev/log), and is repeatable.
dQ is written where the caller wants it, with any strides but the last dimension's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Call
from sagebwd.kernels.common.rotation import part_of, store_turned
from sagebwd.kernels.common.strided import Strided, head_of, pitch_of, row_of, rows_of
from sagebwd.kernels.common.tile import (
    LOG2_E,
    dot_16bit,
    in_sequence,
    largest,
    largest_of_tile,
    load_block,
    load_rows,
    load_transposed,
    padded_block,
    quantize_tile,
    to_16bit,
)
from sagebwd.kernels.portable.blocks import (
    Bounds,
    block_of,
    block_range_of,
    heads_of,
    list_of,
    load_elements,
    shows,
    steps_of,
    visible_pairs,
    work_tile_of,
)
from sagebwd.kernels.portable.config import Config, tiles_of, tiles_of_keys
from sagebwd.kernels.portable.descriptor import described, transposed_view
from sagebwd.kernels.portable.lists import by_length, masks_of
from sagebwd.kernels.portable.pieces import Rows, scores_by_pieces
from sagebwd.kernels.portable.recompute import (
    accumulate,
    int8_product,
    load_row_values_of,
    load_scales,
    recompute_p,
    score_gradients,
    scores_of,
)
from sagebwd.kernels.portable.softmax import times
from sagebwd.kernels.portable.tune import run_best
from sagebwd.kernels.runtime.program import launch_by_length
from sagebwd.recipe import INT8


@triton.jit(do_not_specialize=[
    "heads", "tokens_q", "tokens_k", "total_k", "blocks_q", "blocks_k", "tiles_k", "grid", "lower", "upper"
])  # fmt: skip
def dq_kernel(
    q,
    k,
    v,
    do,
    k_tma,
    v_tma,
    k_scale,
    v_scale,
    k_t,
    k_rows,
    row_values,
    tile_maxima,
    dq,
    key_mask,
    cu_seqlens_q,
    cu_seqlens_k,
    mask,
    heads,
    group,
    tokens_q,
    tokens_k,
    total_k,
    blocks_q,
    blocks_k,
    tiles_k,
    grid,
    lower,
    upper,
    scale,
    head_dim: tl.constexpr,
    TURNED: tl.constexpr,
    K_TOKEN: tl.constexpr,
    DS_PER_QUERY: tl.constexpr,
    HAS_LOWER: tl.constexpr,
    HAS_UPPER: tl.constexpr,
    PAD_Q: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
):
    """dQ of one query block of one head. BLOCK_K is the recipe's; PAD_Q is the block row_values are padded to.

    REST: columns of a tile of a wide call's channels from BLOCK_D on, or 0.

    q, k, v, do, dq, k_rows: `Strided`; q and k: operands of S; v and do: of dP, codes where there is a v_scale. k_t:
    transposed codes where dQ is INT8, else None, and k_rows its 16-bit operand. k_tma, v_tma: descriptors of k and v,
    and then k_t is one, or None. tile_maxima (heads, tiles_k, blocks_q, 2): the largest P and |dS| of each tile, for
    dK and dV; written where not None, and BLOCK_Q is PAD_Q then. mask: `Masked`, or None. TURNED: channels of the
    rotation whose codes k_t has, or 0.
    """
    VARLEN: tl.constexpr = cu_seqlens_q is not None
    WIDE: tl.constexpr = REST > 0
    EVEN: tl.constexpr = head_dim >= BLOCK_D
    INT8_S: tl.constexpr = q.at.dtype.element_ty == tl.int8
    INT8_DQ: tl.constexpr = k_t is not None
    INT8_DP: tl.constexpr = v_scale is not None
    DO_SCALE_LAST: tl.constexpr = INT8_DP and INT8_DQ and DS_PER_QUERY  # of dQ's rows, which quantise dS one by one
    # the last queries see the most keys: start them first
    block_q, batch_head = in_sequence(
        grid - 1 - tl.program_id(0) % grid, tl.program_id(0) // grid, heads, cu_seqlens_q, tokens_q, BLOCK_Q, VARLEN
    )
    work_tile = work_tile_of(batch_head, heads, group, cu_seqlens_q, cu_seqlens_k, tokens_q, tokens_k)
    start_q, length_q, start_k, length_k = work_tile.start_q, work_tile.length_q, work_tile.start_k, work_tile.length_k
    first_q = block_q * BLOCK_Q
    if first_q >= length_q:
        return
    z_q, z_k, _ = heads_of(work_tile, batch_head, heads, group, VARLEN)
    if VARLEN:
        lower += length_k - length_q
        upper += length_k - length_q
    bounds = Bounds(lower, upper, HAS_LOWER, HAS_UPPER)
    queries = tl.arange(0, BLOCK_Q)
    keys = tl.arange(0, BLOCK_K)
    columns = tl.arange(0, BLOCK_D)
    left_q = length_q - first_q
    inside = queries < left_q
    q_at = row_of(q, work_tile.batch, work_tile.head, start_q + first_q)
    do_at = row_of(do, work_tile.batch, work_tile.head, start_q + first_q)
    if WIDE:
        q_tile = Rows(q_at, queries, pitch_of(q), left_q)
        do_tile = Rows(do_at, queries, pitch_of(do), left_q)
    else:
        q_tile = load_rows(q_at, queries, columns, pitch_of(q), left_q, head_dim, False, EVEN)
        do_tile = load_rows(do_at, queries, columns, pitch_of(do), left_q, head_dim, False, EVEN)
    sequence_q = padded_block(start_q, work_tile.batch, PAD_Q, VARLEN)
    padded_q = (z_q * blocks_q + sequence_q) * PAD_Q + first_q
    row_lse, row_delta, row_scale, do_scale = load_row_values_of(row_values, padded_q + queries, inside)
    scale_2 = scale * LOG2_E
    row_scale *= scale_2
    k_at = rows_of(k, work_tile.batch, work_tile.head_k, start_k)
    v_at = rows_of(v, work_tile.batch, work_tile.head_k, start_k)
    padded_k = padded_block(start_k, work_tile.batch, BLOCK_K, VARLEN)
    if INT8_S or INT8_DQ:
        k_scale += z_k * total_k + start_k
    if INT8_DP:
        v_scale += z_k * total_k + start_k
    if not INT8_DQ:
        rows_at = row_of(k_rows, work_tile.batch, work_tile.head_k, start_k)
    if key_mask is not None:
        key_mask += work_tile.batch.to(tl.int64) * tokens_k
    elements, lists = None, None
    if mask is not None:
        elements = head_of(mask, work_tile.batch, work_tile.head)
        lists = list_of(mask, work_tile.batch, work_tile.head, first_q)
    if tile_maxima is not None:
        # by key block first: the kernel that reads them walks along the queries
        tile_maxima += (z_q * tiles_k * blocks_q + sequence_q + block_q) * 2

    n_range = block_range_of(first_q, length_k, bounds, BLOCK_Q, BLOCK_K, key_mask is not None)
    # a NaN anywhere in a query's row is in its delta, and must be in its dQ
    poison = row_delta * 0 if DS_PER_QUERY else tl.sum(row_delta * 0, 0)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    if WIDE:
        rest = tl.zeros((BLOCK_Q, REST), tl.float32)
    for masked in tl.static_range(2):
        count, listed = steps_of(n_range, lists, masked)
        for i in tl.range(0, count):
            block = block_of(i, n_range, mask, listed, masked)
            first_k = block * BLOCK_K
            first_64 = first_k.to(tl.int64)
            left = length_k - first_k
            if not WIDE:
                k_tile = load_block(
                    k_at, k_tma, work_tile.batch, work_tile.head_k, start_k, first_k, length_k, pitch_of(k), head_dim,
                    not masked, BLOCK_K, BLOCK_D, VARLEN,
                )  # fmt: skip
            key_scale, block_scale = None, None
            if INT8_S or INT8_DQ:
                if not K_TOKEN:
                    block_scale = tl.load(k_scale + first_k)
                else:
                    key_scale = load_scales(k_scale, first_k, keys, left, masked)
            if WIDE:
                k_tile = Rows(k_at + first_64 * pitch_of(k), keys, pitch_of(k), left)
                s = scores_by_pieces(q_tile, k_tile, head_dim, not masked)  # S = Q K^T
            else:
                s = times(q_tile, k_tile)  # (1) [GEMM] S = Q K^T
            s = scores_of(s, row_scale, key_scale, block_scale, scale_2, INT8_S)
            if mask is not None and masked:
                element = load_elements(
                    mask, elements, listed + i, first_q, first_k, queries[:, None], keys[None, :], left_q, left
                )
                if mask.BIAS:
                    s += element.to(tl.float32) * LOG2_E
            p = recompute_p(s, row_lse[:, None], mask)  # (3) P = exp2(S - lse)
            if masked:
                keep = visible_pairs(first_q, queries, first_k, keys, left, bounds, key_mask)
                if mask is not None:
                    keep = keep & shows(element, mask)
                p = tl.where(keep, p, 0.0)
            if WIDE:
                v_tile = Rows(v_at + first_64 * pitch_of(v), keys, pitch_of(v), left)
            else:
                v_tile = load_block(
                    v_at, v_tma, work_tile.batch, work_tile.head_k, start_k, first_k, length_k, pitch_of(v), head_dim,
                    not masked, BLOCK_K, BLOCK_D, VARLEN,
                )  # fmt: skip
            value_scale = None
            if INT8_DP:
                value_scale = load_scales(v_scale, first_k, keys, left, masked)[None, :]
            # (2) [GEMM] dP - delta = dO V^T - delta, and (4) dS = P * (dP - delta);
            # rounded as dkdv rounds it, so that the maxima are those of its own tiles
            ds = score_gradients(
                p, do_tile, v_tile, value_scale, row_delta[:, None], tile_maxima is not None and BLOCK_D > 64,
                head_dim, not masked, WIDE,
            )  # fmt: skip
            if INT8_DP and not DO_SCALE_LAST:
                ds = ds * do_scale[:, None]
            if masked and (key_mask is not None or VARLEN):  # V of a masked key, or past the end, need not be finite
                ds = tl.where(keep, ds, 0.0)
            if INT8_DQ:
                if K_TOKEN:
                    ds = ds * key_scale[None, :]
                if tile_maxima is not None:
                    p_max, ds_max = largest_of_tile(p, ds)
                    at = tile_maxima + block.to(tl.int64) * blocks_q * 2
                    tl.store(at, p_max)
                    tl.store(at + 1, ds_max)
                else:
                    ds_max = largest(ds, DS_PER_QUERY)
                ds_int8 = quantize_tile(ds, ds_max, DS_PER_QUERY)
                ds_scale = ds_max * (1 / 127.0) + poison
                if not K_TOKEN:
                    ds_scale = ds_scale * block_scale
                TMA: tl.constexpr = k_tma is not None
                operand = load_transposed(k_t, z_k, blocks_k, padded_k + block, head_dim, BLOCK_K, BLOCK_D, TMA)
                acc = accumulate(acc, int8_product(ds_int8, operand), ds_scale, DS_PER_QUERY)  # (7) dQ += dS K
                if WIDE:
                    operand = load_transposed(
                        k_t, z_k, blocks_k, padded_k + block, head_dim, BLOCK_K, REST, TMA, BLOCK_D
                    )
                    rest = accumulate(rest, int8_product(ds_int8, operand), ds_scale, DS_PER_QUERY)  # dQ += dS K
            else:
                operand = load_rows(
                    rows_at + first_64 * pitch_of(k_rows), keys, columns, pitch_of(k_rows), left, head_dim,
                    not masked, EVEN,
                )  # fmt: skip
                acc = dot_16bit(to_16bit(ds, operand.dtype), operand, acc)  # (7) dQ += dS K
                if WIDE:
                    operand = load_rows(
                        rows_at + first_64 * pitch_of(k_rows), keys, BLOCK_D + tl.arange(0, REST), pitch_of(k_rows),
                        left, head_dim, not masked, head_dim == BLOCK_D + REST,
                    )  # fmt: skip
                    rest = dot_16bit(to_16bit(ds, operand.dtype), operand, rest)  # dQ += dS K

    if DO_SCALE_LAST:
        acc *= do_scale[:, None]
    out = row_of(dq, work_tile.batch, work_tile.head, start_q + first_q)
    store_rows(out, pitch_of(dq), queries, inside, acc, scale, head_dim, part_of(TURNED, 0), WIDE)
    if WIDE:
        store_rows(
            out + BLOCK_D, pitch_of(dq), queries, inside, rest, scale, head_dim - BLOCK_D, part_of(TURNED, 1), WIDE
        )  # fmt: skip


@triton.jit
def store_rows(out, pitch, rows, inside, acc, scale, head_dim: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr):
    """Write acc scale, times the rotation of so many channels, to the rows that are ``inside``."""
    BLOCK_D: tl.constexpr = acc.shape[1]
    if TURNED:
        store_turned(out, rows, pitch, inside, acc, scale, head_dim, TURNED, BLOCK_D, WIDE)
    else:
        columns = tl.arange(0, BLOCK_D)
        written = inside[:, None] & (columns[None, :] < head_dim)
        found = to_16bit(acc * scale, out.dtype.element_ty)
        tl.store(out + rows[:, None] * pitch + columns[None, :], found, mask=written)


def launch_dq(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    k_scale: Tensor,
    v_scale: Tensor | None,
    k_t: Tensor | None,
    k_rows: Tensor | None,
    row_values: Tensor,
    tile_maxima: Tensor | None,
    dq: Tensor,
) -> None:
    """Write dq; the operands as `dq_kernel` takes them."""
    recipe, queries, keys = call.recipe, call.queries, call.keys

    def run(config: Config) -> None:
        tma = {}
        if config.tma:
            rows_block = (config.block_k(recipe), call.block_d)
            views = {"k": (keys.view(k), rows_block), "v": (keys.view(v), rows_block)}
            if k_t is not None:
                views["k_t"] = transposed_view(k_t, call.head_dim), rows_block[::-1]
            tma = described(views) or {}
        grid = queries.blocks(config.rows)
        launch_by_length(
            *by_length(call),
            dq_kernel,
            (grid * queries.heads_in_all,),
            Strided.of(q, queries),
            Strided.of(k, keys),
            Strided.of(v, keys),
            Strided.of(do, queries),
            tma.get("k"),
            tma.get("v"),
            k_scale,
            v_scale,
            tma.get("k_t", k_t),
            None if recipe.dq == INT8 else Strided.of(k_rows, keys),
            row_values,
            tile_maxima,
            Strided.of(dq, queries),
            *masks_of(call),
            queries.heads,
            call.group,
            queries.extent,
            keys.extent,
            keys.total,
            queries.blocks(recipe.block_q),
            keys.blocks(config.block_k(recipe)),
            tiles_of_keys(call),
            grid,
            TURNED=call.turned if recipe.dq == INT8 else 0,
            K_TOKEN=recipe.k_scale != "block",
            DS_PER_QUERY=recipe.ds_scale_dq == "query",
            PAD_Q=recipe.block_q,
            BLOCK_Q=config.rows,
            BLOCK_K=config.block_k(recipe),
            **tiles_of(call.head_dim),
            **config.options(call),
        )

    run_best("dq", call, run)
