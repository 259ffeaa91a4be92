"""Numbers of README and of the pages of speed, error and training, cell by cell, from the files that they name."""

import json
import re
from pathlib import Path

import pytest
import torch

import sagebwd
from benchmarks.shapes import value_dim_of

ROOT = Path(__file__).parent.parent
GRID = ROOT / "docs" / "results" / "grid"
INTERVAL = r"[+-]\.\d{3} to [+-]\.\d{3}(?!\d)"


def test_speeds_of_token_by_length_are_those_of_the_file():
    text = (ROOT / "docs" / "results" / "speed-token.md").read_text(encoding="utf-8")
    text = text[text.index("## `token` on the portable kernels by length") :]
    (name,) = re.findall(r"`(benchmarks/results/attention_[\w./-]+json)`", text)
    times = {
        (row["recipe"], row["tokens"], row["head_dim"], row["causal"]): row
        for row in json.loads((ROOT / name).read_text(encoding="utf-8"))["rows"]
        if (row["impl"], row["direction"]) == ("triton", "fwd+bwd") and row["kv_heads"] * row["head_dim"] == 2048
    }
    lines = re.findall(r"^\| `(\w+)` \| (\d+)K \| (.*) \|$", text, re.MULTILINE)
    assert len(lines) == 6
    for recipe, tokens, cells in lines:
        columns = [
            times[recipe, 1024 * int(tokens), head_dim, causal] for head_dim in (64, 128) for causal in (False, True)
        ]
        expected = [f"{row['peer_ms'] / row['ms']:.2f} / {row['fa2_ms'] / row['ms']:.2f}" for row in columns]
        assert cells.split(" | ") == expected


def best_of(name):
    """Of each call of `mixed`, forward and backward, in a file: its speed over the best peer's, and the peer."""
    return {
        (row["head_dim"], value_dim_of(row), row["causal"], row["tokens"]): (row["peer_ms"] / row["ms"], row["peer"])
        for row in json.loads((ROOT / name).read_text(encoding="utf-8"))["rows"]
        if (row["impl"], row["recipe"], row["direction"]) == ("hopper", "mixed", "fwd+bwd")
        and row["heads"] == row["kv_heads"]
    }


def readme():
    """The README's text in one line, but for its tables."""
    return " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def widths_timed():
    """`best_of` the files that the page of all widths names; of a call of two files the last one's."""
    best = {}
    text = (ROOT / "docs" / "results" / "speed.md").read_text(encoding="utf-8").partition("## Widths")[2]
    for name in re.findall(r"`(benchmarks/results/attention_[\w./-]+json)`", text):
        best |= best_of(name)
    assert len(best) == 54
    return best


def test_speeds_in_the_readme_are_those_of_the_file():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    best = widths_timed()
    assert {peer for _, peer in best.values()} == {"fa4", "cudnn"}
    lines = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)
    assert len(lines) == 3
    for head_dim, cells in lines:
        calls = [
            (int(head_dim), int(head_dim), causal, tokens)
            for causal in (True, False)
            for tokens in (4096, 8192, 16384)
        ]
        assert cells.split(" | ") == [f"{best[call][0]:.2f}" for call in calls]
    pattern = r"at 8K tokens forward \+ backward is ([\d.]+) to ([\d.]+) times as fast"
    least, most = re.search(pattern, readme()).groups()
    at_8k = [ratio for (_, _, _, tokens), (ratio, _) in best.items() if tokens == 8192]
    assert (least, most) == (f"{min(at_8k):.2f}", f"{max(at_8k):.2f}")
    assert f"on an H200 `mixed` is {between([ratio for ratio, _ in best.values()])} times as fast" in readme()


def speeds_of_steps(name):
    """By context, how many times as fast a step of `mixed` is as the fastest other's."""
    rows = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return {row["context"]: f"{row['speedup']:.2f}".lstrip("0") for row in rows if row["recipe"] == "mixed"}


