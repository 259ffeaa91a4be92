"""cuDNN's FP8 attention, forward and backward, as a low-bit peer: BF16 in and out, what FP8 training pays within.

    python -m benchmarks.cudnn_fp8 [--tokens 1024] [--heads 4] [--batch 1]

prints, on a GPU, its errors against FP32 attention, its largest values and its times, and cuDNN's words where it
refuses. It needs nvidia-cudnn-frontend, whose graph operations sdpa_fp8 and sdpa_fp8_backward these are, and computes
with the cuDNN library of torch.

On Hopper cuDNN takes head_dim 128 alone in the backward, and writes O and the gradients as FP8: its frontend refuses
BF16 outputs there. So a call casts q, k and v (in backward dO) by current scaling, and casts O (dQ, dK and dV) back to
BF16. Scales of what cuDNN itself rounds to FP8, which are O, dS, dQ, dK and dV, are delayed: by the largest values of
the call before of the same shape. The first call of a shape runs its graph a few times for that history. So a
benchmark, whose inputs do not change, times and judges it with the best scales that there are. P is scaled by 448, the
largest number of E4M3: it is at most 1.

Workspaces are kept with the graphs of a few shapes, and are not in the memory that
`python -m benchmarks attention` measures.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import traceback
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.float8_casts import DelayedScales, from_float8, scalars, to_float8
from benchmarks.shapes import Shape
from sagebwd.reference.metrics import relative_l2

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PACKAGE = "nvidia-cudnn-frontend==1.32.0"
HEAD_DIM = 128
GRAPHS = 8
"""Graphs of so many shapes are kept, and their workspaces."""
FIRST_RUNS = 3
"""Until the scales have settled: dQ's follows dS's, which follows what the first run met."""

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""A tensor's shape and strides."""


@cache
def frontend() -> ModuleType:
    """cuDNN's frontend. Raises ValueError where it is not installed."""
    try:
        return importlib.import_module("cudnn")
    except ImportError as error:
        install = f"pip install --no-deps {PACKAGE}"
        raise ValueError(f"cuDNN's FP8 attention needs nvidia-cudnn-frontend ({install}): {error}") from error


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float | None = None,
    gradients: torch.dtype = E5M2,
) -> Tensor:  # fmt: skip
    """O, in the inputs' dtype, differentiable.

    Args: q (batch, heads, tokens, 128), k and v (batch, kv_heads, tokens, 128), of one dtype. gradients: of dO,
    dS, dQ, dK and dV; E5M2 is Transformer Engine's default, and E4M3 its other choice. Raises NotImplementedError for
    another head_dim and for what cuDNN refuses, in its words.
    """
    if {x.shape[-1] for x in (q, k, v)} != {HEAD_DIM}:
        raise NotImplementedError(f"head_dim={q.shape[-1]}: cuDNN's FP8 backward on Hopper takes {HEAD_DIM}")
    return _Attention.apply(q, k, v, is_causal, q.shape[-1] ** -0.5 if scale is None else scale, gradients)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal, scale, gradients):
        codes, descales = to_float8((q, k, v), E4M3)
        layouts = tuple(_layout(x) for x in codes)
        o = torch.empty_like(codes[0])
        stats = torch.empty((*q.shape[:-1], 1), dtype=torch.float32, device=q.device)
        inputs = dict(zip("qkv", codes)) | _rows(("descale_q", "descale_k", "descale_v"), descales)
        run = _forward(layouts, is_causal, scale, q.device)
        descale_o = run(inputs | {"o": o, "stats": stats})
        ctx.save_for_backward(*codes, o, stats, descales, descale_o)
        ctx.settings = is_causal, scale, gradients
        return from_float8([o], descale_o, q.dtype)[0]

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, stats, descales, descale_o = ctx.saved_tensors
        is_causal, scale, dtype = ctx.settings
        (codes,), descale_do = to_float8((do,), dtype)
        inputs = {"q": q, "k": k, "v": v, "o": o, "do": codes, "stats": stats}
        inputs |= _rows(("descale_q", "descale_k", "descale_v"), descales)
        inputs |= _rows(("descale_o",), descale_o) | _rows(("descale_do",), descale_do)
        gradients = [torch.empty_like(x, dtype=dtype) for x in (q, k, v)]
        layouts = tuple(_layout(x) for x in (q, k, v, o, codes))
        run = _backward(layouts, dtype, is_causal, scale, q.device)
        restore = run(inputs | dict(zip(("dq", "dk", "dv"), gradients)))
        return *from_float8(gradients, restore[1:], do.dtype), None, None, None


