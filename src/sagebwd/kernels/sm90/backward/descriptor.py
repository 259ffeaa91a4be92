"""Tensors as the matrices that TMA reads, and their descriptors."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagebwd.call import Call, Packing
from sagebwd.kernels.common.strided import counted
from sagebwd.kernels.runtime.alignment import TMA_BYTES, contiguous


@cache
def _layout(swizzle: int, bits: int) -> NVMMASharedLayout:
    return NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)


def _described(
    x: Tensor, shape: tuple[int, int], pitch: int, block: tuple[int, int], layout: NVMMASharedLayout
) -> TensorDescriptor:
    """What TensorDescriptor(...) makes, without its checks: `Rows.of` and the passes give TMA what it wants.

    With them, and with a view of x for each, a backward's 13 took 0.1 ms of host time.
    """
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape, made.layout = x, shape, (pitch, 1), list(block), layout
    return made


def descriptor(x: Tensor, rows: int, columns: int, pitch: int, block: tuple[int, int]) -> TensorDescriptor:
    """Blocks of the (rows, columns) matrix that starts where x does, laid out as tensor cores read them."""
    size = x.element_size()
    return _described(x, (rows, columns), pitch, block, _layout(min(128, block[1] * size), 8 * size))


def matrix(x: Tensor, columns: int, block: tuple[int, int]) -> TensorDescriptor:
    """`descriptor` of a contiguous tensor."""
    return descriptor(x, x.numel() // columns, columns, columns, block)


def transposed(x: Tensor, head_dim: int, channels: int, tokens: int) -> TensorDescriptor:
    """Blocks of channels and tokens of a transposed copy, (heads, ...) as (heads * head_dim, padded tokens)."""
    return matrix(x, x.numel() // (x.shape[0] * head_dim), (channels, tokens))


def vectors(x: Tensor, columns: int, width: int = 0) -> TensorDescriptor:
    """Rows of a contiguous tensor, which threads read themselves; with zeros behind, if ``width`` says up to where."""
    layout = _layout(0, 8 * x.element_size())
    return _described(x, (x.numel() // columns, columns), columns, (1, width or columns), layout)


def gradient_blocks(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Blocks of dK or dV, (B, H, N, D) or packed (total, H, D), as TMA writes those that end with no sequence."""
    by_token = x.stride(1) < x.stride(-2 if x.dim() == 4 else 0)
    return matrix(x, x.shape[-1] * (x.shape[1] if by_token else 1), block)


def gradient_strides(call: Call, *gradients: Tensor) -> tuple[int, ...]:
    """Of dK and dV, one of them, or one for both where they are alike, as `epilogue.store_rows` takes them."""
    if any(call.lacking):
        return sum((counted(*call.keys.strides(x), x.shape[-1]) for x in gradients), ())
    distinct = gradients[: 1 if call.value_dim == call.head_dim else 2]
    return sum(map(call.keys.strides, distinct), ())


def empty_by_head(x: Tensor) -> Tensor:
    """Uninitialised, of x's shape, (B, H, N, D) or packed (total, H, D), a head's tokens one after another."""
    if x.dim() == 4:
        return x.new_empty(x.shape)
    return x.new_empty(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1)


class Rows(NamedTuple):
    """A tensor's tokens as rows of one matrix: token t at row b * batch + h * head + t, column h * column."""

    x: Tensor
    rows: int
    columns: int
    pitch: int
    batch: int
    head: int
    column: int

    @classmethod
    def of(cls, x: Tensor, packing: Packing) -> Rows:
        """The rows of (B, H, N, D) or packed (total, H, D); copied only where no matrix has them all.

        x begins at a multiple of 16 bytes (`aligned_rows`). Blocks that are wider than D get zeros beside it, if no
        row has another head's channels there (`empty_by_head`).
        """
        heads, head_dim = packing.heads, x.shape[-1]
        if packing.cu_seqlens is None:
            batches, tokens = packing.batch, packing.tokens
            batch, head, pitch, unit = x.stride()
        else:
            batches, tokens = 1, packing.total
            batch, (pitch, head, unit) = 0, x.stride()
        pitch = pitch if tokens > 1 else 0
        batch, head = batch if batches > 1 else 0, head if heads > 1 else 0
        readable = unit == 1 and not (pitch | head) * x.element_size() % TMA_BYTES
        if readable and pitch >= head_dim and batch % pitch == 0:
            rows = batch // pitch * (batches - 1) + tokens
            if head % pitch == 0:
                rows += head // pitch * (heads - 1)
                return cls(x, rows, head_dim, pitch, batch // pitch, head // pitch, 0)
            columns = head * (heads - 1) + head_dim
            if columns <= pitch:
                return cls(x, rows, columns, pitch, batch // pitch, 0, head)
        matrix = contiguous(packing.view(x))
        # sequences of a pack are no batch: each says where its tokens begin
        batch = heads * tokens if packing.cu_seqlens is None else 0
        return cls(matrix, batches * heads * tokens, head_dim, head_dim, batch, tokens, 0)

    def blocks(self, tokens: int, channels: int) -> TensorDescriptor:
        """Blocks of tokens and channels of one head."""
        return descriptor(self.x, self.rows, self.columns, self.pitch, (tokens, channels))

    @property
    def steps(self) -> tuple[int, int, int]:
        """What a kernel takes: rows a batch, rows a head, columns a head."""
        return self.batch, self.head, self.column
