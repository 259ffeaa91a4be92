"""Launches of the Hopper kernels by head_dim, each measured on an H200 (docs/kernels.md)."""

from __future__ import annotations

# Registers a thread at launch, which fix how many programs share an SM: two at head_dim 128, where O alone takes 64 of
# a thread's registers, three at 64.
FORWARD = {64: {"STAGES": 2, "num_warps": 4, "maxnreg": 80}, 128: {"STAGES": 2, "num_warps": 4, "maxnreg": 128}}

# The others' warpgroups (CONSUMERS) share the ring of stages that a program's warp loads. Registers of a thread that
# computes and of one at launch, for two warpgroups and three; the loading warp's 128 threads keep 24 each.
_TWO = {"REGISTERS": 240, "maxnreg": 168, "num_warps": 4}
_THREE = {"REGISTERS": 160, "maxnreg": 128, "num_warps": 4}
# P V in 16 bit.
FORWARD_16BIT = {
    64: {"CONSUMERS": 3, "STAGES": 3, "BLOCK_K": 128, **_THREE},
    128: {"CONSUMERS": 2, "STAGES": 2, "BLOCK_K": 128, **_TWO},
}
DKDV = {64: {"CONSUMERS": 3, "STAGES": 4, **_THREE}, 128: {"CONSUMERS": 2, "STAGES": 2, **_TWO}}
DQ = {64: {"CONSUMERS": 2, "STAGES": 3, **_TWO}, 128: {"CONSUMERS": 2, "STAGES": 2, **_TWO}}
# One kernel for dQ, dK and dV, always of two warpgroups.
BACKWARD = {64: {"STAGES": 3, "BLOCK_Q": 128, **_TWO}, 128: {"STAGES": 2, "BLOCK_Q": 64, **_TWO}}
