"""Write the tables of README and pages from results files: `python -m tools.tables` (all), or with names of pages.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. NAME is a function here, which returns Markdown and
names the files that it reads; a new results file changes nothing until a function names it.
"""

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from benchmarks.shapes import value_dim_of
from lab.studies import causality
from lab.training.gaps import gaps
from lab.training.packed import read as runs_of
from sagebwd.diagnostics import layers, summary
from sagebwd.diagnostics.tables import LABELS

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "docs" / "results"
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
TENSORS = ("o", "dq", "dk", "dv")
RECIPES = ("mixed", "token", "paper")
WAYS = ("fwd", "bwd", "fwd+bwd")
BESIDE_FA3 = (  # FlashAttention-3 is among the best: 128; 64; 256; 72, 80 and 112; 96, 192 and 192/128
    "attention_h200_2026-11-28_2263a1c",
    "attention_h200_2026-11-28_05d8c37",
    "attention_h200_2026-11-28_49cd924",
    "attention_h200_2026-11-28_214a762",
    "attention_h200_2026-11-28_9f53c6e",
)
WIDTHS = {  # by card, the later file counts for a call of two
    "H200": BESIDE_FA3,
    "H100": ("attention_h100-80gb-hbm3_2026-11-27_3bed015",),
}
BLOCKS = ("block_h200_2026-11-28_614c2a6", "block_h200_2026-11-28_fa73f48")
LENGTHS = (4096, 8192, 16384)
TABLES: dict[str, Callable[[], str]] = {}


def named(function: Callable[[], str]) -> Callable[[], str]:
    """Register a table under its function's name, with dashes."""
    TABLES[function.__name__.replace("_", "-")] = function
    return function


def written(text: str) -> str:
    """A page's text with each of its tables written anew; KeyError of a name that no function has."""
    return BLOCK.sub(lambda block: f"{block[1]}{TABLES[block[2]]()}\n{block[3]}", text)


def pages() -> list[Path]:
    """README and the pages of docs and dev."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "dev").rglob("*.md"))]


@cache
def rows_of(name: str) -> list[dict]:
    """Rows of a file of benchmarks/results."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def between(values: Iterable[float], digits: int = 2) -> str:
    """The least and the largest of some numbers."""
    values = list(values)
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def errors(values: Iterable[float], digits: int = 4) -> str:
    """Numbers of several tensors or directions in one cell."""
    return " / ".join(f"{value:.{digits}f}" for value in values)


def gap(value: float, interval: tuple[float, float] | None, digits: int = 3) -> str:
    """A mean gap with its 95% interval."""
    mean = f"{value:+.{digits}f}"
    return f"{mean} ({interval[0]:+.{digits}f} to {interval[1]:+.{digits}f})" if interval else mean


def length(tokens: int) -> str:
    """A number of tokens, in thousands where it is whole ones."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


# -- Speed ---------------------------------------------------------------------------------------------------------


def speeds(*files: str) -> dict[tuple[int, int, bool, int], dict[str, float]]:
    """By head_dim, value_dim, causal and tokens: speed of `mixed` over the best BF16 kernel's, by direction."""
    found: dict[tuple[int, int, bool, int], dict[str, float]] = {}
    for name in files:
        for row in rows_of(name):
            if (row["impl"], row["recipe"]) == ("hopper", "mixed") and row["heads"] == row["kv_heads"]:
                call = row["head_dim"], value_dim_of(row), row["causal"], row["tokens"]
                found.setdefault(call, {})[row["direction"]] = row["peer_ms"] / row["ms"]
    return found


def both(card: str) -> dict[tuple[int, int, bool, int], float]:
    """By call, the speed forward and backward together."""
    return {call: ways["fwd+bwd"] for call, ways in speeds(*WIDTHS[card]).items()}


@named
def speed_by_head_dim() -> str:
    """Forward / both of both cards, by head_dim, mask and length."""
    cards = {card: speeds(*files) for card, files in WIDTHS.items()}
    rows = []
    for causal in (True, False):
        for head_dim, value_dim in sorted({call[:2] for call in cards["H200"]}):
            ways = [found.get((head_dim, value_dim, causal, many)) for found in cards.values() for many in LENGTHS]
            cells = ["not timed" if own is None else errors((own["fwd"], own["fwd+bwd"]), 2) for own in ways]
            name = str(head_dim) if head_dim == value_dim else f"{head_dim}/{value_dim}"
            rows.append([name, "causal" if causal else "none", *cells])
    return table(["head_dim", "mask", *(f"{card}, {length(many)}" for card in cards for many in LENGTHS)], rows)


@named
def speed_beside_flash_attention_3() -> str:
    """`mixed` over FlashAttention-3 by mask and length."""
    ms: dict[tuple[int, int], dict[tuple[bool, int, str, str], float]] = {}
    for row in (row for name in BESIDE_FA3 for row in rows_of(name) if row["gate"] == "ok"):
        call = row["causal"], row["tokens"], row["direction"], row["impl"]
        ms.setdefault((row["head_dim"], value_dim_of(row)), {})[call] = row["ms"]
    calls = [(causal, many) for causal in (True, False) for many in LENGTHS]
    rows = []
    for (head_dim, value_dim), of in sorted(ms.items()):
        own, peer = ([[of.get((*call, way, impl)) for way in WAYS] for call in calls] for impl in ("hopper", "fa3"))
        cells = [
            " / ".join("-" if theirs is None else f"{theirs / ours:.2f}" for ours, theirs in zip(*ways))
            for ways in zip(own, peer)
        ]
        rows.append([str(head_dim) if head_dim == value_dim else f"{head_dim}/{value_dim}", *cells])
    return table(
        ["head_dim", *(f"{'causal' if causal else 'no mask'}, {length(many)}" for causal, many in calls)], rows
    )


