"""The attention calls that `python -m benchmarks attention` times: the standard grid and a few more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sagebwd.auto.model import widths_text
from sagebwd.masks.band import UNLIMITED, Band

WIDTHS = {str(width): (width, width) for width in (64, 72, 80, 96, 112, 128, 192)} | {
    "192/128": (192, 128),
    **{str(width): (width, width) for width in (256, 288, 320, 384, 512)},
}
"""The grid's (head_dim, value's head_dim), as the command line writes them."""
DEFAULT_WIDTHS = ("64", "128")
GRID_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
TOTAL_TOKENS = 16384
CPU_TOKENS = 1024
"""As many as a CPU gets in all, where the emulator runs: to try a command out takes seconds."""
MODEL_WIDTH = 2048
NVIDIA_TOKENS = (4096, 8192, 16384)
WIDE = 256
"""Beyond it no FlashAttention and not cuDNN runs: peers are torch's other backends and FlexAttention."""


def flops(
    batch: int,
    heads: int,
    tokens_q: int,
    tokens_k: int,
    head_dim: int,
    *,
    is_causal: bool = False,
    value_dim: int | None = None,
    window: tuple[int, int] | None = None,
    direction: str = "fwd",
) -> float:
    """Useful floating-point operations of one attention call.

    Each product is 2 x batch x heads x width x visible pairs, pairs counted exactly. Forward is S and O; backward is
    five, S again, dP, dV, dQ and dK, as FlashAttention's benchmarks count: 2.5 times forward where both widths are
    one. Nothing is credited for other recomputation, softmax or quantisation.

    Args: value_dim, head_dim unless given; direction, "fwd", "bwd" or "fwd+bwd"; is_causal and window, aligned top
    left. Raises ValueError for another direction.
    """
    value_dim = head_dim if value_dim is None else value_dim
    widths = {"fwd": head_dim + value_dim, "bwd": 3 * head_dim + 2 * value_dim}
    widths["fwd+bwd"] = widths["fwd"] + widths["bwd"]
    if direction not in widths:
        raise ValueError(f"direction={direction!r} is not known; accepted: {', '.join(widths)}")
    pairs = pairs_in(Band.of(is_causal, *(window or (-1, -1))), tokens_q, tokens_k)
    return 2.0 * batch * heads * widths[direction] * pairs


def pairs_in(band: Band, tokens_q: int, tokens_k: int) -> int:
    """How many (query, key) pairs a band holds."""
    queries = torch.arange(tokens_q)
    start = torch.zeros_like(queries) if band.lower is None else (queries + band.lower).clamp(min=0)
    stop = torch.full_like(queries, tokens_k)
    if band.upper is not None:
        stop = (queries + band.upper + 1).clamp(max=tokens_k)
    return int((stop - start).clamp(min=0).sum())


