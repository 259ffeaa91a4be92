"""The launch of the kernels where dK and dV have no room beside one another: one of dV, one of dK and dQ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sagebwd.call import Call
from sagebwd.kernels.host.replay import launch
from sagebwd.kernels.sm90.backward.descriptor import gradient_strides, matrix, transposed, vectors
from sagebwd.kernels.sm90.backward.key_query_kernel import key_query_kernel
from sagebwd.kernels.sm90.backward.tile import CONSUMERS, ROWS
from sagebwd.kernels.sm90.backward.value_kernel import value_kernel
from sagebwd.kernels.sm90.operands.fp8_dq import dq_sum_scale
from sagebwd.kernels.sm90.operands.fp8_rows import RowValues
from sagebwd.kernels.sm90.widths import BackwardTile

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from sagebwd.kernels.sm90.backward.launch import Operands


def launch_in_two(
    call: Call, tile: BackwardTile, operands: Operands, values: RowValues, scales: TensorDescriptor,
    k_scale: Tensor, largest: Tensor, added: Tensor | None, dk: Tensor, dv: Tensor, heads_at_once: int,
    **options: int,
) -> None:  # fmt: skip
    """Write dk and dv, and add to dQ's sums of ``values``.

    heads_at_once: with ``added``; without, all of them. options: of both launches.
    """
    queries, keys, head_dim, block_q, rows = call.queries, call.keys, call.head_dim, tile.queries, ROWS.value
    q, k = operands.q.blocks(block_q, head_dim), operands.k.blocks(rows, head_dim)
    span = CONSUMERS.value * rows
    grid, heads = keys.grid(span), keys.batch * keys.heads
    sizes = (keys.heads, call.group, queries.tokens, keys.tokens, keys.total, queries.blocks(block_q), grid)
    options = {
        "scale": call.scale, "VARLEN": call.packed, "GROUPED": call.group > 1, "BLOCK_Q": block_q, "BLOCK_D": head_dim,
        "RAGGED": call.packed or queries.tokens % block_q != 0 or keys.tokens % span != 0, **call.band, **options,
    }  # fmt: skip
    launch(
        value_kernel,
        (grid * heads,),
        q,
        k,
        transposed(values.do_t, head_dim, head_dim, block_q),
        vectors(values.planes, 3 * block_q, 2 * block_q),
        scales,
        matrix(dv, dv.shape[-1], (rows, rows)),
        k_scale,
        call.key_mask,
        dv,
        queries.cu_seqlens,
        keys.cu_seqlens,
        gradient_strides(call, dv),
        *operands.q.steps,
        *operands.k.steps,
        *sizes,
        heads,
        heads,
        STAGES=tile.stages,
        **options,
    )
    launch(
        key_query_kernel,
        (grid * heads,),
        q,
        k,
        operands.v.blocks(rows, head_dim),
        operands.do.blocks(block_q, head_dim),
        transposed(values.q_t, head_dim, head_dim, block_q),
        vectors(values.planes, 3 * block_q, 4 * block_q),
        scales,
        matrix(values.dq_sums, head_dim, (block_q, rows)),
        matrix(dk, dk.shape[-1], (rows, rows)),
        k_scale,
        largest,
        call.key_mask,
        dk,
        added,
        queries.cu_seqlens,
        keys.cu_seqlens,
        gradient_strides(call, dk),
        *operands.steps,
        *sizes,
        heads if added is None else heads_at_once,
        heads,
        sum_scale=dq_sum_scale(call),
        **options,
    )
