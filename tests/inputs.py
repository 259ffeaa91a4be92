"""Seeded inputs of the kinds of data that attention meets, drawn in BF16 and then promoted."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lab.studies.gaussian import with_sinks

KINDS = (
    "normal",
    "mean-and-outliers",
    "near-one-hot",
    "flat-and-sink",
    "sink",
    "sinks",
    "zero-block",
    "huge",
    "tiny",
    "coherent",
)


def draw(
    kind: str = "normal",
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    tokens: int = 256,
    kv_tokens: int | None = None,
    head_dim: int = 64,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    starts: Sequence[int] = (0,),
    place: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and do of one kind, (batch, heads, tokens, head_dim).

    "flat-and-sink": flat scores but for a first key, whose logit is 5. "sink": a key, the first, 12 logits above
    N(0, 1) with a tenth of its value; "sinks": with a mean in K and V, and a key in the middle 9 above, a delimiter.
    "coherent": Q, V and dO are a vector of the head and half as much noise, so that a key's dK and dV are sums over
    all queries of terms of one sign.
    starts: where sequences begin, if several are packed. place: of the sink of "sink" and "sinks" behind such a start.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    kv_heads, kv_tokens = kv_heads or heads, tokens if kv_tokens is None else kv_tokens
    q, do = normal(batch, heads, tokens, head_dim), normal(batch, heads, tokens, head_dim)
    k, v = normal(batch, kv_heads, kv_tokens, head_dim), normal(batch, kv_heads, kv_tokens, head_dim)
    if kind == "mean-and-outliers":
        k, v = (x + 3 * normal(1, kv_heads, 1, head_dim) for x in (k, v))
        k[..., min(3, head_dim - 1)] *= 8
        v[..., min(5, head_dim - 1)] *= 8
    elif kind == "near-one-hot":
        q, k = 10 * q, 10 * k
    elif kind in ("sink", "sinks"):
        if kind == "sinks":
            k, v = (x + 3 * normal(1, kv_heads, 1, head_dim) for x in (k, v))
            q, k, v = with_sinks(q, k, v, 9, (kv_tokens // 2,) if kv_tokens else (), generator)
        q, k, v = with_sinks(q, k, v, 12, [start + place for start in starts], generator)
    elif kind == "flat-and-sink":
        common = 2 * normal(1, heads, 1, head_dim)
        q, k = 0.3 * q + common, 0.3 * k
        sink = 5 * head_dim**0.5 * common / common.square().sum(-1, keepdim=True)  # logit 5 for every query
        k[:, :, :1] = sink.unflatten(1, (kv_heads, -1)).mean(2)
    elif kind == "zero-block":
        for x in (q, k, v, do):
            x[:, :, : min(64, x.shape[2] // 2)] = 0
    elif kind == "huge":
        q, k, v, do = 1e4 * q, 1e-4 * k, 1e4 * v, 1e4 * do
    elif kind == "tiny":
        q, k, v, do = (1e-6 * x for x in (q, k, v, do))
    elif kind == "coherent":
        q, do = (0.5 * x + normal(1, heads, 1, head_dim) for x in (q, do))
        v = 0.5 * v + normal(1, kv_heads, 1, head_dim)
    elif kind != "normal":
        raise ValueError(f"kind={kind!r} is not known; accepted: {', '.join(KINDS)}")
    return tuple(x.bfloat16().to(dtype) for x in (q, k, v, do))
