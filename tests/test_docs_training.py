"""Numbers of the pages of trained models, cell by cell, from the files that they name."""

import json
import re
import statistics
from pathlib import Path
from statistics import median

import pytest

from lab.training.gaps import by_step, gaps, interval
from lab.training.packed import read
from sagebwd.diagnostics import layers, summary
from sagebwd.diagnostics.tables import LABELS
from sagebwd.diagnostics.trace import OUTPUTS
from tests.test_docs_results import spelt

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


PAGE = "docs/results/pretraining.md"
RATES = {"1e-4": "lr-0.0001", "1e-3": "lr-0.001"}  # of the model trained on, as pages have them, and the folders


def with_interval(value, between):
    """A gap of the model trained on, as pages have it."""
    number = f"{value:+.5f}".replace("0.", ".", 1)
    return f"{number} ({spelt(between, 5)})" if between else number


def trained_on(rate, count):
    """What one of `lab.training.gaps`' functions finds in a rate's folder, by own attention and of the weights."""
    folders = [ROOT / "docs" / "results" / "continued" / RATES[rate]]
    return zip(*(count(folders, margin=0.001, in_full_precision=exact) for exact in (False, True)), strict=True)


def test_gaps_of_a_model_trained_on_are_those_of_the_files():
    readme, questions, index, limits, verdicts = (
        " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for name in ("README.md", "docs/questions.md", "docs/index.md", "docs/limits.md", PAGE)
    )
    expected, found = [], {}
    for rate in RATES:
        for own, weights in trained_on(rate, gaps):
            found[rate, own.variant] = own, weights
            cells = [f"`{own.variant}`", rate]
            for row in (own, weights):
                cells += [with_interval(row.mean, row.interval), "" if row.p is None else f"{row.p:.4f}".lstrip("0")]
            expected.append([*cells, str(len(own.gaps)), ", ".join(f"`{commit}`" for commit in own.commits)])
    lines = re.findall(r"^\| (`[\w ]+` \| 1e-\d \| .*) \|$", (ROOT / PAGE).read_text(encoding="utf-8"), re.MULTILINE)
    assert [[cell.strip() for cell in line.split("|")] for line in lines] == expected
    own = {name: with_interval(row.mean, row.interval) for (rate, name), (row, _) in found.items() if rate == "1e-4"}
    for name in ("mixed", "token", "paper"):
        assert own[name] in readme, name
    assert own["full precision repeated"] in verdicts
    assert own["paper"] in index
    assert f"does not ({own['paper'].replace(' (', ', ')}" in verdicts
    assert own["paper"].replace("(", "(95% ") in questions
    # what is said of equivalence and of margins
    assert all(row.p < 0.05 for name in ("mixed", "token") for row in found["1e-4", name])
    paper, weights = found["1e-4", "paper"]
    least, of_weights = (f"{row.interval[0]:.5f}".lstrip("0") for row in (paper, weights))
    assert f"by at least {least} by its own attention, which is more than the margin, " in verdicts
    assert f"and by at least {of_weights} in its weights, whose gap may be either side of .001" in verdicts
    assert paper.interval[0] > 0.001
    assert weights.interval[0] < 0.001 < weights.interval[1]
    at_1e_3 = {name: row for (rate, name), (row, _) in found.items() if rate == "1e-3"}
    assert {name for name, row in at_1e_3.items() if row.interval[0] > 0} == {"paper"}
    least = f"{at_1e_3['paper'].interval[0]:.5f}".lstrip("0")
    assert f"At 1e-3 `paper` is worse too**, by at least {least}" in verdicts
    low, high = (f"{end:+.3f}".replace("0.", ".") for end in at_1e_3["token"].interval)
    assert f"that of `token` from {low} to {high}" in verdicts
    mixed = at_1e_3["mixed"]
    low, high = (f"{end:+.3f}".replace("0.", ".") for end in mixed.interval)
    assert f"a gap of `mixed` between {low} and {high}" in questions
    assert f"these leave `mixed` a gap of {low} to {high}" in limits
    assert f"The interval of `mixed` reaches from {low} to {high}" in verdicts


