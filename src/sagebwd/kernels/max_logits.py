"""The largest logit of each block of queries: of row maxima that a forward kept, and what K-smoothing took off."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import BLOCK_OF_MAXIMA, Packing, blocks_of_maxima, padded_head_dim
from sagebwd.kernels.common.strided import Strided
from sagebwd.kernels.common.tile import LN_2, block_in_sequence, whose
from sagebwd.kernels.runtime.alignment import aligned_rows
from sagebwd.kernels.runtime.program import launch
from sagebwd.kernels.sinks import taken_off


@triton.jit(do_not_specialize=["tokens", "total", "grid"])
def max_logits_kernel(
    row_max, lse, q, k_mean, found, cu_seqlens, scale, heads, group, tokens, total, grid, head_dim: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The largest logit of a block of queries of a head, -inf of none; found: (heads over the batch, grid).

    row_max: times log2(e), of smoothed scores; lse, of those too; q: `Strided`; k_mean (B, heads / group, head_dim).
    """
    number, program = block_in_sequence(grid, heads, cu_seqlens, tokens, BLOCK, VARLEN)
    batch, head, z, start, length = whose(program, heads, cu_seqlens, tokens, VARLEN)
    first = number * BLOCK
    to = found + tl.program_id(0)
    if first >= length:
        tl.store(to, float("-inf"))
        return
    local = tl.arange(0, BLOCK)
    inside = first + local < length
    row = z * total + start + first + local
    row_lse = tl.load(lse + row, mask=inside, other=float("-inf"))
    logit = tl.load(row_max + row, mask=inside, other=float("-inf")) * LN_2
    if k_mean is not None:
        left = length - first
        logit += taken_off(q, k_mean, batch, head, heads, group, start + first, local, left, head_dim, BLOCK_D) * scale
    # lse knows which queries see no key, and has the NaN that a maximum drops
    logit = tl.where(tl.abs(row_lse) < float("inf"), logit, row_lse)
    unknown = tl.max((logit != logit).to(tl.int32), 0)
    tl.store(to, tl.where(unknown > 0, float("nan"), tl.max(logit, 0)))


def max_logits(
    row_max: Tensor, lse: Tensor, q: Tensor, k_mean: Tensor | None, scale: float, packing: Packing
) -> Tensor:
    """The largest logits, lse's shape with `blocks_of_maxima` in place of queries; packing: of q."""
    q, head_dim = aligned_rows(q), q.shape[-1]
    grid = blocks_of_maxima(packing.total, 1 if packing.cu_seqlens is None else packing.batch)
    found = torch.empty((*lse.shape[:-1], grid), dtype=torch.float32, device=lse.device)
    launch(
        max_logits_kernel, (grid * packing.heads_in_all,), row_max, lse, Strided.of(q, packing), k_mean, found,
        packing.cu_seqlens, scale, packing.heads, 1 if k_mean is None else packing.heads // k_mean.shape[1],
        packing.extent, packing.total, grid, head_dim=head_dim, VARLEN=packing.cu_seqlens is not None,
        BLOCK=BLOCK_OF_MAXIMA, BLOCK_D=padded_head_dim(head_dim), num_warps=max(4, padded_head_dim(head_dim) // 64),
    )  # fmt: skip
    return found
