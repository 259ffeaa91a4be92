"""The documents do not drift from the code."""

import ast
import importlib.util
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from string import Template

import pytest
import torch

from sagebwd import Recipe
from sagebwd.benchmarks.shapes import value_dim_of

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").rglob("*.md")]
RESULTS = [ROOT / "docs" / "results", ROOT / "benchmarks" / "results"]
EXPERIMENT = {"comparison.json", "comparison.md", "curves.png", "runs.jsonl.xz"}  # what a folder of runs holds


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_named_in_documents_exist(document):
    text = document.read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|tests|tools|configs|docs|benchmarks)/[\w./-]+)`", text)
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing


def test_every_results_file_is_cited_and_every_cited_one_exists():
    """By its path or, where a page links to it, its name; of an experiment's own files the folder is enough."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    cited = set(re.findall(r"(?:docs|benchmarks)/results/[\w./-]*[\w]", text))
    cited |= {
        str((document.parent / link).resolve().relative_to(ROOT))
        for document in DOCUMENTS
        for link in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    }
    files = [path.relative_to(ROOT) for folder in RESULTS for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 50
    uncited = [
        str(path)
        for path in files
        if str(path) not in cited and not (path.name in EXPERIMENT and str(path.parent) in cited)
    ]
    assert not uncited, "cite them in a document, or delete them"
    assert not [path for path in cited if not (ROOT / path).exists()], "cited, and not there"
    assert not [str(path) for path in files if " " in str(path)], "no spaces in names"


def test_pages_are_short():
    """But the log's: 150 lines; the README, which is read first, 110."""
    lengths = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in DOCUMENTS}
    logs = {path for path in lengths if path.is_relative_to("docs/log") or path.name == "CHANGELOG.md"}
    assert not {str(path): lines for path, lines in lengths.items() if path not in logs and lines > 150}
    assert lengths[Path("README.md")] <= 110


def test_contributing_has_a_line_for_every_tool():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    names = [path.stem for path in (ROOT / "tools").glob("[!_]*.py")]
    names += [path.parent.name for path in (ROOT / "tools").glob("*/__main__.py")]
    assert len(names) >= 9
    assert not [name for name in names if f"| `python -m tools.{name}" not in text and f"tools/{name}.py" not in text]


def test_recipes_named_in_the_method_parse():
    pages = [ROOT / "docs" / f"{name}.md" for name in ("method", "gradients-e4m3", "causality")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    recipes = re.findall(r'"((?:token|paper|full)\([^"]*\))"', text.replace("\n", " "))
    assert recipes
    for recipe in recipes:
        Recipe.parse(recipe)


def messages_in_source():
    """Every text of the package as a pattern, in which a value that is filled in matches anything."""
    patterns = []
    for path in (ROOT / "src" / "sagebwd").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if not all(isinstance(part, ast.FormattedValue | ast.Constant) for part in parts):
                continue
            fixed = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            if sum(len(text) for text in fixed if isinstance(text, str)) >= 20:
                patterns.append("".join(".+" if text is None else re.escape(str(text)) for text in fixed))
    return patterns


def test_messages_quoted_in_troubleshooting_are_in_the_source():
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("troubleshooting*.md"))]
    assert len(pages) == 3
    text = "\n".join(pages)
    quoted = [" ".join(block.split()) for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL)]
    assert len(quoted) >= 15
    patterns = re.compile("|".join(f"(?:{pattern})" for pattern in messages_in_source()))
    assert not [message for message in quoted if not patterns.fullmatch(message)]


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
    """Of each call of `mixed`, forward and backward, in a results file: its speed over the best peer's, and the peer."""
    return {
        (row["head_dim"], value_dim_of(row), row["causal"], row["tokens"]): (row["peer_ms"] / row["ms"], row["peer"])
        for row in json.loads((ROOT / name).read_text(encoding="utf-8"))["rows"]
        if (row["impl"], row["recipe"], row["direction"]) == ("hopper", "mixed", "fwd+bwd")
        and row["heads"] == row["kv_heads"]
    }