def test_what_the_readme_says_beside_its_tables_is_the_files():
    text, index = readme(), (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    day, *counts = re.search(
        r"on (\S+) on two H200s, (\d+) passed, (\d+) failed and (\d+) were skipped; time ended", text
    ).groups()
    newest = max((ROOT / "benchmarks" / "results").glob("gpu-suite_h200_*.json"), key=lambda path: path.name)
    assert newest.name in index
    suite = json.loads(newest.read_text(encoding="utf-8"))
    assert [int(count) for count in counts] == [suite["counts"].get(way, 0) for way in ("passed", "failed", "skipped")]
    assert day == suite["date"]
    assert suite["left"]
    name = re.search(r"benchmarks/results/(call-sequences_[\w.-]+json)", index).group(1)
    sequences = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
    said = f"{sequences['steps']} random steps of calls beside fresh processes, of which {sequences['differ']} differ"
    assert said in text
    pattern = r"At 2K tokens and head_dim 64 or 128 the ratio is ([\d.]+) to ([\d.]+), without"
    least, most = re.search(pattern, text).groups()
    name = re.search(r"`(benchmarks/results/attention_\w+-\d\d-\d\d_\w+_2k-grouped-video\.json)`", index).group(1)
    at_2k = [ratio for (*_, tokens), (ratio, _) in best_of(name).items() if tokens == 2048]
    assert len(at_2k) == 4
    assert (least, most) == (f"{min(at_2k):.2f}", f"{max(at_2k):.2f}")
    assert f"it is {least} to {most} times as fast (H200, without the rotation)" in index
    steps = speeds_of_steps("training_h200_2026-11-23_0c6affd")
    assert f"{steps[2048]} (2K tokens) to {steps[16384]} (16K) times as fast as with the best" in text
    one, two = (
        speeds_of_steps(f"training_{processes}h200_2026-11-26_093eef2")[4096] for processes in ("", "2-processes_")
    )
    assert f"With it, timed at 4K alone: {one} on one H200, {two} on two" in text
    assert f"such a step is {one} times as fast as FlashAttention-4's on one H200 and {two} on two" in index


def between(values):
    """A range as pages have it, without zeros before the point."""
    return f"{min(values):.2f} to {max(values):.2f}".replace("0.", ".")


def test_what_index_and_limits_repeat_is_the_files():
    index, limits = (
        " ".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").split()) for name in ("index", "limits")
    )
    best = widths_timed()
    assert f"`mixed` is {between([ratio for ratio, _ in best.values()])} times as fast" in index
    slower = {call: f"{ratio:.2f}"[1:] for call, (ratio, _) in best.items() if ratio < 1}
    assert set(slower) == {(96, 96, True, 4096)}
    assert "all widths that were timed but 96" in limits
    assert f"`mixed` is {' and '.join(slower[call] for call in sorted(slower))} times as fast as the best" in limits
    steps = json.loads((ROOT / "benchmarks/results/training_h200_2026-11-23_0c6affd.json").read_text())["rows"]
    own = [row["speedup"] for row in steps if row["recipe"] == "mixed"]
    assert f"a step of a 325M model is {between(own)} times as fast" in index
    suite, matrix = (
        json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["counts"]
        for name in ("gpu-suite_h200_2026-11-26_093eef2", "matrix_h200_2026-11-25_7133de8")
    )
    passed, failed, skipped = (suite.get(way, 0) for way in ("passed", "failed", "skipped"))
    assert f"{passed} GPU tests passed, {failed} failed, {skipped} were skipped" in index
    assert f"of {sum(matrix.values())} widths, forms of call and recipes {matrix['ok']} are right" in index
    assert f"are right, {matrix['refused']} refused and {matrix['wrong']} past a bound" in index


def test_what_questions_say_of_an_h100_is_the_files():
    questions = " ".join((ROOT / "docs" / "questions.md").read_text(encoding="utf-8").split())
    name = "crossings_h100-80gb-hbm3_2026-11-27_56b3753.json"
    of_256 = [
        row
        for row in json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))["rows"]
        if (row["head_dim"], row["tokens"], row["direction"]) == (256, 4096, "training")
    ]
    ratios = {(row["kind"], row["size"]): row["torch_ms"] / row["ms"] for row in of_256}
    (window,) = (ratio for (kind, _), ratio in ratios.items() if kind == "window")
    small, middle, large = (
        ratios["causal", size] for size in sorted(size for kind, size in ratios if kind == "causal")
    )
    assert f"`mixed` is there {window:.1f} times as fast as torch under a window of 1024 keys" in questions
    assert f"and {large:.1f} to {middle:.1f} times as fast under a causal mask" in questions
    assert f"layers without a window, {small:.2f}, at half of the heads".replace("0.", ".") in questions
    assert "from eight heads of one sequence on" in questions
    for heads, recipe in ((4, "full"), (8, "mixed"), (16, "mixed")):
        q = torch.empty(1, heads, 4096, 256, device="meta", dtype=torch.bfloat16, requires_grad=True)
        assert sagebwd.explain(q, q, q, is_causal=True, device="NVIDIA H100 80GB HBM3").recipe == recipe