@dataclass(frozen=True)
class Shape:
    """One attention call: batch x heads x tokens x head_dim, query and key lengths equal.

    value_dim: value's and the output's head_dim, the same as head_dim unless given. window: of a causal call, how many
    keys before its own a query sees; None for all.
    """

    head_dim: int
    heads: int
    kv_heads: int
    batch: int
    tokens: int
    is_causal: bool
    value_dim: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)

    @property
    def name(self) -> str:
        """Its widths and heads."""
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"D{widths_text(self.head_dim, self.value_dim)} H{heads}"

    def __str__(self) -> str:
        return f"{self.name} B{self.batch} N{self.tokens} {'causal' if self.is_causal else 'no mask'}" + (
            "" if self.window is None else f", window {self.window}"
        )

    @property
    def is_wide(self) -> bool:
        """Whether it is beyond `WIDE`."""
        return max(self.head_dim, self.value_dim) > WIDE

    @property
    def band(self) -> Band:
        """Which keys a query sees."""
        return Band.of(self.is_causal, UNLIMITED if self.window is None else self.window)

    def sequences(self) -> list[slice]:
        """The tokens that see each other: all."""
        return [slice(None)]

    def short(self) -> Shape:
        """One batch of it, and few tokens; a wide one itself, for whose lengths FlexAttention is compiled."""
        if self.is_wide:
            return self
        return replace(self, batch=1, tokens=min(self.tokens, 1024))

    def inputs(self, device: str, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gaussian q, k, v and do, the same for all."""
        generator = torch.Generator(device).manual_seed(seed)
        sizes = (
            (self.heads, self.head_dim),
            (self.kv_heads, self.head_dim),
            (self.kv_heads, self.value_dim),
            (self.heads, self.value_dim),
        )
        return tuple(
            torch.randn(self.batch, heads, self.tokens, width, generator=generator, device=device, dtype=dtype)
            for heads, width in sizes
        )

    def last_key_head(self, x: Tensor) -> Tensor:
        """Of the last sequence of a batch of queries or keys: the last key head, or the query heads that read it."""
        count = self.heads // self.kv_heads if x.shape[1] == self.heads else 1
        return x.detach()[-1:, -count:]

    def flops(self, direction: str) -> float:
        """Useful operations of one direction."""
        return flops(
            self.batch, self.heads, self.tokens, self.tokens, self.head_dim, value_dim=self.value_dim,
            is_causal=self.is_causal, direction=direction,
            window=None if self.window is None else (self.window, UNLIMITED),
        )  # fmt: skip


def widths_of(names: Iterable[str]) -> list[tuple[int, int]]:
    """(head_dim, value's head_dim) of each of `WIDTHS`. Raises ValueError for another name."""
    names = list(names)
    for name in names:
        if name not in WIDTHS:
            raise ValueError(f"head_dim={name} is not of the grid; accepted: {', '.join(WIDTHS)}")
    return [WIDTHS[name] for name in names]


def standard_grid(
    widths: Iterable[str] = DEFAULT_WIDTHS, tokens: Iterable[int] | None = None, device: str = "cuda"
) -> list[Shape]:
    """The standard grid: heads = 2048 / value's head_dim, batch x tokens = 16384 (batch 1 beyond), causal and not.

    Args: widths, of `WIDTHS`; tokens, all of `GRID_TOKENS` unless given. On a CPU batch x tokens is `CPU_TOKENS`, and
    tokens the least of the grid unless given. Raises ValueError for another width.
    """
    on_cpu = device == "cpu"
    tokens = tokens or (GRID_TOKENS[:1] if on_cpu else GRID_TOKENS)
    total = min(CPU_TOKENS, TOTAL_TOKENS) if on_cpu else TOTAL_TOKENS
    return [
        Shape(d, MODEL_WIDTH // e, MODEL_WIDTH // e, max(1, total // n), n, is_causal, e)
        for d, e in widths_of(widths)
        for is_causal in (False, True)
        for n in tokens
    ]


def on_grid(row: dict) -> bool:
    """Whether a row of a result file is of the standard grid; older files have no packed rows."""
    return not row.get("lengths") and row["heads"] == row["kv_heads"] == MODEL_WIDTH // value_dim_of(row)


def value_dim_of(row: dict) -> int:
    """Value's head_dim of such a row; older files have one head_dim for both."""
    return row.get("value_dim", row["head_dim"])


def special_shapes() -> list[Shape]:
    """Grouped heads of a language model, and a video transformer's block."""
    grouped = [Shape(128, 32, 8, max(1, TOTAL_TOKENS // n), n, True) for n in (4096, 16384)]
    return [*grouped, Shape(128, 24, 24, 1, 32760, False)]


def nvidia_shapes(tokens: Iterable[int] | None = None, device: str = "cuda") -> list[Shape]:
    """The shapes of NVIDIA's nightly tables, so that these can be laid beside ours: 64 heads on 8, batch 2, 128.

    They are of `benchmark/attention_training` in cudnn-frontend. tokens: `NVIDIA_TOKENS` unless given, on a CPU few.
    """
    tokens = tokens or ((CPU_TOKENS,) if device == "cpu" else NVIDIA_TOKENS)
    return [Shape(128, 64, 8, 2, n, is_causal) for is_causal in (False, True) for n in tokens]


def wide_shapes(
    widths: Iterable[str] = ("512", "384", "320", "288"), tokens: Iterable[int] | None = None, device: str = "cuda"
) -> list[Shape]:  # fmt: skip
    """Causal calls of 8 heads, with a window of 1024 keys, and with 8 heads on 2; batch x tokens as in the grid.

    Args: tokens, 8192 of each and 4096 and 16384 of the first unless given.
    """
    total = min(CPU_TOKENS, TOTAL_TOKENS) if device == "cpu" else TOTAL_TOKENS
    kinds = [(8, None), (8, 1024), (2, None)]
    cases = [(kind, n) for n in tokens or [8192] for kind in kinds]
    if not tokens and device != "cpu":
        cases += [(kinds[0], n) for n in (4096, 16384)]
    if device == "cpu":
        cases = [(kind, n) for kind, n in dict.fromkeys((kind, min(n, total)) for kind, n in cases)]
    return [
        Shape(d, 8, kv_heads, max(1, total // n), n, True, e, window)
        for (kv_heads, window), n in cases
        for d, e in widths_of(widths)
    ]
