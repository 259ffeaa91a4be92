"""Error of a recipe on random inputs: the paper's Table 1, inputs with bias and sink, and inputs with a strong sink.

Three kinds of input, all Gaussian, standard deviation sigma_QK for Q and K and 1 for V and dO:

- ``plain``: independent entries, as in the paper's Table 1.
- ``bias-and-sink``: K and V get a channel mean of 3 sigma, Q a common direction of 2 sigma, one draw a head, as
  trained heads have. With a mean in V, a delta from a quantised O no longer cancels dP, and dS leaks into every key.
- ``sink``: a key, the first unless told, stands 12 logits above the rest and has a tenth of their value.

The error is against full precision in FP64 on the same inputs, which are drawn in BF16 and then promoted.

Source: arXiv 2603.02170, Table 1; the bias-and-sink figures are this project's own, from an FP32 simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from sagebwd.attention import sage_attention
from sagebwd.recipe import Recipe
from sagebwd.reference.metrics import cosine, relative_l2

TENSORS = ("o", "dq", "dk", "dv")
KINDS = ("plain", "bias-and-sink", "sink")
SINK_LOGITS = 12.0
# What all queries have along a sink's direction.
COMMON = 9.0

# cosine and relative L2 of O, dQ, dK, dV by sigma_QK: Table 1 of the paper.
PAPER_TABLE_1: dict[float, dict[str, tuple[float, float]]] = {
    1: {"o": (0.9999, 0.0160), "dq": (0.9998, 0.0184), "dk": (0.9998, 0.0220), "dv": (0.9999, 0.0159)},
    3: {"o": (0.9992, 0.0389), "dq": (0.9971, 0.0758), "dk": (0.9970, 0.0777), "dv": (0.9992, 0.0387)},
    5: {"o": (0.9982, 0.0603), "dq": (0.9798, 0.2014), "dk": (0.9799, 0.2007), "dv": (0.9982, 0.0605)},
    8: {"o": (0.9953, 0.0972), "dq": (0.8900, 0.4666), "dk": (0.8886, 0.4699), "dv": (0.9953, 0.0973)},
    10: {"o": (0.9933, 0.1161), "dq": (0.7823, 0.6648), "dk": (0.7820, 0.6684), "dv": (0.9933, 0.1157)},
}

# relative L2 of dQ and dK by recipe and sigma_QK: our simulation, 2048 tokens, head_dim 64, blocks of 64 x 64.
BIAS_AND_SINK: dict[str, dict[float, dict[str, float]]] = {
    "paper(block_q=64)": {1: {"dq": 0.0862, "dk": 0.0637}, 3: {"dq": 0.1039, "dk": 0.0968}},
    "paper(block_q=64, smooth_v=True)": {1: {"dq": 0.0498, "dk": 0.0535}, 3: {"dq": 0.0869, "dk": 0.0848}},
    "token(v_scale=block, p_levels=127, block_k=64, smooth_v=False, rotate=False)": {
        1: {"dq": 0.0736, "dk": 0.0448},
        3: {"dq": 0.0852, "dk": 0.0817},
    },
    "token(v_scale=block, p_levels=127, block_k=64, rotate=False)": {
        1: {"dq": 0.0215, "dk": 0.0207},
        3: {"dq": 0.0630, "dk": 0.0634},
    },
}


@dataclass(frozen=True)
class Row:
    """The error of one tensor, averaged over seeds; ``expected_l2`` is the published figure, where there is one."""

    kind: str
    sigma: float
    recipe: str
    tensor: str
    cosine: float
    relative_l2: float
    expected_cosine: float | None
    expected_l2: float | None
    place: int = 0
    """Of the key that is a sink."""

    def as_dict(self) -> dict[str, object]:
        """The row for JSON."""
        return asdict(self)


def draw(
    kind: str, sigma: float, tokens: int, head_dim: int, seed: int, place: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, K, V and dO of one head, (1, 1, tokens, head_dim) BF16, on the CPU so that every device sees the same.

    place: which key is the sink of kind ``sink``. Raises ValueError for an unknown kind, or a place without a sink.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not known; accepted: {', '.join(KINDS)}")
    if not 0 <= place < (tokens if kind == "sink" else 1):
        raise ValueError(f"place={place}: a sink is one of the {tokens} keys of inputs of kind 'sink'")
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(1, 1, tokens, head_dim, generator=generator) for _ in range(4))
    q, k = q * sigma, k * sigma
    if kind == "bias-and-sink":
        k_mean, v_mean, q_common = (torch.randn(1, 1, 1, head_dim, generator=generator) for _ in range(3))
        k, v, q = k + 3 * k_mean, v + 3 * v_mean, q + 2 * q_common
    elif kind == "sink":
        q, k, v = with_sinks(q, k, v, SINK_LOGITS, (place,), generator)
    return tuple(x.bfloat16() for x in (q, k, v, do))


def with_sinks(
    q: Tensor, k: Tensor, v: Tensor, logits: float, keys: Sequence[int], generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with sinks: keys that stand ``logits`` above what N(0, 1) gives them, with a tenth of their value.

    Args: q (B, Hq, N, D); k, v (B, Hkv, M, D); keys, which. Queries of heads that share a key head share a direction.
    """
    direction = torch.randn(1, k.shape[1], 1, k.shape[-1], generator=generator)
    direction = direction / direction.norm(dim=-1, keepdim=True)
    q = q + COMMON * direction.repeat_interleave(q.shape[1] // k.shape[1], 1)
    k, v = k.clone(), v.clone()
    for key in keys:
        k[:, :, key] += logits * math.sqrt(k.shape[-1]) / COMMON * direction[:, :, 0]
        v[:, :, key] *= 0.1
    return q, k, v


def gradients(inputs: Iterable[Tensor], recipe: Recipe | str, impl: str | None, is_causal: bool) -> dict[str, Tensor]:
    """O, dQ, dK and dV of one call."""
    *leaves, do = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]
    o = sage_attention(*leaves, is_causal=is_causal, recipe=recipe, impl=impl)
    return dict(zip(TENSORS, (o.detach(), *torch.autograd.grad(o, leaves, do))))


