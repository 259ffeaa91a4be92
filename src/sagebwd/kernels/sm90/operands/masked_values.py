"""V where keys are masked: a copy of the blocks near them, with zeros in their place.

A masked key has a P of 0, but 0 times NaN is NaN. The forward loads the blocks without a masked key from V itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Packing
from sagebwd.kernels.common.strided import Strided, tile_of
from sagebwd.kernels.common.tile import block_in_sequence, whose
from sagebwd.kernels.common.transposed import NO_SPECIALIZE, launch_pass
from sagebwd.kernels.sm90.widths import SCALE_BLOCK


def launch_masked_values(v: Tensor, keys: Packing, key_mask: Tensor) -> Tensor:
    """V, of which those blocks alone are written that a step of the forward may take together with a masked key."""
    written = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    given = Strided.of(v, keys), key_mask, Strided.of(written, keys)
    launch_pass(_masked_values_kernel, keys, v.shape[-1], SCALE_BLOCK, *given)
    return written


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def _masked_values_kernel(
    v, key_mask, written, heads, tokens, total, blocks, grid, head_dim: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """v and written: `Strided`. A step of the forward has no more keys than a block, and may begin within one."""
    number, program = block_in_sequence(grid, heads, None, tokens, BLOCK, VARLEN)
    batch, head, _, _, _ = whose(program, heads, None, tokens, VARLEN)
    first = number * BLOCK
    key_mask += batch.to(tl.int64) * tokens
    near = first - BLOCK + tl.arange(0, 4 * BLOCK)
    there = (near >= 0) & (near < first + 2 * BLOCK)
    kept = tl.load(key_mask + near, mask=there & (near < tokens), other=0) != 0
    if tl.max((there & (kept == 0)).to(tl.int32), 0) > 0:
        along, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
        rows = first + along
        keep = tl.load(key_mask + rows, mask=rows < tokens, other=0) != 0
        inside = (rows < tokens)[:, None] & (columns < head_dim)[None, :]
        at = tile_of(v, batch, head, first, along, columns)
        tile = tl.load(v.at + at, mask=inside & keep[:, None], other=0)
        tl.store(written.at + tile_of(written, batch, head, first, along, columns), tile, mask=inside)
