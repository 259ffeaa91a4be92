"""Which tile, warps and pipeline stages each kernel runs with, by architecture and head_dim.

A tile here is never a scale group: those are the recipe's, and fix the reduced axis of every product. What is left to
choose is how many rows of the other axis a program takes, and that changes speed alone. Where a scale spans a tile,
its maximum must be found by one program; "dkdv_given" is dK and dV where the dQ kernel did, free to take parts of it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from sagebwd.call import Call, padded_head_dim
from sagebwd.numerics import MOST_ROTATED
from sagebwd.recipe import INT8, Recipe


@dataclass(frozen=True)
class Config:
    """``rows``: tokens of the free axis a program takes; ``warps`` and ``stages``: Triton's num_warps, num_stages.

    ``tma``: read blocks through TMA descriptors, where strides are multiples of 16 bytes.
    ``registers``: a cap for each thread, so that more programs share an SM; None leaves it to the compiler.
    ``step``: queries, at most, that "dkdv_given" takes at a time; None, as for all others, takes the recipe's block.
    ``keys``: the same of keys, of "forward" and "dq" without INT8 products, whose scales are groups of the block.
    """

    rows: int
    warps: int
    stages: int
    tma: bool = False
    registers: int | None = None
    step: int | None = None
    keys: int | None = None

    def under_a_mask(self) -> Config:
        """The same for a call with a mask, whose elements take registers; chosen from SASS, never timed."""
        return dataclasses.replace(self, registers=None, stages=min(2, self.stages))

    def block_q(self, recipe: Recipe) -> int:
        """Queries of a step of dK and dV."""
        return recipe.block_q if self.step is None else min(recipe.block_q, self.step)

    def block_k(self, recipe: Recipe) -> int:
        """Keys of a step of the forward and of dQ."""
        return recipe.block_k if self.keys is None else min(recipe.block_k, self.keys)

    def options(self, call: Call) -> dict[str, int | float | bool | None]:
        """What Triton takes at a launch, and what all kernels take of a call by name."""
        return {
            **call.band, "scale": call.scale, "head_dim": call.head_dim, "num_warps": self.warps,
            "num_stages": self.stages, "maxnreg": self.registers,
        }  # fmt: skip


# Channels of a tile at most, and of a block of R. Beyond them a call is wide: outputs are of two slices of channels,
# and S and dP, which both need, are added up by pieces of channels. Forward launches a program for each slice, which
# finds S anew, in INT8. A program of backward, of fewer rows, has both: with S and dP anew its products would be two
# thirds more.
SLICE = MOST_ROTATED


def slices(head_dim: int) -> list[tuple[int, int]]:
    """First channel and columns of a tile of each slice; of a second one 64, with fewer of which registers spill."""
    widths = [(first, padded_head_dim(min(SLICE, head_dim - first))) for first in range(0, head_dim, SLICE)]
    return [(first, max(64, width) if first else width) for first, width in widths]


def tiles_of(head_dim: int) -> dict[str, int]:
    """What a kernel that has all channels takes: columns of its tiles, and of those of the rest of a wide call."""
    first, *rest = (width for _, width in slices(head_dim))
    return {"BLOCK_D": first, "REST": sum(rest)}


# (kernel, head_dim padded to a power of two, block of the axis that the kernel reduces over) -> configuration.
# Measured on an H200, 4096 tokens, 2026-11-21 (dev/log); a missing block takes the next smaller one's row.
# TMA with a single stage gave wrong results at head_dim 256 with triton 3.6: never both.
_HOPPER: dict[tuple[str, int, int], Config] = {
    # a cap of 168 registers lets three programs share an SM
    ("forward", 64, 32): Config(64, 4, 3, tma=True, registers=168),
    ("forward", 128, 32): Config(64, 4, 2, tma=True, registers=168),
    ("forward", 256, 32): Config(64, 4, 2, tma=True),
    # two slices of 256 channels; measured on an H200, 8192 tokens, 2026-11-29
    ("forward", 512, 32): Config(64, 4, 3),
    # dK and dV in FP32 fill the registers: 4 warps, and at head_dim 64 a cap that lets three programs share an SM
    ("dkdv", 64, 32): Config(64, 4, 2, tma=True, registers=168),
    ("dkdv", 64, 128): Config(64, 4, 2, tma=True),
    ("dkdv", 128, 32): Config(64, 4, 2, tma=True),
    ("dkdv", 256, 32): Config(64, 8, 1),
    ("dkdv", 512, 32): Config(32, 8, 3),
    # steps of 64 queries fit the registers as `token`'s do; chosen from SASS
    ("dkdv_given", 64, 32): Config(64, 4, 2, tma=True, registers=168, step=64),
    ("dkdv_given", 128, 32): Config(64, 4, 2, tma=True, step=64),
    ("dkdv_given", 256, 32): Config(64, 8, 1, step=64),
    ("dkdv_given", 512, 32): Config(32, 8, 3, step=64),
    ("dq", 64, 32): Config(64, 4, 3, tma=True),
    ("dq", 128, 32): Config(64, 4, 3, tma=True),
    ("dq", 256, 32): Config(64, 8, 1),
    ("dq", 512, 32): Config(64, 8, 3),
}
# The same where a scale group spans a tile's rows: (kernel, padded head_dim, rows) -> configuration.
_HOPPER_WHOLE: dict[tuple[str, int, int], Config] = {
    ("dq", 64, 128): Config(128, 4, 3, tma=True),
    ("dq", 128, 128): Config(128, 8, 3, tma=True, registers=168),
}
# mma.sync and 99 KB of shared memory a program (sm_86, 89, 120): chosen from SASS, for no spills; never timed.
_PORTABLE: dict[tuple[str, int, int], Config] = {
    ("forward", 64, 32): Config(64, 4, 2),
    ("forward", 128, 32): Config(64, 4, 2),
    # S, P and O of 64 rows spill at 4 warps once a block holds 128 keys
    ("forward", 128, 128): Config(64, 8, 2),
    ("forward", 256, 32): Config(64, 8, 1),
    ("forward", 512, 32): Config(64, 8, 2),
    ("dkdv", 64, 32): Config(64, 4, 2),
    # dK and dV alone are 128 registers a thread at 4 warps
    ("dkdv", 128, 32): Config(64, 8, 1),
    ("dkdv", 256, 32): Config(32, 8, 1),
    ("dkdv", 512, 32): Config(32, 8, 2),
    ("dkdv_given", 64, 32): Config(64, 4, 2, step=64),
    ("dkdv_given", 128, 32): Config(64, 8, 1, step=64),
    ("dkdv_given", 256, 32): Config(32, 8, 1, step=64),
    ("dkdv_given", 512, 32): Config(32, 8, 2, step=64),
    ("dq", 64, 32): Config(64, 4, 2),
    # 64 rows against 128 keys spill on sm_100 and sm_120
    ("dq", 64, 128): Config(32, 4, 2),
    ("dq", 128, 32): Config(64, 8, 2),
    # a second stage would not fit beside 128 keys
    ("dq", 128, 128): Config(64, 8, 1),
    ("dq", 256, 32): Config(32, 8, 1),
    ("dq", 512, 32): Config(32, 8, 2),
}
# sm_80 to sm_89, INT8 products of 64 queries and 128 keys, as `token` has them: by a sweep on an H100 that ran these
# cards' instructions. 64 rows by 8 warps take layout {1, 8}, in which P and dS cross shared memory in every step.
_AMPERE: dict[tuple[str, int, int], Config] = {
    **_PORTABLE,
    ("forward", 64, 128): Config(64, 4, 3),
    ("forward", 128, 128): Config(32, 4, 3, registers=168),
    ("dkdv", 64, 64): Config(64, 4, 3),
    ("dkdv", 64, 128): _PORTABLE["dkdv", 64, 32],
    ("dkdv", 128, 64): Config(32, 4, 3),
    ("dkdv", 128, 128): _PORTABLE["dkdv", 128, 32],
    ("dq", 64, 128): Config(64, 4, 3),
    ("dq", 128, 128): Config(32, 4, 2),
}
# 99 KB of shared memory, 16-bit products: Q, dO, K and V of 256 channels do not fit beside 128 keys. Chosen from SASS.
_SMALL_MEMORY = (86, 89, 120)
_SMALL_MEMORY_16BIT: dict[tuple[str, int], Config] = {
    ("forward", 256): Config(64, 8, 1, keys=32),
    ("dq", 256): Config(32, 8, 1, keys=32),
}


def choose(kernel: str, head_dim: int, recipe: Recipe, arch: int, *, masked: bool = False) -> Config:
    """The configuration of ``kernel`` ("forward", "dkdv", "dkdv_given" or "dq") under ``recipe``.

    masked: beside the elements of a mask, whose registers the rows of `_AMPERE` have not.
    """
    table = _HOPPER if arch == 90 else _PORTABLE
    if 80 <= arch < 90 and recipe.s == INT8 and not masked:
        table = _AMPERE
    block = recipe.block_q if kernel.startswith("dkdv") else recipe.block_k
    width = max(64, padded_head_dim(head_dim))
    has_int8 = INT8 in (recipe.s, recipe.o if kernel == "forward" else recipe.dq)
    if arch in _SMALL_MEMORY and (kernel, width) in _SMALL_MEMORY_16BIT and not has_int8:
        return _SMALL_MEMORY_16BIT[kernel, width]
    row = max(key for key in table if key[:2] == (kernel, width) and key[2] <= block)
    config = table[row]
    rows = _whole_groups(kernel, recipe)
    if rows is None or rows == config.rows:
        return config
    if arch == 90 and (kernel, width, rows) in _HOPPER_WHOLE:
        return _HOPPER_WHOLE[kernel, width, rows]
    # the table's warps, stages and register cap are for its own rows
    return dataclasses.replace(
        config, rows=rows, warps=8 if rows > 64 else 4, stages=max(2, config.stages), registers=None
    )


def shares_maxima(call: Call) -> bool:
    """Whether dQ finds the maxima of tiles for dK and dV too.

    Where both quantise the same dS: a tile at a time, Q's and K's scales left out. The table grows with queries times
    keys and memory must not: there is none where it would be larger than dQ and dK (beyond 131072 tokens for `paper`
    at head_dim 64), at the same numbers but for the order of FP32 additions.
    """
    recipe, queries, keys = call.recipe, call.queries, call.keys
    int8 = all(getattr(recipe, name) == INT8 for name in ("dv", "dq", "dk"))
    tiles = {recipe.p_scale_dv, recipe.ds_scale_dq, recipe.ds_scale_dk} == {"tile"}
    if not (int8 and tiles and recipe.q_scale == recipe.k_scale == "block"):
        return False
    rows = max(queries.heads_in_all * queries.total, keys.heads_in_all * keys.total)
    return 4 * math.prod(maxima_shape(call)) <= rows * call.head_dim * call.dtype.itemsize


def maxima_shape(call: Call) -> tuple[int, ...]:
    """Of the table of tiles' maxima."""
    queries = call.queries
    return queries.heads_in_all, tiles_of_keys(call), queries.blocks(call.recipe.block_q), 2


