"""Tables of docs/results/steps.md: time and memory of a training step."""

from lab.studies.study_tables import table
from tools.tables.results import PEERS, rows_of
from tools.tables.speed import UNROTATED

OF_325M = "training_h200_2026-11-28_614c2a6"
STEPS = (
    ("325M model", OF_325M),
    ("the same on two GPUs", "training_2-processes_h200_2026-11-26_093eef2"),
    ("325M model, checkpointing", "training_h200_2026-11-23_00b09c6_checkpoint"),
    ("a block of a video model", "training_h200_2026-11-23_00b09c6_video"),
)
ATTENTIONS = {**PEERS, "mixed": "`mixed`", "mixed+fused": "`mixed`, [fused](../qk-norm-rope.md#in-transformers)"}


def attention_of(row: dict) -> str:
    """Recipe or peer of a row, without the kernels that ran it: `mixed` of `mixed@hopper`."""
    return row["attention"].partition("@")[0]


def of_325m(attention: str) -> dict[int, dict]:
    """By tokens a sequence, the rows of the 325M model with an attention."""
    return {row["context"]: row for row in rows_of(OF_325M) if attention_of(row) == attention}


def steps() -> str:
    """Time, tokens a second and peak memory of whole training steps."""
    rows = []
    for what, name in STEPS:
        for row in sorted(rows_of(name), key=lambda row: row["context"]):
            attention = attention_of(row)
            over = f"{row['speedup']:.2f}" if attention.startswith("mixed") else ""
            rows.append([what, str(row["context"]), ATTENTIONS[attention], f"{row['step_ms']:.1f}",
                         f"{row['tokens_per_s']:,.0f}", over, f"{row['peak_bytes'] / 2**30:.1f}"])  # fmt: skip
    head = ["what", "tokens a sequence", "attention", "step ms", "tokens/s", "`mixed` over the best", "peak GiB"]
    return table(head, rows)


def longest_sequences() -> str:
    """The longest sequence that one GPU trains."""
    rows = [
        [ATTENTIONS[attention_of(row)], f"{row['context']:,}", f"{row['too_large']:,}"]
        for row in rows_of("largest-context_h200_2026-11-23_00b09c6")
    ]
    return table(["attention", "longest sequence", "out of memory at"], rows)


def unmasked_calls(tokens: int) -> dict[tuple[int, str], dict]:
    """By head_dim and attention, rows of forward + backward without a mask."""
    return {
        (row["head_dim"], row["recipe"] if row["impl"] == "hopper" else row["impl"]): row
        for row in rows_of(UNROTATED)
        if (row["tokens"], row["causal"], row["direction"]) == (tokens, False, "fwd+bwd")
    }


def memory_of_a_call() -> str:
    """Peak memory of one call in MiB."""
    found = unmasked_calls(4096)
    names = ("mixed", "fa4", "cudnn")
    rows = [
        [str(head_dim), *(f"{found[head_dim, name]['peak_bytes'] / 2**20:.0f}" for name in names)]
        for head_dim in (64, 128)
    ]
    return table(["head_dim", *(ATTENTIONS[name] for name in names)], rows)