def test_speeds_in_the_readme_are_those_of_the_file():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (name,) = re.findall(r"`(benchmarks/results/attention_[\w./-]+json)`", text)
    best = best_of(name)
    assert {peer for _, peer in best.values()} == {"fa4", "cudnn"}
    lines = re.findall(r"^\| ([\d/]+) \| (.*) \|$", text, re.MULTILINE)
    assert len(lines) == 8
    least, most = re.search(
        r"at 8K tokens, forward \+ backward .*\n.* is ([\d.]+) to ([\d.]+) times as fast", text
    ).groups()
    at_8k = [ratio for (_, _, _, tokens), (ratio, _) in best.items() if tokens == 8192]
    assert (least, most) == (f"{min(at_8k):.2f}", f"{max(at_8k):.2f}")
    for width, cells in lines:
        head_dim, _, value_dim = width.partition("/")
        calls = [
            (int(head_dim), int(value_dim or head_dim), causal, tokens)
            for causal in (True, False)
            for tokens in (4096, 8192)
        ]
        found = [best.get(call) for call in calls]
        expected = [
            "not timed" if one is None else f"{one[0]:.2f}" + " (cuDNN)" * (one[1] == "cudnn") for one in found
        ]
        assert cells.split(" | ") == expected


def test_what_the_readme_says_beside_its_tables_is_the_files():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    passed, failed, link = re.search(
        r"([\d]+) passed, (\d+) failed and a few were not reached \(\[file\]\((.*?)\)", text
    ).groups()
    suite = json.loads((ROOT / link).read_text(encoding="utf-8"))
    assert (int(passed), int(failed)) == (suite["counts"]["passed"], suite["counts"]["failed"])
    assert suite["left"]
    newest = max((ROOT / "benchmarks" / "results").glob("gpu-suite_h200_*.json"), key=lambda path: path.name)
    assert (ROOT / link) == newest
    pattern = r"At 2K tokens and head_dim 64 or 128 the ratio is ([\d.]+) to ([\d.]+) \(\[file\]\((.*?)\)"
    least, most, link = re.search(pattern, text).groups()
    at_2k = [ratio for (*_, tokens), (ratio, _) in best_of(link).items() if tokens == 2048]
    assert len(at_2k) == 4
    assert (least, most) == (f"{min(at_2k):.2f}", f"{max(at_2k):.2f}")
    mean, link = re.search(r"the mean from 4K to 16K tokens is ([\d.]+) \(\[file\]\((.*?)\)", text).groups()
    on_h100 = best_of(link)
    assert {call[-1] for call in on_h100} == {4096, 8192, 16384}
    assert mean == f"{statistics.geometric_mean(ratio for ratio, _ in on_h100.values()):.2f}"


def test_speeds_of_widths_are_those_of_the_file():
    text = (ROOT / "docs" / "results" / "speed.md").read_text(encoding="utf-8")
    (name,) = set(re.findall(r"`(benchmarks/results/attention_h200_2026-11-25_[\w./-]+json)`", text))
    rows = {
        (row["impl"], row["head_dim"], row["value_dim"], row["causal"], row["tokens"], row["direction"]): row
        for row in json.loads((ROOT / name).read_text(encoding="utf-8"))["rows"]
    }
    lines = re.findall(r"^\| (\d+)/?(\d*), (\d)K(, causal)? \| (.*) \|$", text, re.MULTILINE)
    assert len(lines) == 30
    for head_dim, value_dim, thousands, causal, cells in lines:
        call = int(head_dim), int(value_dim or head_dim), bool(causal), 1024 * int(thousands)
        found = [rows.get((impl, *call, "fwd+bwd")) for impl in ("hopper", "fa4", "cudnn")]
        times = ["-" if row is None else f"{row['ms']:.3f}" + ", wrong" * (row["gate"] != "ok") for row in found]
        ways = [rows["hopper", *call, way] for way in ("fwd", "bwd", "fwd+bwd")]
        fwd, bwd, both = (f"{row['peer_ms'] / row['ms']:.2f}" for row in ways)
        assert cells.split(" | ") == [*times, f"{fwd} / {bwd} / **{both}**"]


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


