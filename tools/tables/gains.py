"""What a step of a known model gains, estimated from files: the table of docs/questions.md.

A step is attention, whose time was measured at heads of 128, and everything else, at the rate that the products of a
video model's block had beside its attention in a measured step (width 3072, its norms and optimiser included).
"""

from lab.studies.study_tables import table
from tools.tables.cells import length
from tools.tables.results import rows_of
from tools.tables.speed import LENGTHS

STEP, CALLS = "training_h200_2026-11-23_00b09c6_video", "attention_h200_2026-11-28_2263a1c"
TOKENS = 16384
"""Of the calls of `CALLS`, over their batch."""
MODELS = {  # weights that multiply tokens, layers, query heads of 128
    "1.2B: 16 layers, width 2048": (1.2e9, 16, 16),
    "7B: 32 layers, width 4096": (6.7e9, 32, 32),
    "70B: 80 layers, width 8192": (70e9, 80, 64),
}


def rate() -> float:
    """FLOPs of linear layers a second: 6 a weight and token, over a measured step's time outside of attention."""
    row = next(row for row in rows_of(STEP) if row["attention"] == "fa4")
    outside = row["step_ms"] - row["parts"]["attention"] - row["parts"]["passes"]
    return 6 * row["parameters"] * row["context"] * row["batch"] / (outside / 1e3)


def calls() -> dict[int, tuple[float, float, int]]:
    """By length, ms of `mixed` and of the fastest BF16 kernel under a causal mask, and the heads."""
    return {
        row["tokens"]: (row["ms"], row["peer_ms"], row["heads"])
        for row in rows_of(CALLS)
        if (row["recipe"], row["direction"], row["causal"], row["head_dim"]) == ("mixed", "fwd+bwd", True, 128)
        and row["heads"] == row["kv_heads"] and row["batch"] * row["tokens"] == TOKENS
    }  # fmt: skip


def estimate(weights: float, layers: int, heads: int, tokens: int) -> tuple[float, float]:
    """Attention's share of a step by the fastest BF16 kernel, and how many times as fast the step is by `mixed`."""
    ms, peer_ms, timed = calls()[tokens]
    times = layers * heads / timed
    other = 1e3 * 6 * weights * TOKENS / rate()
    whole = other + times * peer_ms
    return times * peer_ms / whole, whole / (other + times * ms)


def gains() -> str:
    """A row a model: share and speed by length."""
    rows = []
    for name, model in MODELS.items():
        found = [estimate(*model, tokens) for tokens in LENGTHS]
        rows.append([name, *(f"{share:.0%}, {speed:.2f}" for share, speed in found)])
    return table(["model, heads of 128, causal", *map(length, LENGTHS)], rows)
