"""What one compilation of the forward fixes: the tile, the pipeline, and which masks a call has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from sagebwd.kernels.sm90.widths import SCALE_BLOCK, ForwardTile
from sagebwd.masks.mask import TILE as MASK_TILE

__all__ = ["MASK_TILE", "REGISTERS", "SCALE_BLOCK", "Arguments", "Variant"]

# Registers of a thread that computes and of one of the producer's, by the number of computing warpgroups.
REGISTERS = {2: (240, 24), 3: (160, 32)}


@dataclass(frozen=True)
class Variant:
    """One compilation."""

    head_dim: int
    value_dim: int
    dtype: str  # bfloat16 or float16
    tile: ForwardTile
    lower: bool = False  # keys before a bound are masked: a window
    upper: bool = False  # keys after a bound are masked: causal, a window
    varlen: bool = False
    key_mask: bool = False
    lists: bool = False  # a mask of elements beside a key_mask: a list says which blocks of keys a tile meets
    bias: str = ""  # of which dtype the mask's elements are added, if they are
    negative: bool = False  # a negative softmax scale
    row_max: bool = False  # row maxima are written
    exact: bool = False  # those of S, not what 16-bit P says of them
    rotation: tuple[int, ...] = ()  # sizes of R's blocks where Q and K are rotated
    lacking: tuple[int, int] = (0, 0)  # channels of head_dim that Q lacks, and of value_dim V and O: zeros
    q_codes: bool = False  # Q comes as codes and scales, which a pass before made

    @property
    def columns(self) -> tuple[int, int]:
        """Channels that Q has in memory, and V and O."""
        return self.head_dim - self.lacking[0], self.value_dim - self.lacking[1]

    @property
    def code_columns(self) -> int:
        """Columns of Q's and K's codes in shared memory, of which TMA sets K's beyond head_dim to 0.

        Rows of whole 64 bytes, or of 128: TMA would write others in pieces of 32.
        """
        return self.head_dim if self.head_dim % 64 == 0 else -(-self.head_dim // 128) * 128

    @property
    def code_parts(self) -> int:
        """Products of 32 channels that make up S."""
        return -(-self.head_dim // 32)

    @property
    def bounded(self) -> bool:
        """Whether blocks without a mask have a loop that takes no maxima, for queries whose scores cannot grow far.

        BF16 has the range of FP32, in which P may grow. Row maxima are then those of P, to BF16's digits.
        """
        return self.dtype == "bfloat16" and (self.lists or not self.key_mask) and not self.exact

    @property
    def tiles_met(self) -> int:
        """Tiles of a mask's bits that a block of keys meets at 64 queries, at most."""
        return 1 if MASK_TILE % self.tile.keys == 0 else 2


class Arguments(NamedTuple):
    """What the kernel is called with, and the stream after it: tensors and numbers, or placeholders of them.

    ``cu_seqlens``: INT32, where calls are packed; ``blocks_q``: tiles of a head (`Packing.blocks`);
    ``heads_at_once``: heads whose tiles take turns; ``lower``, ``upper``: bounds on key - query, which packed calls
    count from the sequences' ends; ``scale``: the softmax scale's magnitude.
    """

    q: Any  # 16 bit, (B, H, N, D) or packed (total, H, D), any strides of whole 16 bytes but the last; None: codes
    q_int8: Any  # written, or read where q is None, INT8 codes, contiguous, of head_dim channels
    k: Any  # INT8 codes, contiguous
    v: Any  # as q, of V's channels
    masked_v: Any  # None, or with key_mask V of blocks near a masked key, which has zeros there (`masked_values`)
    o: Any  # written, as v
    lse: Any  # written, FP32, natural log, (B, H, N) or (H, total); -inf where a query sees no key
    row_max: Any  # written if not None: each query's largest score times log2(e)
    q_scale: Any  # as q_int8, FP32, as lse
    k_scale: (
        Any  # FP32, (heads over the batch, blocks of 128 keys, 4), sequences padded to blocks as `tile.padded_block`
    )
    largest_k_norm: Any  # FP32, (batch * key heads,): no norm of a key as codes is larger
    key_mask: Any  # None, or bytes (B, N) that are 0 where a key is masked
    lists: Any  # None, or with words and tiles those of `masks.sm90_block_lists`, of tiles of queries; (B, H, ., .)
    words: Any
    tiles: Any  # (B, H, ., .)
    bias: Any  # None, or what is added to scores, (B, H, N, M), any strides but the last
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    tiles_taken: Any  # INT32, one 0, which counts up and ends at 0
    programs: Any  # how many there are at most; each takes tiles as it comes free
    blocks_q: Any
    heads_at_once: Any
    lower: Any
    upper: Any
    scale: Any