def test_errors_in_the_readme_are_those_of_the_files():
    from sagebwd.analysis import summary

    text, results = (ROOT / "README.md").read_text(encoding="utf-8"), ROOT / "docs" / "results"
    errors, tensors = {}, ("o", "dq", "dk", "dv")
    for path in results.glob("gaussian_plain*.json"):
        for row in json.loads(path.read_text(encoding="utf-8")):
            if row["sigma"] == 1:
                errors[row["recipe"], "Gaussian", row["tensor"]] = row["relative_l2"]
                errors["the paper's printed figures", "Gaussian", row["tensor"]] = row["expected_l2"]
    weights = {}
    for row in json.loads((results / "sinks_64.json").read_text(encoding="utf-8"))["rows"]:
        if row["kind"] == "first":
            kind = f"first key {row['weight']:.2f}".replace("0.", ".")
            weights[kind] = row["weight"]
            errors |= {(row["recipe"], kind, name): row[name] for name in tensors}
    for recipe, own in summary.overall(summary.read(results / "trace_smollm2.json.xz")).items():
        errors |= {(recipe, "a trained model", name): own[name][0] for name in tensors}
    head = re.search(r"^\| recipe \| (Gaussian .*) \|$", text, re.MULTILINE).group(1).split(" | ")
    assert head == ["Gaussian", "first key .49", "first key .93", "a trained model"]
    assert "49% and 93% of the weight" in text
    assert [f"{weights[kind]:.0%}" for kind in head[1:3]] == ["49%", "93%"]
    lines = re.findall(r"^\| `?([^|`]+)`? \| (.*(?:[.\d]+ / ){3}.*) \|$", text, re.MULTILINE)
    assert len(lines) == 5
    for name, cells in lines:
        for kind, cell in zip(head, cells.split(" | "), strict=True):
            expected = [errors.get((name, kind, tensor)) for tensor in tensors]
            if expected[0] is None:
                assert cell == "not given", (name, kind)
                continue
            found = [float(number) for number in cell.split(" / ")]
            assert all(abs(a - b) <= 5.1e-5 for a, b in zip(found, expected, strict=True)), (name, kind)


