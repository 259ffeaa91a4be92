"""What one compilation of the forward fixes: the tile, the pipeline, and which masks a call has."""

from __future__ import annotations

from dataclasses import dataclass

# Registers a thread, by warpgroups that share a multiprocessor and programs there: of the warpgroups that compute and of the producer's, by the number of the former.
REGISTERS = {(1, 1): (256, 56), (2, 1): (240, 24), (3, 1): (160, 32), (4, 1): (112, 24), (2, 2): (104, 24), (1, 3): (120, 32)}
# Keys of a block that has four scales, one for each lane of a quad.
SCALE_BLOCK = 128


@dataclass(frozen=True)
class Tile:
    """Tile and pipeline: queries by ``warpgroups`` of 64, ``keys`` a step, ``stages`` of K and V in shared memory."""

    warpgroups: int
    keys: int
    stages: int
    turns: bool = True  # warpgroups queue their products in turn
    vote: bool = False  # one vote a warp says whether any row's maximum has moved, instead of an exchange in each quad
    sums: bool = False  # row sums by tensor core: P times ones
    polynomial: int = 0  # of 16 exponentials, how many are polynomials
    early: bool = False  # P is packed before P V of the block before is done
    persistent: bool = False
    ctas: int = 1  # that share a multiprocessor
    qreg: bool = False  # Q in registers

    @property
    def queries(self) -> int:
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
