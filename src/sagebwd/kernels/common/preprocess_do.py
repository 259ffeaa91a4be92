"""Preprocess of the portable backward: INT8 dO, delta = rowsum(dO * O) - dlse, and four FP32 values a query."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Call
from sagebwd.kernels.common.strided import Strided, pitch_of, row_of
from sagebwd.kernels.common.tile import (
    LOG2_E,
    abs_max,
    block_and_head,
    divide,
    load_rows,
    padded_block,
    psi_scale,
    to_int8,
    whose,
)
from sagebwd.kernels.common.transposed import NO_SPECIALIZE, launch_pass, store_transposed, transpose
from sagebwd.recipe import INT8


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def grad_out_kernel(
    do,
    o,
    lse,
    dlse,
    cu_seqlens,
    q_scale,
    transposed,
    block_scale,
    rows,
    q_codes,
    q_t,
    heads,
    tokens,
    total,
    blocks,
    grid,
    head_dim: tl.constexpr,
    VARLEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dO's codes and scale, and four FP32 values a query, padded to whole blocks: lse in base 2, delta, q_scale, 0.

    delta = rowsum(dO * O) - dlse. One load of four brings a block of them to the attention kernels; loads of fewer
    values than a program has threads are repeated by every thread. lse is +inf where a query sees no key and in the
    padding, so that P comes out 0 there without a mask.

    do, o, codes: `Strided`; codes: Q's saved ones, if not None, of which programs of a second plane of the grid write
    the transposed copy.
    """
    number, program = block_and_head(grid)
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    first = number * BLOCK
    if first >= length:
        return
    block = z * blocks + padded_block(start, batch, BLOCK, VARLEN) + number
    if q_codes is not None:  # noqa: SIM102, settled at compile time
        if tl.program_id(1) == 1:
            at = row_of(q_codes, batch, head, start + first)
            transpose(  # Q^T of the saved INT8 Q
                at, pitch_of(q_codes), q_t, z, block, blocks, length - first, head_dim, BLOCK, BLOCK_D
            )
            return
    local = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    EVEN: tl.constexpr = head_dim == BLOCK_D
    inside = first + local < length
    do_at = row_of(do, batch, head, start + first)
    o_at = row_of(o, batch, head, start + first)
    tile = load_rows(do_at, local, columns, pitch_of(do), length - first, head_dim, False, EVEN).to(tl.float32)
    out = load_rows(o_at, local, columns, pitch_of(o), length - first, head_dim, False, EVEN).to(tl.float32)

    row = z * total + start + first + local
    row_delta = tl.sum(tile * out, 1)  # delta = rowsum(dO * O)
    if dlse is not None:
        row_delta -= tl.load(dlse + row, mask=inside, other=0).to(tl.float32)  # delta -= dlse
    row_lse = tl.load(lse + row, mask=inside, other=float("-inf"))
    # + 0 * delta: backward looks for NaN in P, so it must be there even if O or dlse alone has it
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E) + row_delta * 0
    row_scale = row_delta * 0
    if q_scale is not None:
        row_scale = tl.load(q_scale + row, mask=inside, other=0)
    rows += block * BLOCK * 4
    packed = tl.join(tl.join(row_lse, row_scale), tl.join(row_delta, row_delta * 0))
    tl.store(rows + tl.arange(0, BLOCK * 4), packed.reshape(BLOCK * 4))

    amax = abs_max(abs_max(tile, 1), 0)
    scale = psi_scale(amax)
    code = to_int8(divide(tile, scale, 1.0 / scale))
    tl.store(block_scale + block, scale)
    if transposed is not None:
        store_transposed(transposed, code, z, block, blocks, columns, head_dim, BLOCK)


def launch_preprocess_do(
    call: Call,
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    q_scale: Tensor | None,
    q_int8: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """row_values, dO's scale, where dV is INT8 its transposed codes, and q_int8 transposed; see `grad_out_kernel`."""
    recipe, queries, block = call.recipe, call.queries, call.recipe.block_q
    row_values = queries.padded(block, block * 4, dtype=torch.float32, device=do.device)
    scale = queries.padded(block, dtype=torch.float32, device=do.device)
    transposed = None
    if recipe.dv == INT8:
        transposed = queries.padded(block, block * call.head_dim, dtype=torch.int8, device=do.device)
    q_t = None
    if q_int8 is not None:
        q_t = queries.padded(block, block * call.head_dim, dtype=torch.int8, device=do.device)
    launch_pass(
        grad_out_kernel,
        queries,
        call.head_dim,
        block,
        Strided.of(do, queries),
        Strided.of(o, queries),
        lse,
        dlse,
        queries.cu_seqlens,
        q_scale,
        transposed,
        scale,
        row_values,
        None if q_int8 is None else Strided.of(q_int8, queries),
        q_t,
        planes=1 if q_int8 is None else 2,
    )
    return row_values, scale, transposed, q_t