@pytest.mark.parametrize(("page", "card", "calls"), [("speed", "h200", 54), ("speed-h100", "h100-80gb-hbm3", 51)])
def test_speeds_of_widths_are_those_of_the_file(page, card, calls):
    text = (ROOT / "docs" / "results" / f"{page}.md").read_text(encoding="utf-8")
    text = text.partition("## Widths")[2] or text
    rows = {  # the last file's, of a call of two
        (row["impl"], row["head_dim"], row["value_dim"], row["causal"], row["tokens"], row["direction"]): row
        for name in re.findall(rf"`(benchmarks/results/attention_{card}_[\w./-]+json)`", text)
        for row in json.loads((ROOT / name).read_text(encoding="utf-8"))["rows"]
    }
    lines = re.findall(r"^\| (\d+)/?(\d*), (\d+)K(, causal)? \| (.*) \|$", text, re.MULTILINE)
    assert len(lines) == calls
    ratios = []
    for head_dim, value_dim, thousands, causal, cells in lines:
        call = int(head_dim), int(value_dim or head_dim), bool(causal), 1024 * int(thousands)
        found = [rows.get((impl, *call, "fwd+bwd")) for impl in ("hopper", "fa4", "cudnn")]
        times = ["-" if row is None else f"{row['ms']:.3f}" + ", wrong" * (row["gate"] != "ok") for row in found]
        ways = [rows["hopper", *call, way] for way in ("fwd", "bwd", "fwd+bwd")]
        fwd, bwd, both = (f"{row['peer_ms'] / row['ms']:.2f}" for row in ways)
        assert cells.split(" | ") == [*times, f"{fwd} / {bwd} / **{both}**"]
        ratios.append(float(both))
    if card != "h200":
        said = f"`mixed` is {between(ratios)} times as fast as the best BF16 kernel"
        assert said in text
        assert f"On an H100 it is {between(ratios)}" in readme()
        assert said + " on an H100" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
        assert sum(ratio < 1 for ratio in ratios) == 1


def test_speeds_of_auto_are_those_of_the_file():
    text = (ROOT / "docs" / "results" / "auto.md").read_text(encoding="utf-8")
    sections = text.split("\n## ")[1:]
    assert len(sections) == 2
    for section in sections:
        names = re.findall(r"`(benchmarks/results/auto_[\w./-]+json)`", section)
        files = [json.loads((ROOT / name).read_text(encoding="utf-8"))["rows"] for name in names]
        expected = []
        for row in files[0]:
            fastest = min([row["torch_ms"], *row["backends"].values()])
            ratios = " | ".join(f"{ms / row['ms']:.2f}" for ms in (row["torch_ms"], fastest))
            expected.append(f"{row['call']} | {row['ran']} | {row['ms']:.3f} | {ratios}")
        assert re.findall(r"^\| (\w+, .*) \|$", section, re.MULTILINE) == expected
        said = " ".join(section.split())
        for rows in files:
            mixed, handed = (
                [row["torch_ms"] / row["ms"] for row in rows if row["ran"].startswith(recipe)]
                for recipe in ("mixed", "full")
            )
            gains, losses = ([x for x in mixed if (x >= 1) is gain] for gain in (True, False))
            spread = f"{min(gains):.2f} to {max(gains):.2f}"
            assert f"The {len(mixed)} calls that ran `mixed` are {spread} times as fast" in said
            assert [f"{x:.2f}"[1:] for x in losses] == re.findall(r"but for one of (\.\d\d)\.", said)[: len(losses)]
            assert re.search(rf"[Tt]he {len(handed)} (calls )?that went to torch", said)


