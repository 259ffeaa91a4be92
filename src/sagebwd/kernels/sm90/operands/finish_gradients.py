"""End of the backward of calls with a prologue: dQ of its sums, then the gradients of rotary embedding and RMS norm.

dQ is scaled and rotated back as `bwd_postprocess` does, rounded to 16 bits, and goes on in registers; dK, which the
kernel before wrote, is read. Both become gradients of the projections' outputs in one launch, with each program's
share of the weights' gradients, by the mathematics of `sagebwd.kernels.norm_rope`. The kernel is in CUDA C++
(cuda/finish_gradients.cu): tiles of a head are copied to shared memory while others are computed, so that enough bytes
are under way, and R is two tensor core products of 16 x 16 signs and sums in registers, as of the codes. The shares
are added up in one more launch, in one order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sagebwd.call import Call, Prologue, Saved, empty_like_rows
from sagebwd.kernels.runtime.alignment import fits_tma
from sagebwd.kernels.runtime.device import capability
from sagebwd.kernels.runtime.nvrtc import Source, kernel_of
from sagebwd.kernels.runtime.program import copy, launch
from sagebwd.kernels.sm90.operands.bwd_postprocess import dq_sum_scale
from sagebwd.kernels.sm90.operands.norm_rope_codes import SOURCES, macros_of, read_prologue, tables_of
from sagebwd.kernels.sm90.widths import BackwardTile
from sagebwd.numerics import RESTORED


class Tiles(NamedTuple):
    """Warps of 8 tokens of a thread block, its heads, stages of two, and thread blocks that a multiprocessor holds."""

    warps: int
    heads: int
    stages: int
    blocks_an_sm: int

    @property
    def tokens(self) -> int:
        """Tokens of a thread block."""
        return 8 * self.warps


# By head_dim: the best of nine at 64 and of six at 128, timed on an H200 (32K and 16K tokens, 16 heads).
TILES = {64: Tiles(4, 16, 2, 4), 128: Tiles(4, 16, 2, 2)}


class Gradients(NamedTuple):
    """Of q and k, each as its own lies, and the programs' shares of those of the weights, (programs, D) FP32."""

    dq: Tensor
    dk: Tensor
    dq_weight: Tensor | None
    dk_weight: Tensor | None


def source(head_dim: int, turned: int, dtype: torch.dtype, prologue: Prologue, tiles: Tiles) -> Source:
    """The kernel; turned: channels of the rotation, or 0. Tables and weights as `read_prologue` has them."""
    warps, heads, stages, blocks_an_sm = tiles
    macros = macros_of(head_dim, turned, dtype, prologue)
    macros |= {"WARPS": warps, "HEADS": heads, "STAGES": stages, "CTAS": blocks_an_sm}
    files = SOURCES / "rows.cuh", SOURCES / "finish_gradients.cu"
    a_stage = 2 * head_dim * tiles.tokens * (2 if prologue.eps is None else 4)
    constants = tuple((name, int(x)) for name, x in macros.items())
    return Source("finish_gradients", files, constants, warps, 4 * head_dim + stages * a_stage)


