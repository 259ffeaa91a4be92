"""The portable kernels, in Triton: for compute capability 8.0 and later, and in Triton's interpreter."""

from __future__ import annotations

from sagebwd.kernels.capabilities import BACKWARD, BLOCKS, FORWARD, KERNEL_DTYPES, MAX_HEAD_DIM, Family, Row
from sagebwd.recipe import INT8, SIXTEEN_BIT

NAME, MODULE = "triton", "sagebwd.kernels.portable.launch"
_TILES = {"block_q": BLOCKS, "block_k": BLOCKS, "p_levels": (127, 254)}
_WIDE = {"k_scale": ("token", "block"), "dp": (SIXTEEN_BIT,)}
_OF_WIDE = dict.fromkeys(_WIDE, "; name 'token', 'paper' or 'full', or leave recipe and impl out")
_WIDTHS = f"1 to {MAX_HEAD_DIM}"


def form(head_dim: int, value_dim: int) -> tuple[int, int] | None:
    """The greater of both for both, as a multiple of 8: other rows are read a channel at a time."""
    width = -(-max(head_dim, value_dim) // 8) * 8
    return (width, width) if width <= MAX_HEAD_DIM else None


FAMILY = Family(
    NAME,
    Row(
        FORWARD, NAME, MODULE, KERNEL_DTYPES, {"first_keys": (0, 16), **_TILES}, form, _WIDTHS, means=2,
        powers_of_two=True, wide_fields=_WIDE, instead=_OF_WIDE,
    ),
    Row(
        BACKWARD, NAME, MODULE, KERNEL_DTYPES,
        {**dict.fromkeys(("dv", "dq", "dk"), (INT8, SIXTEEN_BIT)), **_TILES}, form, _WIDTHS, powers_of_two=True,
        wide_fields=_WIDE, instead=_OF_WIDE,
    ),
    auto="token",
    gpu="a GPU of compute capability 8.0 or more",
    runs_on=lambda capability: capability >= 80,
    interpreted=True,
)  # fmt: skip
