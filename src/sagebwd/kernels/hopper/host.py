"""Forward as `sagebwd.ops` calls it: which passes run, TMA descriptors, and the launch."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagebwd.kernels.call import Packing, capability
from sagebwd.kernels.hopper.forward import ROWS, forward_kernel
from sagebwd.kernels.passes import launch_quantize
from sagebwd.kernels.statistics import launch_statistics
from sagebwd.recipe import INT8, Recipe

HEAD_DIMS = (64, 128)
# Registers a thread at launch, which fix how many programs share an SM: two at head_dim 128, where O alone takes 64 of
# a thread's registers, three at 64. Measured on an H200, docs/kernels.md.
REGISTERS = {64: 80, 128: 128}
STAGES = 2
# Keys of a block: halves of it are operands, which a tensor core takes in multiples of 32.
BLOCK_SIZES = (64, 128)


def unsupported(recipe: Recipe, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why this kernel cannot run a call, or None; the GPU is asked for by `available`."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} is neither bfloat16 nor float16"
    if recipe.block_k not in BLOCK_SIZES:
        return f"block_k={recipe.block_k} is not one of {', '.join(map(str, BLOCK_SIZES))}"
    if recipe.v_scale == "channel":
        return "v_scale='channel' is not one of block, sequence"
    if recipe.smooth_q:
        return "smooth_q=True"
    for product in ("s", "o"):
        if getattr(recipe, product) != INT8:
            return f"{product}={getattr(recipe, product)!r}: only 'int8' runs"
    return None


def _descriptor(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """A TMA descriptor of a contiguous (rows, columns) tensor."""
    bits = 8 * x.element_size()
    # vectors are read by threads, not by tensor cores
    swizzle = 0 if block[0] == 1 else min(128, block[1] * bits // 8)
    layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
    return TensorDescriptor.from_tensor(x, list(block), layout)


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
    """o, lse of the smoothed scores, and what backward reads: q_int8, q_scale, k_int8, k_scale, k_mean."""
    if capability(q.device) != 90:
        raise ValueError(f"impl='hopper' needs a GPU of compute capability 9.0 (H100, H200), got {q.device}")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    key_mask = None if key_mask is None else key_mask.contiguous()
    queries, keys = Packing.of(q, cu_seqlens_q, max_seqlen_q), Packing.of(k, cu_seqlens_k, max_seqlen_k)
    head_dim, block_k = q.shape[-1], recipe.block_k
    sequence = recipe.v_scale == "sequence"
    k_mean, v_mean, v_scale = launch_statistics(
        k, v, keys, key_mask, smooth_k=recipe.smooth_k, smooth_v=recipe.smooth_v, v_scale=sequence
    )
    q_pass = launch_quantize(q, queries, recipe.q_scale, recipe.block_q, codes=True)
    k_pass = launch_quantize(
        k, keys, recipe.k_scale, block_k, k_mean if recipe.smooth_k else None, key_mask, codes=True, padded_scale=True
    )
    levels = recipe.p_levels
    v_pass = launch_quantize(
        v, keys, recipe.v_scale, block_k, v_mean if recipe.smooth_v else None, key_mask, sequence_scale=v_scale,
        transposed=True, column_sum=torch.int32 if levels > 127 else None,
    )  # fmt: skip

    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = queries.per_token(q.device)
    packed = cu_seqlens_q is not None
    rows = (-1, head_dim) if not packed else None
    q_rows, k_rows = (x.codes.view(rows or (x.codes.shape[0], -1)) for x in (q_pass, k_pass))
    has_upper = is_causal or window_right >= 0
    grid = queries.grid(ROWS.value)
    forward_kernel[(grid * queries.batch * queries.heads,)](
        _descriptor(q_rows, (ROWS.value, head_dim)),
        _descriptor(k_rows, (block_k, head_dim)),
        _descriptor(v_pass.transposed.view(v_pass.transposed.shape[0] * head_dim, -1), (head_dim, block_k // 2)),
        _descriptor(k_pass.padded_scale.view(-1, block_k), (1, block_k)) if recipe.k_scale == "token" else None,
        _descriptor(v_pass.column_sum.view(-1, head_dim), (1, head_dim)) if levels > 127 else None,
        q_pass.token_scale,
        k_pass.padded_scale,
        v_scale if sequence else v_pass.block_scale,
        v_mean if recipe.smooth_v else None,
        key_mask,
        o,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        *queries.strides(o),
        queries.heads,
        queries.heads // keys.heads,
        queries.tokens,
        keys.tokens,
        queries.total,
        keys.blocks(block_k),
        grid,
        -window_left,
        0 if is_causal else window_right,
        abs(scale),
        head_dim=head_dim,
        HAS_LOWER=window_left >= 0,
        HAS_UPPER=has_upper,
        VARLEN=packed,
        K_TOKEN=recipe.k_scale == "token",
        V_SEQUENCE=sequence,
        NEGATIVE=scale < 0,
        LEVELS=levels,
        STAGES=STAGES,
        BLOCK_K=block_k,
        BLOCK_D=head_dim,
        num_warps=4,
        maxnreg=REGISTERS[head_dim],
    )
    return o, lse, q_pass.codes, q_pass.token_scale, k_pass.codes, k_pass.token_scale, k_mean