def tiles_of_keys(call: Call) -> int:
    """Blocks of keys of the longest sequence, at most."""
    return -(-min(call.keys.tokens, call.keys.total) // call.recipe.block_k)


def value_rows(call: Call) -> int:
    """Tokens of V that become codes of an INT8 dP at a time: beside two matrices of signs 99 KB have room for 16."""
    two = call.block_d > 128 and sum(call.value_rotation) not in (0, 256)
    return 16 if two else 64


def list_tile(kernel: str, head_dim: int, recipe: Recipe, arch: int) -> tuple[tuple[int, int], bool]:
    """Queries and keys of the tile that a mask's lists are of, and whether a program's rows are keys.

    No configuration that is tuned or fitted has larger ones.
    """
    config = choose(kernel, head_dim, recipe, arch, masked=True)
    if kernel.startswith("dkdv"):
        return (config.block_q(recipe), config.rows), True
    return (config.rows, config.block_k(recipe)), False


def _whole_groups(kernel: str, recipe: Recipe) -> int | None:
    """The only number of rows a tile may have where a scale group spans its free axis too, else None."""
    # all keys of a program lie in one tile
    if kernel == "dkdv_given" and recipe.block_k < 64:
        return recipe.block_k
    if kernel == "dkdv" and "tile" in (recipe.p_scale_dv, recipe.ds_scale_dk):
        return recipe.block_k
    if kernel == "dq" and recipe.ds_scale_dq == "tile":
        return recipe.block_q
    return None


def smaller(config: Config, kernel: str, recipe: Recipe, arch: int) -> list[Config]:
    """Launches that need less and less shared memory, for recipes and head_dims the table's does not fit.

    Fewer stages; one stage without TMA, which is wrong with a single one; then fewer rows, where groups allow. On
    Hopper one stage takes a warp for each 8 rows, where `most_warps` allows: with fewer, triton 3.6 spills what names
    the operands of a product, and dQ of 128 rows at head_dim 256 was wrong or read beyond shared memory.
    """
    fewer = [dataclasses.replace(config, stages=stages) for stages in range(config.stages - 1, 1, -1)]
    one = dataclasses.replace(config, stages=1, tma=False)
    if arch == 90:
        warps = min(one.rows // 8, most_warps(kernel, recipe, one.rows, arch))
        one = dataclasses.replace(one, warps=max(one.warps, warps))
    fewer.append(one)
    if config.rows > 32 and _whole_groups(kernel, recipe) is None:
        fewer.append(dataclasses.replace(one, rows=one.rows // 2))
    return fewer


def most_warps(kernel: str, recipe: Recipe, rows: int, arch: int) -> int:
    """Warps that a program of so many rows may have.

    On Hopper more than one for each 16 rows divide the columns of S. Of the 16 first keys a warpgroup then has 8, and
    triton 3.6 was wrong (64 rows by 8 warps at head_dim 300) or read beyond shared memory (one stage at 512).
    """
    keeps_first_keys = kernel == "forward" and recipe.o == INT8 and recipe.first_keys > 0
    return max(4, rows // 16) if arch == 90 and keeps_first_keys else 16


def candidates(config: Config, most: int) -> list[Config]:
    """What autotune tries: the table's launch and its neighbours of at most so many warps, rows untouched."""
    registers = {config.registers, None, 168}
    stages = {max(2 if config.tma else 1, config.stages + step) for step in (-1, 0, 1)}
    warps = {4, min(8, most)}
    return [
        dataclasses.replace(config, warps=w, stages=s, registers=r) for w in warps for s in stages for r in registers
    ]
