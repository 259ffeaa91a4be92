"""What trains a head_dim beyond 256 in full precision: torch's other backends, and FlexAttention in tiles that fit.

FlexAttention rounds such a head_dim up to 512, and its own tiles do not fit an H200's shared memory there or are the
smallest there are. `tiles` tries a few, once, at `TRIED`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial

import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.shapes import Shape
from benchmarks.timer import from_rest
from sagebwd.cli.processes import run_in_processes

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Tile = tuple[int, ...]

# Queries, keys, stages and warps; and of backward queries and keys of dK and dV's loop and of dQ's, stages and warps.
FORWARD: tuple[Tile, ...] = (
    (64, 32, 2, 4), (64, 32, 2, 8), (64, 64, 1, 8), (128, 32, 1, 8), (64, 64, 1, 4), (32, 32, 2, 4),
)  # fmt: skip
BACKWARD: tuple[Tile, ...] = (
    (32, 32, 32, 32, 1, 4), (32, 32, 32, 32, 1, 8), (32, 64, 64, 32, 1, 8), (16, 32, 32, 16, 1, 4),
    (16, 16, 16, 16, 1, 4), (64, 64, 64, 64, 1, 8),
)  # fmt: skip
_FORWARD_NAMES = "BLOCK_M", "BLOCK_N", "num_stages", "num_warps"
_BACKWARD_NAMES = "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_stages", "num_warps"
TRIED = Shape(512, 8, 8, 4, 4096, True)
MATH_TOKENS = 8192
"""As many, at most, torch's attention of plain products gets: it holds several matrices of all scores in FP32."""
TRIALS = 3


def candidates(shape: Shape, device: str) -> dict[str, Attention]:
    """Whether they take the shape or not: efficient, math, cudnn, fa2 and flex; on a CPU "sdpa" alone."""
    backends = {
        "efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
        "fa2": SDPBackend.FLASH_ATTENTION,
    }  # fmt: skip
    if shape.tokens <= MATH_TOKENS:
        backends["math"] = SDPBackend.MATH
    mask = None if shape.window is None else shape.band.mask(*(torch.arange(shape.tokens, device=device),) * 2)
    if not device.startswith("cuda"):
        return {"sdpa": partial(_sdpa, SDPBackend.MATH, shape, mask)}
    found = {name: partial(_sdpa, backend, shape, mask) for name, backend in backends.items()}
    return found | {"flex": flex(shape, device)}


def _sdpa(backend: SDPBackend, shape: Shape, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Key heads are repeated: the memory-efficient backend takes no grouped ones."""
    if shape.heads != shape.kv_heads:
        k, v = (x.repeat_interleave(shape.heads // shape.kv_heads, 1) for x in (k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and shape.is_causal)


def flex(shape: Shape, device: str) -> Attention:
    """FlexAttention in the best tiles, compiled by the first call."""

    @cache
    def attention() -> Attention:
        best = tiles(device)
        torch._dynamo.reset()  # or all shapes' graphs are one function's, and beyond eight of these none is compiled
        return _compiled(shape, device, *best)

    return lambda *call: attention()(*call)


def options(forward: Tile, backward: Tile) -> dict[str, int]:
    """Tiles as FlexAttention takes them."""
    found = {f"fwd_{name}": size for name, size in zip(_FORWARD_NAMES, forward)}
    return found | {f"bwd_{name}": size for name, size in zip(_BACKWARD_NAMES, backward)}


@cache
@torch._functorch.config.patch(donated_buffer=False)  # as `_call`
def tiles(device: str) -> tuple[Tile, Tile]:
    """The fastest of `FORWARD` and of `BACKWARD`, each timed beside one of the other; those that do not fit are left
    out. Raises RuntimeError where none runs."""
    times: tuple[dict[Tile, float], dict[Tile, float]] = {}, {}
    inputs = TRIED.inputs(device, torch.bfloat16)
    for pair in zip(FORWARD, BACKWARD):
        # a tile of forward that does not fit leaves its backward untried, which then gets the first
        for one in (pair, (FORWARD[0], pair[1])):
            with suppress(Exception):  # a compiler of another project raises what it likes
                found = _times(one, device, inputs)
                for known, tile, ms in zip(times, one, found):
                    known[tile] = min(ms, known.get(tile, ms))
                break
    if not all(times):
        raise RuntimeError("FlexAttention runs in none of the tiles")
    best = tuple(min(known, key=known.get) for known in times)
    print(f"FlexAttention's tiles at {TRIED}, ms: forward {times[0]}, backward {times[1]}; best {best}", flush=True)
    return best


def _times(pair: tuple[Tile, Tile], device: str, inputs: tuple[Tensor, ...]) -> tuple[float, float]:
    """Least ms of forward and of backward by themselves."""
    torch._dynamo.reset()
    attention, (*tensors, do) = _compiled(TRIED, device, *pair), inputs
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attention(*leaves)
    runs = (
        lambda: attention(*leaves),
        lambda: torch.autograd.grad(out, leaves, do, retain_graph=True),
    )
    for run in runs:
        run()
    return tuple(min(from_rest(run, device)[1] for _ in range(TRIALS)) for run in runs)


def _compiled(shape: Shape, device: str, *pair: Tile) -> Attention:
    run = torch.compile(flex_attention, dynamic=False)
    mask, given = _block_mask(shape, device), options(*pair)
    return lambda q, k, v: run(
        q, k, v, block_mask=mask, enable_gqa=shape.heads != shape.kv_heads, kernel_options=given
    )  # fmt: skip


def _block_mask(shape: Shape, device: str) -> BlockMask:
    span = shape.tokens if shape.window is None else shape.window

    def shown(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k <= span)

    return create_block_mask(shown, None, None, shape.tokens, shape.tokens, device=device)


def compile_ahead(shapes: Iterable[Shape], device: str, processes: int) -> None:
    """Compile FlexAttention for the shapes in several processes: what they compile stays on disk."""
    pairs = list(zip(FORWARD, BACKWARD))
    for _ in run_in_processes(_call, [(TRIED, device, *pair) for pair in pairs], min(processes, len(pairs))):
        pass
    best, others = tiles(device), [shape for shape in shapes if shape != TRIED]
    for _ in run_in_processes(_call, [(shape, device, *best) for shape in others], min(processes, len(others))):
        pass


# as `benchmarks.attention.measure_shape`, or its graphs are other ones
@torch._functorch.config.patch(donated_buffer=False)
def _call(shape: Shape, device: str, *pair: Tile) -> None:
    torch._inductor.config.compile_threads = 1  # the processes are as many as there is work for
    *tensors, do = shape.inputs(device, torch.bfloat16)
    leaves = [x.requires_grad_() for x in tensors]
    torch.autograd.grad(_compiled(shape, device, *pair)(*leaves), leaves, do)
