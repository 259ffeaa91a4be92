"""Forward: online softmax over key blocks, P quantised against its own block's row maximum.

Where the recipe keeps the first key apart, a row begins with it, in FP32, and the loop masks it.

A score tile stays in registers from S to the P operand: V's copy holds its tokens in the order in which tensor cores
hand scores out (`tile.interleave`).
O is written where the caller wants it, with any strides but the last dimension's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sagebwd.call import Call
from sagebwd.kernels.portable import lists
from sagebwd.kernels.portable.config import Config
from sagebwd.kernels.portable.descriptor import SmoothQ, described, transposed_view
from sagebwd.kernels.portable.tune import run_best
from sagebwd.kernels.replay import launch
from sagebwd.kernels.tile import (
    INTERPRETED,
    LN_2,
    LOG2_E,
    block_range,
    dot_16bit,
    exp2,
    interleave,
    load_block,
    load_mask,
    load_rows,
    load_transposed,
    padded_block,
    rows_of,
    sequence,
    shows,
    to_16bit,
    to_int8,
    visible,
)
from sagebwd.recipe import FP8, INT8


@triton.jit
def first_score(
    q_tile, row_scale, k, k_scale, k_exact, shift, mu, columns, first, there, scale_2, stride_t, exact_n,
    head_dim: tl.constexpr,
):  # fmt: skip
    """Every row's score, in base 2, of the first key; there: whether there is one."""
    inside = (columns < head_dim) & there
    k += first.to(tl.int64) * stride_t
    if q_tile.dtype == tl.int8 and head_dim % 16 == 0 and not INTERPRETED:
        # four products an instruction, their sum in place of the first; the key read once a row lies as Q's codes do.
        # Rows of whole 16 bytes alone: of others Triton may give a thread four rows of one column, not four columns
        at = tl.broadcast_to((k + columns)[None, :], q_tile.shape)
        products = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $4, $5, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;", "=r,=r,=r,=r,r,r",
            [q_tile, tl.load(at, mask=inside[None, :], other=0)], dtype=tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
        s = tl.sum(products, 1).to(tl.float32)
    else:
        key = tl.load(k + columns, mask=inside, other=0)
        s = tl.sum(q_tile.to(tl.float32) * key.to(tl.float32)[None, :], 1)  # of codes exact: below 2**24
    if row_scale is not None:
        s = s * (tl.load(k_scale + first, mask=there, other=0) * scale_2) * row_scale
    else:
        s = s * scale_2
    if mu is not None:
        exact = tl.load(k_exact + first.to(tl.int64) * exact_n + columns, mask=inside, other=0).to(tl.float32)
        s += tl.sum((exact - shift) * mu) * scale_2
    return s


