"""The kernels that read masks and list their blocks, compiled for sm_90. Needs no GPU.

`python -m tests.mask_compilations` prints a JSON line a kernel: its name, registers, local memory and shared memory.
It runs in a process of its own, as kernels of a process with TRITON_INTERPRET=1 cannot be compiled.
"""

import json
import sys

import torch
from triton.runtime.jit import JITFunction

from sagebwd.kernels.masks import list_kernels, mask_blocks, work_splits
from sagebwd.masks.band import Band
from sagebwd.masks.mask import BLOCK, TILE
from tools.cross_compile import Launch, count, registers, sass

# heads of a mask and of keys, tokens, band: so that strides, counts and bounds are 1, multiples of 16, and neither
CASES = [
    (1, 1, (1, 1), Band()),
    (1, 2, (300, 500), Band(upper=0)),
    (4, 2, (2048, 2048), Band(lower=-70, upper=1)),
]


known = set()


def record(fn: JITFunction, *args, grid, warmup, **kwargs) -> None:
    """In place of a launch."""
    launch = Launch.of(fn, 90, *args, **kwargs)
    key = launch.source.hash(), launch.options.hash()
    if key in known:
        return
    known.add(key)
    kernel = launch.compiled()
    found = count(sass(kernel))
    row = {"kernel": fn.__name__, "registers": registers(kernel), "spills": found["STL"] + found["LDL"]}
    print(json.dumps(row | {"shared_bytes": kernel.metadata.shared}), flush=True)


if __name__ == "__main__":
    JITFunction.run = record
    on, few = {"device": "meta"}, slice(-1, None) if sys.argv[1:] == ["few"] else slice(None)
    for dtype in (torch.bool, torch.bfloat16)[few]:
        for shape in ((1, 1, 300, 500), (2, 4, 2048, 2048))[few]:
            mask_blocks._read(torch.empty(shape, dtype=dtype, **on), 2, True, True, True)
    mask_blocks._read(torch.empty(1, 1, 1, 500, dtype=torch.float32, **on), 2, True, False, False)
    mask_blocks._read(torch.empty(9, 1, TILE, TILE, dtype=torch.bool, **on), 9, False, False, True)
    for heads, kv_heads, tokens, band in CASES[few]:
        blocks = torch.empty(1, heads, *(-(-n // BLOCK) for n in tokens), dtype=torch.uint8, **on)
        tiles = torch.empty(1, heads, *(-(-n // TILE) for n in tokens), dtype=torch.int32, **on)
        key_mask = torch.empty(2, tokens[1], dtype=torch.bool, **on)
        for keys in (key_mask, None):
            list_kernels._query_lists(blocks, keys, 2, tokens, band, (192, 96))
        first = torch.empty(2, dtype=torch.int64, **on)
        for by_key, apart, stored in ((False, first, tiles), (True, None, None)):
            list_kernels._lists(blocks, stored, key_mask, apart, 2, tokens, (64, 128), band, by_key)
        limits = work_splits.MOST, work_splits.LEAST
        for heads_cut, keys in ((0, key_mask), (kv_heads, None)):
            given = (64, 128), 4 // kv_heads, heads_cut, 2, limits
            list_kernels._key_lists(blocks, tiles, keys, 2, tokens, band, *given)