def test_every_command_has_its_row():
    pytest.importorskip("typer")
    import typer

    from sagebwd.commands.main import app

    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `sagebwd ([\w-]+)", text, re.MULTILINE)) == set(typer.main.get_command(app).commands)


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


GRID = ROOT / "docs" / "results" / "grid"
INTERVAL = r"[+-]\.\d{3} to [+-]\.\d{3}(?!\d)"


def spelt(interval, digits=3):
    """An interval of gaps as documents have it."""
    return " to ".join(f"{end:+.{digits}f}" for end in interval).replace("0.", ".")


def gaps_of(name):
    """By variant, over every seed of a cell of the grid."""
    from sagebwd.training.gaps import gaps

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
    pattern = r"^\| `(\w+)` \| (no )?QK-norm, (16|131)K \| (\S+) \((\S+ to \S+)\) \| (\d+) \| (\S+) \| (.*) \|$"
    lines = re.findall(pattern, text, re.MULTILINE)
    assert len(lines) >= 8
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    cells = {
        name: re.search(rf"^\| `{name}`[^|]* \| ([+-]\..*) \|$", readme, re.MULTILINE).group(1).split(" | ")
        for name in ("mixed", "token", "paper")
    }
    for recipe, no, tokens, gap, between, pairs, p, commits in lines:
        small = tokens == "16"
        cell = "fp32-sums" if recipe == "mixed" else "no-qknorm" if no else "qknorm"
        name = f"{cell}-{'small' if small else 'large'}"
        row = gaps_of(name)[recipe]
        expected = f"{row.mean:+.4f}".replace("0.", "."), spelt(row.interval, 4), str(len(row.gaps)), row.commits
        assert (gap, between, pairs, tuple(re.findall("`(.*?)`", commits))) == expected, name
        assert p == f"{row.p:.4f}".replace("0.", ".")
        if not no:
            text = f"{row.mean:+.3f}".replace("0.", ".") + f" ({spelt(row.interval)})"
            assert cells[recipe][0 if small else 1] == text
            assert set(re.findall("`(.*?)`", commits)) <= set(re.findall("`(.*?)`", cells[recipe][2]))
            if (recipe, small) == ("token", True):
                said = f"is equivalent to full precision within .02 nats (p = {row.p:.2f})".replace("0.", ".")
                assert said in " ".join(readme.split())


@pytest.mark.parametrize("folder", ["500-steps", "120-steps"])
def test_losses_of_the_325m_model_are_those_of_the_files(folder):
    from sagebwd.training.packed import read

    page = {"500-steps": "log/2026-11-25-pretraining.md", "120-steps": "results/pretraining-runs.md"}[folder]
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    text = text[text.index(f"`docs/results/325m/{folder}`") :]
    table = text[text.index("| held-out loss at step (tokens) |") :].split("\n\n")[0]
    heading, _, *lines = (line.split("|")[2:-1] for line in table.splitlines())
    steps = [int(cell.split("(")[0]) for cell in heading]
    assert len(steps) >= 6
    losses = {}
    for run in read(ROOT / "docs" / "results" / "325m" / folder):
        found = {line["step"]: line["held_out_loss"] for line in run["metrics"] if "held_out_loss" in line}
        losses[run["run"]] = [found[step] for step in steps]
    full, recipe = losses.values()
    for line, expected in zip(lines, [full, recipe, [b - a for a, b in zip(full, recipe)]], strict=True):
        assert [float(cell.strip(" *")) for cell in line] == [round(x, 4) for x in expected]


def test_links_between_documents_lead_somewhere():
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def anchors(document):
    """The headings of a document as GitHub's links name them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_links_to_sections_lead_to_a_heading():
    for document in DOCUMENTS:
        for link, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text(encoding="utf-8")):
            assert anchor in anchors(document.parent / link if link else document), f"{document.name}: {link}#{anchor}"


def commands():
    """Command lines of the documents, in blocks of shell and in the text: where each stands, and its words."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        lines += [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
        variables: dict[str, str] = {}
        for line in lines:
            for name, value in re.findall(r"""\b([A-Z])=("[^"]*"|[^\s;]+)""", line):
                variables[name] = Template(value.strip('"')).safe_substitute(variables)
            line = Template(line).safe_substitute(variables)
            if started := re.match(
                r"(?:\w+=\S+ )*((?:torchrun|accelerate launch) .*-m sagebwd\.cli|python -m|sagebwd) ", line
            ):
                words = shlex.split(line[started.end() :], comments=True)
                found.append((str(document.relative_to(ROOT)), started.group(1) != "python -m", words))
    return found


def test_commands_in_the_documents_are_understood():
    """Every module exists; every command has the options that it is given, every config is there and has the keys."""
    typer = pytest.importorskip("typer")

    from sagebwd.commands.main import app
    from sagebwd.training.config import Config, load
    from sagebwd.training.finetune_config import Finetuning

    known = typer.main.get_command(app).commands
    tried = 0
    for where, of_sagebwd, (name, *words) in commands():
        if not of_sagebwd:
            if name not in ("pytest", "pip"):
                assert importlib.util.find_spec(name), f"{where}: there is no module {name}"
            continue
        assert name in known, f"{where}: there is no command {name}"
        if not words or words == ["--help"]:
            continue
        try:
            given = known[name].make_context(name, list(words)).params
        except Exception as error:
            if type(error).__name__ != "MissingParameter":
                pytest.fail(f"{where}: {name}: {error}")
            continue
        config = given.get("config")
        if config is not None and (ROOT / config).is_relative_to(ROOT / "configs") and config.stem.islower():
            settings = [setting for setting in given["setting"] or [] if not setting.split("=")[1].isupper()]
            load(ROOT / config, settings, Finetuning if name == "finetune" else Config)
        tried += 1
    assert tried >= 40


def blocks():
    """Python of the documents: where it stands, what the comment above it says of it (or nothing), the code."""
    found = []
    pattern = re.compile(r"(?:^<!-- *(.*?) *-->\n)?^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    for document in DOCUMENTS:
        text, before = document.read_text(encoding="utf-8"), ""
        for block in pattern.finditer(text):
            line = text.count("\n", 0, block.start(2))
            mark, code = block.group(1) or "", block.group(2)
            if mark == "continues":
                mark, code = "", before + code
            found.append((f"{document.relative_to(ROOT)}:{line}", mark, code))
            before = code
    return found


BLOCKS = blocks()


def is_missing(need):
    """Whether this machine lacks what a block's mark says that it needs; the mark has to be one of these."""
    if need == "a GPU":
        return not torch.cuda.is_available()
    if need in ("a download", "a build"):  # tests/tools/test_kernels_repo.py runs the latter
        return True
    accepted = "a GPU, a download, a build, or a package's name"
    assert need.isidentifier(), f"'needs {need}' is not understood; accepted: {accepted}"
    return importlib.util.find_spec(need) is None


@pytest.mark.parametrize(("mark", "code"), [block[1:] for block in BLOCKS], ids=[block[0] for block in BLOCKS])
def test_code_in_the_documents_runs_as_printed(mark, code, tmp_path):
    if mark:
        assert mark.startswith("needs "), f"<!-- {mark} -->: accepted are 'needs ...' and 'continues'"
        assert mark != "needs a GPU" or "cuda" in code, "says that it needs a GPU, and names no device"
        if is_missing(mark.removeprefix("needs ")):
            pytest.skip(mark)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT / "src"), environment.get("PYTHONPATH", "")])
    outcome = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
        env=environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr


def test_most_code_in_the_documents_needs_nothing():
    assert len(BLOCKS) >= 8
    assert sum(bool(mark) for _, mark, _ in BLOCKS) <= len(BLOCKS) / 3
