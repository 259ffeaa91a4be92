"""cuDNN's FP8 attention as a peer, with a stand-in for cuDNN: casts, scales, and what its graphs are given."""

import pytest
import torch
import triton.language as tl

from benchmarks import cudnn_fp8, float8_casts
from benchmarks.cudnn_fp8 import E4M3, E5M2
from sagebwd.reference.metrics import relative_l2
from tests.gpus import DEVICE

STEP = {E4M3: 1 / 8, E5M2: 1 / 4}
"""From one number to the next, relative: Triton's interpreter errs by up to one, a GPU by half of it."""


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(float8_casts, "PROGRAMS", tl.constexpr(4))


@pytest.fixture(autouse=True)
def no_graph_kept():
    caches = cudnn_fp8.frontend, cudnn_fp8._forward, cudnn_fp8._backward, cudnn_fp8._handle
    for kept in caches:
        kept.cache_clear()
    yield
    for kept in caches:
        kept.cache_clear()


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_three_tensors_have_a_scale_each(dtype):
    tensors = [gaussian(1, 4, 70, 128), 30 * gaussian(1, 2, 70, 128, seed=1), gaussian(1, 2, 70, 128, seed=2) / 1000]
    codes, descales = float8_casts.to_float8(tensors, dtype)
    largest = [x.abs().max().float().item() for x in tensors]
    assert descales[:, 0].tolist() == pytest.approx([x / torch.finfo(dtype).max for x in largest], rel=1e-5)
    assert {x.dtype for x in codes} == {dtype}
    for x, code, back in zip(tensors, codes, float8_casts.from_float8(codes, descales, torch.bfloat16)):
        assert code.float().abs().max() <= torch.finfo(dtype).max
        assert back.dtype == torch.bfloat16
        assert 1e-3 < relative_l2(back, x) < STEP[dtype]


@pytest.mark.rounding
def test_codes_lie_as_their_tensor_does():
    rows = gaussian(1, 70, 3, 128)
    (first,), _ = float8_casts.to_float8([rows.transpose(1, 2)], E5M2)
    (second,), _ = float8_casts.to_float8([rows], E5M2)
    assert first.stride() == rows.transpose(1, 2).stride()
    assert torch.equal(first.transpose(1, 2).float(), second.float())
    one = rows[:, :1, :1].expand(1, 70, 3, 128)  # memory that many share
    (codes,), descales = float8_casts.to_float8([one], E5M2)
    (back,) = float8_casts.from_float8([codes], descales, torch.bfloat16)
    assert relative_l2(back, one) < STEP[E5M2]


def test_delayed_scales_follow_the_call_before():
    delayed = float8_casts.DelayedScales((E4M3, E5M2), torch.device(DEVICE))
    scales, descales = delayed.next()
    assert scales[:, 0].tolist() == [448, 57344]
    assert delayed.largest[:, 0].tolist() == [0, 0]  # a kernel raises it
    delayed.largest[:, 0] = torch.tensor([2.0, 0.5])
    scales, descales = delayed.next()
    assert scales[:, 0].tolist() == [224, 114688]
    assert descales[:, 0].tolist() == pytest.approx([1 / 224, 1 / 114688])
