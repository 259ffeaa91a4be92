"""Who may compute attention under "auto", by name; imports neither torch nor a peer.

A contender in full precision is one of torch's own functions, by what computes it, or a peer: a package of its own.
"""

from __future__ import annotations

from sagebwd import counts

# sagebwd's kernels, in low precision.
LOW = "low"
# Torch's function with what torch picks, with one of its backends, and torch's function of packed sequences.
TORCH, CUDNN, FLASH, EFFICIENT, VARLEN = "torch", "cudnn", "flash", "efficient", "varlen"
FA4, FA3 = "fa4", "fa3"
PEERS = (FA4, FA3)
# In words.
NAMES = {
    TORCH: "torch", CUDNN: "torch's cuDNN", FLASH: "torch's FlashAttention-2", EFFICIENT: "torch's memory-efficient",
    VARLEN: "torch's varlen_attn", FA4: "FlashAttention-4", FA3: "FlashAttention-3",
}  # fmt: skip
# Torch's names of its backends, and of its function of packed sequences, in results files.
PICKED = {
    "CUDNN_ATTENTION": CUDNN, "FLASH_ATTENTION": FLASH, "EFFICIENT_ATTENTION": EFFICIENT, "varlen_attn": VARLEN,
}  # fmt: skip


def handed_over(contender: str) -> str:
    """What a call that a contender ran is counted as."""
    return f"full precision on {NAMES[contender]}" if contender in PEERS else counts.TORCH
