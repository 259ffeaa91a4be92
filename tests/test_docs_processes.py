"""Tables about several GPUs are those of the results files that their sections name."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def section(page, heading):
    """A page's section: cells of its tables' rows, and what its JSON files have."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", text, re.M)]
    files = re.findall(r"benchmarks/results/[\w.-]+\.json", text)
    return rows, {name: json.loads((ROOT / name).read_text(encoding="utf-8")) for name in files}


def test_times_of_the_ring_are_those_of_the_file():
    cells, files = section("integrations/context_parallel.md", "Measured")
    (content,) = files.values()
    found = {}
    for row in content["rows"]:
        found.setdefault((row["head_dim"], row["tokens"]), {})[row["attention"]] = row["ms"]["both"]
    tables = {tuple(row[0].split(", ")): row[1:] for row in cells if row[0][0].isdigit()}
    assert len(tables) == len(found)
    for (head_dim, tokens), ms in found.items():
        best = {
            kernel: min(value for name, value in ms.items() if name.startswith(f"torch {kernel}"))
            for kernel in ("fa4", "cudnn")
        }
        mine = ms["sagebwd mixed"]
        shown = [f"{value:.1f}" for value in (ms["one process, mixed"], mine, best["fa4"], best["cudnn"])]
        share = f"{mine / min(best.values()):.3f}".removeprefix("0")
        assert tables[str(head_dim), f"{tokens // 1024}K"] == [*shown, share]


def test_weak_scaling_is_that_of_the_files():
    cells, files = section("results/training.md", "Several GPUs")
    kinds = {"FlashAttention-4": "fa4", "`mixed`": "mixed@hopper", "cuDNN": "cudnn"}
    rates = {
        count: {row["attention"]: row["tokens_per_s"] for row in files[f"benchmarks/results/{name}.json"]["rows"]}
        for count, name in (
            (1, "training_h200_2026-11-26_093eef2"),
            (2, "training_2-processes_h200_2026-11-26_093eef2"),
        )
    }
    rows = {row[0]: row[1:] for row in cells if row[0] in kinds}
    assert len(rows) == len(kinds)
    for name, attention in kinds.items():
        one, two = (rates[count][attention] for count in (1, 2))
        over = [rates[count]["mixed@hopper"] / rates[count][attention] for count in (1, 2)]
        shown = "" if attention == "mixed@hopper" else ", ".join(f"{ratio:.2f}" for ratio in over)
        assert rows[name] == [f"{one:,.0f}", f"{two:,.0f}", f"{two / one / 2:.2f}", shown]
