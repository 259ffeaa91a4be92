"""Numbers of the pages of packed sequences and of launches, cell by cell, from the files that they name."""

import json
import re
from pathlib import Path

from tools.passes import BYTES_A_MICROSECOND

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
LAUNCHES = {
    "mean of a sample of K": "sum_keys_kernel", "K's codes": "key_codes_kernel", "forward": "kernel_cutlass",
    "V's maxima": "channel_maxima_kernel", "dO's and Q's copies, row values, dQ's zeros": "row_values_kernel",
    "backward": "backward_kernel", "dQ from its sums": "finish_dq_kernel",
}  # fmt: skip
ATTENTION = ("kernel_cutlass", "backward_kernel")


def read(page, pattern):
    """A page's text, and the file that it names."""
    text = (RESULTS / page).read_text(encoding="utf-8")
    (name,) = set(re.findall(pattern, text))
    return text, json.loads((ROOT / name).read_text(encoding="utf-8"))


def called(row):
    """A shape as the page has it."""
    lengths, heads = row["lengths"], f"{row['heads']} heads"
    heads += f" on {row['kv_heads']}" * (row["kv_heads"] != row["heads"])
    one = len(set(lengths)) == 1
    what = f"{len(lengths)} x {lengths[0]}" if one else f"{len(lengths)} of {min(lengths)} to {max(lengths)}"
    return f"{row['head_dim']}, {heads}, {what}"


def test_speeds_of_packed_sequences_are_those_of_the_file():
    text, found = read("packed.md", r"`(benchmarks/results/packed_[\w./-]+json)`")
    rows = {(called(row), row["impl"], row["direction"]): row for row in found["rows"]}
    lines = re.findall(r"^\| (\d+, \d+ heads.*?) \| (.*) \|$", text, re.MULTILINE)
    assert {shape for shape, _ in lines} == {shape for shape, *_ in rows}
    assert {row["gate"] for row in rows.values()} == {"ok"}
    ratios = {}
    for shape, cells in lines:
        times = [rows.get((shape, impl, "fwd+bwd")) for impl in ("hopper", "fa4", "varlen")]
        ways = [rows[shape, "hopper", way] for way in ("fwd", "bwd", "fwd+bwd")]
        assert {row["peer"] for row in ways} == {"fa4"}
        fwd, bwd, both = (row["peer_ms"] / row["ms"] for row in ways)
        expected = ["-" if row is None else f"{row['ms']:.3f}" for row in times]
        assert cells.split(" | ") == [*expected, f"{fwd:.2f} / {bwd:.2f} / **{both:.2f}**"]
        assert times[2] is None or times[2]["ms"] > times[0]["ms"]
        ratios.setdefault("x 2048" in shape, []).append(both)
    short, long = (f"{min(ratios[of]):.2f} to {max(ratios[of]):.2f}".replace("0.", ".") for of in (True, False))
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert f"`mixed` is {short} times as fast as FlashAttention-4 at 2K tokens each, {long} times at mixed" in index
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"documents of 2K tokens are slower than FlashAttention-4's, {short}." in readme


def test_speeds_of_dense_calls_beside_them_are_those_of_the_file():
    text, found = read("packed.md", r"`(benchmarks/results/attention_[\w./-]+json)`")
    text = " ".join(text.split())
    rows = {
        (row["head_dim"], row["causal"], row["tokens"]): row
        for row in found["rows"]
        if (row["impl"], row["direction"]) == ("hopper", "fwd+bwd")
    }
    assert {row["peer"] for row in rows.values()} == {"fa4"}
    said = re.findall(r"([\d.]+) and ([\d.]+) \((\d+)(, causal)?\)", text)
    assert len(said) == 4
    for *ratios, head_dim, causal in said:
        both = [rows[int(head_dim), bool(causal), tokens] for tokens in (4096, 8192)]
        assert ratios == [f"{row['peer_ms'] / row['ms']:.2f}" for row in both]


def test_the_budget_of_launches_is_the_files():
    text, found = read("passes.md", r"`(benchmarks/results/passes_[\w./-]+json)`")
    (head,) = re.findall(r"^\| launch \| (.*) \|$", text, re.MULTILINE)
    cases = [found["cases"][name] for name in head.split(" | ")]
    lines = dict(re.findall(r"^\| ([^|]+) \| ([\d.]+.*) \|$", text, re.MULTILINE))
    cells = {name: line.split(" | ") for name, line in lines.items()}
    for name, kernel in LAUNCHES.items():
        for cell, rows in zip(cells.pop(name), cases, strict=True):
            (row,) = [row for row in rows if row["kernel"] == kernel]
            at_best = "" if kernel in ATTENTION else f" ({row['moved'] / BYTES_A_MICROSECOND:.1f})"
            assert cell == f"{row['took']:.1f}{at_best}"
    took = [sum(row["took"] for row in rows) for rows in cases]
    assert cells.pop("all launches") == [f"{time:.1f}" for time in took]
    assert cells.pop("between launches") == [f"{sum(row['waited'] for row in rows):.1f}" for rows in cases]
    saved = []
    for rows, time in zip(cases, took):
        passes = [row for row in rows if row["moved"] and row["kernel"] not in ATTENTION]
        saved.append(f"{sum(row['took'] - row['moved'] / BYTES_A_MICROSECOND for row in passes) / time:.1%}")
    assert cells.pop("could be saved, of all") == saved
    assert set(cells) == {"launch"}
    at_4k = saved[head.split(" | ").index("4K, 128")]
    assert f"head_dim 128 would be {at_4k} faster" in " ".join(text.split())
