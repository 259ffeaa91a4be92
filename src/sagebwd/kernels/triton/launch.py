"""Which tile, warps and pipeline stages each kernel runs with, by architecture and head_dim.

A tile here is never a scale group: those are the recipe's, and fix the reduced axis of every product. What is left to
choose is how many rows of the other axis a program takes, and that changes speed alone.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

import torch

from sagebwd.recipe import Recipe


@dataclass(frozen=True)
class Launch:
    """``rows``: tokens of the free axis a program takes; ``warps`` and ``stages``: Triton's num_warps, num_stages.

    ``tma``: read blocks through TMA descriptors, where strides and addresses are multiples of 16 bytes.
    ``registers``: a cap for each thread, so that more programs share an SM; None leaves it to the compiler.
    """

    rows: int
    warps: int
    stages: int
    tma: bool = False
    registers: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        """What Triton takes at a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


# (kernel, head_dim padded to a power of two) -> launch; "hopper" has 227 KB of shared memory and wgmma.
_HOPPER: dict[tuple[str, int], Launch] = {
    ("forward", 64): Launch(128, 8, 3),
    ("forward", 128): Launch(128, 8, 3),
    ("forward", 256): Launch(64, 4, 2),
    ("dkdv", 64): Launch(64, 4, 2),
    ("dkdv", 128): Launch(64, 4, 2),
    ("dkdv", 256): Launch(64, 8, 1),
    ("dq", 64): Launch(64, 4, 3),
    ("dq", 128): Launch(64, 4, 2),
    ("dq", 256): Launch(64, 8, 1),
}
# 99 KB of shared memory a block on sm_86, 89 and 120
_PORTABLE: dict[tuple[str, int], Launch] = {
    ("forward", 64): Launch(64, 4, 2),
    ("forward", 128): Launch(64, 4, 2),
    ("forward", 256): Launch(64, 8, 1),
    ("dkdv", 64): Launch(64, 4, 2),
    ("dkdv", 128): Launch(64, 8, 1),
    ("dkdv", 256): Launch(32, 8, 1),
    ("dq", 64): Launch(64, 4, 2),
    ("dq", 128): Launch(64, 4, 1),
    ("dq", 256): Launch(64, 8, 1),
}


@cache
def capability(device: torch.device) -> int:
    """90 for sm_90; 0 where the interpreter runs on a CPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def padded_head_dim(head_dim: int) -> int:
    """The power of two that tiles are wide: INT8 products reduce over at least 32."""
    return max(32, 1 << (head_dim - 1).bit_length())


def pass_warps(block: int, head_dim: int) -> int:
    """Warps of a quantisation pass: 16 to 64 elements a thread."""
    return max(4, block * padded_head_dim(head_dim) // 2048)


def choose(kernel: str, head_dim: int, recipe: Recipe, arch: int) -> Launch:
    """The launch of ``kernel`` ("forward", "dkdv" or "dq") under ``recipe``."""
    table = _HOPPER if arch == 90 else _PORTABLE
    launch = table[kernel, max(64, padded_head_dim(head_dim))]
    rows = _whole_groups(kernel, recipe)
    return launch if rows is None else dataclasses.replace(launch, rows=rows)


def _whole_groups(kernel: str, recipe: Recipe) -> int | None:
    """The only number of rows a tile may have where a scale group spans its free axis too, else None."""
    if kernel == "dkdv" and "tile" in (recipe.p_scale_dv, recipe.ds_scale_dk):
        return recipe.block_k
    if kernel == "dq" and recipe.ds_scale_dq == "tile":
        return recipe.block_q
    if kernel in ("forward", "dq") and recipe.smooth_q:
        return recipe.block_q
    return None
