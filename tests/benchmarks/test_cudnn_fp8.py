"""cuDNN's FP8 attention as a peer, with a stand-in for cuDNN: casts, scales, and what its graphs are given."""

import importlib
import math
import types

import pytest
import torch
import triton.language as tl

from benchmarks import cudnn_fp8, float8_casts
from benchmarks.cudnn_fp8 import E4M3, E5M2
from sagebwd.reference.metrics import relative_l2

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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


def test_a_tensor_of_zeros_stays_finite():
    codes, descales = float8_casts.to_float8([torch.zeros(1, 1, 8, 128, device=DEVICE)], E4M3)
    (back,) = float8_casts.from_float8(codes, descales, torch.float32)
    assert back.eq(0).all()


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


class Anything:
    """A tensor of a graph: every setter returns it."""

    def __init__(self, **described):
        self.described = described

    def __getattr__(self, name):
        def set_it(value):
            self.described[name] = value
            return self

        return set_it


class PyGraph:
    """Takes what cudnn.pygraph takes, and keeps it."""

    def __init__(self, refuses=False, **settings):
        self.refuses, self.settings, self.ran = refuses, settings, []

    def tensor(self, **described):
        return Anything(**described)

    def sdpa_fp8(self, **arguments):
        self.arguments, self.outputs = arguments, [Anything() for _ in range(4)]
        return self.outputs

    def sdpa_fp8_backward(self, **arguments):
        self.arguments, self.outputs = arguments, [Anything() for _ in range(7)]
        return self.outputs

    def validate(self):
        if self.refuses:
            raise RuntimeError("hidden_dim should be 128\nand more")

    def build_operation_graph(self): ...

    def create_execution_plans(self, modes):
        assert modes == ["A", "FALLBACK"]

    def check_support(self): ...

    def build_plans(self): ...

    def get_workspace_size(self):
        return 24

    def execute(self, tensors, workspace, handle):
        self.ran.append((tensors, workspace.numel(), handle))


@pytest.fixture
def package(monkeypatch):
    """A stand-in for the module cudnn."""
    fake = types.SimpleNamespace(
        data_type=types.SimpleNamespace(FP8_E4M3="e4m3", FP8_E5M2="e5m2", FLOAT="float"),
        heur_mode=types.SimpleNamespace(A="A", FALLBACK="FALLBACK"),
        pygraph=PyGraph, backend_version_string=lambda: "9.99.0",
    )  # fmt: skip
    monkeypatch.setattr(cudnn_fp8, "frontend", lambda: fake)
    monkeypatch.setattr(cudnn_fp8, "_handle", lambda device: "handle")
    return fake


OF_Q = (1, 4, 64, 128), (4 * 64 * 128, 64 * 128, 128, 1)
OF_K = (1, 2, 64, 128), (2 * 64 * 128, 64 * 128, 128, 1)


def test_the_graphs_describe_every_tensor(package):
    cpu = torch.device("cpu")
    forward = cudnn_fp8.forward_graph((OF_Q, OF_K, OF_K), True, 0.5, cpu)
    arguments = forward.graph.arguments
    assert (arguments["use_causal_mask"], arguments["attn_scale"], arguments["generate_stats"]) == (True, 0.5, True)
    assert {x.described["data_type"] for name, x in arguments.items() if name in "qkv"} == {"e4m3"}
    assert all(x.described["set_output"] for x in forward.graph.outputs)
    assert sorted(forward.uids.values()) == list(range(1, len(forward.uids) + 1))
    backward = cudnn_fp8.backward_graph((OF_Q, OF_K, OF_K, OF_Q, OF_Q), E5M2, False, 0.5, cpu)
    arguments = backward.graph.arguments
    assert {name for name in arguments if name.startswith("scale_")} == {
        "scale_s", "scale_dP", "scale_dQ", "scale_dK", "scale_dV",
    }  # fmt: skip
    assert {name for name in arguments if name.startswith("descale_")} == {
        "descale_q", "descale_k", "descale_v", "descale_o", "descale_s", "descale_dO", "descale_dP",
    }  # fmt: skip
    dq, dk, dv, largest_dq, largest_dk, largest_dv, largest_dp = backward.graph.outputs
    assert [x.described["set_data_type"] for x in (dq, dk, dv)] == ["e5m2"] * 3
    assert arguments["dO"].described["data_type"] == "e5m2"
    assert [x.described["set_dim"] for x in (dq, dk, dv)] == [list(OF_Q[0]), list(OF_K[0]), list(OF_K[0])]
    uids = [x.described["set_uid"] for x in (largest_dp, largest_dq, largest_dk, largest_dv)]
    assert uids == [backward.uids[f"largest_{name}"] for name in ("dp", "dq", "dk", "dv")]


def test_every_name_of_a_graph_is_given_when_it_runs(package, monkeypatch):
    graphs = []

    def built(make):
        def build(*arguments):
            graph = make(*arguments)
            graphs.append(graph)
            return lambda tensors: ran.append({name: tensors[name] for name in graph.uids})

        return build

    ran = []
    for name in ("forward_graph", "backward_graph"):
        monkeypatch.setattr(cudnn_fp8, name, built(getattr(cudnn_fp8, name)))
    q, k = gaussian(1, 4, 64, 128).requires_grad_(), gaussian(1, 2, 64, 128)
    o = cudnn_fp8.attention(q, k, k)
    torch.autograd.grad(o, [q], torch.ones_like(o))
    assert len(graphs) == 2
    assert len(ran) == 2 * cudnn_fp8.FIRST_RUNS
    for tensors in ran:
        assert all(x.shape == (1, 1, 1, 1) for name, x in tensors.items() if "scale_" in name or "largest_" in name)


def test_a_refusal_is_in_cudnn_s_words(package):
    package.pygraph = lambda **settings: PyGraph(refuses=True, **settings)
    with pytest.raises(NotImplementedError, match=r"^cuDNN 9.99.0 refuses: hidden_dim should be 128"):
        cudnn_fp8.forward_graph((OF_Q, OF_K, OF_K), True, 0.5, torch.device("cpu"))


def test_the_package_of_this_machine_is_what_is_imported(monkeypatch):
    asked = []
    monkeypatch.setattr(importlib, "import_module", lambda name: asked.append(name) or types)
    assert cudnn_fp8.frontend() is types
    assert asked == ["cudnn"]