@named
def speed_lengths() -> str:
    """Speed without the rotation from 2K to 32K tokens."""
    found = speeds("attention_h200_2026-11-23_0c6affd_2k-grouped-video", "attention_h200_2026-11-23_0c6affd")
    lengths = (2048, 4096, 8192, 16384, 32768)
    rows = [
        [str(head_dim), "causal" if causal else "none",
         *(f"{found[head_dim, head_dim, causal, tokens]['fwd+bwd']:.2f}" for tokens in lengths)]
        for head_dim in (64, 128) for causal in (True, False)
    ]  # fmt: skip
    return table(["head_dim", "mask", *map(length, lengths)], rows)


@named
def speed_fp8() -> str:
    """`mixed` over cuDNN's FP8, and the errors of all."""
    found: dict[tuple[int, bool], dict[str, dict[str, dict]]] = {}
    for row in rows_of("attention_h200_2026-11-26_b6e3431_cudnn-fp8"):
        kernels = found.setdefault((row["tokens"], row["causal"]), {})
        kernels.setdefault(row["impl"], {})[row["direction"]] = row
    rows = []
    for (tokens, causal), kernels in found.items():
        mine, *peers = (kernels[name] for name in ("hopper", "cudnn-fp8", "cudnn-fp8-e4m3"))
        over = [errors((peer[way]["ms"] / mine[way]["ms"] for way in WAYS), 2) for peer in peers]
        own = [errors((ways["fwd"]["errors"][x] for x in TENSORS), 3) for ways in (mine, *peers)]
        rows.append([f"{length(tokens)}{', causal' * causal}", *over, *own])
    names = ["e5m2", "e4m3"]
    return table(["tokens", *(f"over {name}" for name in names), "errors of `mixed`: O / dQ / dK / dV", *names], rows)


@named
def speed_bursts() -> str:
    """Forward / both over the fastest of what `sagebwd doctor --measure` timed, by kernels that run for 8 ms each."""
    found: dict[tuple[int, int], dict[tuple[str, int], dict[str, float]]] = {}
    for name in ("timings_h200_2026-11-28_05d8c37", "timings_h200_2026-11-28_49cd924"):
        for row in rows_of(name):
            size = row["batch"] * row["heads"] * row["tokens"] * row["value_dim"]
            if row["kind"] in ("causal", "full") and row["tokens"] in (2048, 8192) and size > 1 << 24:
                times = [row["torch_ms"], *(ms for ms, _ in row["others"].values())]
                calls = found.setdefault((row["head_dim"], row["value_dim"]), {})
                ways = calls.setdefault((row["kind"], row["tokens"]), {})
                ways[row["direction"]] = min(ms for ms in times if ms) / row["ms"]
    calls = [(kind, tokens) for kind in ("causal", "full") for tokens in (2048, 8192)]
    rows = []
    for (head_dim, value_dim), of in sorted(found.items()):
        ways = [of.get(call) for call in calls]
        cells = ["not timed" if own is None else errors((own["forward"], own["training"]), 2) for own in ways]
        rows.append([str(head_dim) if head_dim == value_dim else f"{head_dim}/{value_dim}", *cells])
    heads = [f"{'causal' if kind == 'causal' else 'no mask'}, {length(tokens)}" for kind, tokens in calls]
    return table(["head_dim", *heads], rows)


@named
def speed_masks() -> str:
    """`mixed` over FlexAttention and FlashAttention-4 under block masks."""
    rows = []
    for name in ("masks_h200_2026-11-25_7133de8", "masks_h200_2026-11-25_7133de8_gpt-oss"):
        own = [row for row in rows_of(name) if row["attention"] == "mixed"]
        found = {(row["head_dim"], row["mask"], row["direction"]): row["over"] for row in own}
        for mask, shown in {row["mask"]: row["shown"] for row in own}.items():
            cells = []
            for head_dim in (128, 64):
                for peer in ("flex", "fa4"):
                    ways = [found.get((head_dim, mask, way), {}).get(peer) for way in ("fwd", "fwd+bwd")]
                    cells.append("-" if None in ways else errors(ways, 2))
            rows.append([f"{mask}, {length(own[0]['tokens'])}", f"{shown:.1%}", *cells])
    peers = [f"{head_dim}: over {peer}" for head_dim in (128, 64) for peer in ("FlexAttention", "FlashAttention-4")]
    return table(["mask", "pairs shown", *peers], rows)