def measure(
    recipes: Iterable[Recipe | str] = ("paper", "token"),
    sigmas: Iterable[float] = tuple(PAPER_TABLE_1),
    *,
    kind: str = "plain",
    tokens: int = 4096,
    head_dim: int = 128,
    seeds: int = 1,
    is_causal: bool = False,
    impl: str = "reference",
    device: str = "cpu",
    place: int = 0,
    progress: Callable[[str, float], object] = lambda step, done: None,
) -> list[Row]:
    """Errors of each recipe at each sigma_QK, averaged over ``seeds`` draws.

    With ``impl="reference"`` products are emulated in FP32 from the BF16 inputs, so that the error is the recipe's
    alone; a kernel runs on the BF16 inputs as they are. place, as in `draw`. ``progress`` is called before each step,
    with the share of them that is done.

    Raises ValueError for no recipe, seed, token or channel, a sigma that is not above 0, an unknown kind or place.
    """
    recipes, sigmas = [Recipe.parse(recipe) for recipe in recipes], list(sigmas)
    if not recipes:
        raise ValueError("recipes: got none, at least one is needed")
    for name, value in (("tokens", tokens), ("head_dim", head_dim), ("seeds", seeds)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    for sigma in sigmas:
        if not 0 < sigma < math.inf:
            raise ValueError(f"sigma={sigma:g} must be above 0 and finite")
    dtype = torch.float32 if impl == "reference" else torch.bfloat16
    rows, done, steps = [], 0, len(sigmas) * seeds * (len(recipes) + 1)
    for sigma in sigmas:
        errors: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for seed in range(seeds):
            what = f"{kind}, sigma {sigma:g}, seed {seed}"
            progress(f"{what}, in FP64", done / steps)
            inputs = [x.to(device) for x in draw(kind, sigma, tokens, head_dim, seed, place)]
            exact = gradients([x.double() for x in inputs], "full", "reference", is_causal)
            for recipe in recipes:
                done += 1
                progress(f"{what}, {recipe}", done / steps)
                actual = gradients([x.to(dtype) for x in inputs], recipe, impl, is_causal)
                for name in TENSORS:
                    pair = cosine(actual[name], exact[name]), relative_l2(actual[name], exact[name])
                    errors.setdefault((str(recipe), name), []).append(pair)
            done += 1
        for (recipe, name), pairs in errors.items():
            cosines, norms = zip(*pairs)
            expected = _expected(kind, recipe, sigma, name)
            rows.append(Row(kind, sigma, recipe, name, _mean(cosines), _mean(norms), *expected, place))
    return rows


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


def _expected(kind: str, recipe: str, sigma: float, tensor: str) -> tuple[float | None, float | None]:
    if kind == "plain":
        return PAPER_TABLE_1.get(sigma, {}).get(tensor, (None, None))
    return None, BIAS_AND_SINK.get(recipe, {}).get(sigma, {}).get(tensor)
