"""Forward and backward as `sagebwd.ops` calls them: which passes run, TMA descriptors, and the launches."""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd.kernels import portable
from sagebwd.kernels.call import P_LEVELS, Call, Packing, aligned_rows, capability, contiguous, fits_tma
from sagebwd.kernels.gluon.config import FORWARD, FORWARD_16BIT
from sagebwd.kernels.gluon.descriptor import Rows, matrix, transposed, vectors
from sagebwd.kernels.gluon.forward import forward_kernel
from sagebwd.kernels.gluon.forward_16bit import forward_16bit_kernel
from sagebwd.kernels.gluon.gradients import float8_gradients, int8_gradients
from sagebwd.kernels.gluon.tile import ROWS
from sagebwd.kernels.operands.lane_codes import launch_channel_scale, launch_codes
from sagebwd.kernels.operands.means import launch_statistics
from sagebwd.kernels.operands.passes import launch_quantize
from sagebwd.kernels.replay import Launch, repeat
from sagebwd.kernels.sm90.compile import unavailable
from sagebwd.kernels.sm90.config import SCALE_BLOCK
from sagebwd.kernels.sm90.launch import launch_forward
from sagebwd.recipe import FP8, INT8, SIXTEEN_BIT, Recipe

CONTIGUOUS = torch.contiguous_format
HEAD_DIMS = (64, 128)
# Keys of a block: halves of it are operands, which a tensor core takes in multiples of 32.
BLOCK_SIZES = (64, 128)

# Which recipes these kernels have a backward for.
INT8_BACKWARD = {
    **dict.fromkeys(("s", "dv", "dq", "dk"), INT8), "do_scale": "block", "p_scale_dv": "key", "ds_scale_dq": "query",
    "ds_scale_dk": "key", "block_q": 64,
}  # fmt: skip
# Whose forward runs in CuTe DSL where that is installed.
LANE_FORWARD = {
    "s": INT8, "o": SIXTEEN_BIT, "q_scale": "token", "k_scale": "lane", "block_k": SCALE_BLOCK, "smooth_k": True,
}  # fmt: skip
FLOAT8_BACKWARD = {"s": INT8, **dict.fromkeys(("dv", "dq", "dk"), FP8), "v_scale": "sequence", "block_q": 64}


