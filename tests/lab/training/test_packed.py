"""Runs in one file, and their evaluations as a table."""

import json

import pytest

from lab.training import packed
from lab.training.run_dir import COMPARISON, DIVERGED, METRICS, RESULT


@pytest.fixture
def runs(tmp_path):
    """Three runs of a comparison: one has ended, one has diverged, one has not come to an end."""
    lines = [{"step": 1, "tokens": 64, "loss": 2.5}, {"step": 2, "tokens": 128, "held_out_loss": 0.1 + 0.2}]
    ends = {"token": (RESULT, {"seconds": 1 / 3}), "a long name": (DIVERGED, {"diverged": "at step 3"}), "late": None}
    for name, end in ends.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        if end:
            (tmp_path / "runs" / name / end[0]).write_text(json.dumps(end[1]))
    outcomes = [{"variant": "token"}, {"variant": "a long name"}]
    (tmp_path / "runs" / COMPARISON).write_text(json.dumps({"outcomes": outcomes}))
    return tmp_path / "runs"


def test_what_was_packed_comes_back(runs, tmp_path):
    packed.pack(runs, tmp_path / "packed")
    assert [run["run"] for run in packed.read(tmp_path / "packed")] == ["token", "a long name", "late"]
    assert (tmp_path / "packed" / COMPARISON).read_text() == (runs / COMPARISON).read_text()
    packed.unpack(tmp_path / "packed", tmp_path / "again")
    for path in runs.glob("*/*.json*"):
        again = (tmp_path / "again" / path.relative_to(runs)).read_text()
        assert [json.loads(line) for line in again.splitlines()] == [
            json.loads(line) for line in path.read_text().splitlines()
        ]
    assert len(list((tmp_path / "again").glob("*/*"))) == len(list(runs.glob("*/*")))
    with pytest.raises(ValueError, match=r"metrics\.jsonl is there already; give another folder"):
        packed.unpack(tmp_path / "packed", tmp_path / "again")
