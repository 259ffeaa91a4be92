"""Ablations that `sagebwd.recipe.Recipe` has no switch for, as small changes of the emulator: to measure, not to use.

- dS, and P in dV, rounded stochastically, or with a scale below max / 127: what is larger is clipped.
- S from two INT8 terms: with X1 the codes of X times their scale and X2 those of X - X1,
  S = Q1 K1 + Q1 K2 + Q2 K1, three products, or two of the three.
- dO with one scale a token, folded into P before P is quantised (as Q's is into dS in dK), or one a channel of the
  whole sequence, applied once at the end (as V's is in O).
- delta rebuilt as rowsum(P dP) from backward's own P, in place of rowsum(dO O).
- dP in INT8 with some of the steps that keep dS (`DP_STEPS`), or none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from sagebwd.masks.band import Band
from sagebwd.recipe import Recipe
from sagebwd.reference.emulator import DpOperands, Emulator
from sagebwd.reference.quantize import INT8_MAX, pad_tokens, quantize, quantize_tokens
from sagebwd.reference.rotation import rotated

Psi = Callable[[Tensor, tuple[int, ...]], Tensor]
"""x and the dimensions that share a scale, to codes times scale."""

DP_STEPS = ("rotation", "token scales", "delta of codes", "mean of O")
"""Of an INT8 dP: dO and V are rotated; V has a scale a token, not one for 128 keys; delta is made of dO's codes, not
of dO; V is less the mean of O."""
KEYS_A_SCALE = 128
CLIPPINGS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)


def exact(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """No rounding: what the other roundings of dS and P are compared with."""
    return x


def nearest(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """psi itself."""
    codes, scale = quantize(x, dims)
    return codes * scale


def stochastic(x: Tensor, dims: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
    """psi's scale, rounded up with the probability that makes the mean of the codes exact."""
    _, scale = quantize(x, dims)
    noise = torch.rand(x.shape, generator=generator, dtype=x.dtype)
    return torch.floor(x / scale + noise).clamp(-INT8_MAX, INT8_MAX) * scale


def percentile(x: Tensor, dims: tuple[int, ...], fraction: float) -> Tensor:
    """psi with the scale of a quantile of |x| in each group, in place of the largest; 0 falls back to the largest."""
    dims = tuple(sorted(d % x.ndim for d in dims))
    groups = x.abs().movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))
    limit = torch.quantile(groups, fraction, dim=-1)
    for d in dims:
        limit = limit.unsqueeze(d)
    return clipped(x, dims, torch.where(limit == 0, x.abs().amax(dims, keepdim=True), limit))


