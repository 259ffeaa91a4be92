"""Casts to FP8 with one scale a tensor, and back: what surrounds an FP8 attention in training, in few launches.

Current scaling: the largest value of a tensor is found, then its values are divided by it and rounded. Up to three
tensors of one dtype go through a launch together. Delayed scaling: the largest value of a call before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = tl.constexpr(1024)
"""Of each tensor, in every pass over it."""
BLOCK = tl.constexpr(2048)
SCALAR = tl.constexpr(4)
"""FP32 numbers from one scalar to the next: 16 bytes, as kernels of other projects may expect of a pointer."""
LEAST = tl.constexpr(1e-30)
"""In place of the largest value of a tensor of zeros."""
TENSORS = 3


@triton.jit
def _pick(of_first, of_second, of_third):
    tensor = tl.program_id(1)
    picked = of_first
    if tensor == 1:
        picked = of_second
    if tensor == 2:
        picked = of_third
    return picked


@triton.jit
def _largest(first, second, third, count, others, partials):
    x, count = _pick(first, second, third), _pick(count, others, others)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, count, PROGRAMS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(x + at, at < count, other=0.0).to(tl.float32)))
    tl.store(partials + tl.program_id(1) * PROGRAMS + tl.program_id(0), tl.max(largest))


@triton.jit
def _divide(
    first, second, third, first_codes, second_codes, third_codes, count, others, partials, descales, MAX: tl.constexpr
):  # fmt: skip
    x, count = _pick(first, second, third), _pick(count, others, others)
    codes = _pick(first_codes, second_codes, third_codes)
    largest = tl.max(tl.load(partials + tl.program_id(1) * PROGRAMS + tl.arange(0, PROGRAMS)))
    largest = tl.maximum(largest, LEAST)
    if tl.program_id(0) == 0:
        tl.store(descales + tl.program_id(1) * SCALAR, largest / MAX)
    scale = MAX / largest
    for start in range(tl.program_id(0) * BLOCK, count, PROGRAMS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        scaled = tl.load(x + at, at < count, other=0.0).to(tl.float32) * scale
        scaled = tl.minimum(tl.maximum(scaled, -MAX), MAX)
        tl.store(codes + at, scaled.to(codes.dtype.element_ty), at < count)


@triton.jit
def _multiply(first_codes, second_codes, third_codes, first, second, third, count, others, descales):
    x, count = _pick(first, second, third), _pick(count, others, others)
    codes = _pick(first_codes, second_codes, third_codes)
    descale = tl.load(descales + tl.program_id(1) * SCALAR)
    for start in range(tl.program_id(0) * BLOCK, count, PROGRAMS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(codes + at, at < count, other=0.0).to(tl.float32) * descale
        tl.store(x + at, value.to(x.dtype.element_ty), at < count)


@triton.jit
def _delayed(largest, maxima, scales, descales):
    at = tl.program_id(0) * SCALAR
    value, maximum = tl.maximum(tl.load(largest + at), LEAST), tl.load(maxima + at)
    tl.store(scales + at, maximum / value)
    tl.store(descales + at, value / maximum)
    tl.store(largest + at, 0.0)


def to_float8(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """FP8 codes of one or three tensors by current scaling, and what they are to be multiplied by.

    Args: tensors, of one dtype; the second and third of one size. dtype, of the codes.
    Returns codes, with the tensors' shapes and, where those leave no gaps, strides, and descales, (tensors, 4) FP32:
    the first column counts.
    """
    codes = [torch.empty_like(x, dtype=dtype) for x in tensors]
    tensors = [_like(*pair) for pair in zip(tensors, codes)]
    partials = tensors[0].new_empty(len(tensors) * PROGRAMS.value, dtype=torch.float32)
    descales = scalars(len(tensors), tensors[0].device)
    grid, sizes = (PROGRAMS.value, len(tensors)), _sizes(tensors)
    _largest[grid](*_three(tensors), *sizes, partials)
    largest = torch.finfo(dtype).max
    _divide[grid](*_three(tensors), *_three(codes), *sizes, partials, descales, largest)
    return codes, descales


def from_float8(codes: Sequence[Tensor], descales: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The values of one or three tensors of codes, as `to_float8` takes and gives them."""
    values = [torch.empty_like(x, dtype=dtype) for x in codes]
    _multiply[PROGRAMS.value, len(codes)](*_three(codes), *_three(values), *_sizes(codes), descales)
    return values


class DelayedScales:
    """Scales of tensors that a kernel writes as FP8: by the largest values that it met at the call before.

    largest: (tensors, 4) FP32, whose first column the kernel fills; at first 1.
    """

    def __init__(self, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self.largest, self.maxima = (scalars(len(dtypes), device) for _ in range(2))
        self.largest.fill_(1.0)
        self.maxima.copy_(torch.tensor([[torch.finfo(dtype).max] for dtype in dtypes]).expand_as(self.maxima))

    def next(self) -> tuple[Tensor, Tensor]:
        """Scales and descales for the coming call, whose largest values start from 0."""
        scales, descales = (scalars(len(self.largest), self.largest.device) for _ in range(2))
        _delayed[len(self.largest),](self.largest, self.maxima, scales, descales)
        return scales, descales


def scalars(count: int, device: torch.device) -> Tensor:
    """Unwritten (count, 4) FP32, of which the first column counts."""
    return torch.empty((count, SCALAR.value), dtype=torch.float32, device=device)


def _three(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The first stands in for those that are not there, and is not looked at again."""
    return [*tensors, *[tensors[0]] * (TENSORS - len(tensors))]


def _like(x: Tensor, codes: Tensor) -> Tensor:
    """In the memory order of its codes."""
    return x if x.stride() == codes.stride() else torch.empty_like(codes, dtype=x.dtype).copy_(x)


def _sizes(tensors: Sequence[Tensor]) -> tuple[int, int]:
    return tensors[0].numel(), tensors[-1].numel()
