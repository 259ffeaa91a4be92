"""Sums of what programs have of the gradients of both norms' weights, in one launch and one order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sagebwd.kernels.runtime.program import launch

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
def _sum_columns(
    shares, out, programs, part, head_dim: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
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