@triton.jit(
    do_not_specialize=[
        "tokens_q",
        "tokens_k",
        "total_q",
        "total_k",
        "blocks_q",
        "blocks_k",
        "grid_q",
        "lower",
        "upper",
    ]
)
def forward_kernel(
    q,
    k,
    v,
    q_scale,
    k_scale,
    v_scale,
    v_sum,
    v_mean,
    q_mean,
    k_exact,
    k_mean,
    k_rows,
    first_value,
    first_key,
    o,
    lse,
    row_max,
    key_mask,
    cu_seqlens_q,
    cu_seqlens_k,
    mask,
    lists,
    mask_b,
    mask_h,
    mask_q,
    mask_k,
    list_b,
    list_h,
    list_n,
    first_mask,
    first_mask_b,
    first_mask_h,
    q_b,
    q_h,
    q_n,
    k_b,
    k_h,
    k_n,
    v_b,
    v_h,
    v_n,
    o_b,
    o_h,
    o_n,
    exact_b,
    exact_h,
    exact_n,
    heads,
    group,
    tokens_q,
    tokens_k,
    total_q,
    total_k,
    blocks_q,
    blocks_k,
    grid_q,
    lower,
    upper,
    scale,
    head_dim: tl.constexpr,
    INT8_S: tl.constexpr,
    INT8_O: tl.constexpr,
    K_TOKEN: tl.constexpr,
    V_SCALE: tl.constexpr,
    HAS_LOWER: tl.constexpr,
    HAS_UPPER: tl.constexpr,
    VARLEN: tl.constexpr,
    TMA: tl.constexpr,
    BIAS: tl.constexpr,
    MASK_TILE: tl.constexpr,
    MASK_EVEN: tl.constexpr,
    LIST_ROWS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One block of queries of one head.

    q, k: codes if INT8_S, else 16-bit rows. v: transposed codes if INT8_O, else 16-bit rows. q_mean (heads, blocks,
    D), k_exact (rows) and k_mean put back what Q-smoothing took from S. v_sum: 128 times the column sums of V's codes,
    where P has 254 levels. BLOCK_K is the recipe's. TMA: k and v are descriptors.

    lists: where there is a mask, of every LIST_ROWS queries how many blocks of keys they see whole and in part, and
    which (`sagebwd.kernels.portable.lists`). BIAS: the mask is added.

    row_max: the largest score of each query times log2(e), -inf where it sees no key; written where not None.

    k_rows: k, never a descriptor, and first_value (batch, heads, D): V's smoothed row of the first key, in units of
    v_scale if that is the sequence's, where it is apart, else None; first_key (batch,): which key that is, if there is
    a key_mask.
    """
    EVEN: tl.constexpr = head_dim == BLOCK_D
    batch_head = tl.program_id(0) // grid_q
    # the last queries see the most keys: start them first
    block_q = grid_q - 1 - tl.program_id(0) % grid_q
    batch = batch_head // heads
    head = batch_head % heads
    head_k = head // group
    start_q, length_q = sequence(cu_seqlens_q, batch, tokens_q, VARLEN)
    start_k, length_k = sequence(cu_seqlens_k, batch, tokens_k, VARLEN)
    first_q = block_q * BLOCK_Q
    if first_q >= length_q:
        return
    heads_k = heads // group
    z_q = head.to(tl.int64) if VARLEN else batch_head.to(tl.int64)
    z_k = head_k.to(tl.int64) if VARLEN else (batch * heads_k + head_k).to(tl.int64)
    batch_64 = batch.to(tl.int64)
    if VARLEN:
        lower += length_k - length_q
        upper += length_k - length_q
    padded_k = padded_block(start_k, batch, BLOCK_K, VARLEN)
    block_k = z_k * blocks_k + padded_k

    rows = tl.arange(0, BLOCK_Q)
    keys = tl.arange(0, BLOCK_K)
    columns = tl.arange(0, BLOCK_D)
    q += batch_64 * q_b + head.to(tl.int64) * q_h + (start_q + first_q).to(tl.int64) * q_n
    if first_value is not None:
        k_rows = rows_of(k_rows, batch, head_k, start_k, k_b, k_h, k_n, False)
    k = rows_of(k, batch, head_k, start_k, k_b, k_h, k_n, TMA)
    q_tile = load_rows(q, rows, columns, q_n, length_q - first_q, head_dim, False, EVEN)
    row = z_q * total_q + start_q + first_q + rows
    inside = first_q + rows < length_q
    row_scale, mu, shift = None, None, None
    if INT8_S:
        row_scale = tl.load(q_scale + row, mask=inside, other=0)
        k_scale += z_k * total_k + start_k
    if not INT8_O:
        v = rows_of(v, batch, head_k, start_k, v_b, v_h, v_n, TMA)
    if q_mean is not None:
        mu_at = q_mean + (z_q * blocks_q + padded_block(start_q, batch, BLOCK_Q, VARLEN) + block_q) * head_dim
        mu = tl.load(mu_at + columns, mask=columns < head_dim, other=0)
        k_exact += batch_64 * exact_b + head_k.to(tl.int64) * exact_h + start_k.to(tl.int64) * exact_n
        k_mean += (batch * heads_k + head_k).to(tl.int64) * head_dim
        shift = tl.load(k_mean + columns, mask=columns < head_dim, other=0)
    if key_mask is not None:
        key_mask += batch_64 * tokens_k

    if mask is not None:
        mask += batch_64 * mask_b + head.to(tl.int64) * mask_h
        lists += batch_64 * list_b + head.to(tl.int64) * list_h + (first_q // LIST_ROWS).to(tl.int64) * list_n

    begin, full_begin, full_end, end = block_range(
        first_q, length_k, lower, upper, BLOCK_Q, BLOCK_K, HAS_LOWER, HAS_UPPER, key_mask is not None
    )
    m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    scale_2 = scale * LOG2_E
    if INT8_O and V_SCALE == "sequence":
        v_scale += (batch * heads_k + head_k).to(tl.int64) * head_dim
    if first_value is not None:
        first = batch * 0
        if first_key is not None:
            first = tl.load(first_key + batch)
        there = first < length_k
        seen = there & visible(first - (first_q + rows), lower, upper, HAS_LOWER, HAS_UPPER)
        first_value += (batch * heads_k + head_k).to(tl.int64) * head_dim
        # before the score, which waits for Q
        value = tl.load(first_value + columns, mask=(columns < head_dim) & there, other=0)
        score = first_score(
            q_tile, row_scale, k_rows, k_scale, k_exact, shift, mu, columns, first, there, scale_2, k_n, exact_n,
            head_dim,
        )  # fmt: skip
        if mask is not None:
            its_element = tl.load(
                first_mask + batch_64 * first_mask_b + head.to(tl.int64) * first_mask_h + first_q + rows,
                mask=inside,
                other=0,
            )
            seen = seen & shows(its_element, mask.dtype.element_ty, BIAS)
            if BIAS:
                score += its_element.to(tl.float32) * LOG2_E
        m = tl.where(seen, score, m)
        l = tl.where(seen, 1.0, l)
        acc = tl.where(seen[:, None], value[None, :], acc)
    for masked in tl.static_range(2):
        count = full_end - full_begin
        if masked:
            count = end - begin - count
        if mask is not None:
            count = tl.load(lists + masked)
            listed = lists + 2 + masked * tl.load(lists)
        for i in tl.range(0, count):
            if mask is not None:
                block = tl.load(listed + i)
            elif masked:
                block = begin + i + tl.where(begin + i >= full_begin, full_end - full_begin, 0)
            else:
                block = full_begin + i
            first_k = block * BLOCK_K
            left = length_k - first_k
            if v_sum is not None:  # long before it is needed, or every block waits for memory
                at = v_sum + (block_k + block) * head_dim + columns
                column_sum = tl.load(at, mask=columns < head_dim, other=0)
            k_tile = load_block(
                k, batch, head_k, start_k, first_k, length_k, k_n, head_dim, not masked, BLOCK_K, BLOCK_D, VARLEN, TMA
            )
            if INT8_S:
                s = tl.dot(q_tile, k_tile.T, out_dtype=tl.int32).to(tl.float32)
                if not K_TOKEN:
                    s = s * (tl.load(k_scale + first_k) * scale_2)
                elif masked:
                    s = s * (tl.load(k_scale + first_k + keys, mask=keys < left, other=0) * scale_2)[None, :]
                else:
                    s = s * (tl.load(k_scale + first_k + keys) * scale_2)[None, :]
            else:
                s = dot_16bit(q_tile, k_tile.T) * scale_2
            if q_mean is not None:
                at = k_exact + first_k.to(tl.int64) * exact_n
                exact = load_rows(at, keys, columns, exact_n, left, head_dim, False, EVEN).to(tl.float32)
                bias = tl.sum((exact - shift[None, :]) * mu[None, :], 1) * scale_2
                if INT8_S:
                    s = s * row_scale[:, None] + bias[None, :]
                else:
                    s = s + bias[None, :]
            if masked:
                keep = (
                    visible((first_k + keys)[None, :] - (first_q + rows)[:, None], lower, upper, HAS_LOWER, HAS_UPPER)
                    & (keys < left)[None, :]
                )
                if first_value is not None:
                    keep = keep & (first_k + keys != first)[None, :]
                if key_mask is not None:
                    keep = keep & (tl.load(key_mask + first_k + keys, mask=keys < left, other=0) != 0)[None, :]
                if mask is not None:
                    element = load_mask(
                        mask, listed + i, first_q, first_k, rows[:, None], keys[None, :], length_q - first_q, left,
                        mask_q, mask_k, list_n, MASK_TILE, MASK_EVEN,
                    )  # fmt: skip
                    keep = keep & shows(element, mask.dtype.element_ty, BIAS)
                    if BIAS:
                        if INT8_S and q_mean is None:
                            s = s * row_scale[:, None]
                        s += element.to(tl.float32) * LOG2_E
                s = tl.where(keep, s, float("-inf"))
            elif first_value is not None and mask is None:
                # without masks it is the first of its block: of all but a few registers the compiler knows the outcome
                s = tl.where(((keys == 0) & (first_k == 0))[None, :], float("-inf"), s)
            # S still lacks Q's scale, which is positive and the same along the row
            top = tl.max(s, 1)
            if INT8_S and q_mean is None and not (BIAS and masked):
                top = tl.where(top == float("-inf"), top, top * row_scale)
                offset = tl.where(top == float("-inf"), 0.0, top)
                p = exp2(s * row_scale[:, None] - offset[:, None])
            else:
                offset = tl.where(top == float("-inf"), 0.0, top)
                p = exp2(s - offset[:, None])
            m_new = tl.maximum(m, top)
            safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            decay = exp2(m - safe)
            weight = exp2(top - safe)
            l = l * decay + tl.sum(p, 1) * weight
            m = m_new
            if INT8_O:
                v_tile = load_transposed(v, z_k, blocks_k, padded_k + block, head_dim, BLOCK_K, BLOCK_D, TMA)
                if v_sum is None:
                    LEVELS: tl.constexpr = 127.0
                    part = tl.dot(interleave(to_int8(p * 127.0)), v_tile, out_dtype=tl.int32).to(tl.float32)
                else:
                    # sum of (code - 128) V, and 128 times V's sum; a masked key's -128 and 128 cancel
                    LEVELS: tl.constexpr = 254.0
                    part = tl.dot(interleave(to_int8(p * 254.0 - 128.0)), v_tile, out_dtype=tl.int32).to(tl.float32)
                    part += column_sum[None, :]
                if V_SCALE == "sequence":
                    acc = acc * decay[:, None] + part * (weight * (1 / LEVELS))[:, None]
                elif V_SCALE == "channel":
                    channel = tl.load(
                        v_scale + (block_k + block) * head_dim + columns, mask=columns < head_dim, other=0
                    )
                    acc = acc * decay[:, None] + part * channel[None, :] * (weight * (1 / LEVELS))[:, None]
                else:
                    weight *= tl.load(v_scale + block_k + block) * (1 / LEVELS)
                    acc = acc * decay[:, None] + part * weight[:, None]
            else:
                v_tile = load_block(
                    v,
                    batch,
                    head_k,
                    start_k,
                    first_k,
                    length_k,
                    v_n,
                    head_dim,
                    not masked,
                    BLOCK_K,
                    BLOCK_D,
                    VARLEN,
                    TMA,
                )
                if masked and VARLEN and TMA:  # P is 0 there, but 0 times the next sequence's NaN is NaN
                    v_tile = tl.where((keys < left)[:, None], v_tile, 0.0)
                part = dot_16bit(to_16bit(p, v_tile.dtype), v_tile)
                acc = acc * decay[:, None] + part * weight[:, None]

    acc = acc / l[:, None]
    if INT8_O and V_SCALE == "sequence":
        acc *= tl.load(v_scale + columns, mask=columns < head_dim, other=0)[None, :]
    if v_mean is not None:
        v_mean += (batch * heads_k + head_k).to(tl.int64) * head_dim
        acc += tl.load(v_mean + columns, mask=columns < head_dim, other=0)[None, :]
    empty = m == float("-inf")
    acc = tl.where((empty & (l == 0))[:, None], 0.0, acc)
    o += batch_64 * o_b + head.to(tl.int64) * o_h + (start_q + first_q).to(tl.int64) * o_n
    written = inside[:, None] & (columns[None, :] < head_dim)
    tl.store(o + rows[:, None] * o_n + columns[None, :], to_16bit(acc, o.dtype.element_ty), mask=written)
    log = tl.where(empty & (l == 0), float("-inf"), (m + tl.log2(l)) * LN_2)
    tl.store(lse + row, log, mask=inside)
    if row_max is not None:
        tl.store(row_max + row, m, mask=inside)


def launch_forward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    v_sum: Tensor | None,
    v_mean: Tensor | None,
    smooth_q: SmoothQ,
    first_value: Tensor | None,
    first_key: Tensor | None,
    o: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Write o; lse and, where gradients are FP8, row maxima. The operands as `forward_kernel` takes them."""
    recipe, queries, keys = call.recipe, call.queries, call.keys
    listed = None if call.lists is None else call.lists.by_query
    lse = queries.per_token(q.device)
    row_max = queries.per_token(q.device) if recipe.dv == FP8 else None
    o_int8 = recipe.o == INT8

    def run(config: Config) -> None:
        blocked = {"k": k, "v": v}
        if config.tma:
            block = (recipe.block_k, call.block_d)
            v_view = (transposed_view(v, call.head_dim), block[::-1]) if o_int8 else (keys.view(v), block)
            blocked = described({"k": (keys.view(k), block), "v": v_view}) or blocked
        grid = queries.grid(config.rows)
        launch(
            forward_kernel,
            (grid * queries.batch * queries.heads,),
            q,
            blocked["k"],
            blocked["v"],
            q_scale,
            k_scale,
            v_scale,
            v_sum,
            v_mean,
            smooth_q.q_mean,
            smooth_q.k,
            smooth_q.k_mean,
            None if first_value is None else k,
            first_value,
            first_key,
            o,
            lse,
            row_max,
            call.key_mask,
            queries.cu_seqlens,
            keys.cu_seqlens,
            *lists.arguments(listed),
            *lists.first_arguments(listed),
            *queries.strides(q),
            *keys.strides(k),
            *((0, 0, 0) if o_int8 else keys.strides(v)),
            *queries.strides(o),
            *((0, 0, 0) if smooth_q.k is None else keys.strides(smooth_q.k)),
            queries.heads,
            call.group,
            queries.tokens,
            keys.tokens,
            queries.total,
            keys.total,
            queries.blocks(recipe.block_q),
            keys.blocks(recipe.block_k),
            grid,
            **call.band,
            scale=call.scale,
            head_dim=call.head_dim,
            INT8_S=recipe.s == INT8,
            INT8_O=o_int8,
            K_TOKEN=recipe.k_scale != "block",
            V_SCALE=recipe.v_scale,
            VARLEN=call.packed,
            **lists.options(listed),
            TMA=isinstance(blocked["k"], TensorDescriptor),
            BLOCK_Q=config.rows,
            BLOCK_K=recipe.block_k,
            BLOCK_D=call.block_d,
            **config.options,
        )

    run_best("forward", call, run)
    return lse, row_max
