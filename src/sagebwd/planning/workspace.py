"""The workspace of a call: one tensor of bytes, in which forward leaves what backward reads beside O and lse."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sagebwd.cache import rounded
from sagebwd.call import blocks_of_maxima
from sagebwd.dispatch import Choice
from sagebwd.recipe import FP8, INT8


class Piece(NamedTuple):
    """A tensor of a workspace: where it begins, its bytes there, its dtype and shape."""

    offset: int
    room: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, workspace: Tensor) -> Tensor:
        """The tensor."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return workspace[self.offset : self.offset + size].view(self.dtype).view(self.shape)


def pieces_of(
    choice: Choice, dims: tuple[int, int], q: Tensor, k: Tensor, sequences: int | None, sinks: bool,
    norm: bool = False, max_logits: bool = False,
) -> tuple[dict[str, Piece], int]:  # fmt: skip
    """What a workspace holds of `sagebwd.call.Saved`, and its bytes.

    Args: q and k, or tensors that lie like them but for their last dimension; sequences, where they are packed; norm,
    whether the call has one of its own (`sagebwd.call.Prologue`).
    """
    recipe, kernels = choice.recipe, not choice.forward.in_torch
    rows_q, rows_k = tuple(q.shape[:-1]), tuple(k.shape[:-1])
    packed = sequences is not None
    tokens_q, tokens_k = (rows[::-1] if packed else rows for rows in (rows_q, rows_k))
    (width, _), _ = choice.forms(*dims)
    accumulator = torch.float64 if q.dtype == torch.float64 else torch.float32
    wanted: list[tuple[str, torch.dtype, tuple[int, ...], int]] = []
    keeps_codes = kernels and not choice.backward.is_wide(*dims)
    if keeps_codes and INT8 in (recipe.s, recipe.dk):
        wanted += ("q_int8", torch.int8, (*rows_q, width), 1), ("q_scale", torch.float32, tokens_q, 1)
    if keeps_codes and INT8 in (recipe.s, recipe.dq):
        wanted += ("k_int8", torch.int8, (*rows_k, width), 1), ("k_scale", torch.float32, tokens_k, 1)
    if kernels and recipe.dv == FP8:
        wanted.append(("row_max", torch.float32, tokens_q, 1))
    batch = sequences if packed else k.shape[0]
    wanted.append(("k_mean", accumulator, (batch, k.shape[1], dims[0]), choice.forward.means))
    if norm:
        for name, tokens in (("q_inverse_rms", tokens_q), ("k_inverse_rms", tokens_k)):
            wanted.append((name, torch.float32, tokens, 1))
    if sinks:
        wanted.append(("weight", accumulator, tokens_q, 1))
    if max_logits:  # at the end, of which backward, which reads none, need not know
        blocks = blocks_of_maxima(tokens_q[-1], sequences if packed else 1) if kernels else 1
        wanted.append(("max_logits", accumulator, (*tokens_q[:-1], blocks), 1))
    pieces, end = {}, 0
    for name, dtype, shape, times in wanted:
        size = math.prod(shape) * dtype.itemsize * times
        pieces[name] = Piece(end, size, dtype, shape)
        end = end + rounded(size)
    return pieces, end
