"""A call of attention: `Ask` chooses who runs it, `Call` is what that is given, `Saved` what its forward leaves.

An implementation is a pair of functions, ``forward(call, q, k, v) -> Saved`` and
``backward(call, saved, do, dlse, q, k, v) -> (dq, dk, dv)``; `sagebwd.dispatch.choose` chooses each.

Shapes, dense (cu_seqlens None): q (B, Hq, N, D), o (B, Hq, N, Dv), k (B, Hkv, M, D), v (B, Hkv, M, Dv), lse
(B, Hq, N), key_mask (B, M) bool. Packed: q (total_q, Hq, D), o (total_q, Hq, Dv), k (total_k, Hkv, D),
v (total_k, Hkv, Dv), lse (Hq, total_q), cu_seqlens (sequences + 1,) int32.
Dense and packed calls differ in strides and sequence bounds alone: `Packing` hides which one it is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sagebwd.masks.band import Band
from sagebwd.masks.kinds import FULL
from sagebwd.masks.mask import Mask
from sagebwd.numerics import rotation_sizes
from sagebwd.recipe import FP8, INT8, SIXTEEN_BIT, Recipe

if TYPE_CHECKING:
    from sagebwd.kernels.capabilities import Row
    from sagebwd.kernels.masks.lists import Lists
    from sagebwd.kernels.masks.sm90_block_lists import BlockLists


class Packing(NamedTuple):
    """How the tokens of one side (queries or keys) lie: (B, H, N, D), or (total, H, D) with ``cu_seqlens``."""

    batch: int
    heads: int
    tokens: int  # of the longest sequence; of packed ones a bound, by which nothing is sized
    total: int  # tokens of one head, over all sequences if packed
    cu_seqlens: Tensor | None

    @classmethod
    def of(cls, x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int) -> Packing:
        """The packing of x, (B, H, N, D) or (total, H, D)."""
        if cu_seqlens is None:
            return cls(x.shape[0], x.shape[1], x.shape[2], x.shape[2], None)
        return cls(cu_seqlens.numel() - 1, x.shape[1], max_seqlen, x.shape[0], cu_seqlens)

    def strides(self, x: Tensor) -> tuple[int, int, int]:
        """Strides of batch, head and token."""
        if self.cu_seqlens is None:
            return x.stride()[:3]
        token, head, _ = x.stride()
        return 0, head, token

    def blocks(self, block: int) -> int:
        """Blocks of one head in a padded layout, where every sequence begins a block of its own.

        As many programs a head have a block each: of packed sequences, whose lengths only the device knows, some are
        of no token (`sagebwd.kernels.common.tile.block_in_sequence`).
        """
        if self.cu_seqlens is None:
            return -(-self.total // block)
        return self.total // block + self.batch

    def padded(self, block: int, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised (heads, blocks, *shape), heads counted over the batch if dense.

        Raises NotImplementedError where one head has 2^31 numbers, which kernels count in 32 bits.
        """
        if self.blocks(block) * math.prod(shape) >= 2**31:
            raise NotImplementedError(
                f"query, key: {self.total} tokens of {math.prod(shape) // block} channels; kernels take fewer than "
                "2^31 numbers a head. Split the call: between packed sequences, or along the batch"
            )
        return torch.empty(self.heads_in_all, self.blocks(block), *shape, dtype=dtype, device=device)

    @property
    def heads_in_all(self) -> int:
        """Heads of such a layout: of one sequence, or of the batch if dense."""
        return self.heads if self.cu_seqlens is not None else self.batch * self.heads

    def per_token(self, device: torch.device) -> Tensor:
        """Uninitialised FP32, one value a row: (B, H, N) or (H, total)."""
        shape = (self.batch, self.heads) if self.cu_seqlens is None else (self.heads,)
        return torch.empty(*shape, self.total, dtype=torch.float32, device=device)

    def programs(self, block: int) -> int:
        """Programs of all heads, of a block of tokens each."""
        return self.blocks(block) * self.heads_in_all

    @property
    def extent(self) -> int:
        """What kernels take as ``tokens``: those of each sequence or, packed, how many sequences there are."""
        return self.tokens if self.cu_seqlens is None else self.batch

    def view(self, x: Tensor) -> Tensor:
        """x as (batch or 1, H, tokens, D), whichever packing."""
        return x if self.cu_seqlens is None else x.transpose(0, 1).unsqueeze(0)