def unsupported(recipe: Recipe, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run a call, or None; whether the GPU is one of theirs, `forward` asks."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} is neither bfloat16 nor float16"
    if recipe.block_k not in BLOCK_SIZES:
        return f"block_k={recipe.block_k} is not one of {', '.join(map(str, BLOCK_SIZES))}"
    if recipe.p_levels not in P_LEVELS:
        return f"p_levels={recipe.p_levels} is not one of {', '.join(map(str, P_LEVELS))}"
    if recipe.v_scale == "channel":
        return "v_scale='channel' is not one of block, sequence"
    if recipe.smooth_q:
        return "smooth_q=True"
    if recipe.s != INT8:
        return f"s={recipe.s!r}: only 'int8' runs"
    if FP8 in (recipe.dv, recipe.dq, recipe.dk) and not _has(recipe, FLOAT8_BACKWARD):
        needed = ", ".join(f"{name}={value!r}" for name, value in FLOAT8_BACKWARD.items())
        return f"recipe {str(recipe)!r}: FP8 runs with {needed}"
    # backward is Triton's where these kernels have none
    return None if recipe.dv == FP8 else portable.unsupported(recipe, head_dim, dtype)


def has_backward(recipe: Recipe) -> bool:
    """Whether backward runs these kernels; of other recipes it runs Triton's, on the same saved tensors."""
    return recipe.dv == FP8 or _has(recipe, INT8_BACKWARD)


def _has(recipe: Recipe, fields: dict[str, object]) -> bool:
    return all(getattr(recipe, name) == value for name, value in fields.items())


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    """o, lse of the smoothed scores, and what backward reads, in the order of `sagebwd.ops`."""
    if capability(q.device) != 90:
        raise ValueError(f"impl='hopper' needs a GPU of compute capability 9.0 (H100, H200), got {q.device}")
    q, k, v, key_mask = *map(aligned_rows, (q, k, v)), contiguous(key_mask)
    return repeat(
        _forward, q, k, v, key_mask, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window_left,
        window_right, scale, recipe,
    )  # fmt: skip


def _forward(
    launch: Launch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
    recipe: Recipe,
) -> tuple[Tensor, ...]:
    queries, keys = Packing.of(q, cu_seqlens_q, max_seqlen_q), Packing.of(k, cu_seqlens_k, max_seqlen_k)
    head_dim, block_k = q.shape[-1], recipe.block_k
    o_int8, float8 = recipe.o == INT8, recipe.dv == FP8
    nothing, no_scale = (torch.empty(0, dtype=torch.float32, device=q.device) for _ in range(2))
    if not o_int8 and key_mask is not None:  # a masked key's V may be anything, NaN too
        v = launch_quantize(v, keys, "token", block_k, None, key_mask, smoothed=True, launch=launch).smoothed
    if _has(recipe, LANE_FORWARD) and unavailable() is None:
        codes = launch_codes(q, k, queries, keys, key_mask, block_k, launch)
        # an expanded V too: TMA takes no stride of 0
        v = v if fits_tma(v) and 0 not in v.stride() else v.contiguous()
        o, lse, row_max = launch_forward(
            codes.q, codes.q_scale, codes.k, codes.lane_scale, v, queries, keys, key_mask, is_causal, window_left,
            window_right, scale, float8, launch,
        )  # fmt: skip
        row_max = row_max if float8 else nothing
        return o, lse, codes.q, codes.q_scale, codes.k, codes.k_scale, row_max, no_scale, codes.k_mean
    sequence = recipe.v_scale == "sequence" and (o_int8 or (float8 and recipe.smooth_v))
    first_apart = o_int8 and recipe.first_key == SIXTEEN_BIT
    k_mean, v_mean, v_scale, first_key = launch_statistics(
        k, v, keys, key_mask, smooth_k=recipe.smooth_k, smooth_v=recipe.smooth_v and (o_int8 or float8),
        v_scale=sequence, first_key=first_apart, launch=launch,
    )  # fmt: skip
    q_pass = launch_quantize(q, queries, recipe.q_scale, recipe.block_q, codes=True, launch=launch)
    k_pass = launch_quantize(
        k, keys, recipe.k_scale, block_k, k_mean if recipe.smooth_k else None, key_mask, codes=True,
        padded_scale=True, first_row=torch.int8 if first_apart else None, first_key=first_key, launch=launch,
    )  # fmt: skip
    o = torch.empty_like(q, memory_format=CONTIGUOUS)
    lse = queries.per_token(q.device)
    row_max = queries.per_token(q.device) if float8 else None
    packed = cu_seqlens_q is not None
    q_columns, k_columns = (head_dim * (x.heads if packed else 1) for x in (queries, keys))
    # with P in 16 bit nothing but K's scales is grouped by block_k, and a step may take a part of it
    chosen = {**FORWARD[head_dim], "BLOCK_K": block_k} if o_int8 else dict(FORWARD_16BIT[head_dim])
    step = chosen["BLOCK_K"] = min(chosen["BLOCK_K"], block_k)
    grid = queries.grid((1 if o_int8 else chosen["CONSUMERS"]) * ROWS.value)
    q_desc = matrix(q_pass.codes, q_columns, (ROWS.value, head_dim))
    k_desc = matrix(k_pass.codes, k_columns, (step, head_dim))
    k_scale_desc = vectors(k_pass.padded_scale, step) if recipe.k_scale != "block" else None
    out, offsets = (key_mask, o, lse, row_max), (cu_seqlens_q, cu_seqlens_k)
    sizes = (
        *queries.strides(o), queries.heads, queries.heads // keys.heads, queries.tokens, keys.tokens, queries.total,
        keys.blocks(block_k) * (block_k // step), grid, -window_left, 0 if is_causal else window_right, abs(scale),
    )  # fmt: skip
    options = {
        "HAS_LOWER": window_left >= 0, "HAS_UPPER": is_causal or window_right >= 0,
        "VARLEN": packed, "K_TOKEN": recipe.k_scale != "block", "NEGATIVE": scale < 0, "BLOCK_D": head_dim,
        **chosen,
    }  # fmt: skip
    programs = grid * queries.batch * queries.heads
    if o_int8:
        levels = recipe.p_levels
        v_pass = launch_quantize(
            v, keys, recipe.v_scale, block_k, v_mean if recipe.smooth_v else None, key_mask, sequence_scale=v_scale,
            transposed=True, column_sum=torch.int32 if levels == 254 else None,
            first_row=torch.float32 if first_apart else None, first_key=first_key, launch=launch,
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
            k_pass.first_row,
            k_pass.first_scale,
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
    bounds = row_max if float8 else nothing, v_scale if float8 and sequence else no_scale
    return o, lse, q_pass.codes, q_pass.token_scale, k_pass.codes, k_pass.token_scale, *bounds, k_mean


def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    q_int8: Tensor,
    q_scale: Tensor,
    k_int8: Tensor,
    k_scale: Tensor,
    row_max: Tensor,
    v_scale: Tensor,
    k_mean: Tensor,
    key_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
    recipe: Recipe,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; INT8 gradients are bit for bit the same in every run, e4m3's where ``deterministic``."""
    if not has_backward(recipe):
        return portable.backward(
            do, dlse, q, k, v, o, lse, q_int8, q_scale, k_int8, k_scale, row_max, v_scale, k_mean, key_mask,
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window_left, window_right, scale,
            recipe, deterministic,
        )  # fmt: skip
    do, v, o, q_int8, k_int8 = map(aligned_rows, (do, v, o, q_int8, k_int8))
    dlse, key_mask = contiguous(dlse), contiguous(key_mask)
    return repeat(
        _backward, do, dlse, v, o, lse, q_int8, q_scale, k_int8, k_scale, row_max, v_scale, key_mask, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window_left, window_right, scale, recipe, deterministic,
    )  # fmt: skip


def _backward(
    launch: Launch,
    do: Tensor,
    dlse: Tensor | None,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    q_int8: Tensor,
    q_scale: Tensor,
    k_int8: Tensor,
    k_scale: Tensor,
    row_max: Tensor,
    v_scale: Tensor,
    key_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
    recipe: Recipe,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys = Packing.of(o, cu_seqlens_q, max_seqlen_q), Packing.of(v, cu_seqlens_k, max_seqlen_k)
    call = Call(
        recipe, scale, o.dtype, o.shape[-1], queries, keys, key_mask, is_causal, window_left, window_right,
        capability(o.device), launch,
    )  # fmt: skip
    if recipe.dv == FP8:
        if v_scale.numel() == 0:
            v_scale = launch_channel_scale(v, keys, key_mask, launch)
        return float8_gradients(
            call, do, dlse, v, o, lse, q_int8, q_scale, k_int8, k_scale, row_max, v_scale, deterministic
        )
    return int8_gradients(call, do, dlse, v, o, lse, q_int8, q_scale, k_int8, k_scale)
