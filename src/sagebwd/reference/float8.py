"""Gradient products in 8-bit floating point (e4m3): scales from bounds, sums from the first block to the last.

All scales are powers of two and exact. With m the largest score of query i, P_max = exp(m - lse) its largest weight,
R the norm of V's largest magnitudes by channel, r = min(1, 1 / P_max - 1) and at least 2^-10, and
u = r R |dO_i| + |dlse_i|, a bound (up to 2) on a row of dS / P_max::

    e = floor(log2(448 exp(lse - m)))      b = ceil(log2 u)
    P'  = e4m3(2^e P)                      dO' = e4m3(2^-e dO 2^g)         dV = P'^T dO' 2^-g
    dS' = e4m3(2^e P (dP - delta) 2^-b)    Q'  = e4m3(2^(b - e) Q 2^g)     dK = dS'^T Q' 2^-g
                                           K'  = e4m3(K 2^g)               dQ = 2^(b - e) dS' K' 2^-g

docs/gradients-e4m3.md says why. Q and K are the dequantised INT8 operands of S. Each operand has its own g, the
largest that leaves its magnitudes at most 448: K' over the tokens of a sequence, dO' and Q' over `queries_a_scale`
queries of a head. All three are times `RESTORED`.

dP is the product of 2^-b dO, in the dtype of the input, and V. FP16 has little room for that. r is at least 2^-15 / R
there, so that 2^-b dO is at most 2^15 however small V is. Where V is large, and no |2^-b dO| of a query is as much as
2^-14, FP16's least normal number, e and b of that query are both less by as many octaves as are missing, at most
`MOST_LOWERED`: dS' is what it was, and P' pays for dO's digits.

An INT8 dP is D_ij s_i t_j, of dO's and V's codes and their scales a token. There dS' is in units of s_i, and b is
one number of `queries_a_scale` queries, so that a kernel has D_ij (t_j 2^-b) - delta_i 2^-b / s_i by one product
and one sum. With b_i = ceil(log2 (u / s_i)) of a query, b is the least of theirs, but at least the largest less
`MOST_LOWERED`. A query whose b_i is larger has e less b_i - b in place of e, so that the bound on its dS' holds. s_i
is at least |dlse_i| / (127 R), so that no query's u / s_i is far above the others'. Where dO and dlse are 0 s_i is 0,
and so is Q': psi's scale of zeros, 1, would set g, and all other Q' of the block would be 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sagebwd.numerics import E4M3_MAX, LARGEST_HALF, LEAST_B, LEAST_HALF, LEAST_REST, MOST_LOWERED, RESTORED
from sagebwd.reference.quantize import pad_tokens


def e4m3(x: Tensor) -> Tensor:
    """x rounded to e4m3 (half to even, saturated), in x's dtype; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn).to(x.dtype)


def _power(exponent: Tensor, like: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(like), exponent)


def _normalised(x: Tensor, dims: tuple[int, ...] = (-3, -2, -1)) -> tuple[Tensor, Tensor]:
    """e4m3 of 2^g x, and 2^-g RESTORED, with a g over ``dims``."""
    if x.numel() == 0:
        return x, x.new_ones(())
    largest = x.abs().amax(dims, keepdim=True)
    mantissa, exponent = torch.frexp(largest)
    # 448 is 0.875 * 2^9
    g = torch.where(mantissa <= 0.875, 9, 8) - exponent.clamp(-110)
    # + 0 * largest: e4m3 has no infinity, so that the scale says it
    return e4m3(x * _power(g, largest)), _power(-g, largest) * RESTORED + largest * 0


def _norm(x: Tensor) -> Tensor:
    """The root of the sum of squares of each row, (..., 1); of magnitudes whose squares FP32 does not hold too."""
    return torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True).to(x.dtype)


def value_norm(v_scale: Tensor) -> Tensor:
    """R, (..., 1): the norm of V's largest magnitudes by channel, of psi's scales of these (..., D)."""
    # psi gives a channel without range the scale 1, which says nothing of V
    norm = _norm(torch.where(v_scale == 1, 0, v_scale))
    return 127 * torch.where(norm == 0, v_scale.shape[-1] ** 0.5, norm)


def least_do(dlse: Tensor, v_scale: Tensor) -> Tensor:
    """|dlse| / R of dlse (..., N, 1): a magnitude that the scale of an INT8 dO has room for."""
    return dlse.abs() / value_norm(v_scale)


def queries_a_scale(head_dim: int) -> int:
    """How many queries of a head share the g of dO' and that of Q': those of one product of dV and dK.

    head_dim: the greater of query's and value's.
    """
    return 128 if head_dim <= 64 else 64


def _by_block(x: Tensor, size: int) -> Tensor:
    """e4m3 of 2^g x, times 2^-g RESTORED, each block of ``size`` queries with a g of its own."""
    codes, scale = _normalised(pad_tokens(x, size).unflatten(-2, (-1, size)), (-2, -1))
    return (codes * scale).flatten(-3, -2)[..., : x.shape[-2], :]


