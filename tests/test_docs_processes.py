"""Tables about several GPUs are those of the results files that their sections name."""

import json
import re
from pathlib import Path

from tools.kill_one import difference

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


def test_losses_of_a_killed_run_are_those_of_the_file():
    text = (ROOT / "docs" / "results" / "training.md").read_text(encoding="utf-8")
    (name,) = re.findall(r"`(benchmarks/results/kill_one_[\w.-]+\.json)`", text)
    whole, again, *killed = json.loads((ROOT / name).read_text(encoding="utf-8"))["rows"]
    found = {row["run"]: difference(row["losses"], whole["losses"], row["resumed_from"]) for row in killed}
    assert {(row["killed_at"], row["resumed_from"]) for row in killed} == {(18, 15)}
    assert "SIGKILL at step 18 goes on from its checkpoint of step 15" in text
    noise = difference(again["losses"], whole["losses"], 15)
    ddp, fsdp, noise = (f"{x:.1e}".replace("e-0", "e-") for x in (found["killed-none"], found["killed-fsdp"], noise))
    said = f"by {ddp} under DDP and {fsdp} under FSDP, where an unbroken run repeats within {noise}"
    assert said in " ".join(text.split())


def test_losses_of_the_example_over_two_gpus_are_those_of_the_file():
    text = (ROOT / "docs" / "integrations" / "context_parallel.md").read_text(encoding="utf-8").split("## Trained")[1]
    (name,) = re.findall(r"`(benchmarks/results/context-parallel_[\w.-]+\.txt)`", text)
    losses = {}
    for run in (ROOT / name).read_text(encoding="utf-8").split("\n\n")[1:]:
        losses[run.strip().splitlines()[0]] = dict(re.findall(r"step +(\d+)  loss ([\d.]+)", run))
    mixed, full = ([losses[f"{recipe}, {count}"] for count in ("one GPU", "two GPUs")] for recipe in ("mixed", "full"))
    said = " ".join(text.split())
    ends = [" and ".join(run["59"] for run in runs) for runs in (mixed, full)]
    assert f"{ends[0]} under `mixed`, {ends[1]} in full precision" in said

    def apart(one, other):
        return f"{abs(float(one['20']) - float(other['20'])):.3f}".removeprefix("0")

    assert f"by {apart(*mixed)} under `mixed` and {apart(*full)} in full precision" in said
    assert f"the two attentions on one GPU by {apart(mixed[0], full[0])}." in said