class Ask(NamedTuple):
    """What decides who runs a call, the answer's key.

    recipe: "auto" too. kind: of mask (`sagebwd.masks.kinds`), where others may run the call. impl: as the public
    functions take it; None is the fastest. training: whether a gradient will be asked for. only_torch: what of the
    call torch's own attention alone computes, or None.
    """

    recipe: Recipe | str
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    kind: str = FULL
    impl: str | None = None
    training: bool = False
    only_torch: str | None = None

    @classmethod
    def of(cls, q: Tensor, v: Tensor, recipe: Recipe | str, impl: str | None = None, kind: str = FULL) -> Ask:
        """Of tensors, or whatever has their shape, dtype and device."""
        return cls(recipe, int(q.shape[-1]), int(v.shape[-1]), q.dtype, q.device, kind, impl)


class Prologue(NamedTuple):
    """RMS norm and rotary embedding that Q and K get first (`sagebwd.norm_rope`); None is what there is not.

    Weights (D,); cos and sin (B or 1, N or M, R), packed (1, total, R); eps None for no norm; which channels are a
    pair, i and i + R / 2 unless interleaved.
    """

    eps: float | None
    interleaved: bool
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    q_cos: Tensor | None = None
    q_sin: Tensor | None = None
    k_cos: Tensor | None = None
    k_sin: Tensor | None = None


class Call(NamedTuple):
    """One attention call, but for q, k and v themselves."""

    recipe: Recipe
    scale: float
    dtype: torch.dtype
    device: torch.device
    head_dim: int
    value_dim: int
    queries: Packing
    keys: Packing
    key_mask: Tensor | None = None
    is_causal: bool = False
    window_left: int = -1
    window_right: int = -1
    deterministic: bool = False
    mask: Mask | None = None
    lists: Lists | BlockLists | None = None  # of the mask, made for a family: the portable kernels', or Hopper's
    rotation: tuple[int, ...] = ()  # sizes of R's blocks where the recipe rotates: those of its own head_dim
    value_rotation: tuple[int, ...] = ()  # of value's, where dP's operands are rotated
    lacking: tuple[int, int] = (0, 0)  # channels of head_dim and value_dim that tensors lack: they count as zeros
    prologue: Prologue | None = None  # what q and k are before it, where a family's passes do it too
    max_logits: bool = False  # the largest logit of each head is wanted

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        dims: tuple[int, int],
        key_mask: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        is_causal: bool,
        window_left: int,
        window_right: int,
        scale: float,
        recipe: Recipe,
        deterministic: bool = False,
        mask: Mask | None = None,
    ) -> Call:
        """The call of the operators' arguments.

        q and k, or tensors of their shapes but for the last dimension and q's dtype; dims, head_dim and value's.
        """
        queries, keys = Packing.of(q, cu_seqlens_q, max_seqlen_q), Packing.of(k, cu_seqlens_k, max_seqlen_k)
        return cls(
            recipe, scale, q.dtype, q.device, *dims, queries, keys, key_mask, is_causal, window_left,
            window_right, deterministic, mask, rotation=rotation_sizes(dims[0]) if recipe.rotate else (),
            value_rotation=rotation_sizes(dims[1]) if recipe.rotate and recipe.dp == INT8 else (),
        )  # fmt: skip

    @property
    def packed(self) -> bool:
        """Whether sequences lie one after another, with offsets."""
        return self.queries.cu_seqlens is not None

    @property
    def keeps_row_max(self) -> bool:
        """Whether a forward keeps row maxima: a backward reads them, or they are reduced to the heads' largest."""
        return self.recipe.dv == FP8 or self.max_logits

    @property
    def columns(self) -> tuple[int, int]:
        """Channels that Q and K, and V, have in memory."""
        return self.head_dim - self.lacking[0], self.value_dim - self.lacking[1]

    @property
    def block_d(self) -> int:
        """Columns of a tile; see `padded_head_dim`."""
        return padded_head_dim(self.head_dim)

    @property
    def turned(self) -> int:
        """Channels that R turns, 0 where the recipe does not rotate."""
        return sum(self.rotation)

    @property
    def group(self) -> int:
        """Query heads that a key head serves."""
        return self.queries.heads // self.keys.heads

    @property
    def band(self) -> dict[str, int | bool]:
        """Bounds on key - query, before a packed sequence's offset; 1 and -1 where there is none."""
        band = Band.of(self.is_causal, self.window_left, self.window_right)
        has_lower, has_upper = band.lower is not None, band.upper is not None
        return {
            "lower": band.lower if has_lower else 1, "upper": band.upper if has_upper else -1,
            "HAS_LOWER": has_lower, "HAS_UPPER": has_upper,
        }  # fmt: skip


