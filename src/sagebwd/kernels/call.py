"""One attention call as the kernels see it: packing of tokens, mask, TMA descriptors.

Dense and packed calls differ in strides and sequence bounds alone: `Packing` hides which one it is.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sagebwd.kernels.replay import Launch, launch
from sagebwd.recipe import Recipe

# Steps of P (`Recipe.p_levels`) that forward kernels compute; any other value would get the numbers of one of these.
P_LEVELS = (127, 254)
# Addresses and strides that TMA reads from are multiples of so many bytes.
TMA_BYTES = 16


@cache
def capability(device: torch.device) -> int:
    """90 for sm_90; 0 where the interpreter runs on a CPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def padded_head_dim(head_dim: int) -> int:
    """The power of two that tiles are wide: INT8 products reduce over at least 32."""
    return max(32, 1 << (head_dim - 1).bit_length())


def pass_warps(block: int, head_dim: int) -> int:
    """Warps of a quantisation pass: 64 elements a thread."""
    return max(4, block * padded_head_dim(head_dim) // 2048)


class Packing(NamedTuple):
    """How the tokens of one side (queries or keys) lie: (B, H, N, D), or (total, H, D) with ``cu_seqlens``."""

    batch: int
    heads: int
    tokens: int  # of the longest sequence
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
        """Blocks of one head in a padded layout, where every sequence begins a block of its own."""
        if self.cu_seqlens is None:
            return -(-self.total // block)
        return self.total // block + self.batch

    def padded(self, block: int, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised (heads, blocks, *shape), heads counted over the batch if dense."""
        return torch.empty(self.heads_in_all, self.blocks(block), *shape, dtype=dtype, device=device)

    @property
    def heads_in_all(self) -> int:
        """Heads of such a layout: of one sequence, or of the batch if dense."""
        return self.heads if self.cu_seqlens is not None else self.batch * self.heads

    def per_token(self, device: torch.device, *several: int) -> Tensor:
        """Uninitialised FP32, one value a row: (B, H, N) or (H, total), or ``several`` such."""
        shape = (self.batch, self.heads) if self.cu_seqlens is None else (self.heads,)
        return torch.empty(*several, *shape, self.total, dtype=torch.float32, device=device)

    def by_head(self, x: Tensor) -> Tensor:
        """Uninitialised, of x's shape and dtype, with the tokens of a head one after the other."""
        if self.cu_seqlens is None:
            return torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return torch.empty(self.heads, self.total, x.shape[-1], dtype=x.dtype, device=x.device).transpose(0, 1)

    def grid(self, block: int) -> int:
        """Blocks of the longest sequence."""
        return -(-self.tokens // block)

    def view(self, x: Tensor) -> Tensor:
        """x as (batch or 1, H, tokens, D), whichever packing."""
        return x if self.cu_seqlens is None else x.transpose(0, 1).unsqueeze(0)


def contiguous(x: Tensor | None) -> Tensor | None:
    """As kernels read masks and values of tokens."""
    return None if x is None else x.contiguous()


def aligned_rows(x: Tensor | None) -> Tensor | None:
    """As kernels read Q, K, V, O, dO and saved codes: any strides but the last, from an address that TMA takes.

    The one place that looks at addresses: a view that begins elsewhere, as slices of a flat buffer do, is copied.
    Without TMA too, where kernels would be compiled anew, to read K and V an element at a time again and again.
    """
    if x is None or (x.stride(-1) == 1 and x.data_ptr() % TMA_BYTES == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def fits_tma(x: Tensor) -> bool:
    """TMA wants strides in multiples of 16 bytes, as the address is by `aligned_rows`."""
    return all(s * x.element_size() % TMA_BYTES == 0 for s in x.stride()[:-1]) and min(x.shape) > 0


def described(blocks: dict[str, tuple[Tensor, tuple[int, int]]]) -> dict[str, TensorDescriptor] | None:
    """A TMA descriptor for each (tensor, block of its last two dimensions), or None if one has odd strides."""
    if not all(fits_tma(x) for x, _ in blocks.values()):
        return None
    return {
        name: TensorDescriptor(x, list(x.shape), list(x.stride()), [1] * (x.dim() - 2) + list(block))
        for name, (x, block) in blocks.items()
    }


def transposed_view(x: Tensor, head_dim: int) -> Tensor:
    """A transposed copy as (heads, head_dim, padded tokens)."""
    return x.view(x.shape[0], head_dim, -1)


class SmoothQ(NamedTuple):
    """What puts back into S and dK what Q-smoothing took out; all None without it."""

    q_mean: Tensor | None = None  # (heads, blocks, D): the mean of each query block
    k: Tensor | None = None
    k_mean: Tensor | None = None


class Call(NamedTuple):
    """One attention call: what its three kernels have in common."""

    recipe: Recipe
    scale: float
    dtype: torch.dtype
    head_dim: int
    queries: Packing
    keys: Packing
    key_mask: Tensor | None
    is_causal: bool
    window_left: int
    window_right: int
    arch: int
    launch: Launch = launch

    @property
    def varlen(self) -> bool:
        """Packed sequences."""
        return self.queries.cu_seqlens is not None

    @property
    def block_d(self) -> int:
        """Columns of a tile: the power of two that holds head_dim; INT8 products reduce over at least 32."""
        return padded_head_dim(self.head_dim)

    @property
    def group(self) -> int:
        """Query heads that a key head serves."""
        return self.queries.heads // self.keys.heads

    @property
    def band(self) -> dict[str, int | bool]:
        """Bounds on key - query, before a packed sequence's offset."""
        return {
            "lower": -self.window_left,
            "upper": 0 if self.is_causal else self.window_right,
            "HAS_LOWER": self.window_left >= 0,
            "HAS_UPPER": self.is_causal or self.window_right >= 0,
        }
