"""What one compilation of the forward fixes: the tile, the pipeline, and which masks a call has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

# Registers of a thread that computes and of one of the producer's, by the number of computing warpgroups.
REGISTERS = {2: (240, 24), 3: (160, 32)}
# Keys of a block that has four scales, one for each lane of a quad.
SCALE_BLOCK = 128


@dataclass(frozen=True)
class Tile:
    """Tile and pipeline: queries by ``warpgroups`` of 64, ``keys`` a step, ``stages`` of K and V in shared memory."""

    warpgroups: int
    keys: int
    stages: int

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return 64 * self.warpgroups


@dataclass(frozen=True)
class Variant:
    """One compilation."""

    head_dim: int
    dtype: str  # bfloat16 or float16
    tile: Tile
    lower: bool = False  # keys before a bound are masked: a window
    upper: bool = False  # keys after a bound are masked: causal, a window
    varlen: bool = False
    key_mask: bool = False
    negative: bool = False  # a negative softmax scale
    row_max: bool = False  # row maxima are written


class Arguments(NamedTuple):
    """What the kernel is called with, and the stream after it: tensors and numbers, or placeholders of them.

    ``cu_seqlens``: INT32, where calls are packed; ``longest``: queries of the longest sequence; ``lower``, ``upper``:
    bounds on key - query, which packed calls count from the sequences' ends; ``scale``: the softmax scale's magnitude.
    """

    q: Any  # INT8 codes, (B, H, N, D) or packed (total, H, D), contiguous
    k: Any
    v: Any  # 16 bit, any strides of whole 16 bytes but the last
    o: Any  # written, as v
    lse: Any  # written, FP32, natural log, (B, H, N) or (H, total); -inf where a query sees no key
    row_max: Any  # written if not None: each query's largest score times log2(e)
    q_scale: Any  # FP32, as lse
    k_scale: (
        Any  # FP32, (heads over the batch, blocks of 128 keys, 4), sequences padded to blocks as `tile.padded_block`
    )
    key_mask: Any  # None, or bytes (B, N) that are 0 where a key is masked; V must be finite there
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    longest: Any
    lower: Any
    upper: Any
    scale: Any


@dataclass(frozen=True)
class BackwardVariant:
    """One compilation of the backward."""

    head_dim: int
    dtype: str  # bfloat16 or float16
    warpgroups: int  # of 64 keys each
    queries: int  # a step
    paired: bool  # P and dS are pairs of FP16 before they are e4m3, else FP32
    k_parts: int  # parts of 32 channels of K that stay in registers
    v_parts: int  # and of 16 channels of V
    rows_ahead: int  # eights of queries whose row values are read before S is waited for
    cluster: int  # programs, of neighbouring keys, that share what is loaded of the queries
    lower: bool = False
    upper: bool = False
    varlen: bool = False
    ragged: bool = False  # the last block of keys may be cut
    key_mask: bool = False
    lane_scale: bool = True  # keys 2 i and 2 i + 1 of every 8 have one scale

    @property
    def span(self) -> int:
        """Keys of a program."""
        return 64 * self.warpgroups

    @property
    def dq_in_parts(self) -> bool:
        """Whether every warpgroup has 64 channels of each block of dQ^T, else all 64 there are of a block in turn."""
        return self.head_dim == 64 * self.warpgroups


class BackwardArguments(NamedTuple):
    """What the backward is called with, and the stream after it, as `Arguments`; see `row_values_kernel`, whose
    blocks are of ``queries`` (`BackwardVariant`), and `float8_kernel`."""

    q: Any  # INT8 codes, (B, H, N, D) or packed (total, H, D); any strides of whole 16 bytes but the last, as the next
    k: Any
    v: Any  # 16 bit
    do: Any  # dO scaled, 16 bit
    q_t: Any  # bytes of e4m3, (heads over the batch, D, padded tokens); pairs of keys in k_t, in whole spans
    k_t: Any
    do_t: Any
    rows: Any  # FP32, (heads over the batch, blocks, 2 * queries)
    delta: Any  # 16 bit, (heads over the batch, padded tokens, 16)
    k_scale: Any  # FP32, one a token, (B, H, N) or (H, total)
    largest: Any  # bits of FP32, INT32, (K's heads over the batch, 3)
    key_mask: Any  # None, or bytes (B, N) that are 0 where a key is masked
    dq_sums: Any  # FP16, to which dQ^T sum_scale is added: (heads over the batch, blocks, D * queries), by register
    dk: Any  # written, as v
    dv: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    longest: Any  # keys of the longest sequence
    lower: Any
    upper: Any
    scale: Any
    sum_scale: Any


# Measured on an H200 (docs/log/2026-11-23-sm90-backward.md).
BACKWARD = {
    64: {
        "warpgroups": 3, "queries": 64, "paired": False, "k_parts": 0, "v_parts": 0, "rows_ahead": 0, "cluster": 1,
    },
    128: {
        "warpgroups": 2, "queries": 64, "paired": True, "k_parts": 4, "v_parts": 4, "rows_ahead": 0, "cluster": 1,
    },
}  # fmt: skip

# Measured on an H200 (docs/forward-sm90.md).
TILES = {
    64: Tile(warpgroups=3, keys=128, stages=2),
    96: Tile(warpgroups=2, keys=128, stages=2),
    128: Tile(warpgroups=2, keys=128, stages=2),
}