class Saved(NamedTuple):
    """What forward leaves: the output, and what backward reads beside v. What the recipe has no use for is None.

    Codes of wide heads and their scales are None too: backward makes them anew. lse: natural log-sum-exp of the scores
    of the smoothed keys. k_mean: (B, Hkv, D) FP32, the mean taken off. q_int8, k_int8: codes, where a backward product
    reads them, in the shape of q and k but as wide as the kernels are, with one FP32 scale a token, shaped as lse.
    Shaped as lse are also row_max, of FP8 gradient products, the largest score of each query times log2(e); 1 / rms of
    the rows of q and k, FP32, where the call has a norm of its own; and the sinks' weight beside each query's keys.
    max_logits: the largest logit of each block of queries of a head, lse's shape with blocks in place of queries.
    """

    o: Tensor
    lse: Tensor
    q_int8: Tensor | None
    q_scale: Tensor | None
    k_int8: Tensor | None
    k_scale: Tensor | None
    row_max: Tensor | None
    k_mean: Tensor
    q_inverse_rms: Tensor | None = None
    k_inverse_rms: Tensor | None = None
    weight: Tensor | None = None
    max_logits: Tensor | None = None


# Queries of which forward's last pass finds the largest logit.
BLOCK_OF_MAXIMA = 64


def blocks_of_maxima(tokens: int, sequences: int) -> int:
    """Blocks of queries of a head that have a largest logit each: as of `Packing.blocks`, and at least one."""
    return tokens // BLOCK_OF_MAXIMA + sequences


def lies_by_token(x: Tensor) -> bool:
    """Whether the heads of each token lie side by side in memory, of x (B, H, N, D); False of other dimensions."""
    return x.dim() == 4 and x.stride(1) < x.stride(2)


def empty_like_rows(x: Tensor, head_dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised and dense, of x's shape (with another last dimension), heads side by side where x's are.

    dtype: x's unless given.

    Models project (B, N, H, D) and hand it over as (B, H, N, D): what is written as it is read need not be copied.
    """
    dim = x.shape[-1] if head_dim is None else head_dim
    shape = (*x.shape[:-1], dim)
    if lies_by_token(x):
        _, heads, tokens, _ = shape
        return x.new_empty_strided(shape, (tokens * heads * dim, dim, heads * dim, 1), dtype=dtype)
    return x.new_empty(shape, dtype=dtype)


def empty_gradients(head_dim: int, o: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq as o lies, dk and dv as v does."""
    return empty_like_rows(o, head_dim), empty_like_rows(v, head_dim), empty_like_rows(v)


def padded_head_dim(head_dim: int) -> int:
    """The power of two that tiles are wide: INT8 products reduce over at least 32."""
    return max(32, 1 << (head_dim - 1).bit_length())


def keeps_inputs(recipe: Recipe, backward: Row, dims: tuple[int, int]) -> tuple[bool, bool]:
    """Whether a family's backward reads q and k: for a 16-bit product, or for codes of wide heads."""
    always = backward.in_torch or recipe.s == SIXTEEN_BIT or backward.is_wide(*dims)
    return always or recipe.dk == SIXTEEN_BIT, always or recipe.dq == SIXTEEN_BIT
