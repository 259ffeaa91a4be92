"""The two backwards on Hopper, from what forward saved: e4m3's in one kernel, INT8's in two."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.call import Call, Saved, empty_gradients
from sagebwd.kernels import device
from sagebwd.kernels.gluon.backward import backward_kernel
from sagebwd.kernels.gluon.config import BACKWARD, DKDV, DQ, backward_heads_at_once, backward_turns
from sagebwd.kernels.gluon.descriptor import Rows, matrix, transposed, vectors
from sagebwd.kernels.gluon.dkdv import dkdv_kernel
from sagebwd.kernels.gluon.dq import PIECE, dq_kernel
from sagebwd.kernels.gluon.host import HEAD_DIMS
from sagebwd.kernels.gluon.tile import CONSUMERS, DELTA_CHANNELS, ROWS
from sagebwd.kernels.operands.fp8_dq import dq_sum_scale, launch_finish_dq
from sagebwd.kernels.operands.fp8_rows import DELTA_PARTS, SCALES, launch_row_values
from sagebwd.kernels.operands.grad_out import launch_grad_out
from sagebwd.kernels.operands.lane_codes import launch_channel_maxima
from sagebwd.kernels.operands.transposed import launch_transpose
from sagebwd.kernels.replay import launch
from sagebwd.kernels.support import lacks, other_dtype, outside
from sagebwd.recipe import FP8, INT8, SIXTEEN_BIT, Recipe

# FP32 numbers between two blocks' scales in shared memory, where TMA writes from multiples of 128 bytes on.
SCALES_APART = 32
# What recipes they run have.
INT8_BACKWARD = {
    **dict.fromkeys(("s", "dv", "dq", "dk"), INT8), "dp": SIXTEEN_BIT, "do_scale": "block", "p_scale_dv": "key",
    "ds_scale_dq": "query", "ds_scale_dk": "key", "block_q": 64, "smooth_q": False,
}  # fmt: skip
FLOAT8_BACKWARD = {
    "s": INT8, **dict.fromkeys(("dv", "dq", "dk"), FP8), "dp": SIXTEEN_BIT, "v_scale": "sequence", "block_q": 64,
    "smooth_q": False,
}  # fmt: skip


def unsupported(recipe: Recipe, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run a backward, or None."""
    float8 = FP8 in (recipe.dv, recipe.dq, recipe.dk)
    return (
        outside("head_dim ", head_dim, HEAD_DIMS)
        or other_dtype(dtype)
        or lacks(recipe, FLOAT8_BACKWARD if float8 else INT8_BACKWARD)
    )