class Graph:
    """One of cuDNN's graphs: its tensors by name, the plan that it chose, and a workspace."""

    def __init__(self, device: torch.device) -> None:
        cudnn, self.device = frontend(), device
        types = cudnn.data_type
        self.types = {E4M3: types.FP8_E4M3, E5M2: types.FP8_E5M2, torch.float32: types.FLOAT}
        self.handle = _handle(device)
        self.graph = cudnn.pygraph(
            io_data_type=types.FP8_E4M3, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT,
            handle=self.handle,
        )  # fmt: skip
        self.uids: dict[str, int] = {}

    def _describe(self, name: str) -> int:
        return self.uids.setdefault(name, len(self.uids) + 1)

    def input(self, name: str, layout: Layout, dtype: torch.dtype) -> object:
        """Declare an input."""
        shape, stride = layout
        return self.graph.tensor(
            dim=list(shape), stride=list(stride), data_type=self.types[dtype], name=name, uid=self._describe(name)
        )

    def scalars(self, *names: str) -> dict[str, object]:
        """Declare scales and descales: FP32 scalars on the device."""
        return {name: self.input(name, SCALAR, torch.float32) for name in names}

    def output(self, name: str, tensor: object, layout: Layout, dtype: torch.dtype) -> None:
        """Ask for an output of an operation."""
        shape, stride = layout
        tensor.set_output(True).set_uid(self._describe(name))
        tensor.set_dim(list(shape)).set_stride(list(stride)).set_data_type(self.types[dtype])

    def build(self) -> None:
        """Choose a plan and make room for its workspace. Raises NotImplementedError with cuDNN's words."""
        cudnn, graph = frontend(), self.graph
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
            size = graph.get_workspace_size()
        except Exception as error:  # its own types, and whatever pybind makes of C++'s
            version = cudnn.backend_version_string()
            raise NotImplementedError(f"cuDNN {version} refuses: {str(error) or repr(error)}") from error
        self.workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=self.device)

    def __call__(self, tensors: dict[str, Tensor]) -> None:
        """Run it on the current stream; every name that was declared has its tensor."""
        frontend().set_stream(self.handle, torch.cuda.current_stream(self.device).cuda_stream)
        data = {uid: tensors[name] for name, uid in self.uids.items()}
        self.graph.execute(data, self.workspace, handle=self.handle)


class Run:
    """A graph with the scales of what it writes as FP8.

    Args: names, of those tensors, of which the graph has an input scale_NAME and an output largest_NAME, and may have
    an input descale_NAME; dtypes, theirs. constants: inputs that stay, and outputs that nobody reads.
    """

    def __init__(
        self, graph: Callable[[dict[str, Tensor]], None], names: tuple[str, ...], dtypes: tuple[torch.dtype, ...],
        constants: dict[str, Tensor], device: torch.device,
    ) -> None:  # fmt: skip
        self.graph, self.names = graph, names
        self.delayed = DelayedScales(dtypes, device)
        self.constants = constants | _rows([f"largest_{x}" for x in names], self.delayed.largest)
        self.has_run = False

    def __call__(self, tensors: dict[str, Tensor]) -> Tensor:
        """What each of the tensors of ``names`` is to be multiplied by, a row each."""
        for _ in range(1 if self.has_run else FIRST_RUNS):
            scales, descales = self.delayed.next()
            rows = _rows([f"scale_{x}" for x in self.names], scales)
            rows |= _rows([f"descale_{x}" for x in self.names], descales)
            self.graph(rows | self.constants | tensors)
        self.has_run = True
        return descales


SCALAR: Layout = (1, 1, 1, 1), (1, 1, 1, 1)
OF_P = "descale_s", "scale_s"
OF_INPUTS = "descale_q", "descale_k", "descale_v"
WRITTEN = "dp", "dq", "dk", "dv"
"""By the backward as FP8; cuDNN calls dS, which is P (dP - delta) and the softmax's scale, dP."""


@lru_cache(GRAPHS)
def _forward(layouts: tuple[Layout, ...], is_causal: bool, scale: float, device: torch.device) -> Run:
    constants = _of_p(device) | _rows(("largest_s",), scalars(1, device))
    return Run(forward_graph(layouts, is_causal, scale, device), ("o",), (E4M3,), constants, device)


@lru_cache(GRAPHS)
def _backward(
    layouts: tuple[Layout, ...], dtype: torch.dtype, is_causal: bool, scale: float, device: torch.device
) -> Run:
    graph = backward_graph(layouts, dtype, is_causal, scale, device)
    return Run(graph, WRITTEN, (dtype,) * len(WRITTEN), _of_p(device), device)


def forward_graph(layouts: tuple[Layout, ...], is_causal: bool, scale: float, device: torch.device) -> Graph:
    """O and the softmax's logarithms of q, k and v of such layouts; O has q's."""
    graph = Graph(device)
    operands = {name: graph.input(name, layout, E4M3) for name, layout in zip("qkv", layouts)}
    o, stats, largest_s, largest_o = graph.graph.sdpa_fp8(
        **operands, **graph.scalars(*OF_INPUTS, *OF_P, "scale_o"), generate_stats=True, attn_scale=scale,
        use_causal_mask=is_causal,
    )  # fmt: skip
    graph.output("o", o, layouts[0], E4M3)
    graph.output("stats", stats, _of_stats(layouts[0]), torch.float32)
    graph.output("largest_s", largest_s, SCALAR, torch.float32)
    graph.output("largest_o", largest_o, SCALAR, torch.float32)
    graph.build()
    return graph


