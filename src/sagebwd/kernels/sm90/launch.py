"""The sm_90a forward: what it runs, its passes and its launch."""

from __future__ import annotations

import torch
from torch import Tensor

from sagebwd.call import Call, Saved, empty_like_rows
from sagebwd.kernels.alignment import fits_tma
from sagebwd.kernels.device import num_sms
from sagebwd.kernels.operands.codes import launch_quantize
from sagebwd.kernels.operands.lane_codes import Codes, launch_codes
from sagebwd.kernels.replay import launch
from sagebwd.kernels.sm90.compile import forward_kernel, unavailable
from sagebwd.kernels.sm90.config import PERSISTENT, QUANTIZE_Q, SCALE_BLOCK, TILES, WIDE_O, Arguments, Variant
from sagebwd.kernels.support import lacks, other_dtype, outside
from sagebwd.recipe import FP8, INT8, SIXTEEN_BIT, Recipe

# Those that a backward has (`TILES` has 96 too).
HEAD_DIMS = (64, 128)
# What recipes it runs have.
FORWARD = {
    "s": INT8, "o": SIXTEEN_BIT, "q_scale": "token", "k_scale": "lane", "block_k": SCALE_BLOCK, "smooth_k": True,
    "smooth_q": False,
}  # fmt: skip


def unsupported(recipe: Recipe, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why this kernel cannot run a forward, or None; whether the GPU is one of its is asked elsewhere."""
    return outside("head_dim ", head_dim, HEAD_DIMS) or other_dtype(dtype) or lacks(recipe, FORWARD) or unavailable()


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
    """o, lse of the smoothed scores, and what backward reads."""
    codes = launch_codes(q, k, call.queries, call.keys, call.key_mask, SCALE_BLOCK, of_queries=not QUANTIZE_Q)
    if call.key_mask is not None:  # a masked key's V may be anything, NaN too
        v = launch_quantize(v, call.keys, "token", SCALE_BLOCK, None, call.key_mask, smoothed=True).smoothed
    # an expanded V too: TMA takes no stride of 0
    v = v if fits_tma(v) and 0 not in v.stride() else v.contiguous()
    o = empty_like_rows(q)
    rows = None
    if QUANTIZE_Q:
        rows = q if fits_tma(q) else q.contiguous()
    lse, row_max = launch_forward(call, codes, v, o, with_row_max=call.recipe.dv == FP8, q=rows)
    return Saved(o, lse, codes.q, codes.q_scale, codes.k, codes.k_scale, row_max, None, codes.k_mean)


def launch_forward(
    call: Call, codes: Codes, v: Tensor, o: Tensor, *, with_row_max: bool, q: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Write o, and Q's codes if given q; lse and, if asked for, row maxima times log2(e), FP32.

    q, v, o: 16 bit, any strides but the last dimension's, all of whole 16 bytes; v finite where the call's mask masks.
    """
    queries, device, band = call.queries, v.device, call.band
    lse = queries.per_token(device)
    row_max = queries.per_token(device) if with_row_max else None
    variant = Variant(
        call.head_dim, str(v.dtype).removeprefix("torch."), TILES[call.head_dim], lower=band["HAS_LOWER"],
        upper=band["HAS_UPPER"], varlen=call.packed, key_mask=call.key_mask is not None, negative=call.scale < 0,
        row_max=with_row_max, quantize_q=q is not None, persistent=q is not None and PERSISTENT, wide_o=WIDE_O,
    )  # fmt: skip
    arguments = Arguments(
        q=codes.q if q is None else q,
        q_codes=None if q is None else codes.q,
        k=codes.k,
        v=v,
        o=o,
        lse=lse,
        row_max=row_max,
        q_scale=codes.q_scale,
        k_scale=codes.lane_scale,
        key_mask=None if call.key_mask is None else call.key_mask.view(torch.uint8),
        cu_seqlens_q=queries.cu_seqlens,
        cu_seqlens_k=call.keys.cu_seqlens,
        tiles_taken=codes.tiles_taken if variant.persistent else None,
        programs=num_sms(device),
        longest=queries.tokens,
        lower=band["lower"] if band["HAS_LOWER"] else 0,
        upper=band["upper"] if band["HAS_UPPER"] else 0,
        scale=abs(call.scale),
    )
    launch(forward_kernel(variant), (), *arguments)
    return lse, row_max
