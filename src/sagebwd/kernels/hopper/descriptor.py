"""Tensors as the matrices that TMA reads, and their descriptors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sagebwd.kernels.call import Packing


def descriptor(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Blocks of a (rows, columns) matrix, laid out in shared memory as tensor cores read them."""
    bits = 8 * x.element_size()
    layout = NVMMASharedLayout(swizzle_byte_width=min(128, block[1] * bits // 8), element_bitwidth=bits, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)


def vectors(x: Tensor, columns: int) -> TensorDescriptor:
    """Rows of a contiguous tensor, which threads read themselves."""
    x = x.view(-1, columns)
    layout = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * x.element_size(), rank=2)
    return TensorDescriptor.from_tensor(x, [1, columns], layout)


@dataclass(frozen=True)
class Rows:
    """A tensor's tokens as rows of one matrix: token t at row b * batch + h * head + t, column h * column."""

    matrix: Tensor
    batch: int
    head: int
    column: int

    @classmethod
    def of(cls, x: Tensor, packing: Packing) -> Rows:
        """The rows of (B, H, N, D) or packed (total, H, D); copied only where no matrix has them all."""
        view = packing.view(x)
        batches, heads, tokens, head_dim = view.shape
        pitch = view.stride(2) if tokens > 1 else 0
        batch, head = view.stride(0) if batches > 1 else 0, view.stride(1) if heads > 1 else 0
        aligned = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and pitch * x.element_size() % 16 == 0
        if aligned and pitch >= head_dim and batch % pitch == 0:
            rows = batch // pitch * (batches - 1) + tokens
            if head % pitch == 0:
                rows += head // pitch * (heads - 1)
                return cls(x.as_strided((rows, head_dim), (pitch, 1)), batch // pitch, head // pitch, 0)
            columns = head * (heads - 1) + head_dim
            if columns <= pitch:
                return cls(x.as_strided((rows, columns), (pitch, 1)), batch // pitch, 0, head)
        matrix = view.contiguous().view(-1, head_dim)
        return cls(matrix, heads * tokens, tokens, 0)

    @property
    def steps(self) -> tuple[int, int, int]:
        """What a kernel takes: rows a batch, rows a head, columns a head."""
        return self.batch, self.head, self.column
