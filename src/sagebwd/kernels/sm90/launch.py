"""Launches the sm_90a forward on operands that `sagebwd.kernels.operands.lane_codes` writes."""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd.kernels.call import Packing
from sagebwd.kernels.replay import Launch, launch
from sagebwd.kernels.sm90.compile import forward_kernel
from sagebwd.kernels.sm90.config import TILES, Arguments, Variant


def launch_forward(
    q: Tensor,
    q_scale: Tensor,
    k: Tensor,
    k_scale: Tensor,
    v: Tensor,
    queries: Packing,
    keys: Packing,
    key_mask: Tensor | None,
    is_causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
    with_row_max: bool,
    launch: Launch = launch,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """O, lse and, if asked for, row maxima times log2(e), FP32, of INT8 codes q and k and of v in 16 bit.

    Args:
        q, k: codes, (B, H, N, D) or packed (total, H, D), contiguous.
        q_scale: FP32, one a token. k_scale: FP32, (heads, padded blocks of 128 keys, 4).
        v: any strides but the last dimension's, all of whole 16 bytes; finite where ``key_mask`` masks.
        key_mask: bool (B, N), True where a key counts, or None.
        window_left, window_right: tokens, -1 without a bound.
    """
    head_dim, device = v.shape[-1], v.device
    o = torch.empty(q.shape, dtype=v.dtype, device=device)
    lse = queries.per_token(device)
    row_max = queries.per_token(device) if with_row_max else None
    right = [bound for bound, given in ((0, is_causal), (window_right, window_right >= 0)) if given]
    variant = Variant(
        head_dim, str(v.dtype).removeprefix("torch."), TILES[head_dim], lower=window_left >= 0, upper=bool(right),
        varlen=queries.cu_seqlens is not None, key_mask=key_mask is not None, negative=scale < 0, row_max=with_row_max,
    )  # fmt: skip
    arguments = Arguments(
        q=q,
        k=k,
        v=v,
        o=o,
        lse=lse,
        row_max=row_max,
        q_scale=q_scale,
        k_scale=k_scale,
        key_mask=None if key_mask is None else key_mask.view(torch.uint8),
        cu_seqlens_q=queries.cu_seqlens,
        cu_seqlens_k=keys.cu_seqlens,
        longest=queries.tokens,
        lower=-window_left if window_left >= 0 else 0,
        upper=min(right, default=0),
        scale=abs(scale),
    )
    launch(forward_kernel(variant), (), *arguments)
    return o, lse, row_max
