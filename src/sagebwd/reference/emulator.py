"""The recipe emulator, the meaning of a recipe: attention forward and backward in plain PyTorch, on any device.

Every INT8 product is computed from the same codes and scales as on tensor cores: codes are small integers held in
floating point, so a product of codes is exact. Inputs in FP64 are emulated in FP64 and nothing is rounded to 16 bit;
other inputs are computed in FP32, with the operands of 16-bit products rounded to the dtype of the input. Queries are
taken a few blocks at a time against all the keys they see, so that memory is linear in tokens.

Shapes: B batch, H heads of keys and values, G query heads a key head serves, N query and M key tokens, D head_dim.
Queries are (B, H, G, N, D) and keys (B, H, 1, M, D) inside.

Source: arXiv 2603.02170 (algorithms 1 and 2), with the scale groups of `sagebwd.recipe`; dP in INT8 is this project's
(docs/results/int8-dp.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sagebwd.call import Call, Saved, empty_gradients, empty_like_rows
from sagebwd.masks.band import Band
from sagebwd.masks.mask import Mask, shown
from sagebwd.numerics import rounded_up
from sagebwd.recipe import FP8, INT8, SIXTEEN_BIT, Recipe
from sagebwd.reference.float8 import Float8Operands, least_do
from sagebwd.reference.quantize import pad_tokens, quantize, quantize_tokens, smooth
from sagebwd.reference.rotation import rotated

# Scores held at a time, over all heads: a few megabytes, which stays in a CPU's cache.
CHUNK_SCORES = 1 << 19
CHUNK_SCORES_CUDA = 1 << 26

Observer = Callable[[str, slice, slice, Tensor], None]


@dataclass(frozen=True)
class _Operands:
    """Queries and keys as the recipe's products read them, tokens padded to whole blocks."""

    q_codes: Tensor  # (B, H, G, N, D), or Q itself where S and dK are 16 bit
    q_scale: Tensor  # (B, H, G, N, 1)
    q_rows: Tensor  # (B, H, G, N, D), the 16-bit operand
    k_codes: Tensor  # (B, H, 1, M, D)
    k_scale: Tensor  # (B, H, 1, M, 1)
    k_smooth: Tensor  # (B, H, 1, M, D), the 16-bit operand
    k_mean: Tensor  # (B, H, 1, 1, D)


@dataclass(frozen=True)
class DpOperands:
    """dO and V as dP = dO V^T reads them, and delta; queries are padded to whole blocks but in delta."""

    do_codes: Tensor  # (B, H, G, N, D), or dO itself
    do_scale: Tensor  # (B, H, G, N, 1), 0 where dO's codes and dlse are, or 1
    v_codes: Tensor  # (B, H, 1, M, D), of V less the mean of O, or V itself
    v_scale: Tensor  # (B, H, 1, M, 1), or 1
    delta: Tensor  # (B, H, G, N, 1)
    shared: Tensor  # (B, H, G, N, 1), what products and delta both lack: dO times the mean of O

    def product(self, rows: slice, keys: slice) -> Tensor:
        """dP of a chunk, less `shared`."""
        dp = self.do_codes[..., rows, :] @ self.v_codes[..., keys, :].mT
        if self.do_scale.dim() == 0:
            return dp
        return dp * self.do_scale[..., rows, :] * self.v_scale[..., keys, :].mT