def packed_rows() -> dict[str, dict[str, float]]:
    """By packed call, the speed of `mixed` over FlashAttention-4 in each direction."""
    found: dict[str, dict[str, float]] = {}
    for row in rows_of("packed_h200_2026-11-25_cbd8f97"):
        if row["impl"] == "hopper":
            lengths, kv = row["lengths"], f" on {row['kv_heads']}" * (row["kv_heads"] != row["heads"])
            one = len(set(lengths)) == 1
            what = f"{len(lengths)} x {lengths[0]}" if one else f"{len(lengths)} of {min(lengths)} to {max(lengths)}"
            call = f"{row['head_dim']} | {row['heads']}{kv} | {what}"
            found.setdefault(call, {})[row["direction"]] = row["peer_ms"] / row["ms"]
    return found


@named
def speed_packed() -> str:
    """`mixed` over FlashAttention-4 on packed sequences."""
    rows = [[call, errors((ways[way] for way in WAYS), 2)] for call, ways in packed_rows().items()]
    return table(["head_dim | heads | sequences", "forward / backward / both"], rows).replace("| --- | --- |",
                 "| --- | --- | --- | --- |", 1)  # fmt: skip


@named
def speed_auto() -> str:
    """Calls of `auto` beside torch's own."""
    rows = []
    for card, name in (
        ("H100", "auto_h100-80gb-hbm3_2026-11-27_3bed015"),
        ("H100, another machine", "auto_h100-80gb-hbm3_2026-11-27_29638e6"),
        ("H200", "auto_h200_2026-11-26_3f70cad"),
    ):
        cells = []
        for recipe in ("mixed", "full"):
            own = [row["torch_ms"] / row["ms"] for row in rows_of(name) if row["ran"].startswith(recipe)]
            cells += [str(len(own)), between(own)]
        rows.append([card, *cells])
    head = ["card", "calls that ran `mixed`", "their speed over torch's", "calls handed to torch", "their speed"]
    return table(head, rows)


# -- Steps ---------------------------------------------------------------------------------------------------------

STEPS_OF_325M = "training_h200_2026-11-28_614c2a6"
STEPS = (
    ("325M model", STEPS_OF_325M),
    ("the same on two GPUs", "training_2-processes_h200_2026-11-26_093eef2"),
    ("325M model, checkpointing", "training_h200_2026-11-23_00b09c6_checkpoint"),
    ("a block of a video model", "training_h200_2026-11-23_00b09c6_video"),
)
ATTENTIONS = {
    "cudnn": "cuDNN", "fa4": "FlashAttention-4", "mixed": "`mixed`",
    "mixed+fused": "`mixed`, [fused](../qk-norm-rope.md#in-transformers)",
}  # fmt: skip

BLOCK_PEERS = {"fa4": "FlashAttention-4", "fa3": "FlashAttention-3", "cudnn": "cuDNN"}


@named
def steps() -> str:
    """Whole training steps."""
    rows = []
    for what, name in STEPS:
        for row in sorted(rows_of(name), key=lambda row: row["context"]):
            attention = row["attention"].partition("@")[0]
            peer = f"{row['speedup']:.2f}" if attention.startswith("mixed") else ""
            rows.append([what, str(row["context"]), ATTENTIONS[attention], f"{row['step_ms']:.1f}",
                         f"{row['tokens_per_s']:,.0f}", peer, f"{row['peak_bytes'] / 2**30:.1f}"])  # fmt: skip
    head = ["what", "tokens a sequence", "attention", "step ms", "tokens/s", "`mixed` over the best", "peak GiB"]
    return table(head, rows)


@named
def blocks() -> str:
    """Norm, rotary embedding and attention in one call, and BF16 attention behind a compiled norm and rotation."""
    calls: dict[tuple[int, int, int, int, str], dict[str, float]] = {}
    for name in BLOCKS:
        for x in rows_of(name):
            if x["part"] == "block":
                call = x["head_dim"], x["heads"], x["kv_heads"], x["tokens"], x["direction"]
                calls.setdefault(call, {})[x["name"]] = x["ms"]
    rows = []
    for (head_dim, heads, kv_heads, tokens, way), ms in sorted(calls.items()):
        best = min(ms[peer] for peer in BLOCK_PEERS)
        cells = (f"{ms[other]:.3f}" for other in ("sagebwd", "compiled + sagebwd", *BLOCK_PEERS))
        on = f"{heads}" if heads == kv_heads else f"{heads} on {kv_heads}"
        said = f"{length(tokens)}, {'forward' if way == 'fwd' else 'both'}"
        rows.append([str(head_dim), on, said, *cells, f"{best / ms['sagebwd']:.2f}"])
    named = ["this call", "compiled, then `mixed`", *BLOCK_PEERS.values(), "over the best"]
    return table(["head_dim", "heads", "tokens", *named], rows)


@named
def fused_steps() -> str:
    """Speed of a step of the 325M model over the best BF16 attention's, by length, fused and not."""
    speeds_of = {x: step_speeds(x) for x in ("mixed", "mixed+fused")}
    lengths = sorted(speeds_of["mixed"])
    names = {"mixed": "`mixed`", "mixed+fused": "`mixed`, fused"}
    rows = [[names[name], *(f"{own[tokens]:.3f}" for tokens in lengths)] for name, own in speeds_of.items()]
    return table(["", *map(length, lengths)], rows)


