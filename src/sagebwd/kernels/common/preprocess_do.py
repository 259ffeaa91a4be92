"""Preprocess of the portable backward: INT8 dO, delta = rowsum(dO * O) - dlse, and four FP32 values a query.

Of an INT8 dP (`sagebwd.recipe.Recipe.dp`) also the codes of dO R, whose delta it is then.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Call, Saved, padded_head_dim
from sagebwd.kernels.common.centered_values import (
    CenteredValues,
    abs_max_of,
    codes_of,
    delta_of_codes,
    store_codes,
)
from sagebwd.kernels.common.rotation import floats, load_pieces, turned_codes
from sagebwd.kernels.common.strided import Strided, pitch_of, row_of
from sagebwd.kernels.common.tile import (
    LOG2_E,
    abs_max,
    block_in_sequence,
    divide,
    load_rows,
    padded_block,
    psi_scale,
    to_int8,
    whose,
)
from sagebwd.kernels.common.transposed import NO_SPECIALIZE, launch_pass, store_transposed, transpose
from sagebwd.recipe import INT8

# dO's codes are 0 where it is under so many dlse.
LEAST_DO = tl.constexpr(2.0**-100)


@triton.jit(do_not_specialize=["heads", *NO_SPECIALIZE])
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
    dp,
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
    """dO's codes and scale, and four FP32 values a query, padded to whole blocks: lse in base 2, delta, q_scale, s.

    delta = rowsum(dO * O) - dlse. s: 0, or of an INT8 dP the scale of dO R (`codes_for_dp`), which delta is over. One
    load of four brings a block of them to the attention kernels; loads of fewer values than a program has threads are
    repeated by every thread. lse is +inf where a query sees no key and in the padding, so that P comes out 0 there
    without a mask.

    do, o, codes: `Strided`; codes: Q's saved ones, if not None, of which programs of a second plane of the grid write
    the transposed copy. dp: `ForDp`, or None.
    """
    number, program = block_in_sequence(grid, heads, cu_seqlens, tokens, BLOCK, VARLEN)
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
    if dp is None:
        row_delta = tl.sum(tile * out, 1)  # delta = rowsum(dO * O)
        if dlse is not None:
            row_delta -= tl.load(dlse + row, mask=inside, other=0).to(tl.float32)  # delta -= dlse
    else:
        change = None
        if dlse is not None:
            change = tl.load(dlse + row, mask=inside, other=0).to(tl.float32)
        do_scale, row_delta = codes_for_dp(
            do_at, o_at, pitch_of(do), pitch_of(o), change, dp, batch, head, heads, start + first, length - first,
            head_dim, BLOCK,
        )  # fmt: skip
    row_lse = tl.load(lse + row, mask=inside, other=float("-inf"))
    seen = tl.where(row_lse == float("-inf"), 0.0, 1.0)
    # + 0 * delta: backward looks for NaN in P, so it must be there even if O or dlse alone has it
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse * LOG2_E) + row_delta * 0
    row_scale = row_delta * 0
    if q_scale is not None:
        row_scale = tl.load(q_scale + row, mask=inside, other=0)
    rows += block * BLOCK * 4
    if dp is None:
        do_scale = row_delta * 0
    packed = tl.join(tl.join(row_lse, row_scale), tl.join(row_delta, do_scale))
    tl.store(rows + tl.arange(0, BLOCK * 4), packed.reshape(BLOCK * 4))

    tile *= seen[:, None]  # dO of a query that sees no key is 0 in dV; NaN stays
    amax = abs_max(abs_max(tile, 1), 0)
    scale = psi_scale(amax)
    code = to_int8(divide(tile, scale, 1.0 / scale))
    tl.store(block_scale + block, scale)
    if transposed is not None:
        store_transposed(transposed, code, z, block, blocks, columns, head_dim, BLOCK)


@triton.jit
def codes_for_dp(
    do_at, o_at, pitch_do, pitch_o, change, dp, batch, head, heads, token, left, head_dim: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write codes of dO R of the ``left`` queries from ``token`` on, at most a block; their scale, and delta over it.

    change: of lse, dlse, or None.
    """
    local = tl.arange(0, BLOCK)
    tile = load_pieces(do_at, local, pitch_do, left, head_dim, head_dim)
    x = turned_codes(tile, dp.signs, dp.TURNED, head_dim, dp.PITCH) if dp.TURNED else floats(tile)  # dO R
    amax = abs_max_of(x)
    if change is not None:  # dlse over the scale stays a number of FP32: beside such a dlse FP32 loses dO
        amax = tl.maximum(amax, tl.abs(change) * LEAST_DO)
    scale = psi_scale(amax)
    x_int8 = codes_of(x, scale)
    store_codes(x_int8, dp.codes, batch, head, token, local, local < left, head_dim)
    tl.debug_barrier()  # O's operands take the shared memory that dO's took
    out = load_pieces(o_at, local, pitch_o, left, head_dim, head_dim)
    y = turned_codes(out, dp.signs, dp.TURNED, head_dim, dp.PITCH) if dp.TURNED else floats(out)  # O R
    owner = batch * (heads // dp.group) + head // dp.group
    # + 0 * scale: NaN has codes like any number
    delta = delta_of_codes(x_int8, y, dp.center + owner.to(tl.int64) * dp.PITCH, dp.PITCH) + 0 * scale
    return scale, delta if change is None else delta - change / scale  # delta -= dlse


class ForDp(NamedTuple):
    """What `grad_out_kernel` takes where dP is INT8: codes, `Strided`, to be written; of `CenteredValues` the rest."""

    codes: Strided
    center: Tensor
    signs: Tensor  # without a rotation ``center``, unread: of a tuple with None in it triton 3.6 has no `is None`
    group: int
    TURNED: tl.constexpr
    PITCH: tl.constexpr

    @classmethod
    def of(cls, call: Call, codes: Tensor, values: CenteredValues) -> ForDp:
        """Of a call, and of V's operand."""
        compiled_for = map(tl.constexpr, (sum(call.value_rotation), padded_head_dim(call.value_dim)))
        signs = values.center if values.signs is None else values.signs
        return cls(Strided.of(codes, call.queries), values.center, signs, call.group, *compiled_for)


class GradOut(NamedTuple):
    """What backward reads of queries; see `grad_out_kernel`. None is what the recipe has no use for."""

    row_values: Tensor
    scale: Tensor
    transposed: Tensor | None  # codes of dO, where dV is INT8
    q_t: Tensor | None
    codes: Tensor | None  # codes of dO R, where dP is INT8


def row_values_of(call: Call, device: torch.device) -> Tensor:
    """Uninitialised row values, as lse lies but for blocks, and what these have, in place of tokens."""
    block = call.recipe.block_q
    room = call.queries.padded(block, block * 4, dtype=torch.float32, device=device)
    return room if call.packed else room.unflatten(0, (call.queries.batch, call.queries.heads))


def launch_preprocess_do(
    call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, row_values: Tensor,
    values: CenteredValues | None = None,
) -> GradOut:  # fmt: skip
    """Row values, into `row_values_of` the call, dO's scale and codes, and Q's codes transposed where dK is INT8.

    values: where dP is INT8.
    """
    recipe, queries, block = call.recipe, call.queries, call.recipe.block_q
    q_int8 = saved.q_int8 if recipe.dk == INT8 else None
    made = GradOut(
        row_values,
        queries.padded(block, dtype=torch.float32, device=do.device),
        *(
            queries.padded(block, block * call.head_dim, dtype=torch.int8, device=do.device) if wanted else None
            for wanted in (recipe.dv == INT8, recipe.dk == INT8)
        ),
        None if values is None else torch.empty(do.shape, dtype=torch.int8, device=do.device),
    )
    launch_pass(
        grad_out_kernel,
        queries,
        call.head_dim,
        block,
        Strided.of(do, queries),
        Strided.of(saved.o, queries),
        saved.lse,
        dlse,
        queries.cu_seqlens,
        saved.q_scale if INT8 in (recipe.s, recipe.dk) else None,
        made.transposed,
        made.scale,
        made.row_values,
        None if q_int8 is None else Strided.of(q_int8, queries),
        made.q_t,
        None if values is None else ForDp.of(call, made.codes, values),
        planes=1 if q_int8 is None else 2,
    )
    return made
