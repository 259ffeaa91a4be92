"""docs/trained-model.md has the numbers of the file that it names."""

import re
from pathlib import Path
from statistics import median

import pytest

from sagebwd.analysis import layers, summary
from sagebwd.analysis.tables import LABELS
from sagebwd.analysis.trace import OUTPUTS

ROOT = Path(__file__).parent.parent
RECIPES = ("mixed", "token", "paper")


@pytest.fixture(scope="module")
def rows():
    return summary.read(ROOT / "docs" / "results" / "trace_smollm2.json.xz")


@pytest.fixture(scope="module")
def sections():
    """The page's tables by heading: the cells of each line below a table's head."""
    text = (ROOT / "docs" / "trained-model.md").read_text(encoding="utf-8")
    found = {}
    for part in text.split("\n## ")[1:]:
        lines = re.findall(r"^\| (.*) \|$", part, re.MULTILINE)[2:]
        found[part.splitlines()[0]] = [line.split(" | ") for line in lines]
    return found


def errors(values, digits=4):
    return " / ".join(f"{value:.{digits}f}" for value in values)


def test_over_all_layers(rows, sections):
    lines = [
        [f"`{recipe}`", *(errors(own[index] for own in found.values()) for index in (0, 1))]
        for recipe, found in summary.overall(rows).items()
    ]
    assert sections["Over all layers"] == lines
    text = (ROOT / "docs" / "trained-model.md").read_text(encoding="utf-8")
    said = re.search(r"error of dQ is ([\d.]+) times .*? `mixed`,\s([\d.]+) .*? and ([\d.]+) times", text, re.DOTALL)
    overall = summary.overall(rows)
    ratios = [overall[f"{name}(smooth_k=False)"]["dq"][0] / overall[name]["dq"][0] for name in RECIPES]
    assert said.groups() == tuple(f"{ratio:.2f}" for ratio in ratios)


def test_by_the_weight_of_the_first_key(rows, sections):
    found = summary.by_weight(rows, layers.idle(rows))
    lines = sections["By the weight of the first key"]
    assert [line[0] for line in lines] == [f"{a:g} to {b:g}" for a, b in zip(summary.WEIGHTS, summary.WEIGHTS[1:])]
    for line, most in zip(lines, summary.WEIGHTS[1:]):
        full = found["full", most]
        facts = f"{median(row.first_value for row in full):.2f}", f"{median(row.largest_logit for row in full):.0f}"
        medians = [
            errors(median(row.relative_l2[name] for row in found[recipe, most]) for name in OUTPUTS)
            for recipe in RECIPES
        ]
        assert line[1:] == [str(len(full)), *facts, *medians]


def test_idle_heads(rows, sections):
    assert set(layers.idle(rows)) == {(18, 8)}
    heads = {row.recipe: row for row in layers.over_windows(rows) if (row.layer, row.head) == (18, 8)}
    for name, cells in sections["Idle heads"]:
        assert cells == errors(heads[name.strip("`")].relative_l2[tensor] for tensor in OUTPUTS)


def test_layers(rows, sections):
    found = {(row.recipe, row.layer): row for row in layers.means(rows)}
    lines = sections["What the layers look like"]
    assert len(lines) == 30
    for line in lines:
        full, *own = (found[name, int(line[0])] for name in ("full", *RECIPES))
        heaviest = f"{full.sink}, {full.sink_weight:.2f}"
        facts = [f"{full.first_weight:.2f}", f"{full.first_value:.2f}", heaviest, f"{full.largest_logit:.0f}"]
        assert line[1:] == facts + [errors((row.relative_l2[name] for name in OUTPUTS), 3) for row in own]


def test_shares_of_products(sections):
    found = summary.shares(summary.read(ROOT / "docs" / "results" / "trace_smollm2_attribution.json.xz"))
    assert sections["Which product makes the error"] == [
        [f"`{recipe}`", LABELS.get(source, source.upper()), " / ".join(f"{share:.0%}" for share in own.values())]
        for (recipe, source), own in found.items()
    ]
