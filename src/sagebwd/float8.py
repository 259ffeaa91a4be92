"""Gradient products in 8-bit floating point (e4m3): scales from bounds, sums in FP32 from the first block to the last.

An e4m3 code keeps four significant bits over fifteen octaves, so P and dS need no scale a tile: one a row, known
before the loop, will do, and a product can add up in the tensor cores' accumulators without being rescaled. With m the
largest score of a query's row, w = exp(m - lse) its largest probability, R the norm of V's largest magnitudes by
channel and u = R |dO_i| + |dlse_i| a bound (up to 2) on a row of dP - delta::

    P'  = e4m3(448 exp(S - m))                        row i of P over w_i
    dS' = e4m3(448 exp(S - m) (dP - delta) / u)       row i of dS over w_i u_i
    dO' = e4m3(448 w dO / largest)                    dV = P'^T dO' * scale
    Q'  = e4m3(448 w u Q / largest)                   dK = dS'^T Q' * scale
    K'  = e4m3(448 K / largest)                       dQ = dS' K' * scale * w u

Q and K are the dequantised INT8 operands of S. ``largest`` is taken over the tokens of a sequence and, for queries,
over the heads that share a key head, as their sums do. What exceeds 448 is 448.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0


def e4m3(x: Tensor) -> Tensor:
    """x rounded to e4m3 (half to even, saturated), in x's dtype; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn).to(x.dtype)


def _normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 of x with its largest at 448, and what takes a product with 448 of the other operand back."""
    largest = x.abs().amax((-3, -2, -1), keepdim=True)
    largest = torch.where(largest == 0, torch.ones_like(largest), largest)
    return e4m3(x * (E4M3_MAX / largest)), largest / E4M3_MAX**2


@dataclass(frozen=True)
class Float8Operands:
    """The operands of dV, dK and dQ that do not depend on the block, (B, H, G, tokens, D), and their scales."""

    row_max: Tensor  # m, (B, H, G, N, 1), 0 where a query sees no key
    bound: Tensor  # u, (B, H, G, N, 1), 1 where it is 0
    do: Tensor
    q: Tensor
    k: Tensor
    dv_scale: Tensor  # (B, H, 1, 1, 1)
    dk_scale: Tensor  # (B, H, 1, 1, 1)
    dq_scale: Tensor  # (B, H, G, N, 1)

    @classmethod
    def of(
        cls,
        row_max: Tensor,
        lse: Tensor,
        do: Tensor,
        dlse: Tensor | None,
        v_scale: Tensor,
        q_codes: Tensor,
        q_scale: Tensor,
        k_codes: Tensor,
        k_scale: Tensor,
    ) -> Float8Operands:
        """Operands of one call.

        Args: row_max (-inf where a query sees no key), lse and dlse (B, H, G, N, 1); do (B, H, G, N, D); v_scale
        (B, H, 1, 1, D), psi's scale of each of V's channels; codes and scales of Q (B, H, G, N, .), K (B, H, 1, M, .).
        """
        weight = torch.exp(row_max - lse)
        row_max = torch.where(row_max == -torch.inf, 0, row_max)
        # psi gives a channel without range the scale 1, which says nothing of V
        squares = torch.where(v_scale == 1, 0, v_scale.square()).sum(-1, keepdim=True)
        norm = 127 * torch.where(squares == 0, v_scale.shape[-1], squares).sqrt()
        bound = norm * do.square().sum(-1, keepdim=True).sqrt()
        if dlse is not None:
            bound = bound + dlse.abs()
        spread = weight * bound
        do_codes, dv_scale = _normalised(do * weight)
        q, dk_scale = _normalised(q_codes * (q_scale * spread))
        k, dq_scale = _normalised(k_codes * k_scale)
        bound = torch.where(bound == 0, torch.ones_like(bound), bound)
        return cls(row_max, bound, do_codes, q, k, dv_scale, dk_scale, dq_scale * spread)

    def probability(self, s: Tensor, rows: slice) -> Tensor:
        """exp(S - m), the largest of each row 1."""
        return torch.exp(s - self.row_max[..., rows, :])

    def dv(self, probability: Tensor, rows: slice) -> Tensor:
        """P^T dO of a chunk of queries."""
        return e4m3(E4M3_MAX * probability).mT @ self.do[..., rows, :] * self.dv_scale

    def ds(self, probability: Tensor, dp: Tensor, delta: Tensor, rows: slice) -> Tensor:
        """dS' of a chunk of queries."""
        return e4m3(E4M3_MAX * probability * ((dp - delta) / self.bound[..., rows, :]))

    def dk(self, ds: Tensor, rows: slice) -> Tensor:
        """dS^T Q of a chunk of queries, without the softmax scale."""
        return ds.mT @ self.q[..., rows, :] * self.dk_scale

    def dq(self, ds: Tensor, rows: slice, keys: slice) -> Tensor:
        """dS K of a chunk of queries, without the softmax scale."""
        return ds @ self.k[..., keys, :] * self.dq_scale[..., rows, :]
