"""A kernel with partitions and nothing of its own in shared memory: triton's hand-over alone, for racecheck.

`compute-sanitizer --tool racecheck python -m tools.handover`, on a Hopper GPU; `tools.sanitize` runs it too.
"""

import argparse

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def store(out, value, PARTITION: gl.constexpr):
    """One value to a place of each partition's own."""
    gl.store(out + PARTITION, value)


@gluon.jit
def handover_kernel(out, first, second):
    """Three partitions; each is handed the pointer and a number."""
    place = out + gl.program_id(0) * 3
    gl.warp_specialize(
        [(store, (place, first, 0)), (store, (place, second, 1)), (store, (place, first + second, 2))],
        [4, 1],
        [24, 24],
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    out = torch.zeros(64, 3, dtype=torch.int32, device="cuda")
    handover_kernel[(64,)](out, 3, 5, num_warps=4)
    assert out.tolist() == [[3, 5, 8]] * 64
    print("1 passed")
