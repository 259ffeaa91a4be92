"""The Gluon forward: which passes run, TMA descriptors, and the launches."""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd.call import Call, Saved, empty_like_rows
from sagebwd.kernels.gluon.config import FORWARD, FORWARD_16BIT
from sagebwd.kernels.gluon.descriptor import Rows, matrix, transposed, vectors
from sagebwd.kernels.gluon.forward import forward_kernel
from sagebwd.kernels.gluon.forward_16bit import forward_16bit_kernel
from sagebwd.kernels.gluon.tile import ROWS
from sagebwd.kernels.operands.codes import launch_quantize
from sagebwd.kernels.operands.means import launch_statistics
from sagebwd.kernels.replay import launch
from sagebwd.kernels.support import P_LEVELS, other_dtype, outside
from sagebwd.recipe import FP8, INT8, SIXTEEN_BIT, Recipe

HEAD_DIMS = (64, 128)
# Keys of a block: halves of it are operands, which a tensor core takes in multiples of 32.
BLOCK_SIZES = (64, 128)


def unsupported(recipe: Recipe, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run a forward, or None; whether the GPU is one of theirs is asked elsewhere."""
    if recipe.smooth_q:
        return "smooth_q=True"
    if recipe.s != INT8:
        return f"s={recipe.s!r}: only 'int8' runs"
    return (
        outside("head_dim ", head_dim, HEAD_DIMS)
        or other_dtype(dtype)
        or outside("block_k=", recipe.block_k, BLOCK_SIZES)
        or outside("p_levels=", recipe.p_levels, P_LEVELS)
        or (outside("v_scale=", recipe.v_scale, ("block", "sequence")) if recipe.o == INT8 else None)
    )


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
    """o, lse of the smoothed scores, and what backward reads."""
    recipe, queries, keys, key_mask = call.recipe, call.queries, call.keys, call.key_mask
    head_dim, block_k = call.head_dim, recipe.block_k
    o_int8, float8 = recipe.o == INT8, recipe.dv == FP8
    if not o_int8 and key_mask is not None:  # a masked key's V may be anything, NaN too
        v = launch_quantize(v, keys, "token", block_k, None, key_mask, smoothed=True).smoothed
    sequence = recipe.v_scale == "sequence" and (o_int8 or (float8 and recipe.smooth_v))
    first_apart = o_int8 and recipe.first_key == SIXTEEN_BIT
    k_mean, v_mean, v_scale, first_key = launch_statistics(
        k, v, keys, key_mask, smooth_k=recipe.smooth_k, smooth_v=recipe.smooth_v and (o_int8 or float8),
        v_scale=sequence, first_key=first_apart, k_sampled=recipe.k_mean == "sample",
    )  # fmt: skip
    q_pass = launch_quantize(q, queries, recipe.q_scale, recipe.block_q, codes=True)
    k_pass = launch_quantize(
        k, keys, recipe.k_scale, block_k, k_mean if recipe.smooth_k else None, key_mask, codes=True,
        padded_scale=True,
    )  # fmt: skip
    o = empty_like_rows(q)
    lse = queries.per_token(q.device)
    row_max = queries.per_token(q.device) if float8 else None
    q_columns, k_columns = (head_dim * (x.heads if call.packed else 1) for x in (queries, keys))
    # with P in 16 bit nothing but K's scales is grouped by block_k, and a step may take a part of it
    chosen = {**FORWARD[head_dim], "BLOCK_K": block_k} if o_int8 else dict(FORWARD_16BIT[head_dim])
    step = chosen["BLOCK_K"] = min(chosen["BLOCK_K"], block_k)
    grid = queries.grid((1 if o_int8 else chosen["CONSUMERS"]) * ROWS.value)
    q_desc = matrix(q_pass.codes, q_columns, (ROWS.value, head_dim))
    k_desc = matrix(k_pass.codes, k_columns, (step, head_dim))
    k_scale_desc = vectors(k_pass.padded_scale, step) if recipe.k_scale != "block" else None
    out, offsets = (key_mask, o, lse, row_max), (queries.cu_seqlens, keys.cu_seqlens)
    sizes = (
        *queries.strides(o), queries.heads, call.group, queries.tokens, keys.tokens, queries.total,
        keys.blocks(block_k) * (block_k // step), grid, call.band["lower"], call.band["upper"], abs(call.scale),
    )  # fmt: skip
    options = {
        "HAS_LOWER": call.band["HAS_LOWER"], "HAS_UPPER": call.band["HAS_UPPER"], "VARLEN": call.packed,
        "K_TOKEN": recipe.k_scale != "block", "NEGATIVE": call.scale < 0, "BLOCK_D": head_dim,
        **chosen,
    }  # fmt: skip
    programs = grid * queries.batch * queries.heads
    if o_int8:
        levels = recipe.p_levels
        v_pass = launch_quantize(
            v, keys, recipe.v_scale, block_k, v_mean if recipe.smooth_v else None, key_mask, sequence_scale=v_scale,
            transposed=True, column_sum=torch.int32 if levels == 254 else None,
            first_row=first_apart, first_key=first_key,
        )  # fmt: skip
        launch(
            forward_kernel,
            (programs,),
            q_desc,
            k_desc,
            transposed(v_pass.transposed, head_dim, block_k // 2),
            k_scale_desc,
            vectors(v_pass.column_sum, head_dim) if levels == 254 else None,
            q_pass.token_scale,
            k_pass.padded_scale,
            v_scale if sequence else v_pass.block_scale,
            v_mean if recipe.smooth_v else None,
            *out,
            k_pass.codes if first_apart else None,
            v_pass.first_row,
            first_key,
            *offsets,
            *sizes,
            head_dim=head_dim,
            V_SEQUENCE=sequence,
            LEVELS=levels,
            **options,
        )
    else:
        v_rows = Rows.of(v, keys)
        launch(
            forward_16bit_kernel,
            (programs,),
            q_desc,
            k_desc,
            v_rows.blocks(step, head_dim),
            k_scale_desc,
            q_pass.token_scale,
            k_pass.padded_scale,
            *out,
            *offsets,
            *v_rows.steps,
            *sizes,
            GROUP_K=block_k,
            **options,
        )
    return Saved(
        o, lse, q_pass.codes, q_pass.token_scale, k_pass.codes, k_pass.token_scale, row_max,
        v_scale if float8 and sequence else None, k_mean,
    )  # fmt: skip
