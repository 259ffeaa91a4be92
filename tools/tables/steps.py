"""Tables of docs/results/steps.md: time and memory of a training step."""

import math

from benchmarks.shapes import value_dim_of
from benchmarks.step_models import MODELS
from lab.studies.study_tables import table
from lab.training.gaps import interval
from sagebwd.cli.estimate import estimate
from tools.tables.cells import length, numbers, width
from tools.tables.results import PEERS, rows_of
from tools.tables.speed import BESIDE_FA3

OF_325M = "training_h200_2026-11-28_614c2a6"
STEPS = (
    ("325M model", OF_325M),
    ("the same on two GPUs", "training_2-processes_h200_2026-11-26_093eef2"),
    ("325M model, checkpointing", "training_h200_2026-11-23_00b09c6_checkpoint"),
    ("a block of a video model", "training_h200_2026-11-23_00b09c6_video"),
)
OF_MODELS = (
    "step_h200_2026-11-29_7fc77049", "step_h200_2026-11-29_94980822", "step_h200_2026-11-29_e01d0088",
    "step_h200_2026-11-29_9ef9e0db", "step_h200_2026-11-29_5767ade1",
)  # fmt: skip
"""Files of `python -m benchmarks step`."""
ATTENTIONS_OF_MODELS = (
    "sdpa", "sdpa-unmasked", "flash_attention_4", "flex_attention", "sagebwd", "sagebwd+fuse"
)  # fmt: skip
WITHOUT_WINDOW = [MODELS[name] for name in ("llama-1b-128", "llama-1b-64", "llama-8b", "qwen3-4b")]
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


def models_table(rows: list[dict]) -> str:
    """Rows of `python -m benchmarks step`, a line a case: ms of each attention, and what ours is over the others.

    Over the best is the speed of `sagebwd` and of it with ``fuse``; peak memory and attention's share are of `sagebwd`
    over the best's and of the best. "-" where an attention does not run, or is wrong.
    """
    cases: dict[tuple[str, int, bool], dict[str, dict]] = {}
    for row in rows:
        cases.setdefault((row["model"], row["tokens"], row["compiled"]), {})[row["attention"]] = row
    lines = []
    for (model, tokens, compiled), own in cases.items():
        ours, fused, one = own.get("sagebwd", {}), own.get("sagebwd+fuse", {}), next(iter(own.values()))
        best = own.get(one["best"], {})
        peak = ours["peak_bytes"] / best["peak_bytes"] if best.get("peak_bytes") and ours.get("peak_bytes") else None
        cells = (own[name]["ms"] if own.get(name, {}).get("gate") == "ok" else None for name in ATTENTIONS_OF_MODELS)
        over = (row.get("over_best") for row in (ours, fused))
        lines.append([
            f"`{model}`, {one['layers']} of {one['whole_layers']} layers", length(tokens),
            "compiled" if compiled else "eager", *(_number(ms, 0) for ms in cells),
            " / ".join(_number(ratio, 2) for ratio in over), _number(peak, 2),
            f"{best['attention_share']:.0%}" if best.get("attention_share") else "-",
        ])  # fmt: skip
    head = ["model", "tokens", "", *(f"`{name}`" for name in ATTENTIONS_OF_MODELS), "speed over the best",
            "peak memory over the best's", "attention's share with the best"]  # fmt: skip
    return table(head, lines)


def _number(x: float | None, digits: int) -> str:
    return "-" if x is None else f"{x:.{digits}f}"


def models() -> str:
    """`models_table` of the committed files."""
    return models_table([row for name in OF_MODELS for row in rows_of(name)])


def estimates() -> str:
    """Compiled steps that were measured with FlashAttention-4 and with ours, beside `sagebwd estimate`'s."""
    lines = []
    for what, sizes, theirs_ms, ours_ms in measured_steps():
        found = estimate("H200", **sizes)
        theirs, ours = found.rest_ms + found.others_ms["fa4"], found.rest_ms + found.ours_ms
        step, saved = numbers((theirs, theirs_ms), 0), numbers((theirs - ours, theirs_ms - ours_ms), 1)
        lines.append([what, length(sizes["tokens"]), step, saved, numbers((theirs / ours, theirs_ms / ours_ms), 2)])
    return table(["model", "tokens", "step with FlashAttention-4, ms", "saved, ms", "times as fast"], lines)


def measured_steps() -> list[tuple[str, dict[str, int], float, float]]:
    """Name and sizes of a model, and ms of its compiled step with FlashAttention-4 and with ours."""
    return [*_of_325m_steps(), *_of_model_steps()]


def _of_325m_steps() -> list[tuple[str, dict[str, int], float, float]]:
    ours = of_325m("mixed")
    sizes = {
        "hidden": 1024, "layers": 20, "heads": 16, "kv_heads": 16, "head_dim": 64, "intermediate": 3072,
        "vocabulary": 50304,
    }  # fmt: skip
    return [
        ("325M", sizes | {"tokens": tokens, "batch": row["batch"]}, row["step_ms"], ours[tokens]["step_ms"])
        for tokens, row in sorted(of_325m("fa4").items())
    ]  # fmt: skip


def _of_model_steps() -> list[tuple[str, dict[str, int], float, float]]:
    """Of decoders whose layers are all causal, without a window."""
    cases: dict[tuple[str, int], dict[str, dict]] = {}
    for row in (row for name in OF_MODELS for row in rows_of(name)):
        if row["compiled"] and row["gate"] == "ok" and MODELS[row["model"]] in WITHOUT_WINDOW:
            cases.setdefault((row["model"], row["tokens"]), {})[row["attention"]] = row
    found = []
    for (name, tokens), own in cases.items():
        if {"flash_attention_4", "sagebwd"} <= own.keys():
            given, row = MODELS[name].sizes, own["sagebwd"]
            sizes = {
                "hidden": given["hidden_size"], "layers": row["layers"], "heads": given["num_attention_heads"],
                "kv_heads": given["num_key_value_heads"], "head_dim": given["head_dim"], "tokens": tokens,
                "batch": row["batch"], "intermediate": given["intermediate_size"], "vocabulary": row["vocabulary"],
            }  # fmt: skip
            found.append((f"`{name}`", sizes, own["flash_attention_4"]["ms"], row["ms"]))
    return found


def memory_of_packed() -> str:
    """Peak memory of packed documents, forward and backward, beyond the inputs."""
    rows = [
        [row["case"], f"{row['documents']:,}", f"{row['longest']:,}", f"{row['tokens']:,}",
         f"{row['heads']}/{row['kv_heads']}", f"{row['peak_mib']:,.0f}", f"{row['fa4_peak_mib']:,.0f}",
         f"{row['over']:.2f}"]
        for row in rows_of("packed-skew_h200_2026-11-29_7fc77049")
    ]  # fmt: skip
    head = ["documents", "sequences", "longest", "tokens", "heads, query/key", "`mixed`, MiB", "FlashAttention-4, MiB",
            "over it"]  # fmt: skip
    return table(head, rows)


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
