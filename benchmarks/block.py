"""Speed and memory of what a decoder's attention is: norm of Q and K, rotary embedding, attention, end to end.

`sagebwd.qk_norm_rope_attention` beside torch.compile's norm and rotary embedding with the best BF16 attentions, and
with `sagebwd.sage_attention`; the norm and the rotary embedding by themselves too. All of a shape take turns in rounds
and are compared by the median. Queries, keys and values lie as projections write them, heads of a token side by side.
Before anything is timed, outputs and gradients of a short form are held against the composition in FP64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention import memory
from benchmarks.baselines import candidates, refusal
from benchmarks.shapes import MODEL_WIDTH, TOTAL_TOKENS, Shape
from sagebwd import qk_norm_rope, qk_norm_rope_attention, sage_attention
from sagebwd.cli.timer import ROUNDS, time_interleaved
from sagebwd.reference.metrics import relative_l2

FORWARD, BOTH = DIRECTIONS = ("fwd", "fwd+bwd")
BLOCK, PASS = PARTS = ("block", "norm and rotary embedding")
FUSED, COMPOSED, COMPILED = "sagebwd", "compiled + sagebwd", "compiled"
EPS, BASE = 1e-6, 10000.0
WORST = {BLOCK: 0.15, PASS: 0.02}
"""Relative L2 from FP64 above which an output or a gradient is wrong: a mistake is of the size of the tensor."""
NAMES = ("o", "dq", "dk", "dv", "dq_weight", "dk_weight")

Block = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Measurement:
    """One row of the result file; times in ms, memory in bytes beyond the inputs (`benchmarks.attention.memory`).

    part: of `PARTS`. name: `FUSED`, `COMPOSED`, `COMPILED` (of the pass alone), or a baseline of the compiled pass and
    torch's or FlashAttention-4's or -3's attention. recipe: of the first two. gate: "ok", the tensors that are wrong,
    or why it does not run backward. over: the time of each other that is right over this one's, of rows that are
    right. errors: relative L2 of a short form from FP64.
    """

    part: str
    name: str
    recipe: str | None
    head_dim: int
    heads: int
    kv_heads: int
    batch: int
    tokens: int
    direction: str
    ms: float | None
    host_ms: float | None
    gate: str
    over: dict[str, float]
    errors: dict[str, float]
    peak_bytes: int | None
    kept_bytes: int | None


def shapes(
    head_dims: Iterable[int], tokens: Iterable[int], grouped: bool, total: int = TOTAL_TOKENS
) -> list[Shape]:  # fmt: skip
    """Causal calls of heads = 2048 / head_dim, batch x tokens = ``total``; grouped: and of 32 heads of 128 over 8."""
    lengths = list(tokens)
    found = [
        Shape(d, MODEL_WIDTH // d, MODEL_WIDTH // d, max(1, total // n), n, True) for d in head_dims for n in lengths
    ]
    return found + [Shape(128, 32, 8, max(1, total // n), n, True) for n in lengths if grouped]


@dataclass(frozen=True)
class Given:
    """What a block has beside q, k and v: weights (head_dim,), cos and sin (tokens, head_dim)."""

    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, shape: Shape, device: str, dtype: torch.dtype) -> Given:
        """Weights about 1 that need gradients, and Llama's angles."""
        generator = torch.Generator(device).manual_seed(1)
        weights = [
            (1 + 0.1 * torch.randn(shape.head_dim, generator=generator, device=device)).to(dtype).requires_grad_()
            for _ in range(2)
        ]
        powers = torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim
        angles = torch.arange(shape.tokens, device=device)[:, None] * BASE**-powers
        angles = torch.cat((angles, angles), -1)
        return cls(*weights, angles.cos().to(dtype), angles.sin().to(dtype))

    def to(self, dtype: torch.dtype) -> Given:
        """The same numbers in another dtype."""
        weights = (x.detach().to(dtype).requires_grad_() for x in (self.q_weight, self.k_weight))
        return Given(*weights, self.cos.to(dtype), self.sin.to(dtype))


def norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """As a model of torch writes it."""

    def one(x: Tensor, weight: Tensor) -> Tensor:
        x = F.rms_norm(x, x.shape[-1:], weight, EPS)
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    return one(q, q_weight), one(k, k_weight)


def inputs(shape: Shape, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v and do, heads of a token side by side."""
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in shape.inputs(device, dtype))


def blocks(shape: Shape, given: Given, recipe: str, device: str) -> dict[str, Block]:
    """All whose forward takes a shape, by name."""
    tensors = given.q_weight, given.k_weight, given.cos, given.sin
    compiled = _compiled(device)
    settings = {"is_causal": True, "enable_gqa": shape.heads != shape.kv_heads, "recipe": recipe}

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return qk_norm_rope_attention(
            q, k, v, q_weight=given.q_weight, k_weight=given.k_weight, eps=EPS, cos=given.cos, sin=given.sin,
            **settings,
        )  # fmt: skip

    def composed(attention: Block) -> Block:
        return lambda q, k, v: attention(*compiled(q, k, *tensors), v)

    found = {FUSED: fused, COMPOSED: composed(lambda q, k, v: sage_attention(q, k, v, **settings))}
    return found | {
        name: composed(attention)
        for name, attention in candidates(shape, device).items()
        if refusal(attention, shape, device, backward=False) is None
    }


def without_backward(shape: Shape, device: str) -> dict[str, str]:
    """Baselines whose backward does not take a shape, each with why."""
    reasons = {name: refusal(attention, shape, device) for name, attention in candidates(shape, device).items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _compiled(device: str) -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(norm_rope, dynamic=False) if device.startswith("cuda") else norm_rope


def passes(given: Given, device: str) -> dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """The norm and the rotary embedding alone."""
    tensors = given.q_weight, given.k_weight, given.cos, given.sin
    compiled = _compiled(device)
    names = "q_weight", "k_weight", "cos", "sin"
    return {
        FUSED: lambda q, k: qk_norm_rope(q, k, eps=EPS, **dict(zip(names, tensors))),
        COMPILED: lambda q, k: compiled(q, k, *tensors),
    }


def measure_shape(
    shape: Shape, recipe: str, device: str, rounds: int = ROUNDS, *,
    tell: Callable[[str, float], object] = lambda *_: None,
) -> list[Measurement]:  # fmt: skip
    """A row of each part, name and direction."""
    dtype = torch.bfloat16
    torch.compiler.reset()  # or the ninth trace of one function, counted over shapes, would run uncompiled
    tell("checking", 0.0)
    short = replace(shape, batch=1, tokens=min(shape.tokens, 1024))
    errors = _errors(short, recipe, device, dtype)
    given = Given.of(shape, device, dtype)
    q, k, v, do = inputs(shape, device, dtype)
    found: dict[tuple[str, str], tuple[Callable, list[Tensor], tuple[Tensor, ...]]] = {
        (BLOCK, name): (block, [q, k, v], (do,)) for name, block in blocks(shape, given, recipe, device).items()
    }
    gradients = torch.randn_like(q), torch.randn_like(k)
    found |= {(PASS, name): (run, [q, k], gradients) for name, run in passes(given, device).items()}
    refused = {(BLOCK, name): reason for name, reason in without_backward(shape, device).items()}
    used = {
        key: memory(run, (q, k, v, do)) if key[0] == BLOCK and key not in refused else (None, None)
        for key, (run, _, _) in found.items()
    }
    rows = []
    for number, direction in enumerate(DIRECTIONS):
        tell(f"timing {direction}", (1 + number) / (1 + len(DIRECTIONS)))
        absent = refused if direction == BOTH else {}
        runs = {key: _run(*call, given, direction) for key, call in found.items() if key not in absent}
        times = time_interleaved(runs, device, rounds)
        for part, name in found:
            wrong = [x for x, error in errors[part, name].items() if not error <= WORST[part]]
            gate = absent.get((part, name), f"wrong: {', '.join(wrong)}" if wrong else "ok")
            ms, host_ms = times[part, name] if gate == "ok" else (None, None)
            right = {} if ms is None else {
                peer: times[part, peer][0] / ms
                for at, peer in times
                if at == part and peer != name and max(errors[at, peer].values()) <= WORST[at]
            }  # fmt: skip
            ours = recipe if name in (FUSED, COMPOSED) and part == BLOCK else None
            rows.append(
                Measurement(
                    part, name, ours, shape.head_dim, shape.heads, shape.kv_heads, shape.batch, shape.tokens,
                    direction, ms, host_ms, gate, right,
                    errors[part, name], *used[part, name],
                )
            )  # fmt: skip
    return rows


def _run(
    call: Callable, tensors: list[Tensor], gradients: tuple[Tensor, ...], given: Given, direction: str
) -> Callable[[], object]:
    if direction == FORWARD:
        return torch.no_grad()(lambda: call(*tensors))
    leaves = [x.detach().requires_grad_() for x in tensors]
    wanted = [*leaves, given.q_weight, given.k_weight]
    return lambda: torch.autograd.grad(call(*leaves), wanted, gradients if len(gradients) > 1 else gradients[0])


def _errors(
    shape: Shape, recipe: str, device: str, dtype: torch.dtype
) -> dict[tuple[str, str], dict[str, float]]:  # fmt: skip
    """Relative L2 from FP64 of outputs and gradients, of each part and name; of outputs where there is no backward."""
    refused = without_backward(shape, device)
    given, tensors = Given.of(shape, device, dtype), inputs(shape, device, dtype)
    exact_given, exact = given.to(torch.float64), [x.double() for x in tensors]
    found = {}
    for part, calls in ((BLOCK, blocks(shape, given, recipe, device)), (PASS, passes(given, device))):
        if part == BLOCK:
            gradients, count, names = (tensors[3],), 3, NAMES
        else:
            generator = torch.Generator(device).manual_seed(2)
            gradients = tuple(
                torch.randn(x.shape, generator=generator, device=device, dtype=dtype) for x in tensors[:2]
            )
            count, names = 2, ("q", "k", "dq", "dk", "dq_weight", "dk_weight")
        wanted = _results(
            lambda *x: _exact(x, exact_given, shape), exact[:count], exact_given, [x.double() for x in gradients]
        )
        for name, call in calls.items():
            results = _results(call, tensors[:count], given, () if part == BLOCK and name in refused else gradients)
            found[part, name] = {n: relative_l2(a.double(), e) for n, a, e in zip(names, results, wanted)}
    return found


def _exact(tensors: tuple[Tensor, ...], given: Given, shape: Shape) -> Tensor | tuple[Tensor, Tensor]:
    """The block in FP64, or its pass of two tensors."""
    q, k = norm_rope(*tensors[:2], given.q_weight, given.k_weight, given.cos, given.sin)
    if len(tensors) == 2:
        return q, k
    k, v = (x.repeat_interleave(shape.heads // shape.kv_heads, 1) for x in (k, tensors[2]))
    scores = q @ k.mT * shape.head_dim**-0.5
    hidden = torch.ones(shape.tokens, shape.tokens, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def _results(
    call: Callable, tensors: Iterable[Tensor], given: Given, gradients: Iterable[Tensor]
) -> list[Tensor]:  # fmt: skip
    """Outputs, then gradients of tensors and weights where gradients of the outputs are given."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = call(*leaves)
    outputs = out if isinstance(out, tuple) else (out,)
    wanted, gradients = [*leaves, given.q_weight, given.k_weight], list(gradients)
    found = torch.autograd.grad(outputs, wanted, gradients) if gradients else ()
    return [*(x.detach() for x in outputs), *found]
