"""The documents do not drift from the code."""

import ast
import json
import re
from pathlib import Path

import pytest

from sagebwd import Recipe

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_named_in_documents_exist(document):
    named = re.findall(r"`((?:src|tests|configs|docs|benchmarks)/[\w./-]+)`", document.read_text(encoding="utf-8"))
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing


def test_recipes_named_in_method_parse():
    text = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
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
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [" ".join(block.split()) for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL)]
    assert len(quoted) >= 15
    patterns = re.compile("|".join(f"(?:{pattern})" for pattern in messages_in_source()))
    assert not [message for message in quoted if not patterns.fullmatch(message)]


def test_speeds_in_troubleshooting_are_those_of_the_file():
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    (name,) = re.findall(r"`(benchmarks/results/attention_[\w./-]+json)`", text)
    times = {
        (row["recipe"], row["tokens"], row["head_dim"], row["causal"]): row
        for row in json.loads((ROOT / name).read_text(encoding="utf-8"))["rows"]
        if (row["impl"], row["direction"]) == ("hopper", "fwd+bwd") and row["kv_heads"] * row["head_dim"] == 2048
    }
    lines = re.findall(r"^\| `(\w+)` \| (\d+)K \| (.*) \|$", text, re.MULTILINE)
    assert len(lines) == 12
    for recipe, tokens, cells in lines:
        columns = [
            times[recipe, 1024 * int(tokens), head_dim, causal] for head_dim in (64, 128) for causal in (False, True)
        ]
        expected = [f"{row['fa2_ms'] / row['ms']:.2f} / {row['cudnn_ms'] / row['ms']:.2f}" for row in columns]
        assert cells.split(" | ") == expected


def test_what_deterministic_costs_in_troubleshooting_is_the_files():
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    pattern = r"a backward that takes ([\d.]+) to ([\d.]+) times as long.*?\[file\]\((.*?)\)"
    ((least, most, link),) = re.findall(pattern, text, re.DOTALL)
    rows = json.loads((ROOT / "docs" / link).read_text(encoding="utf-8"))["rows"]
    times = {
        (row["recipe"], row["head_dim"], row["tokens"], row["causal"]): row["ms"]
        for row in rows
        if (row["impl"], row["direction"]) == ("hopper", "bwd")
    }
    ratios = [
        ms / times["token_fp8", *shape] for (recipe, *shape), ms in times.items() if recipe.endswith("(deterministic)")
    ]
    assert len(ratios) == 8
    assert (least, most) == (f"{min(ratios):.2f}", f"{max(ratios):.2f}")


def test_links_between_documents_lead_somewhere():
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            assert (document.parent / link).exists(), f"{document.name}: {link}"