@named
def longest() -> str:
    """The longest sequence that one GPU trains."""
    rows = [
        [ATTENTIONS[row["attention"].partition("@")[0]], f"{row['context']:,}", f"{row['too_large']:,}"]
        for row in rows_of("largest-context_h200_2026-11-23_00b09c6")
    ]
    return table(["attention", "longest sequence", "out of memory at"], rows)


@named
def memory_of_a_call() -> str:
    """Peak memory of one call in MiB."""
    found = {
        (row["head_dim"], ATTENTIONS.get(row["recipe"] if row["impl"] == "hopper" else row["impl"])): row
        for row in rows_of("attention_h200_2026-11-23_0c6affd")
        if (row["tokens"], row["causal"], row["direction"]) == (4096, False, "fwd+bwd")
    }
    names = ["`mixed`", "FlashAttention-4", "cuDNN"]
    rows = [
        [str(head_dim), *(f"{found[head_dim, name]['peak_bytes'] / 2**20:.0f}" for name in names)]
        for head_dim in (64, 128)
    ]
    return table(["head_dim", *names], rows)


@named
def ring() -> str:
    """Milliseconds of one sequence over two GPUs."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows_of("ring_2-processes_h200_2026-11-26_093eef2"):
        found.setdefault((row["head_dim"], row["tokens"]), {})[row["attention"]] = row["ms"]["both"]
    rows = []
    for (head_dim, tokens), ms in found.items():
        best = {
            kernel: min(value for name, value in ms.items() if name.startswith(f"torch {kernel}"))
            for kernel in ("fa4", "cudnn")
        }
        mine = ms["sagebwd mixed"]
        times = (ms["one process, mixed"], mine, best["fa4"], best["cudnn"])
        rows.append([f"{head_dim}, {length(tokens)}", *(f"{value:.1f}" for value in times),
                     f"{mine / min(best.values()):.2f}"])  # fmt: skip
    return table(["head_dim, tokens", "`mixed` on one GPU", "`mixed` on two", "torch, FlashAttention-4",
                  "torch, cuDNN",
                  "`mixed` over the best of torch's"], rows)  # fmt: skip


# -- Errors --------------------------------------------------------------------------------------------------------


@cache
def trace() -> list:
    """Rows of heads of SmolLM2-135M."""
    return summary.read(RUNS / "trace_smollm2.json.xz")


@cache
def of_a_trained_model() -> dict[str, dict[str, tuple[float, float]]]:
    """By recipe and tensor, the error over all layers and the worst layer's."""
    return summary.overall(trace())


@cache
def gaussian() -> dict[tuple, float]:
    """By recipe (or `printed`, the paper's), sigma and tensor, the error on Gaussian data."""
    found = {}
    for name in ("gaussian_plain", "gaussian_plain_mixed"):
        for row in json.loads((RUNS / f"{name}.json").read_text(encoding="utf-8")):
            found[row["recipe"], row["sigma"], row["tensor"]] = row["relative_l2"]
            found["printed", row["sigma"], row["tensor"]] = row["expected_l2"]
    return found


@cache
def sinks() -> list[dict]:
    """Rows of heads with a sink."""
    return json.loads((RUNS / "sinks_64.json").read_text(encoding="utf-8"))["rows"]


@named
def errors_trained() -> str:
    """Errors of SmolLM2 over all layers."""
    rows = [
        [f"`{recipe}`", *(errors(own[name][worst] for name in TENSORS) for worst in (0, 1))]
        for recipe, own in of_a_trained_model().items()
    ]
    return table(["recipe", "O / dQ / dK / dV, all layers", "the worst layer and window"], rows)


@named
def errors_by_data() -> str:
    """Errors on four kinds of data."""
    first = {(row["recipe"], row["logits"]): row for row in sinks() if row["kind"] == "first"}
    rows = [
        [f"`{recipe}`", errors(gaussian()[recipe, 1, x] for x in TENSORS),
         *(errors(first[recipe, logits][x] for x in TENSORS) for logits in (8, 12)),
         errors(of_a_trained_model()[recipe][x][0] for x in TENSORS)]
        for recipe in RECIPES
    ]  # fmt: skip
    rows.append(["`full`", "not measured", "not measured", "not measured",
                 errors(of_a_trained_model()["full"][x][0] for x in TENSORS)])  # fmt: skip
    weights = (f"first key with {first['mixed', logits]['weight']:.0%}" for logits in (8, 12))
    return table(["recipe", "Gaussian, sigma 1", *weights, "SmolLM2-135M"], rows)


@named
def errors_by_sigma() -> str:
    """The paper's Table 1."""
    names = ("printed", *RECIPES)
    rows = [
        [str(sigma), *(errors(gaussian()[name, sigma, x] for x in TENSORS) for name in names)]
        for sigma in sorted({sigma for _, sigma, _ in gaussian()})
    ]
    return table(["sigma of Q and K", "the paper prints", *(f"`{name}`" for name in RECIPES)], rows)


@named
def errors_by_sink() -> str:
    """Errors of SmolLM2's heads by the first key's weight."""
    found = summary.by_weight(trace(), layers.idle(trace()))
    rows = []
    for least, most in zip(summary.WEIGHTS, summary.WEIGHTS[1:]):
        medians = [
            errors(statistics.median(row.relative_l2[name] for row in found[recipe, most]) for name in TENSORS)
            for recipe in RECIPES
        ]
        rows.append([f"{least:g} to {most:g}", str(len(found["full", most])), *medians])
    return table(["weight of the first key", "heads", *(f"`{recipe}`" for recipe in RECIPES)], rows)


