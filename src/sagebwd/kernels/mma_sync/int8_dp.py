"""Passes of an INT8 dP (`sagebwd.recipe.Recipe.dp`) before backward in cuda/backward.cu.

After `sagebwd.kernels.common.centered_values`: dO's two kinds of codes, delta of those that dP is of, and row values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Call, Saved, padded_head_dim
from sagebwd.kernels.common.centered_values import abs_max_of, codes_of, launch_centered_values, store_codes
from sagebwd.kernels.common.rotation import floats, load_pieces, turned_codes
from sagebwd.kernels.common.strided import Strided, pitch_of, row_of
from sagebwd.kernels.common.tile import (
    LOG2_E,
    TINY,
    abs_max,
    block_and_head,
    divide,
    padded_block,
    psi_scale,
    to_int8,
    whose,
)
from sagebwd.kernels.common.transposed import NO_SPECIALIZE, store_transposed, transpose
from sagebwd.kernels.mma_sync.variant import QUERIES
from sagebwd.kernels.runtime.program import launch

# Rows of dO and of O, both rotated, fill the registers of fewer warps; two programs fit on a multiprocessor.
WARPS, REGISTERS = 8, 128


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def int8_row_values_kernel(
    do, o, lse, dlse, center, signs, cu_seqlens, q_scale, codes, transposed, block_scale, rows, q_codes, q_t, heads,
    group, tokens, total, blocks, grid, head_dim: tl.constexpr, TURNED: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """As `grad_out_kernel` in kernels/common, of a block's queries, with codes of dO R too, of a scale s a token.

    rows, (2, BLOCK, 2) a block: lse in base 2 and Q's scale; delta and s, both times Q's scale. delta = s rowsum(codes
    (O - c) R) - dlse, so that dP and delta share dO's rounding. block_scale: 0 where dO's block is, so that sums lose
    no bits to it. center, signs: of `CenteredValues`. TURNED: channels of R, or 0. Programs of the grid's second plane
    write the transposed copy of Q's codes.
    """
    number, program = block_and_head(grid)
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    first = number * BLOCK
    if first >= length:
        return
    block = z * blocks + padded_block(start, batch, BLOCK, VARLEN) + number
    if tl.program_id(1) == 1:
        at = row_of(q_codes, batch, head, start + first)
        transpose(at, pitch_of(q_codes), q_t, z, block, blocks, length - first, head_dim, BLOCK, BLOCK_D)
        return
    local = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    inside = first + local < length
    tile = load_pieces(row_of(do, batch, head, start + first), local, pitch_of(do), length - first, head_dim, BLOCK_D)
    out = load_pieces(row_of(o, batch, head, start + first), local, pitch_of(o), length - first, head_dim, BLOCK_D)
    x = turned_codes(tile, signs, TURNED, head_dim, BLOCK_D) if TURNED else floats(tile)  # dO R
    scale = psi_scale(abs_max_of(x))
    x_int8 = codes_of(x, scale)
    store_codes(x_int8, codes, batch, head, start + first, local, inside, head_dim)

    y = turned_codes(out, signs, TURNED, head_dim, BLOCK_D) if TURNED else floats(out)  # O R
    mu = tl.load(center + program // group * BLOCK_D + columns)  # c R
    row = z * total + start + first + local
    delta = tl.sum(x_int8[0].to(tl.float32) * (y[0] - mu[None, :]), 1) * scale
    if dlse is not None:
        delta -= tl.load(dlse + row, mask=inside, other=0).to(tl.float32)  # delta -= dlse
    row_lse = tl.load(lse + row, mask=inside, other=float("-inf"))
    # + 0 * delta: backward looks for NaN in P, so it must be there even if O or dlse alone has it
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E) + delta * 0
    of_q = tl.load(q_scale + row, mask=inside, other=0)
    rows += block * BLOCK * 4
    pair = tl.arange(0, BLOCK * 2)
    tl.store(rows + pair, tl.join(row_lse, of_q).reshape(BLOCK * 2))
    tl.store(rows + BLOCK * 2 + pair, tl.join(delta * of_q, scale * of_q).reshape(BLOCK * 2))

    plain = tile[0].to(tl.float32)
    amax = abs_max(abs_max(plain, 1), 0)
    scale_of_block = psi_scale(amax)
    code = to_int8(divide(plain, scale_of_block, 1.0 / scale_of_block))
    tl.store(block_scale + block, tl.where(amax < TINY, 0.0, scale_of_block))
    store_transposed(transposed, code, z, block, blocks, columns, head_dim, BLOCK)


class Int8Dp(NamedTuple):
    """Codes of (V - c) R and dO R, V's scale a token, and what `launch_preprocess_do` gives of queries."""

    v_int8: Tensor
    v_scale: Tensor
    do_int8: Tensor
    row_values: Tensor
    do_scale: Tensor
    do_t: Tensor
    q_t: Tensor


def launch_int8_dp(call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, v: Tensor) -> Int8Dp:
    """Operands of a call at the kernels' width, which its head_dim and value_dim are."""
    queries, device, dim = call.queries, do.device, call.value_dim
    v_int8, v_scale, center, signs = launch_centered_values(call, saved, v)
    do_int8 = torch.empty(do.shape, dtype=torch.int8, device=device)
    row_values = queries.padded(QUERIES, QUERIES * 4, dtype=torch.float32, device=device)
    do_scale = queries.padded(QUERIES, dtype=torch.float32, device=device)
    do_t, q_t = (queries.padded(QUERIES, QUERIES * dim, dtype=torch.int8, device=device) for _ in range(2))
    launch(
        int8_row_values_kernel,
        (queries.grid(QUERIES) * queries.batch * queries.heads, 2),
        Strided.of(do, queries), Strided.of(saved.o, queries), saved.lse, dlse, center, signs, queries.cu_seqlens,
        saved.q_scale, Strided.of(do_int8, queries), do_t, do_scale, row_values, Strided.of(saved.q_int8, queries),
        q_t, queries.heads, call.group, queries.tokens, queries.total, queries.blocks(QUERIES), queries.grid(QUERIES),
        head_dim=dim, TURNED=sum(call.value_rotation), VARLEN=call.packed, BLOCK=QUERIES, BLOCK_D=padded_head_dim(dim),
        num_warps=WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
    return Int8Dp(v_int8, v_scale, do_int8, row_values, do_scale, do_t, q_t)
