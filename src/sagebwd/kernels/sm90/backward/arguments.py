"""Arguments of the backward's kernels, as named tuples: one argument each, but for TMA descriptors and sizes.

Triton's launchers encode no descriptor in a tuple, and compile for the numbers in one: descriptors, and sizes that
differ from call to call, are arguments of their own.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sagebwd.call import Call
from sagebwd.kernels.common.strided import counted_as_any


class BlockSparse(NamedTuple):
    """Block lists of a mask of elements (`kernels.masks.sm90_block_lists`), and their strides, 0 where broadcast."""

    lists: Tensor
    words: Tensor
    batch: int
    head: int
    row: int


class Bias(NamedTuple):
    """Attention bias (B, H, N, M) and its strides, of which the last is 1, the others `counted_as_any`."""

    elements: Tensor
    batch: int
    head: int
    query: int


class WorkSplits(NamedTuple):
    """Work splits of long block lists (`kernels.masks.work_splits`), and zeros that the splits of one list add to."""

    programs: Tensor
    sums: Tensor  # (lists, 128 keys, dK's channels and dV's) FP32
    arrived: Tensor  # (lists, 4) int32, how many programs of each of CONSUMERS have added


def block_sparse_and_bias(call: Call) -> tuple[BlockSparse | None, Bias | None]:
    """Block lists and bias of a call's mask; None without."""
    if call.lists is None:
        return None, None
    lists, words, _, bias, _ = call.lists
    of_bias = None if bias is None else Bias(bias, *counted_as_any(*_strides(bias)))
    return BlockSparse(lists, words, *_strides(lists)), of_bias


def _strides(x: Tensor) -> list[int]:
    return [0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride())]


class Tensors(NamedTuple):
    """Tensors that a kernel reads and writes without TMA; None if it does not use one."""

    k_scale: Tensor  # one a key
    largest: Tensor | None  # bits of each key head's largest K
    key_mask: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dq_semaphore: Tensor | None  # zeros, CONSUMERS a block of queries, if blocks of keys are to add to dQ in order
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    strides: tuple[int, ...]  # of dk, and of dv if they are others
    block_sparse: BlockSparse | None
    bias: Bias | None
    work_splits: WorkSplits | None  # where lists of blocks may be cut
    # triton 3.6 makes a tuple's type anew for a constant of its own alone, not for one further in, as a stride of 1 is
    last: None = None


class Factors(NamedTuple):
    """The softmax scale, and the scale of dQ's FP16 sums if a kernel adds to them (`bwd_postprocess.dq_sum_scale`)."""

    scale: float
    sum_scale: float | None = None


class Sizes(NamedTuple):
    """Sizes that differ from call to call, and how many heads are interleaved."""

    heads_k: int
    group: int  # query heads that a key head serves
    tokens_q: int  # `Packing.extent`
    tokens_k: int
    total_k: int  # keys of one head
    blocks_q: int  # blocks of queries of one head, padded
    programs: int  # of a head
    heads_at_once: int
    heads_in_all: int
    lower: int  # bounds on key - query
    upper: int

    @classmethod
    def of(cls, call: Call, block_q: int, programs: int, heads_at_once: int) -> Sizes:
        """Of so many programs a head."""
        queries, keys, band = call.queries, call.keys, call.band
        return cls(
            keys.heads, call.group, queries.extent, keys.extent, keys.total, queries.blocks(block_q), programs,
            heads_at_once, keys.heads_in_all, band["lower"], band["upper"],
        )  # fmt: skip


class Kind(NamedTuple):
    """Compile-time properties of a call."""

    HAS_LOWER: bool
    HAS_UPPER: bool
    RAGGED: bool  # a block of queries or of keys may end past its sequence
    GROUPED: bool  # query heads share a key head
    PACKED: bool

    @classmethod
    def of(cls, call: Call, block_q: int, span: int) -> Kind:
        """Of blocks of so many queries, and keys."""
        ragged = call.packed or call.queries.tokens % block_q != 0 or call.keys.tokens % span != 0
        return cls(call.band["HAS_LOWER"], call.band["HAS_UPPER"], ragged, call.group > 1, call.packed)


def steps_of(*names: str) -> list[str]:
    """Parameters of a kernel that are `descriptor.Rows.steps` of operands."""
    return [f"{name}_{step}" for name in names for step in ("b", "h", "column")]