@named
def errors_by_product() -> str:
    """Shares of the products in the error."""
    found = summary.shares(summary.read(RUNS / "trace_smollm2_attribution.json.xz"))
    rows = [
        [f"`{recipe}`", LABELS.get(source, source.upper()), " / ".join(f"{share:.0%}" for share in own.values())]
        for (recipe, source), own in found.items()
    ]
    return table(["recipe", "product", "share of the squared error of O / dQ / dK / dV"], rows)


@named
def errors_of_variants() -> str:
    """Errors with and without the rotation."""
    rows = json.loads((RUNS / "trained_heads_smollm2.json").read_text(encoding="utf-8"))["rows"]
    return table(
        ["recipe", "O / dQ / dK / dV"],
        [
            [f"`{name}`",
             errors(math.sqrt(statistics.mean(row["errors"][name][x] ** 2 for row in rows)) for x in TENSORS)]
            for name in rows[0]["errors"] if "smooth_q" not in name  # a field that went
        ],
    )  # fmt: skip


@named
def sinks_by_strength() -> str:
    """Errors by the strength of a sink."""
    first = {(row["logits"], row["recipe"]): row for row in sinks() if row["kind"] == "first"}
    recipes = ("paper", "token(first_keys=0)", "token", "mixed")
    rows = [
        [f"{logits} ({first[logits, 'mixed']['weight']:.2f})",
         *(errors(first[logits, recipe][x] for x in TENSORS[:3]) for recipe in recipes)]
        for logits in sorted({logits for logits, _ in first})
    ]  # fmt: skip
    head = ["logits above the rest (mean weight)", "`paper`: O / dQ / dK", *(f"`{name}`" for name in recipes[1:])]
    return table(head, rows)


@named
def sinks_elsewhere() -> str:
    """Errors beside sinks that are not the first key alone, at 12 logits."""
    kinds = {
        "first": "the first key", "first and mean": "the first key; K and V have a mean of 3",
        "four": "the first four keys", "delimiter": "the first key and one in the middle",
    }  # fmt: skip
    found = {(row["kind"], row["recipe"]): row for row in sinks() if row["logits"] == 12}
    rows = [
        [kinds[kind], *(errors(found[kind, name][x] for x in TENSORS[:3]) for name in RECIPES)]
        for kind in dict.fromkeys(kind for kind, _ in found)
    ]
    return table(["kind", *(f"`{name}`" for name in RECIPES)], rows)


def causal_tables() -> list[str]:
    """What causal outputs and gradients of queries depend on."""
    return causality.markdown(json.loads((RUNS / "causality.json").read_text(encoding="utf-8"))).strip().split("\n\n")


@named
def causality_o() -> str:
    """What an output depends on."""
    return causal_tables()[0]


@named
def causality_dq() -> str:
    """What a query's gradient depends on."""
    return causal_tables()[1]


# -- Training ------------------------------------------------------------------------------------------------------

GRID = (  # variant, model, tokens a step, folders
    ("mixed", "QK-norm", "16K", ("mixed-small",)),
    ("mixed fused", "QK-norm", "16K", ("mixed-small",)),
    ("token with dP in INT8", "QK-norm", "16K", ("mixed-small",)),
    ("mixed", "QK-norm", "131K", ("mixed-large",)),
    ("token", "QK-norm", "16K", ("qknorm-small", "qknorm-small-seed?")),
    ("token", "QK-norm", "131K", ("qknorm-large", "qknorm-large-seed?")),
    ("token", "no QK-norm", "131K", ("no-qknorm-large", "no-qknorm-large-seed?")),
    ("paper", "QK-norm", "16K", ("qknorm-small", "qknorm-small-seed?")),
    ("paper", "QK-norm", "131K", ("qknorm-large", "qknorm-large-seed?")),
    ("paper", "no QK-norm", "131K", ("no-qknorm-large", "no-qknorm-large-seed?")),
)


@cache
def gaps_in(folders: tuple[Path, ...], margin: float = 0.02, in_full_precision: bool = False) -> dict:
    """By variant, the gaps of some folders of runs."""
    found = gaps(list(folders), margin=margin, in_full_precision=in_full_precision)
    return {row.variant: row for row in found}


def grid(folders: tuple[str, ...]) -> dict:
    """By variant, the gaps of cells of the grid."""
    return gaps_in(tuple(path for name in folders for path in sorted((RUNS / "grid").glob(name))))


def verdict(row) -> list[str]:
    """Cells of a gap: the mean with its interval, pairs, p and commits."""
    return [gap(row.mean, row.interval, 4), str(len(row.gaps)), f"{row.p:.4f}",
            ", ".join(f"`{commit}`" for commit in row.commits)]  # fmt: skip


