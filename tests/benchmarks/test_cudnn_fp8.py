"""cuDNN's FP8 attention as a peer, with a stand-in for cuDNN: casts, scales, and what its graphs are given."""

import math

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


class Cudnn:
    """What cuDNN's graphs compute, of tensors by name, in FP32 with FP8 where cuDNN has it."""

    def __init__(self, monkeypatch):
        self.calls, self.built = [], []
        monkeypatch.setattr(cudnn_fp8, "forward_graph", self.forward_graph)
        monkeypatch.setattr(cudnn_fp8, "backward_graph", self.backward_graph)

    def forward_graph(self, layouts, is_causal, scale, device):
        self.built.append(("forward", layouts))
        return lambda tensors: self.forward(tensors, is_causal, scale)

    def backward_graph(self, layouts, dtype, is_causal, scale, device):
        self.built.append(("backward", layouts))
        return lambda tensors: self.backward(tensors, dtype, is_causal, scale)

    @staticmethod
    def restored(x, name):
        value = x[name].float() * x[f"descale_{name}"]
        groups = x["q"].shape[1] // value.shape[1]
        return value.repeat_interleave(groups, 1)

    @staticmethod
    def probabilities(x, is_causal, scale, stats=None):
        scores = scale * Cudnn.restored(x, "q") @ Cudnn.restored(x, "k").mT
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        stats = scores.logsumexp(-1, keepdim=True) if stats is None else stats
        return (scores - stats).exp(), stats

    @staticmethod
    def rounded(value, scale, dtype):
        most = torch.finfo(dtype).max
        return (value * scale).clamp(-most, most).to(dtype)

    def write(self, x, name, value, dtype):
        x[f"largest_{name}"].copy_(torch.maximum(x[f"largest_{name}"], value.abs().max()))
        return self.rounded(value, x[f"scale_{name}"], dtype)

    def forward(self, x, is_causal, scale):
        p, stats = self.probabilities(x, is_causal, scale)
        p = self.rounded(p, x["scale_s"], E4M3).float() * x["descale_s"]
        x["stats"].copy_(stats)
        x["largest_s"].fill_(1.0)
        x["o"].copy_(self.write(x, "o", p @ self.restored(x, "v"), E4M3))
        self.calls.append(("forward", x["scale_o"].item()))

    def backward(self, x, dtype, is_causal, scale):
        p, _ = self.probabilities(x, is_causal, scale, x["stats"])
        do, o = (self.restored(x, name) for name in ("do", "o"))
        ds = scale * p * (do @ self.restored(x, "v").mT - (do * o).sum(-1, keepdim=True))
        ds = self.write(x, "dp", ds, dtype).float() * x["descale_dp"]
        p = self.rounded(p, x["scale_s"], E4M3).float() * x["descale_s"]
        kv_heads = x["k"].shape[1]
        of_heads = {"dq": ds @ self.restored(x, "k"), "dk": ds.mT @ self.restored(x, "q"), "dv": p.mT @ do}
        for name, value in of_heads.items():
            if name != "dq":
                value = value.unflatten(1, (kv_heads, -1)).sum(2)
            x[name].copy_(self.write(x, name, value, dtype))
        self.calls.append(("backward", x["scale_dp"].item()))


@pytest.mark.rounding
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_with_cudnn_s_part_stood_in_for(monkeypatch, is_causal, dtype):
    cudnn = Cudnn(monkeypatch)
    q, do = gaussian(1, 4, 60, 128), gaussian(1, 4, 60, 128, seed=3) / 100
    k, v = gaussian(1, 2, 60, 128, seed=1), 5 * gaussian(1, 2, 60, 128, seed=2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = cudnn_fp8.attention(*leaves, is_causal=is_causal, gradients=dtype)
    gradients = torch.autograd.grad(o, leaves, do, retain_graph=True)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=is_causal, enable_gqa=True)
    right = torch.autograd.grad(expected, exact, do.double())
    for actual, reference in zip((o, *gradients), (expected, *right)):
        assert actual.dtype == torch.bfloat16
        assert actual.shape == reference.shape
        assert relative_l2(actual, reference) < 0.25
    assert [way for way, _ in cudnn.calls] == ["forward"] * 3 + ["backward"] * 3  # the first call of a shape
    scale_o, scale_dp = cudnn.calls[2][1], cudnn.calls[5][1]
    assert scale_o == pytest.approx(448 / o.abs().max().item(), rel=0.1)
    assert scale_dp > 10 * cudnn.calls[3][1]  # dS is far below 1

    torch.autograd.grad(cudnn_fp8.attention(*leaves, is_causal=is_causal, gradients=dtype), leaves, do)
    assert [way for way, _ in cudnn.calls[6:]] == ["forward", "backward"]
    assert cudnn.calls[6][1] == pytest.approx(scale_o)
    assert len(cudnn.built) == 2
    cudnn_fp8.attention(q[:, :, :32], k[:, :, :32], v[:, :, :32])
    assert len(cudnn.built) == 3


def test_another_width_is_refused():
    x = gaussian(1, 1, 8, 64)
    with pytest.raises(NotImplementedError, match="head_dim=64: cuDNN's FP8 backward on Hopper takes 128"):
        cudnn_fp8.attention(x, x, x)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(cudnn_fp8.importlib, "import_module", missing)
    with pytest.raises(
        ValueError, match=r"pip install --no-deps nvidia-cudnn-frontend==1.32.0\): No module named 'cudnn'"
    ):
        cudnn_fp8.frontend()