def _b_of_block(b: Tensor, counts: Tensor, size: int) -> Tensor:
    """One b for each ``size`` queries, from those b_i (..., N, 1) that count; at every query."""
    blocks, counts = (pad_tokens(x, size).unflatten(-2, (-1, size)) for x in (b, counts))
    largest = torch.where(counts, blocks, LEAST_B).amax(-2, keepdim=True)
    least = torch.where(counts, blocks, largest).amin(-2, keepdim=True)
    chosen = torch.maximum(least, largest - MOST_LOWERED).clamp(min=LEAST_B)
    chosen = torch.where(counts.any(-2, keepdim=True), chosen, 0)  # else 2^-b overflows, and times P = 0 is NaN
    return chosen.expand_as(blocks).flatten(-3, -2)[..., : b.shape[-2], :]


@dataclass(frozen=True)
class Float8Operands:
    """The operands of dV, dK and dQ that do not depend on the block, (B, H, G, tokens, D), and their scales."""

    shift: Tensor  # e log(2), (B, H, G, N, 1)
    inverse_bound: Tensor  # 2^-b, (B, H, G, N, 1), over s_i if dP is INT8
    do: Tensor  # times 2^-g RESTORED
    q: Tensor  # times 2^-g RESTORED
    k: Tensor
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
        do_scale: Tensor | None = None,
        half: bool = False,
    ) -> Float8Operands:
        """Operands of one call.

        Args: row_max (-inf where a query sees no key), lse and dlse (B, H, G, N, 1); do (B, H, G, N, D); v_scale
        (B, H, 1, 1, D), psi's scale of each of V's channels; codes and scales of Q (B, H, G, N, .), K (B, H, 1, M, .);
        do_scale (B, H, G, N, 1), dO's scale a token if dP is INT8, 0 where it has no codes; half: whether the input is
        FP16.
        """
        seen = row_max != -math.inf
        e = torch.floor(math.log2(E4M3_MAX) + torch.where(seen, lse - row_max, 0) / math.log(2))
        rest = torch.expm1(torch.where(seen, lse - row_max, 1)).clamp(LEAST_REST, 1)
        norm, half = value_norm(v_scale), half and do_scale is None
        rest = torch.maximum(rest, 1 / (LARGEST_HALF * norm)) if half else rest
        bound = norm * _norm(do) * rest
        if dlse is not None:
            bound = bound + dlse.abs()
        size = queries_a_scale(max(q_codes.shape[-1], do.shape[-1]))
        do_unit = torch.ones_like(bound) if do_scale is None else do_scale
        unit = torch.where(do_unit == 0, 1, do_unit)
        mantissa, b = torch.frexp((bound / unit).clamp(min=2.0**LEAST_B))  # of 0 too: its Q' must not be the largest
        b = torch.where(mantissa == 0.5, b - 1, b)
        if do_scale is not None:
            counts = seen & bound.isfinite() & (bound > 0) & (do_scale != 0)
            of_block = _b_of_block(b, counts, size)
            e = e - torch.where(counts, (b - of_block).clamp(min=0), 0)
            b = of_block
        if half:
            largest = torch.frexp(do.abs().amax(-1, keepdim=True)).exponent - 1
            lowered = torch.minimum((LEAST_HALF - largest + b).clamp(0, MOST_LOWERED), b - LEAST_B)
            e, b = e - lowered, b - lowered
        exponent = torch.nan_to_num(e).to(b.dtype)
        weight = torch.where(seen, _power(-exponent, bound), 0) + e * 0
        spread = weight * (_power(b, bound) * do_unit) + bound * 0
        do = _by_block(do * weight, size)
        q = _by_block(q_codes * (q_scale * spread), size)
        k, dq_scale = _normalised(k_codes * k_scale)
        return cls(e * math.log(2), _power(-b, bound) / unit, do, q, k, dq_scale * spread)

    def dv(self, probability: Tensor, rows: slice) -> Tensor:
        """P^T dO of a chunk of queries; probability, 2^e P."""
        return e4m3(probability).mT @ self.do[..., rows, :]

    def ds(self, probability: Tensor, dp: Tensor, delta: Tensor, rows: slice) -> Tensor:
        """dS' of a chunk of queries."""
        inverse = self.inverse_bound[..., rows, :]
        return e4m3(probability * (dp * inverse - delta * inverse))

    def dk(self, ds: Tensor, rows: slice) -> Tensor:
        """dS^T Q of a chunk of queries, without the softmax scale."""
        return ds.mT @ self.q[..., rows, :]

    def dq(self, ds: Tensor, rows: slice, keys: slice) -> Tensor:
        """dS K of a chunk of queries, without the softmax scale."""
        return ds @ self.k[..., keys, :] * self.dq_scale[..., rows, :]