@named
def gaps_from_scratch() -> str:
    """Gaps of models trained from scratch."""
    rows = [[f"`{name}`", f"{model}, {step}", *verdict(grid(folders)[name])] for name, model, step, folders in GRID]
    for name, model in (("256", "head_dim 256, QK-norm, 16K"), ("96", "head_dim 96, QK-norm, 16K"),
                        ("192-128", "head_dim 192/128, no QK-norm, 16K")):  # fmt: skip
        rows.append(["`mixed`", model, *verdict(gaps_in((RUNS / "widths" / name,))["mixed"])])
    return table(["recipe", "model, tokens a step", "gap (95%)", "pairs", "p", "commit"], rows)


# Folders of SmolLM2 trained on, by learning rate; sequences have 2048 tokens where nothing else is said.
TRAINED_ON = {"lr-0.0001": "1e-4", "8k/lr-0.0001": "1e-4, 8K tokens a sequence", "lr-0.001": "1e-3"}


def trained_on(folder: str, weights: bool = False) -> dict:
    """By variant, the gaps of SmolLM2 trained on."""
    return gaps_in((RUNS / "continued" / folder,), 0.001, weights)


@named
def gaps_trained_on() -> str:
    """Gaps of SmolLM2 trained on."""
    rows = []
    for folder, name in TRAINED_ON.items():
        for variant, row in trained_on(folder).items():
            if row.interval is not None:
                weights = trained_on(folder, True)[variant]
                rows.append([f"`{variant}`", name, gap(row.mean, row.interval, 5), f"{row.p:.4f}",
                             gap(weights.mean, weights.interval, 5), f"{weights.p:.4f}",
                             str(len(row.gaps)), ", ".join(f"`{commit}`" for commit in row.commits)])  # fmt: skip
    gaps_and_p = "gap by its own attention (95%)", "p", "gap of its weights (95%)", "p"
    return table(["recipe", "rate", *gaps_and_p, "pairs", "commit"], rows)


LONGER = "a longer run, or a larger model, in which it leaves the margin"
AT_MARGIN = f"more pairs: its interval ends at the margin; {LONGER}"
SECOND_LOOK = "heads of 128, whose backward is another kernel; more pairs, as these were a second look"
BRANCHED = "more pairs, or pairs that branch from one checkpoint: an interval within the margin, or above 0"
OTHERS = "another model or text, sequences over 2048 tokens, or more steps, that show a gap"
LONGER_STILL = "another model or text, more steps, or sequences over 8K tokens, that show a gap"
VERDICTS = (  # variant, cells of the grid or the rate, what would change our mind
    ("mixed", ("mixed-small",), LONGER),
    ("mixed fused", ("mixed-small",), AT_MARGIN),
    ("token with dP in INT8", ("mixed-small",), SECOND_LOOK),
    ("token", ("qknorm-small", "qknorm-small-seed?"), "pairs under today's `token`, which is rotated"),
    ("paper", ("qknorm-small", "qknorm-small-seed?"), "more pairs, to tell a gap from chance"),
    ("mixed", ("mixed-large",), BRANCHED),
    ("mixed", "lr-0.0001", LONGER_STILL),
    ("mixed", "8k/lr-0.0001", LONGER_STILL),
    ("token", "lr-0.0001", OTHERS),
    ("token with dP in INT8", "lr-0.0001", "heads of 128; " + OTHERS),
    ("paper", "lr-0.0001", "the authors' kernels, if they show none"),
    ("full precision repeated", "lr-0.001", "more pairs: chance alone reaches beyond the margin at this rate"),
    ("mixed", "lr-0.001", "pairs that leave an interval within the margin, or above 0"),
)  # fmt: skip


def judged(rows: Iterable, margin: float) -> str:
    """What intervals and tests of one claim show."""
    rows = list(rows)
    if all(row.p < 0.05 for row in rows):
        return f"within {margin:g}"
    return "a gap" if all(row.interval[0] > 0 for row in rows) else "undecided"


@named
def verdicts() -> str:
    """Each claim of training with its number, and what would change our mind."""
    found = []
    for variant, where, mind in VERDICTS:
        if isinstance(where, str):
            rows, margin, digits = [trained_on(where)[variant], trained_on(where, True)[variant]], 0.001, 5
            model = f"trained on at {TRAINED_ON[where]}"
        else:
            rows, margin, digits = [grid(where)[variant]], 0.02, 4
            model = f"from scratch, {'131K' if 'large' in where[0] else '16K'}"
        gaps_of = "; weights ".join(gap(row.mean, row.interval, digits) for row in rows)
        found.append([f"`{variant}`, {model}", f"**{judged(rows, margin)}**", gaps_of,
                      "; ".join(f"{row.p:.4f}" for row in rows), str(len(rows[0].gaps)), mind])  # fmt: skip
    return table(["claim", "verdict", "gap (95%)", "p", "pairs", "what would change our mind"], found)


@named
def losses_of_325m() -> str:
    """Held-out losses of the 325M runs."""
    rows = []
    for folder, step in (("120-steps", "2.1M"), ("280-steps", "262K")):
        ends = {}
        for run in runs_of(RUNS / "325m" / folder):
            own = [line for line in run["metrics"] if "held_out_loss" in line]
            ends[run["run"]] = own[-1]["step"], own[-1]["held_out_loss"]
        full = ends["full precision"][1]
        rows += [[name, step, str(last), f"{loss:.4f}", f"{loss - full:+.4f}"] for name, (last, loss) in ends.items()]
    return table(["run", "tokens a step", "steps", "held-out loss", "gap"], rows)