@pytest.mark.parametrize("rate", RATES)
def test_gaps_by_step_are_those_of_the_files(rate):
    text = (ROOT / "docs" / "results" / "continued.md").read_text(encoding="utf-8")
    text = text[text.index(f"## By step, at {rate}\n") :].split("\n## ")[0]
    lines = re.findall(r"^\| (`[\w ]+` \| \d+ \| .*) \|$", text, re.MULTILINE)
    expected = []
    for pair in trained_on(rate, by_step):
        cells = [f"`{pair[0].gap.variant}`", str(pair[0].step)]
        for at in pair:
            cells.append(with_interval(at.gap.mean, at.gap.interval if at.step else None))
            cells.append(with_interval(statistics.mean(at.changes), interval(at.changes)) if at.changes else "")
        expected += [cells] if len(pair[0].gap.gaps) > 1 else []
    assert len(expected) in (15, 20)
    assert [[cell.strip() for cell in line.split("|")] for line in lines] == expected
    stated = re.findall(r"[+-]\.\d{5}(?: \([+-]\.\d{5} to [+-]\.\d{5}\))?", text.split("\n\n")[-1])
    seeds = [f"{gap:+.5f}".replace("0.", ".", 1) for own, _ in trained_on(rate, by_step) for gap in own.gap.gaps]
    assert stated
    for number in stated:
        assert number in " ".join(cell for cells in expected for cell in cells) or number in seeds, number


def test_losses_of_the_rates_that_were_tried_are_those_of_the_files():
    text = " ".join((ROOT / "docs" / "results" / "continued.md").read_text(encoding="utf-8").split())
    folder, losses = ROOT / "docs" / "results" / "continued", {}
    for name in ("lr-0.0001", "lr-0.001", "rates/lr-0.001", "rates/lr-0.003"):
        for run in read(folder / name):
            if run["run"].endswith("full precision"):
                for line in run["metrics"]:
                    if "held_out_loss" in line:
                        losses.setdefault((name, line["step"]), []).append(line["held_out_loss"])

    def of(name, step):
        least, most = (f"{end(losses[name, step]):.4f}" for end in (min, max))
        return least if least == most else f"{least} to {most}"

    assert f"full precision ends at {of('lr-0.0001', 500)} and begins at {of('lr-0.0001', 0)}" in text
    assert f"end at {of('rates/lr-0.001', 150)} at 1e-3 and at {of('rates/lr-0.003', 150)} at 3e-3" in text
    assert f"it is {of('lr-0.001', 125)} at step 125 and {of('lr-0.001', 500)} at the end" in text
    assert max(losses["lr-0.001", 500]) < losses["lr-0.001", 0][0] < losses["rates/lr-0.003", 150][0]


def test_gaps_at_other_widths_are_those_of_the_files():
    text = (ROOT / "docs" / "results" / "pretraining-widths.md").read_text(encoding="utf-8")
    folder = ROOT / "docs" / "results" / "widths"
    pattern = r"^\| (256|96|192/128) \| (\d) \| (\S+) \((.*)\) \| (\d) \| (\S+) \| (.*) \|$"
    lines = re.findall(pattern, text, re.MULTILINE)
    assert len(lines) == 3
    verdicts = (ROOT / "docs" / "results" / "pretraining.md").read_text(encoding="utf-8")
    assert ", ".join(f"{mean} ({between})" for _, _, mean, between, *_ in lines) in verdicts
    shown, logits = 0.054, {}
    for width, heads, mean, between, pairs, p, each in lines:
        name = width.replace("/", "-")
        (row,) = (row for row in gaps([folder / name]) if row.variant == "mixed")
        expected = [f"{gap:+.4f}".replace("0.", ".") for gap in (row.mean, *row.gaps)]
        assert [mean, *each.split()] == expected
        assert (between, int(pairs), p) == (spelt(row.interval, 4), len(row.gaps), f"{row.p:.4f}".replace("0.", "."))
        assert row.interval[0] < 0 < row.interval[1] < shown
        assert row.p > 0.05
        assert row.commits == ("3bed015",)
        ended = [run["result"] for run in read(folder / name) if run["result"] is not None]
        logits[width] = [result["largest_logit"] for result in ended]
        assert {result["steps"] for result in ended} == {800}
        assert f"model.heads={heads} --set model.head_dim={width.partition('/')[0]}" in text
    assert f"grow there to {min(logits['192/128']):.0f} to {max(logits['192/128']):.0f}," in text
    assert max(*logits["256"], *logits["96"]) < 18
    twice = [
        {
            (row["seed"], row["variant"]): f"{row['held_out_loss']:.4f}"
            for row in json.loads((folder / name / "comparison.json").read_text(encoding="utf-8"))["outcomes"]
        }
        for name in ("256-again", "256")
    ]
    expected = [losses[4, variant] for variant in ("full precision", "mixed") for losses in twice]
    assert re.findall(r"\b5\.\d{4}\b", text) == expected
