"""Launches of the Hopper kernels by head_dim, each measured on an H200 (docs/kernels.md)."""

from __future__ import annotations

# Registers a thread at launch, which fix how many programs share an SM: two at head_dim 128, where O alone takes 64 of
# a thread's registers, three at 64.
FORWARD = {64: {"STAGES": 2, "num_warps": 4, "maxnreg": 80}, 128: {"STAGES": 2, "num_warps": 4, "maxnreg": 128}}

# P V in 16 bit: warpgroups that share what a program's warp loads, the stages of its ring and the keys of one.
FORWARD_16BIT = {
    64: {"CONSUMERS": 3, "STAGES": 3, "BLOCK_K": 128, "REGISTERS": 160, "maxnreg": 128, "num_warps": 4},
    128: {"CONSUMERS": 2, "STAGES": 2, "BLOCK_K": 128, "REGISTERS": 240, "maxnreg": 168, "num_warps": 4},
}

# Warpgroups that share what a program's warp loads, and the stages of its ring.
CONSUMERS = {"dkdv": {64: 3, 128: 2}, "dq": {64: 2, 128: 2}}
STAGES = {"dkdv": {64: 4, 128: 2}, "dq": {64: 3, 128: 2}}
# Registers of a thread at launch and of one that computes, by warpgroups; the loading warp's 128 threads keep 24 each.
REGISTERS = {2: (168, 240), 3: (128, 160)}
# One kernel for dQ, dK and dV: two warpgroups, and the queries of a stage.
BACKWARD = {
    64: {"STAGES": 3, "BLOCK_Q": 128, "REGISTERS": 240, "maxnreg": 168, "num_warps": 4},
    128: {"STAGES": 2, "BLOCK_Q": 64, "REGISTERS": 240, "maxnreg": 168, "num_warps": 4},
}


def launch(kernel: str, head_dim: int) -> dict[str, int]:
    """Compile-time options of a kernel whose warpgroups share a ring."""
    consumers = CONSUMERS[kernel][head_dim]
    at_launch, computing = REGISTERS[consumers]
    stages = STAGES[kernel][head_dim]
    return {"CONSUMERS": consumers, "STAGES": stages, "REGISTERS": computing, "maxnreg": at_launch, "num_warps": 4}
