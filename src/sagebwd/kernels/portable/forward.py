"""Forward: online softmax over key blocks, P quantised relative to its own block's row maximum.

If the recipe keeps first keys apart, a row's state begins with them, with P V in 16 bit, and the loop masks them.

A score tile stays in registers from S to the P operand: V's copy holds its tokens in the order in which tensor cores
hand scores out (`tile.interleave`).
O is written where the caller wants it, with any strides but the last dimension's.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Call
from sagebwd.kernels.common.strided import ONE, Strided, head_of, pitch_of, row_of, rows_of
from sagebwd.kernels.common.tile import (
    LN_2,
    LOG2_E,
    dot_16bit,
    exp2,
    in_sequence,
    interleave,
    load_block,
    load_rows,
    load_transposed,
    padded_block,
    to_16bit,
    to_int8,
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
from sagebwd.kernels.portable.config import Config, slices
from sagebwd.kernels.portable.descriptor import described, transposed_view
from sagebwd.kernels.portable.first_keys import FirstKeys, cut_first_block, first_products, last_of
from sagebwd.kernels.portable.lists import by_length, masks_of
from sagebwd.kernels.portable.pieces import Rows, scores_by_pieces
from sagebwd.kernels.portable.softmax import probabilities, scores, times
from sagebwd.kernels.portable.tune import run_best
from sagebwd.kernels.runtime.program import launch_by_length
from sagebwd.recipe import INT8


class Values(NamedTuple):
    """V, transposed INT8 where O is INT8 (`operands.transposed`), else 16-bit rows; its scales, sums and mean."""

    at: Tensor
    batch: int
    head: int
    token: int
    scale: Tensor | None  # of V_SCALE's groups
    sum: Tensor | None  # 128 times the codes' column sums, where P has 254 levels
    mean: Tensor | None  # taken off V
    unit: tl.constexpr = ONE


@triton.jit
def channels(x, number, columns, head_dim):
    """One vector of channels of many; 0 beyond them."""
    return tl.load(x + number * head_dim + columns, mask=columns < head_dim, other=0)


@triton.jit
def accumulate_int8(
    acc, p, alpha, beta, v, v_tma, column_sum, z_k, block, number, blocks_k, columns, head_dim: tl.constexpr,
    V_SCALE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, FIRST_D: tl.constexpr,
):  # fmt: skip
    """O = alpha O + beta P V of a key block, INT8; V's scale of the sequence is applied at the end.

    block: of the head's, each sequence padded; number: of all heads'.
    """
    TMA: tl.constexpr = v_tma is not None
    v_tile = load_transposed(v_tma if TMA else v.at, z_k, blocks_k, block, head_dim, BLOCK_K, BLOCK_D, TMA, FIRST_D)
    if v.sum is None:
        LEVELS: tl.constexpr = 127.0
        part = tl.dot(interleave(to_int8(p * 127.0)), v_tile, out_dtype=tl.int32).to(tl.float32)  # P V
    else:
        # sum of (code - 128) V, and 128 times V's sum; a masked key's -128 and 128 cancel
        LEVELS: tl.constexpr = 254.0
        part = tl.dot(interleave(to_int8(p * 254.0 - 128.0)), v_tile, out_dtype=tl.int32).to(tl.float32)  # P V
        part += column_sum[None, :]
    if V_SCALE == "sequence":
        return acc * alpha[:, None] + part * (beta * (1 / LEVELS))[:, None]  # O = alpha O + beta P V
    elif V_SCALE == "channel":
        channel = channels(v.scale, number, columns, head_dim)
        return acc * alpha[:, None] + part * channel[None, :] * (beta * (1 / LEVELS))[:, None]
    else:
        beta *= tl.load(v.scale + number) * (1 / LEVELS)
        return acc * alpha[:, None] + part * beta[:, None]  # O = alpha O + beta P V


@triton.jit(do_not_specialize=["tokens_q", "tokens_k", "total_q", "total_k", "blocks_k", "grid_q", "lower", "upper"])
def forward_kernel(
    q,
    k,
    v,
    k_tma,
    v_tma,
    q_scale,
    k_scale,
    first_keys,
    o,
    lse,
    row_max,
    key_mask,
    cu_seqlens_q,
    cu_seqlens_k,
    mask,
    heads,
    group,
    tokens_q,
    tokens_k,
    total_q,
    total_k,
    blocks_k,
    grid_q,
    lower,
    upper,
    scale,
    head_dim: tl.constexpr,
    INT8_O: tl.constexpr,
    K_TOKEN: tl.constexpr,
    V_SCALE: tl.constexpr,
    HAS_LOWER: tl.constexpr,
    HAS_UPPER: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FIRST_D: tl.constexpr,
    WIDE: tl.constexpr,
):
    """O and lse of one query block of one head; of a WIDE one, BLOCK_D channels of O from FIRST_D on.

    q, k, o: `Strided`; q and k: codes, or 16-bit rows. v: `Values`. k_tma, v_tma: descriptors of k and v, or None.
    BLOCK_K is the recipe's. row_max: the largest score of each query times log2(e), -inf where it sees no key;
    written where not None. first_keys: `FirstKeys`. mask: `Masked`, or None.
    """
    VARLEN: tl.constexpr = cu_seqlens_q is not None
    EVEN: tl.constexpr = head_dim >= FIRST_D + BLOCK_D
    INT8_S: tl.constexpr = q.at.dtype.element_ty == tl.int8
    # the last queries see the most keys: start them first
    block_q, batch_head = in_sequence(
        grid_q - 1 - tl.program_id(0) % grid_q,
        tl.program_id(0) // grid_q,
        heads,
        cu_seqlens_q,
        tokens_q,
        BLOCK_Q,
        VARLEN,
    )
    work_tile = work_tile_of(batch_head, heads, group, cu_seqlens_q, cu_seqlens_k, tokens_q, tokens_k)
    start_q, length_q, start_k, length_k = work_tile.start_q, work_tile.length_q, work_tile.start_k, work_tile.length_k
    first_q = block_q * BLOCK_Q
    if first_q >= length_q:
        return
    z_q, z_k, owner = heads_of(work_tile, batch_head, heads, group, VARLEN)
    if VARLEN:
        lower += length_k - length_q
        upper += length_k - length_q
    bounds = Bounds(lower, upper, HAS_LOWER, HAS_UPPER)
    padded_k = padded_block(start_k, work_tile.batch, BLOCK_K, VARLEN)
    block_k = z_k * blocks_k + padded_k

    rows = tl.arange(0, BLOCK_Q)
    keys = tl.arange(0, BLOCK_K)
    columns = FIRST_D + tl.arange(0, BLOCK_D)
    q_at = row_of(q, work_tile.batch, work_tile.head, start_q + first_q)
    k_at = rows_of(k, work_tile.batch, work_tile.head_k, start_k)
    if WIDE:
        q_tile = Rows(q_at, rows, pitch_of(q), length_q - first_q)
    else:
        q_tile = load_rows(q_at, rows, columns, pitch_of(q), length_q - first_q, head_dim, False, EVEN)
    row = z_q * total_q + start_q + first_q + rows
    inside = first_q + rows < length_q
    row_scale = None
    if INT8_S:
        row_scale = tl.load(q_scale + row, mask=inside, other=0)
        k_scale += z_k * total_k + start_k
    if not INT8_O:
        v_at = rows_of(v, work_tile.batch, work_tile.head_k, start_k)
    if key_mask is not None:
        key_mask += work_tile.batch.to(tl.int64) * tokens_k
    elements, lists = None, None
    if mask is not None:
        elements = head_of(mask, work_tile.batch, work_tile.head)
        lists = list_of(mask, work_tile.batch, work_tile.head, first_q)

    n_range = block_range_of(first_q, length_k, bounds, BLOCK_Q, BLOCK_K, key_mask is not None)
    m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    scale_2 = scale * LOG2_E
    if first_keys.at is not None:
        last = last_of(first_keys, work_tile.batch)
        n_range = cut_first_block(n_range)
        m, l, acc = first_products(
            first_keys, q_tile, row_scale, k_at, pitch_of(k), k_scale, v, work_tile, owner, first_q + rows, inside,
            bounds, mask, columns, scale_2, head_dim, V_SCALE, EVEN, INT8_S, WIDE,
        )  # fmt: skip
    for masked in tl.static_range(2):
        count, listed = steps_of(n_range, lists, masked)
        for i in tl.range(0, count):
            block = block_of(i, n_range, mask, listed, masked)
            first_k = block * BLOCK_K
            left = length_k - first_k
            column_sum = None
            if INT8_O and v.sum is not None:  # long before it is needed, or every block waits for memory
                column_sum = channels(v.sum, block_k + block, columns, head_dim)
            if WIDE:
                k_rows = Rows(k_at + first_k.to(tl.int64) * pitch_of(k), keys, pitch_of(k), left)
                s = scores_by_pieces(q_tile, k_rows, head_dim, not masked)  # S = Q K^T
            else:
                k_tile = load_block(
                    k_at, k_tma, work_tile.batch, work_tile.head_k, start_k, first_k, length_k, pitch_of(k), head_dim,
                    not masked, BLOCK_K, BLOCK_D, VARLEN,
                )  # fmt: skip
                s = times(q_tile, k_tile)  # (1) [GEMM] S = Q K^T
            s = scores(s, k_scale, first_k, keys, left, scale_2, INT8_S, K_TOKEN, masked)
            missing_scale = row_scale  # Q's, which S still lacks
            if masked:
                keep = visible_pairs(first_q, rows, first_k, keys, left, bounds, key_mask)
                if first_keys.at is not None:
                    if first_keys.number is None:  # of most registers the compiler knows the outcome
                        keep = keep & ((keys >= first_keys.COUNT) | (first_k > 0))[None, :]
                    else:
                        keep = keep & (first_k + keys > last)[None, :]
                if mask is not None:
                    element = load_elements(
                        mask, elements, listed + i, first_q, first_k, rows[:, None], keys[None, :],
                        length_q - first_q, left,
                    )  # fmt: skip
                    keep = keep & shows(element, mask)
                    if mask.BIAS:
                        if missing_scale is not None:
                            s = s * missing_scale[:, None]
                        s += element.to(tl.float32) * LOG2_E
                        missing_scale = None
                s = tl.where(keep, s, float("-inf"))
            p, block_max = probabilities(s, missing_scale)  # (2) P = exp2(S - block_max)
            m_new = tl.maximum(m, block_max)
            safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = exp2(m - safe)  # rescales O and l
            beta = exp2(block_max - safe)  # scales this block's P
            l = l * alpha + tl.sum(p, 1) * beta  # (3) l = alpha l + beta rowsum(P)
            m = m_new
            if INT8_O:
                acc = accumulate_int8(  # (4) [GEMM] O = alpha O + beta P V
                    acc, p, alpha, beta, v, v_tma, column_sum, z_k, padded_k + block, block_k + block, blocks_k,
                    columns, head_dim, V_SCALE, BLOCK_K, BLOCK_D, FIRST_D,
                )  # fmt: skip
            else:
                v_tile = load_block(
                    v_at, v_tma, work_tile.batch, work_tile.head_k, start_k, first_k, length_k, pitch_of(v), head_dim,
                    not masked, BLOCK_K, BLOCK_D, VARLEN, FIRST_D,
                )  # fmt: skip
                if masked and VARLEN and v_tma is not None:  # P is 0 there, but 0 times the next sequence's NaN is NaN
                    v_tile = tl.where((keys < left)[:, None], v_tile, 0.0)
                part = dot_16bit(to_16bit(p, v_tile.dtype), v_tile)  # P V
                acc = acc * alpha[:, None] + part * beta[:, None]  # (4) [GEMM] O = alpha O + beta P V

    acc = acc / l[:, None]  # O /= l
    if INT8_O and V_SCALE == "sequence":
        acc *= channels(v.scale, owner.to(tl.int64), columns, head_dim)[None, :]
    if v.mean is not None:
        acc += channels(v.mean, owner.to(tl.int64), columns, head_dim)[None, :]
    empty = m == float("-inf")
    acc = tl.where((empty & (l == 0))[:, None], 0.0, acc)
    out = row_of(o, work_tile.batch, work_tile.head, start_q + first_q)
    written = inside[:, None] & (columns[None, :] < head_dim)
    tl.store(out + rows[:, None] * pitch_of(o) + columns[None, :], to_16bit(acc, o.at.dtype.element_ty), mask=written)
    if FIRST_D == 0:
        log = tl.where(empty & (l == 0), float("-inf"), (m + tl.log2(l)) * LN_2)  # lse = ln(2) (m + log2(l))
        tl.store(lse + row, log, mask=inside)
        if row_max is not None:
            tl.store(row_max + row, m, mask=inside)


def launch_forward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Values,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    first_keys: FirstKeys,
    o: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Write o; lse and, where the call keeps them, row maxima. The operands as `forward_kernel` takes them."""
    recipe, queries, keys = call.recipe, call.queries, call.keys
    lse = queries.per_token(q.device)
    row_max = queries.per_token(q.device) if call.keeps_row_max else None
    o_int8 = recipe.o == INT8

    def run(config: Config) -> None:
        tma = {}
        if config.tma:
            block = (config.block_k(recipe), call.block_d)
            v_view = (transposed_view(v.at, call.head_dim), block[::-1]) if o_int8 else (keys.view(v.at), block)
            tma = described({"k": (keys.view(k), block), "v": v_view}) or {}
        grid = queries.blocks(config.rows)
        parts = slices(call.head_dim)
        for first, width in parts:
            launch_by_length(
                *by_length(call),
                forward_kernel,
                (grid * queries.heads_in_all,),
                Strided.of(q, queries),
                Strided.of(k, keys),
                v,
                tma.get("k"),
                tma.get("v"),
                q_scale,
                k_scale,
                first_keys,
                Strided.of(o, queries),
                lse,
                row_max,
                *masks_of(call),
                queries.heads,
                call.group,
                queries.extent,
                keys.extent,
                queries.total,
                keys.total,
                keys.blocks(config.block_k(recipe)),
                grid,
                INT8_O=o_int8,
                K_TOKEN=recipe.k_scale != "block",
                V_SCALE=recipe.v_scale,
                BLOCK_Q=config.rows,
                BLOCK_K=config.block_k(recipe),
                BLOCK_D=width,
                FIRST_D=first,
                WIDE=len(parts) > 1,
                **config.options(call),
            )

    run_best("forward", call, run)
    return lse, row_max