def test_tflops_in_speed_are_those_of_the_file():
    text = (ROOT / "docs" / "results" / "speed.md").read_text(encoding="utf-8")
    name = re.findall(r"`(benchmarks/results/attention_[\w./-]+json)`", text)[0]
    tflops = {
        (row["impl" if row["recipe"] == "bf16" else "recipe"], row["head_dim"], row["causal"], row["tokens"],
         row["direction"]): row["tflops"]
        for row in json.loads((ROOT / name).read_text(encoding="utf-8"))["rows"]
        if row["heads"] == row["kv_heads"]
    }  # fmt: skip
    lines = re.findall(r"^\| (\d+), (none|causal), (\d+)(K?).*? \| (.*) \|$", text, re.MULTILINE)
    assert len(lines) == 16
    for head_dim, mask, number, thousands, cells in lines:
        shape = int(head_dim), mask == "causal", int(number) * (1024 if thousands else 1)
        fa4, mixed = (
            [tflops[kernel, *shape, way] for way in ("fwd", "bwd", "fwd+bwd")] for kernel in ("fa4", "mixed")
        )
        ratio = " / ".join(f"{ours / theirs:.2f}" for ours, theirs in zip(mixed, fa4)).rsplit(" ", 1)
        expected = [" / ".join(f"{x:.0f}" for x in fa4), " / ".join(f"{x:.0f}" for x in mixed)]
        expected += [
            f"{ratio[0]} **{ratio[1]}**",
            *(f"{tflops[name, *shape, 'fwd+bwd']:.0f}" for name in ("cudnn", "fa2")),
        ]
        assert cells.split(" | ") == expected


def errors_of_a_trained_model():
    """By recipe, the relative L2 errors of O, dQ, dK and dV over all layers of SmolLM2-135M."""
    from sagebwd.diagnostics import summary

    rows = summary.read(ROOT / "docs" / "results" / "trace_smollm2.json.xz")
    return {
        name: [own[tensor][0] for tensor in ("o", "dq", "dk", "dv")] for name, own in summary.overall(rows).items()
    }


def test_errors_in_the_readme_are_those_of_the_files():
    trained = errors_of_a_trained_model()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| `(\w+)`[^|]* \| (\.\d{4} \| .*) \|$", text, re.MULTILINE)
    assert [name for name, _ in lines] == ["mixed", "token", "paper", "full"]
    for name, cells in lines:
        assert cells.split(" | ") == [f"{error:.4f}".lstrip("0") for error in trained[name]]
    mixed, full = trained["mixed"][1:], trained["full"][1:]
    least, most, of_full = f"{min(mixed):.0%}"[:-1], f"{max(mixed):.0%}", (100 * min(full), 100 * max(full))
    low, high = (f"{error:.1f}".lstrip("0") for error in of_full)
    said = f"the gradients of `mixed` are off by {least} to {most}, where 16-bit attention is off by {low} to {high}%"
    assert said in readme()
    ratios = [ours / theirs for ours, theirs in zip(mixed, full)]
    said = f"The gradients of `mixed` have {min(ratios):.0f} to {max(ratios):.0f} times the error of 16-bit attention"
    assert said in readme()
    rows = json.loads((ROOT / "docs/results/gaussian_plain_mixed.json").read_text(encoding="utf-8"))
    dq = {row["sigma"]: row for row in rows if row["tensor"] == "dq"}
    own = [f"{dq[sigma]['relative_l2']:.2f}".lstrip("0") for sigma in (1, 10)]
    printed = f"{dq[10]['expected_l2']:.2f}".lstrip("0")
    said = f"at a standard deviation of 1 of Q and K dQ is off by {own[0]} under `mixed`, at 10 by {own[1]}, where"
    assert f"{said} the paper prints {printed}." in readme()