@named
def fine_tuning() -> str:
    """Accuracies of SmolLM2 fine-tuned."""
    rows = []
    for folder, what in (
        ("smollm2-subject", "`subject`, chance 0.25"),
        ("smollm2-neighbours", "`neighbours`, chance 0.5"),
    ):
        content = json.loads((RUNS / "finetune" / folder / "comparison.json").read_text(encoding="utf-8"))
        for row in content["outcomes"]:
            difference = row.get("difference")
            shown = "" if row["variant"] == "full precision" or difference is None else f"{difference:+.4f}"
            rows.append([what, row["variant"], f"{row['mean']:.4f}", shown])
    return table(["task", "variant", "accuracy", "difference to full precision"], rows)


# -- README --------------------------------------------------------------------------------------------------------


def step_speeds(attention: str) -> dict[int, float]:
    """By context, the speed of a step of the 325M model over the best BF16 attention's."""
    rows = rows_of(STEPS_OF_325M)
    return {row["context"]: row["speedup"] for row in rows if row["attention"].partition("@")[0] == attention}


@named
def facts() -> str:
    """What one call, one step and one number cost; then the figure, with three rows of `speed_by_head_dim`."""
    found = both("H200")
    at_8k, h100_at_8k = (
        [ratio for (*_, tokens), ratio in ratios_of.items() if tokens == 8192] for ratios_of in (found, both("H100"))
    )
    one, fused = map(step_speeds, ("mixed", "mixed+fused"))
    calls = {
        (row["impl"], row["head_dim"]): row
        for row in rows_of("attention_h200_2026-11-23_0c6affd")
        if (row["tokens"], row["causal"], row["direction"]) == (16384, False, "fwd+bwd")
    }
    peak, kept = (
        between(calls["hopper", width][name] / calls["fa4", width][name] for width in (64, 128))
        for name in ("peak_bytes", "kept_bytes")
    )
    peaks = {
        row["attention"].partition("@")[0]: row["peak_bytes"] / 2**30
        for row in rows_of(STEPS_OF_325M) if row["context"] == 4096
    }  # fmt: skip
    own = of_a_trained_model()
    mixed, full = ([100 * own[name][x][0] for x in TENSORS[1:]] for name in ("mixed", "full"))
    ratios = [mine / theirs for mine, theirs in zip(mixed, full)]
    lines = [
        f"- **One call**: forward + backward of the recipe `mixed` is {between(at_8k)} times as fast as the best of "
        "FlashAttention-3, FlashAttention-4 and cuDNN in BF16, over nine head_dims from 64 to 256 (8K tokens, "
        f"H200; on an H100, without FlashAttention-3, {between(h100_at_8k)}); short sequences, and calls on a GPU "
        "that has done little before, gain less or lose ([all](docs/results/speed.md)).",
        f"- **One training step** of a 325M model (head_dim 64) is {one[2048]:.2f} (2K tokens), {one[4096]:.2f} (4K), "
        f"{one[8192]:.2f} (8K) and {one[16384]:.2f} (16K) times as fast as with "
        "FlashAttention-4 on one H200 (cuDNN is slower, FlashAttention-3 was not timed); where "
        "[one call](docs/qk-norm-rope.md#in-transformers) does norm and rotary embedding too "
        f"{fused[2048]:.2f}, {fused[4096]:.2f}, {fused[8192]:.2f} and {fused[16384]:.2f} "
        "([steps](docs/results/steps.md)).",
        f"- **Memory**: a call keeps {kept} times what FlashAttention-4's keeps for backward, and its peak is {peak} "
        f"times as high; the step's peak is {peaks['mixed']:.1f} GiB for {peaks['fa4']:.1f} "
        "([memory](docs/results/steps.md#memory)).",
        f"- **Error**: on SmolLM2-135M the gradients of `mixed` are off by {between(mixed, 1)}%, where 16-bit "
        "attention is "
        f"off by {between(full, 1)}%: {min(ratios):.0f} to {max(ratios):.0f} times as much.",
        "- **Largest run**: 325M weights, 252M tokens under an earlier `token` and 73M under today's `mixed`, "
        "one seed each: "
        "too few to tell a gap from chance. At 35M weights and 16K tokens a step the mean of ten seeds of `mixed` is "
        "within 0.02 nats of 16-bit attention's; at 131K that is not shown ([below](#is-it-safe)).",
        "- **Tested GPUs**: H100 and H200 alone, with torch 2.11 and triton 3.6. The project is alpha.",
        "",
        "![Speed over the best BF16 kernel, by head_dim and length](docs/figures/widths.png)",
    ]
    rows = [
        [str(width), *(f"{found[width, width, causal, many]:.2f}" for causal in (True, False) for many in LENGTHS)]
        for width in (64, 128, 256)
    ]
    masks = [f"{mask}, {length(many)}" for mask in ("causal", "no mask") for many in LENGTHS]
    said = (
        "`mixed`, forward + backward, over the best of FlashAttention-3, FlashAttention-4 and cuDNN in BF16; one "
        "H200, by tokens:"
    )
    return "\n".join([*lines, said, ""]) + "\n" + table(["head_dim", *masks], rows)


