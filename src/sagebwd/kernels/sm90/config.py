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
    quantize_q: bool = False  # Q comes in 16 bit, and its codes and scales are written
    persistent: bool = False  # programs take tiles as they come free; wants quantize_q
    wide_o: bool = False


class Arguments(NamedTuple):
    """What the kernel is called with, and the stream after it: tensors and numbers, or placeholders of them.

    ``cu_seqlens``: INT32, where calls are packed; ``longest``: queries of the longest sequence; ``lower``, ``upper``:
    bounds on key - query, which packed calls count from the sequences' ends; ``scale``: the softmax scale's magnitude.
    """

    q: Any  # INT8 codes, (B, H, N, D) or packed (total, H, D), contiguous; in 16 bit if quantize_q, strides as v's
    q_codes: Any  # written if quantize_q, as q would be
    k: Any
    v: Any  # 16 bit, any strides of whole 16 bytes but the last
    o: Any  # written, as v
    lse: Any  # written, FP32, natural log, (B, H, N) or (H, total); -inf where a query sees no key
    row_max: Any  # written if not None: each query's largest score times log2(e)
    q_scale: Any  # FP32, as lse; written if quantize_q
    k_scale: (
        Any  # FP32, (heads over the batch, blocks of 128 keys, 4), sequences padded to blocks as `tile.padded_block`
    )
    key_mask: Any  # None, or bytes (B, N) that are 0 where a key is masked; V must be finite there
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    tiles_taken: Any  # if persistent: INT32, one 0, which counts up
    programs: Any  # if persistent: how many there are at most
    longest: Any
    lower: Any
    upper: Any
    scale: Any


# Whether the forward makes Q's codes itself.
QUANTIZE_Q = True
# Whether its programs take one tile after another.
PERSISTENT = True
WIDE_O = True

# Measured on an H200 (docs/forward-sm90.md).
TILES = {
    64: Tile(warpgroups=3, keys=128, stages=2),
    96: Tile(warpgroups=2, keys=128, stages=2),
    128: Tile(warpgroups=2, keys=128, stages=2),
}