def backward_graph(
    layouts: tuple[Layout, ...], dtype: torch.dtype, is_causal: bool, scale: float, device: torch.device
) -> Graph:
    """dQ, dK and dV of q, k, v, o and do of such layouts; ``dtype`` is theirs and do's."""
    graph = Graph(device)
    operands = {name: graph.input(name, layout, E4M3) for name, layout in zip("qkvo", layouts)}
    operands |= {"dO": graph.input("do", layouts[4], dtype)}
    operands |= {"stats": graph.input("stats", _of_stats(layouts[0]), torch.float32)}
    scales = graph.scalars(*OF_INPUTS, *OF_P, "descale_o")
    for ours in ("descale_do", "descale_dp", "scale_dp", "scale_dq", "scale_dk", "scale_dv"):
        theirs = ours[:-1] + ours[-1].upper()  # descale_dO
        scales[theirs] = graph.scalars(ours)[ours]
    *gradients, largest_dq, largest_dk, largest_dv, largest_dp = graph.graph.sdpa_fp8_backward(
        **operands, **scales, attn_scale=scale, use_causal_mask=is_causal
    )
    for name, tensor, layout in zip(("dq", "dk", "dv"), gradients, layouts):
        graph.output(name, tensor, layout, dtype)
    for name, tensor in zip(WRITTEN, (largest_dp, largest_dq, largest_dk, largest_dv)):
        graph.output(f"largest_{name}", tensor, SCALAR, torch.float32)
    graph.build()
    return graph


@cache
def _handle(device: torch.device) -> object:
    with torch.cuda.device(device):
        return frontend().create_handle()


def _of_p(device: torch.device) -> dict[str, Tensor]:
    scale = torch.finfo(E4M3).max
    rows = scalars(2, device)
    rows[0], rows[1] = 1 / scale, scale
    return _rows(OF_P, rows)


def _layout(x: Tensor) -> Layout:
    return tuple(x.shape), x.stride()


def _of_stats(of_q: Layout) -> Layout:
    batch, heads, tokens, _ = of_q[0]
    return (batch, heads, tokens, 1), (heads * tokens, tokens, 1, 1)


def _rows(names: tuple[str, ...] | list[str], rows: Tensor) -> dict[str, Tensor]:
    """Scalars by name, each of a row."""
    return {name: row[:1].view(1, 1, 1, 1) for name, row in zip(names, rows)}


def main(arguments: list[str] | None = None) -> None:
    """Print errors, largest values and times on a GPU, of each mask, layout and gradients' type."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name, default in (("tokens", 1024), ("heads", 4), ("kv-heads", 4), ("batch", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args(arguments)
    cudnn = frontend()
    print(f"{torch.cuda.get_device_name()}, cuDNN {cudnn.backend_version_string()}, frontend {cudnn.__version__}")
    for is_causal in (False, True):
        shape = Shape(HEAD_DIM, asked.heads, asked.kv_heads, asked.batch, asked.tokens, is_causal)
        inputs = shape.inputs("cuda", torch.bfloat16)
        for layout, dtype in itertools.product(("heads first", "tokens first"), (E5M2, E4M3)):
            placed = inputs if layout == "heads first" else [_tokens_first(x) for x in inputs]
            print(f"{shape}, {layout}, gradients {dtype}")
            try:
                _report(shape, placed, dtype)
            except Exception:  # what the next ones do is worth knowing
                traceback.print_exc()


def _report(shape: Shape, inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
    *tensors, do = inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attention(*leaves, is_causal=shape.is_causal, gradients=dtype)
    exact = [x.detach().float().requires_grad_() for x in tensors]
    expected = F.scaled_dot_product_attention(*exact, is_causal=shape.is_causal, enable_gqa=True)
    computed = out, *torch.autograd.grad(out, leaves, do, retain_graph=True)
    right = expected, *torch.autograd.grad(expected, exact, do.float())
    for name, ours, theirs in zip(("o", "dq", "dk", "dv"), computed, right):
        largest, of = (x.abs().max().item() for x in (ours, theirs))
        print(f"  {name} {relative_l2(ours, theirs):.4f}, largest {largest:.3g} of {of:.3g}")
    of_q, of_k, of_v, of_do = map(_layout, inputs)
    same = shape.is_causal, HEAD_DIM**-0.5, out.device
    for run in (_forward((of_q, of_k, of_v), *same), _backward((of_q, of_k, of_v, of_q, of_do), dtype, *same)):
        met = dict(zip(run.names, run.delayed.largest[:, 0].tolist()))
        print("  cuDNN met at most", ", ".join(f"{name} {value:.3g}" for name, value in met.items()))
    times = {
        "forward": lambda: attention(*leaves, is_causal=shape.is_causal, gradients=dtype),
        "backward": lambda: torch.autograd.grad(out, leaves, do, retain_graph=True),
    }
    for name, run in times.items():
        for _ in range(10):
            run()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            run()
        stop.record()
        stop.synchronize()
        print(f"  {name} {start.elapsed_time(stop) / 20:.3f} ms")


def _tokens_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


if __name__ == "__main__":
    main()
