"""Checkpoints of one model, traced: the tables of their errors."""

import json
import shutil
from pathlib import Path

import pytest

from lab.studies import checkpoints
from lab.studies.checkpoints import Checkpoint, looseness, markdown

RESULTS = Path(__file__).parents[3] / "docs" / "results"
DEMO = f"demo:240={RESULTS / 'trace_demo.json'}"


def cells(table, first):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith(first)]


def test_tables_are_the_files_figures():
    errors, ratios, magnitudes, bound, attribution = markdown([Checkpoint.read(DEMO)]).split("\n\n")
    content = json.loads((RESULTS / "trace_demo.json").read_text(encoding="utf-8"))
    paper, token = (next(row for row in content["layers"] if row["recipe"] == name) for name in ("paper", "token"))
    line = cells(errors, "| demo | 240 | 0 | `paper`")[0]
    assert line[4:12] == [f"{error:.4f}" for error in paper["relative_l2"].values()]
    assert line[12].split()[0] == "dQ"
    assert line[12].split()[-1] == "dP"
    means, spread = cells(ratios, "| demo | 240 | 0 | `token` / `paper`")[0][4].split(" ", 1)
    heads = {(row["recipe"], row["head"]): row["relative_l2"]["ds"] for row in content["rows"] if row["layer"] == 0}
    each = [heads["token", head] / heads["paper", head] for head in (0, 1)]
    assert means == f"{sum(each) / 2:.2f}"
    assert spread == f"({min(each):.2f} to {max(each):.2f})"
    line = cells(magnitudes, "| demo | 240 | 0 |")[0]
    assert line[7] == f"{token['ds_bound'] / token['rms']['ds']:.1f}"
    assert bound == "Bound over RMS(dS), 6 heads: 19.4 to 40.0, median 32.0; it holds on 6."
    assert len(cells(attribution, "| demo | 240 | 2 |")) == 10


def test_a_head_over_the_bound_is_counted():
    one = Checkpoint.read(DEMO)
    one.rows[0]["ds_bound"] = one.rows[0]["rms"]["ds"] / 2
    assert min(looseness(one)) == 0.5
    assert "it holds on 5." in markdown([one])


def test_the_command_prints_and_draws(tmp_path, capsys):
    picture = tmp_path / "folder" / "plot.png"
    later = tmp_path / "later.json"
    shutil.copy(RESULTS / "trace_demo.json", later)
    checkpoints.main([DEMO, f"demo:480={later}", "--plot", str(picture)])
    printed = capsys.readouterr().out
    assert "| demo | 480 | 2 |" in printed
    assert picture.stat().st_size > 5000


def test_recipes_can_be_chosen(capsys):
    checkpoints.main([DEMO, "--recipe", "token"])
    printed = capsys.readouterr().out
    assert "`token`" in printed
    assert "`paper`" not in printed
    with pytest.raises(SystemExit):
        checkpoints.main([DEMO, "--recipe", "fine"])
    assert "--recipe 'fine' is not in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("demo=file", "expected MODEL:STEP=FILE"),
        ("demo:late=file", "expected MODEL:STEP=FILE"),
        ("demo:1=/no/such", "/no/such: there is no such file"),
        (f"demo:1={__file__}", "not a file of sagebwd trace --output"),
    ],
)
def test_bad_arguments_are_one_line(text, message, capsys):
    with pytest.raises(SystemExit):
        checkpoints.main([text])
    assert message in capsys.readouterr().err.splitlines()[-1]
