"""Launches of the split backward, where registers cannot hold dK beside dV: one kernel for dV, one for dK and dQ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sagebwd.call import Call
from sagebwd.kernels.runtime.program import launch
from sagebwd.kernels.sm90.backward.arguments import Factors, Kind, Sizes, Tensors
from sagebwd.kernels.sm90.backward.descriptor import gradient_blocks, gradient_strides, matrix, transposed, vectors
from sagebwd.kernels.sm90.backward.key_query_kernel import key_query_kernel
from sagebwd.kernels.sm90.backward.tile import CONSUMERS, ROWS
from sagebwd.kernels.sm90.backward.value_kernel import value_kernel
from sagebwd.kernels.sm90.operands.bwd_preprocess import RowValues
from sagebwd.kernels.sm90.widths import Width

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from sagebwd.kernels.sm90.backward.launch import Operands


def launch_split_dkdv(
    call: Call, width: Width, operands: Operands, values: RowValues, scales: TensorDescriptor, tensors: Tensors,
    factors: Factors, heads_at_once: int, **options: int,
) -> None:  # fmt: skip
    """Write dk and dv of ``tensors``, and add to dQ's sums of ``values``.

    heads_at_once: where blocks of keys add to dQ in order; else all of them. options: of both launches.
    """
    keys, head_dim, block_q, rows = call.keys, call.head_dim, width.backward.queries, ROWS.value
    piece = width.backward.piece or head_dim
    q, k = operands.q.blocks(block_q, piece), operands.k.blocks(rows, piece)
    span = CONSUMERS.value * rows
    grid, heads = keys.blocks(span), keys.heads_in_all
    programs = grid * heads if tensors.work_splits is None else len(tensors.work_splits.programs)
    kind = Kind.of(call, block_q, span, tensors.dv)
    options |= {"KIND": kind, "WIDTH": width}
    launch(
        value_kernel,
        (programs,),
        q,
        k,
        transposed(values.do_t, head_dim, piece, block_q),
        vectors(values.planes, 3 * block_q, 2 * block_q),
        scales,
        gradient_blocks(tensors.dv, kind, (rows, rows)),
        tensors._replace(largest=None, dk=None, dq_semaphore=None, strides=gradient_strides(call, tensors.dv)),
        *operands.q.steps,
        *operands.k.steps,
        *Sizes.of(call, block_q, grid, heads),
        Factors(call.scale),
        **options,
    )
    launch(
        key_query_kernel,
        (programs,),
        q,
        k,
        operands.v.blocks(rows, piece),
        operands.do.blocks(block_q, piece),
        transposed(values.q_t, head_dim, piece, block_q),
        vectors(values.planes, 3 * block_q, 4 * block_q),
        scales,
        matrix(values.dq_sums, head_dim, (block_q, piece // 2 if width.backward.piece else rows)),
        gradient_blocks(tensors.dk, kind, (rows, rows)),
        tensors._replace(dv=None, strides=gradient_strides(call, tensors.dk)),
        *operands.steps,
        *Sizes.of(call, block_q, grid, heads if tensors.dq_semaphore is None else heads_at_once),
        factors,
        **options,
    )
