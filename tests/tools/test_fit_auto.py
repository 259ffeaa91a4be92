"""`tools.fit_auto` on the results files that the package's model was fitted from."""

import json
import re

import pytest

from sagebwd.auto.fit import fitted
from sagebwd.auto.model import FORWARD
from tools import fit_auto


@pytest.fixture(scope="module")
def rows():
    """All timings of an H100."""
    found = [fit_auto.rows_of(path) for path in fit_auto.files_of_model()]
    return [row for facts, rows in found for row in rows if facts["gpu"] == "NVIDIA H100 80GB HBM3"]


def test_the_page_has_what_is_held_out(rows):
    """Cell by cell: of files by their commits, of sizes by their power of two, and of numbers of tokens."""
    text = (fit_auto.ROOT / "docs" / "results" / "auto-model.md").read_text(encoding="utf-8")
    found = {name: fit_auto.held_out(rows, part_of) for name, part_of in fit_auto.PARTS.items()}
    by_commit = {str(name).rpartition("_")[2]: score for name, score in found["file"].items()}
    pattern = r"^\| (the file|calls of) `?(?:2\^)?(\w+)`?( elements| tokens)? \| (.*) \|$"
    lines = re.findall(pattern, text, re.MULTILINE)
    assert len(lines) == 10
    for what, part, unit, cells in lines:
        if what == "the file":
            ours, torch = by_commit[f"{part}.json"]
        else:
            ours, torch = found["tokens" if unit == " tokens" else "size 2^"][int(part)]
        count, *wanted = map(float, [*ours.cells()[:3], torch.cells()[2]])
        said, *printed = map(float, cells.split(" | "))
        assert said == count
        assert printed == pytest.approx(wanted, abs=0.0011), part


def test_a_score_counts_what_is_lost():
    score = fit_auto.Score()
    for chosen, least in ((1.0, 1.0), (1.02, 1.0), (2.0, 1.0)):
        score.add(chosen, least)
    assert score.cells() == ["3", "0.667", f"{2.04 ** (1 / 3):.3f}", "2.000"]
    assert fit_auto.Score().cells()[0] == "0"


def test_peers_count_among_what_is_chosen():
    """A call that mixed takes 1.2 ms of and FlashAttention-4 .6 is lost where the model does not know the peer."""
    path = fit_auto.RESULTS / "timings_h200_2026-11-28_214a762.json"
    _, rows = fit_auto.rows_of(f"{path}:window")
    times = fitted(rows, "", "")
    alone = [one._replace(full={name: cost for name, cost in one.full.items() if name != "fa4"}) for one in times]
    fewer, all_of = (fit_auto.choices(of, rows)["window", FORWARD] for of in (alone, times))
    assert len(all_of.losses) == len(fewer.losses) == 24
    assert all_of.right > fewer.right
    without = [one._replace(full={"cudnn": one.full["cudnn"]}) for one in times]
    assert sum(fit_auto.choices(without, rows)["window", FORWARD].losses) > 2 * sum(all_of.losses)


def test_the_command_prints_residuals_and_what_is_held_out(capsys, tmp_path, monkeypatch):
    (path,) = fit_auto.RESULTS.glob("crossings_h200_2026-11-26_3f70cad.json")
    monkeypatch.setattr(fit_auto, "MODEL", tmp_path / "model.json")
    monkeypatch.setattr(fit_auto, "PARTS", {"tokens": fit_auto.PARTS["tokens"]})
    fit_auto.main([str(path), "--hold-out", "--write"])
    printed = capsys.readouterr().out
    for text in ("NVIDIA H200: log(fitted / timed)", "causal training low", "tokens 8192", "torch always", "wrote"):
        assert text in " ".join(printed.split())
    assert list(json.loads(fit_auto.MODEL.read_text())) == ["NVIDIA H200"]