class Emulator:
    """One dense attention call under a recipe: operands prepared once, chunks computed on demand.

    Args: q (B, Hq, N, D); k, v (B, Hkv, M, D), any strides; key_mask (B, M) bool, True where a key counts; band and
    mask, which keys a query sees; scale, the softmax scale.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        recipe: Recipe,
        scale: float,
        band: Band,
        key_mask: Tensor | None = None,
        mask: Mask | None = None,
    ) -> None:
        self.recipe, self.scale, self.band, self.mask = recipe, scale, band, mask
        self.dtype = q.dtype
        self.compute = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.tokens_q, self.tokens_k = q.shape[2], k.shape[2]
        self.heads_k = k.shape[1]
        self.valid = None if key_mask is None else key_mask[:, None, None, :, None]
        self.k_valid = None if self.valid is None else pad_tokens(self.valid, recipe.block_k)
        self.q, self.k = self._group_heads(q), self._group_heads(k)
        self.v = pad_tokens(_zero_invalid(self._group_heads(v), self.valid), recipe.block_k)
        self.operands = self._prepare()

    def _group_heads(self, x: Tensor) -> Tensor:
        return x.to(self.compute).unflatten(1, (self.heads_k, -1))

    def sixteen_bit(self, x: Tensor) -> Tensor:
        """x rounded to the input's 16-bit dtype; unchanged for FP32 and FP64 inputs."""
        if self.dtype in (torch.bfloat16, torch.float16):
            return x.to(self.dtype).to(self.compute)
        return x

    def turned(self, x: Tensor) -> Tensor:
        """x R where the recipe rotates, else x; turned twice is x."""
        return rotated(x) if self.recipe.rotate else x

    def _prepare(self) -> _Operands:
        recipe = self.recipe
        k, k_mean = smooth(self.k, self.valid, recipe.k_mean == "sample")
        if not recipe.smooth_k:
            k, k_mean = _zero_invalid(self.k, self.valid), torch.zeros_like(k_mean)
        q, k = pad_tokens(self.q, recipe.block_q), pad_tokens(k, recipe.block_k)
        q_codes, q_scale = quantize_tokens(self.turned(q), recipe.q_scale, recipe.block_q)
        k_codes, k_scale = quantize_tokens(self.turned(k), recipe.k_scale, recipe.block_k)
        q_rows, k_smooth = self.sixteen_bit(q), self.sixteen_bit(k)
        return _Operands(q_codes, q_scale, q_rows, k_codes, k_scale, k_smooth, k_mean)

    def _chunks(self) -> Iterator[tuple[slice, slice]]:
        """Query and key ranges, whole blocks of both, that cover every visible pair."""
        block_q, block_k = self.recipe.block_q, self.recipe.block_k
        budget = CHUNK_SCORES_CUDA if self.q.is_cuda else CHUNK_SCORES
        per_row = max(1, math.prod(self.q.shape[:3]) * self.tokens_k)
        rows = block_q * max(1, budget // (per_row * block_q))
        for start in range(0, self.tokens_q, rows):
            stop = min(start + rows, rounded_up(self.tokens_q, block_q))
            first, last = self.band.keys(start, min(stop, self.tokens_q), self.tokens_k)
            first, last = first // block_k * block_k, rounded_up(last, block_k)
            yield slice(start, stop), slice(first, last)

    def _scores(self, rows: slice, keys: slice) -> Tensor:
        """S = Q K^T tau of a chunk, (B, H, G, rows, keys), -inf where a query does not see a key."""
        x = self.operands
        if self.recipe.s == INT8:
            s = x.q_codes[..., rows, :] @ x.k_codes[..., keys, :].mT
            s = s * (x.q_scale[..., rows, :] * self.scale) * x.k_scale[..., keys, :].mT
        else:
            s = x.q_rows[..., rows, :] @ x.k_smooth[..., keys, :].mT * self.scale
        if self.mask is not None and self.mask.is_bias:
            s = s + self._elements(rows, keys).to(self.compute)
        return s.masked_fill_(~self._visible(rows, keys), -math.inf)

    def _visible(self, rows: slice, keys: slice) -> Tensor:
        device = self.q.device
        query = torch.arange(rows.start, rows.stop, device=device)
        key = torch.arange(keys.start, keys.stop, device=device)
        visible = (query < self.tokens_q)[:, None] & (key < self.tokens_k)[None, :]
        band = self.band.mask(query, key)
        if band is not None:
            visible = visible & band
        if self.k_valid is not None:
            visible = visible & self.k_valid[..., keys, :].mT
        if self.mask is not None:
            visible = visible & shown(self._elements(rows, keys))
        return visible

    def _elements(self, rows: slice, keys: slice) -> Tensor:
        """Those of the mask, (B or 1, H or 1, G or 1, rows or 1, keys or 1)."""
        part = self.mask.part(rows, keys)
        return part.unflatten(1, (self.heads_k, -1)) if part.shape[1] > 1 else part.unsqueeze(2)

    def _is_first(self, keys: slice) -> Tensor:
        """Which of these keys are of the first ones that count: (B or 1, 1, 1, 1, keys) bool."""
        count = self.recipe.first_keys
        if self.k_valid is None:
            return torch.arange(keys.start, keys.stop, device=self.q.device)[None, :] < count
        return (self.k_valid & (self.k_valid.cumsum(-2) <= count)).mT[..., keys]

    def _first_places(self) -> list[int]:
        """Keys of whose P V the recipe keeps 16 bit, in any batch element."""
        if self.recipe.o != INT8:
            return []
        is_first = self._is_first(slice(0, self.tokens_k))
        return is_first.flatten(0, -2).any(0).nonzero().flatten().tolist()

    def _smooth_v(self) -> tuple[Tensor, Tensor]:
        v = self.v[..., : self.tokens_k, :]
        v_smooth, v_mean = smooth(v, self.valid)
        return (v_smooth, v_mean) if self.recipe.smooth_v else (v, torch.zeros_like(v_mean))

    def _v_channels(self) -> Tensor:
        """psi's scale of each of V's channels, (B, H, 1, 1, D)."""
        return quantize_tokens(self._smooth_v()[0], "sequence", self.recipe.block_k)[1][..., :1, :]

    def _float8(self, do: Tensor, lse: Tensor, dlse: Tensor | None, do_scale: Tensor | None) -> Float8Operands:
        """Operands of the e4m3 products; all but K's are padded as ``do`` is. do_scale: where dP is INT8."""
        x, row_max = self.operands, self._row_max()
        codes = self.turned(x.q_codes), x.q_scale, x.k_codes, x.k_scale
        half = self.dtype == torch.float16
        return Float8Operands.of(row_max, lse, do, dlse, self._v_channels(), *codes, do_scale, half)

    def _row_max(self) -> Tensor:
        """The largest smoothed score of each query, (B, H, G, N, 1) padded to blocks; -inf where it sees no key."""
        row_max = torch.full_like(self.operands.q_scale, -math.inf)
        for rows, keys in self._chunks():
            if keys.start < keys.stop:
                row_max[..., rows, :] = self._scores(rows, keys).amax(-1, keepdim=True)
        return row_max

    def max_logits(self) -> Tensor:
        """The largest logit of each head, (B, Hq): of the recipe's scores that a query sees, with K's mean restored.

        -inf of a head whose queries see no key. Sinks are no keys.
        """
        row_max = self._row_max()[..., : self.tokens_q, :]
        logits = row_max + (self.q * self.operands.k_mean).sum(-1, keepdim=True) * self.scale
        return torch.where(row_max == -math.inf, row_max, logits).amax((-2, -1)).flatten(1, 2)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """O (B, Hq, N, Dv) in the input dtype, lse of the smoothed scores (B, Hq, N) and K's mean (B, Hkv, D)."""
        recipe = self.recipe
        first_places = self._first_places()
        if recipe.o == INT8:
            v_smooth, v_mean = self._smooth_v()
            codes, v_scale = quantize_tokens(pad_tokens(v_smooth, recipe.block_k), recipe.v_scale, recipe.block_k)
            v_operand = codes * v_scale
            v_first = torch.where(self._is_first(slice(0, self.tokens_k)).mT, v_smooth, 0)
            v_first = self.sixteen_bit(v_first) if recipe.first_keys > 1 else v_first
        else:
            v_operand, v_mean = self.sixteen_bit(self.v), 0
            v_first = v_operand
        o = self.q.new_zeros(*self.q.shape[:-1], self.v.shape[-1])
        lse = self.q.new_full(self.q.shape[:-1], -math.inf)
        for rows, keys in self._chunks():
            if keys.start == keys.stop:
                continue
            s = self._scores(rows, keys)
            places = [place for place in first_places if keys.start <= place < keys.stop]
            columns = [place - keys.start for place in places]
            first = s[..., columns]  # scores of keys that are apart
            if columns:
                is_first = self._is_first(keys)
                first = first.masked_fill(~is_first[..., columns], -math.inf)
                s = s.masked_fill(is_first, -math.inf)
            tiles = s.unflatten(-1, (-1, recipe.block_k))  # (B, H, G, rows, key blocks, block_k)
            block_max = tiles.amax(-1, keepdim=True)
            row_max = _finite(torch.cat([block_max.amax(-2), first], -1).amax(-1, keepdim=True)).unsqueeze(-1)
            p = torch.exp(tiles - _finite(block_max))  # 1 at each block's maximum
            weight = torch.exp(block_max - row_max)
            total = (p.sum(-1, keepdim=True) * weight).sum(-2)
            if recipe.o == INT8:
                p = torch.round(p * recipe.p_levels) * (weight / recipe.p_levels)
            else:
                p = self.sixteen_bit(p * weight)
            o_rows = p.flatten(-2) @ v_operand[..., keys, :]
            p_first = torch.exp(first - row_max.squeeze(-1))
            total = total + p_first.sum(-1, keepdim=True)
            p_first = self.sixteen_bit(p_first) if recipe.first_keys > 1 else p_first
            o_rows = o_rows + p_first @ v_first[..., places, :]
            o_rows = o_rows / total + v_mean
            real = slice(rows.start, min(rows.stop, self.tokens_q))
            count = real.stop - real.start
            o[..., real, :] = torch.where(total == 0, 0, o_rows)[..., :count, :]
            lse[..., real] = (row_max.squeeze(-2) + torch.log(total)).squeeze(-1)[..., :count]
        return o.flatten(1, 2).to(self.dtype), lse.flatten(1, 2), self.operands.k_mean[:, :, 0, 0]

    def backward(
        self, do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None = None, observe: Observer | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK, dV in the input dtype and shape.

        Args: do and o (B, Hq, N, D); lse of the smoothed scores (B, Hq, N) and its gradient; observe, called with the
        name, the query and key range and the value of P, dP and dS of each chunk.
        """
        recipe, x = self.recipe, self.operands
        do = do * (lse != -math.inf).unsqueeze(-1)  # of a query that sees no key it sets no scale; NaN stays
        if dlse is not None:
            dlse = dlse.to(self.compute).unflatten(1, (self.heads_k, -1)).unsqueeze(-1)
        dp_operands = self._dp_operands(do, o, lse, dlse)
        delta = dp_operands.delta
        if dlse is not None:
            delta = delta - dlse
            dlse = pad_tokens(dlse, recipe.block_q)
        lse = _finite(lse.to(self.compute).unflatten(1, (self.heads_k, -1)).unsqueeze(-1))
        do, delta, lse = (pad_tokens(t, recipe.block_q) for t in (self._group_heads(do), delta, lse))
        fp8 = None
        if FP8 in (recipe.dv, recipe.dq, recipe.dk) and self.tokens_k:
            do_scale = dp_operands.do_scale
            fp8 = self._float8(do, lse, dlse, do_scale if do_scale.dim() else None)
            if not do_scale.dim():  # the 16-bit operand is 2^-b dO
                scaled = self.sixteen_bit(do * fp8.inverse_bound) / fp8.inverse_bound
                dp_operands = replace(dp_operands, do_codes=scaled)
        do_codes, do_scale = quantize_tokens(do, "block", recipe.block_q)
        dq, dk, dv = torch.zeros_like(x.q_rows), torch.zeros_like(x.k_smooth), torch.zeros_like(self.v)
        for rows, keys in self._chunks():
            if keys.start == keys.stop:
                continue
            s = self._scores(rows, keys)
            p = torch.exp(s - lse[..., rows, :])
            if self.mask is not None and self.mask.is_bias:
                p = p.clamp(max=1)  # beside a large bias lse loses the digits that keep it so
            dp = dp_operands.product(rows, keys)
            ds = p * (dp - delta[..., rows, :])
            if observe is not None:
                for name, value in (("p", p), ("dp", dp + dp_operands.shared[..., rows, :]), ("ds", ds)):
                    observe(name, rows, keys, value)
            if fp8 is not None:
                probability = torch.exp(s - (lse - fp8.shift)[..., rows, :])
                fp8_ds = fp8.ds(probability, dp, delta[..., rows, :], rows)
            if recipe.dv == FP8:
                dv_rows = fp8.dv(probability, rows)
            elif recipe.dv == INT8:
                dv_rows = self._quantized(p, recipe.p_scale_dv).mT @ (do_codes * do_scale)[..., rows, :]
            else:
                dv_rows = self.sixteen_bit(p).mT @ do[..., rows, :]
            dv[..., keys, :] += dv_rows.sum(2, keepdim=True)
            if recipe.dq == FP8:
                dq[..., rows, :] = fp8.dq(fp8_ds, rows, keys)
            elif recipe.dq == INT8:
                folded = self._quantized(ds * x.k_scale[..., keys, :].mT, recipe.ds_scale_dq)
                dq[..., rows, :] = folded @ x.k_codes[..., keys, :]
            else:
                dq[..., rows, :] = self.sixteen_bit(ds) @ x.k_smooth[..., keys, :]
            if recipe.dk == FP8:
                dk_rows = fp8.dk(fp8_ds, rows)
            elif recipe.dk == INT8:
                folded = self._quantized(ds * x.q_scale[..., rows, :], recipe.ds_scale_dk)
                dk_rows = folded.mT @ x.q_codes[..., rows, :]
            else:
                dk_rows = self.sixteen_bit(ds).mT @ x.q_rows[..., rows, :]
            dk[..., keys, :] += dk_rows.sum(2, keepdim=True)
        # sums of products with S's codes
        dq = dq if recipe.dq == SIXTEEN_BIT else self.turned(dq)
        dk = self.turned(dk) if recipe.dk == INT8 else dk
        dq = (dq * self.scale)[..., : self.tokens_q, :]
        dk, dv = (dk * self.scale)[..., : self.tokens_k, :], dv[..., : self.tokens_k, :]
        return tuple(gradient.flatten(1, 2).to(self.dtype) for gradient in (dq, dk, dv))

    def delta(self, do: Tensor, o: Tensor, lse: Tensor) -> Tensor:
        """rowsum(dO O) as `backward` has it, (B, Hq, N), of the same do, o and lse."""
        operands = self._dp_operands(do, o, lse)
        return (operands.delta + operands.shared[..., : self.tokens_q, :]).flatten(1, 2).squeeze(-1)

    def _dp_operands(self, do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None = None) -> DpOperands:
        """Of do, o and lse as `backward` takes them; dlse (B, H, G, N, 1)."""
        recipe = self.recipe
        do, o = self._group_heads(do), self._group_heads(o)
        if recipe.dp != INT8:
            delta = (do * o).sum(-1, keepdim=True)
            do = pad_tokens(do, recipe.block_q)
            one = do.new_ones(())
            return DpOperands(do, one, self.v, one, delta, torch.zeros_like(do[..., :1]))
        seen = (lse != -math.inf).unflatten(1, (self.heads_k, -1)).unsqueeze(-1)
        count = seen.sum((2, 3), keepdim=True).clamp(min=1)
        center = torch.where(seen, o, 0).sum((2, 3), keepdim=True) / count
        turned = self.turned(do)
        if dlse is not None and FP8 in (recipe.dq, recipe.dk) and self.tokens_k:
            turned = torch.cat([turned, least_do(dlse, self._v_channels())], -1)
        do_codes, do_scale = quantize_tokens(turned, "token", recipe.block_q)
        do_scale = torch.where((do_codes == 0).all(-1, keepdim=True), 0, do_scale)  # psi's 1 is far above others
        do_codes = do_codes[..., : do.shape[-1]]
        v_codes, v_scale = quantize_tokens(self.turned(self.v - center), "token", recipe.block_k)
        coded = do_codes * do_scale
        delta = (coded * self.turned(o - center)).sum(-1, keepdim=True)
        shared = (coded * self.turned(center)).sum(-1, keepdim=True)
        do_codes, do_scale, shared = (pad_tokens(x, recipe.block_q) for x in (do_codes, do_scale, shared))
        return DpOperands(do_codes, do_scale, v_codes, v_scale, delta, shared)

    def _quantized(self, x: Tensor, group: str) -> Tensor:
        """A (.., rows, keys) operand quantised and scaled back: one scale per query, key or tile of each tile."""
        tiles = x.unflatten(-1, (-1, self.recipe.block_k)).unflatten(-3, (-1, self.recipe.block_q))
        codes, scale = quantize(tiles, {"query": (-1,), "key": (-3,), "tile": (-3, -1)}[group])
        return (codes * scale).flatten(-4, -3).flatten(-2)


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
    """The "reference" implementation's forward; see `sagebwd.call`. Saves no INT8 tensors."""
    nothing = (None,) * 5
    if not call.packed:
        band = Band.of(call.is_causal, call.window_left, call.window_right)
        emulator = Emulator(q, k, v, call.recipe, call.scale, band, call.key_mask, call.mask)
        o, lse, k_mean = emulator.forward()
        largest = emulator.max_logits().unsqueeze(-1) if call.max_logits else None
        return Saved(empty_like_rows(q, call.value_dim).copy_(o), lse, *nothing, k_mean, max_logits=largest)
    o = q.new_zeros((*q.shape[:-1], call.value_dim))
    accumulator = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=accumulator)
    k_mean = k.new_zeros(call.keys.batch, k.shape[1], k.shape[2], dtype=accumulator)
    largest = lse.new_full((q.shape[1], 1), -math.inf) if call.max_logits else None
    for index, (rows, keys, band) in enumerate(_sequences(call)):
        sequence = Emulator(_unpack(q, rows), _unpack(k, keys), _unpack(v, keys), call.recipe, call.scale, band)
        o_rows, lse[:, rows], k_mean[index : index + 1] = sequence.forward()
        o[rows] = _pack(o_rows)
        if largest is not None and rows.start < rows.stop:
            largest = torch.maximum(largest, sequence.max_logits().mT)
    return Saved(o, lse, *nothing, k_mean, max_logits=largest)


def backward(
    call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The "reference" implementation's backward; see `sagebwd.call`. Always deterministic."""
    o, lse, recipe, scale = saved.o, saved.lse, call.recipe, call.scale
    if not call.packed:
        band = Band.of(call.is_causal, call.window_left, call.window_right)
        gradients = Emulator(q, k, v, recipe, scale, band, call.key_mask, call.mask).backward(do, o, lse, dlse)
        return tuple(x.copy_(gradient) for x, gradient in zip(empty_gradients(call.head_dim, o, v), gradients))
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for rows, keys, band in _sequences(call):
        sequence = Emulator(_unpack(q, rows), _unpack(k, keys), _unpack(v, keys), recipe, scale, band)
        dlse_rows = None if dlse is None else dlse[None, :, rows]
        gradients = sequence.backward(_unpack(do, rows), _unpack(o, rows), lse[None, :, rows], dlse_rows)
        dq[rows], dk[keys], dv[keys] = map(_pack, gradients)
    return dq, dk, dv


def _sequences(call: Call) -> Iterator[tuple[slice, slice, Band]]:
    """The query and key tokens of each packed sequence, and its bottom-right aligned band."""
    starts_q, starts_k = call.queries.cu_seqlens.tolist(), call.keys.cu_seqlens.tolist()
    for rows, keys in zip(
        itertools.starmap(slice, itertools.pairwise(starts_q)),
        itertools.starmap(slice, itertools.pairwise(starts_k)),
    ):
        offset = (keys.stop - keys.start) - (rows.stop - rows.start)
        yield rows, keys, Band.of(call.is_causal, call.window_left, call.window_right, offset)


def _unpack(x: Tensor, tokens: slice) -> Tensor:
    """(total_tokens, heads, head_dim) to the (1, heads, tokens, head_dim) of one sequence."""
    return x[tokens].transpose(0, 1)[None]


def _pack(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


def _zero_invalid(x: Tensor, valid: Tensor | None) -> Tensor:
    return x if valid is None else torch.where(valid, x, 0)


def _finite(x: Tensor) -> Tensor:
    """x with -inf, the maximum of a row that sees nothing, replaced by 0; NaN and +inf stay."""
    return x.masked_fill(x == -math.inf, 0)