def least_squares(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """psi clipped, in each group, at the one of `CLIPPINGS` times the largest that has the least squared error."""
    largest = x.abs().amax(dims, keepdim=True)
    best, least = torch.zeros_like(x), torch.full_like(largest, torch.inf)
    for fraction in CLIPPINGS:
        value = clipped(x, dims, fraction * largest)
        error = (value - x).square().sum(dims, keepdim=True)
        best, least = torch.where(error < least, value, best), torch.minimum(error, least)
    return best


def clipped(x: Tensor, dims: tuple[int, ...], limit: Tensor) -> Tensor:
    """psi with scale limit / 127; what is beyond the limit becomes the limit."""
    scale = (limit / INT8_MAX).clamp(min=torch.finfo(x.dtype).tiny)
    return torch.round(x / scale).clamp(-INT8_MAX, INT8_MAX) * scale


def two_terms(x: Tensor) -> tuple[Tensor, Tensor]:
    """X1 and X2 of an operand (..., tokens, head_dim), one scale a token each: X1 + X2 is X to about 14 bits."""
    first = nearest(x, (-1,))
    return first, nearest(x - first, (-1,))


class Variant(Emulator):
    """The emulator with other roundings of dS and of P in dV, or more terms of S.

    Args: psi, for dS and P in dV; s_terms, which of "q" (Q2 K1) and "k" (Q1 K2) are added to S; delta, "rebuilt" for
    rowsum(P dP); do_scale, "token" or "sequence"; dp_steps, those of `DP_STEPS` that an INT8 dP takes, None for the
    recipe's dP.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        recipe: Recipe,
        scale: float,
        band: Band,
        psi: Psi = nearest,
        s_terms: str = "",
        delta: str = "",
        do_scale: str = "",
        dp_steps: Collection[str] | None = None,
    ) -> None:
        super().__init__(q, k, v, recipe, scale, band)
        self.dp_steps = dp_steps
        self.psi, self.s_terms, self.delta, self.do_scale = psi, s_terms, delta, do_scale
        if s_terms:
            self.q1, self.q2 = two_terms(self.turned(self.operands.q_smooth))
            self.k1, self.k2 = two_terms(self.turned(self.operands.k_exact))

    def _quantized(self, x: Tensor, group: str) -> Tensor:
        tiles = x.unflatten(-1, (-1, self.recipe.block_k)).unflatten(-3, (-1, self.recipe.block_q))
        return self.psi(tiles, {"query": (-1,), "key": (-3,), "tile": (-3, -1)}[group]).flatten(-4, -3).flatten(-2)

    def _scores(self, rows: slice, keys: slice) -> Tensor:
        s = super()._scores(rows, keys)
        for name, a, b in (("q", "q2", "k1"), ("k", "q1", "k2")):
            if name in self.s_terms:
                s = s + getattr(self, a)[..., rows, :] @ getattr(self, b)[..., keys, :].mT * self.scale
        return s

    def _dp_operands(self, do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None = None) -> DpOperands:
        if self.dp_steps is None:
            return super()._dp_operands(do, o, lse, dlse)
        do, o = self._group_heads(do), self._group_heads(o)
        center = o.mean((2, 3), keepdim=True) if "mean of O" in self.dp_steps else torch.zeros_like(self.v[..., :1, :])
        turned = rotated if "rotation" in self.dp_steps else torch.clone
        do_codes, do_scale = quantize_tokens(turned(do), "token", 1)
        group = "token" if "token scales" in self.dp_steps else "block"
        v_codes, v_scale = quantize_tokens(turned(self.v - center), group, KEYS_A_SCALE)
        coded = do_codes * do_scale
        products = coded * turned(o - center) if "delta of codes" in self.dp_steps else do * (o - center)
        delta, shared = products.sum(-1, keepdim=True), (coded * turned(center)).sum(-1, keepdim=True)
        do_codes, do_scale, shared = (pad_tokens(x, self.recipe.block_q) for x in (do_codes, do_scale, shared))
        return DpOperands(do_codes, do_scale, v_codes, v_scale, delta, shared)

    def outputs(self, do: Tensor) -> dict[str, Tensor]:
        """O, dQ, dK and dV."""
        o, lse, _ = self.forward()
        dlse = None
        if self.delta == "rebuilt":
            dlse = (do * o).sum(-1) - self._rebuilt_delta(do, o, lse)
        found = dict(zip(("o", "dq", "dk", "dv"), (o, *self.backward(do, o, lse, dlse))))
        if self.do_scale:
            found["dv"] = self._dv(do, lse)
        return found

    def _dv(self, do: Tensor, lse: Tensor) -> Tensor:
        """dV with dO's scale folded into P, or one a channel of the sequence; one query head a key head."""
        do, lse = (pad_tokens(x[:, :, None], self.recipe.block_q) for x in (do, lse[..., None]))
        codes, scale = quantize_tokens(do, self.do_scale, self.recipe.block_q)
        empty = (codes == 0).all(-1, keepdim=True)  # psi's scale there is 1, and would be the largest of each key
        fold, after = (
            (scale.masked_fill(empty, 0), 1) if self.do_scale == "token" else (torch.ones_like(lse), scale[..., :1, :])
        )
        dv = torch.zeros_like(self.v)
        for rows, keys in self._chunks():
            p = torch.exp(self._scores(rows, keys) - lse[..., rows, :]) * fold[..., rows, :]
            dv[..., keys, :] += self._quantized(p, self.recipe.p_scale_dv).mT @ codes[..., rows, :]
        return (dv * after)[:, :, 0, : self.tokens_k]

    def _rebuilt_delta(self, do: Tensor, o: Tensor, lse: Tensor) -> Tensor:
        """rowsum(P dP), (B, H, N); a chunk of queries meets all the keys that they see."""
        delta, chunk = torch.zeros_like(lse), {}

        def observe(name: str, rows: slice, keys: slice, value: Tensor) -> None:
            chunk[name] = value.flatten(1, 2)
            if name == "dp":
                count = min(rows.stop, self.tokens_q) - rows.start
                delta[..., rows.start : rows.start + count] = (chunk["p"] * value.flatten(1, 2)).sum(-1)[..., :count]

        self.backward(do, o, lse, observe=observe)
        return delta
