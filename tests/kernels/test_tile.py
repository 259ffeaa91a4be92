"""Quotients by three instructions are those of IEEE: interpreted on a CPU, compiled on a GPU, and in numpy."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from sagebwd.kernels.common.tile import divide, psi_scale
from tests.gpus import DEVICE, on_gpu

pytestmark = on_gpu
DRAWS = 1 << 16


@triton.jit
def quotients_kernel(amax, x, scales, quotients, BLOCK: tl.constexpr):
    """psi's scale of each amax, and x over it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale = psi_scale(tl.load(amax + at))
    tl.store(scales + at, scale)
    tl.store(quotients + at, divide(tl.load(x + at), scale, 1.0 / scale))


def draw(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest magnitudes over 80 octaves, and values below them; rounded to ``dtype``, held in FP32."""
    generator = torch.Generator().manual_seed(0)
    amax = torch.ldexp(torch.randn(DRAWS, generator=generator), torch.randint(-40, 40, (DRAWS,), generator=generator))
    amax = amax.abs().to(dtype).float()
    return amax, (amax * (2 * torch.rand(DRAWS, generator=generator) - 1)).to(dtype).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_and_quotients_are_rounded_as_divisions(dtype):
    amax, x = draw(dtype)
    scales, quotients = (torch.full((DRAWS,), torch.nan, device=DEVICE) for _ in range(2))
    quotients_kernel[(DRAWS // 1024,)](amax.to(DEVICE), x.to(DEVICE), scales, quotients, BLOCK=1024)
    # numpy: torch divides by a Python number through its reciprocal on CUDA
    expected = amax.numpy() / np.float32(127)
    assert np.array_equal(scales.cpu().numpy(), expected)
    assert np.array_equal(quotients.cpu().numpy(), x.numpy() / expected)


def test_scales_of_zero_infinity_and_nan():
    amax = torch.tensor([0.0, torch.inf, torch.nan, 127.0] * 256, device=DEVICE)
    scales, quotients = (torch.empty_like(amax) for _ in range(2))
    quotients_kernel[(1,)](amax, torch.zeros_like(amax), scales, quotients, BLOCK=1024)
    torch.testing.assert_close(
        scales[:4].cpu(), torch.tensor([1.0, torch.nan, torch.nan, 1.0]), equal_nan=True, rtol=0, atol=0
    )


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="needs a long double of 64 bits or more")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("units", [-1, 0, 1])
def test_a_reciprocal_off_by_a_unit_in_the_last_place_does(dtype, units):
    """What the kernels compute on a GPU, in numpy: the interpreter divides."""

    def fma(a, b, c):
        return (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(np.float32)

    def quotient(x, scale, inverse):
        first = x * inverse
        return fma(fma(first, -scale, x), inverse, first)

    amax, x = (values.numpy() for values in draw(dtype))
    levels = np.full_like(amax, 127)
    scale = quotient(amax, levels, np.float32(1) / levels)
    assert np.array_equal(scale, amax / np.float32(127))
    inverse = ((np.float32(1) / scale).view(np.int32) + units).view(np.float32)
    assert np.array_equal(quotient(x, scale, inverse), x / scale)
