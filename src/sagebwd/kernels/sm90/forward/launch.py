"""Launch of the forward on Hopper, and of the passes before it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.call import Call, Saved, empty_like_rows
from sagebwd.kernels.masks.sm90_block_lists import of_queries
from sagebwd.kernels.runtime.alignment import contiguous, fits_tma
from sagebwd.kernels.runtime.device import num_sms
from sagebwd.kernels.runtime.program import launch
from sagebwd.kernels.sm90 import widths
from sagebwd.kernels.sm90.forward.compile import forward_kernel
from sagebwd.kernels.sm90.forward.variant import SCALE_BLOCK, Arguments, Variant
from sagebwd.kernels.sm90.longest_first import heads_at_once, last_heads
from sagebwd.kernels.sm90.operands.masked_values import launch_masked_values
from sagebwd.kernels.sm90.operands.norm_rope_codes import launch_norm_rope_codes
from sagebwd.kernels.sm90.operands.quantize_k import QuantizedK, launch_quantize_k
from sagebwd.masks.band import Band

# Rows narrower than the form are read as they are.
FILLS = True


def prepare(direction: str, call: Call) -> Call:
    """The call with lists of its mask's blocks."""
    tile = widths.width(call.head_dim, call.value_dim).forward_of(True)
    tokens = call.queries.tokens, call.keys.tokens
    band = Band.of(call.is_causal, call.window_left, call.window_right)
    walk = of_queries(call.mask, call.key_mask, tokens, band, (tile.queries, tile.keys))
    # kernels go by the tile's number: how many there are is no part of a call's specification
    return call._replace(mask=None, lists=walk._replace(words=walk.words[:1]))


class Written(NamedTuple):
    """What `launch_forward` wrote beside O: Q's INT8 codes, and their FP32 scales, one a token; lse and,
    where the call keeps them, row maxima times log2(e), FP32."""

    q_int8: Tensor
    q_scale: Tensor
    lse: Tensor
    row_max: Tensor | None


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
    """o, lse of the smoothed scores, and what backward reads; of a prologue's rows the codes alone are written."""
    codes, inverse_rms = None, ()
    if call.prologue is not None:
        *codes, quantized, of_q, of_k = launch_norm_rope_codes(call, q, k)
        inverse_rms = of_q, of_k
    else:
        sampled = call.recipe.k_mean == "sample"
        quantized = launch_quantize_k(
            k, call.keys, call.key_mask, SCALE_BLOCK, columns=call.head_dim, k_sampled=sampled, turned=call.turned
        )
    # a masked key's V may be anything, NaN too; a prologue's call masks none
    masked_v = None if call.key_mask is None else launch_masked_values(v, call.keys, call.key_mask)
    v, o = _fit(v), empty_like_rows(q, v.shape[-1])
    q = None if codes else q if fits_tma(q) else contiguous(q)
    written = launch_forward(call, q, quantized, v, o, masked_v, codes)
    return Saved(
        o, written.lse, written.q_int8, written.q_scale, quantized.k_int8, quantized.k_scale, written.row_max,
        quantized.k_mean, *inverse_rms,
    )  # fmt: skip


def _fit(v: Tensor) -> Tensor:
    """As TMA reads it; an expanded V too: TMA takes no stride of 0."""
    return v if fits_tma(v) and 0 not in v.stride() else contiguous(v)


def launch_forward(
    call: Call, q: Tensor | None, quantized: QuantizedK, v: Tensor, o: Tensor, masked_v: Tensor | None = None,
    codes: list[Tensor] | None = None,
) -> Written:  # fmt: skip
    """Write o, and what is given back.

    codes: Q's and their scales, in place of q, which is None then. masked_v: of `launch_masked_values`.
    q, v, o: 16 bit, any strides but the last dimension's, all of whole 16 bytes.
    They have ``call.columns`` channels, Q's codes as those of K the call's head_dim.
    """
    queries, device, band = call.queries, v.device, call.band
    if codes is None:
        empty = torch.empty((*q.shape[:-1], call.head_dim), dtype=torch.int8, device=device)
        codes = [empty, queries.per_token(device)]
    written = Written(*codes, queries.per_token(device), queries.per_token(device) if call.keeps_row_max else None)
    heads, bias = (queries.batch, queries.heads, -1, -1), None if call.lists is None else call.lists.bias
    tile = widths.width(call.head_dim, call.value_dim).forward_of(call.lists is not None)
    programs, blocks_q = num_sms(call.device), queries.blocks(tile.queries)
    order = blocks_q, queries.heads_in_all, programs
    # without lists a head of more tiles fills the programs, and more heads' keys and values do not fit L2
    at_once = heads_at_once(*order) if 2 * blocks_q <= programs else 1
    variant = Variant(
        call.head_dim, call.value_dim, str(v.dtype).removeprefix("torch."), tile, lower=band["HAS_LOWER"],
        upper=band["HAS_UPPER"], varlen=call.packed, key_mask=call.key_mask is not None,
        lists=call.lists is not None, bias="" if bias is None else str(bias.dtype).removeprefix("torch."),
        negative=call.scale < 0, row_max=call.keeps_row_max, exact=call.max_logits, rotation=call.rotation,
        lacking=call.lacking, q_codes=q is None,
    )  # fmt: skip
    arguments = Arguments(
        q=q,
        q_int8=written.q_int8,
        k=quantized.k_int8,
        v=v,
        masked_v=masked_v,
        o=o,
        lse=written.lse,
        row_max=written.row_max,
        q_scale=written.q_scale,
        k_scale=quantized.lane_scale,
        largest_k_norm=quantized.largest_norm,
        key_mask=None if call.key_mask is None else call.key_mask.view(torch.uint8),
        lists=None if call.lists is None else call.lists.lists.expand(*heads),
        words=None if call.lists is None else call.lists.words,
        tiles=None if call.lists is None else call.lists.tiles.expand(*heads),
        bias=None if bias is None else bias.expand(*heads[:2], queries.tokens, call.keys.tokens),
        cu_seqlens_q=queries.cu_seqlens,
        cu_seqlens_k=call.keys.cu_seqlens,
        tiles_taken=quantized.tiles_taken,
        programs=programs,
        blocks_q=blocks_q,
        heads_at_once=at_once if call.lists is None else last_heads(*order),
        lower=band["lower"] if band["HAS_LOWER"] else 0,
        upper=band["upper"] if band["HAS_UPPER"] else 0,
        scale=abs(call.scale),
    )
    launch(forward_kernel(variant), (), *arguments)
    return written