def backward(
    call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; INT8 gradients are bit for bit the same in every run, e4m3's where ``call.deterministic``."""
    if call.recipe.dv != FP8:
        return int8_gradients(call, saved, do, dlse, v)
    return float8_gradients(call, saved, do, dlse, v)


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


def _of_keys(call: Call, operands: Operands, dk: Tensor, block_q: int) -> tuple:
    """The arguments from cu_seqlens_q to blocks_q, which `backward_kernel` and `dkdv_kernel` share."""
    queries, keys = call.queries, call.keys
    return (
        queries.cu_seqlens, keys.cu_seqlens, *operands.steps, *keys.strides(dk), keys.heads, call.group,
        queries.tokens, keys.tokens, keys.total, queries.blocks(block_q),
    )  # fmt: skip


def _zeros(call: Call, block_q: int, maxima: bool, on: torch.device) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What is raised or counted up from 0, in one piece, for one launch to clear.

    Bits of the largest K of each key head; how many blocks of keys have added to each half of a block of
    dQ^T if they are to in order; if asked for, bits of V's largest by channel, (batch, heads, D).
    """
    keys, queries = call.keys, call.queries
    heads = keys.batch * keys.heads
    counts = queries.heads_in_all * queries.blocks(block_q) * CONSUMERS.value if call.deterministic else 0
    sizes = heads, counts, heads * call.head_dim if maxima else 0
    largest, added, v_maxima = torch.zeros(sum(sizes), dtype=torch.int32, device=on).split(sizes)
    v_maxima = v_maxima.view(keys.batch, keys.heads, call.head_dim) if maxima else None
    return largest, added if call.deterministic else None, v_maxima


def float8_gradients(
    call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in e4m3 (`sagebwd.float8`); do, v, o: any strides with a contiguous last dimension."""
    deterministic, q_int8, k_int8, k_scale = call.deterministic, saved.q_int8, saved.k_int8, saved.k_scale
    queries, keys, head_dim, rows = call.queries, call.keys, call.head_dim, ROWS.value
    # what its copies have one scale for, whatever the recipe's block is
    chosen = dict(BACKWARD[head_dim])
    block_q, span = chosen["BLOCK_Q"], CONSUMERS.value * rows
    largest, added, v_maxima = _zeros(call, block_q, saved.v_scale is None, do.device)
    if v_maxima is not None:
        launch_channel_maxima(v, keys, call.key_mask, v_maxima)
        saved = saved._replace(v_scale=v_maxima)
    dq, dk, dv = empty_gradients(call.recipe, saved.o, v)
    # dQ is written last: its memory has the scaled dO until then
    values = launch_row_values(call, saved, do, dlse, largest, dq, block_q)
    operands = Operands.of(call, q_int8, k_int8, v, dq)
    turns, heads_at_once = 1, 1
    if deterministic:
        heads_at_once = backward_heads_at_once(call, span, block_q, device.num_sms(do.device))
        chosen["IN_TURN"] = False
    elif chosen["IN_TURN"]:
        turns = backward_turns(call, span, block_q, device.num_sms(do.device))
    grid = -(-keys.grid(span) // turns)
    launch(
        backward_kernel,
        (grid * keys.batch * keys.heads,),
        operands.q.blocks(block_q, head_dim),
        operands.k.blocks(rows, head_dim),
        operands.v.blocks(rows, head_dim),
        operands.do.blocks(block_q, head_dim),
        transposed(values.q_t, head_dim, block_q),
        transposed(values.do_t, head_dim, block_q),
        vectors(values.planes, 2 * block_q),
        vectors(values.scales, SCALES.value, SCALES_APART),
        matrix(values.delta_parts, DELTA_PARTS.value, (block_q, DELTA_CHANNELS.value)),
        matrix(values.dq_sums, values.dq_sums.shape[1], (rows, rows)),
        matrix(dk, head_dim, (rows, head_dim)),
        matrix(dv, head_dim, (rows, head_dim)),
        k_scale,
        largest,
        call.key_mask,
        dk,
        dv,
        added,
        *_of_keys(call, operands, dk, block_q),
        grid,
        turns,
        heads_at_once,
        keys.batch * keys.heads,
        scale=call.scale,
        sum_scale=dq_sum_scale(call),
        VARLEN=call.packed,
        RAGGED=call.packed or queries.tokens % block_q != 0 or keys.tokens % span != 0,
        GROUPED=call.group > 1,
        A_LANE=call.recipe.k_scale == "lane",
        BLOCK_D=head_dim,
        **call.band,
        **chosen,
    )
    launch_finish_dq(call, values.dq_sums, values.spread, largest, dq, block_q)
    return dq, dk, dv


def int8_gradients(
    call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in INT8; tensors as in `float8_gradients`."""
    o, lse, q_int8, q_scale, k_int8, k_scale, *_ = saved
    queries, keys, head_dim, rows = call.queries, call.keys, call.head_dim, ROWS.value
    block_q, block_k = call.recipe.block_q, call.recipe.block_k
    row_values, do_scale, do_t, q_t = launch_grad_out(call, do, o, lse, dlse, q_scale, q_int8, planes=True)
    k_t, padded_k_scale = launch_transpose(k_int8, keys, block_k, k_scale)
    operands = Operands.of(call, q_int8, k_int8, v, do)
    q_desc, do_desc = operands.q.blocks(block_q, head_dim), operands.do.blocks(block_q, head_dim)
    dq, dk, dv = empty_gradients(call.recipe, saved.o, v)
    options = {"VARLEN": call.packed, "BLOCK_D": head_dim, **call.band}
    chosen = DKDV[head_dim]
    grid = keys.grid(chosen["CONSUMERS"] * rows)
    launch(
        dkdv_kernel,
        (grid * keys.batch * keys.heads,),
        q_desc,
        operands.k.blocks(rows, head_dim),
        operands.v.blocks(rows, head_dim),
        do_desc,
        transposed(q_t, head_dim, block_q),
        transposed(do_t, head_dim, block_q),
        vectors(row_values, 4 * block_q),
        k_scale,
        do_scale,
        call.key_mask,
        dk,
        dv,
        *_of_keys(call, operands, dk, block_q),
        grid,
        scale=call.scale,
        GROUPED=call.group > 1,
        BLOCK_Q=block_q,
        **options,
        **chosen,
    )

    chosen = DQ[head_dim]
    grid = queries.grid(CONSUMERS.value * rows)
    launch(
        dq_kernel,
        (grid * queries.batch * queries.heads,),
        q_desc,
        do_desc,
        operands.k.blocks(block_k, head_dim),
        operands.v.blocks(block_k, head_dim),
        transposed(k_t, head_dim, PIECE.value),
        vectors(padded_k_scale, block_k),
        row_values,
        call.key_mask,
        dq,
        queries.cu_seqlens,
        keys.cu_seqlens,
        *operands.steps,
        *queries.strides(dq),
        queries.heads,
        call.group,
        queries.tokens,
        keys.tokens,
        queries.blocks(block_q),
        keys.blocks(block_k),
        grid,
        scale=call.scale,
        RAGGED=call.packed or keys.tokens % block_k != 0 or call.key_mask is not None,
        BLOCK_K=block_k,
        **options,
        **chosen,
    )
    return dq, dk, dv