def test_errors_side_by_side_are_those_of_the_files():
    results = ROOT / "docs" / "results"
    text = (results / "accuracy.md").read_text(encoding="utf-8")
    text = text[text.index("## Four kinds of data side by side") :].split("\n## ")[0]
    errors, tensors = {}, ("o", "dq", "dk", "dv")
    for path in results.glob("gaussian_plain*.json"):
        for row in json.loads(path.read_text(encoding="utf-8")):
            if row["sigma"] == 1:
                errors[row["recipe"], "Gaussian", row["tensor"]] = row["relative_l2"]
                errors["printed", "Gaussian", row["tensor"]] = row["expected_l2"]
    weights = {}
    for row in json.loads((results / "sinks_64.json").read_text(encoding="utf-8"))["rows"]:
        if row["kind"] == "first":
            kind = f"first key {row['weight']:.2f}".replace("0.", ".")
            weights[kind] = row["weight"]
            errors |= {(row["recipe"], kind, name): row[name] for name in tensors}
    for recipe, own in errors_of_a_trained_model().items():
        errors |= {(recipe, "a trained model", name): error for name, error in zip(tensors, own, strict=True)}
    head = re.search(r"^\| recipe \| (Gaussian .*) \|$", text, re.MULTILINE).group(1).split(" | ")
    assert head == ["Gaussian", "first key .49", "first key .93", "a trained model"]
    assert "49% and 93% of the weight" in text
    assert [f"{weights[kind]:.0%}" for kind in head[1:3]] == ["49%", "93%"]
    lines = re.findall(r"^\| `?([^|`]+)`? \| (.*(?:[.\d]+ / ){3}.*) \|$", text, re.MULTILINE)
    printed = re.search(r"The paper prints ([\d./\s]+) for Gaussian", text).group(1)
    full = re.search(r"on the trained model alone: ([\d./\s]+)\. Files", text).group(1)
    assert [name for name, _ in lines] == ["mixed", "token", "paper"]
    found = [(name, kind, cell) for name, cells in lines for kind, cell in zip(head, cells.split(" | "), strict=True)]
    for name, kind, cell in [*found, ("printed", "Gaussian", printed), ("full", "a trained model", full)]:
        numbers = [float(number) for number in cell.split("/")]
        expected = [errors[name, kind, tensor] for tensor in tensors]
        assert all(abs(a - b) <= 5.1e-5 for a, b in zip(numbers, expected, strict=True)), (name, kind)


def test_what_deterministic_costs_in_troubleshooting_is_the_files():
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    pattern = r"a backward that takes ([\d.]+) to ([\d.]+) times\s+as\s+long.*?\[file\]\((.*?)\)"
    ((least, most, link),) = re.findall(pattern, text, re.DOTALL)
    rows = json.loads((ROOT / "docs" / link).read_text(encoding="utf-8"))["rows"]
    times = {
        (row["recipe"], row["head_dim"], row["tokens"], row["causal"], row["kv_heads"]): row["ms"]
        for row in rows
        if (row["impl"], row["direction"]) == ("hopper", "bwd")
    }
    ratios = [
        ms / times["mixed", *shape] for (recipe, *shape), ms in times.items() if recipe.endswith("(deterministic)")
    ]
    assert len(ratios) == 6
    assert (least, most) == (f"{min(ratios):.2f}", f"{max(ratios):.2f}")


def spelt(interval, digits=3):
    """An interval of gaps as documents have it."""
    return " to ".join(f"{end:+.{digits}f}" for end in interval).replace("0.", ".")


def gaps_of(name):
    """By variant, over every seed of a cell of the grid."""
    from lab.training.gaps import gaps

    folders = [path for path in (GRID / name, *sorted(GRID.glob(f"{name}-seed?"))) if path.exists()]
    return {row.variant: row for row in gaps(folders)}


def test_gaps_of_runs_are_those_of_the_files():
    text = (ROOT / "docs" / "results" / "pretraining-runs.md").read_text(encoding="utf-8")
    pattern = r"^\| (no )?QK-norm, (16|131)K(, 4e-3)? \| (.*[+-]\.\d{4}.*) \|$"
    lines = re.findall(pattern, text, re.MULTILINE)
    assert len(lines) == 6
    for no, tokens, rate, cells in lines:
        name = f"{'no-' * bool(no)}qknorm-{'small' if tokens == '16' else 'large'}{'-4e-3' * bool(rate)}"
        found = gaps_of(name)
        expected = []
        for row in (found["token"], found["paper"]):
            expected += [row.mean, *row.gaps] if len(row.gaps) > 1 else [row.mean]
        assert [float(number) for number in re.findall(r"[+-]\.\d{4}", cells)] == [round(x, 4) for x in expected], name
        intervals = [spelt(row.interval) for row in (found["token"], found["paper"]) if row.interval]
        assert re.findall(INTERVAL, cells) == intervals, name
    lines = re.findall(r"^\| (16|131)K, seed \d \| .* \| ([+-]\.\d{4}) \|$", text, re.MULTILINE)
    for tokens, size in (("16", "small"), ("131", "large")):
        expected = gaps_of(f"fp32-sums-{size}")["mixed"].gaps
        assert [float(gap) for found, gap in lines if found == tokens] == [round(x, 4) for x in expected]


