"""Tables of docs/results/steps.md: time and memory of a training step."""

import math

from benchmarks.shapes import value_dim_of
from lab.studies.study_tables import table
from lab.training.gaps import interval
from tools.tables.cells import length, width
from tools.tables.results import PEERS, rows_of
from tools.tables.speed import BESIDE_FA3

OF_325M = "training_h200_2026-11-28_614c2a6"
OF_MODELS = "step_h200_2026-11-29_7fc77049"
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


def spread(row: dict, name: str) -> tuple[float, float]:
    """The 95% interval of a row's speed over its peer's: Student's t, of logarithms over pairs of turns."""
    peer = next(one for one in rows_of(name) if (attention_of(one), one["context"]) == (row["peer"], row["context"]))
    low, high = interval([math.log(theirs / ours) for theirs, ours in zip(peer["all_ms"], row["all_ms"])])
    return math.exp(low), math.exp(high)


def steps() -> str:
    """Time, tokens a second and peak memory of whole training steps."""
    rows = []
    for what, name in STEPS:
        for row in sorted(rows_of(name), key=lambda row: (row["context"], "mixed" in row["attention"])):
            attention = attention_of(row)
            over = ""
            if attention.startswith("mixed"):
                over = f"{row['speedup']:.2f} ({' to '.join(f'{end:.3f}' for end in spread(row, name))})"
            rows.append([what, str(row["context"]), ATTENTIONS[attention], f"{row['step_ms']:.1f}",
                         f"{row['tokens_per_s']:,.0f}", over, f"{row['peak_bytes'] / 2**30:.1f}"])  # fmt: skip
    head = ["what", "tokens a sequence", "attention", "step ms", "tokens/s", "`mixed` over the best (95%)", "peak GiB"]
    return table(head, rows)


def models() -> str:
    """Steps of models by name."""
    return models_table(rows_of(OF_MODELS))


def models_table(rows: list[dict]) -> str:
    """Rows of `python -m benchmarks step`, a line a case: speed of ours over the best of the others and over `sdpa`.

    Peak memory is of `sagebwd` over the best's. "-" where one does not run or is wrong.
    """
    cases: dict[tuple[str, int, bool], dict[str, dict]] = {}
    for row in rows:
        cases.setdefault((row["model"], row["tokens"], row["compiled"]), {})[row["attention"]] = row
    lines = []
    for (model, tokens, compiled), own in cases.items():
        ours, fused = (own.get(name, {}) for name in ("sagebwd", "sagebwd+fuse"))
        best = own.get(ours.get("best"), {})
        right = {name: row["ms"] for name, row in own.items() if row["gate"] == "ok"}
        over_sdpa = right["sdpa"] / right["sagebwd"] if {"sdpa", "sagebwd"} <= right.keys() else None
        peak = ours["peak_bytes"] / best["peak_bytes"] if best.get("peak_bytes") and ours.get("peak_bytes") else None
        ratios = ours.get("over_best"), fused.get("over_best"), over_sdpa, peak
        whole = next(iter(own.values()))
        lines.append([
            f"`{model}`, {whole['layers']} of {whole['whole_layers']} layers", length(tokens),
            "compiled" if compiled else "eager", f"`{best['attention']}`, {best['ms']:.0f} ms" if best else "-",
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            f"{best['attention_share']:.0%}" if best.get("attention_share") else "-",
        ])  # fmt: skip
    head = ["model", "tokens", "", "the best of the others", "`sagebwd` over it", "fused", "`sagebwd` over `sdpa`",
            "peak over the best's", "attention's share of the best"]  # fmt: skip
    return table(head, lines)


def longest_sequences() -> str:
    """The longest sequence that one GPU trains."""
    rows = [
        [ATTENTIONS[attention_of(row)], f"{row['context']:,}", f"{row['too_large']:,}"]
        for row in rows_of("largest-context_h200_2026-11-23_00b09c6")
    ]
    return table(["attention", "longest sequence", "out of memory at"], rows)


def calls_of(tokens: int) -> dict[tuple[int, int], dict[str, dict]]:
    """By both head_dims and attention, rows of forward + backward without a mask on an H200.

    FlashAttention-4's results may be wrong there: it holds no less memory for that.
    """
    found: dict[tuple[int, int], dict[str, dict]] = {}
    for row in (row for name in BESIDE_FA3 for row in rows_of(name)):
        if (row["tokens"], row["causal"], row["direction"]) == (tokens, False, "fwd+bwd") and row["peak_bytes"]:
            attention = row["recipe"] if row["impl"] == "hopper" else row["impl"]
            found.setdefault((row["head_dim"], value_dim_of(row)), {})[attention] = row
    return found


def over_flash_attention(what: str, own: dict[str, dict]) -> float:
    """Bytes of `mixed` over those of FlashAttention-4, or of -3 where that does not run."""
    return own["mixed"][what] / own.get("fa4", own.get("fa3"))[what]


def memory_of_a_call() -> str:
    """Peak memory of one call in MiB, and both peak and what is kept for backward over FlashAttention's."""
    names, rows = ("mixed", "fa4", "fa3", "cudnn"), []
    for widths, own in sorted(calls_of(4096).items()):
        cells = [f"{own[name]['peak_bytes'] / 2**20:.0f}" if name in own else "-" for name in names]
        over = [f"{over_flash_attention(what, own):.2f}" for what in ("peak_bytes", "kept_bytes")]
        rows.append([width(*widths), *cells, *over])
    over = "peak over FlashAttention's", "kept over FlashAttention's"
    return table(["head_dim", *(ATTENTIONS[name] for name in names), *over], rows)