@named
def readme_errors() -> str:
    """Errors of SmolLM2 beside those of 16-bit attention."""
    own = of_a_trained_model()
    rows = []
    for name in (*RECIPES, "full"):
        gradients = [own[name][x][0] / own["full"][x][0] for x in TENSORS[1:]]
        over = "1" if name == "full" else f"{min(gradients):.0f} to {max(gradients):.0f}"
        label = "`full`, 16-bit attention" if name == "full" else f"`{name}`"
        rows.append([label, *(f"{own[name][x][0]:.4f}" for x in TENSORS), over])
    dq = {(name, sigma): gaussian()[name, sigma, "dq"] for name in ("mixed", "printed") for sigma in (1, 10)}
    said = (
        "On [random data](docs/results/accuracy.md) the error depends on the size of the scores: with Q and "
        "K of standard "
        f"deviation 1 dQ is off by {dq['mixed', 1]:.0%} under `mixed`, at 10 by {dq['mixed', 10]:.0%}; the paper "
        f"prints {dq['printed', 10]:.0%} of its own recipe there."
    )
    return table(["recipe", "O", "dQ", "dK", "dV", "gradients over 16-bit's"], rows) + "\n\n" + said


@named
def readme_training() -> str:
    """Gaps; a star where they are shown to be within the margin."""
    rows = []
    for recipe in RECIPES:
        cells = []
        for size in ("small", "large"):
            row = grid((f"mixed-{size}",) if recipe == "mixed" else (f"qknorm-{size}", f"qknorm-{size}-seed?"))[recipe]
            cells.append(gap(row.mean, row.interval) + " *" * (row.p < 0.05))
        row = trained_on("lr-0.0001")[recipe]
        cells.append(gap(row.mean, row.interval, 5) + " *" * (row.p < 0.05))
        rows.append([f"`{recipe}`", *cells])
        if recipe == "token":
            both = (grid(("mixed-small",)), 3), (trained_on("lr-0.0001"), 5)
            found = [(of["token with dP in INT8"], digits) for of, digits in both]
            cells = [gap(row.mean, row.interval, digits) + " *" * (row.p < 0.05) for row, digits in found]
            rows.append(["`token(dp=int8)`", cells[0], "not run", cells[1]])
    head = ["", "from scratch, 16K tokens a step", "from scratch, 131K", "SmolLM2-135M, trained further, rate 1e-4"]
    return table(head, rows)


@named
def readme_tests() -> str:
    """The newest whole run of the GPU tests, and the newest."""
    results = ROOT / "benchmarks" / "results"
    files = (results / f"gpu-suite_h200_2026-11-28_{commit}.json" for commit in ("2451bcf", "fa73f48"))
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    counts, newest = (
        ", ".join(f"{run['counts'].get(way, 0)} {way}" for way in ("passed", "failed", "skipped")) for run in runs
    )
    sequences = (results / "call-sequences_h200_2026-11-28_2451bcf.txt").read_text(encoding="utf-8")
    steps, differ = re.findall(r"(\d+) steps, (\d+) differ", sequences)[-1]
    return (
        f"The GPU tests on two H200s on 2026-11-28: {counts} (most stand for combinations that others cover), some "
        f"40 not run when time ended; of a newer tree, as far as time allowed, {newest}. "
        f"That no call leaves a trace in later ones: of {steps} random calls, each compared with the same call in a "
        f"fresh process, {differ} differ. On an H100 the tests ran on 2026-11-24, an older tree."
    )


@named
def readme_limits() -> str:
    """Where it is not faster."""
    slowest = min(both("H200").items(), key=lambda item: item[1])
    (head_dim, _, _, tokens), ratio = slowest
    at_2k = {
        call: ways["fwd+bwd"] for call, ways in
        speeds("attention_h200_2026-11-23_0c6affd_2k-grouped-video", *BESIDE_FA3).items() if call[-1] == 2048
    }  # fmt: skip
    short = [ways["fwd+bwd"] for call, ways in packed_rows().items() if call.endswith("x 2048")]
    return "\n".join([
        f"- **Where another kernel is as fast.** Over nine head_dims and 4K to 16K tokens `mixed` is "
        f"{between(both('H200').values())} times as fast as the best BF16 kernel on an H200 and "
        f"{between(both('H100').values())} on an H100. The lowest on an H200, {ratio:.2f}, is head_dim {head_dim} at "
        f"{length(tokens)} under a causal mask. FlashAttention-3 is one of those kernels on the H200 alone. In "
        "[short bursts](docs/results/speed.md#short-bursts), before power limits the clock, most gain less, and at 2K "
        "tokens all lose under a causal mask.",
        f"- **Short sequences.** At 2K tokens and head_dim 64 or 128 it is {between(at_2k.values())} times as fast "
        "(at 128 an earlier `mixed`, and FlashAttention-3 was not timed). "
        f"[Packed](docs/results/speed.md#packed-sequences) documents of 2K tokens are slower than with "
        f"FlashAttention-4: {between(short)}.",
    ])  # fmt: skip


def main(arguments: list[str]) -> int:
    """Write the tables of the pages that are named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="paths of pages, all unless named")
    named = parser.parse_args(arguments).pages
    for path in named:
        if not path.is_file():
            parser.error(f"pages: {path} is no file")
    for path in named or pages():
        text = path.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