def test_verdicts_are_those_of_the_files():
    """Gap, interval, pairs, p and commit of each recipe; and the README's of the recipes with QK-norm."""
    text = (ROOT / "docs" / "results" / "pretraining.md").read_text(encoding="utf-8")
    pattern = (
        r"^\| `(\w+)(\(rotate=False\))?` \| (no )?QK-norm, (16|131)K "
        r"\| (\S+) \((\S+ to \S+)\) \| (\d+) \| (\S+) \| (.*) \|$"
    )
    lines = re.findall(pattern, text, re.MULTILINE)
    assert len(lines) >= 9
    front = (ROOT / "README.md").read_text(encoding="utf-8")
    cells = {
        name: re.search(rf"^\| `{name}`[^|]* \| ([+-]\..*) \|$", front, re.MULTILINE).group(1).split(" | ")
        for name in ("mixed", "token", "paper")
    }
    for recipe, unrotated, no, tokens, gap, between, pairs, p, commits in lines:
        small = tokens == "16"
        cell = "fp32-sums" if unrotated else "mixed" if recipe == "mixed" else "no-qknorm" if no else "qknorm"
        name = f"{cell}-{'small' if small else 'large'}"
        row = gaps_of(name)[recipe]
        expected = f"{row.mean:+.4f}".replace("0.", "."), spelt(row.interval, 4), str(len(row.gaps)), row.commits
        assert (gap, between, pairs, tuple(re.findall("`(.*?)`", commits))) == expected, name
        assert p == f"{row.p:.4f}".replace("0.", ".")
        if not no and not unrotated:  # of `mixed` the README has today's
            text = f"{row.mean:+.3f}".replace("0.", ".") + f" ({spelt(row.interval)})"
            assert cells[recipe][0 if small else 1] == text
            if (recipe, small) == ("token", True):
                p = f"{row.p:.2f}".replace("0.", ".")
                said = (
                    f"`mixed` and `token` at 16K are equivalent to full precision within .02 nats (p < .01, p = {p})"
                )
                assert said in readme()
            if (recipe, small) == ("mixed", True):
                assert row.p < 0.01


@pytest.mark.parametrize(("page", "runs"), [("runs", "120-steps"), ("today", "280-steps")])
def test_losses_of_the_325m_model_are_those_of_the_files(page, runs):
    from lab.training.packed import read

    text = (ROOT / "docs" / "results" / f"pretraining-{page}.md").read_text(encoding="utf-8")
    text = text[text.index(f"`docs/results/325m/{runs}`") :]
    table = text[text.index("| held-out loss at step (tokens) |") :].split("\n\n")[0]
    heading, _, *lines = (line.split("|")[2:-1] for line in table.splitlines())
    steps = [int(cell.split("(")[0]) for cell in heading]
    assert len(steps) >= 6
    losses = {}
    for run in read(ROOT / "docs" / "results" / "325m" / runs):
        found = {line["step"]: line["held_out_loss"] for line in run["metrics"] if "held_out_loss" in line}
        losses[run["run"]] = [found[step] for step in steps]
    full = losses["full precision"]
    others = [name for name in ("full precision repeated", "mixed", "token") if name in losses]
    expected = [full, *(losses[name] for name in others)]
    expected += [[b - a for a, b in zip(full, losses[name])] for name in others]
    for line, numbers in zip(lines, expected, strict=True):
        assert [float(cell.strip(" *")) for cell in line] == [round(x, 4) for x in numbers]


def test_the_table_of_block_masks_is_the_files():
    page = (ROOT / "docs/results/masks.md").read_text(encoding="utf-8")
    rows = [
        row
        for link in re.findall(r"`(benchmarks/results/masks_[\w-]+\.json)`", page)
        for row in json.loads((ROOT / link).read_text(encoding="utf-8"))["rows"]
    ]
    found = {(row["head_dim"], row["mask"], row["direction"]): row for row in rows if row["attention"] == "mixed"}
    lines = re.findall(r"^\| (\d+) \| ([a-z-]+)(?:, 8K)? \| (.*) \|$", page, re.MULTILINE)
    assert len(lines) == len(found) / 2
    for width, mask, cells in lines:
        forward, both = (found[int(width), mask, way] for way in ("fwd", "fwd+bwd"))

        def over(row, name):
            return f"{row['over'][name]:.2f}" if name in row["over"] else "-"

        expected = [f"{forward['shown']:.1%}"]
        for row in (forward, both):
            expected += [f"{row['ms']:.3f}", over(row, "flex"), over(row, "fa4")]
        expected.append(f"{over(forward, 'packed mixed')} / {over(both, 'packed mixed')}")
        assert cells.split(" | ") == expected