def launch_finish_gradients(
    call: Call, saved: Saved, summed: Tensor, spread: Tensor, largest: Tensor, dk_out: Tensor, q: Tensor | None,
    k: Tensor | None, dq: Tensor, tile: BackwardTile, tiles: Tiles | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of the projections' outputs: dq, whose memory it is, from its FP16 sums; dk from ``dk_out``.

    q, k: as forward was given them; None where there is no norm. summed, spread, largest: as `launch_finish_dq`, of
    dQ^T; D 64 or 128, all of which rotates or none.
    """
    assert not tile.dq_in_rows, "sums are of dQ^T"
    queries, keys, head_dim, device = call.queries, call.keys, call.head_dim, dq.device
    tiles = tiles or TILES[head_dim]
    prologue = read_prologue(call.prologue, dq.dtype)
    dk = empty_like_rows(dk_out if k is None else k)
    q, k, dk_out = (x if x is None or fits_tma(x) else copy(empty_like_rows(x), x) for x in (q, k, dk_out))
    k_batch, k_tokens = (1, keys.total) if call.packed else (keys.batch, keys.tokens)
    q_blocks, q_batch = max(queries.blocks(tiles.tokens), 1), 1 if call.packed else queries.batch
    q_programs = q_batch * q_blocks * -(-queries.heads // tiles.heads)
    k_programs = k_batch * -(-keys.heads // tiles.heads) * -(-k_tokens // tiles.tokens)

    def shares(weight: Tensor | None, programs: int) -> Tensor | None:
        return None if weight is None else torch.empty(programs, head_dim, dtype=torch.float32, device=device)

    out = Gradients(dq, dk, shares(prologue.q_weight, q_programs), shares(prologue.k_weight, k_programs))
    none = 0, 0, 0
    launch(
        kernel_of(source(head_dim, call.turned, dq.dtype, prologue, tiles), capability(call.device)),
        (q_programs + k_programs,),
        summed, spread, largest, queries.cu_seqlens, keys.cu_seqlens, queries.batch, q_blocks, queries.total,
        queries.blocks(tile.queries), tile.queries,
        call.scale / dq_sum_scale(call) * RESTORED, q, *(none if q is None else queries.strides(q)), dq,
        *queries.strides(dq), saved.q_inverse_rms, prologue.q_weight, out.dq_weight,
        *tables_of(prologue.q_cos, prologue.q_sin), queries.heads, queries.tokens, q_programs, dk_out,
        *keys.strides(dk_out), k, *(none if k is None else keys.strides(k)), dk, *keys.strides(dk),
        saved.k_inverse_rms, prologue.k_weight, out.dk_weight, *tables_of(prologue.k_cos, prologue.k_sin), keys.heads,
        k_tokens,
    )  # fmt: skip
    return out


# Channels of a program, which are a sector of memory, and shares whose loads are under way at once.
COLUMNS, ROWS = 8, 1024


@triton.jit(do_not_specialize=["q_programs", "k_programs"])
def sum_shares_kernel(
    q_shares, q_sum, q_programs, k_shares, k_sum, k_programs, head_dim: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Sums (D,) of shares (programs, D); None where a side has no weight."""
    PARTS: tl.constexpr = head_dim // COLUMNS
    part = tl.program_id(0)
    if part < PARTS:
        _sum_columns(q_shares, q_sum, q_programs, part, head_dim, COLUMNS, ROWS)
    else:
        _sum_columns(k_shares, k_sum, k_programs, part - PARTS, head_dim, COLUMNS, ROWS)


@triton.jit
def _sum_columns(shares, out, programs, part, head_dim: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    if shares is not None:
        columns, rows = part * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, programs, ROWS):
            at = shares + (first + rows).to(tl.int64)[:, None] * head_dim + columns[None, :]
            sums += tl.load(at, mask=(first + rows < programs)[:, None], other=0)
        tl.store(out + columns, tl.sum(sums, 0))


def launch_sum_shares(q_shares: Tensor | None, k_shares: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Sums (D,) FP32 of shares (programs, D), each None where there are none; D a multiple of 8."""
    given = [x for x in (q_shares, k_shares) if x is not None]
    sums = tuple(None if x is None else x.new_empty(x.shape[1]) for x in (q_shares, k_shares))
    if given:
        head_dim = given[0].shape[1]
        q_programs, k_programs = (0 if x is None else len(x) for x in (q_shares, k_shares))
        launch(
            sum_shares_kernel, (2 * (head_dim // COLUMNS),), q_shares, sums[0], q_programs, k_shares, sums[1],
            k_programs, head_dim=head_dim, COLUMNS=COLUMNS, ROWS=ROWS, num_warps=8,
        )  # fmt: skip
    return sums
