"""Variants of the CUDA kernels: tiles by direction and head_dim, and the shared memory they need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sagebwd.kernels.runtime.nvrtc import Source

FORWARD, BACKWARD = "forward", "backward"
QUANTIZE, ROW_VALUES, FINISH = "quantize", "row_values", "finish"  # passes before forward, before and after backward
HEAD_DIMS = (64, 128)
# Keys of forward's tiles and queries of backward's; rows of Q or K of a thread block that makes codes.
KEYS, QUERIES, ROWS_OF_CODES = 128, 64, 256
SOURCES = Path(__file__).parent / "cuda"


class Variant(NamedTuple):
    """What a kernel is compiled for; fields are macros of the sources but for ``direction``."""

    direction: str
    head_dim: int
    warps: int
    row_tiles: int  # of 16 rows, a warp
    blocks_an_sm: int
    stages: int  # of forward
    k_in_registers: bool  # of backward, else in shared memory
    half: bool
    split: int = 1  # warps of forward that share rows
    first_keys: int = 0  # of forward and the codes, that are apart
    turned: int = 0  # channels of the rotation, of codes and gradients
    product_sums: bool = False  # of forward: P's rows are added up by tensor cores
    # of backward and its passes
    int8_dp: bool = False  # dP is a product of codes
    adds_four: bool = False  # numbers to dQ at a time, which compute capability 9.0 has

    @property
    def rows(self) -> int:
        """Queries of a thread block in forward, keys in backward."""
        return 16 * self.warps * self.row_tiles // self.split

    @property
    def macros(self) -> dict[str, int]:
        """The macros, by name."""
        names = (
            "D", "WARPS", "MT", "CTAS", "STAGES", "K_IN_REGISTERS", "HALF", "SPLIT", "FIRST", "TURNED",
            "PRODUCT_SUMS", "INT8_DP", "ADDS_FOUR",
        )  # fmt: skip
        return dict(zip(names, map(int, self[1:]), strict=True))

    @property
    def source(self) -> Source:
        """What NVRTC compiles."""
        from sagebwd.kernels.runtime.nvrtc import Source  # who runs a call is known without it

        file = SOURCES / f"{self.direction}.cu"
        return Source(self.direction, (file,), tuple(self.macros.items()), self.warps, self.shared_bytes)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, as the constants of a kernel lay it out."""
        d = self.head_dim
        if self.direction == FORWARD:
            exchanged = 16 * self.warps * self.row_tiles * (4 + KEYS // 2) if self.split > 1 else 0
            return self.stages * (2 * KEYS * d + 8 * KEYS + 8 * d) + exchanged
        if self.direction == QUANTIZE:
            return (KEYS + 12) * d
        if self.direction == ROW_VALUES:
            return 2 * QUERIES * d + 4 * self.warps
        if self.direction == FINISH:
            return 0
        keys, dp = self.rows, 1 if self.int8_dp else 2  # bytes of an operand of dP
        of_keys = keys * (d * (1 + dp + (not self.k_in_registers)) + QUERIES)
        return of_keys + QUERIES * (d * (3 + dp) + 24) + (self.warps * 1088 if self.int8_dp else 0)


# (direction, head_dim): warps, tiles of 16 rows a warp, thread blocks a multiprocessor, stages, warps that share rows.
_TILES = {
    (FORWARD, 64): (4, 1, 3, 3, 1),
    (FORWARD, 128): (4, 2, 2, 2, 2),
    (BACKWARD, 128): (8, 1, 1, 1, 1),
}
# Of GeForce cards, whose multiprocessors have shared memory for fewer thread blocks; at 64 nothing else was timed.
_GEFORCE_TILES = {(FORWARD, 64): (4, 2, 2, 2, 1), (FORWARD, 128): (8, 2, 1, 2, 2)}
# Compute capabilities that add four FP32 numbers to memory in one instruction.
ADD_FOUR = 90
# Shared memory of a thread block on GeForce cards (8.6, 8.9, 12.0); of 8.0 and 9.0 it is more.
_LEAST_SHARED_BYTES = 101376
_MORE_SHARED = (80, 87, 90)


def variant_of(
    direction: str,
    head_dim: int,
    capability: int,
    *,
    half: bool,
    first_keys: int = 0,
    int8_dp: bool = False,
    turned: int = 0,
) -> Variant:
    """The variant of a direction at 64 or 128 for a compute capability; half: inputs are FP16, else BF16.

    first_keys: the recipe's, of forward. int8_dp, and turned, channels of the rotation of K: of backward.
    """
    little = capability not in _MORE_SHARED
    *tiles, split = (little and _GEFORCE_TILES.get((direction, head_dim))) or _TILES[direction, head_dim]
    # GeForce's tensor cores, which set the time there, add up FP16 at a quarter of INT8's rate
    product_sums = direction == FORWARD and not little
    variant = Variant(direction, head_dim, *tiles, False, half, split, first_keys, turned, product_sums)
    if int8_dp and direction == BACKWARD:
        variant = variant._replace(int8_dp=True, adds_four=capability >= ADD_FOUR)
    if little and variant.shared_bytes > _LEAST_SHARED_BYTES:
        return variant._replace(k_in_registers=True)
    return variant


def quantize_variant(head_dim: int, *, half: bool, first_keys: int, turned: int) -> Variant:
    """The variant of the codes' pass; turned: channels of the rotation, or 0."""
    return Variant(QUANTIZE, head_dim, 8, 128 // head_dim, 2, 1, False, half, 1, first_keys, turned)


def row_values_variant(head_dim: int, *, half: bool, int8_dp: bool, turned: int) -> Variant:
    """The variant of the queries' pass before backward; turned: channels of the rotation of an INT8 dP, or 0."""
    return Variant(ROW_VALUES, head_dim, 8, 1, 2, 1, False, half, turned=turned, int8_dp=int8_dp)


def finish_variant(backward: Variant) -> Variant:
    """The variant of dQ's pass after a backward."""
    return backward._replace(
        direction=FINISH, warps=4, row_tiles=1, blocks_an_sm=4, k_in_registers=False, int8_dp=False
    )


def forward_form(head_dim: int, value_dim: int) -> tuple[int, int] | None:
    """The width that a call is filled up to with zeros, or None where it is too wide."""
    width = max(head_dim, value_dim)
    return next(((room, room) for room in HEAD_DIMS if width <= room), None)


def backward_form(head_dim: int, value_dim: int) -> tuple[int, int] | None:
    """The same of backward, which at 64 is no faster than the portable kernels (dev/log)."""
    form = forward_form(head_dim, value_dim)
    return None if form == (64, 64) else form
